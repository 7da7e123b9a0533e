"""Rollouts: tasks played k times each through the one loop, into a file, resumable.

Evaluation, the selection of tasks and the groups of RL are all this. Trajectories are appended as
they finish, so what is killed continues where it was; when all are there they are put in the order
of the tasks, so that the file does not depend on who finished first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from coa.engines import DIALECTS, Dialect, Engine
from coa.environment import (
    SERVERS,
    Environment,
    OpenEnvironment,
    ToolSettings,
    environments_for,
    tasks_of,
)
from coa.errors import ConfigError, ModelError, UsageError
from coa.grammar import PRESETS, Grammar, PromptKind
from coa.grammar.load import GrammarBook
from coa.io.collect import OnDone, collect
from coa.io.progress import say
from coa.io.runs import Appender, Json
from coa.io.settings import Option
from coa.io.workers import worker_count
from coa.loop import Budget, Decoding
from coa.models.references import listed, trained_on
from coa.tasks import Task, TaskSet
from coa.trajectory import StopReason, Trajectory

Note = Callable[[str], None]
References = str | Path | Environment | Sequence[str | Path | Environment]

MODEL = Option("Model reference; see `coa model list`.")
ENV = Option("Environment: a folder, file, module:attribute, or a shipped name.", many=True)
SETTINGS = Option("Settings of the environment: env.NAME=value ...")
PROMPT = Option("full or compact; auto fits the model.")
TEMPERATURE = Option("Of sampling; 0 takes the likeliest token.")
DIALECT = Option(
    "blocks, or tools: a chat model on a server is asked in its native tool-calling format."
)
CONSTRAIN = Option("Sample only what the grammar allows.")
WEIGHTS = Option("Of few rollouts at once: full or int8; auto: int8 where it can be.")
SEED = Option("Seed of every random choice.")
THREADS = Option(
    "Most threads of a model in this process; its share of the cores by default.", least=1
)
WORKERS = Option("Processes; as many as there are cores by default.", least=1)


def processes_for(
    asked: int | None, items: int, environments: Sequence[Environment], alone: str = ""
) -> int:
    """Processes for so many items. What cannot be loaded in another works in this one, and so does
    what `alone` says of itself."""
    if not alone and not all(env.is_loadable for env in environments):
        alone = "an environment that is made in Python works in its own process"
    if not alone:
        return worker_count(items) if asked is None else asked
    if asked not in (None, 1):
        say(f"coa: workers {asked} is ignored: {alone}")
    return 1


@dataclass(frozen=True)
class AgentSettings:
    """Which model works in which environments, in which words, and how it samples."""

    model: Annotated[str, MODEL] = "auto"
    env: Annotated[References, ENV] = ()
    """None: the shipped one that the tasks, or any questions, belong to."""
    settings: Annotated[Json, SETTINGS] = field(default_factory=dict)
    grammar: Annotated[
        str, Option("Preset name or a .toml file; auto: the environment's, or the model's.")
    ] = "auto"
    prompt: Annotated[str, PROMPT] = "auto"
    dialect: Annotated[str, DIALECT] = "blocks"
    temperature: Annotated[float, TEMPERATURE] = 0.0
    constrain: Annotated[bool, CONSTRAIN] = False
    weights: Annotated[str, WEIGHTS] = "auto"
    tools: ToolSettings = field(default_factory=ToolSettings)
    seed: Annotated[int, SEED] = 0
    threads: Annotated[int | None, THREADS] = None

    @property
    def spoken(self) -> Dialect:
        """The dialect, checked."""
        for known in DIALECTS:
            if self.dialect == known:
                return known
        raise ConfigError(f"dialect {self.dialect!r}: expected {' or '.join(DIALECTS)}.")

    def spoken_by(self, environments: Sequence[Environment]) -> tuple[Environment, ...]:
        """The environments for this dialect. No model plans or reflects in messages: where nobody
        asked for a grammar, one that wants more than thoughts and calls makes way for react."""
        if self.spoken == "blocks" or self.grammar != "auto":
            return tuple(environments)
        from coa.engines.tool_calls import fits

        return tuple(
            env if fits(env.value()) else env.with_grammar("react") for env in environments
        )

    def decoding(self, model: str) -> Decoding:
        """How this model samples and is prompted; what it was trained on decides `auto`."""
        native = self.spoken == "tools"
        if native and (self.prompt != "auto" or self.constrain):
            what = "--constrain" if self.constrain else "--prompt"
            raise ConfigError(f"{what} is about blocks; leave it out with --dialect tools.")
        return Decoding(
            temperature=self.temperature,
            seed=self.seed,
            prompt="compact" if native else choose_prompt(self.prompt, model),
            constrain=self.constrain,
        )


async def roll_out_all(
    tasks: Sequence[Task],
    engine: Engine,
    opened: OpenEnvironment,
    directory: Path,
    *,
    k: int = 1,
    budget: Budget | None = None,
    decoding: Decoding | None = None,
    concurrency: int = 32,
    on_done: OnDone | None = None,
) -> list[Trajectory]:
    """Roll out every task k times into `directory/trajectories.jsonl`, resuming what is there."""
    opened.grammars.save(directory)
    with Appender(directory / "timings.jsonl") as timings:

        def note_seconds(trajectory: Trajectory) -> None:
            seconds = {name: round(value, 3) for name, value in trajectory.seconds.items()}
            timings.write({"task_id": trajectory.task_id, "sample": trajectory.sample, **seconds})

        return await roll_out(
            ((task, sample) for task in tasks for sample in range(k)),
            engine,
            opened,
            directory / "trajectories.jsonl",
            budget=budget,
            decoding=decoding,
            concurrency=concurrency,
            on_record=note_seconds,
            on_done=on_done,
        )


async def roll_out(
    pairs: Iterable[tuple[Task, int]],
    engine: Engine,
    opened: OpenEnvironment,
    path: Path,
    *,
    budget: Budget | None = None,
    decoding: Decoding | None = None,
    concurrency: int = 32,
    again: Callable[[Trajectory], bool] = lambda trajectory: False,
    on_record: Callable[[Trajectory], None] | None = None,
    on_done: OnDone | None = None,
) -> list[Trajectory]:
    """Roll out each task with its sample index into a file; `again` says which of those that are
    there already do not count."""
    decoding = decoding or Decoding()

    def one(task: Task, sample: int) -> Callable[[], Awaitable[Trajectory]]:
        chosen = replace(decoding, sample=sample)
        return lambda: opened.play(task, engine, budget=budget, decoding=chosen)

    def to_repeat(trajectory: Trajectory) -> bool:
        """An interrupted rollout is not a result; every other ending is."""
        return trajectory.stop in (None, StopReason.CANCELLED) or again(trajectory)

    return await collect(
        path,
        {(task.id, sample): one(task, sample) for task, sample in pairs},
        parse=lambda record: Trajectory.from_json(record, opened.grammars),
        key=lambda trajectory: (trajectory.task_id, trajectory.sample),
        redo=to_repeat,
        concurrency=concurrency,
        on_record=on_record,
        on_done=on_done,
    )


# -- what a command names ---------------------------------------------------------------------


def choose_environments(
    references: References,
    tasks: str | Path | TaskSet = "",
    *,
    split: str = "test",
    tools: ToolSettings | None = None,
    settings: Json | None = None,
    grammar: str = "auto",
    model: str = "",
    note: Note = lambda line: None,
) -> tuple[tuple[Environment, ...], TaskSet]:
    """The environments and the tasks of a run.

    Tasks are the environments' own of a split, unless a file is named. A file without an
    environment is of the shipped ones that its tasks belong to. `grammar` stands in for that of
    the environments; without an environment `auto` is the one that the model was trained on.
    """
    given, chosen = _asked(references, settings, tools)
    loaded = TaskSet.load(Path(tasks)) if isinstance(tasks, str | Path) and str(tasks) else tasks
    if given:
        environments = environments_for(given, **chosen)
        found = loaded if isinstance(loaded, TaskSet) else tasks_of(environments, split, note)
        return _in_grammar(environments, grammar, model, note), found
    if not isinstance(loaded, TaskSet):
        raise UsageError("nothing says what to work on: give --env, or --tasks with a task file.")
    if SERVERS in chosen:
        return _as_trained((_servers_alone(chosen),), grammar, model), loaded
    shipped: Any = import_module("coa.environments")
    chosen |= {} if grammar == "auto" else {"grammar": grammar}
    environments, found = shipped.at_home(loaded, **chosen)
    return _as_trained(environments, grammar, model), found


def default_environments(
    references: References,
    *,
    tools: ToolSettings | None = None,
    settings: Json | None = None,
    grammar: str | Grammar = "auto",
    model: str = "",
    note: Note = lambda line: None,
) -> tuple[Environment, ...]:
    """The environments for questions that belong to no tasks: those that are named, or the shipped
    one that a model of this package is at home in."""
    given, chosen = _asked(references, settings, tools)
    if given:
        return _in_grammar(environments_for(given, **chosen), grammar, model, note)
    check_home(model)
    shipped: Any = import_module("coa.environments")
    alone = _servers_alone(chosen) if SERVERS in chosen else None
    env = alone or shipped.load_environment(shipped.SEARCH, **chosen)
    known = remembered("grammar", model)
    if grammar == "auto" and len(known) > 1 and env.value().name not in known:
        choices = ", ".join(known)
        raise ConfigError(f"{model} was trained on several: {choices}. Choose one with --grammar.")
    return _as_trained((env,), grammar, model)


def _asked(
    references: References, settings: Json | None, tools: ToolSettings | None
) -> tuple[list[str | Path | Environment], Json]:
    """The references that were given, one or several, and all settings for what they name."""
    given = [references] if isinstance(references, str | Path | Environment) else [*references]
    chosen = {**(settings or {}), **(tools or ToolSettings()).settings()}
    return [each for each in given if each], chosen


def _servers_alone(settings: Json) -> Environment:
    """Questions over the tools of MCP servers and no others, where no environment is named."""
    others = [name for name in settings if name != SERVERS]
    if others:
        raise UsageError(f"--mcp without --env has no setting {others[0]!r}.")
    return Environment(SERVERS, grammar="mhqa").with_servers(settings[SERVERS])


def check_home(model: str) -> None:
    """Refuse a model that was trained for an environment of one's own, when none is named: a
    reference inside an adapter is shown and never imported."""
    shipped: Any = import_module("coa.environments")
    homes = remembered("environments", model)
    if homes and not any(name.partition(":")[0] in shipped.NAMES for name in homes):
        raise UsageError(
            f"{model} was trained for the environment {homes[0]!r}, which is not shipped here. "
            "Name it with --env."
        )


def check_shipped(names: Iterable[str]) -> None:
    """Refuse records of an environment of one's own, when none is named."""
    shipped: Any = import_module("coa.environments")
    for name in names:
        if name and name.partition(":")[0] not in shipped.NAMES:
            raise UsageError(
                f"the episodes are of the environment {name!r}, which is not shipped here. Name it "
                "with --env, or let the record answer for its tools: tools=recorded."
            )


