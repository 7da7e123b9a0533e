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
from coa.engines.base import Engine, sampling_key
from coa.environment import OpenEnvironment
from coa.errors import RecordError, TrainingError
from coa.io.progress import Mode, counted
from coa.io.runs import Json, read_records, write_jsonl
from coa.loop import Budget, Decoding
from coa.rollouts import choose_prompt, roll_out
from coa.tasks import Task
from coa.train.settings import SelectSettings

if TYPE_CHECKING:
    from coa.train.processes import Processes


RECORD, ATTEMPTS = "selection.jsonl", "selection"


@dataclass(frozen=True, slots=True)
class Rate:
    """How often the attempts of a task succeeded; None when none of them could be judged."""

    rate: float | None
    n: int
    """Attempts that could be judged."""


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
    engine: Engine,
    opened: OpenEnvironment,
    budget: Budget,
    decoding: Decoding,
    directory: Path,
    *,
    concurrency: int = 96,
    processes: Processes | None = None,
    mode: Mode = "auto",
) -> Selected:
    """Choose the tasks of a run whose directory is `directory`.

    With several processes each attempts its share, and all come to the same result; whether it is
    known already is for the first one to say, since others may not see its files.
    """
    if not settings.on:
        return Selected(list(tasks), [], f"{len(tasks)} tasks")
    from coa.train.processes import Processes  # needs torch

    processes = processes or Processes()
    path = directory / RECORD
    known = read_records(path, Verdict.from_json) if path.is_file() else []
    verdicts = known = processes.gather(known)[0]
    if not known:
        work = _Attempts(budget, decoding, directory, concurrency, processes, mode)
        verdicts = await _judge(tasks, settings, engine, opened, work)
    elif [verdict.task_id for verdict in known] != [task.id for task in tasks]:
        raise RecordError(
            f"{path}: is about other tasks than the {len(tasks)} of this run. "
            "Write somewhere else, or delete it to select again."
        )
    selected = _selected(tasks, verdicts, settings, directory)
    if processes.main and not known:
        write_jsonl(path, (verdict.to_json() for verdict in verdicts))
    return selected


@dataclass(frozen=True)
class _Attempts:
    """What the attempts of both questions have in common."""

    budget: Budget
    decoding: Decoding
    directory: Path
    concurrency: int
    processes: Processes
    mode: Mode

    async def rates(
        self,
        name: str,
        tasks: Sequence[Task],
        samples: int,
        engine: Engine,
        opened: OpenEnvironment,
    ) -> dict[str, Rate]:
        """The pass rate of every task, by id; what is known already is not asked again."""
        ours = self.processes
        path = self.directory / ATTEMPTS / f"{ours.named(name)}.jsonl"
        known = path.with_suffix(".rates.jsonl")
        if known.is_file():  # a judge may see things differently the second time
            found = dict(read_records(known, _rate_of))
        else:
            found = await self._attempt(name, ours.share(tasks), samples, engine, opened, path)
            if any(rate.n for rate in found.values()):
                write_jsonl(known, ({"task_id": i, **asdict(rate)} for i, rate in found.items()))
        shares = ours.gather(found)
        return {task_id: rate for share in shares for task_id, rate in share.items()}

    async def _attempt(
        self,
        name: str,
        tasks: Sequence[Task],
        samples: int,
        engine: Engine,
        opened: OpenEnvironment,
        path: Path,
    ) -> dict[str, Rate]:
        # Draws of their own: training would otherwise begin with the very rollouts that were seen.
        seed = sampling_key(self.decoding.seed, f"selection {name}", 0, 0) >> 32
        with counted(f"select {name}", len(tasks) * samples, self.mode) as on_done:
            trajectories = await roll_out(
                ((task, sample) for task in tasks for sample in range(samples)),
                engine,
                opened,
                path,
                budget=self.budget,
                decoding=replace(self.decoding, seed=seed),
                concurrency=rollouts_at_once(engine, self.concurrency),
                again=lambda trajectory: trajectory.failed_outside,
                on_done=on_done,
            )
        by_id = {task.id: task for task in tasks}
        scored = await opened.score_all((by_id[t.task_id], t) for t in trajectories)
        scores: dict[str, list[float]] = {task.id: [] for task in tasks}
        for trajectory, found in zip(trajectories, scored, strict=True):
            if found.score is not None and not trajectory.failed_outside:
                scores[trajectory.task_id].append(found.score)
        return {i: Rate(sum(s) / len(s) if s else None, len(s)) for i, s in scores.items()}


