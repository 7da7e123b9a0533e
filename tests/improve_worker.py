"""A small run of rejection sampling for tests: an engine that answers by chance, more often right
with every round, in the tokens of a tiny model, which is really trained.

Also a program: `python improve_worker.py --killed SEED MODEL OUT [a.b=value ...]` works in children
that are killed again and again until one comes to the end, and prints how many were.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coa.engines.base import Completion, OnText, Sampling
from coa.engines.scripted import ScriptedEngine
from coa.environment import Environment
from coa.models.codec import codec_of
from coa.tasks import Task, TaskSet
from playing import box
from rl_worker import killed_again_and_again

ENV = Environment("told", tools=[*box("search_r1").values()], grammar="search_r1", reward="exact")
TINY = (
    "prompt=compact",
    "improve.rounds=2",
    "improve.samples=4",
    "sft.rank=4",
    "sft.batch_size=2",
    "sft.max_length=384",
    "sft.checkpoint_every=1",
    "sft.deterministic=true",
    "sft.threads=1",
    "rollout.turns=2",
    "rollout.context=384",
    "rollout.concurrency=8",
)
ALWAYS, NEVER = "Easy 0?", "Hard 1?"


class Speaker(ScriptedEngine):
    """Answers "1" or "0" by a draw that depends on the sampling key alone; thoughts differ in
    length. An easy question is always answered with "1", a hard one never."""

    exact = tempered = takes_adapters = True

    def __init__(self, codec: Any) -> None:
        super().__init__([], codec)
        self.weights, self.skill = "start", 3
        self.turns = 0

    async def load(self, adapter: Any, version: str) -> None:
        self.weights = version
        self.skill = 3 + 2 * int(version.split("-")[1])

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        await asyncio.sleep(0)
        self.turns += 1
        draw, prompt = random.Random(sampling.key), self.decode(prompt_ids)
        right = draw.randrange(8) < self.skill
        right = (right or ALWAYS in prompt) and NEVER not in prompt
        thought = " ".join(["so"] * draw.randrange(1, 5))
        ids = self.encode(f"<think>{thought}</think><answer>{int(right)}</answer>")
        return Completion(ids, [-0.5] * len(ids), "stop")


def questions(path: Path, names: Sequence[str]) -> Path:
    tasks = tuple(Task(name, ("1",), id=name.strip("?").replace(" ", "-")) for name in names)
    TaskSet(tasks, path.stem).save(path)
    return path


def settings(model: Path, out: Path, *more: str) -> list[str]:
    out.parent.mkdir(parents=True, exist_ok=True)
    tasks, held = out.parent / "tasks.jsonl", out.parent / "check.jsonl"
    if not tasks.is_file():
        questions(tasks, [ALWAYS, NEVER, *(f"Question {i}?" for i in range(6))])
        questions(held, [f"Held out {i}?" for i in range(20)])
    given = [f"sft.model=hf:{model}", f"tasks={tasks}", f"check.tasks={held}", f"out={out}"]
    return [*TINY, *given, *more]


def improve(
    model: Path, out: Path, *more: str, note: Any = lambda line: None, dry: bool = False
) -> Any:
    """Run it, or plan it, with a `Speaker` instead of the model's own engine."""
    import coa.train.improve as stage

    heard, real = codec_of(f"hf:{model}"), stage.load_sampler
    stage.load_sampler = lambda recipe, source: Speaker(heard)  # type: ignore[assignment,return-value]
    try:
        recipe = stage.read_improve_recipe(None, settings(model, out, *more))
        if dry:
            return stage.plan_improve(recipe, env=ENV, note=note)
        return stage.run_improve(recipe, env=ENV, note=note, quiet=True)
    finally:
        stage.load_sampler = real


if __name__ == "__main__":
    import coa.train.improve
    import coa.train.optimizer  # noqa: F401  # heavy: once, before the children

    _, _, seed, model, out, *more = sys.argv
    kills = killed_again_and_again(
        int(seed), Path(out), lambda: improve(Path(model), Path(out), *more)
    )
    print(kills)
