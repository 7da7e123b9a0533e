"""Rehearsal: a few items of long work are tried, to say what all of them would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from coa.progress import duration
from coa.runs import Json

T = TypeVar("T")


@dataclass(frozen=True)
class Rehearsal:
    """What a stage would take, by a few of its items."""

    what: str
    items: int
    done: int
    """Of these, by an earlier part of the run."""
    tried: int
    good: int
    workers: int
    seconds: float
    """Of the tried ones, in one process."""
    characters: int
    """Written for the tried ones."""

    @property
    def seconds_left(self) -> float:
        left = self.items - self.done
        return left * self.seconds / max(1, self.tried) / self.workers

    def to_json(self) -> Json:
        return {**vars(self), "seconds_left": round(self.seconds_left, 1)}

    def lines(self) -> list[str]:
        left, each = self.items - self.done, self.characters / max(1, self.tried)
        return [
            f"{self.items} {self.what}, {self.done} of them done, {left} to do",
            f"tried {self.tried}: {self.good} good, {self.seconds:.1f}s in one process",
            f"the rest would take about {duration(self.seconds_left)} with {self.workers} "
            f"processes and {each * left / 1e6:.0f} MB; nothing was written",
        ]


TRIED = 24
"""Items of a rehearsal."""


def spread_out(items: Sequence[T], most: int = TRIED) -> list[T]:
    """A few of the items, from the first to the last."""
    count = min(most, len(items))
    return [items[place * (len(items) - 1) // max(1, count - 1)] for place in range(count)]
