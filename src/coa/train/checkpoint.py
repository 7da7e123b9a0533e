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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from coa.engines.weights import sync_folder
from coa.train.policy import Policy

KEPT = 2
_NAME = re.compile(r"update-(\d{7})")


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        self._folder, self._policy, self._optimizer = folder, policy, optimizer

    def save(self, update: int, loss: float) -> Path:
        target = self._folder / f"update-{update:07d}"
        if target.exists():
            return target
        part = self._folder / f".part-{update:07d}"
        shutil.rmtree(part, ignore_errors=True)
        self._policy.write(part / "adapter", update=update)
        torch.save(
            {"optimizer": self._optimizer.state_dict(), "rng": torch.get_rng_state()},
            part / "optimizer.pt",
        )
        record = {"update": update, "loss": loss}
        (part / "position.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
        sync_folder(part)
        part.rename(target)
        sync_folder(self._folder)
        for old in self._whole()[:-KEPT]:
            shutil.rmtree(old)
        return target

    def _whole(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(p for p in self._folder.iterdir() if _NAME.fullmatch(p.name))

    def restore(self) -> tuple[int, float]:
        """Load the newest checkpoint; (0, nan) when there is none."""
        if self._folder.is_dir():
            for part in self._folder.glob(".part-*"):
                shutil.rmtree(part, ignore_errors=True)
        whole = self._whole()
        if not whole:
            return 0, float("nan")
        newest = whole[-1]
        record = json.loads((newest / "position.json").read_text(encoding="utf-8"))
        self._policy.restore(newest / "adapter")
        state = torch.load(newest / "optimizer.pt", weights_only=True)
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        return int(record["update"]), float(record["loss"])


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
