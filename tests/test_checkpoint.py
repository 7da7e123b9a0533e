"""Checkpoints: whole or not there, also when a process is killed or a disk is full."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from coa.errors import TrainingError  # noqa: E402
from coa.train.checkpoint import Checkpoints  # noqa: E402
from coa.train.processes import Processes, _messages  # noqa: E402
from rl_parts import side_by_side  # noqa: E402


class Weights:
    """A policy and an optimiser as checkpoints see them; it tells what was done in which order."""

    def __init__(self, processes: Processes | None = None, *, fails: bool = False) -> None:
        self._processes, self._fails = processes, fails
        self.is_sharded = processes is not None
        self.done: list[str] = []

    def _together(self, what: str) -> dict[str, Any]:
        self.done.append(what)
        if self._processes is not None:
            assert set(self._processes.gather(what)) == {what}, "others do something else"
        return {}

    def gathered(self) -> dict[str, Any]:
        return self._together("weights")

    def state_dict(self) -> dict[str, Any]:
        return self._together("optimiser")

    def write(self, folder: Path, gathered: dict[str, Any], **manifest: Any) -> None:
        self.done.append("write")
        if self._fails:
            raise OSError(28, "No space left on device")
        folder.mkdir(parents=True)

    def restore(self, folder: Path) -> None:
        self.done.append(f"restore {folder.parent.name}")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def checkpoints(folder: Path, weights: Weights, processes: Processes | None = None) -> Checkpoints:
    return Checkpoints(folder, weights, processes or Processes(), optimizer=weights)  # type: ignore[arg-type]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_two_are_kept_and_those_that_are_asked_for(tmp_path: Path) -> None:
    weights = Weights()
    held = checkpoints(tmp_path, weights)
    for update in range(1, 6):
        held.save(update, {"position": update}, also_keep=[2])
    assert names(tmp_path) == ["update-0000002", "update-0000004", "update-0000005"]
    assert held.restore() == {"update": 5, "position": 5}
    assert weights.done[-1] == "restore update-0000005"


def test_what_is_killed_while_it_removes_leaves_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = checkpoints(tmp_path, Weights())
    for update in (1, 2):
        held.save(update, {})
    remove = shutil.rmtree

    def killed(folder: Path, **how: Any) -> None:
        if (folder / "optimizer.pt").exists():
            (folder / "optimizer.pt").unlink()
            raise KeyboardInterrupt
        remove(folder, **how)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        held.save(3, {})
    monkeypatch.undo()
    whole = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert len(whole) == 2 and all((path / "optimizer.pt").is_file() for path in whole)
    assert held.restore() == {"update": 3}
    assert names(tmp_path) == ["update-0000002", "update-0000003"]


def test_of_several_processes_with_all_weights_one_writes(tmp_path: Path) -> None:
    def work(processes: Processes) -> list[str]:
        weights = Weights()
        checkpoints(tmp_path, weights, processes).save(1, {})
        return weights.done

    assert side_by_side(2, work) == [["weights", "optimiser", "write"], []]


def test_spread_weights_are_gathered_before_a_disk_can_be_full(tmp_path: Path) -> None:
    def work(processes: Processes) -> tuple[list[str], str]:
        weights = Weights(processes, fails=True)
        save = partial(checkpoints(tmp_path, weights, processes).save, 1, {})
        with pytest.raises(TrainingError) as error:
            processes.all_or_none(save)
        return weights.done, str(error.value)

    (main, line), (other, same) = side_by_side(2, work)
    assert main == ["weights", "optimiser", "write"] and other == main[:2]
    assert line == same
    assert line.endswith(
        "update-0000001: the checkpoint could not be written (No space left on device); there is "
        "no other. Make room and give the same command again."
    )


def test_processes_that_find_different_checkpoints_say_so(tmp_path: Path) -> None:
    def work(processes: Processes) -> str:
        folder = tmp_path / str(processes.index)
        if processes.main:
            checkpoints(folder, Weights()).save(4, {})
        with pytest.raises(TrainingError) as error:
            checkpoints(folder, Weights(), processes).restore()
        return str(error.value)

    for line in side_by_side(2, work):
        assert "the processes found update-0000004, none as the newest checkpoint" in line
        assert line.endswith("Use a directory that all machines see.")


def test_what_one_process_refuses_stops_all() -> None:
    def work(processes: Processes) -> str:
        def do() -> None:
            if processes.index == 1:
                raise TrainingError("no room")

        with pytest.raises(TrainingError) as error:
            processes.all_or_none(do)
        return str(error.value)

    assert side_by_side(3, work) == ["no room"] * 3


@given(sizes=st.lists(st.integers(0, 9), max_size=12), most=st.integers(1, 20))
def test_sums_go_in_messages_that_hold_every_tensor_once(sizes: list[int], most: int) -> None:
    tensors = [torch.zeros(size) for size in sizes]
    made = list(_messages(tensors, most))
    assert [id(t) for message in made for t in message] == [id(t) for t in tensors]
    for message in made:
        assert message and sum(t.numel() for t in message[:-1]) < most
