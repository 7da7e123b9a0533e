"""Scored: what a reward says of one trajectory, with what each of its parts said and why."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coa.errors import ConfigError
from coa.io.runs import Json
from coa.tasks import Task
from coa.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Part:
    """One checker's number, or None when it cannot judge; and why, in a few words."""

    score: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Scored:
    """A number from 0 to 1, or None when nobody can say; and the parts that were asked, by name."""

    score: float | None
    parts: Mapping[str, Part] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Why it could not be judged, or what the parts found; for a person to read."""
        asked = self.parts.items()
        if self.score is None:
            asked = {name: part for name, part in asked if part.score is None}.items()
        return "; ".join(f"{name}: {part.reason}" for name, part in asked if part.reason)

    def to_json(self) -> Json:
        parts = {
            name: {"score": part.score, **({"reason": part.reason} if part.reason else {})}
            for name, part in self.parts.items()
        }
        return {"score": self.score, "parts": parts}

    @classmethod
    def from_json(cls, record: Json) -> Scored:
        return cls(record["score"], {name: Part(**part) for name, part in record["parts"].items()})


Scorer = Callable[[Task, Trajectory], float | None]
"""A reward that needs nothing to be opened."""


Checker = Callable[..., Awaitable[Part]]
"""A part of an opened reward: of a task and a trajectory, and of the state of the rollout where
its attribute `takes_state` is true."""


def part_of(found: Any, reward: str, task: Task) -> Part:
    """What a reward returned, if it is a number from 0 to 1, None, or one of these in a `Part`."""
    part = found if isinstance(found, Part) else Part(found)
    score: Any = part.score
    if score is None:
        return part
    is_number = hasattr(score, "__float__")  # numpy and torch have types of their own
    if not is_number or math.isnan(score) or not 0.0 <= score <= 1.0:
        raise ConfigError(
            f"reward {reward!r}, on task {task.id}: found {score!r}, expected a number from 0 to 1,"
            " or None when it cannot judge."
        )
    return Part(float(score), part.reason)
