"""Shared by the tests of the RL loop: an engine that says what it is told, groups made by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar

from coa.engines.base import Completion, OnText, Sampling, sampling_key
from coa.engines.scripted import ScriptedEngine
from coa.environment import Environment, OpenEnvironment, ToolSettings
from coa.errors import EngineError
from coa.grammar import load_grammar
from coa.loop import Budget, Decoding
from coa.rewards import Part, Scored
from coa.tasks import Task
from coa.train.groups import Group, Sampler, ScoredRollout, TaskStream
from coa.train.processes import Processes
from coa.trajectory import Author, Segment, StopReason, Trajectory, Usage
from playing import box

T = TypeVar("T")
GRAMMAR = load_grammar("search_r1")
WHOLE = "<think>t</think><answer>{}</answer>"
CALL = "<think>t</think><search>it</search>"


class Told(ScriptedEngine):
    """Answers every question in one turn with what `say(question, draw)` says: `draw` is a number
    that depends on the sampling key alone. "fail" is an engine that breaks down, "hang" one that
    does not come back, "void" a turn that neither calls nor answers."""

    def __init__(self, questions: Iterable[str], say: Callable[[str, int], str]) -> None:
        super().__init__([])
        self.weights = "update-0"
        self.keys: list[int] = []
        self.most: int | None = None
        """After so many turns it does not come back."""
        self._questions, self._say = list(questions), say

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        await asyncio.sleep(0)
        if self.most is not None and len(self.keys) >= self.most:
            await asyncio.Event().wait()
        self.keys.append(sampling.key)
        prompt = self.decode(prompt_ids)
        question = max((q for q in self._questions if q in prompt), key=len)
        answer = self._say(question, sampling.key)
        if answer == "fail":
            raise EngineError("out of memory")
        if answer == "hang":
            await asyncio.Event().wait()
        ids = self.encode("<think>t</think>" if answer == "void" else WHOLE.format(answer))
        return Completion(ids, [-0.5] * len(ids), "stop")


class ByAnswer:
    """A reward that reads its number off the answer; "none" is one that it cannot judge."""

    def __init__(self) -> None:
        self.asked = 0

    async def score_all(self, pairs: Iterable[tuple[Task, Trajectory]]) -> list[Scored]:
        found = []
        for _, trajectory in pairs:
            self.asked += 1
            unknown = trajectory.answer in (None, "none")
            score = None if unknown else float(trajectory.answer or "")
            found.append(Scored(score, {"by_answer": Part(score, "who knows" if unknown else "")}))
        return found


class Failed(ByAnswer):
    """What has no answer earns 0."""

    async def score_all(self, pairs: Iterable[tuple[Task, Trajectory]]) -> list[Scored]:
        found = await super().score_all(pairs)
        return [Scored(one.score or 0.0) for one in found]


def questions(count: int) -> list[Task]:
    return [Task(f"Question {i}?", ("1",), id=f"t{i}") for i in range(count)]


class Opened(OpenEnvironment):
    """An environment whose tool finds something whatever it is asked, judged `ByAnswer`."""

    def __init__(self, reward: Any = None, tools: Any = None) -> None:
        given = [*box("search_r1").values()] if tools is None else tools
        env = Environment("told", tools=given, grammar=GRAMMAR)
        super().__init__((env,), ToolSettings(), AsyncExitStack(), 1)
        self.reward = reward or ByAnswer()

    async def score_all(self, pairs: Iterable[tuple[Task, Trajectory]]) -> list[Scored]:
        found: list[Scored] = await self.reward.score_all(pairs)
        return found


def opened(reward: Any = None, tools: Any = None) -> Opened:
    return Opened(reward, tools)


def make_sampler(tasks: Sequence[Task], engine: Told, directory: Path, **changes: Any) -> Sampler:
    settings: dict[str, Any] = {
        "stream": TaskStream(tasks, seed=3),
        "engine": engine,
        "opened": opened(),
        "budget": Budget(turns=3),
        "decoding": Decoding(temperature=1.0, seed=3),
        "directory": directory,
        "group_size": 4,
    }
    return Sampler(**(settings | changes))


def key_of(task: Task, sample: int, engine: Told) -> int:
    """The sampling key of the first turn of a rollout."""
    from coa.loop import Rollout

    decoding = Decoding(temperature=1.0, seed=3)
    begun = Rollout(task, engine, GRAMMAR, box("search_r1"), decoding=decoding)
    return sampling_key(3, task.id, sample, len(begun.trajectory.ids))


def made(
    *turns: str,
    stop: StopReason = StopReason.ANSWERED,
    task: str = "t0",
    logprob: float = -0.5,
    error: str | None = None,
) -> Trajectory:
    """A trajectory of these turns with an observation between them, one id for each byte."""
    segments = [Segment(Author.PROMPT, "p", list(b"p q? "))]
    for at, text in enumerate(turns):
        if at:
            segments.append(Segment(Author.ENV, " seen ", list(b" seen ")))
        ids = list(text.encode())
        segments.append(Segment(Author.MODEL, text, ids, [logprob] * len(ids)))
    sampled = sum(len(turn.encode()) for turn in turns)
    return Trajectory(
        task,
        "q?",
        "search_r1",
        segments,
        tools=["search"],
        stop=stop,
        error=error,
        usage=Usage(sampled_tokens=sampled, turns=len(turns)),
    )


def group_of(*members: tuple[Trajectory, float | None], task: str = "t0") -> Group:
    def judged(score: float | None) -> Scored:
        reason = "" if score is not None else "no answer of the judge"
        return Scored(score, {"judge": Part(score, reason)})

    rollouts = [ScoredRollout(trajectory, judged(score)) for trajectory, score in members]
    return Group(Task("q?", ("a",), id=task), rollouts)


@dataclass(frozen=True)
class Beside(Processes):
    """A process of several that are threads of this one; what they gather goes through memory."""

    barrier: Any = None
    board: list[Any] = field(default_factory=list)

    def gather(self, value: Any) -> list[Any]:
        self.board[self.index] = value
        self.barrier.wait(60)
        found = list(self.board)
        self.barrier.wait(60)
        return found

    def add_up(self, tensors: Sequence[Any]) -> None:
        shares = self.gather([tensor.detach().clone() for tensor in tensors])
        for tensor, *parts in zip(tensors, *shares, strict=True):
            tensor.detach().copy_(sum(parts))

    def wait(self) -> None:
        self.gather(None)


def side_by_side(count: int, work: Callable[[Processes], T]) -> list[T]:
    """What `work` returns in each of so many processes."""
    barrier, board = Barrier(count), [None] * count
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda i: work(Beside(i, count, barrier, board)), range(count)))
