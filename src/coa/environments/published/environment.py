"""`bfcl`: fixed samples of the Berkeley Function Calling Leaderboard as an ordinary environment.

It has tasks for the test only: nothing of it is ever trained on. Its tools are declared and not
implemented; the reward `calls` judges which calls were made, as BFCL's own checker does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from coa.environment import Environment, Terms
from coa.environments.published import find_benchmark, load_benchmark
from coa.environments.toolbox import in_words
from coa.errors import UsageError, did_you_mean
from coa.io.download import wheel_member
from coa.io.progress import say
from coa.models.references import cache_dir
from coa.tasks import Task, TaskSet
from coa.tools.functions import declared_tools

SAMPLES: dict[str, tuple[int, tuple[str, ...]]] = {
    "simple": (150, ("simple_python",)),
    "multiple": (150, ("multiple",)),
    "irrelevance": (100, ("irrelevance",)),
    "live": (200, ("live_simple", "live_multiple", "live_irrelevance", "live_relevance")),
}
"""Sample -> how many tasks of which categories."""
TERMS = Terms("Questions and declarations of `bfcl` are those of bfcl-eval (Apache-2.0).")


def bfcl(name: str, grammar: str = "", samples: str = "", file: str = "") -> Environment:
    """Samples of BFCL (simple, multiple, irrelevance, live; all of them by default), out of its
    wheel, or out of the folder `file`."""
    chosen = [each.strip() for each in samples.split(",") if each.strip()] or list(SAMPLES)
    for each in chosen:
        if each not in SAMPLES:
            raise UsageError(f"samples: {each!r} is none of BFCL's.{did_you_mean(each, SAMPLES)}")

    def tasks() -> TaskSet:
        return TaskSet(tuple(sampled(Path(file) if file else _folder(), chosen)), name)

    held: dict[str, Callable[[], TaskSet]] = {"test": tasks}
    return Environment(
        name,
        tools=declared_tools,
        grammar=in_words(grammar or "react"),
        tasks=held,
        reward="calls",
        teacher="experts",
        groups=("sample", "family"),
        terms=TERMS,
        settings={"grammar": grammar},
    )


def _folder() -> Path:
    wheel = find_benchmark("bfcl").wheel
    assert wheel is not None
    return wheel_member(
        *(wheel.requirement, wheel.file, wheel.sha256, wheel.member, cache_dir()), say
    )


def sampled(folder: Path, samples: list[str]) -> list[Task]:
    """The tasks of these samples: of its categories those whose ids have the smallest hashes."""
    every = load_benchmark("bfcl", folder).tasks
    made = []
    for sample in samples:
        size, families = SAMPLES[sample]
        fitting = [task for task in every if task.meta["family"] in families]
        for task in sorted(fitting, key=_place)[:size]:
            meta = {**task.meta, "sample": sample}
            made.append(Task(task.question, task.answers, task.id, meta, task.gold))
    return made


def _place(task: Task) -> str:
    return hashlib.sha256(f"bfcl sample {task.id}".encode()).hexdigest()
