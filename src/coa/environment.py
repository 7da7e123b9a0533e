"""Environment: the tools, the grammar, the reward and the tasks of a piece of work, as one value.

    env = Environment("invoices", tools=[lookup, convert], tasks="questions.csv", reward="exact")

Every stage takes one and nothing else decides what a task is answered with and judged by. Making an
environment opens nothing. `async with env.open() as opened` opens it once for a process; inside it
`async with opened.session(task.public()) as session` is opened once for a rollout and gives its
tools, the grammar bound to them, and one `state` that all tools of that rollout share.

Several environments may be open as one (`open_environments`): each task names its own.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from coa.engines.base import Engine
from coa.errors import (
    CoaError,
    ConfigError,
    GrammarError,
    ToolError,
    UsageError,
    boundary,
    did_you_mean,
)
from coa.grammar import PRESETS, Grammar, load_grammar
from coa.grammar.grammar import is_block_name
from coa.grammar.load import GrammarBook, block_names
from coa.io.plugins import load_beside, load_module, load_object
from coa.io.runs import Json
from coa.io.settings import Option, find_recipe, load_recipe
from coa.loop import Rollout
from coa.rewards import (
    REWARDS,
    Own,
    Reward,
    RewardSettings,
    Scored,
    choose_reward,
    lacking,
    open_reward,
    parse_expression,
    reward_for,
    together,
)
from coa.tasks import Task, TaskSet
from coa.tools.base import Tool, Toolbox, in_thread
from coa.tools.cache import ToolCache, cached, check_mode
from coa.tools.functions import tool
from coa.tools.mcp import McpTools, mcp, mcp_of
from coa.tools.recorded import RECORDED, RecordedTools, ToolRecord
from coa.tools.sources import (
    Opening,
    ToolsOf,
    ToolSource,
    check_observations,
    corpus_tools,
    is_web,
    sandbox_tools,
    withheld,
)
from coa.tools.web import PASSAGES
from coa.trajectory import StopReason, Trajectory

ToolLike = Tool | ToolSource | Callable[..., Any]
Setup = Callable[..., Any]
SPLITS = ("train", "test")
_TEST_SHARE = 5
"""One task in so many of a list that names no split is a test task."""
_BRIEF = "Answer the question with the tools."
_PREAMBLE = "You solve a task with tools."
"""How a prompt opens where all tools of a preset made way for those of an environment."""
SERVERS = "mcp"
"""The setting that every environment has: MCP servers whose tools are added to its own."""
SETUP_S = 60.0
"""Most for making the state of a rollout."""


@dataclass(frozen=True)
class ToolSettings:
    """How the tools of a run are opened; the table `[tools]` of a recipe."""

    observations: Annotated[str, Option("real; controls: withheld, wrong, closed_book.")] = "real"
    cache: Annotated[str, Option("File of recorded answers of tools.", "--tool-cache")] = ""
    mode: Annotated[
        str, Option("live, record or replay; the latter need the file.", "--tool-mode")
    ] = "live"
    expire_days: Annotated[
        float | None,
        Option("Recording: ask again for answers older than so many days.", "--tool-expire"),
    ] = None
    code_session: Annotated[bool, Option("Programs of a rollout share their variables.")] = False
    unsafe_code: Annotated[bool, Option("Run programs WITHOUT a sandbox.")] = False
    corpus: Annotated[
        str,
        Option("A corpus directory, a .toml for the web, or the name of a shipped corpus."),
    ] = ""
    passages: int = 0
    """Sets `passages` of the environment, the most that one search returns; 0: its own number."""
    mcp: Annotated[
        tuple[str, ...],
        Option(
            "MCP server whose tools are added: a command line, or a URL; repeatable.", many=True
        ),
    ] = ()

    def __post_init__(self) -> None:
        check_observations(self.observations)
        check_mode(self.mode)
        if bool(self.cache) != (self.mode != "live"):
            raise ConfigError(
                f"tool cache {self.cache!r} with mode {self.mode!r}: record and replay need the "
                "file of a cache, and a cache needs one of these modes."
            )

    def settings(self) -> dict[str, Any]:
        """What this sets of the environment itself."""
        chosen = {"corpus": self.corpus, "passages": self.passages, SERVERS: [*self.mcp]}
        return {name: value for name, value in chosen.items() if value}

    def identity(self) -> Json:
        """What results depend on, for a manifest; empty by default."""
        found: Json = {}
        if self.observations != "real":
            found["observations"] = self.observations
        if is_web(self.corpus):
            found["web"] = hashlib.sha256(find_recipe(self.corpus).read_bytes()).hexdigest()[:16]
        if self.mode == "replay":
            stored = ToolCache(Path(self.cache), read_only=True)
            found["tools"] = f"replayed from answers {stored.fingerprint()}"
            stored.close()
        for name in ("code_session", "unsafe_code"):
            if getattr(self, name):
                found[name] = True
        return found


@dataclass(frozen=True)
class Terms:
    """What a dataset card says of texts that come from an environment."""

    text: str
    """A paragraph on its licences."""
    names: tuple[str, ...] = ()
    """What the hub calls those that are not Apache-2.0."""
    limits: str = ""
    """A list item on what not to conclude from it."""


@dataclass(frozen=True)
class Environment:
    """What a piece of work needs besides a model. Making one opens nothing."""

    name: str
    tools: Sequence[ToolLike] | Callable[..., Sequence[ToolLike]] = ()
    """Functions, Tool values and sources of tools (`corpus_tools(...)`, `sandbox_tools()`), or a
    function of the public task that gives them."""
    grammar: str | Path | Grammar = "react"
    """A preset, a file, or a value. A preset's own tools make way for those of the environment."""
    tasks: Any = None
    """A file, a list, `{"train": ..., "test": ...}`, or a function of the split."""
    reward: str | RewardSettings | Callable[..., Any] = "auto"
    """A name, an expression, or a function of (task, trajectory) or (task, trajectory, state)."""
    teacher: Any = None
    """A Teacher, or the reference of one, whose work `record` writes down."""
    setup: Setup | None = None
    """A function of the public task that makes the state of a rollout."""
    groups: tuple[str, ...] = ()
    """Keys of a task's `meta` that results are grouped by."""
    terms: Terms | None = None
    """Under which licences its questions are, and what its tools return; None: nobody says."""
    remark: Callable[[Sequence[Task], ToolSettings], str] | None = None
    """Says in a line or several what somebody should know before its tasks are worked on."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What it was made with, beyond its defaults."""
    reference: str = ""
    """How another process loads the same one; empty: it cannot."""
    files: tuple[Path, ...] = ()
    """Its own files, whose content is part of what a run depends on."""
    _asked: Mapping[str, Any] | None = field(default=None, init=False, repr=False, compare=False)
    """The settings with which the reference gives this value. `dataclasses.replace` does not keep
    them, so a value that somebody changed is not taken for its reference."""

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ConfigError(f"an environment is named {self.name!r}; expected a short name.")
        if not callable(self.tools):
            object.__setattr__(self, "tools", tuple(map(self._tool, self.tools)))
        object.__setattr__(self, "groups", tuple(self.groups))
        if isinstance(self.reward, str):
            parse_expression(self.reward, REWARDS)  # says what cannot be read

    def _tool(self, given: ToolLike) -> Tool | ToolSource:
        """A tool of the list as it is opened; a function becomes a Tool."""
        with boundary(ConfigError, f"environment {self.name!r}: a tool"):
            if isinstance(given, Tool) or hasattr(given, "open"):
                return given
            made: Tool = tool(given)
            return made

    def value(self) -> Grammar:
        """Its grammar, not bound to any tools yet."""
        if isinstance(self.grammar, Grammar):
            return self.grammar
        grammar = load_grammar(str(self.grammar))
        if not self.is_template or callable(self.tools) or not self.tools:
            return grammar
        offered = [
            (e.name,) if isinstance(e, Tool | McpTools) else getattr(e, "tools", ())
            for e in self.tools
        ]
        names = {name for each in offered for name in each}
        own = {grammar.by_name[role].tool or role for role in grammar.tool_roles}
        if names & own or not all(offered):  # of a source that does not say what it has
            return grammar
        # Its opening words speak of tools that made way, of an encyclopedia for instance.
        _, _, team = grammar.preamble.partition(". ")
        preamble = f"{_PREAMBLE} {team}" if team else grammar.preamble
        return replace(grammar, brief=_BRIEF, preamble=preamble)

    @property
    def is_template(self) -> bool:
        """Whether the grammar is a preset, whose tools are only examples."""
        if isinstance(self.grammar, Grammar):  # with another preamble, say
            named = self.grammar.name
            return named in PRESETS and self.grammar.roles == load_grammar(named).roles
        return str(self.grammar) in PRESETS

    def with_grammar(self, grammar: str | Grammar) -> Environment:
        """The same environment in another grammar; one that has it as a setting is made anew, since
        its tools may follow the grammar."""
        if isinstance(grammar, str) and self.reference and "grammar" in self.settings:
            made = load_environment(self.reference, **{**self.settings, "grammar": grammar})
            return made.called(self.name)
        return self._changed(grammar=grammar)

    def tools_of(self, task: Task) -> list[Tool | ToolSource]:
        """The tools of a public task, those that have to be opened as what opens them."""
        if not callable(self.tools):
            return list(self.tools)  # type: ignore[arg-type]
        with boundary(ConfigError, f"environment {self.name!r}: its tools, for task {task.id},"):
            listed = self.tools(task)
        return [self._tool(each) for each in listed]

    # -- tasks ------------------------------------------------------------------------------

    def load_tasks(self, split: str, note: Callable[[str], None] = lambda line: None) -> TaskSet:
        """The tasks of a split: `train` for recording and RL, `test` for evaluation."""
        given = self.tasks
        if given is None:
            raise UsageError(f"environment {self.name!r} has no tasks. Give some with --tasks.")
        if by_split := isinstance(given, Mapping):
            if split not in given:
                hint = did_you_mean(split, given)
                raise UsageError(f"environment {self.name!r} has no tasks for {split!r}.{hint}")
            given = given[split]
        if callable(given):
            where = f"environment {self.name!r}: its tasks for {split!r}"
            named = split_parameter(given)
            with boundary(ConfigError, where, located=True):
                given = given(**{named: split}) if named else given()
            by_split = by_split or bool(named)
        whole = self._task_set(given, split)
        if by_split:
            return whole
        chosen = tuple(task for task in whole if split_of(task) == split)
        if split not in SPLITS:
            raise UsageError(
                f"environment {self.name!r} has one list of tasks, split into "
                f"{' and '.join(SPLITS)}, and no {split!r}."
            )
        if not chosen:
            raise UsageError(
                f"environment {self.name!r}: none of its {len(whole)} tasks falls into {split!r} "
                "by the hash of its id. Give more, or name both: tasks = {train = ..., test = ...}."
            )
        note(
            f"{self.name}: {len(chosen)} of {len(whole)} tasks are for {split!r}, by a hash of "
            "their ids"
        )
        return TaskSet(chosen, whole.name)

    def _task_set(self, given: Any, split: str) -> TaskSet:
        if isinstance(given, TaskSet):
            return given
        if isinstance(given, str | Path):
            return TaskSet.load(Path(given))
        where = f"environment {self.name!r}: its tasks for {split!r}"
        with boundary(ConfigError, where):
            made = [task if isinstance(task, Task) else Task.from_json(task) for task in given]
        if not made:
            raise UsageError(f"{where} are none.")
        return TaskSet(tuple(made), self.name)

    # -- identity ---------------------------------------------------------------------------

    def code(self) -> str:
        """A hash of its own files; empty where it has none."""
        if not self.files:
            return ""
        digest = hashlib.sha256()
        for path in sorted(self.files):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def identity(self) -> Json:
        """What a run depends on beside grammar, tools and tasks, for a manifest: its own files and
        settings. A shipped one has none that these do not tell."""
        found: Json = {}
        if code := self.code():
            found["code"] = code
            found |= {"settings": dict(self.settings)} if self.settings else {}
        return found

    def _changed(self, asked: Mapping[str, Any] | None = None, **changes: Any) -> Environment:
        """A change that `passed_on` tells, or the first value that the reference gives when asked
        with these settings."""
        made = replace(self, **changes)
        object.__setattr__(made, "_asked", self._asked if asked is None else asked)
        return made

    @property
    def is_loadable(self) -> bool:
        """Whether another process can load the same environment by its reference."""
        return bool(self.reference) and self._asked is not None

    def with_servers(self, servers: Sequence[str]) -> Environment:
        """The same environment with the tools of MCP servers beside its own."""
        more = [mcp(each) for each in ([servers] if isinstance(servers, str) else servers)]
        own = self.tools

        def tools(task: Task) -> Sequence[ToolLike]:
            return [*own(task), *more]  # type: ignore[operator]

        asked = None if self._asked is None else {**self._asked, SERVERS: servers}
        settings = {**self.settings, SERVERS: servers}
        joined = tools if callable(own) else (*own, *more)
        return self._changed(asked, tools=joined, settings=settings)

    def called(self, name: str) -> Environment:
        """The same environment under another name."""
        return self._changed(name=name)

    def passed_on(self) -> Json:
        """What another process needs to load the same environment, which is never pickled; one
        that cannot be loaded is passed on in this process only, as it is."""
        if not self.is_loadable:
            return {"value": self}
        given = self.grammar
        value = GrammarBook([given]).to_json() if isinstance(given, Grammar) else str(given)
        return {
            "reference": self.reference,
            "settings": self._asked,
            "name": self.name,
            "code": self.code(),
            "grammar": value,
        }

    @classmethod
    def received(cls, passed: Json) -> Environment:
        """The environment that `passed_on` describes."""
        if "value" in passed:
            value: Environment = passed["value"]
            return value
        env = load_environment(passed["reference"], **passed["settings"])
        if env.code() != passed["code"]:
            raise ConfigError(
                f"environment {env.name!r}: its files changed while it was being loaded. Give the "
                "same command again."
            )
        given = passed["grammar"]
        grammar = given if isinstance(given, str) else next(iter(GrammarBook.from_json(given)))
        return env._changed(name=passed["name"], grammar=grammar)

    # -- opening ----------------------------------------------------------------------------

    def open(
        self,
        tasks: Sequence[Task] = (),
        tools: ToolSettings | None = None,
        reward: RewardSettings | None = None,
    ) -> AbstractAsyncContextManager[OpenEnvironment]:
        """Open it once for this process; see `open_environments`."""
        return open_environments((self,), tasks, tools, reward)

    def judged_by(self, asked: RewardSettings) -> tuple[RewardSettings, Own | None]:
        """Its reward under the settings that were asked for, and its function where it has one. An
        expression that was asked for stands in for its own."""
        own = self.reward
        if asked.expression != "auto":
            return asked, None
        if isinstance(own, RewardSettings):  # who judges, and where verdicts are kept, was asked
            judge = replace(own.judge, model=asked.judge.model or own.judge.model)
            judge = replace(judge, cache=asked.judge.cache or own.judge.cache)
            return replace(own, judge=judge), None
        return (replace(asked, expression=own), None) if isinstance(own, str) else (asked, own)


