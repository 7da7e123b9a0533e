"""Tasks: questions with gold answers, and the sets that make them."""

from __future__ import annotations

from collections.abc import Sequence

from coa.errors import UsageError, did_you_mean
from coa.tasks.sets import GYM, KINDS
from coa.tasks.task import Task, TaskSet

__all__ = ["SETS", "Task", "TaskSet", "make_tasks"]

SETS = tuple(KINDS)


def make_tasks(
    name: str,
    split: str,
    n: int,
    seed: int,
    *,
    world_seed: int = 0,
    families: Sequence[str] | None = None,
) -> TaskSet:
    """Make `n` tasks of a set; the same arguments give the same tasks."""
    if name not in SETS:
        raise UsageError(f"{name!r} is not a task set.{did_you_mean(name, SETS)}")
    if name == GYM:
        from coa.tasks import gym

        if world_seed:
            raise UsageError(f"{name} has no worlds. Leave --world-seed out.")
        return gym.make_tasks(split, n, seed, families)
    from coa.tasks import atlas
    from coa.tasks.atlas_catalogues import CATALOGUES

    return atlas.make_tasks(split, n, seed, world_seed, families, CATALOGUES[name])
