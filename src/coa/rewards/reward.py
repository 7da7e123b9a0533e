"""open_reward: an expression in, an opened reward out, which scores trajectories.

    async with open_reward("tests*format", tasks=tasks) as reward:
        scored = await reward.score(task, trajectory)

Sandbox, processes and connections are opened once for a run, and only those that the expression
(for `auto`: the tasks) needs; so what is missing is said before the first rollout, not after it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from coa.errors import ConfigError, boundary, did_you_mean
from coa.io.plugins import load_object
from coa.io.runs import Json
from coa.rewards.answers import (
    Checker,
    Part,
    Scored,
    Scorer,
    exact,
    f1,
    guarded,
    part_of,
    squad,
)
from coa.rewards.chains import FormatSettings, calls, check_format
from coa.rewards.judge import Judge, JudgeSettings
from coa.rewards.mathematics import MathSettings, open_math
from coa.rewards.programs import ProgramSettings, open_programs, suite_of
from coa.tasks import Task
from coa.tools.functions import is_state
from coa.trajectory import Trajectory

_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)|([A-Za-z_][\w.]*(?::[\w.]*)?)|([-+*/()]))")
_ROUNDING = 1e-9
T = TypeVar("T")
_MOST_BRACKETS = 20


@dataclass(frozen=True, slots=True)
class Combined:
    """A sum or a product."""

    sign: str
    """+ or *."""
    parts: tuple[Node, ...]


Node = float | str | Combined
"""A weight, the name of a reward, or several of these."""
Ask = Callable[[str], Awaitable[float | None]]


def parse_expression(text: str, known: Collection[str]) -> Node:
    """Read an expression; names are those that are known, or have a colon."""
    node = _Reader(text, known).read()
    if not any(names_in(node)):
        raise ConfigError(f"reward {text!r} names no reward. Known: {', '.join(sorted(known))}.")
    if (most := _most(node)) > 1 + _ROUNDING:
        raise ConfigError(
            f"reward {text!r} can reach {most:g}, expected at most 1. "
            "Give the terms weights, as in 0.9*exact + 0.1*format."
        )
    return node


def names_in(node: Node) -> Iterator[str]:
    """The names of an expression, in order, each as often as it stands there."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, Combined):
        for part in node.parts:
            yield from names_in(part)


async def evaluate(node: Node, ask: Ask, cost: Callable[[str], int]) -> float | None:
    """The value, asking for the parts that decide it: in a product the cheapest come first, and
    after a 0 the others are not asked."""
    if isinstance(node, str):
        return await ask(node)
    if isinstance(node, float):
        return node
    parts, values = list(node.parts), list[float | None]()
    if node.sign == "*":
        parts.sort(key=lambda each: max(map(cost, names_in(each)), default=0))
    for part in parts:
        values.append(await evaluate(part, ask, cost))
        if node.sign == "*" and values[-1] == 0:
            return 0.0
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    value = _combine(node.sign, known)
    # Without what adding binary fractions leaves: 0.7 + 0.2 + 0.1 is 1.
    return min(1.0, round(value, 12)) if value <= 1 + _ROUNDING else value


def _combine(sign: str, values: Iterable[float]) -> float:
    return math.fsum(values) if sign == "+" else math.prod(values)


def _most(node: Node) -> float:
    """The largest value that an expression can have."""
    if isinstance(node, Combined):
        return _combine(node.sign, map(_most, node.parts))
    return node if isinstance(node, float) else 1.0


