"""RL in two real processes (gloo): the result of one, and no process that waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

from test_rl import checked, lines, train
from test_sharded import SETTINGS

WORKER = Path(__file__).with_name("rl_worker.py")


TORCH = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def launch(
    model: Path, out: Path, *more: str, by: tuple[str, ...] = TORCH
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *by, str(WORKER), str(model), str(out), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parent)}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )


def close(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[k], expected[k]) for k in found)
    if isinstance(expected, float):
        return bool(found == pytest.approx(expected, rel=1e-3, abs=2e-5))
    return bool(found == expected)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("rl.refills=2",), id="dapo with refills and evaluations"),
        pytest.param(("rl.preset=ppo", "rl.passes=2", "rl.group_size=1"), id="ppo"),
        # Two rollouts, of which one has tokens to train: the other process has no row at all.
        pytest.param(
            ("rl.tasks_per_update=1", "rl.group_size=2", "rl.truncated=leave_out", "rl.refills=0"),
            id="a process without rows",
        ),
    ],
)
@pytest.mark.slow
def test_two_processes_do_what_one_does(
    tiny_model: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    # Small steps: rounding grows with training, and another token sampled is another run.
    more = (*more, "rl.lr=1e-3", "rl.updates=3", *checked(tmp_path))
    train(tiny_model, tmp_path / "one", *more)
    done = launch(tiny_model, tmp_path / "two", *more)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert len(one) == len(two) == 6
    for found, expected in zip(two, one, strict=True):
        differ = {k for k in expected if not close(found.get(k), expected[k])}
        assert not differ - {"loss"}, (found, expected)
    assert (tmp_path / "two" / "adapter" / "manifest.json").is_file()
    again = launch(tiny_model, tmp_path / "two", *more)
    assert again.returncode == 0 and lines(tmp_path / "two") == two


@pytest.mark.slow
def test_weights_that_are_spread_over_processes_learn_the_same(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "fsdp.yaml"
    settings.write_text(SETTINGS)
    more = ("rl.lr=1e-3", "rl.updates=2", "rl.passes=2", "rl.loss.kl=0.01", *checked(tmp_path))
    train(tiny_model, tmp_path / "one", *more)
    by = ("accelerate.commands.launch", "--config_file", str(settings))
    done = launch(tiny_model, tmp_path / "two", *more, by=by)
    assert done.returncode == 0, done.stderr[-3000:]
    for found, expected in zip(lines(tmp_path / "two"), lines(tmp_path / "one"), strict=True):
        differ = {k for k in expected if not close(found.get(k), expected[k])}
        assert not differ - {"loss"}, (differ, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("reward.expression=test_rl_processes:fails_in_one",), "Another process of this run"),
        (("rl.lr=3",), "this was started with rl.lr 0.01"),
    ],
)
def test_what_ends_one_process_ends_all_of_them_with_a_line(
    tiny_model: Path, tmp_path: Path, more: tuple[str, ...], said: str
) -> None:
    if "rl.lr=3" in more:
        train(tiny_model, tmp_path / "run")
    done = launch(tiny_model, tmp_path / "run", *more)
    assert done.returncode != 0
    assert said in done.stderr or "out of order" in done.stderr, done.stderr[-3000:]


def fails_in_one(task: Any, trajectory: Any) -> float:
    if os.environ.get("RANK") == "1":
        raise ValueError("out of order")
    return 0.5
