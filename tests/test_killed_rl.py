"""RL that is killed at random moments, interrupted, or left without room goes on as if nothing was.

Kills come before any touch of any file of the run, or at any time; see rl_worker.die.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from coa.io.runs import read_jsonl
from rl_worker import settings
from test_rl import checked, files, lines, train

WORKER = Path(__file__).with_name("rl_worker.py")
Worker = subprocess.Popen[str]
LONG = ("rl.updates=5", "rl.checkpoint_every=2", "check.temperature=1.0")


def start(*given: str, program: tuple[str, ...] = (str(WORKER),), **options: object) -> Worker:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parent)}
    return subprocess.Popen(
        [sys.executable, *program, *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["dapo", "ppo"])
def test_killed_again_and_again_it_writes_what_it_writes_undisturbed(
    tiny_model: Path, tmp_path: Path, kind: str, seed: int
) -> None:
    more = (*LONG, *checked(tmp_path), f"rl.preset={kind}")
    if kind == "ppo":
        more = (*more, "rl.passes=2", "rl.loss.kl=0.01")
    train(tiny_model, tmp_path / "whole", *more)
    worker = start("--killed", str(seed), str(tiny_model), str(tmp_path / "killed"), *more)
    out, err = worker.communicate(timeout=600)
    assert worker.returncode == 0, err
    assert int(out) >= 3, "too few kills to mean anything"
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    left = [path.name for path in (tmp_path / "killed").iterdir() if path.name.startswith(".")]
    assert left == [".lock"]


def wait_for(path: Path, worker: Worker, updates: int) -> None:
    """Until so many updates are in the metrics of a run."""
    for _ in range(6000):
        if path.is_file() and len(list(read_jsonl(path, growing=True))) >= updates:
            return
        assert worker.poll() is None, worker.communicate()[1]
        time.sleep(0.02)
    raise AssertionError("it does not train")


@pytest.mark.slow
def test_sigterm_writes_a_checkpoint_and_the_run_goes_on_to_the_same_end(
    tiny_model: Path, tmp_path: Path
) -> None:
    more = ("rl.updates=30", "rl.checkpoint_every=100", "rl.lr=1e-4")
    train(tiny_model, tmp_path / "whole", *more)
    out, recipe = tmp_path / "run", tmp_path / "recipe.toml"
    recipe.touch()
    program = ("-m", "coa", "rl", str(recipe))
    worker = start(*settings(tiny_model, out, *more), program=program)
    wait_for(out / "metrics.jsonl", worker, 2)
    worker.send_signal(signal.SIGTERM)
    _, err = worker.communicate(timeout=120)
    said = f"coa: stopped (SIGTERM) after update {len(lines(out))} of 30; everything up to there is"
    assert worker.returncode == 143 and err.splitlines()[-1].startswith(said)
    saved = [path.name for path in (out / "checkpoints").iterdir()]
    done = len(lines(out))
    assert saved == [f"update-{done:07d}"] and done < 30
    train(tiny_model, out, *more)
    assert files(out) == files(tmp_path / "whole")


def no_room(limit: int) -> None:
    """A file may not become larger: what a full disk does to a large file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@pytest.mark.slow
def test_a_disk_that_fills_during_a_checkpoint_is_one_line_and_the_last_checkpoint_is_whole(
    tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    more = ("rl.updates=5", "rl.checkpoint_every=2")
    train(tiny_model, tmp_path / "whole", *more)
    first = start(str(tiny_model), str(out), *more)
    wait_for(out / "metrics.jsonl", first, 3)
    first.kill()
    first.communicate()
    checkpoints = out / "checkpoints"
    size = max(path.stat().st_size for path in checkpoints.rglob("optimizer.pt"))
    full = start(str(tiny_model), str(out), *more, preexec_fn=lambda: no_room(size - 1000))
    _, err = full.communicate(timeout=120)
    assert full.returncode != 0
    assert "update-0000004: the checkpoint could not be written" in err.splitlines()[-1]
    assert "update-0000002 is the last whole one. Make room and give" in err.splitlines()[-1]
    assert [path.name for path in checkpoints.iterdir()] == ["update-0000002"]
    train(tiny_model, out, *more)
    assert files(out) == files(tmp_path / "whole")