def split_parameter(function: Callable[..., Any]) -> str:
    """The parameter of a tasks function that takes the split: `split`, or else the first one that
    has no default; empty: it makes one list for all splits."""
    taken = inspect.signature(function).parameters.values()
    if any(each.name == "split" for each in taken):
        return "split"
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    open_ones = [each for each in taken if each.default is each.empty and each.kind in plain]
    return open_ones[0].name if open_ones else ""


def split_of(task: Task) -> str:
    """The split of a task in a list that names none: a hash of its id decides, so that adding tasks
    moves no other."""
    digest = hashlib.sha256(f"split {task.id}".encode()).digest()
    return "train" if int.from_bytes(digest[:4], "big") % _TEST_SHARE else "test"


# -- open environments ------------------------------------------------------------------------


@dataclass(frozen=True)
class Session:
    """What one rollout works with."""

    tools: Toolbox
    grammar: Grammar
    """Bound to the tools."""
    state: Any = None


@asynccontextmanager
async def open_environments(
    environments: Sequence[Environment],
    tasks: Sequence[Task] = (),
    tools: ToolSettings | None = None,
    reward: RewardSettings | None = None,
    *,
    rollouts: int = 0,
    dry: bool = False,
) -> AsyncIterator[OpenEnvironment]:
    """Open environments as one; each task belongs to the one that it names.

    What `tasks` need is opened and tried here, so that what is wrong is found before any work; a
    reward is opened where `reward` is given. `rollouts` is how many there will be at a time, as
    many as tasks by default. `dry` only asks what the tools are: no sandbox is started.
    """
    async with AsyncExitStack() as stack:
        opened = OpenEnvironment(
            environments, tools or ToolSettings(), stack, rollouts or len(tasks), dry
        )
        await opened.prepare(tasks)
        if reward is not None:
            await opened.open_rewards(reward, tasks)
        yield opened


