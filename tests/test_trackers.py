"""Trackers, with the real packages where they are installed: what is logged can be read again."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coa.errors import ConfigError, MissingExtra
from coa.io.runs import Run
from coa.train.monitors import Tracker, check_tracker, figures, open_tracker
from coa.train.rl_stage import read_rl_recipe

RECORD: dict[str, Any] = {
    "update": 3,
    "reward": 0.5,
    "loss": math.nan,
    "lr": 2e-4,
    "rows": 61,
    "eval_accuracy": None,
    "done": True,
    "note": "text",
    "agents": {"think": 0.5, "plan": 0.25},
    "left_out": {"void": 2},
}


def test_the_finite_numbers_of_a_record_are_its_figures() -> None:
    assert dict(figures(RECORD)) == {
        "reward": 0.5,
        "lr": 2e-4,
        "rows": 61.0,
        "agents/think": 0.5,
        "agents/plan": 0.25,
        "left_out/void": 2.0,
    }


def test_none_writes_nothing(tmp_path: Path) -> None:
    check_tracker("none")
    tracker = open_tracker("none", tmp_path, "rl")
    tracker.log(1, RECORD)
    tracker.close()
    assert not list(tmp_path.iterdir())


def test_an_unknown_tracker_is_named_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"rl.log is 'tensorbord', expected .*'tensorboard'"):
        read_rl_recipe(None, ["rl.log=tensorbord"])


@pytest.mark.parametrize("log", ["tensorboard", "trackio"])
def test_a_package_that_is_missing_is_said_in_one_line(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch.utils.tensorboard", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)  # so that importing it fails
    with pytest.raises(MissingExtra) as caught:
        check_tracker(log)
    with pytest.raises(MissingExtra):
        open_tracker(log, tmp_path, "rl")
    assert str(caught.value) == (
        f"rl.log = '{log}' needs packages that are not installed. "
        f'Install them with: pip install "chain-of-agents[{log}]"'
    )


class Full:
    """A tracker whose disk is full after the first update."""

    def __init__(self) -> None:
        self.updates: list[int] = []

    def log(self, update: int, record: Any) -> None:
        if update > 1:
            raise OSError("No space left on device")
        self.updates.append(update)

    def close(self) -> None:
        raise AssertionError("it was given up")


def test_a_tracker_that_fails_is_given_up_with_one_warning_and_the_run_goes_on() -> None:
    broken = Full()
    tracker = Tracker(broken)  # type: ignore[arg-type]
    tracker.log(1, RECORD)
    with pytest.warns(UserWarning) as caught:
        tracker.log(2, RECORD)
        tracker.log(3, RECORD)
        tracker.close()
    assert broken.updates == [1]
    assert [str(warning.message) for warning in caught] == [
        "The tracker failed at update 2 (No space left on device); the run goes on without it, "
        "and metrics.jsonl has all its figures."
    ]


def made(update: int, reward: float = 0.0) -> tuple[int, dict[str, Any]]:
    return update, {"update": update, "reward": reward or update / 10, "agents": {"think": 0.5}}


def logged_in_tensorboard(folder: Path, tag: str) -> list[tuple[int, float]]:
    """As TensorBoard's slow reader has it, the one that does not purge."""
    module = "tensorboard.backend.event_processing.plugin_event_accumulator"
    reader = importlib.import_module(module).EventAccumulator(str(folder))
    reader.Reload()
    return [
        (event.step, round(float(event.tensor_proto.float_val[0]), 3))
        for event in reader.Tensors(tag)
    ]


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = open_tracker("tensorboard", tmp_path, "rl")
    for update in (1, 2, 3):
        tracker.log(*made(update))
    found = logged_in_tensorboard(tmp_path / "tensorboard", "reward")
    assert found == [(1, 0.1), (2, 0.2), (3, 0.3)], "readable before it is closed"
    tracker.close()
    assert logged_in_tensorboard(tmp_path / "tensorboard", "agents/think")[-1] == (3, 0.5)


