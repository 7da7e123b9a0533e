"""Groups: G rollouts of one task from the same weights, drawn, scored and sifted for an update.

Tasks come from an endless stream that depends on the seed alone, and a task met again gets new
sample indices, so its rollouts are new. With dynamic sampling, groups in which every rollout that
takes part earned the same are replaced by those of further tasks, in a limited number of rounds.
Whatever does not take part in the update is counted with its reason; nothing disappears.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from coa.engines.base import Engine
from coa.environment import OpenEnvironment
from coa.errors import ConfigError
from coa.grammar import parse
from coa.loop import Budget, Decoding
from coa.rewards import Scored
from coa.rollouts import roll_out
from coa.tasks import Task
from coa.train.processes import Processes
from coa.trajectory import Author, Trajectory

LeftOut = Literal["environment", "unjudged", "void", "truncated", "empty", "lonely"]
"""Why a rollout takes no part: the environment or the clock ended it; no reward could be given; it
has a turn that neither called nor answered; a budget cut it; the model wrote nothing; nobody to be
compared with."""
OnRollout = Callable[[int, int], None]


class ScoredRollout(NamedTuple):
    """A rollout, and what the reward says of it."""

    trajectory: Trajectory
    scored: Scored

    @property
    def score(self) -> float | None:
        """None where the reward cannot say, or the environment or the clock ended it."""
        return None if self.trajectory.ended_outside else self.scored.score


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task from the same weights."""

    task: Task
    rollouts: list[ScoredRollout]
    without: Set[LeftOut] = frozenset()
    """Which of `void` and `truncated` are left out."""

    @property
    def scores(self) -> list[float | None]:
        return [rollout.score for rollout in self.rollouts]

    def left_out(self, rollout: ScoredRollout) -> LeftOut | None:
        """Why a rollout takes no part. What it earned does not matter, and it is asked before any
        baseline: leaving out failures alone, or what a baseline has counted, biases the gradient
        towards what is left out."""
        trajectory = rollout.trajectory
        if trajectory.ended_outside:
            return "environment"
        if rollout.score is None:
            return "unjudged"
        if not any(s.ids for s in trajectory.segments if s.author is Author.MODEL):
            return "empty"
        if "truncated" in self.without and trajectory.truncated:
            return "truncated"
        return "void" if "void" in self.without and has_void_turn(trajectory) else None

    @property
    def flat(self) -> bool:
        """Whether there is nothing to compare: of those that take part, fewer than two scores, or
        all the same."""
        return len({r.score for r in self.rollouts if self.left_out(r) is None}) < 2

    @property
    def solved(self) -> bool:
        """Whether every rollout has full marks."""
        return all(score is not None and score >= 1.0 for score in self.scores)


@dataclass(slots=True)
class Drawn:
    """What one update got: the groups to learn from, and an account of all that were drawn."""

    position: int
    """Where the stream of tasks goes on."""
    groups: list[Group] = field(default_factory=list)
    """To learn from."""
    dropped: list[Group] = field(default_factory=list)
    """Flat ones that dynamic sampling replaced, or could not any more."""
    refills: int = 0

    @property
    def all(self) -> list[Group]:
        return [*self.groups, *self.dropped]


class TaskStream:
    """All tasks in random order, again and again; any place of it can be asked for."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        assert tasks, "a stream needs tasks"
        self._tasks, self._seed = tasks, seed
        self._epoch, self._order = -1, list(range(len(tasks)))

    def take(self, position: int, count: int) -> list[tuple[Task, int]]:
        """`count` tasks from `position` on, each with how often it had been drawn before."""
        return [self._at(place) for place in range(position, position + count)]

    def _at(self, place: int) -> tuple[Task, int]:
        epoch, index = divmod(place, len(self._tasks))
        if epoch != self._epoch:
            self._order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}|tasks|{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._tasks[self._order[index]], epoch


@dataclass(slots=True)
class Sampler:
    """Draws groups: rollouts through the one loop, kept in files, scored."""

    stream: TaskStream
    engine: Engine
    opened: OpenEnvironment
    budget: Budget
    decoding: Decoding
    directory: Path
    group_size: int
    without: Set[LeftOut] = frozenset()
    concurrency: int = 96
    processes: Processes = field(default_factory=Processes)
    on_rollout: OnRollout | None = None

    def __post_init__(self) -> None:
        if self.decoding.constrain:
            raise ConfigError(
                "decoding.constrain: RL samples without a constraint, because ratios need the "
                "whole distribution. Set it to false."
            )

    async def draw(self, update: int, position: int, wanted: int, refills: int) -> Drawn:
        """Groups of `wanted` tasks; up to `refills` more rounds replace flat ones."""
        drawn = Drawn(position)
        missing = wanted
        for turn in range(refills + 1):
            tasks = self.stream.take(drawn.position, missing)
            drawn.position += missing
            drawn.refills = turn
            groups = await self.roll_out(f"{update:07d}-{turn}", tasks)
            for group in groups:
                (drawn.dropped if refills and group.flat else drawn.groups).append(group)
            missing = wanted - len(drawn.groups)
            if not missing:
                break
        return drawn

    async def roll_out(self, name: str, tasks: Sequence[tuple[Task, int]]) -> list[Group]:
        """One group per task; every process does its share and gets all."""
        own = self.processes.share(tasks)
        size = self.group_size
        pairs = [(task, visit * size + at) for task, visit in own for at in range(size)]
        path = self.directory / f"{self.processes.named(name)}.jsonl"
        found = await self.attempt(pairs, path, self.decoding, self.on_rollout)
        groups = [
            Group(task, found[at * size :][:size], self.without) for at, (task, _) in enumerate(own)
        ]
        shares = self.processes.gather(groups)
        return [shares[at % len(shares)][at // len(shares)] for at in range(len(tasks))]

    async def attempt(
        self,
        pairs: Sequence[tuple[Task, int]],
        path: Path,
        decoding: Decoding,
        on_rollout: OnRollout | None = None,
    ) -> list[ScoredRollout]:
        """Roll out tasks with the present weights, and score the rollouts.

        What an earlier part of the run has in the file counts if it is of the same weights and
        environment and clock let it end. It may be of other tasks: which are flat, and so how many
        a refill asks for, is another matter once a judge or a tool works again.
        """
        wanted = {(task.id, sample) for task, sample in pairs}

        def does_not_count(found: Trajectory) -> bool:
            here = (found.task_id, found.sample) in wanted
            return not here or found.weights != self.engine.weights or found.ended_outside

        found = await roll_out(
            pairs,
            self.engine,
            self.opened,
            path,
            budget=self.budget,
            decoding=decoding,
            concurrency=self.concurrency,
            again=does_not_count,
            on_done=on_rollout,
        )
        # As it is read from a file: a resumed update must see the same numbers to the last bit.
        book = self.opened.grammars
        found = [Trajectory.from_json(trajectory.to_json(), book) for trajectory in found]
        judged = zip(pairs, found, strict=True)
        scored = await self.opened.score_all((task, t) for (task, _), t in judged)
        return [ScoredRollout(*pair) for pair in zip(found, scored, strict=True)]


def has_void_turn(trajectory: Trajectory) -> bool:
    """Whether a turn held neither a whole call nor a whole answer, and no budget cut it."""
    grammar = trajectory.protocol
    acts = {*grammar.tool_roles, *grammar.of_kind("answer")}
    turns = trajectory.steps
    if turns and trajectory.truncated:
        turns = turns[:-1]
    return any(acts.isdisjoint(b.role for b in parse(grammar, t.model.text).blocks) for t in turns)