class OpenEnvironment:
    """One or several environments, opened for this process; see `open_environments`."""

    def __init__(
        self,
        environments: Sequence[Environment],
        settings: ToolSettings,
        stack: AsyncExitStack,
        rollouts: int,
        dry: bool = False,
    ) -> None:
        assert environments, "no environment"
        self.environments, self.settings = tuple(environments), settings
        self._grammar = {each.name: each.value() for each in environments}  # a file may change
        self.grammars = GrammarBook(self._grammar.values())
        self._stack = stack
        self._opening = Opening(
            rollouts=max(1, rollouts),
            live=settings.mode != "replay" and not dry,
            observations=settings.observations,
            code_session=settings.code_session,
            unsafe_code=settings.unsafe_code,
        )
        self._sources: dict[Any, ToolsOf] = {}
        self._dry = dry
        self._one_at_a_time = asyncio.Lock()
        self._first: dict[str, Toolbox] = {}
        self._given: Toolbox | None = None
        self._rewards: dict[str, Reward] = {}
        self._told: set[tuple[str, ...]] = set()
        self._answers: set[tuple[str, ...]] = set()
        self._judged: dict[str, tuple[str, Json]] = {}
        self._cache: ToolCache | None = None
        if settings.cache and not dry:
            self._cache = ToolCache(
                Path(settings.cache),
                read_only=settings.mode == "replay",
                expire_s=None if settings.expire_days is None else settings.expire_days * 86400,
            )
            stack.callback(self._cache.close)
            stack.callback(_say_missing, self._cache)

    def of(self, task: Task) -> Environment:
        """The environment that a task belongs to."""
        if len(self.environments) == 1:
            return self.environments[0]
        name = environment_name(task)
        found = next((each for each in self.environments if each.name == name), None)
        if found is None:
            known = ", ".join(each.name for each in self.environments)
            raise UsageError(f"task {task.id}: belongs to {name or 'none'!r}, not to {known}.")
        return found

    async def prepare(self, tasks: Sequence[Task]) -> None:
        """Open what tasks need; try the setup of each environment on its first task."""
        tried: set[str] = set()
        for task in tasks:
            public, env = task.public(), self.of(task)
            if callable(env.tools) or env.name not in tried:
                self._bound(env, await self.toolbox(public))
                if env.name not in tried and not self._dry:
                    await self._close(await self._state(env, public, ConfigError))
                tried.add(env.name)

    def with_tools(self, box: Toolbox) -> OpenEnvironment:
        """The same environments with these tools for every task, a record's for instance."""
        given = copy.copy(self)
        given._given = box
        return given

    def without_tools(self) -> OpenEnvironment:
        """The same environments, rewards included, with no tools at all."""
        closed = copy.copy(self)
        closed.settings = replace(self.settings, observations="closed_book")
        return closed

    async def toolbox(self, task: Task) -> Toolbox:
        """The tools of a task, which they see without gold, before any session."""
        task = task.public()
        env = self.of(task)
        first = self._first.get(env.name)
        if self._given is not None:
            return self._given
        if self.settings.observations == "closed_book":
            return Toolbox(beside=first)
        made: list[Tool] = []
        for each in env.tools_of(task):
            if isinstance(each, Tool):
                made.append(_controlled(env, each, self.settings.observations))
            else:
                made += (await self._opened(each))(task)
        made = _told_apart(env, self._grammar[env.name], made)
        box = Toolbox(_with_blocks(self._grammar[env.name], made), beside=first)
        self._first.setdefault(env.name, box)
        if self._cache is None:
            return box
        return cached(box, self._cache, check_mode(self.settings.mode))

    async def _opened(self, source: ToolSource) -> ToolsOf:
        """A source of tools, opened once for the process."""
        async with self._one_at_a_time:
            if source not in self._sources:
                with boundary(ToolError, f"opening {type(source).__name__}"):
                    context = source.open(self._opening)
                    self._sources[source] = await self._stack.enter_async_context(context)
            return self._sources[source]

    async def _state(self, env: Environment, task: Task, fault: type[CoaError]) -> Any:
        if env.setup is None:
            return None
        where = f"environment {env.name!r}: setup, on task {task.id},"
        with boundary(fault, where, located=True):
            try:
                async with asyncio.timeout(SETUP_S) as clock:
                    if inspect.iscoroutinefunction(env.setup):
                        return await env.setup(task)
                    made = await in_thread(env.setup, task)
                    return await made if inspect.isawaitable(made) else made
            except TimeoutError:
                if not clock.expired():  # one of its own
                    raise
                raise fault(f"{where} made no state within {SETUP_S:g} seconds.") from None

    async def _close(self, state: Any) -> None:
        """Let a state that holds something give it back; what fails then costs no result."""
        if not hasattr(state, "close"):
            return
        try:
            closed = state.close()
            if inspect.isawaitable(closed):
                await closed
        except Exception as exc:
            print(f"coa: closing a state failed: {type(exc).__name__}: {exc}", file=sys.stderr)

    def _bound(self, env: Environment, box: Toolbox) -> Grammar:
        """The grammar of an environment with these tools, which are all that it names."""
        grammar = self._grammar[env.name]
        replaced = self._given is not None or self.settings.observations == "closed_book"
        if not replaced and not env.is_template:
            for name in grammar.tool_roles:
                wanted = grammar.by_name[name].tool or name
                if wanted not in box:
                    hint = did_you_mean(wanted, box)
                    raise ConfigError(
                        f"environment {env.name!r}: the grammar {grammar.name!r} names the tool "
                        f"{wanted!r}, which the environment does not have; name it among the "
                        f"tools, or take <{name}> out of the grammar.{hint}"
                    )
        try:
            bound = box.bind(grammar)
        except GrammarError as wrong:
            tool = next((name for name in box if name in grammar.tags), "")
            named = f"the tool {tool!r} is named like a block of it; rename the tool. " * bool(tool)
            raise ConfigError(f"environment {env.name!r}: {wrong} {named}".rstrip()) from None
        self._told |= {(each.name, each.about, each.body, each.schema) for each in box.values()}
        # NOTE: a sandbox's fingerprint has releases of packages, and a run outlives an upgrade.
        answering = [each for each in box.values() if each.fingerprint and each.body != "code"]
        self._answers |= {(each.name, each.origin or each.fingerprint) for each in answering}
        return bound

    async def bound(self, task: Task) -> Grammar:
        """The grammar of a public task, bound to its tools."""
        return self._bound(self.of(task), await self.toolbox(task))

    def takes_state(self, task: Task) -> bool:
        """Whether the reward of a task judges with the state of its rollout."""
        reward = self._rewards.get(self.of(task).name)
        return reward is not None and reward.takes_state

    @asynccontextmanager
    async def session(self, task: Task) -> AsyncIterator[Session]:
        """What one rollout of a task works with, which is seen without gold; a `setup` that fails
        is a `ToolError`."""
        task = task.public()
        env = self.of(task)
        box = await self.toolbox(task)
        grammar = self._bound(env, box)
        state = await self._state(env, task, ToolError)
        try:
            async with box.with_state(state).opened() as tools:
                yield Session(tools, grammar, state)
        finally:
            await self._close(state)

    @asynccontextmanager
    async def rollout(
        self, task: Task, engine: Engine, *, judged: bool = True, **how: Any
    ) -> AsyncIterator[Rollout]:
        """A rollout of a task in a session of its own; `how` is what a Rollout takes. When it has
        been played, a reward that judges with its state is asked before the state is gone."""
        public = task.public()
        async with AsyncExitStack() as stack:
            try:
                session = await stack.enter_async_context(self.session(public))
            except ToolError as error:
                grammar = self._grammar[self.of(task).name]
                lost = Rollout(public, engine, grammar, Toolbox(), book=self.grammars, **how)
                lost.fail(error)
                yield lost
                return
            playing = Rollout(
                public, engine, session.grammar, session.tools, book=self.grammars, **how
            )
            yield playing
            made = playing.trajectory
            judged = judged and self._given is None and not made.failed_outside
            if judged and self.takes_state(task):
                scored = await self.reward_of(task).score(task, made, session.state)
                made.scored = scored.to_json()

    async def play(self, task: Task, engine: Engine, **how: Any) -> Trajectory:
        """Roll out one task to its end."""
        async with self.rollout(task, engine, **how) as rollout:
            return await rollout.finish()

    # -- rewards ----------------------------------------------------------------------------

    async def open_rewards(self, asked: RewardSettings, tasks: Sequence[Task] = ()) -> None:
        """Open the reward of each environment that tasks belong to, and check that it can judge."""
        for env in self.environments:
            ours = [task for task in tasks if self.of(task) is env]
            settings, own = env.judged_by(asked)
            if own is None:
                check_gold(env, settings, ours)
            context = open_reward(settings, tasks=ours, own=own)
            reward = self._rewards[env.name] = await self._stack.enter_async_context(context)
            named = reward.name if own else choose_reward(settings.expression, ours)
            self._judged[env.name] = (named, settings.identity(() if own else ours))
            if own is not None and ours:
                await self._try(reward, env, ours[0])

    async def _try(self, reward: Reward, env: Environment, task: Task) -> None:
        """Ask a reward of one's own about a trajectory without an answer, of which there will be
        some: what is wrong with it is found before any rollout."""
        name = self._grammar[env.name].name
        nothing = Trajectory(task.id, task.question, name, stop=StopReason.TURNS)
        nothing.book = self.grammars
        state = await self._state(env, task.public(), ConfigError)
        try:
            await reward.score(task, nothing, state)
        finally:
            await self._close(state)

    def reward_of(self, task: Task) -> Reward:
        return self._rewards[self.of(task).name]

    @property
    def reward_name(self) -> str:
        """What all tasks are judged by; `auto` where that is not the same for all."""
        names = {named for named, _ in self._judged.values()}
        return names.pop() if len(names) == 1 else "auto"

    def reward_details(self) -> Json:
        """What scores depend on beyond the name of the reward; empty where that is all."""
        details = {env: found for env, (_, found) in self._judged.items() if len(found) > 1}
        return next(iter(details.values())) if len(self._judged) == 1 and details else details

    async def score(self, task: Task, trajectory: Trajectory) -> Scored:
        """What a trajectory is worth; one that was judged with its state says so itself."""
        reward = self.reward_of(task)
        if not reward.takes_state:
            return await reward.score(task, trajectory)
        if trajectory.failed_outside:  # its state was not judged, and nobody counts it as a failure
            return Scored(0.0)
        if trajectory.scored is None:
            raise UsageError(
                f"task {task.id}: the reward {reward.name!r} judges with the state of the rollout, "
                "which is gone, and the trajectory has no score. Roll it out again."
            )
        return Scored.from_json(trajectory.scored)

    async def score_all(self, pairs: Iterable[tuple[Task, Trajectory]]) -> list[Scored]:
        """Judge many, all at once, in the order given. The first failure ends the others."""
        return await together(self.score(task, trajectory) for task, trajectory in pairs)

    # -- identity ---------------------------------------------------------------------------

    def inputs(self) -> dict[str, str]:
        """What a run depends on, for its manifest: the grammars, the tools (`binding`), what they
        answer from, how they are opened, and the environments' own files and settings."""
        found = {"grammar": self.grammars.fingerprint(), "binding": _digest(self._told)}
        if self._answers:
            found["answers"] = _digest(self._answers)
        for env in self.environments:
            if own := env.identity():
                found[f"environment {env.name}"] = json.dumps(own, sort_keys=True, default=str)
        for name, value in self.settings.identity().items():
            found[name] = value if isinstance(value, str) else "on"
        return found

    @property
    def grammar_names(self) -> str | list[str]:
        """For manifests: one name, or a list of several."""
        names = list(dict.fromkeys(grammar.name for grammar in self.grammars))
        return names[0] if len(names) == 1 else names

    def groups_of(self, task: Task) -> dict[str, str]:
        """What results of a task are grouped by: keys of its `meta` that its environment declares,
        and the environment where there are several."""
        env = self.of(task)
        found = {key: str(task.meta[key]) for key in env.groups if key in task.meta}
        if len(self.environments) > 1:
            found["environment"] = env.name
        return found


