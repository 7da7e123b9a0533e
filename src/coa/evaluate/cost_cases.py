"""The two sides of every task: the team's episode and, where there is one, the chain made of it.

Goes in: a task file with gold, an episodes file and a distilled directory. Every task of the file
is a case, solved or not, converted or not.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from coa.distill.stage import CONVERTED
from coa.errors import RecordError
from coa.evaluate.cost_counts import (
    CACHINGS,
    Caching,
    Counter,
    opening_prompts,
    with_caching,
)
from coa.protocol.prompt import PromptKind
from coa.rewards import auto
from coa.runs import Json, read_records
from coa.tasks.task import Task, TaskSet
from coa.teachers.episode import AgentSpec, Episode, Tokens, Use, load_episodes
from coa.teachers.llm_budget import Price
from coa.trajectory import Trajectory

MEASURES = (
    *(f"tokens.{caching}" for caching in CACHINGS),
    *(f"money.{caching}" for caching in CACHINGS),
    "tool_calls",
)


@dataclass(frozen=True, slots=True)
class Files:
    """Where one comparison comes from."""

    tasks: Path
    episodes: Path
    distilled: Path


@dataclass(frozen=True, slots=True)
class Side:
    """What one side needed for one task."""

    tokens: Tokens
    system: int
    """Those of its prompt tokens that are system prompts."""
    opening: int
    """Tokens of its system prompts, each once."""
    model_calls: int
    tool_calls: int
    solved: bool

    def measures(self, price: Price) -> dict[str, float]:
        """MEASURES, and whether it is solved."""
        made: dict[str, float] = {"tool_calls": self.tool_calls, "solved": self.solved}
        for caching in CACHINGS:
            tokens = self.cached(caching)
            made[f"tokens.{caching}"] = tokens.total_cached
            made[f"money.{caching}"] = price.of(*tokens)
        return made

    def cached(self, caching: Caching) -> Tokens:
        return with_caching(self.tokens, caching, self.opening)


@dataclass(frozen=True, slots=True)
class Case:
    """One task: the team, and the chain with either prompt where there is one."""

    episode: Episode
    team: Side
    chains: Mapping[PromptKind, Side]

    @property
    def paired(self) -> bool:
        """Both sides solve it."""
        return self.team.solved and self.chain("compact").solved

    @property
    def callers(self) -> list[AgentSpec]:
        """The agent of every model call of the team."""
        by_name = {agent.name: agent for agent in self.episode.agents}
        return [by_name[self.episode.events[place].agent] for place in self.episode.calls]

    def chain(self, kind: PromptKind) -> Side:
        """The chain with this prompt; without one, what the team spent, and no solution."""
        return self.chains[kind] if self.chains else replace(self.team, solved=False)


def read_cases(files: Files, counter: Counter) -> tuple[list[Case], Json]:
    """Every task of the file with both sides, and why some have no chain.

    Chains are taken before the filters of distillation, which choose what to train on: a short or
    an ordinary one has its cost, too.
    """
    episodes = {episode.task_id: episode for episode in load_episodes(files.episodes)}
    made: dict[str, _Converted] = {}
    for each in read_records(files.distilled / CONVERTED, _Converted.from_json):
        made.setdefault(each.task_id, each)
    cases, missing = list[Case](), Tally[str]()
    for task in TaskSet.load(files.tasks):
        if task.id not in episodes:
            raise RecordError(
                f"{files.episodes}: has no episode of task {task.id!r}. "
                "Every task counts: record all of them, or give the tasks that were recorded."
            )
        converted = made.get(task.id) or _Converted(task.id, None, "was not distilled")
        if converted.chain is None:
            missing[converted.reason] += 1
        cases.append(_case(task, episodes[task.id], converted.chain, counter))
    return cases, dict(missing.most_common())


class _Converted(NamedTuple):
    """What distillation made of one episode."""

    task_id: str
    chain: Trajectory | None
    reason: str

    @classmethod
    def from_json(cls, record: Json) -> _Converted:
        name, chain, reason = record["task_id"], record["trajectory"], record["reason"]
        if chain is None or record["replay"]:
            return cls(name, None, reason or "does not replay")
        return cls(name, Trajectory.from_json(chain), "")


def _case(task: Task, episode: Episode, chain: Trajectory | None, counter: Counter) -> Case:
    tokens, bare = counter.team(episode), counter.bare(episode)
    team = Side(
        tokens,
        system=tokens.prompt - bare.prompt,
        opening=(tokens.prompt - tokens.cached) - (bare.prompt - bare.cached),
        model_calls=len(episode.calls),
        tool_calls=sum(isinstance(event, Use) for event in episode.events),
        solved=_solves(task, Trajectory(task.id, task.question, "", answer=episode.answer)),
    )
    if chain is None:
        return Case(episode, team, {})
    turns = len(chain.steps)
    called = sum(step.observation is not None for step in chain.steps)
    solved = _solves(task, chain)
    sides: dict[PromptKind, Side] = {}
    for kind, prompt in opening_prompts(chain).items():
        length = counter.count(prompt)
        counted = counter.chain(chain, prompt)
        sides[kind] = Side(counted, turns * length, length, turns, called, solved)
    return Case(episode, team, sides)


def _solves(task: Task, trajectory: Trajectory) -> bool:
    score = auto(task, trajectory)
    if score is None:
        raise RecordError(f"task {task.id}: has no gold, so nobody knows whether it was solved.")
    return score == 1.0
