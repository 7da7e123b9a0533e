"""The recording stage: a task file in, an episodes file out, over as many processes as there are.

Beside the episodes file stand its manifest (what it was made with) and its timings: what depends on
the clock is kept apart, so that the episodes are the same whenever and by how many processes they
are recorded.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from coa.environment import Environment, ToolSettings, environment_name, open_environments
from coa.errors import RecordError, UsageError, boundary
from coa.io.collect import Line, Rehearsal, collect, spread_out, timed
from coa.io.progress import counted, say
from coa.io.runs import Appender, Json, check_growing, claim, dumps, manifest_beside, read_records
from coa.io.settings import Option
from coa.io.workers import AT_ONCE, Work, Workers, shortened
from coa.recording import Teacher, load_teacher
from coa.recording.budget import BudgetSpent
from coa.recording.episode import READABLE, Episode, ToolSpec
from coa.recording.recorder import COUNTED, CRITICS, MISTAKES
from coa.rollouts import ENV, SEED, WORKERS, References, choose_environments, processes_for
from coa.tasks import Task, TaskSet
from coa.tools.base import Toolbox

if TYPE_CHECKING:
    from coa.recording.llm import CostEstimate

_FIELDS = {"task_id", "events", "answer", "meta"}
"""Of an episode on disk: what is read here of those that are only passed on."""


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
    seed: Annotated[int, SEED] = 0
    workers: Annotated[int | None, WORKERS] = None


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

    @classmethod
    def of(cls, path: Path, records: Sequence[Json]) -> Recorded:
        """Add up the episodes of a file."""
        counts: Counter[str] = Counter()
        for record in records:
            counts.update({what: int(record["meta"].get(what, 0)) for what in COUNTED})
        answered = sum(record["answer"] is not None for record in records)
        calls = [e["call"] for record in records for e in record["events"] if e.get("call")]
        tokens = sum(c.get("prompt_tokens", 0) + c.get("sampled_tokens", 0) for c in calls)
        costs = [call.get("cost") for call in calls]
        cost = sum(costs) if costs and None not in costs else None
        return cls(path, len(records), answered, dict(+counts), len(calls), tokens, cost)

    def to_json(self) -> Json:
        return {**vars(self), "path": str(self.path)}

    def lines(self) -> list[str]:
        said = [f"{self.episodes} episodes in {self.path}, {self.answered} with an answer"]
        for what, names in (("mistakes", MISTAKES), ("critics", CRITICS)):
            held = [name for name in names if name in self.counts]
            if held:
                figures = (f"{name.replace('_', ' ')} {self.counts[name]}" for name in held)
                said.append(f"{what}: {', '.join(figures)}")
        if self.calls:
            money = "" if self.cost is None else f", {self.cost:.4g} in money"
            said.append(f"model calls {self.calls}, {self.tokens} tokens{money}")
        return said


def run_recording(recording: Recording, out: Path) -> Recorded:
    """Record a teacher at work on all tasks, or continue."""
    job = _prepared(recording, out)
    with claim(out, job.claim):
        try:
            lines = asyncio.run(_record(job, out))
        except BudgetSpent as spent:
            done = out.read_bytes().count(b"\n") if out.is_file() else 0
            raise BudgetSpent(f"{out}: {done} tasks are done; {spent}") from None
    return Recorded.of(out, [line.record for line in lines])


def rehearse_recording(recording: Recording, out: Path) -> Rehearsal | CostEstimate:
    """What `run_recording` would take, by recording a few tasks and writing nothing."""
    job = _prepared(recording, out)
    stored = read_records(out, _stored, growing=True) if out.is_file() else []
    held = {line.record["task_id"] for line in stored}
    left = [task for task in job.tasks if task.id not in held]
    if hasattr(job.teacher, "estimate"):  # trying would cost money
        return asyncio.run(_estimated(job, left, recording.tools))
    chosen = spread_out(left)

    opening = recorder({**job.settings, "out": ""})
    seconds, done = asyncio.run(timed(opening, [task.to_json() for task in chosen]))
    records = [each["record"] for each in done]
    good = sum(record["answer"] is not None for record in records)
    written = sum(len(dumps(record)) for record in records)
    counts = (len(job.tasks), len(held), len(chosen), good, job.workers)
    return Rehearsal("tasks", *counts, seconds, written)


# -- before anything is recorded -------------------------------------------------------------


class _Job(NamedTuple):
    environments: Sequence[Environment]
    teacher: Teacher
    """Of the first environment."""
    tasks: list[Task]
    settings: Json
    """Of `recorder`."""
    claim: Json
    """What decides what is recorded, for the manifest."""
    workers: int


def _prepared(asked: Recording, out: Path) -> _Job:
    """Load everything once, so that whatever is wrong is said before the first task."""
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
    if not isinstance(teacher, str):  # a value cannot be named to another process
        environments = tuple(replace(env, teacher=teacher, reference="") for env in environments)
        teacher = ""
    teachers = [load_teacher(_teacher_of(env, teacher), **options) for env in environments]
    public = [task.public() for task in tasks]
    if asked.env:
        public = [_at_home(task, environments) for task in public]
    elif asked.grammar != "auto":  # a task that names it is also distilled in it
        public = [replace(task, meta={**task.meta, "grammar": asked.grammar}) for task in public]
    settings: Json = {
        "teacher": teacher,
        "options": options,
        "seed": asked.seed,
        "tools": asdict(asked.tools),
        "out": str(out),
        "environments": [env.passed_on() for env in environments],
    }
    first = teachers[0]
    identity = first.identity() if hasattr(first, "identity") else options
    claimed: Json = {"teacher": teacher or _name(first), **identity, "seed": asked.seed}
    claimed |= {} if asked.grammar == "auto" else {"grammar": asked.grammar}
    claimed["tasks"] = TaskSet(tuple(public)).fingerprint()
    inputs = asyncio.run(_inputs(environments, public, asked.tools))
    # A grammar that was asked for is told by its name.
    claimed |= {name: value for name, value in inputs.items() if name not in claimed}
    alone = ""
    if any(hasattr(each, "opened") for each in teachers):  # it keeps something beside the file
        alone = f"the teacher {_name(first)} works in one process"
    # A teacher of one's own may not be made for several processes.
    spread = len(public) if all(_name(each) == "experts" for each in teachers) else 0
    workers = processes_for(asked.workers, spread, environments, alone)
    return _Job(environments, first, public, settings, claimed, workers)


def _teacher_of(env: Environment, asked: str) -> Any:
    if teacher := asked or env.teacher:
        return teacher
    raise UsageError(f"environment {env.name!r} has no teacher. Name one with --teacher.")


def _name(teacher: Teacher) -> str:
    return str(getattr(teacher, "name", "") or type(teacher).__name__)


def _at_home(task: Task, environments: Sequence[Environment]) -> Task:
    """The task, which names its environment, so that what is made of it does, too."""
    known = {env.name for env in environments}
    name = environment_name(task) if environment_name(task) in known else environments[0].name
    return replace(task, meta={**task.meta, "environment": name})


async def _inputs(
    environments: Sequence[Environment], tasks: Sequence[Task], tools: ToolSettings
) -> Json:
    """Fingerprints of what the tasks are worked on with."""
    async with open_environments(environments, tasks, tools, dry=True) as opened:
        return dict(opened.inputs())


async def _estimated(job: _Job, tasks: Sequence[Task], tools: ToolSettings) -> CostEstimate:
    """What a teacher says that recording these tasks will cost."""
    async with open_environments(job.environments, tools=tools, dry=True) as opened:
        estimate: CostEstimate = await job.teacher.estimate(tasks, opened.toolbox)  # type: ignore[attr-defined]
        return estimate


# -- recording -------------------------------------------------------------------------------


async def _record(job: _Job, out: Path) -> list[Line]:
    timings = Appender(out.with_name(f"{out.name}.timings.jsonl"))
    async with Workers("coa.recording.record:recorder", job.settings, job.workers) as pool:

        def work(task: Task) -> Callable[[], Awaitable[Line]]:
            async def record() -> Line:
                done = await pool.do(task.to_json(), f"task {task.id}")
                seconds = {name: round(value, 4) for name, value in done["seconds"].items()}
                timings.write({"task_id": task.id, **seconds})
                return Line(done["record"])

            return record

        with counted("record", len(job.tasks)) as on_done, timings:
            return await collect(
                out,
                {task.id: work(task) for task in job.tasks},
                parse=_stored,
                key=lambda line: str(line.record["task_id"]),
                concurrency=AT_ONCE * max(1, job.workers),
                on_done=on_done,
            )


@asynccontextmanager
async def recorder(settings: Json) -> AsyncIterator[Work]:
    """Records one public task after another; runs in a worker process."""
    environments = [Environment.received(each) for each in settings["environments"]]
    tools = ToolSettings(**settings["tools"])
    async with AsyncExitStack() as stack:
        held = await stack.enter_async_context(
            open_environments(environments, tools=tools, rollouts=AT_ONCE)
        )
        teachers: dict[Any, Any] = {}
        """By what names them; environments that have the same share it, and its open files."""

        async def opened(env: Environment) -> Any:
            reference = _teacher_of(env, settings["teacher"])
            key = reference if isinstance(reference, str) else id(reference)
            if key not in teachers:
                teacher: Any = load_teacher(reference, **settings["options"])
                if settings["out"] and hasattr(teacher, "opened"):
                    teacher = await stack.enter_async_context(teacher.opened(Path(settings["out"])))
                teachers[key] = teacher
            return teachers[key]

        at_work = {env.name: await opened(env) for env in environments}

        async def record(item: Json) -> Json:
            task, begun = Task.from_json(item), time.monotonic()
            async with held.session(task) as session:
                teacher, toolbox = at_work[held.of(task).name], session.tools
                episode = await recorded(teacher, task, toolbox, settings["seed"])
                tools = [ToolSpec(t.name, t.about, t.body, t.schema) for t in toolbox.values()]
                episode.tools = episode.tools or tools
                episode.history = episode.history or task.history
            episode.meta = {**task.meta, **episode.meta}  # the set decides about the environment
            seconds = {"total": time.monotonic() - begun, **episode.seconds}
            return {"record": episode.to_json(), "seconds": seconds}

        yield record


async def recorded(teacher: Teacher, task: Task, toolbox: Toolbox, seed: int) -> Episode:
    """One episode, checked as a file of them will be: what `coa distill` could not read is found
    at the first task, and not after all of them."""
    who = f"the teacher, on task {task.id},"
    with boundary(UsageError, who, located=True):
        made: Any = teacher.record(task, toolbox, seed)
        episode = await made if isawaitable(made) else made
    if not isinstance(episode, Episode):
        raise UsageError(f"{who} returned a {type(episode).__name__}, expected its Episode.")
    if episode.task_id != task.id:
        other = f"the episode of task {episode.task_id!r}"
        raise UsageError(f"{who} returned {other}, expected its Episode.")
    try:
        Episode.from_json(json.loads(json.dumps(episode.to_json())))
    except (RecordError, TypeError, ValueError) as wrong:
        raise UsageError(f"{who} returned an Episode that cannot be read back: {wrong}") from None
    if not task.is_asked_by(episode.question):
        raise UsageError(
            f"{who} returned an Episode about {shortened(episode.question)!r}, expected its "
            f"question, {shortened(task.question)!r}."
        )
    return episode


def _stored(record: Json) -> Line:
    """A line of an episodes file; it is not read in full, since it is only passed on."""
    if record.get("schema") not in READABLE or not _FIELDS.issubset(record):
        raise RecordError("this is no episode. Write somewhere else.")
    return Line(record)