def bound_for(reference: str, task: Task, grammar: str = "auto") -> Grammar:
    """The grammar that a task is answered in, bound to its tools, without anything being started;
    `grammar` stands in for the environment's own."""
    env = load_environment(reference)
    env = env if grammar == "auto" else env.with_grammar(grammar)

    async def bound() -> Grammar:
        async with open_environments((env,), dry=True) as opened:
            return await opened.bound(task.public())

    return asyncio.run(bound())


def _digest(told: Iterable[tuple[str, ...]]) -> str:
    return hashlib.sha256(json.dumps(sorted(told)).encode()).hexdigest()[:16]


def environment_name(task: Task) -> str:
    """The name of the environment that a task says it belongs to."""
    return str(task.meta.get("environment") or task.meta.get("set") or "")


def remarks(
    environments: Sequence[Environment], tasks: Sequence[Task], tools: ToolSettings
) -> Iterator[str]:
    """What somebody should know before tasks are worked on, a line each."""
    for env in environments:
        alone = len(environments) == 1
        own = [task for task in tasks if alone or environment_name(task) == env.name]
        if env.remark is not None:
            yield from env.remark(own, tools).splitlines()


def check_gold(env: Environment, reward: RewardSettings, tasks: Iterable[Task]) -> None:
    """Say that a task cannot be judged before hours of rollouts, not after."""
    for name in reward.needs():
        for task in tasks:
            if missing := lacking(name, task):
                by = reward_for(task) if name == "auto" else name
                raise UsageError(
                    f"environment {env.name!r}: task {task.id} has no {missing}, so {by!r} "
                    "cannot judge it. Give every task what it is judged by, or another reward."
                )