async def _judge(
    tasks: Sequence[Task],
    settings: SelectSettings,
    engine: Engine,
    opened: OpenEnvironment,
    work: _Attempts,
) -> list[Verdict]:
    """A verdict on every task; those that need no tool are not attempted with tools."""
    verdicts = {task.id: Verdict(task.id) for task in tasks}
    if settings.no_tool_samples:
        for task_id, found in (await _without_tools(tasks, settings, engine, opened, work)).items():
            why = _why_no_tool(found, settings)
            verdicts[task_id] = Verdict(task_id, found.rate, found.n, why=why)
    if settings.samples:
        left = [task for task in tasks if verdicts[task.id].kept]
        rates = await work.rates("with_tools", left, settings.samples, engine, opened)
        for task_id, found in rates.items():
            verdicts[task_id] = replace(
                verdicts[task_id], rate=found.rate, n=found.n, why=_why(found, settings)
            )
    return list(verdicts.values())


async def _without_tools(
    tasks: Sequence[Task],
    settings: SelectSettings,
    engine: Engine,
    opened: OpenEnvironment,
    work: _Attempts,
) -> dict[str, Rate]:
    async with AsyncExitStack() as stack:
        if reference := settings.no_tool_engine:
            context = work.budget.context or None
            engine = load_engine(reference, slots=slots_for(work.concurrency), context=context)
            stack.push_async_callback(engine.close)
            prompt = choose_prompt("auto", reference)  # it may never have seen the protocol
            work = replace(work, decoding=replace(work.decoding, prompt=prompt))
        closed = opened.without_tools()
        return await work.rates("without_tools", tasks, settings.no_tool_samples, engine, closed)


def _why_no_tool(found: Rate, settings: SelectSettings) -> str:
    if found.rate is None:
        return "unjudged"
    return "needs_no_tool" if found.rate > settings.no_tool_most else ""


def _why(found: Rate, settings: SelectSettings) -> str:
    if found.rate is None:
        return "unjudged"
    if found.rate >= settings.most:
        return "too_easy"
    return "too_hard" if found.rate < settings.least else ""


def _rate_of(record: Json) -> tuple[str, Rate]:
    return record["task_id"], Rate(record["rate"], record["n"])


def _selected(
    tasks: Sequence[Task], verdicts: list[Verdict], settings: SelectSettings, directory: Path
) -> Selected:
    kept = [task for task, verdict in zip(tasks, verdicts, strict=True) if verdict.kept]
    dropped = Counter(verdict.why for verdict in verdicts if not verdict.kept)
    counts = [f"{dropped[why]} {word}" for why, word in _words(settings, dropped).items()]
    if kept:
        line = f"{len(tasks)} tasks: " + ", ".join([*counts, f"{len(kept)} kept"])
        return Selected(kept, verdicts, line)
    advice = {
        "needs_no_tool": "Take tasks that need a tool, or raise select.no_tool_most.",
        "too_easy": "Take harder tasks, or set select.samples to 0.",
        "too_hard": "Take easier tasks, lower select.least, or train longer with coa sft first.",
        "unjudged": f"The attempts in {directory / ATTEMPTS} say why; put it right and go on.",
    }
    most = max(dropped, key=lambda why: dropped[why])
    raise TrainingError(
        f"select: none of {len(tasks)} tasks is left to train on: {', '.join(counts)}. "
        f"{advice[most]}"
    )


def _words(settings: SelectSettings, dropped: Counter[str]) -> dict[str, str]:
    """What is said of the tasks that were dropped, in the order of the questions."""
    nearly_one = settings.most * settings.samples > settings.samples - 1
    words = {
        "needs_no_tool": "needs no tool" if dropped["needs_no_tool"] == 1 else "need no tool",
        "too_easy": "always solved" if nearly_one else "solved too often",
        "too_hard": "never solved"
        if settings.least * settings.samples <= 1
        else "solved too rarely",
        "unjudged": "could not be judged",
    }
    return {why: word for why, word in words.items() if dropped[why]}
