"""A small RL run for tests: a random tiny model, a reward that any text can earn a part of.

Also a program: `python rl_worker.py MODEL OUT [a.b=value ...]` trains, to be interrupted or run as
several processes; `--killed SEED` before that trains in children that are killed again and again
until one of them comes to the end, and prints how many were.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coa.tasks import Task, TaskSet
from coa.trajectory import Author, Trajectory

TINY = (
    "grammar=search_r1",
    "prompt=compact",
    "reward.expression=rl_worker:vowels",
    "rl.rank=4",
    "rl.updates=4",
    "rl.tasks_per_update=3",
    "rl.group_size=4",
    "rl.lr=1e-2",
    "rl.deterministic=true",
    "rl.threads=1",
    "rl.void_turns=keep",
    "rollout.turns=2",
    "rollout.turn_tokens=12",
    "rollout.tokens=24",
    "rollout.context=384",
    "rollout.concurrency=8",
)


def vowels(task: Task, trajectory: Trajectory) -> float:
    """The share of letters e in what the model wrote: learnable, and different for every text."""
    text = "".join(s.text for s in trajectory.segments if s.author is Author.MODEL)
    return text.count("e") / max(1, len(text))


def tiny_tasks(path: Path, n: int = 5, first: int = 0) -> Path:
    numbers = range(first, first + n)
    tasks = (
        Task(id=f"t{i}", question=f"What is {i} and {i}?", answers=(str(2 * i),)) for i in numbers
    )
    TaskSet(tuple(tasks), "tiny").save(path)
    return path


def settings(model: Path, out: Path, *more: str) -> list[str]:
    tasks = out.parent / "tasks.jsonl"
    if not tasks.is_file():
        tiny_tasks(tasks)
    return [*TINY, f"rl.model=hf:{model}", f"tasks={tasks}", f"out={out}", *more]


def train(model: Path, out: Path, *more: str) -> Path:
    from coa.train.rl_stage import read_rl_recipe, run_rl

    return run_rl(read_rl_recipe(None, settings(model, out, *more)), quiet=True).adapter


def die(draw: random.Random, out: Path) -> None:
    """Be killed: before some touch of a file of the run, or after some time."""
    if draw.random() < 0.25:
        timer = threading.Timer(draw.uniform(0.5, 3.0), os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
        return
    left = [draw.randrange(1, 150)]
    events = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")

    def count(event: str, given: tuple[Any, ...]) -> None:
        if event in events and str(out) in str(given[0]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def killed_again_and_again(seed: int, out: Path, work: Callable[[], object]) -> int:
    """Come to the end of the work in spite of that; the number of kills."""
    draw = random.Random(seed)
    for kills in range(1000):
        child = os.fork()
        if child == 0:
            die(draw, out)
            work()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, status
            return kills
        draw.random()
    raise AssertionError("it never comes to an end")


def main() -> None:
    given = sys.argv[1:]
    if given[0] == "--killed":
        import coa.train.optimizer
        import coa.train.rl_stage  # noqa: F401  # heavy: once, before the children

        model, out = Path(given[2]), Path(given[3])
        print(killed_again_and_again(int(given[1]), out, lambda: train(model, out, *given[4:])))
    else:
        print(train(Path(given[0]), Path(given[1]), *given[2:]))


if __name__ == "__main__":
    main()