def _controlled(env: Environment, each: Tool, observations: str) -> Tool:
    """A tool under a control; only a source of tools knows what a wrong answer would look like."""
    if observations == "wrong":
        raise ConfigError(
            f"environment {env.name!r}: observations 'wrong': the tool {each.name!r} has no wrong "
            "answers to give; withheld and closed_book work with any tool."
        )
    return withheld(each) if observations == "withheld" else each


def _with_blocks(grammar: Grammar, tools: Sequence[Tool]) -> list[Tool]:
    """The tools; one whose name no block can have (`lookupInvoice`) gets that of a block."""
    odd = [each.name for each in tools if not each.block and not is_block_name(each.name)]
    served = {grammar.by_name[role].tool for role in grammar.tool_roles}
    odd = [name for name in odd if name not in served]
    if not odd:
        return list(tools)
    taken = {*grammar.tags, *(each.name for each in tools)}
    blocks = block_names(odd, taken)
    return [replace(t, block=blocks[t.name]) if t.name in blocks else t for t in tools]


def _told_apart(env: Environment, grammar: Grammar, tools: Sequence[Tool]) -> list[Tool]:
    """The tools, each of another name. One of a server that shares its name with another tool, or
    with a block that is none, gets the server's before its own: so no server can take the place of
    somebody's own tool, and it does not matter which comes first."""
    count = Counter(each.name for each in tools)
    blocks = {*grammar.tags} - {*grammar.tool_roles}
    made: list[Tool] = []
    for each in tools:
        if each.server and (count[each.name] > 1 or each.name in blocks):
            each = replace(each, name=f"{each.server}_{each.name}")
        if each.name in {other.name for other in made}:
            advice = "the server" if each.server else "one"
            raise ConfigError(
                f"environment {env.name!r}: two tools are named {each.name!r}; give {advice} "
                "another name."
            )
        made.append(each)
    return made


