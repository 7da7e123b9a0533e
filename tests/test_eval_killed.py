"""An evaluation that is killed again and again ends with the files of one that was not."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from coa.environments import make_tasks
from scripts import write_script
from tiny_model import make_tiny_model

pytestmark = pytest.mark.slow


def eval_command(settings: Sequence[str], out: str) -> list[str]:
    named = ["--tasks", "tasks.jsonl", "--out", out, "--prices", "1,0.1,5", "--json"]
    return [sys.executable, "-m", "coa", "eval", *named, *settings]


def files_of(directory: Path) -> dict[str, bytes]:
    """Results; what the clock says stands in other files."""
    apart = ("timings.jsonl", "latency.json", ".lock")
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name not in apart}


def killed_at(folder: Path, settings: Sequence[str], rollouts: int, delay_s: float) -> int:
    """Start the evaluation and kill it at work, when so many rollouts are in its file, or a little
    later; how many were there then. The one before may have left as many: that it has begun is
    seen by its own line in timings.jsonl."""
    path, timings = (folder / "killed" / name for name in ("trajectories.jsonl", "timings.jsonl"))
    begun = _count(timings, b'"event"')
    with subprocess.Popen(
        eval_command(settings, "killed"),
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while _count(timings, b'"event"') == begun or _count(path, b"\n") < rollouts:
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.002)
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it was killed"
    return _count(path, b"\n")


def _count(path: Path, what: bytes) -> int:
    return path.read_bytes().count(what) if path.is_file() else 0


def check_kills(folder: Path, settings: Sequence[str], rollouts: int, kills: int) -> None:
    """A whole evaluation, and one with so many kills at random moments: the same files."""

    def evaluate(out: str) -> None:
        command = eval_command(settings, out)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    evaluate("whole")
    rng = random.Random(7)
    moments = sorted(rng.randrange(rollouts * 9 // 10) for _ in range(kills))
    had = [killed_at(folder, settings, moment, rng.uniform(0, 0.05)) for moment in moments]
    assert had == sorted(had), "a kill lost rollouts that were done"
    assert not (folder / "killed" / "summary.json").exists()
    evaluate("killed")
    whole = files_of(folder / "whole")
    results = {"grammars.json", "manifest.json", "scores.jsonl", "summary.json"}
    assert whole.keys() == {*results, "trajectories.jsonl"}
    assert whole["trajectories.jsonl"].count(b"\n") == rollouts
    assert files_of(folder / "killed") == whole
    events = (folder / "killed" / "timings.jsonl").read_text()
    assert events.count('"event":"resumed"') == kills and events.count('"finished"') == 1


def test_ten_kills_of_five_hundred_tasks_change_nothing(tmp_path: Path) -> None:
    tasks = make_tasks("atlas-mhqa", "train", 500, seed=4)
    tasks.save(tmp_path / "tasks.jsonl")
    write_script(tmp_path / "model.jsonl", tasks)
    settings = ["--model", "scripted:model.jsonl", "--turn-tokens", "9999", "--context", "99999"]
    check_kills(tmp_path, [*settings, "--concurrency", "8"], rollouts=500, kills=10)


def test_kills_change_no_token_that_a_model_samples(tmp_path: Path) -> None:
    make_tasks("atlas-mhqa", "train", 40, seed=4).save(tmp_path / "tasks.jsonl")
    model = make_tiny_model(tmp_path / "model")
    settings = ["--model", f"hf:{model}", "--prompt", "compact", "--deterministic"]
    settings += ["--k", "2", "--temperature", "1", "--turn-tokens", "24", "--context", "400"]
    check_kills(tmp_path, [*settings, "--concurrency", "4"], rollouts=80, kills=3)
