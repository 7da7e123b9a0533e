"""The work of `coa bench sft` and `coa bench rl` done by us, as a script, like a peer's.

On stdin one JSON object: a work of `coa.lab.bench_train`. On stdout one JSON object: seconds,
loss and tokens of every update, version.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path

from coa.errors import EngineError
from coa.io.runs import METRICS, TIMINGS, Json, read_jsonl
from coa.lab.bench_train import GRAMMAR
from coa.rewards import RewardSettings
from coa.tasks import Task, TaskSet
from coa.trajectory import Author, Trajectory


def main() -> None:
    # Libraries may write to stdout as well; the result gets a copy of it to itself.
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        done = sft(asked, Path(folder)) if asked["kind"] == "sft" else rl(asked, Path(folder))
    done["version"] = f"coa {metadata.version('chain-of-agents')}"
    print(json.dumps(done), file=result, flush=True)


def sft(asked: Json, folder: Path) -> Json:
    """As `coa sft` does it, from rows on."""
    from coa.train.policy import make_policy
    from coa.train.rows import Row
    from coa.train.settings import SftSettings
    from coa.train.sft import UpdateReport, run_sft

    rows = [
        Row(str(at), row["input_ids"], [float(label >= 0) for label in row["labels"]])
        for at, row in enumerate(asked["rows"])
    ]
    settings = SftSettings(
        model=asked["model"],
        rank=asked["rank"],
        lr=asked["lr"],
        schedule="constant",
        warmup=0.0,
        batch_size=asked["batch_size"],
        dtype=asked["dtype"],
        grad_clip=asked["grad_clip"],
        threads=asked["threads"],
    )
    policy = make_policy(settings)
    marks = [time.perf_counter()]
    losses: list[float] = []

    def on_update(report: UpdateReport) -> None:
        marks.append(time.perf_counter())
        losses.append(report.loss)

    run_sft(settings, rows, folder / "run", on_update=on_update, policy=policy)
    return {
        "seconds": [end - start for start, end in pairwise(marks)],
        "loss": losses,
        "tokens": [line["tokens"] for line in _lines(folder / "run" / METRICS)],
    }


def _lines(path: Path) -> list[Json]:
    return [record for _, record in read_jsonl(path)]


def rl(asked: Json, folder: Path) -> Json:
    """As `coa rl` does it: one turn a rollout, no tool is called, no group is left out."""
    from coa.train.rl_stage import run_rl
    from coa.train.settings import AlarmSettings, RlRecipe, RlSettings, RolloutSettings, preset

    tasks = TaskSet(tuple(Task.from_json(record) for record in asked["tasks"]), "train")
    tasks.save(folder / "tasks.jsonl")
    settings = RlSettings(
        model=asked["model"],
        rank=asked["rank"],
        loss=preset("dapo"),
        updates=asked["updates"],
        tasks_per_update=len(tasks),
        group_size=asked["group_size"],
        refills=0,
        void_turns="keep",
        lr=asked["lr"],
        grad_clip=asked["grad_clip"],
        checkpoint_every=asked["updates"],
        dtype=asked["dtype"],
        threads=asked["threads"],
    )
    sampled = asked["tokens"]
    recipe = RlRecipe(
        tasks=str(folder / "tasks.jsonl"),
        out=str(folder / "run"),
        grammar=GRAMMAR,
        prompt="compact",
        rl=settings,
        rollout=RolloutSettings(
            turns=1,
            turn_tokens=sampled,
            tokens=sampled,
            context=asked["context"],
            concurrency=len(tasks) * asked["group_size"],
        ),
        reward=RewardSettings(f"coa.lab.bench_coa:{checksum.__name__}"),
        alarms=AlarmSettings(window=asked["updates"] + 1),
    )
    _never_end_early()
    run_rl(recipe, quiet=True)
    records = _lines(folder / "run" / METRICS)
    if any(record["groups_flat"] for record in records):
        raise EngineError("a group was flat, which saves the work of training on it; run again.")
    timings = [line for line in _lines(folder / "run" / TIMINGS) if "rollout_s" in line]
    return {
        "seconds": [line["seconds"] for line in timings],
        "rollout_s": [line["rollout_s"] for line in timings],
        "reward": [record["reward"] for record in records],
        "tokens": [record["tokens"] for record in records],
    }


def _never_end_early() -> None:
    """Have this process's engine sample every turn to its limit, as the peer is asked to.

    Sampling has no switch for this, because no user wants it.
    """
    from coa.engines.base import Completion, OnText, Sampling
    from coa.engines.local import LocalEngine

    generate = LocalEngine.generate

    async def whole(
        self: LocalEngine, ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        self._batch._eos = frozenset()
        return await generate(self, ids, replace(sampling, stop=()), on_text)

    LocalEngine.generate = whole  # type: ignore[method-assign, assignment]


def checksum(task: Task, trajectory: Trajectory) -> float:
    """The reward: a number that differs between nearly any two texts, so that no group is flat."""
    written = "".join(s.text for s in trajectory.segments if s.author is Author.MODEL)
    return sum(map(ord, written)) % 101 / 100


if __name__ == "__main__":
    main()
