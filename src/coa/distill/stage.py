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
from typing import Literal

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
from coa.distill.recorded import as_shown, recorded_tools
from coa.engines.codec import Codec
from coa.engines.store import BASE, is_pulled, model_folder, resolve
from coa.errors import GrammarError, RecordError, UsageError
from coa.progress import counted
from coa.protocol import load_grammar
from coa.protocol.prompt import PromptKind
from coa.rehearsal import Rehearsal, spread_out
from coa.rewards import RewardSettings, open_reward
from coa.runs import Json, Run, dumps, manifest_beside, read_jsonl, read_object
from coa.tasks.sets import grammar_of
from coa.tasks.task import Task, TaskSet
from coa.teachers.episode import Episode, read_episodes
from coa.tools.kits import KitSettings, one_of_each, open_kit

CONVERTED = "converted.jsonl"
UNFIT = "its task has no grammar or no tools"


@dataclass(frozen=True)
class DistillSettings:
    """What `coa distill` does with episodes; a recipe may set any of it."""

    grammar: str = "auto"
    """A preset's name or a .toml file; auto: for each task what it, or its set, is made for."""
    prompt: PromptKind = "compact"
    tools: Literal["called", "recorded"] = "called"
    """What answers in the replay: the tools themselves, or the record, where they are not here."""
    filter: FilterSettings = field(default_factory=FilterSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    """What is right; see docs/rewards.md."""


@asynccontextmanager
async def converter(settings: Json) -> AsyncIterator[Work]:
    """Converts, judges and replays one episode after another; runs in a process of a crew."""
    sets = [Task.from_json(task) for task in settings["tasks"]]
    chosen = settings["grammar"]
    named = None if chosen == "auto" else load_grammar(chosen)
    called = settings["tools"] == "called"
    rewards = load_recipe(None, [], RewardSettings, settings["reward"])
    async with (
        open_kit(sets if called else [], KitSettings(**settings["kit"]), named) as toolbox_of,
        open_reward(rewards) as reward,
    ):

        async def work(item: Json) -> Json:
            episode = Episode.from_json(item["episode"])
            task = Task.from_json(item["task"]) if item["task"] else None
            try:
                public = Task(episode.question, id=episode.task_id, meta=episode.meta)
                grammar = named or load_grammar(grammar_of(public))
                if not called:
                    episode = as_shown(episode)
                toolbox = toolbox_of(public) if called else recorded_tools(episode, grammar)
            except (GrammarError, RecordError) as wrong:
                unfit = Conversion(item["key"], episode.task_id, reason=UNFIT, detail=str(wrong))
                return unfit.to_json()
            made = await convert_one(
                item["key"], episode, grammar, toolbox, reward, task, prompt=settings["prompt"]
            )
            return made.to_json()

        yield work


def run_distillation(
    episodes: Path,
    out: Path,
    tasks: Path | None = None,
    settings: DistillSettings | None = None,
    *,
    against: Sequence[Path] = (),
    kit: KitSettings | None = None,
    workers: int | None = None,
) -> Distilled:
    """Distil a file of episodes. Without the tasks' gold, answers are not judged.

    `against` are task files that a model will be evaluated on: what is like them is not kept.
    """
    settings, kit = settings or DistillSettings(), kit or KitSettings()
    chosen = None if settings.grammar == "auto" else load_grammar(settings.grammar)
    gold = _gold(tasks)
    held_out = _held_out(against)
    inputs = {"episodes": _fingerprint(episodes), "tasks": _fingerprint(tasks) if tasks else ""}
    inputs |= {name: held.fingerprint() for name, held in held_out.items()}
    if settings.grammar.endswith(".toml"):
        inputs["grammar"] = _fingerprint(Path(settings.grammar))
    recipe = {**_chosen(settings), **kit.identity()}
    sound, unread = _read(episodes)
    if settings.tools == "called":
        _compare_tools(episodes, kit)
    with Run.open(out, "distill", recipe, inputs, settings.filter.seed) as run:
        shared = _shared(sound, settings, kit)
        size = crew_size(len(sound)) if workers is None else workers
        converted = asyncio.run(_convert(sound, gold, run.root / CONVERTED, shared, size))
        everything, judged = [*unread, *converted], gold is not None
        distilled = conclude(everything, settings.filter, held_out, judged=judged, grammar=chosen)
        making = _making(episodes, tasks, settings, held_out, kit)
        save_distilled(out, distilled, making, grammar=chosen)
    if not distilled.kept:
        reasons = ", ".join(distilled.funnel["rejected"])
        raise UsageError(f"no episode was kept: {reasons}. See {out}/rejected.jsonl.")
    return distilled


def _compare_tools(episodes: Path, kit: KitSettings) -> None:
    """Say that the calls were made elsewhere than they will be replayed: each would be answered in
    another way, and its episode dropped."""
    manifest = manifest_beside(episodes)
    if not manifest.is_file():
        return
    held, now = read_object(manifest), kit.identity()
    if any(held.get(name) != now.get(name) for name in ("corpus", "web")):
        said = f"{episodes}: was recorded with another --corpus than is given here, or with none; "
        print(said + "where its calls are answered differently it does not replay", file=sys.stderr)


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
    kit: KitSettings,
) -> Making:
    """What the card says of how the dataset was made; names of files, not where they lay."""
    command = f"coa distill --episodes {episodes.name} --out DIR"
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
    against: Sequence[Path] = (),
    kit: KitSettings | None = None,
    workers: int | None = None,
) -> Rehearsal:
    """What `run_distillation` would take, by a few episodes; nothing is written or filtered."""
    settings, kit = settings or DistillSettings(), kit or KitSettings()
    gold, (sound, _) = _gold(tasks), _read(episodes)
    _held_out(against)  # a file that is missing is missing for the rehearsal, too
    journal = out / CONVERTED
    stored = read_jsonl(journal, growing=True) if journal.is_file() else ()
    done = {str(record.get("key")) for _, record in stored}
    keyed = zip(keys_of([episode.task_id for episode in sound]), sound, strict=True)
    left = [(key, each) for key, each in keyed if key not in done]
    chosen = [pair for pair in spread_out(left) if gold is None or pair[1].task_id in gold]

    async def work() -> tuple[float, list[Json]]:
        async with converter(_shared(sound, settings, kit)) as convert:
            for _ in ("opening what is opened once", "timed"):
                begun = time.monotonic()
                made = [await convert(_item(key, each, gold)) for key, each in chosen]
            return time.monotonic() - begun, made

    seconds, made = asyncio.run(work())
    good = sum(each["trajectory"] is not None and not each["replay"] for each in made)
    written = sum(len(dumps(each)) for each in made)
    size = crew_size(len(sound)) if workers is None else workers
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


def _shared(episodes: Sequence[Episode], settings: DistillSettings, kit: KitSettings) -> Json:
    """What every process needs to know."""
    asked = one_of_each(Task("?", meta=each.meta) for each in episodes)
    return {
        "grammar": settings.grammar,
        "prompt": settings.prompt,
        "reward": to_json(settings.reward),
        "tools": settings.tools,
        "kit": asdict(kit),
        "tasks": [
            task.to_json() for task in asked if settings.grammar != "auto" or _has_grammar(task)
        ],
    }


def _has_grammar(task: Task) -> bool:
    """Whether anything can be opened for it; if not, its episodes are dropped one by one."""
    try:
        load_grammar(grammar_of(task))
    except GrammarError:
        return False
    return True


def _item(key: str, episode: Episode, gold: Mapping[str, Task] | None) -> Json:
    task = gold.get(episode.task_id) if gold is not None else None
    return {"key": key, "episode": episode.to_json(), "task": task and task.to_json()}


async def _convert(
    episodes: Sequence[Episode],
    gold: Mapping[str, Task] | None,
    path: Path,
    shared: Json,
    workers: int,
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
    return [Conversion.from_json(line.record) for line in lines]


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