def _in_grammar(
    environments: Sequence[Environment], grammar: str | Grammar, model: str, note: Note
) -> tuple[Environment, ...]:
    """Environments that were named: their own grammars, unless another one was asked for."""
    if grammar != "auto":
        environments = [env.with_grammar(grammar) for env in environments]
    known = remembered("grammar", model)
    for env in environments:
        if known and env.value().name not in known:
            note(
                f"{model} was trained on grammar {', '.join(known)}, not {env.value().name}: "
                "expect malformed turns"
            )
    return tuple(environments)


def _as_trained(
    environments: Sequence[Environment], asked: str | Grammar, model: str
) -> tuple[Environment, ...]:
    """Environments that nobody named: in the grammar that was asked for, or that the model was
    trained on; a model that knows several, or none yet, gets those of the environments."""
    known = remembered("grammar", model)
    if asked != "auto":
        made = tuple(env.with_grammar(asked) for env in environments)
        _warn("grammar", made[0].value().name, model, known)
        return made
    if len(known) == 1:
        value = trained_grammar(model, known[0])
        return tuple(env.with_grammar(value) for env in environments)
    for env in environments:
        if known and env.value().name not in known:
            raise ConfigError(
                f"{model} was trained on the grammars {', '.join(known)}, and the tasks are made "
                f"for {env.value().name}. Choose one with --grammar."
            )
    return tuple(environments)


