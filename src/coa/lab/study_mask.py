"""`coa study mask`: does it help to leave observations out of the loss?

Two arms train on the same chains with the same seeds, order and number of updates. In one what
tools answered has weight 0, in the other it counts like the model's own words. Both are measured
in the usual loop, which stops a turn at the end of a call, and once more with nobody to stop them
there: what does the model write where an observation belongs?
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from coa.engines import rollouts_at_once
from coa.engines.base import Engine, Sampling, sampling_key
from coa.environment import load_environment, open_environments
from coa.errors import ConfigError
from coa.evaluation.compare import SUMMARY
from coa.grammar import FaultKind, Grammar, load_grammar, parse, system_prompt
from coa.io.collect import Line, collect
from coa.io.runs import Json, read_jsonl, write_atomic
from coa.lab.study_arms import TITLES as USUAL
from coa.lab.study_arms import (
    Measurement,
    Note,
    Scores,
    StudyPiece,
    Tables,
    TrainingStudy,
    first,
    held_out,
    lines,
    make_chains,
    measured,
    pieces,
    put_usual,
    train,
    trained_on,
)
from coa.tasks import Task, TaskSet

QUESTION = "does leaving observations out of the loss help?"
ARMS = {"masked": 0.0, "trained on": 1.0}
"""The weight of observations in each."""
AGAINST = "trained on"
TEXTS = "texts.jsonl"


@dataclass(frozen=True)
class MaskStudy(TrainingStudy):
    unstopped_tokens: int = 160
    """Sampled without a stop at the end of a call: room for a call and what follows it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unstopped_tokens < 1:
            raise ConfigError(
                f"unstopped_tokens: found {self.unstopped_tokens}, expected at least 1."
            )
        if self.sft.observation_weight:
            raise ConfigError("sft.observation_weight: is what this study compares; leave it out.")


def plan(settings: MaskStudy) -> list[StudyPiece]:
    n, runs = settings.eval.n, len(ARMS) * len(settings.seeds)
    return [*pieces(settings, len(ARMS)), StudyPiece(f"{n} texts without stops", runs, n * 0.3)]


def run(settings: MaskStudy, root: Path, note: Note) -> Json:
    grammar, part = load_grammar("mhqa"), settings.eval
    files = held_out(root, part, settings.chains.families)
    tables, equal = Tables(), dict[str, list[Json]]()
    for seed in settings.seeds:
        made = make_chains(root / f"chains-{seed}", settings.chains, seed, files.values())
        chains = first(made.by_grammar["mhqa"], settings.chains.rows)
        for arm, weight in ARMS.items():
            note(f"== seed {seed}: observations {arm}")
            folder = root / f"seed-{seed}" / arm.replace(" ", "-")
            sft = replace(settings.sft, observation_weight=weight)
            model = train(chains, sft, seed, folder / "sft", note)
            free = folder / "unstopped"
            also = [unstopped(files["held out"], free, grammar, settings)]
            outs = measured(model, files, folder, part, also=also)
            equal.setdefault(arm, []).append(trained_on(chains, sft))
            put_usual(tables, arm, seed, outs)
            for name in ("called", "invented"):
                tables.put(name, arm, seed, _noted(free, name))
    return {"equal": equal, "measures": tables.compared(AGAINST)}


TITLES = USUAL | {
    "called": "texts that begin with a call, nobody stopping it",
    "invented": "texts with an invented observation",
}


def show(result: Json) -> Iterable[str]:
    for arm, each in result["equal"].items():
        counts = [f"{one['trained_tokens']} of {one['tokens']} tokens" for one in each]
        yield f"{arm}, by seed: {each[0]['rows']} chains; {', '.join(counts)} count"
    for name, found in result["measures"].items():
        yield ""
        yield from lines(TITLES[name], found)


# -- with nobody to stop it ------------------------------------------------------------------


def unstopped(tasks: Path, out: Path, grammar: Grammar, settings: MaskStudy) -> Measurement:
    """What the model writes for each task when a call does not end its turn."""
    return Measurement(
        out,
        lambda engine: asyncio.run(_unstopped(TaskSet.load(tasks), out, grammar, settings, engine)),
    )


async def _unstopped(
    tasks: TaskSet, out: Path, grammar: Grammar, settings: MaskStudy, engine: Engine
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokens, env = settings.unstopped_tokens, load_environment("atlas-mhqa", grammar=grammar.name)
    stop = tuple(f"</{name}>" for name in grammar.of_kind("answer"))

    def work(task: Task) -> Callable[[], Awaitable[Line]]:
        async def write() -> Line:
            bound = await opened.bound(task.public())
            prompt = engine.encode_prompt(system_prompt(bound), task.question)
            key = sampling_key(settings.eval.seed, task.id, 0, 0)
            made = await engine.generate(prompt, Sampling(max_tokens=tokens, stop=stop, key=key))
            text = engine.decode(made.ids)
            return Line({"task_id": task.id, "text": text, **judge(bound, text)})

        return write

    async with open_environments((env,)) as opened:
        found = await collect(
            out / TEXTS,
            {task.id: work(task) for task in tasks},
            parse=Line,
            key=lambda line: str(line.record["task_id"]),
            concurrency=rollouts_at_once(engine, settings.eval.concurrency),
        )
    shares = {
        name: sum(line.record[name] for line in found) / len(found) for name in judge(grammar, "")
    }
    write_atomic(out / SUMMARY, json.dumps({"n": len(found), **shares}, indent=2) + "\n")


def judge(grammar: Grammar, text: str) -> dict[str, bool]:
    """Whether a text has a whole call before anything is wrong with it, and whether its author
    wrote an observation, which is not the author's to write."""
    parsed = parse(grammar, text)
    begins = parsed.faults[0].at if parsed.faults else len(text)
    called = any(b.role in grammar.tool_roles and b.end <= begins for b in parsed.blocks)
    invented = any(fault.kind is FaultKind.FORGED for fault in parsed.faults)
    return {"called": called, "invented": invented}


def _noted(folder: Path, name: str) -> Scores:
    return {r["task_id"]: float(r[name]) for _, r in read_jsonl(folder / TEXTS)}
