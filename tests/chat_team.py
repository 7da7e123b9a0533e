"""A small team on a scripted server: what the tests of model calls and budgets record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from chat_server import (
    ChatServer,
    answer,
    approval,
    call,
    check,
    contents,
    plan,
    report,
    step,
    who,
)
from coa.io.collect import collect
from coa.io.runs import Json
from coa.recording.episode import Episode
from coa.recording.llm import LLMSettings, LLMTeacher
from coa.recording.record import recorded
from coa.tasks import Task, TaskSet
from scripts import TOOLBOX_OF

TASKS = TaskSet(tuple(Task(f"What is the capital of country {n}?") for n in range(6)))
QUIET = {"temperature": 0.0, "structured": "off"}
PRICES = "[models.tester]\ninput = 2.0\ncached = 0.5\noutput = 8.0\n"


def settings(server: ChatServer, **options: Any) -> LLMSettings:
    return LLMSettings(server.ref, **{**QUIET, "backoff_s": 0.01, **options})


def two_steps(body: Json) -> str:
    """A team that looks two things up at the same time and answers."""
    agent, texts = who(body), contents(body)
    if agent == "planner":
        return plan("one thing", "another")
    if agent == "searcher":
        return call(f"thing {step(texts)}")
    if agent == "reader":
        return report(f"Thing {step(texts)} is so.")
    if agent == "reflector":
        return approval(body)
    return answer("yes") if texts[-1].endswith("Give the answer.") else check(4)


CALLS = 1 + 2 * 3 + 2
"""Of one such task."""


async def record(
    server: ChatServer, out: Path, tasks: TaskSet = TASKS, concurrency: int = 4, **options: Any
) -> list[Episode]:
    teacher = LLMTeacher(settings(server, **options))

    def work(task: Task) -> Callable[[], Awaitable[Episode]]:
        return lambda: recorded(teacher, task.public(), TOOLBOX_OF(task), 0)

    async with teacher.opened(out):
        return await collect(
            out,
            {task.id: work(task) for task in tasks},
            parse=Episode.from_json,
            key=lambda episode: episode.task_id,
            concurrency=concurrency,
        )


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0
