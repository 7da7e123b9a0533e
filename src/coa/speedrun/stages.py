"""The stages of a speedrun: what starts is said; how long it took is kept apart from results."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coa.progress import duration
from coa.runs import Run

Note = Callable[[str], None]


class Stages:
    def __init__(self, run: Run, note: Note) -> None:
        self.root: Path = run.root
        self.note = note
        self.seconds = 0.0
        """Of the stages of this call."""
        self._run = run

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        self.note(f"== {what}")
        begun = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - begun
            self.seconds += seconds
            self._run.timing({"stage": what, "seconds": round(seconds, 1)})
            gc.collect()  # a policy is full of cycles, and the next stage loads a model of its own
        self.note(f"   {what}: {duration(seconds)}")
