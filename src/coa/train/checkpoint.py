"""Checkpoints of a training run: a folder each, written beside, synced, renamed; two are kept.

A folder that has its final name is whole. Whatever else lies there is what a killed process left,
and is removed. That a folder belongs to this run is checked by `Run`, which holds the directory.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from coa.errors import TrainingError
from coa.io.files import sync_folder, whole_folder
from coa.io.runs import Json
from coa.train.policy import Policy
from coa.train.processes import Processes

KEPT = 2
_NAME = re.compile(r"update-(\d{7})")
_PART = ".part-"


class Checkpoints:
    """The checkpoints of one run: of its policy, and of what is `saved` beside it (an optimiser, a
    value head)."""

    def __init__(self, folder: Path, policy: Policy, processes: Processes, **saved: Any) -> None:
        self._folder, self._policy, self._saved = folder, policy, saved
        self._processes = processes

    def save(
        self,
        update: int,
        record: Json,
        made_by: Json | None = None,
        also_keep: Collection[int] = (),
    ) -> None:
        """Write the state after `update`, with what the caller wants to know again.

        `made_by` goes into the manifest of the weights, from which another run may start. One
        process writes. Where weights are sharded, all must call this: they gather first.
        """
        main = self._processes.main
        if not main and not self._policy.is_sharded:
            return
        tensors = self._policy.gathered()
        state = {name: each.state_dict() for name, each in self._saved.items()}
        target = self._path(update)
        if not main or target.exists():
            return
        try:
            with whole_folder(target) as part:
                self._policy.write(part / "adapter", tensors, update=update, **(made_by or {}))
                with (part / "optimizer.pt").open("wb") as file:  # by a path, torch hides a reason
                    torch.save(state | {"rng": torch.get_rng_state()}, file)
                text = json.dumps({"update": update, **record})
                (part / "position.json").write_text(text + "\n", encoding="utf-8")
        except Exception as failed:  # safetensors and torch have errors of their own for a disk
            whole = self._whole()
            last = f"{whole[-1].name} is the last whole one" if whole else "there is no other"
            raise TrainingError(
                f"{target}: the checkpoint could not be written ({_reason(failed)}); {last}. "
                "Make room and give the same command again."
            ) from failed
        sync_folder(self._folder)
        kept = {self._path(one) for one in also_keep}
        for old in self._whole()[:-KEPT]:
            if old not in kept:  # half removed, it must not have the name of a whole one
                shutil.rmtree(old.rename(old.with_name(_PART + old.name)), ignore_errors=True)

    def _path(self, update: int) -> Path:
        return self._folder / f"update-{update:07d}"

    def _whole(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(p for p in self._folder.iterdir() if _NAME.fullmatch(p.name))

    def restore(self) -> Json | None:
        """Load the newest checkpoint and return its record; None when there is none.

        All processes of a run call it, and must find the same one.
        """
        if self._folder.is_dir() and self._processes.main:
            for part in self._folder.glob(".*"):
                shutil.rmtree(part, ignore_errors=True)
        whole = self._whole()
        newest = whole[-1] if whole else None
        found = self._processes.gather(newest.name if newest else "none")
        if len(set(found)) > 1:
            raise TrainingError(
                f"{self._folder}: the processes found {', '.join(found)} as the newest checkpoint; "
                "expected the same. Use a directory that all machines see."
            )
        if newest is None:
            return None
        record: Json = json.loads((newest / "position.json").read_text(encoding="utf-8"))
        self._policy.restore(newest / "adapter")
        state = torch.load(newest / "optimizer.pt", map_location="cpu", weights_only=True)
        for name, each in self._saved.items():
            each.load_state_dict(state[name])
        torch.set_rng_state(state["rng"])
        return record


def _reason(error: BaseException) -> str:
    error = error.__context__ if isinstance(error.__context__, OSError) else error
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__


@contextmanager
def held_interrupt() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into a flag, so that an update is never cut in half; the second acts.

    Outside the main thread signals cannot be held, and the flag stays down.
    """
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = signal.getsignal(signal.SIGINT)

    def hold(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        flag.set()

    signal.signal(signal.SIGINT, hold)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