# -- loading ----------------------------------------------------------------------------------

FILE = "environment.toml"


@dataclass(frozen=True)
class _ToolsTable:
    """Tools of one's own beside those of MCP servers."""

    own: str | list[str] = field(default_factory=list)
    """As `tools` without a table."""
    mcp: list[str | McpTools] = field(default_factory=list)
    """A command or a URL each, or a table of either with its settings."""

    @classmethod
    def of(cls, given: str | list[str] | _ToolsTable) -> _ToolsTable:
        made = given if isinstance(given, _ToolsTable) else cls(given)
        return replace(made, own=[made.own] if isinstance(made.own, str) else made.own)


@dataclass(frozen=True)
class _EnvironmentFile:
    """What `environment.toml` may say; references are to modules beside it, or installed ones."""

    name: str = ""
    """The folder's name by default."""
    grammar: str = "react"
    """A preset, or a .toml beside this file."""
    tools: str | list[str] | _ToolsTable = field(default_factory=list)
    """`module:attribute` each: a function, a Tool, a source, or a list of these. `recorded` stands
    for all tools of the record that no other one is named like."""
    recorded: str = ""
    """A record of a team's tools, which `coa init --from` writes; the real ones are compared with
    it."""
    corpus: str = ""
    """A corpus directory, or a .toml for the web: adds its search tools."""
    sandbox: bool = False
    """Adds `code`, which runs Python programs in a sandbox."""
    tasks: str | dict[str, str] = ""
    """A file beside this one or `module:attribute`, or a table of these by split."""
    reward: str = "auto"
    teacher: str = ""
    setup: str = ""
    groups: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """Passed to `setup` and to a tasks function, where they take them by name."""


