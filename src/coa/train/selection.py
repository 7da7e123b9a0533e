"""select(): which tasks are worth training on, found out before the first update.

Two questions, in this order, since the first is the cheaper one and spares attempts of the second:

* Does the task need a tool? It is attempted with none at all, not even programs. What succeeds too
  often is known already, and would teach the model that tools are not worth calling.
* Is there something to learn? It is attempted as in training. When all attempts succeed, a group
  has no differences to learn from; the same may be said of what never succeeds.

A pass rate is the mean reward of the attempts that could be judged: what failed because a tool, an
engine or a judge failed says nothing about the task. Attempts are kept under `DIR/selection/`, so a
killed selection continues; `DIR/selection.jsonl` is written when all is known, and from then on
nothing is attempted again, whatever weights the engine has by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from coa.engines import load_engine, rollouts_at_once, slots_for
from coa.engines.base import sampling_key
from coa.errors import RecordError, TrainingError
from coa.io.progress import Mode, counted
from coa.io.runs import Json, read_records, write_jsonl
from coa.rollouts import choose_prompt
from coa.tasks import Task
from coa.train.settings import SelectSettings

if TYPE_CHECKING:
    from coa.train.groups import Sampler

RECORD, ATTEMPTS = "selection.jsonl", "selection"


PassRate = tuple[float | None, int]
"""The mean score of the attempts of a task that could be judged, None when none could, and how
many these are."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of selection.jsonl: a task, its pass rates, and why it is not trained on."""

    task_id: str
    no_tool_rate: float | None = None
    no_tool_n: int = 0
    rate: float | None = None
    n: int = 0
    why: str = ""
    """needs_no_tool, too_easy, too_hard or unjudged; empty: it is kept."""

    @property
    def kept(self) -> bool:
        return not self.why

    def to_json(self) -> Json:
        return {**asdict(self), "kept": self.kept}

    @classmethod
    def from_json(cls, record: Json) -> Verdict:
        return cls(**{name: record[name] for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Selected:
    """The tasks to train on, in their order, and what became of all of them."""

    tasks: list[Task]
    verdicts: list[Verdict]
    """Empty when nothing was asked."""
    line: str
    """'200 tasks: 12 need no tool, 31 always solved, 157 kept'."""


async def select(
    tasks: Sequence[Task],
    settings: SelectSettings,
    sampler: Sampler,
    directory: Path,
    mode: Mode = "auto",
) -> Selected:
    """Choose the tasks of a run whose directory is `directory`.

    With several processes each attempts its share, and all come to the same result; whether it is
    known already is for the first one to say, since others may not see its files.
    """
    if not settings.on:
        return Selected(list(tasks), [], f"{len(tasks)} tasks")
    path = directory / RECORD
    known = read_records(path, Verdict.from_json) if path.is_file() else []
    verdicts = known = sampler.processes.gather(known)[0]
    if not known:
        verdicts = await _judge(tasks, settings, sampler, directory / ATTEMPTS, mode)
    elif [verdict.task_id for verdict in known] != [task.id for task in tasks]:
        raise RecordError(
            f"{path}: is about other tasks than the {len(tasks)} of this run. "
            "Write somewhere else, or delete it to select again."
        )
    selected = _selected(tasks, verdicts, settings, directory)
    if sampler.processes.main and not known:
        write_jsonl(path, (verdict.to_json() for verdict in verdicts))
    return selected


async def _judge(
    tasks: Sequence[Task], settings: SelectSettings, sampler: Sampler, folder: Path, mode: Mode
) -> list[Verdict]:
    """A verdict on every task; those that need no tool are not attempted with tools."""
    verdicts = {task.id: Verdict(task.id) for task in tasks}
    if samples := settings.no_tool_samples:
        async with AsyncExitStack() as stack:
            closed = replace(sampler, opened=sampler.opened.without_tools())
            if reference := settings.no_tool_engine:
                slots, context = slots_for(sampler.concurrency), sampler.budget.context or None
                engine = load_engine(reference, slots=slots, context=context)
                stack.push_async_callback(engine.close)
                # It may never have seen the protocol.
                decoding = replace(sampler.decoding, prompt=choose_prompt("auto", reference))
                at_once = rollouts_at_once(engine, sampler.concurrency)
                closed = replace(closed, engine=engine, decoding=decoding, concurrency=at_once)
            found = await _rates("without_tools", tasks, samples, closed, folder, mode)
        for task_id, (rate, n) in found.items():
            known = rate is not None and rate > settings.no_tool_most
            why = "unjudged" if rate is None else "needs_no_tool" if known else ""
            verdicts[task_id] = Verdict(task_id, rate, n, why=why)
    if samples := settings.samples:
        left = [task for task in tasks if verdicts[task.id].kept]
        found = await _rates("with_tools", left, samples, sampler, folder, mode)
        for task_id, (rate, n) in found.items():
            if rate is None:
                why = "unjudged"
            elif rate >= settings.most:
                why = "too_easy"
            else:
                why = "too_hard" if rate < settings.least else ""
            verdicts[task_id] = replace(verdicts[task_id], rate=rate, n=n, why=why)
    return list(verdicts.values())


async def _rates(
    name: str, tasks: Sequence[Task], samples: int, sampler: Sampler, folder: Path, mode: Mode
) -> dict[str, PassRate]:
    """The pass rate of every task, by id; what is known already is not asked again."""
    ours = sampler.processes
    path = folder / f"{ours.named(name)}.jsonl"
    known = path.with_suffix(".rates.jsonl")
    if known.is_file():  # a judge may see things differently the second time
        found = dict(read_records(known, lambda line: (line["task_id"], (line["rate"], line["n"]))))
    else:
        own = ours.share(tasks)
        pairs = [(task, sample) for task in own for sample in range(samples)]
        # Draws of their own: training would otherwise begin with the very rollouts that were seen.
        seed = sampling_key(sampler.decoding.seed, f"selection {name}", 0, 0) >> 32
        decoding = replace(sampler.decoding, seed=seed)
        with counted(f"select {name}", len(pairs), mode) as on_done:
            rollouts = await sampler.attempt(pairs, path, decoding, on_done)
        scores: dict[str, list[float]] = {task.id: [] for task in own}
        for rollout in rollouts:
            if rollout.score is not None:
                scores[rollout.trajectory.task_id].append(rollout.score)
        found = {i: (sum(s) / len(s) if s else None, len(s)) for i, s in scores.items()}
        if any(n for _, n in found.values()):
            lines = ({"task_id": i, "rate": rate, "n": n} for i, (rate, n) in found.items())
            write_jsonl(known, lines)
    return {task_id: rate for share in ours.gather(found) for task_id, rate in share.items()}


def _selected(
    tasks: Sequence[Task], verdicts: list[Verdict], settings: SelectSettings, directory: Path
) -> Selected:
    kept = [task for task, verdict in zip(tasks, verdicts, strict=True) if verdict.kept]
    dropped = Counter(verdict.why for verdict in verdicts if not verdict.kept)
    always = settings.most * settings.samples > settings.samples - 1
    never = settings.least * settings.samples <= 1
    words = {  # in the order of the questions: what is said of those dropped, and what to do
        "needs_no_tool": (
            "needs no tool" if dropped["needs_no_tool"] == 1 else "need no tool",
            "Take tasks that need a tool, or raise select.no_tool_most.",
        ),
        "too_easy": (
            "always solved" if always else "solved too often",
            "Take harder tasks, or set select.samples to 0.",
        ),
        "too_hard": (
            "never solved" if never else "solved too rarely",
            "Take easier tasks, lower select.least, or train longer with coa sft first.",
        ),
        "unjudged": (
            "could not be judged",
            f"The attempts in {directory / ATTEMPTS} say why; put it right and go on.",
        ),
    }
    counts = [f"{dropped[why]} {said}" for why, (said, _) in words.items() if dropped[why]]
    if kept:
        line = f"{len(tasks)} tasks: " + ", ".join([*counts, f"{len(kept)} kept"])
        return Selected(kept, verdicts, line)
    _, advice = words[max(dropped, key=lambda why: dropped[why])]
    raise TrainingError(
        f"select: none of {len(tasks)} tasks is left to train on: {', '.join(counts)}. {advice}"
    )