def trained_grammar(model: str, name: str) -> str | Grammar:
    """A grammar that a model was trained on: a preset by its name, else as it is stored beside the
    adapter."""
    book = GrammarBook.from_json(known_grammars(model))
    stored = [grammar for grammar in book if grammar.name == name]
    return stored[0] if stored and name not in PRESETS else name


def known_grammars(model: str) -> Json:
    """The grammars that a model was trained on, as its adapter stores them."""
    try:
        return dict(trained_on(model).get("grammars") or {})
    except ModelError:
        return {}


def choose_prompt(asked: str, model: str) -> PromptKind:
    """The prompt that was asked for; `auto` is the one that the model's adapter was trained on, and
    the full one for a model without an adapter, which was never trained on the protocol."""
    known = remembered("prompt", model)
    if asked != "auto":
        _warn("prompt", asked, model, known)
    elif len(known) > 1:
        choices = ", ".join(known)
        raise ConfigError(f"{model} was trained on several: {choices}. Choose one with --prompt.")
    else:
        scripted = "compact" if model.startswith("scripted:") else "full"
        asked = known[0] if known else scripted
    if asked not in ("full", "compact"):
        raise ConfigError(f"prompt {asked!r}: expected full, compact or auto.")
    return "full" if asked == "full" else "compact"


def remembered(what: str, model: str) -> list[str]:
    """What the model's adapter remembers of its training; nothing when there is none."""
    try:
        return listed(trained_on(model).get(what))
    except ModelError:  # loading it reports what is wrong, and a caller may have an engine
        return []


def _warn(what: str, asked: str, model: str, known: list[str]) -> None:
    if known and asked not in known:
        say(
            f"{model} was trained on {what} {', '.join(known)}, not {asked}: expect malformed turns"
        )
