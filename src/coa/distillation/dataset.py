"""The distillation stage: an episodes file in, a run directory with a dataset out.

`converted.jsonl` grows while episodes are converted, judged and replayed, in as many processes as
there are; what is left of them after the filters is written at the end. The same command again
continues.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from coa.distillation.card import COPY, Making, dataset_card
from coa.distillation.convert import NotConvertible, convert
from coa.distillation.filters import Candidate, Filtered, FilterSettings, apply_filters
from coa.distillation.funnel import plot, stage_record, table
from coa.engines.scripted import ScriptedEngine
from coa.environment import (
    Environment,
    OpenEnvironment,
    ToolSettings,
    environment_name,
    open_environments,
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
from coa.io.collect import Line, Rehearsal, collect, spread_out
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
from coa.io.settings import load_recipe, to_json
from coa.io.workers import Work, Workers, shortened, worker_count
from coa.loop import Budget
from coa.models.codec import Codec
from coa.models.references import BASE, is_pulled, model_folder, resolve
from coa.recording.episode import Episode, ToolSpec, ToolUse, read_episodes
from coa.recording.record import one_of_each
from coa.rewards import RewardSettings
from coa.rollouts import References, check_shipped, choose_environments
from coa.tasks import Task, TaskSet
from coa.tools.base import RunTool, Tool, Toolbox, clean
from coa.trajectory import Author, Trajectory, save_trajectories

AT_ONCE = 8
"""Episodes in work at a time: while one waits for a tool, the others go on."""
_GENEROUS = Budget(turns=64, tokens=1 << 20, turn_tokens=1 << 20, context=1 << 22)


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


@dataclass(frozen=True)
class Distilled:
    """What was kept, what was not and why."""

    kept: list[Trajectory]
    rejected: list[Json]
    """One record for each that was dropped or repeated: task_id, stage, reason and detail."""
    funnel: Json
    unjudged: int = 0
    """Kept chains whose answer nobody could judge."""

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
        return said


async def convert_one(
    key: str,
    episode: Episode,
    opened: OpenEnvironment,
    task: Task | None = None,
    *,
    prompt: PromptKind = "compact",
) -> Conversion:
    """Convert, judge and replay one episode. Without `task` the answer cannot be judged."""
    public = Task(episode.question, id=episode.task_id, meta=episode.meta)
    if task is not None and not task.is_asked_by(episode.question):  # its gold is another's
        found = f"{shortened(episode.question)!r}; the task: {shortened(task.question)!r}"
        return Conversion(key, task.id, reason=OTHER_QUESTION, detail=found)
    if task is not None and "environment" in episode.meta:  # a file of tasks may not name it
        task = replace(task, meta={**task.meta, "environment": episode.meta["environment"]})
    judging = replace(task, question=public.question) if task is not None else None

    async def judged(trajectory: Trajectory) -> float | None:
        if task is None or (opened.takes_state(public) and trajectory.scored is None):
            return None  # a record has no state that could be judged
        return (await opened.score(task, trajectory)).score

    try:
        with _odd("its tools do not fit into the grammar"):
            bound = await opened.bound(public)
        with _odd("the record cannot be converted"):
            trajectory = convert(episode, bound, prompt)
            trajectory.book = opened.grammars
        with _odd("the chain cannot be replayed"):
            again, replay = await _replay(trajectory, judging or public, opened)
    except NotConvertible as cause:  # whether its answer is right is counted all the same
        score = None
        if episode.answer is not None and not opened.takes_state(public):
            given = Trajectory(public.id, public.question, "", answer=episode.answer)
            score = await judged(given)
        return Conversion(
            key, episode.task_id, None, score, reason=cause.reason, detail=cause.detail
        )
    trajectory.scored = again.scored
    return Conversion(key, episode.task_id, trajectory, await judged(trajectory), replay)


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
    trajectory: Trajectory, task: Task, opened: OpenEnvironment
) -> tuple[Trajectory, str]:
    """Run the student's loop over the same turns; what it made, and why that is another text.

    What went wrong once may have been the world (a sandbox was killed), so it is tried again.
    """
    again, fault = await _replay_once(trajectory, task, opened)
    return await _replay_once(trajectory, task, opened) if fault else (again, fault)


async def _replay_once(
    trajectory: Trajectory, task: Task, opened: OpenEnvironment
) -> tuple[Trajectory, str]:
    turns = [step.model.text for step in trajectory.steps]
    again = await opened.play(task, ScriptedEngine(turns), budget=_GENEROUS)
    if again.answer == trajectory.answer and again.text == trajectory.text:
        return again, ""
    pairs = zip(trajectory.segments, again.segments, strict=False)
    seen = ((was, now) for was, now in pairs if was.author is Author.ENV)
    for number, (was, now) in enumerate(seen, start=1):
        if was.text != now.text:
            shown = f"{shortened(was.text)!r}; now {shortened(now.text)!r}"
            return again, f"call {number} is answered in another way: {shown}"
    return again, f"{again.stop}: {again.error}" if again.error else f"it ends as {again.stop}"


NO_TASK = "its task is not in the task file"
OTHER_QUESTION = "its question is not its task's"


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
    funnel = _funnel(conversions, filtered, failed)
    return Distilled(filtered.kept, failed + filtered.notes, funnel, filtered.unjudged)


def _funnel(conversions: Sequence[Conversion], filtered: Filtered, failed: Sequence[Json]) -> Json:
    right = [each for each in conversions if each.score == 1.0]
    dropped = [note for note in [*failed, *filtered.notes] if not note.get("copies")]
    return {
        "episodes": len(conversions),
        "right": len(right),
        "right_converted": sum(each.trajectory is not None for each in right),
        "kept": len(filtered.kept),
        "kept_with_corrected_error": sum(any(s.errs for s in t.segments) for t in filtered.kept),
        "rejected": dict(Counter(note["reason"] for note in dropped).most_common()),
        "stages": [stage_record("convert", len(conversions), failed), *filtered.stages],
    }


def save_distilled(directory: Path, distilled: Distilled, making: Making | None = None) -> None:
    """Write the dataset: trajectories.jsonl, rejected.jsonl, the funnel, and the card."""
    stages = distilled.funnel["stages"]
    making = replace(making or Making(), plot="funnel.svg", unjudged=distilled.unjudged)
    save_trajectories(directory / "trajectories.jsonl", distilled.kept)
    write_jsonl(directory / "rejected.jsonl", distilled.rejected)
    write_atomic(directory / "funnel.json", json.dumps(distilled.funnel, indent=2) + "\n")
    write_atomic(directory / making.plot, plot(stages))
    write_atomic(directory / "README.md", dataset_card(distilled.kept, stages, making))


# ------------------------------------------------------------------------------------------------
# The tools of an episode as its record has them, for episodes whose own tools are not here.
#
# A replay with these proves that the student's runtime accepts the chain; it cannot prove that
# the world would answer the same again.
# ------------------------------------------------------------------------------------------------


_ANY_LENGTH = 1 << 30


def as_shown(episode: Episode) -> Episode:
    """The episode with every result as a toolbox shows it: plain line ends, nothing around it."""
    shown = [
        replace(event, result=clean(event.result)) if isinstance(event, ToolUse) else event
        for event in episode.events
    ]
    return replace(episode, events=shown)


def offered_tools(episodes: Sequence[Episode]) -> list[ToolSpec]:
    """The tools that the team had, over all its episodes: those that were noted, and those that
    were used. A prompt that offered only those that its own episode used would give it away."""
    found: dict[str, ToolSpec] = {}
    for episode in episodes:
        for spec in episode.tools:
            found[spec.name] = spec
    for episode in episodes:
        for event in episode.events:
            if isinstance(event, ToolUse):
                found.setdefault(event.tool, ToolSpec(event.tool))
    return [found[name] for name in sorted(found)]


def recorded_tools(episode: Episode, grammar: Grammar, offered: Sequence[ToolSpec] = ()) -> Toolbox:
    """Tools that answer a call as it was answered then, whatever they are called.

    `offered` are all tools that the team had. Under `grammar` a tool without a name of its own that
    a block can have gets another one.
    """
    answers: dict[str, dict[str, str]] = {}
    for event in episode.events:
        if isinstance(event, ToolUse):
            answers.setdefault(event.tool, {}).setdefault(event.argument.strip(), event.result)
    specs = {spec.name: spec for spec in offered_tools([episode])} | {s.name: s for s in offered}
    known = {grammar.by_name[role].tool or role for role in grammar.tool_roles}
    new = sorted(set(specs) - known)
    fit = {name for name in new if is_block_name(name) and name not in grammar.tags}
    blocks = block_names([name for name in new if name not in fit], {*grammar.tags, *fit})
    return Toolbox(
        Tool(
            name,
            _answering(answers.get(name, {})),
            about=spec.about,
            max_chars=_ANY_LENGTH,
            block=blocks.get(name, ""),
        )
        for name, spec in sorted(specs.items())
    )


def _answering(given: Mapping[str, str]) -> RunTool:
    async def answer(argument: str) -> str:
        return given[argument.strip()]

    return answer


CONVERTED = "converted.jsonl"
UNFIT = "its task has no grammar or no tools"


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


@asynccontextmanager
async def converter(settings: Json) -> AsyncIterator[Work]:
    """Converts, judges and replays one episode after another; runs in a worker process."""
    environments = [Environment.received(each) for each in settings["environments"]]
    sets = [Task.from_json(task) for task in settings["tasks"]]
    rewards = load_recipe(None, [], RewardSettings, settings["reward"])
    tools = ToolSettings(**settings["kit"])
    called = settings["tools"] == "called"
    async with open_environments(environments, sets if called else (), tools) as opened:
        await opened.open_rewards(rewards)

        async def work(item: Json) -> Json:
            episode = Episode.from_json(item["episode"])
            task = Task.from_json(item["task"]) if item["task"] else None
            public = Task(episode.question, id=episode.task_id, meta=episode.meta)
            try:
                chosen = opened
                if not called:
                    episode = as_shown(episode)
                    own = settings["offered"].get(environment_name(public), ())
                    offered = [ToolSpec(**each) for each in own]
                    box = recorded_tools(episode, opened.of(public).value(), offered)
                    chosen = opened.with_tools(box)
                await chosen.toolbox(public)
            except (ConfigError, GrammarError, RecordError, UsageError) as wrong:
                unfit = Conversion(item["key"], episode.task_id, reason=UNFIT, detail=str(wrong))
                return unfit.to_json()
            prompt = settings["prompt"]
            made = await convert_one(item["key"], episode, chosen, task, prompt=prompt)
            return made.to_json()

        yield work


def run_distillation(
    episodes: Path,
    out: Path,
    tasks: Path | None = None,
    settings: DistillSettings | None = None,
    *,
    env: References = (),
    env_settings: Json | None = None,
    against: Sequence[Path] = (),
    kit: ToolSettings | None = None,
    workers: int | None = None,
) -> Distilled:
    """Distil a file of episodes. Without the tasks' gold, answers are not judged.

    `env` are the environments that the episodes belong to; none: the shipped ones. Their training
    tasks judge the answers where no task file is given. `against` are task files that a model will
    be evaluated on: what is like them is not kept.
    """
    settings, kit = settings or DistillSettings(), kit or ToolSettings()
    sound, unread = _read(episodes)
    environments, sound, gold, unfit = _places(sound, tasks, settings, env, env_settings or {}, kit)
    held_out = _held_out(against)
    inputs = {"episodes": _fingerprint(episodes), "tasks": _fingerprint(tasks) if tasks else ""}
    inputs |= {name: held.fingerprint() for name, held in held_out.items()}
    shared = _shared(sound, settings, kit, environments)
    shared["tasks"], opened_with = _opened_with(environments, shared, kit)
    inputs |= opened_with
    if settings.tools == "called":
        _compare_tools(episodes, inputs)
    with Run.open(out, "distill", _chosen(settings), inputs, settings.filter.seed) as run:
        size = _workers(workers, len(sound), environments)
        book = GrammarBook([env.value() for env in environments])
        converted = asyncio.run(_convert(sound, gold, run.root / CONVERTED, shared, size, book))
        everything, judged = [*unread, *unfit, *converted], gold is not None
        distilled = conclude(everything, settings.filter, held_out, judged=judged)
        book.save(out)
        save_distilled(out, distilled, _making(episodes, tasks, settings, held_out, kit, env))
    if not distilled.kept:
        reasons = ", ".join(distilled.funnel["rejected"])
        raise UsageError(f"no episode was kept: {reasons}. See {out}/rejected.jsonl.")
    return distilled


def _places(
    episodes: Sequence[Episode],
    tasks: Path | None,
    settings: DistillSettings,
    env: References,
    env_settings: Json,
    kit: ToolSettings,
) -> tuple[tuple[Environment, ...], list[Episode], dict[str, Task] | None, list[Conversion]]:
    """The environments of episodes; the episodes, each of which names its own; gold by task; and
    the episodes that have no environment."""
    gold = _gold(tasks)
    if not env and settings.tools == "called":
        check_shipped(str(each.meta.get("environment", "")) for each in episodes)
    how: Any = {"tools": kit, "settings": env_settings, "grammar": settings.grammar}
    fit, public, unfit = _with_tasks(episodes, not env and settings.grammar == "auto")
    environments, found = choose_environments(env, TaskSet(tuple(public)), **how)
    if env and gold is None and any(each.tasks is not None for each in environments):
        gold = {task.id: task for task in tasks_of(environments, settings.split, say)}
    for each, task in zip(fit, found, strict=True):
        each.meta = dict(task.meta)
    return environments, fit, gold, unfit


def _with_tasks(
    episodes: Sequence[Episode], named: bool
) -> tuple[list[Episode], list[Task], list[Conversion]]:
    """Episodes, the public task of each, numbered, and the episodes that are dropped since they
    are none of a task, or, if `named`, since their task names a grammar that is not here."""
    fit, public, unfit = list[Episode](), list[Task](), list[Conversion]()
    for key, each in zip(keys_of([e.task_id for e in episodes]), episodes, strict=True):
        try:
            task = Task(each.question, id=each.task_id, meta=each.meta)
            if named and (name := str(each.meta.get("grammar") or "")):
                load_grammar(name)
        except (GrammarError, RecordError) as wrong:
            unfit.append(Conversion(key, each.task_id, reason=UNFIT, detail=str(wrong)))
            continue
        fit.append(each)
        public.append(replace(task, id=str(len(public) + 1)))
    return fit, public, unfit


def _workers(asked: int | None, episodes: int, environments: Sequence[Environment]) -> int:
    if all(env.is_loadable for env in environments):
        return worker_count(episodes) if asked is None else asked
    if asked not in (None, 1):
        say(
            f"coa: workers {asked} is ignored: an environment that is made in Python works in its "
            "own process"
        )
    return 1


def _opened_with(
    environments: Sequence[Environment], shared: Json, kit: ToolSettings
) -> tuple[list[Json], dict[str, str]]:
    """The tasks whose tools can be had, and fingerprints of what the episodes are replayed with.
    Where it is not all tasks, what is wrong is the trouble of some episodes."""

    async def tried() -> tuple[list[Json], dict[str, str]]:
        fit, wrong = list[Json](), list[CoaError]()
        async with open_environments(environments, tools=kit, dry=True) as opened:
            for task in shared["tasks"] if shared["tools"] == "called" else []:
                try:
                    await opened.prepare([Task.from_json(task)])
                    fit.append(task)
                except (ConfigError, GrammarError, RecordError) as error:
                    wrong.append(error)
            if wrong and not fit:
                raise wrong[0]
            return fit, opened.inputs()

    return asyncio.run(tried())


def _compare_tools(episodes: Path, now: Mapping[str, str]) -> None:
    """Say that the calls were made elsewhere than they will be replayed: each would be answered in
    another way, and its episode dropped."""
    manifest = manifest_beside(episodes)
    if not manifest.is_file():
        return
    held = read_object(manifest)
    if "answers" in held and held["answers"] != now.get("answers"):
        say(
            f"{episodes}: was recorded with another corpus than is given here; where its calls are "
            "answered differently it does not replay"
        )


def _chosen(settings: DistillSettings) -> Json:
    """What the dataset depends on; a reward that nobody chose is left out, as in older records."""
    recipe = to_json(settings) | {"reward": settings.reward.identity()}
    if settings.reward.expression == "auto":
        del recipe["reward"]
    return recipe


def _held_out(against: Sequence[Path]) -> dict[str, TaskSet]:
    """Task files to evaluate on, by a name that tells them apart."""
    names = [path.name for path in against]
    told = [path.name if names.count(path.name) == 1 else str(path) for path in against]
    return {name: TaskSet.load(path) for name, path in zip(told, against, strict=True)}


def _making(
    episodes: Path,
    tasks: Path | None,
    settings: DistillSettings,
    against: Mapping[str, TaskSet],
    kit: ToolSettings,
    env: References,
) -> Making:
    """What the card says of how the dataset was made; names of files, not where they lay."""
    command = f"coa distill --episodes {episodes.name} --out DIR"
    command += " --env E" if env else ""
    command += f" --tasks {tasks.name}" if tasks else ""
    command += "".join(f" --against {name}" for name in against)
    command += f" --corpus {kit.corpus}" if kit.corpus else ""
    command += f" --tool-cache {kit.cache} --tool-mode {kit.mode}" if kit.cache else ""
    command += " --code-session" if kit.code_session else ""
    making = Making(
        command=command,
        seed=settings.filter.seed,
        settings=_chosen(settings),
        against=tuple(against),
    )
    if not is_pulled():  # the base model's tokenizer is not here: lengths are in characters
        return making
    codec = Codec.from_folder(model_folder(resolve(BASE)))
    return replace(making, tokenizer=BASE, count_tokens=lambda text: len(codec.encode(text)))


def rehearse_distillation(
    episodes: Path,
    out: Path,
    tasks: Path | None = None,
    settings: DistillSettings | None = None,
    *,
    env: References = (),
    env_settings: Json | None = None,
    against: Sequence[Path] = (),
    kit: ToolSettings | None = None,
    workers: int | None = None,
) -> Rehearsal:
    """What `run_distillation` would take, by a few episodes; nothing is written or filtered."""
    settings, kit = settings or DistillSettings(), kit or ToolSettings()
    read, _ = _read(episodes)
    environments, sound, gold, _ = _places(read, tasks, settings, env, env_settings or {}, kit)
    _held_out(against)  # a file that is missing is missing for the rehearsal, too
    shared = _shared(sound, settings, kit, environments)
    shared["tasks"], _ = _opened_with(environments, shared, kit)
    journal = out / CONVERTED
    stored = read_jsonl(journal, growing=True) if journal.is_file() else ()
    done = {str(record.get("key")) for _, record in stored}
    keyed = zip(keys_of([episode.task_id for episode in sound]), sound, strict=True)
    left = [(key, each) for key, each in keyed if key not in done]
    chosen = [pair for pair in spread_out(left) if gold is None or pair[1].task_id in gold]

    async def work() -> tuple[float, list[Json]]:
        async with converter(shared) as convert:
            for _ in ("opening what is opened once", "timed"):
                begun = time.monotonic()
                made = [await convert(_item(key, each, gold)) for key, each in chosen]
            return time.monotonic() - begun, made

    seconds, made = asyncio.run(work())
    good = sum(each["trajectory"] is not None and not each["replay"] for each in made)
    written = sum(len(dumps(each)) for each in made)
    size = _workers(workers, len(sound), environments)
    counts = (len(sound), len(sound) - len(left), len(chosen), good, size)
    return Rehearsal("episodes", *counts, seconds, written)


def _gold(tasks: Path | None) -> dict[str, Task] | None:
    return {task.id: task for task in TaskSet.load(tasks)} if tasks else None


def _read(path: Path) -> tuple[list[Episode], list[Conversion]]:
    """The episodes of a file, and the lines that are none."""
    read = list(read_episodes(path))
    if not any(isinstance(episode, Episode) for _, episode in read):
        first = f" Line {read[0][0]}: {read[0][1]}" if read else ""
        raise UsageError(f"{path}: holds no episode.{first}")
    sound = [episode for _, episode in read if isinstance(episode, Episode)]
    unread = [
        Conversion(f"line {line}", f"line {line}", reason="not an episode", detail=str(wrong))
        for line, wrong in read
        if isinstance(wrong, RecordError)
    ]
    return sound, unread


def _offered(episodes: Sequence[Episode]) -> Json:
    """The tools that the teams of each environment had, by its name."""
    teams: dict[str, list[Episode]] = {}
    for each in episodes:
        teams.setdefault(environment_name(Task("?", meta=each.meta)), []).append(each)
    return {name: [asdict(s) for s in offered_tools(own)] for name, own in teams.items()}


def _shared(
    episodes: Sequence[Episode],
    settings: DistillSettings,
    kit: ToolSettings,
    environments: Sequence[Environment],
) -> Json:
    """What every process needs to know."""
    asked = one_of_each(Task("?", meta=each.meta) for each in episodes)
    return {
        "environments": [env.passed_on() for env in environments],
        "prompt": settings.prompt,
        "reward": to_json(settings.reward),
        "tools": settings.tools,
        "offered": _offered(episodes),
        "kit": asdict(kit),
        "tasks": [task.to_json() for task in asked],
    }


def _item(key: str, episode: Episode, gold: Mapping[str, Task] | None) -> Json:
    task = gold.get(episode.task_id) if gold is not None else None
    return {"key": key, "episode": episode.to_json(), "task": task and task.to_json()}


async def _convert(
    episodes: Sequence[Episode],
    gold: Mapping[str, Task] | None,
    path: Path,
    shared: Json,
    workers: int,
    book: GrammarBook,
) -> list[Conversion]:
    keys = keys_of([episode.task_id for episode in episodes])
    async with Workers(
        "coa.distillation.dataset:converter", shared, workers, at_once=AT_ONCE
    ) as pool:

        def work(key: str, episode: Episode) -> Callable[[], Awaitable[Line]]:
            async def convert() -> Line:
                if gold is not None and episode.task_id not in gold:
                    return Line(Conversion(key, episode.task_id, reason=NO_TASK).to_json())
                return Line(await pool.do(_item(key, episode, gold), key))

            return convert

        with counted("distil", len(episodes)) as on_done:
            lines = await collect(
                path,
                {key: work(key, each) for key, each in zip(keys, episodes, strict=True)},
                parse=Line,
                key=lambda line: str(line.record["key"]),
                redo=_is_outdated,
                concurrency=AT_ONCE * max(1, workers),
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


def _fingerprint(path: Path) -> str:
    if not path.is_file():
        raise UsageError(f"{path}: no such file.")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
