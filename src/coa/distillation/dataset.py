"""The distillation stage: an episodes file in, a run directory with a dataset out.

`converted.jsonl` grows while episodes are converted, judged and replayed, in as many processes as
there are; what is left of them after the filters is written at the end. The same command again
continues.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from coa.distillation.card import COPY, PLOT, Making, dataset_card
from coa.distillation.convert import NotConvertible, as_recorded, convert, team_tools
from coa.distillation.filters import Candidate, FilterSettings, apply_filters
from coa.distillation.funnel import plot, stage_record, table
from coa.engines.scripted import ScriptedEngine
from coa.environment import (
    SPLITS,
    Environment,
    OpenEnvironment,
    ToolSettings,
    environment_name,
    open_environments,
    remarks,
    tasks_of,
)
from coa.errors import (
    CoaError,
    ConfigError,
    GrammarError,
    MissingExtra,
    RecordError,
    Unavailable,
    UsageError,
)
from coa.grammar import load_grammar
from coa.grammar.grammar import Grammar, is_block_name
from coa.grammar.load import GrammarBook, block_names
from coa.grammar.prompt import PromptKind
from coa.io.collect import Line, Rehearsal, collect, spread_out, timed
from coa.io.download import sha256_of
from coa.io.files import is_private, make_private
from coa.io.progress import counted, say
from coa.io.runs import (
    Json,
    Run,
    dumps,
    manifest_beside,
    read_jsonl,
    read_object,
    write_atomic,
    write_jsonl,
)
from coa.io.settings import Option, load_recipe, to_json
from coa.io.workers import AT_ONCE, Work, Workers, shortened
from coa.loop import Budget
from coa.models.bases import BASE
from coa.models.codec import codec_of
from coa.models.references import is_pulled
from coa.recording.episode import Episode, ToolSpec, ToolUse, read_episodes
from coa.rewards import RewardSettings
from coa.rollouts import (
    ENV,
    WORKERS,
    References,
    check_shipped,
    choose_environments,
    processes_for,
)
from coa.tasks import Task, TaskSet
from coa.tools.base import Toolbox, clean
from coa.tools.recorded import RecordedCall, RecordedTools, ToolRecord
from coa.trajectory import Author, Trajectory, save_trajectories

CONVERTED = "converted.jsonl"
UNFIT = "its task has no grammar or no tools"
MISSING = "its task is not in the task file"
KEPT_BACK = "its task is kept for the test"
_GENEROUS = Budget(turns=64, tokens=1 << 20, turn_tokens=1 << 20, context=1 << 22)


@dataclass(frozen=True)
class DistillSettings:
    """What `coa distill` does with episodes; a recipe may set any of it."""

    grammar: str = "auto"
    """A preset's name or a .toml file; auto: the environment's."""
    split: str = "train"
    """Of the environment's own tasks, which judge the answers where no task file is given."""
    prompt: PromptKind = "compact"
    tools: Literal["called", "recorded"] = "called"
    """What answers in the replay: the tools themselves, or the record, where they are not here."""
    filter: FilterSettings = field(default_factory=FilterSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    """What is right; see docs/rewards.md."""

    def chosen(self) -> Json:
        """What the dataset depends on; a reward that nobody chose is left out, as in older
        records."""
        recipe = to_json(self) | {"reward": self.reward.identity()}
        if self.reward.expression == "auto":
            del recipe["reward"]
        return recipe


@dataclass(frozen=True)
class Distilling:
    """What is distilled: which episodes, judged by which tasks, in which environments."""

    episodes: Annotated[Path, Option("Episodes file from `coa record`.")]
    tasks: Annotated[Path | None, Option("Task file with gold, to drop wrong answers.")] = None
    """Without it the training tasks of `env` judge the answers; without these nobody does."""
    recipe: DistillSettings = field(default_factory=DistillSettings)
    env: Annotated[References, ENV] = ()
    """None: the shipped ones that the episodes belong to."""
    against: Annotated[
        Sequence[Path], Option("Task file to evaluate on: its likes are dropped.", many=True)
    ] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the environments."""
    tools: ToolSettings = field(default_factory=ToolSettings)
    workers: Annotated[int | None, WORKERS] = None

    def held_out(self) -> dict[str, TaskSet]:
        """The task files to evaluate on, by a name that tells them apart."""
        names = [path.name for path in self.against]
        told = [path.name if names.count(path.name) == 1 else str(path) for path in self.against]
        return {name: TaskSet.load(path) for name, path in zip(told, self.against, strict=True)}


@dataclass(frozen=True)
class Conversion:
    """What became of one episode: a chain with its score, or the reason why there is none."""

    key: str
    """The task's id; several episodes of one task are numbered."""
    task_id: str
    trajectory: Trajectory | None = None
    score: float | None = None
    """Of the episode's answer by the task's reward; None: nobody could judge."""
    replay: str = ""
    """Why the chain does not replay; empty: it does."""
    reason: str = ""
    detail: str = ""

    def to_json(self) -> Json:
        chain = self.trajectory.to_json() if self.trajectory else None
        return {**vars(self), "trajectory": chain}

    @classmethod
    def from_json(cls, record: Json, book: GrammarBook | None = None) -> Conversion:
        chain = record["trajectory"]
        return cls(**{**record, "trajectory": chain and Trajectory.from_json(chain, book)})


class Replayed(NamedTuple):
    """What came of making the calls of all chains again."""

    calls: int = 0
    chains: int = 0
    otherwise: int = 0
    """Chains that went another way."""
    called: bool = True
    """Whether any tool answered, and not only the record of the same calls."""
    recorded: tuple[str, ...] = ()
    """The tools for which the record answered beside them."""

    def lines(self) -> Iterator[str]:
        if not self.calls:
            return
        calls = f"{self.calls:,} call{'s' * (self.calls != 1)}"
        if not self.called:
            yield f"{calls} answered by the record; no tool was called"
        elif self.otherwise:
            went = f"{self.otherwise:,} of {self.chains:,} chains do not replay"
            yield f"{calls} made again; {went}: rejected.jsonl says where"
        else:
            record = f"; the record answered for {', '.join(self.recorded)}"
            told = record if self.recorded else ""
            yield f"{calls} made again, all answered as in the recording{told}"


@dataclass(frozen=True)
class Distilled:
    """What was kept, what was not and why."""

    kept: list[Trajectory]
    rejected: list[Json]
    """One record for each that was dropped or repeated: task_id, stage, reason and detail."""
    funnel: Json
    unjudged: int = 0
    """Kept chains whose answer nobody could judge."""
    replayed: Replayed = field(default_factory=Replayed)

    def to_json(self) -> Json:
        return self.funnel

    def lines(self) -> list[str]:
        """The funnel as a table, and what it comes to."""
        funnel, copies = self.funnel, sum(COPY in each.meta for each in self.kept)
        kept = f"{len(self.kept)} trajectories of {funnel['episodes']} episodes"
        kept += f", {copies} of them copies" if copies else ""
        said = [*table(funnel["stages"]), "", kept]
        if right := funnel["right"]:
            share = 100 * funnel["right_converted"] / right
            said.append(f"{right} episodes are right, {share:.1f}% of them converted")
        return [*said, *self.replayed.lines()]


def run_distillation(asked: Distilling, out: Path) -> Distilled:
    """Distil a file of episodes, or continue."""
    job, recipe = _job(asked), asked.recipe
    inputs = {"episodes": sha256_of(asked.episodes)[:16]}
    inputs["tasks"] = sha256_of(asked.tasks)[:16] if asked.tasks else ""
    inputs |= {name: held.fingerprint() for name, held in job.held_out.items()} | job.opened_with
    if recipe.tools == "called":
        _compare_tools(asked.episodes, inputs)
    with Run.open(out, "distill", recipe.chosen(), inputs, recipe.filter.seed) as run:
        book = GrammarBook([env.value() for env in job.environments])
        private = is_private(asked.episodes)
        if private:  # a file that is there keeps its mode when it grows and is put into order
            make_private(run.root / CONVERTED)
        converted = asyncio.run(_convert(job, run.root / CONVERTED, book))
        judged = job.gold is not None
        distilled = conclude([*job.unfit, *converted], recipe.filter, job.held_out, judged=judged)
        book.save(out)
        save_distilled(out, distilled, _making(asked, job.held_out), private=private)
    distilled = replace(distilled, replayed=_by_whom(distilled.replayed, job))
    if not distilled.kept:
        reasons = ", ".join(distilled.funnel["rejected"])
        raise UsageError(f"no episode was kept: {reasons}. See {out}/rejected.jsonl.")
    return distilled


def _by_whom(replayed: Replayed, job: _DistillJob) -> Replayed:
    """The same with who answered: an environment, too, may have tools that a record answers for."""
    given = [env.tools for env in job.environments]
    tools = [each for own in given if not callable(own) for each in own]
    sources = [each for each in tools if isinstance(each, RecordedTools)]
    alone = bool(sources) and len(sources) == len(tools) and not any(map(callable, given))
    recorded = tuple(name for source in sources for name in source.tools)
    return replayed._replace(called=job.shared["called"] and not alone, recorded=recorded)


def rehearse_distillation(asked: Distilling, out: Path) -> Rehearsal:
    """What `run_distillation` would take, by a few episodes; nothing is written or filtered."""
    job, journal = _job(asked), out / CONVERTED
    stored = read_jsonl(journal, growing=True) if journal.is_file() else ()
    done = {str(record.get("key")) for _, record in stored}
    left = [key for key in job.episodes if key not in done]
    chosen = [key for key in spread_out(left) if job.has_task(key)]

    seconds, made = asyncio.run(timed(converter(job.shared), list(map(job.item, chosen))))
    good = sum(each["trajectory"] is not None and not each["replay"] for each in made)
    written = sum(len(dumps(each)) for each in made)
    count = len(job.episodes)
    counts = (count, count - len(left), len(chosen), good, job.workers)
    return Rehearsal("episodes", *counts, seconds, written)


# ------------------------------------------------------------------------------------------------
# What there is to do: the episodes, their environments, and the tasks that judge them.
# ------------------------------------------------------------------------------------------------


class _DistillJob(NamedTuple):
    environments: tuple[Environment, ...]
    episodes: dict[str, Episode]
    """By a key of their own; each names its environment."""
    unfit: list[Conversion]
    """Lines of the file that are no episode, and episodes that have no environment."""
    gold: Gold | None
    """The tasks that judge; None: nobody does."""
    held_out: dict[str, TaskSet]
    shared: Json
    """Settings of `converter`."""
    opened_with: dict[str, str]
    """Fingerprints of what the episodes are replayed with."""
    workers: int

    def has_task(self, key: str) -> bool:
        return self.gold is None or self.episodes[key].task_id in self.gold.tasks

    def item(self, key: str) -> Json:
        """What a process needs to convert one episode."""
        episode = self.episodes[key]
        task = self.gold.tasks.get(episode.task_id) if self.gold is not None else None
        return {"key": key, "episode": episode.to_json(), "task": task and task.to_json()}


def _job(asked: Distilling) -> _DistillJob:
    recipe = asked.recipe
    episodes, public, unfit = _read(asked.episodes, not asked.env and recipe.grammar == "auto")
    if not asked.env and recipe.tools == "called":
        check_shipped(str(each.meta.get("environment", "")) for each in episodes.values())
    environments, found = choose_environments(
        asked.env,
        TaskSet(tuple(public)),
        tools=asked.tools,
        settings=dict(asked.settings),
        grammar=recipe.grammar,
    )
    owners = environments if asked.env else ()
    gold = gold_of(asked.tasks, owners, recipe.split, episodes.values(), say)
    if gold is not None and (differ := gold.other_ids(episodes.values())):
        say(differ)
    for each, task in zip(episodes.values(), found, strict=True):
        each.meta = dict(task.meta)
    for line in remarks(environments, found, asked.tools):
        say(line)
    shared: Json = {
        "environments": [env.passed_on() for env in environments],
        "prompt": recipe.prompt,
        "reward": to_json(recipe.reward),
        "called": recipe.tools == "called",
        "offered": _offered(episodes.values()),
        "tools": asdict(asked.tools),
    }
    replayed = found if shared["called"] else ()
    opened_with = asyncio.run(_try_opening(environments, replayed, asked.tools))
    workers = processes_for(asked.workers, len(episodes), environments)
    held_out = asked.held_out()
    return _DistillJob(environments, episodes, unfit, gold, held_out, shared, opened_with, workers)


@dataclass(frozen=True)
class Gold:
    """The tasks that judge episodes, and why one is not judged."""

    tasks: Mapping[str, Task]
    """By id."""
    splits: Mapping[str, str] = field(default_factory=dict)
    """Id of a task that is not among them, since it belongs to another split -> that split."""

    def lacks(self, task_id: str) -> str:
        """Why there is no such task; empty: there is one."""
        if task_id in self.tasks:
            return ""
        split = self.splits.get(task_id, "")
        if split == "test":
            return KEPT_BACK
        return f"its task is of the split {split!r}" if split else MISSING

    def other_ids(self, episodes: Iterable[Episode]) -> str:
        """What to do where no episode finds its task by the id, though some would by the question;
        otherwise nothing."""
        made = list(episodes)
        if any(self.lacks(each.task_id) != MISSING for each in made):
            return ""
        asked = {" ".join(task.question.split()): task.id for task in self.tasks.values()}
        found = [(e, asked.get(" ".join(e.question.split()))) for e in made]
        same = [(episode.task_id, own) for episode, own in found if own is not None]
        if not same:
            return ""
        (recorded, given), *_ = same
        return (
            f"the ids differ, the questions are the same: of {len(same)} of {len(made)} episodes, "
            f"as {recorded!r} recorded and {given!r} with the gold. Give the tasks the ids that "
            "were recorded; in a CSV the column is called id"
        )


def gold_of(
    file: Path | None,
    environments: Sequence[Environment],
    split: str,
    episodes: Iterable[Episode],
    note: Callable[[str], None],
) -> Gold | None:
    """The tasks that judge these episodes: those of a file, else those of a split of environments;
    None where there are none."""
    if file is not None:
        return Gold({task.id: task for task in TaskSet.load(file)})
    if all(each.tasks is None for each in environments):
        return None
    own = {task.id: task for task in tasks_of(environments, split, note)}
    if all(each.task_id in own for each in episodes):
        return Gold(own)
    others = dict[str, str]()
    for each in environments:
        named = each.tasks if isinstance(each.tasks, Mapping) else SPLITS
        for other in (name for name in named if name != split):
            # It is only asked for its ids: that it cannot be had is no trouble of this one.
            with suppress(CoaError):
                others |= {task.id: other for task in each.load_tasks(other)}
    return Gold(own, others)


def keys_of(task_ids: Sequence[str]) -> list[str]:
    """A name for each episode: its task's id, numbered when the task has several."""
    taken, seen = set(task_ids), Counter[str]()
    keys = []
    for task_id in task_ids:
        seen[task_id] += 1
        key = task_id
        while seen[task_id] > 1 and (key := f"{task_id}#{seen[task_id]}") in taken:
            seen[task_id] += 1  # another task has that name
        keys.append(key)
    return keys


def _read(path: Path, named: bool) -> tuple[dict[str, Episode], list[Task], list[Conversion]]:
    """The episodes of a file by their keys, the public task of each, numbered, and what is dropped:
    lines that are no episode, and episodes that are none of a task or, if `named`, whose task names
    a grammar that is not here."""
    read = list(read_episodes(path))
    sound = [each for _, each in read if isinstance(each, Episode)]
    if not sound:
        first = f" Line {read[0][0]}: {read[0][1]}" if read else ""
        raise UsageError(f"{path}: holds no episode.{first}")
    unfit = [
        Conversion(f"line {line}", f"line {line}", reason="not an episode", detail=str(wrong))
        for line, wrong in read
        if isinstance(wrong, RecordError)
    ]
    fit, public = dict[str, Episode](), list[Task]()
    for key, each in zip(keys_of([e.task_id for e in sound]), sound, strict=True):
        try:
            task = each.task
            if named and (name := str(each.meta.get("grammar") or "")):
                load_grammar(name)
        except (GrammarError, RecordError) as wrong:
            unfit.append(Conversion(key, each.task_id, reason=UNFIT, detail=str(wrong)))
            continue
        fit[key] = each
        public.append(replace(task, id=str(len(public) + 1)))
    return fit, public, unfit


async def _try_opening(
    environments: Sequence[Environment], tasks: Sequence[Task], tools: ToolSettings
) -> dict[str, str]:
    """Fingerprints of what the episodes are replayed with. Where the tools of some tasks cannot be
    had, that is the trouble of their episodes; where those of none, it is said now."""
    fit, wrong = 0, list[CoaError]()
    async with open_environments(environments, tools=tools, dry=True) as opened:
        for task in tasks:
            try:
                await opened.prepare([task])
                fit += 1
            except (ConfigError, GrammarError, RecordError) as error:
                wrong.append(error)
        if wrong and not fit:
            raise wrong[0]
        return opened.inputs()


def _compare_tools(episodes: Path, now: Mapping[str, str]) -> None:
    """Say that the calls were made elsewhere than they will be replayed: each would be answered in
    another way, and its episode dropped."""
    manifest = manifest_beside(episodes)
    held = read_object(manifest) if manifest.is_file() else {}
    if "answers" in held and held["answers"] != now.get("answers"):
        say(
            f"{episodes}: was recorded with another corpus than is given here; where its calls are "
            "answered differently it does not replay"
        )


def _making(asked: Distilling, against: Mapping[str, TaskSet]) -> Making:
    """What the card says of how the dataset was made; names of files, not where they lay."""
    tools = asked.tools
    command = f"coa distill --episodes {asked.episodes.name} --out DIR"
    command += " --env E" if asked.env else ""
    command += f" --tasks {asked.tasks.name}" if asked.tasks else ""
    command += "".join(f" --against {name}" for name in against)
    command += f" --corpus {tools.corpus}" if tools.corpus else ""
    command += f" --tool-cache {tools.cache} --tool-mode {tools.mode}" if tools.cache else ""
    command += " --code-session" if tools.code_session else ""
    recipe = asked.recipe
    making = Making(command, recipe.filter.seed, recipe.chosen(), tuple(against))
    if not is_pulled():  # the base model's tokenizer is not here: lengths are in characters
        return making
    codec = codec_of(BASE)
    return replace(making, tokenizer=BASE, count_tokens=lambda text: len(codec.encode(text)))


# ------------------------------------------------------------------------------------------------
# Converting: one episode after another, in the processes of a crew.
# ------------------------------------------------------------------------------------------------


async def _convert(job: _DistillJob, path: Path, book: GrammarBook) -> list[Conversion]:
    """Convert what the file does not have yet."""
    async with Workers("coa.distillation.dataset:converter", job.shared, job.workers) as pool:

        def work(key: str) -> Callable[[], Awaitable[Line]]:
            async def convert() -> Line:
                task_id = job.episodes[key].task_id
                if why := job.gold.lacks(task_id) if job.gold is not None else "":
                    return Line(Conversion(key, task_id, reason=why).to_json())
                return Line(await pool.do(job.item(key), key))

            return convert

        with counted("distil", len(job.episodes)) as on_done:
            lines = await collect(
                path,
                {key: work(key) for key in job.episodes},
                parse=Line,
                key=lambda line: str(line.record["key"]),
                redo=_is_outdated,
                concurrency=AT_ONCE * max(1, job.workers),
                on_done=on_done,
            )
    return [Conversion.from_json(line.record, book) for line in lines]


def _is_outdated(line: Line) -> bool:
    """Whether another version of this package wrote it in a form that is not read here."""
    try:
        Conversion.from_json(line.record)
    except (AttributeError, KeyError, TypeError, ValueError):
        return True
    return False


@asynccontextmanager
async def converter(settings: Json) -> AsyncIterator[Work]:
    """Converts, judges and replays one episode after another; runs in a worker process."""
    environments = [Environment.received(each) for each in settings["environments"]]
    tools = ToolSettings(**settings["tools"])
    async with open_environments(environments, tools=tools, rollouts=AT_ONCE) as opened:
        await opened.open_rewards(load_recipe(None, [], RewardSettings, settings["reward"]))

        async def work(item: Json) -> Json:
            key, episode = item["key"], Episode.from_json(item["episode"])
            task = Task.from_json(item["task"]) if item["task"] else None
            public = episode.task
            try:
                chosen = opened
                if not settings["called"]:
                    episode = _as_shown(episode)
                    offered = settings["offered"][environment_name(public)]
                    specs = [ToolSpec(**each) for each in offered]
                    box = recorded_tools(episode, opened.of(public).value(), specs)
                    chosen = opened.with_tools(box)
                await chosen.toolbox(public)
            except (ConfigError, GrammarError, RecordError, UsageError) as wrong:
                return Conversion(key, episode.task_id, reason=UNFIT, detail=str(wrong)).to_json()
            made = await convert_one(key, episode, chosen, task, prompt=settings["prompt"])
            return made.to_json()

        yield work


async def convert_by_record(
    episodes: Sequence[Episode],
    environments: Sequence[Environment],
    prompt: PromptKind = "compact",
) -> list[Conversion]:
    """Convert each episode and replay it against what its record says of its tools: nothing is
    called, nothing is judged, and nothing is written."""
    shared: Json = {
        "environments": [env.passed_on() for env in environments],
        "prompt": prompt,
        "reward": to_json(RewardSettings()),
        "called": False,
        "offered": _offered(episodes),
        "tools": asdict(ToolSettings()),
    }
    book = GrammarBook([env.value() for env in environments])
    made = list[Conversion]()
    async with converter(shared) as work:
        for key, each in zip(keys_of([e.task_id for e in episodes]), episodes, strict=True):
            record = json.loads(dumps(each.to_json()))  # as a process gets it, and a file has it
            done = await work({"key": key, "episode": record, "task": None})
            made.append(Conversion.from_json(done, book))
    return made


async def convert_one(
    key: str,
    episode: Episode,
    opened: OpenEnvironment,
    task: Task | None = None,
    *,
    prompt: PromptKind = "compact",
) -> Conversion:
    """Convert, judge and replay one episode. Without `task` the answer cannot be judged."""
    public = episode.task
    if task is not None and not task.is_asked_by(episode.question):  # its gold is another's
        found = f"{shortened(episode.question)!r}; the task: {shortened(task.question)!r}"
        return Conversion(key, task.id, reason="its question is not its task's", detail=found)
    if task is not None and "environment" in episode.meta:  # a file of tasks may not name it
        task = replace(task, meta={**task.meta, "environment": episode.meta["environment"]})
    judging = public
    if task is not None:
        judging = replace(task, question=public.question, history=public.history)

    async def judged(trajectory: Trajectory) -> float | None:
        if task is None and isinstance(said := episode.meta.get("success"), int | float):
            return float(said)  # whoever recorded it judged it
        if task is None or (opened.takes_state(public) and trajectory.scored is None):
            return None  # a record has no state that could be judged
        return (await opened.score(task, trajectory)).score

    try:
        with _odd("its tools do not fit into the grammar"):
            bound = await opened.bound(public)
            schemas = (await opened.toolbox(public)).schemas(bound)
        with _odd("the record cannot be converted"):
            trajectory = convert(episode, bound, prompt, schemas)
            trajectory.book = opened.grammars
        with _odd("the chain cannot be replayed"):
            again, replay = await _replay(trajectory, judging, opened, task is not None)
    except NotConvertible as cause:  # whether its answer is right is counted all the same
        score = None
        if episode.answer is not None and not opened.takes_state(public):
            given = Trajectory(public.id, public.question, "", answer=episode.answer)
            score = await judged(given)
        return Conversion(key, public.id, None, score, reason=cause.reason, detail=cause.detail)
    trajectory.scored = again.scored
    return Conversion(key, public.id, trajectory, await judged(trajectory), replay)


@contextmanager
def _odd(reason: str) -> Iterator[None]:
    """Whatever a record of somebody else leads to is its own end, not that of all the others. What
    is missing or failing here is not its fault, and ends the run, which can be continued."""
    try:
        yield
    except (NotConvertible, MissingExtra, Unavailable, OSError):
        raise
    except Exception as cause:
        own = isinstance(cause, CoaError)  # it is a sentence already
        detail = str(cause) if own else f"{type(cause).__name__}: {cause}"
        raise NotConvertible(reason, detail) from cause


async def _replay(
    trajectory: Trajectory, task: Task, opened: OpenEnvironment, judged: bool
) -> tuple[Trajectory, str]:
    """Run the student's loop over the same turns; what it made, and why that is another text.

    What went wrong once may have been the world (a sandbox was killed), so it is tried again.
    """
    turns = [step.model.text for step in trajectory.steps]
    for _ in range(2):
        again = await opened.play(task, ScriptedEngine(turns), judged=judged, budget=_GENEROUS)
        if again.answer == trajectory.answer:
            _take_failures(trajectory, again)
            if again.text == trajectory.text:
                return again, ""
    pairs = zip(trajectory.segments, again.segments, strict=False)
    seen = ((was, now) for was, now in pairs if was.author is Author.ENV)
    for number, (was, now) in enumerate(seen, start=1):
        if was.text != now.text:
            shown = f"{shortened(was.text)!r}; now {shortened(now.text)!r}"
            return again, f"call {number} is answered in another way: {shown}"
    return again, f"{again.stop}: {again.error}" if again.error else f"it ends as {again.stop}"


_FAILED = re.compile(r"Error: \w+ failed: \w+: (?P<reason>.+?)\s*</", re.DOTALL)
"""What a runtime of ours shows of a function that raised."""


def _take_failures(trajectory: Trajectory, again: Trajectory) -> None:
    """Let a chain show a call that failed as the student's runtime does.

    Every framework puts words of its own around what a tool raised, so a call that fails for the
    same reason is the same call; only the reason has to be in the record.
    """
    for was, now in zip(trajectory.segments, again.segments, strict=False):
        failed = _FAILED.search(now.text) if was.author is now.author is Author.ENV else None
        if failed and failed["reason"] in was.text:
            was.text = now.text


# ------------------------------------------------------------------------------------------------
# The tools of an episode as its record has them, for episodes whose own tools are not here.
#
# A replay with these proves that the student's runtime accepts the chain; it cannot prove that
# the world would answer the same again.
# ------------------------------------------------------------------------------------------------


def _as_shown(episode: Episode) -> Episode:
    """The episode with every result as a toolbox shows it: plain line ends, nothing around it."""
    shown = [
        replace(event, result=clean(event.result)) if isinstance(event, ToolUse) else event
        for event in episode.events
    ]
    return replace(episode, events=shown)


def _offered(episodes: Iterable[Episode]) -> Json:
    """The tools that the team of each environment had, over all its episodes: those that were
    noted, and those that were used. A prompt that offered only those that its own episode used
    would give it away."""
    teams: dict[str, list[Episode]] = {}
    for episode in episodes:
        teams.setdefault(environment_name(Task("?", meta=episode.meta)), []).append(episode)
    return {name: [asdict(tool) for tool in team_tools(own)] for name, own in teams.items()}


def recorded_tools(episode: Episode, grammar: Grammar, offered: Sequence[ToolSpec]) -> Toolbox:
    """Tools that answer a call as it was answered then, whatever they are called.

    `offered` are all tools that the team had. Under `grammar` a tool without a name of its own that
    a block can have gets another one.
    """
    tools = [as_recorded(spec) for spec in sorted(offered, key=lambda spec: spec.name)]
    record = ToolRecord(tuple(tools), tuple(calls_of(episode)))
    known = {grammar.by_name[role].tool or role for role in grammar.tool_roles}
    new = sorted({spec.name for spec in offered} - known)
    fit = {name for name in new if is_block_name(name) and name not in grammar.tags}
    blocks = block_names([name for name in new if name not in fit], {*grammar.tags, *fit})
    return Toolbox(
        tool.answering(record.answers(tool.name), blocks.get(tool.name, "")) for tool in tools
    )


def calls_of(episode: Episode, task: str = "") -> Iterator[RecordedCall]:
    """The tool calls of an episode, as a record has them."""
    for event in episode.events:
        if isinstance(event, ToolUse):
            yield RecordedCall(event.tool, event.argument, clean(event.result), task)


# ------------------------------------------------------------------------------------------------
# The dataset: what the filters keep, and what is written of it.
# ------------------------------------------------------------------------------------------------


def conclude(
    conversions: Sequence[Conversion],
    filters: FilterSettings,
    against: Mapping[str, Sequence[Task]] | None = None,
    *,
    judged: bool = True,
) -> Distilled:
    """Filter what was converted, and count."""
    candidates = [
        Candidate(each.trajectory, each.score, each.replay)
        for each in conversions
        if each.trajectory is not None
    ]
    failed = [
        {"task_id": each.task_id, "stage": "convert", "reason": each.reason, "detail": each.detail}
        for each in conversions
        if each.trajectory is None
    ]
    filtered = apply_filters(candidates, filters, against, judged=judged)
    kept, notes = filtered.kept, failed + filtered.notes
    right = [each for each in conversions if each.score == 1.0]
    dropped = Counter(note["reason"] for note in notes if not note.get("copies"))
    funnel = {
        "episodes": len(conversions),
        "right": len(right),
        "right_converted": sum(each.trajectory is not None for each in right),
        "kept": len(kept),
        "kept_with_corrected_error": sum(any(s.errs for s in t.segments) for t in kept),
        "rejected": dict(dropped.most_common()),
        "stages": [stage_record("convert", len(conversions), failed), *filtered.stages],
    }
    calls = sum(each.trajectory.usage.tool_calls for each in candidates)
    otherwise = sum(bool(each.replay) for each in candidates)
    replayed = Replayed(calls, len(candidates), otherwise)
    return Distilled(kept, notes, funnel, filtered.unjudged, replayed)


def save_distilled(
    directory: Path, distilled: Distilled, making: Making | None = None, *, private: bool = False
) -> None:
    """Write the dataset: trajectories.jsonl, rejected.jsonl, the funnel, and the card. Of a
    `private` one only the owner may read what holds questions and results, the card's example too.
    """
    stages = distilled.funnel["stages"]
    making = replace(making or Making(), unjudged=distilled.unjudged)
    save_trajectories(directory / "trajectories.jsonl", distilled.kept, private=private)
    write_jsonl(directory / "rejected.jsonl", distilled.rejected, private=private)
    write_atomic(directory / "funnel.json", json.dumps(distilled.funnel, indent=2) + "\n")
    write_atomic(directory / PLOT, plot(stages))
    card = dataset_card(distilled.kept, stages, making)
    write_atomic(directory / "README.md", card, private=private)
