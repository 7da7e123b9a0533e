"""The recording stage: a task file in, an episodes file out, over as many processes as there are.

Beside the episodes file stand its manifest (what it was made with) and its timings: what depends on
the clock is kept apart, so that the episodes are the same whenever and by how many processes they
are recorded.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coa.collect import Line, collect
from coa.crew import Crew, Work, crew_size
from coa.errors import RecordError, UsageError
from coa.progress import counted
from coa.protocol import load_grammar
from coa.rehearsal import Rehearsal, spread_out
from coa.runs import Appender, Json, check_growing, claim, dumps, manifest_beside, read_records
from coa.tasks.task import Task, TaskSet
from coa.teachers import Teacher, load_teacher, opened, recorded
from coa.teachers.desk import COUNTED, CRITICS, MISTAKES
from coa.teachers.episode import READABLE
from coa.teachers.llm_budget import BudgetSpent
from coa.tools.kits import KitSettings, one_of_each, open_kit

if TYPE_CHECKING:
    from coa.teachers.llm_estimate import Estimate

_FIELDS = {"task_id", "events", "answer", "meta"}
"""Of an episode on disk: what is read here of those that are only passed on."""
AT_ONCE = 8
"""Tasks in work at a time, in each process."""


@dataclass(frozen=True)
class Recorded:
    """What a recording came to."""

    path: Path
    episodes: int
    answered: int
    counts: dict[str, int]
    """What the teacher counted over all episodes: mistakes, alarms, misses, false alarms."""
    calls: int = 0
    tokens: int = 0
    cost: float | None = None
    """Of language models; the cost is None when a price is not known."""

    def to_json(self) -> Json:
        return {**vars(self), "path": str(self.path)}

    def lines(self) -> list[str]:
        said = [f"{self.episodes} episodes in {self.path}, {self.answered} with an answer"]
        for what, names in (("mistakes", MISTAKES), ("critics", CRITICS)):
            found = [
                f"{name.replace('_', ' ')} {self.counts[name]}"
                for name in names
                if name in self.counts
            ]
            said += [f"{what}: {', '.join(found)}"] if found else []
        if self.calls:
            money = "" if self.cost is None else f", {self.cost:.4g} in money"
            said.append(f"model calls {self.calls}, {self.tokens} tokens{money}")
        return said


@asynccontextmanager
async def recorder(settings: Json) -> AsyncIterator[Work]:
    """Records one public task after another; runs in a process of a crew."""
    kit = KitSettings(**settings["kit"])
    sets = [Task.from_json(task) for task in settings["tasks"]]
    loaded = load_teacher(settings["teacher"], **settings["options"])
    out = Path(settings["out"]) if settings["out"] else None
    async with open_kit(sets, kit) as toolbox_of, opened(loaded, out) as teacher:

        async def record(item: Json) -> Json:
            task, begun = Task.from_json(item), time.monotonic()
            episode = await recorded(teacher, task, toolbox_of(task), settings["seed"])
            episode.meta = {**task.meta, **episode.meta}  # the set decides about tools and grammar
            seconds = {"total": time.monotonic() - begun, **episode.seconds}
            return {"record": episode.to_json(), "seconds": seconds}

        yield record


def run_recording(
    tasks: Path,
    out: Path,
    teacher: str = "experts",
    options: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    kit: KitSettings | None = None,
    workers: int | None = None,
    grammar: str = "auto",
) -> Recorded:
    """Record a teacher at work on all tasks, or continue; `options` are the teacher's.

    `grammar` is what all tasks are taken to be made for, which decides about the tools of those
    that belong to no set; auto: what each names itself.
    """
    job = _job(tasks, out, teacher, options, seed, kit, workers, grammar)
    with claim(out, job.claim):
        try:
            lines = asyncio.run(_record(job.tasks, out, job.settings, job.workers))
        except BudgetSpent as spent:
            raise spent.beside(out) from None
    return _summed(out, [line.record for line in lines])


class _Job(NamedTuple):
    teacher: Teacher
    tasks: list[Task]
    settings: Json
    """Of `recorder`."""
    claim: Json
    workers: int


def _job(
    tasks: Path,
    out: Path,
    teacher: str,
    options: Mapping[str, Any] | None,
    seed: int,
    kit: KitSettings | None,
    workers: int | None,
    grammar: str,
) -> _Job:
    if out.resolve() == tasks.resolve():
        raise UsageError(f"{out}: holds the tasks. Name another file for the episodes.")
    check_growing(out)
    if out.is_file() and not manifest_beside(out).is_file():  # what else it holds is left as it is
        read_records(out, _stored, growing=True)
    kit, options = kit or KitSettings(), dict(options or {})
    loaded = load_teacher(teacher, **options)  # what is wrong with it is said before any work
    public = [task.public() for task in TaskSet.load(tasks)]
    if grammar != "auto":  # a task that names it is also distilled in it
        load_grammar(grammar)
        public = [replace(task, meta={**task.meta, "grammar": grammar}) for task in public]
    made_of = TaskSet(tuple(public)).fingerprint()
    identity = loaded.identity() if hasattr(loaded, "identity") else options
    named = {} if grammar == "auto" else {"grammar": grammar}
    claimed = {"teacher": teacher, **identity, "seed": seed, **named, "tasks": made_of}
    claimed |= kit.identity()
    settings: Json = {"teacher": teacher, "options": options, "seed": seed, "kit": asdict(kit)}
    settings["out"] = str(out)
    settings["tasks"] = [task.to_json() for task in one_of_each(public)]
    if hasattr(loaded, "opened"):  # what it keeps beside the file is one process's
        if workers not in (None, 1):
            said = f"coa: workers {workers} is ignored: the teacher {teacher} works in one process"
            print(said, file=sys.stderr)
        workers = 1
    if workers is None:  # a teacher of one's own may not be made for several processes
        workers = crew_size(len(public)) if teacher == "experts" else 1
    return _Job(loaded, public, settings, claimed, workers)


def rehearse_recording(
    tasks: Path,
    out: Path,
    teacher: str = "experts",
    options: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    kit: KitSettings | None = None,
    workers: int | None = None,
    grammar: str = "auto",
) -> Rehearsal | Estimate:
    """What `run_recording` would take, by recording a few tasks and writing nothing."""
    job = _job(tasks, out, teacher, options, seed, kit, workers, grammar)
    stored = read_records(out, _stored, growing=True) if out.is_file() else []
    held = {line.record["task_id"] for line in stored}
    left = [task for task in job.tasks if task.id not in held]
    if hasattr(job.teacher, "estimate"):  # trying would cost money
        estimate: Estimate = asyncio.run(job.teacher.estimate(left))
        return estimate
    chosen = spread_out(left)

    async def work() -> tuple[float, list[Json]]:
        async with recorder({**job.settings, "out": ""}) as record:
            for task in one_of_each(chosen):  # opens what is opened once, which is not timed
                await record(task.to_json())
            begun = time.monotonic()
            done = [await record(task.to_json()) for task in chosen]
            return time.monotonic() - begun, [each["record"] for each in done]

    seconds, records = asyncio.run(work())
    good = sum(record["answer"] is not None for record in records)
    written = sum(len(dumps(record)) for record in records)
    counts = (len(job.tasks), len(held), len(chosen), good, job.workers)
    return Rehearsal("tasks", *counts, seconds, written)


async def _record(tasks: Sequence[Task], out: Path, settings: Json, workers: int) -> list[Line]:
    timings = Appender(out.with_name(f"{out.name}.timings.jsonl"))
    async with Crew("coa.teachers.stage:recorder", settings, workers, at_once=AT_ONCE) as crew:

        def work(task: Task) -> Callable[[], Awaitable[Line]]:
            async def record() -> Line:
                done = await crew.do(task.to_json(), f"task {task.id}")
                seconds = {name: round(value, 4) for name, value in done["seconds"].items()}
                timings.write({"task_id": task.id, **seconds})
                return Line(done["record"])

            return record

        with counted("record", len(tasks)) as on_done, timings:
            return await collect(
                out,
                {task.id: work(task) for task in tasks},
                parse=_stored,
                key=lambda line: str(line.record["task_id"]),
                concurrency=AT_ONCE * max(1, workers),
                on_done=on_done,
            )


def _stored(record: Json) -> Line:
    """A line of an episodes file; it is not read in full, since it is only passed on."""
    if record.get("schema") not in READABLE or not _FIELDS.issubset(record):
        raise RecordError("this is no episode. Write somewhere else.")
    return Line(record)


def _summed(path: Path, records: Sequence[Json]) -> Recorded:
    counts: dict[str, int] = {}
    for record in records:
        for what in COUNTED:
            counts[what] = counts.get(what, 0) + int(record["meta"].get(what, 0))
    answered = sum(record["answer"] is not None for record in records)
    counts = {k: v for k, v in counts.items() if v}
    calls = [e["call"] for record in records for e in record["events"] if e.get("call")]
    tokens = sum(c.get("prompt_tokens", 0) + c.get("sampled_tokens", 0) for c in calls)
    costs = [call.get("cost") for call in calls]
    cost = sum(costs) if costs and None not in costs else None
    return Recorded(path, len(records), answered, counts, len(calls), tokens, cost)