def load_environment(reference: str | Path | Environment, **settings: Any) -> Environment:
    """An environment by its reference: a folder, an `environment.toml` or .py file,
    `module:attribute`, or the name of a shipped one. `settings` are its own."""
    if servers := settings.pop(SERVERS, ()):
        return load_environment(reference, **settings).with_servers(servers)
    if isinstance(reference, Environment):
        if settings:
            raise ConfigError(
                f"environment {reference.name!r} is a value already, so it takes no settings; "
                f"found {next(iter(settings))!r}."
            )
        return reference
    given, path = str(reference), Path(reference)
    shipped: Any = import_module(f"{__package__}.environments")
    if given in shipped.NAMES:  # a folder of that name is ./NAME
        return _loaded(_made(shipped.maker(given), given, settings), given, settings, ())
    if path.is_dir():
        for name in (FILE, "environment.py"):
            if (path / name).is_file():
                return load_environment(path / name, **settings)
        raise UsageError(
            f"{given}: holds no {FILE}. Make an environment there with: coa init {given}"
        )
    if path.suffix == ".toml":
        return _from_toml(path, settings)
    if path.suffix == ".py":
        module = load_module(path)
        for name in ("load_environment", "environment", "env"):
            if hasattr(module, name):
                made = _made(getattr(module, name), given, settings)
                return _loaded(made, str(path.resolve()), settings, _own_files(path.parent))
        raise ConfigError(
            f"{given}: has no environment; expected a value `environment`, or a function "
            "`load_environment`."
        )
    if ":" in given:
        found = load_object(given, "environment")
        source = inspect.getsourcefile(sys.modules[given.partition(":")[0]])
        files = (Path(source),) if source else ()
        return _loaded(_made(found, given, settings), given, settings, files)
    hint = did_you_mean(given, shipped.NAMES)
    raise UsageError(
        f"environment {given!r}: no such folder or file, and none of that name is shipped."
        f"{hint} Own ones: a folder with {FILE}, a file, or module:attribute."
    )


def _made(found: Any, reference: str, settings: Mapping[str, Any]) -> Environment:
    """The environment that a reference stands for: a value, or what a function makes."""
    if isinstance(found, Environment):
        return load_environment(found, **settings)
    if not callable(found):
        raise ConfigError(
            f"environment {reference!r} is a {type(found).__name__}, expected an Environment or a "
            "function that makes one."
        )
    _check_settings(reference, settings, [found])
    with boundary(ConfigError, f"making the environment {reference!r}", located=True):
        made = found(**settings)
    if not isinstance(made, Environment):
        raise ConfigError(
            f"environment {reference!r} made a {type(made).__name__}, expected an Environment."
        )
    return made


def _loaded(
    env: Environment, reference: str, settings: Mapping[str, Any], files: Sequence[Path]
) -> Environment:
    held = {**env.settings, **settings}
    files = (*env.files, *files)
    return env._changed(dict(settings), reference=reference, settings=held, files=files)


def _check_settings(
    reference: str, settings: Mapping[str, Any], takers: Iterable[Callable[..., Any]]
) -> None:
    """Refuse a setting that nothing takes."""
    known: dict[str, None] = {}
    for taker in takers:
        for each in inspect.signature(taker).parameters.values():
            if each.kind is each.VAR_KEYWORD:
                return
            known[each.name] = None
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"environment {reference!r} has no setting {name!r}.{hint}")


def _own_files(folder: Path, grammar: str = "") -> tuple[Path, ...]:
    """The files of an environment: its modules, its .toml and its grammar. A recipe beside them is
    none of these."""
    named = [folder / FILE, *([Path(grammar)] if grammar.endswith(".toml") else [])]
    return tuple(sorted([*folder.glob("*.py"), *(path for path in named if path.is_file())]))