def test_tensorboard_shows_no_update_twice_after_a_resume(tmp_path: Path) -> None:
    """Killed after update 5 with a checkpoint of update 3: what was 4 and 5 comes again."""
    pytest.importorskip("tensorboard")
    first = open_tracker("tensorboard", tmp_path, "rl")
    for update in range(1, 6):
        first.log(*made(update))
    first.close()
    second = open_tracker("tensorboard", tmp_path, "rl", [made(update) for update in (1, 2, 3)])
    second.log(*made(4, 0.9))
    second.close()
    found = logged_in_tensorboard(tmp_path / "tensorboard", "reward")
    assert found == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.9)]


def test_tensorboard_gets_the_earlier_updates_when_it_is_turned_on_late(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = open_tracker("tensorboard", tmp_path, "rl", [made(1), made(2)])
    tracker.log(*made(3))
    tracker.close()
    found = logged_in_tensorboard(tmp_path / "tensorboard", "reward")
    assert found == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_a_resumed_run_keeps_the_wall_clock_figures_of_its_earlier_updates(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with Run.open(tmp_path, "rl", {}, {}, 0) as run:
        for update in (1, 2, 3):  # the third was taken back, and so counts no more
            run.timing({"update": update, "rollout_s": update / 2})
    evaluation = (2, {"update": 2, "eval_accuracy": 0.5})
    tracker = open_tracker("tensorboard", tmp_path, "rl", [made(1), made(2), evaluation])
    tracker.close()
    folder = tmp_path / "tensorboard"
    assert logged_in_tensorboard(folder, "rollout_s") == [(1, 0.5), (2, 1.0)]
    assert logged_in_tensorboard(folder, "eval_accuracy") == [(2, 0.5)]


KILLED = """
import os, signal, sys
from pathlib import Path
from coa.train.monitors import open_tracker
tracker = open_tracker("tensorboard", Path(sys.argv[1]), "rl")
for update in range(1, 5):
    tracker.log(update, {"reward": update / 10})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_tensorboard_was_told_survives_kill_9(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    found = logged_in_tensorboard(tmp_path / "tensorboard", "reward")
    assert found == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]


@pytest.fixture
def trackio_folder(tmp_path: Path) -> Iterator[Path]:
    """trackio reads its folder from the environment when it is imported: a process of its own."""
    pytest.importorskip("trackio")
    yield tmp_path / "trackio"


TRACKIO = """
import json, sys
from pathlib import Path
from coa.train.monitors import open_tracker
directory, name, earlier, fresh = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
def made(pair): return pair[0], {"update": pair[0], "reward": pair[1], "agents": {"think": 0.5}}
tracker = open_tracker("trackio", directory, name, map(made, earlier))
for pair in fresh:
    tracker.log(*made(pair))
tracker.close()
from trackio.sqlite_storage import SQLiteStorage
found = {}
for run in SQLiteStorage.get_run_records("coa"):
    rows = SQLiteStorage.get_logs("coa", run["name"], run_id=run["id"])
    found.setdefault(run["name"], []).append([[r["step"], r["reward"]] for r in rows])
print(json.dumps(found))
"""


def with_trackio(folder: Path, directory: Path, name: str, earlier: Any, fresh: Any) -> Any:
    directory.mkdir(exist_ok=True)
    arguments = [json.dumps(value) for value in (name, earlier, fresh)]
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(directory), *arguments],
        env=os.environ | {"TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # so nothing else was printed there


def test_trackio_shows_no_update_twice_and_leaves_other_runs_alone(
    trackio_folder: Path, tmp_path: Path
) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    assert with_trackio(trackio_folder, other, "rl", [], [[1, 0.7]]) == {"rl": [[[1, 0.7]]]}
    five = [[update, update / 10] for update in range(1, 6)]
    found = with_trackio(trackio_folder, ours, "rl", [], five)
    assert sorted(found["rl"]) == [five, [[1, 0.7]]]
    found = with_trackio(trackio_folder, ours, "rl", five[:3], [[4, 0.9]])
    assert sorted(found["rl"]) == [[*five[:3], [4, 0.9]], [[1, 0.7]]]