class _Reader:
    """Reads `sum := product ('+' product)*`, `product := factor ('*' factor)*`."""

    def __init__(self, text: str, known: Collection[str]) -> None:
        self._text, self._known, self._at = text, known, 0

    def read(self) -> Node:
        node = self._combined("+", 0)
        if left := self._text[self._at :].strip():
            raise self._wrong(f"found {left!r}, expected + or * or the end")
        return node

    def _combined(self, sign: str, depth: int) -> Node:
        parts = list[Node]()
        while not parts or self._take(sign):
            parts.append(self._combined("*", depth) if sign == "+" else self._factor(depth))
        return parts[0] if len(parts) == 1 else Combined(sign, tuple(parts))

    def _factor(self, depth: int) -> Node:
        found = _TOKEN.match(self._text, self._at)
        if found is None or (found[3] and found[3] != "("):
            left = self._text[self._at :].strip()
            wanted = "a reward or a weight"
            raise self._wrong(
                f"found {left!r}, expected {wanted}"
                if left
                else f"ends where {wanted} was expected"
            )
        self._at = found.end()
        if found[1]:
            if not (weight := float(found[1])):
                raise self._wrong("a weight of 0 has no effect; leave that part out")
            return weight
        if name := found[2]:
            if name not in self._known and ":" not in name:
                raise _unknown(name, self._known)
            return str(name)
        if depth > _MOST_BRACKETS:
            raise self._wrong("has too many brackets")
        node = self._combined("+", depth + 1)
        if not self._take(")"):
            raise self._wrong("a bracket is not closed")
        return node

    def _take(self, sign: str) -> bool:
        found = _TOKEN.match(self._text, self._at)
        if found is None or found[3] != sign:
            return False
        self._at = found.end()
        return True

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"reward {self._text!r}: {problem}. Example: 0.9*exact + 0.1*format.")


def _unknown(name: str, known: Collection[str]) -> ConfigError:
    hint = did_you_mean(name, known)
    return ConfigError(f"{name!r} is not a reward.{hint} Own ones: module:attribute.")


OPENED = ("format", "judge", "math", "tests")
"""Rewards that have settings, or hold a process or a connection: see `open_reward`."""


_MATHEMATICS = frozenset(
    "aime24 aime25 amc23 gsm8k math math500 math_dapo olympiadbench".split()  # by AFM's names
)


SCORERS: dict[str, Scorer] = {"exact": exact, "squad": squad, "f1": f1, "calls": calls}
"""Rewards that need nothing to be opened."""
REWARDS = (*SCORERS, "auto", *OPENED)
"""The rewards that have a name."""


def auto(task: Task, trajectory: Trajectory) -> float | None:
    """What the task itself says that it is judged by.

    Without being opened it cannot run tests, and takes the answers of other tasks as text.
    """
    return SCORERS.get(reward_for(task), exact)(task, trajectory)


def reward_for(task: Task) -> str:
    """The reward that fits a task: what it names itself, tests if it has some, or its answers.

    A task is a record, so the reward that it names is one of ours: code is imported only where a
    person typed its reference.
    """
    if named := str(task.meta.get("reward") or ""):
        if ":" in named:
            raise ConfigError(
                f"task {task.id} names the reward {named!r}: a reference inside a file is never "
                f"imported. Give it yourself: --reward {named}."
            )
        return named
    if "tests" in task.gold:
        return "tests"
    if str(task.meta.get("data_source", "")).lower() in _MATHEMATICS:
        return "math"
    return "exact"


def lacking(reward: str, task: Task) -> str:
    """What a task does not have and the reward judges by; nothing where it has it, or nobody knows.

    To be asked before hours of rollouts, not after them.
    """
    name = reward_for(task) if reward == "auto" else reward
    if name in ("tests", "calls"):
        if name == "tests" and name in task.gold:
            suite_of(task)  # one that cannot be read says so here
        return "" if name in task.gold else name
    by_answers = name in ("exact", "squad", "f1", "judge", "math")
    return "gold answer" if by_answers and not task.answers else ""


def choose_reward(reward: str, tasks: Iterable[Task]) -> str:
    """The reward that was asked for; `auto` is the one that all tasks share, where they do."""
    if reward != "auto":
        return reward
    found = {reward_for(task) for task in tasks}
    return found.pop() if len(found) == 1 else "auto"


def load_scorer(reference: str) -> Scorer:
    """A scorer by name, or `module:attribute` for one's own."""
    if reference in SCORERS:
        return SCORERS[reference]
    if ":" not in reference:
        raise _unknown(reference, REWARDS)
    scorer = load_object(reference)
    if not callable(scorer):
        raise ConfigError(f"reward {reference!r} is a {type(scorer).__name__}, not a function.")
    return scorer  # type: ignore[no-any-return]


