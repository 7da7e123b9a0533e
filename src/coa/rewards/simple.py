"""Rewards that need nothing to be opened: plain functions of a task and a trajectory."""

from __future__ import annotations

from collections.abc import Iterable

from coa.config import load_object
from coa.errors import ConfigError, did_you_mean
from coa.rewards.answers import exact, f1, squad
from coa.rewards.calls import calls
from coa.rewards.scored import Scorer
from coa.rewards.suites import suite_of
from coa.tasks.task import Task
from coa.trajectory import Trajectory

OPENED = ("format", "judge", "math", "tests")
"""Rewards that have settings, or hold a process or a connection: see `open_reward`."""
_MATHEMATICS = frozenset(
    "aime24 aime25 amc23 gsm8k math math500 math_dapo olympiadbench".split()  # by AFM's names
)


def auto(task: Task, trajectory: Trajectory) -> float | None:
    """What the task itself says that it is judged by.

    Without being opened it cannot run tests, and takes the answers of other tasks as text.
    """
    named = reward_for(task)
    return SCORERS[named if named in SCORERS and named != "auto" else "exact"](task, trajectory)


SCORERS: dict[str, Scorer] = {
    "exact": exact,
    "squad": squad,
    "f1": f1,
    "calls": calls,
    "auto": auto,
}


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
    if reference in OPENED:
        raise ConfigError(f"reward {reference!r} has to be opened first: use open_reward.")
    if ":" not in reference:
        hint = did_you_mean(reference, [*SCORERS, *OPENED])
        raise ConfigError(f"{reference!r} is not a reward.{hint} Own ones: module:attribute.")
    scorer = load_object(reference)
    if not callable(scorer):
        raise ConfigError(f"reward {reference!r} is a {type(scorer).__name__}, not a function.")
    return scorer  # type: ignore[no-any-return]
