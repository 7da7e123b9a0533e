"""open_reward: an expression in, an opened reward out, which scores trajectories.

    async with open_reward("tests*format", tasks=tasks) as reward:
        scored = await reward.score(task, trajectory)

Sandbox, processes and connections are opened once for a run, and only those that the expression
(for `auto`: the tasks) needs; so what is missing is said before the first rollout, not after it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
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

Own = Callable[..., Any]
"""A reward of one's own: a function of (task, trajectory) or (task, trajectory, state)."""
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
    settings: RewardSettings | str = "auto",
    *,
    tasks: Iterable[Task] = (),
    own: Own | None = None,
) -> AsyncIterator[Reward]:
    """Open a reward, given as an expression or with settings. `tasks`: what `auto` will judge;
    `own`: a function that stands for `auto`."""
    if isinstance(settings, str):
        settings = RewardSettings(settings)
    async with AsyncExitStack() as held:
        reward = Reward(settings, held, own)
        for name in settings.needs(() if own else tasks):
            await reward.open(name)
        yield reward


class Reward:
    """An opened reward; see `open_reward`."""

    def __init__(
        self, settings: RewardSettings, held: AsyncExitStack, own: Own | None = None
    ) -> None:
        self.settings, self._own = settings, own
        self._node: Node = parse_expression(settings.expression, REWARDS)
        self._checkers: dict[str, Checker] = {}
        self._held, self._opening = held, asyncio.Lock()

    @property
    def name(self) -> str:
        """The expression; a function that stands for all of it has its own name."""
        whole = self.settings.expression
        return own_name(self._own) if self._own and whole == "auto" else whole

    @property
    def takes_state(self) -> bool:
        """Whether it judges with the state of a rollout, which is gone when that is over."""
        return any(getattr(each, "takes_state", False) for each in self._checkers.values())

    async def score(self, task: Task, trajectory: Trajectory, state: Any = None) -> Scored:
        """Judge one trajectory; as many at once as you like."""
        parts: dict[str, Part] = {}

        async def ask(name: str) -> float | None:
            if name not in parts:
                checker = self._checkers.get(name) or await self.open(name)
                parts[name] = await _asked(checker, task, trajectory, state)
            return parts[name].score

        value = await evaluate(self._node, ask, lambda name: _COSTS.get(name, ":" in name))
        if self._own is not None and "auto" in parts:
            parts[own_name(self._own)] = parts.pop("auto")
        return Scored(value, parts)

    async def score_all(self, pairs: Iterable[tuple[Task, Trajectory]]) -> list[Scored]:
        """Judge many, all at once, in the order given. The first failure ends the others."""
        return await together(self.score(*pair) for pair in pairs)

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
            return self._by_task if self._own is None else function(self._own, own_name(self._own))
        if name not in OPENED:
            return function(load_scorer(name), name)
        makers: dict[str, Callable[[Any], AbstractAsyncContextManager[Checker]]]
        makers = {"math": open_math, "tests": open_tests, "judge": open_judge}
        makers["format"] = open_format
        return await self._held.enter_async_context(makers[name](getattr(self.settings, name)))

    async def _by_task(self, task: Task, trajectory: Trajectory) -> Part:
        name = reward_for(task)
        if name == "auto":
            raise ConfigError(f"task {task.id}: names the reward 'auto', which is no reward.")
        checker = self._checkers.get(name) or await self.open(name)
        return await _asked(checker, task, trajectory, None)


def _asked(
    checker: Checker, task: Task, trajectory: Trajectory, state: Any
) -> Coroutine[Any, Any, Part]:
    with_state = getattr(checker, "takes_state", False)
    asked: Any = checker(task, trajectory, state) if with_state else checker(task, trajectory)
    return asked  # type: ignore[no-any-return]


def own_name(own: Own) -> str:
    """What a function is called where rewards are listed."""
    return getattr(own, "__name__", "own")


def function(scorer: Own, name: str) -> Checker:
    """A function as a part: ours or one's own, synchronous or not, with the state or without."""
    with_state = takes_state(scorer)

    async def judge(task: Task, trajectory: Trajectory, state: Any = None) -> Part:
        with boundary(ConfigError, f"reward {name!r}, on task {task.id},", located=True):
            given = (task, trajectory, state) if with_state else (task, trajectory)
            found = scorer(*given)
            if inspect.isawaitable(found):
                found = await found
        return part_of(found, name, task)

    judge.takes_state = with_state  # type: ignore[attr-defined]
    return judge


def takes_state(scorer: Own) -> bool:
    """Whether a reward is a function of three: the task, the trajectory and the state."""
    try:
        parameters = inspect.signature(scorer).parameters.values()
    except (TypeError, ValueError):  # of something built in
        return False
    placed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in placed and p.default is p.empty]
    return len(needed) > 2


async def together(judging: Iterable[Coroutine[Any, Any, Scored]]) -> list[Scored]:
    """Wait for all, in the order given; the first failure ends the others."""
    tasks = [asyncio.create_task(each) for each in judging]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
