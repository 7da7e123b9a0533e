"""The distillation stage: an episodes file in, a run directory with a dataset out.

`converted.jsonl` grows while episodes are converted, judged and replayed, in as many processes as
there are; what is left of them after the filters is written at the end. The same command again
continues.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from coa.collect import Line, collect
from coa.config import load_recipe, to_json
from coa.crew import Crew, Work, crew_size
from coa.distill.card import Making
from coa.distill.filters import FilterSettings
from coa.distill.pipeline import (
    AT_ONCE,
    NO_TASK,
    Conversion,
    Distilled,
    conclude,
    convert_one,
    keys_of,
    save_distilled,
)
from coa.distill.recorded import as_shown, offered_tools, recorded_tools
from coa.engines.codec import Codec
from coa.engines.store import BASE, is_pulled, model_folder, resolve
from coa.environment import (
    Environment,
    ToolSettings,
    environment_name,
    open_environments,
    tasks_of,
)
from coa.errors import CoaError, ConfigError, GrammarError, RecordError, UsageError
from coa.progress import counted
from coa.protocol import load_grammar
from coa.protocol.book import GrammarBook
from coa.protocol.prompt import PromptKind
from coa.rehearsal import Rehearsal, spread_out
from coa.rewards import RewardSettings
from coa.rollouts import References, check_shipped, choose_environments
from coa.runs import Json, Run, dumps, manifest_beside, read_jsonl, read_object
from coa.tasks.task import Task, TaskSet
from coa.teachers.episode import Episode, ToolSpec, read_episodes
from coa.teachers.stage import one_of_each

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
    """Converts, judges and replays one episode after another; runs in a process of a crew."""
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
        gold = {task.id: task for task in tasks_of(environments, settings.split, _say)}
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
    if all(env.reference for env in environments):
        return crew_size(episodes) if asked is None else asked
    if asked not in (None, 1):
        _say(
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


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _compare_tools(episodes: Path, now: Mapping[str, str]) -> None:
    """Say that the calls were made elsewhere than they will be replayed: each would be answered in
    another way, and its episode dropped."""
    manifest = manifest_beside(episodes)
    if not manifest.is_file():
        return
    held = read_object(manifest)
    if "answers" in held and held["answers"] != now.get("answers"):
        _say(
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
    asked = one_of_each((Task("?", meta=each.meta) for each in episodes), environments)
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
    async with Crew("coa.distill.stage:converter", shared, workers, at_once=AT_ONCE) as crew:

        def work(key: str, episode: Episode) -> Callable[[], Awaitable[Line]]:
            async def convert() -> Line:
                if gold is not None and episode.task_id not in gold:
                    return Line(Conversion(key, episode.task_id, reason=NO_TASK).to_json())
                return Line(await crew.do(_item(key, episode, gold), key))

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
