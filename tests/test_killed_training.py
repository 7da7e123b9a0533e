"""`kill -9` at random moments of fine-tuning, again and again: the files do not show it.

A run is killed after a random update, a random moment later, so that some kills fall into an
update, some into a checkpoint, some before the first. It is started again until it is done. What it
leaves must be, byte for byte, what a run leaves that nobody disturbed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sft_worker import WORKER, surroundings, tiny_rows, tiny_settings

pytest.importorskip("torch")

from coa.train.sft import run_sft

pytestmark = pytest.mark.slow

KILLS = 5
"""Of each run."""
SEED = 6
RUNS: dict[str, dict[str, object]] = {
    "rows": {"checkpoint_every": 3},
    "packs": {"layout": "pack", "batch_size": 2, "checkpoint_every": 2, "schedule": "linear"},
    "all weights": {"full": True, "lr": 1e-3, "checkpoint_every": 3},
}


def content(directory: Path) -> dict[str, bytes]:
    """All files by name, but for the lock and what tells the time."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in ("timings.jsonl", ".lock")
    }


def one_life(model: Path, directory: Path, changes: dict[str, object], lives: int | None) -> int:
    """Train, for so many updates or to the end; returns the last update that was told."""
    words = [sys.executable, WORKER, str(model), str(directory), json.dumps(changes)]
    process = subprocess.Popen(words, env=surroundings(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = told = 0
    for line in process.stdout:
        last, told = int(line), told + 1
        if told == lives:
            time.sleep(random.uniform(0.0, 0.02))  # an update takes about as long
            os.kill(process.pid, signal.SIGKILL)
            break
    code = process.wait(120)
    assert code == (0 if lives is None else -signal.SIGKILL), f"ended with {code}"
    return last


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_killed_again_and_again_ends_in_the_same_bytes(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    changes = RUNS[name]
    whole = run_sft(tiny_settings(tiny_model, **changes), tiny_rows(), tmp_path / "whole")
    rng, reached = random.Random(f"{SEED} {name}"), list[int]()
    for left in range(KILLS, 0, -1):
        held = max([0, *(int(p.name[7:]) for p in (tmp_path / "killed").glob("checkpoints/u*"))])
        most = (whole.updates - held) // left - 1
        reached.append(
            one_life(tiny_model, tmp_path / "killed", changes, rng.randint(1, max(1, most)))
        )
        assert not (tmp_path / "killed" / "adapter").exists()
    one_life(tiny_model, tmp_path / "killed", changes, None)
    print(f"{name}: killed at updates {reached} of {whole.updates}")
    assert len(set(reached)) > 1
    found, expected = content(tmp_path / "killed"), content(tmp_path / "whole")
    assert found.keys() == expected.keys()
    # NOTE: manifest.json holds the commit and versions, which are the same within one test.
    assert [key for key in found if found[key] != expected[key]] == []
