"""The recording stage: a task file in, an episodes file out, over as many processes as there are.

Beside the episodes file stand its manifest (what it was made with) and its timings: what depends on
the clock is kept apart, so that the episodes are the same whenever and by how many processes they
are recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from coa.environment import Environment, ToolSettings, environment_name, open_environments
from coa.errors import RecordError, UsageError
from coa.io.collect import Line, Rehearsal, collect, spread_out
from coa.io.progress import counted, say
from coa.io.runs import Appender, Json, check_growing, claim, dumps, manifest_beside, read_records
from coa.io.settings import Option
from coa.io.workers import Work, Workers, worker_count
from coa.recording import Teacher, load_teacher, opened, recorded
from coa.recording.budget import BudgetSpent
from coa.recording.episode import READABLE, ToolSpec
from coa.recording.recorder import COUNTED, CRITICS, MISTAKES
from coa.rollouts import ENV, References, choose_environments
from coa.tasks import Task, TaskSet
from coa.tools.base import Toolbox

if TYPE_CHECKING:
    from coa.recording.llm import CostEstimate


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
    """Records one public task after another; runs in a worker process."""
    environments = [Environment.received(each) for each in settings["environments"]]
    tools = ToolSettings(**settings["tools"])
    sets = [Task.from_json(task) for task in settings["tasks"]]
    out = Path(settings["out"]) if settings["out"] else None
    async with AsyncExitStack() as stack:
        held = await stack.enter_async_context(open_environments(environments, sets, tools))
        teachers: dict[str, Teacher] = {}
        for env in environments:
            loaded = load_teacher(_teacher_of(env, settings["teacher"]), **settings["options"])
            teachers[env.name] = await stack.enter_async_context(opened(loaded, out))

        async def record(item: Json) -> Json:
            task, begun = Task.from_json(item), time.monotonic()
            async with held.session(task) as session:
                teacher = teachers[held.of(task).name]
                episode = await recorded(teacher, task, session.tools, settings["seed"])
                episode.tools = episode.tools or tool_specs(session.tools)
            episode.meta = {**task.meta, **episode.meta}  # the set decides about the environment
            seconds = {"total": time.monotonic() - begun, **episode.seconds}
            return {"record": episode.to_json(), "seconds": seconds}

        yield record


def tool_specs(toolbox: Toolbox) -> list[ToolSpec]:
    """The tools of a toolbox as an episode notes them."""
    return [ToolSpec(t.name, t.about, t.body, t.schema) for t in toolbox.values()]


def _teacher_of(env: Environment, asked: Any) -> Any:
    if teacher := asked or env.teacher:
        return teacher
    raise UsageError(f"environment {env.name!r} has no teacher. Name one with --teacher.")


@dataclass(frozen=True)
class Recording:
    """What is recorded: whose work, on which tasks, in which environments."""

    env: Annotated[
        References,
        ENV,
    ] = ()
    """None: the shipped ones that the tasks belong to."""
    tasks: Annotated[
        str | Path | TaskSet, Option("Task file (JSONL or CSV); else the environment's own tasks.")
    ] = ""
    split: Annotated[str, Option("Of the environment's own tasks.")] = "train"
    teacher: Annotated[
        Any, Option("experts, llm or module:attribute; else the environment's own.")
    ] = ""
    """A value, too."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the teacher."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the environments."""
    tools: ToolSettings = field(default_factory=ToolSettings)
    grammar: Annotated[str, Option("Preset name or a .toml file; auto suits each task.")] = "auto"
    """What all tasks are taken to be made for, which decides about the tools of those that belong
    to no set; auto: what each names itself."""
    seed: Annotated[int, Option("Seed of every random choice.")] = 0
    workers: Annotated[
        int | None, Option("Processes; as many as there are cores by default.", least=1)
    ] = None


def run_recording(recording: Recording, out: Path) -> Recorded:
    """Record a teacher at work on all tasks, or continue."""
    job = _job(recording, out)
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


def _job(asked: Recording, out: Path) -> _Job:
    named = isinstance(asked.tasks, str | Path) and str(asked.tasks)
    if named and out.resolve() == Path(named).resolve():
        raise UsageError(f"{out}: holds the tasks. Name another file for the episodes.")
    check_growing(out)
    if out.is_file() and not manifest_beside(out).is_file():  # what else it holds is left as it is
        read_records(out, _stored, growing=True)
    options = dict(asked.options)
    environments, tasks = choose_environments(
        asked.env,
        asked.tasks,
        split=asked.split,
        tools=asked.tools,
        settings=dict(asked.settings),
        grammar=asked.grammar,
        note=say,
    )
    teacher = asked.teacher or ("" if asked.env else "experts")
    loaded = [load_teacher(_teacher_of(env, teacher), **options) for env in environments]
    public = [task.public() for task in tasks]
    if asked.env:
        public = [_at_home(task, environments) for task in public]
    elif asked.grammar != "auto":  # a task that names it is also distilled in it
        public = [replace(task, meta={**task.meta, "grammar": asked.grammar}) for task in public]
    settings: Json = {"teacher": teacher if isinstance(teacher, str) else "", "options": options}
    settings |= {"seed": asked.seed, "tools": asdict(asked.tools), "out": str(out)}
    if not isinstance(teacher, str):
        environments = tuple(replace(env, teacher=teacher, reference="") for env in environments)
    settings["environments"] = [env.passed_on() for env in environments]
    settings["tasks"] = [task.to_json() for task in one_of_each(public)]
    named = teacher if isinstance(teacher, str) and teacher else _name(loaded[0])
    claimed: Json = {"teacher": named, **_identity(loaded[0], options), "seed": asked.seed}
    claimed |= {} if asked.grammar == "auto" else {"grammar": asked.grammar}
    claimed["tasks"] = TaskSet(tuple(public)).fingerprint()
    for name, value in _opened_with(environments, settings, asked.tools).items():
        claimed.setdefault(name, value)  # a grammar that was asked for is told by its name
    return _Job(loaded[0], public, settings, claimed, _workers(asked, loaded, environments, public))


def _workers(
    asked: Recording,
    teachers: Sequence[Teacher],
    environments: Sequence[Environment],
    tasks: Sequence[Task],
) -> int:
    """Processes to record with; what cannot be loaded in another works in this one, and says so."""
    workers = asked.workers
    why = ""
    if any(hasattr(each, "opened") for each in teachers):  # it keeps something beside the file
        why = f"the teacher {_name(teachers[0])} works in one process"
    elif not all(env.is_loadable for env in environments):
        why = "an environment that is made in Python works in its own process"
    if why:
        if workers not in (None, 1):
            say(f"coa: workers {workers} is ignored: {why}")
        return 1
    if workers is None:  # a teacher of one's own may not be made for several processes
        ours = all(_name(each) == "experts" for each in teachers)
        return worker_count(len(tasks)) if ours else 1
    return workers


def _name(teacher: Teacher) -> str:
    return str(getattr(teacher, "name", "") or type(teacher).__name__)


def _identity(teacher: Teacher, options: Json) -> Json:
    """What decides what a teacher does, for a manifest."""
    return teacher.identity() if hasattr(teacher, "identity") else options


def _at_home(task: Task, environments: Sequence[Environment]) -> Task:
    """The task, which names its environment, so that what is made of it does, too."""
    known = {env.name for env in environments}
    name = environment_name(task) if environment_name(task) in known else environments[0].name
    return replace(task, meta={**task.meta, "environment": name})


def _opened_with(environments: Sequence[Environment], settings: Json, tools: ToolSettings) -> Json:
    """Fingerprints of what the tasks are worked on with."""

    async def inputs() -> Json:
        sets = [Task.from_json(task) for task in settings["tasks"]]
        async with open_environments(environments, sets, tools, dry=True) as opened:
            return dict(opened.inputs())

    return asyncio.run(inputs())


def one_of_each(tasks: Iterable[Task]) -> list[Task]:
    """A task for each way in which tools are opened: enough to find out what is missing."""
    found: dict[Any, Task] = {}
    for task in tasks:
        meta = task.meta
        key = (environment_name(task), str(meta.get("world")), meta.get("grammar"))
        found.setdefault((*key, "tools" in meta), task)
    return list(found.values())


def rehearse_recording(recording: Recording, out: Path) -> Rehearsal | CostEstimate:
    """What `run_recording` would take, by recording a few tasks and writing nothing."""
    job = _job(recording, out)
    stored = read_records(out, _stored, growing=True) if out.is_file() else []
    held = {line.record["task_id"] for line in stored}
    left = [task for task in job.tasks if task.id not in held]
    if hasattr(job.teacher, "estimate"):  # trying would cost money
        return asyncio.run(_estimated(job, left, recording.tools))
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


async def _estimated(job: _Job, tasks: Sequence[Task], tools: ToolSettings) -> CostEstimate:
    """What a teacher says that recording these tasks will cost."""
    environments = [Environment.received(each) for each in job.settings["environments"]]
    async with open_environments(environments, tools=tools, dry=True) as opened:
        estimate: CostEstimate = await job.teacher.estimate(tasks, opened.toolbox)  # type: ignore[attr-defined]
        return estimate


async def _record(tasks: Sequence[Task], out: Path, settings: Json, workers: int) -> list[Line]:
    timings = Appender(out.with_name(f"{out.name}.timings.jsonl"))
    async with Workers("coa.recording.record:recorder", settings, workers, at_once=AT_ONCE) as pool:

        def work(task: Task) -> Callable[[], Awaitable[Line]]:
            async def record() -> Line:
                done = await pool.do(task.to_json(), f"task {task.id}")
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
