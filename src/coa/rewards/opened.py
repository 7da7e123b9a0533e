"""open_reward: an expression in, an opened reward out, which scores trajectories.

    async with open_reward("tests*format", tasks=tasks) as reward:
        scored = await reward.score(task, trajectory)

Sandbox, processes and connections are opened once for a run, and only those that the expression
(for `auto`: the tasks) needs; so what is missing is said before the first rollout, not after it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from coa.errors import ConfigError, boundary
from coa.rewards.expression import Node, evaluate, names_in, parse_expression
from coa.rewards.form import FormatSettings, open_format
from coa.rewards.judge import JudgeSettings, open_judge
from coa.rewards.mathematics import MathSettings, open_math
from coa.rewards.programs import ProgramSettings, open_tests
from coa.rewards.scored import Checker, Part, Scored, part_of
from coa.rewards.simple import OPENED, SCORERS, load_scorer, reward_for
from coa.runs import Json
from coa.tasks.task import Task
from coa.trajectory import Trajectory

REWARDS = (*SCORERS, *OPENED)
"""The rewards that have a name."""
_COSTS = {"math": 1, "tests": 2, "judge": 3}
"""How dear a part is; own ones are taken for as dear as comparing mathematics."""
_SPEED = {
    "math": ("processes",),
    "tests": ("slots",),
    "judge": ("cache", "attempts", "slots", "timeout_s", "retries", "backoff_s", "prompt"),
}
"""Settings that decide how fast it goes, or that something else stands for."""


@dataclass(frozen=True)
class RewardSettings:
    """The table `[reward]` of a recipe; see docs/rewards.md."""

    expression: str = "auto"
    """auto: what suits each task; or names, `module:attribute`, weights, +, * and brackets."""
    math: MathSettings = field(default_factory=MathSettings)
    tests: ProgramSettings = field(default_factory=ProgramSettings)
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    format: FormatSettings = field(default_factory=FormatSettings)

    def __post_init__(self) -> None:
        if "judge" in self.needs():
            self.judge.require_model()  # now, not when a run directory is there already

    def needs(self, tasks: Iterable[Task] = ()) -> list[str]:
        """The names of the parts; `auto` stands with those that it takes for these tasks."""
        named = dict.fromkeys(names_in(parse_expression(self.expression, REWARDS)))
        if "auto" in named:
            named |= dict.fromkeys(map(reward_for, tasks))
        return list(named)

    def identity(self, tasks: Iterable[Task] = ()) -> Json:
        """What scores depend on, for a manifest: the expression, and settings of its parts."""
        found: Json = {"expression": "".join(self.expression.split())}
        for name in self.needs(tasks):
            if name in OPENED:
                table = asdict(getattr(self, name))
                found[name] = {k: v for k, v in table.items() if k not in _SPEED.get(name, ())}
        if "judge" in found:
            found["judge"] |= self.judge.identity()
        return found


@asynccontextmanager
async def open_reward(
    settings: RewardSettings | str = "auto", *, tasks: Iterable[Task] = ()
) -> AsyncIterator[Reward]:
    """Open a reward, given as an expression or with settings. `tasks`: what `auto` will judge."""
    if isinstance(settings, str):
        settings = RewardSettings(settings)
    async with AsyncExitStack() as held:
        reward = Reward(settings, held)
        for name in settings.needs(tasks):
            await reward.open(name)
        yield reward


class Reward:
    """An opened reward; see `open_reward`."""

    def __init__(self, settings: RewardSettings, held: AsyncExitStack) -> None:
        self.settings = settings
        self._node: Node = parse_expression(settings.expression, REWARDS)
        self._checkers: dict[str, Checker] = {}
        self._held, self._opening = held, asyncio.Lock()

    @property
    def name(self) -> str:
        """The expression."""
        return self.settings.expression

    async def score(self, task: Task, trajectory: Trajectory) -> Scored:
        """Judge one trajectory; as many at once as you like."""
        parts: dict[str, Part] = {}

        async def ask(name: str) -> float | None:
            if name not in parts:
                checker = self._checkers.get(name) or await self.open(name)
                parts[name] = await checker(task, trajectory)
            return parts[name].score

        value = await evaluate(self._node, ask, lambda name: _COSTS.get(name, ":" in name))
        return Scored(value, parts)

    async def score_all(self, pairs: Iterable[tuple[Task, Trajectory]]) -> list[Scored]:
        """Judge many, all at once, in the order given. The first failure ends the others."""
        judging = [asyncio.create_task(self.score(*pair)) for pair in pairs]
        try:
            return await asyncio.gather(*judging)
        finally:
            for each in judging:
                each.cancel()
            await asyncio.gather(*judging, return_exceptions=True)

    def usage(self) -> Json:
        """What the parts counted, by name: calls and tokens of a judge."""
        counts = {name: getattr(each, "counts", None) for name, each in self._checkers.items()}
        return {name: count() for name, count in counts.items() if count is not None}

    async def open(self, name: str) -> Checker:
        """The checker of that name, opened if it is not open yet."""
        async with self._opening:
            if name not in self._checkers:
                self._checkers[name] = await self._open(name)
            return self._checkers[name]

    async def _open(self, name: str) -> Checker:
        if name == "auto":
            return self._by_task
        if name not in OPENED:
            return plain(name)
        makers: dict[str, Callable[[Any], AbstractAsyncContextManager[Checker]]]
        makers = {"math": open_math, "tests": open_tests, "judge": open_judge}
        makers["format"] = open_format
        return await self._held.enter_async_context(makers[name](getattr(self.settings, name)))

    async def _by_task(self, task: Task, trajectory: Trajectory) -> Part:
        name = reward_for(task)
        if name == "auto":
            raise ConfigError(f"task {task.id}: names the reward 'auto', which is no reward.")
        checker = self._checkers.get(name) or await self.open(name)
        return await checker(task, trajectory)


def plain(name: str) -> Checker:
    """A function as a part: ours or one's own, synchronous or not."""
    scorer: Callable[[Task, Trajectory], Any] = load_scorer(name)

    async def judge(task: Task, trajectory: Trajectory) -> Part:
        with boundary(ConfigError, f"reward {name!r}, on task {task.id},"):
            found = scorer(task, trajectory)
            if inspect.isawaitable(found):
                found = await found
        return part_of(found, name, task)

    return judge


def mean_parts(scored: Sequence[Scored]) -> Json:
    """For metrics: the mean of each part over those that it judged, and how many it did not."""
    names = dict.fromkeys(name for each in scored for name in each.parts)
    means: Json = {}
    for name in names:
        asked = [each.parts[name].score for each in scored if name in each.parts]
        judged = [score for score in asked if score is not None]
        mean = sum(judged) / len(judged) if judged else None
        means[name] = {"mean": mean, "n": len(judged), "unjudged": len(asked) - len(judged)}
    return means