Own = Callable[..., Any]
"""A reward of one's own: a function of (task, trajectory) or (task, trajectory, state)."""
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
        self._with_state: set[str] = set()
        """Names of those that judge with the state of a rollout."""
        self._held, self._opening = held, asyncio.Lock()

    @property
    def name(self) -> str:
        """The expression; a function that stands for all of it has its own name."""
        whole = self.settings.expression
        return own_name(self._own) if self._own and whole == "auto" else whole

    @property
    def takes_state(self) -> bool:
        """Whether it judges with the state of a rollout, which is gone when that is over."""
        return bool(self._with_state)

    async def score(self, task: Task, trajectory: Trajectory, state: Any = None) -> Scored:
        """Judge one trajectory; as many at once as you like."""
        parts: dict[str, Part] = {}

        async def ask(name: str) -> float | None:
            if name not in parts:
                checker = self._checkers.get(name) or await self.open(name)
                more = (state,) if name in self._with_state else ()
                parts[name] = await checker(task, trajectory, *more)
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
        judge = self._checkers.get("judge")
        return {"judge": asdict(judge.usage)} if isinstance(judge, Judge) else {}

    async def open(self, name: str) -> Checker:
        """The checker of that name, opened if it is not open yet."""
        async with self._opening:
            if name not in self._checkers:
                self._checkers[name] = await self._open(name)
            return self._checkers[name]

    async def _open(self, name: str) -> Checker:
        if name == "format":
            return self._format
        if name == "math":
            return await self._held.enter_async_context(open_math(self.settings.math))
        if name == "tests":
            return await self._held.enter_async_context(open_programs(self.settings.tests))
        if name == "judge":
            judge = Judge(self.settings.judge)
            self._held.push_async_callback(judge.close)
            return judge
        if name == "auto" and self._own is None:
            return self._by_task
        if name in ("exact", "squad", "f1"):
            return as_checker(guarded(SCORERS[name]), name)
        scorer: Own = self._own if name == "auto" and self._own else load_scorer(name)
        asked = state_parameter(scorer)
        if asked:
            self._with_state.add(name)
        return as_checker(scorer, own_name(scorer) if name == "auto" else name, asked)

    async def _format(self, task: Task, trajectory: Trajectory) -> Part:
        return check_format(trajectory, self.settings.format)

    async def _by_task(self, task: Task, trajectory: Trajectory) -> Part:
        name = reward_for(task)
        if name == "auto":
            raise ConfigError(f"task {task.id}: names the reward 'auto', which is no reward.")
        checker = self._checkers.get(name) or await self.open(name)
        return await checker(task, trajectory)


def own_name(own: Own) -> str:
    """What a function is called where rewards are listed."""
    return getattr(own, "__name__", "own")


def as_checker(scorer: Own, name: str, asked: str = "") -> Checker:
    """A function as a part, ours or one's own, synchronous or not; `asked` is the parameter that
    gets the state."""

    async def judge(task: Task, trajectory: Trajectory, state: Any = None) -> Part:
        with boundary(ConfigError, f"reward {name!r}, on task {task.id},", located=True):
            found = scorer(task, trajectory, **({asked: state} if asked else {}))
            if inspect.isawaitable(found):
                found = await found
        return part_of(found, name, task)

    return judge


def state_parameter(scorer: Own) -> str:
    """The parameter of a reward that is given the state: one annotated `State` or named `state`,
    else a third one that has no default; empty where there is none."""
    try:
        parameters = list(inspect.signature(scorer).parameters.values())
    except (TypeError, ValueError):  # of something built in
        return ""
    for each in parameters[2:]:
        if each.name == "state" or is_state(each.annotation):
            return each.name
    third = parameters[2] if len(parameters) > 2 else None
    plain = third is not None and third.kind is third.POSITIONAL_OR_KEYWORD
    return third.name if third is not None and plain and third.default is third.empty else ""


async def together(judging: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
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