def _from_toml(path: Path, settings: Mapping[str, Any]) -> Environment:
    read = load_recipe(path, (), _EnvironmentFile)
    folder, held = path.parent.resolve(), {**read.settings, **settings}
    table = _ToolsTable.of(read.tools)
    named_tools: Sequence[str] = table.own
    _check_references(path, read, named_tools)

    def beside(name: str) -> Any:
        return load_beside(folder, name, str(path))

    def with_settings(function: Any, of_tasks: bool = False) -> Any:
        """The function, given those settings that it takes by name."""
        if not callable(function):
            return function
        names = list(inspect.signature(function).parameters)
        own = split_parameter(function) if of_tasks else names[0] if names else ""
        taken = {name: held[name] for name in names if name in held and name != own}
        used.update(taken)
        return partial(function, **taken) if taken else function

    def named(given: str) -> Any:
        """Tasks: what a function makes, or a file."""
        return with_settings(beside(given), True) if ":" in given else _path_beside(folder, given)

    used: dict[str, Any] = {}
    tools = _tools_in(read, named_tools, folder, held, beside)
    tools += [mcp_of(each, folder) for each in table.mcp]
    tasks: Any = read.tasks or None
    if isinstance(tasks, str):
        tasks = named(tasks)
    elif tasks:
        tasks = {split: named(given) for split, given in tasks.items()}
    setup = with_settings(beside(read.setup)) if read.setup else None
    reward = beside(read.reward) if _is_reference(read.reward) else read.reward
    if unused := [name for name in held if name not in used]:
        hint = did_you_mean(unused[0], used)
        raise ConfigError(
            f"environment {path} has no setting {unused[0]!r}: neither its setup nor its tasks "
            f"function takes it.{hint}"
        )
    grammar = read.grammar
    if grammar.endswith(".toml"):
        grammar = str(_path_beside(folder, grammar))
    made = Environment(
        read.name or folder.name,
        tools=tools,
        grammar=grammar,
        tasks=tasks,
        reward=reward,
        teacher=beside(read.teacher) if _is_reference(read.teacher) else read.teacher or None,
        setup=setup,
        groups=tuple(read.groups),
    )
    if read.recorded:
        made = _compared(made, _path_beside(folder, read.recorded), RECORDED in named_tools)
    made = replace(made, settings=held)
    return _loaded(made, str(path.resolve()), settings, _own_files(folder, grammar))


def _compared(env: Environment, record: Path, answers: bool) -> Environment:
    """The environment with the tools of a record that it has not; those that it has are compared
    with the record's when it is used."""
    real = [each for each in env.tools if isinstance(each, Tool)]  # type: ignore[union-attr]
    held = ToolRecord.load(record)
    lines = [f"{env.name}: {line}" for line in held.differences(real)]
    if answers:
        but = tuple(sorted(each.name for each in real))
        env = replace(env, tools=(*env.tools, RecordedTools(str(record), but)))  # type: ignore[misc]
        left = [each.name for each in held.tools if each.name not in but]
        if left:
            lines.append(f"{env.name}: {', '.join(left)} answer from {record.name}")
    return replace(env, remark=lambda tasks, tools: "\n".join(lines))


def _tools_in(
    read: _EnvironmentFile,
    named: Sequence[str],
    folder: Path,
    held: dict[str, Any],
    beside: Callable[[str], Any],
) -> list[Any]:
    """The tools that a file names; settings of its corpus are taken out of what is held."""
    tools: list[Any] = []
    for reference in named:
        if reference == RECORDED:
            continue
        found = beside(reference)
        tools += list(found) if isinstance(found, list | tuple) else [found]
    if read.corpus:
        corpus: str | Path = _path_beside(folder, read.corpus)
        if asked := held.pop("corpus", ""):  # a path from where one is, or a shipped name
            corpus = Path(asked).resolve() if Path(asked).exists() else asked
        tools.append(corpus_tools(corpus, passages=held.pop("passages", PASSAGES)))
    if read.sandbox:
        tools.append(sandbox_tools())
    return tools


def _is_reference(name: str) -> bool:
    return re.fullmatch(r"[\w.]+:[\w.]+", name) is not None


def _check_references(path: Path, read: _EnvironmentFile, tools: Sequence[str]) -> None:
    if RECORDED in tools and not read.recorded:
        raise ConfigError(
            f"{path}: tools has {RECORDED!r}, and no record is named: recorded = FILE, which `coa "
            "init FOLDER --from EPISODES` writes."
        )
    own = [each for each in tools if each != RECORDED]
    for name, given in (("tools", own), ("setup", [read.setup] if read.setup else [])):
        for each in given:
            if not _is_reference(each):
                raise ConfigError(
                    f"{path}: {name} has {each!r}, expected module:attribute, such as "
                    "'tools:lookup' for the function lookup in tools.py beside this file."
                )


def _path_beside(folder: Path, name: str) -> Path:
    path = Path(name)
    return path if path.is_absolute() else folder / path


def shipped_home(meta: Mapping[str, Any]) -> Environment:
    """The shipped environment that the task of a record belongs to; the one for any question where
    it is of another."""
    shipped: Any = import_module(f"{__package__}.environments")
    named = str(meta.get("environment") or "").partition(":")[0]
    name, _ = shipped.home_of(Task("?", meta={**meta, "set": named} if named else meta))
    return _shipped(name)


@cache
def _shipped(name: str) -> Environment:
    return load_environment(name)


def environments_for(
    references: Sequence[str | Path | Environment], **settings: Any
) -> tuple[Environment, ...]:
    """Several environments by their references, each of another name."""
    made = tuple(load_environment(each, **settings) for each in references)
    for at, env in enumerate(made):
        if env.name in {other.name for other in made[:at]}:
            raise UsageError(f"two environments are named {env.name!r}; rename one.")
    return made


def tasks_of(
    environments: Sequence[Environment], split: str, note: Callable[[str], None]
) -> TaskSet:
    """The tasks of a split; those of several environments say which one they belong to."""
    if len(environments) == 1:
        return environments[0].load_tasks(split, note)
    made = [
        replace(task, meta={**task.meta, "environment": env.name})
        for env in environments
        for task in env.load_tasks(split, note)
    ]
    return TaskSet(tuple(made), "+".join(env.name for env in environments))


def _say_missing(stored: ToolCache) -> None:
    if missing := stored.tally["missing"]:
        print(f"coa: {missing} answers of tools are not recorded in {stored.path}", file=sys.stderr)
