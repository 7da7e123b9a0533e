"""Which tools a task gets, made of what is opened once for a run: a corpus, a sandbox, a cache.

The tools of a task are those of its set; a question of one's own gets those that the grammar names,
the one that is chosen or the task's own.
A corpus of one's own stands in for the Atlas; otherwise the task's world decides.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from coa.config import load_recipe
from coa.corpus.site import Corpus, load_corpus
from coa.errors import ConfigError, RecordError, UsageError
from coa.machine import cores
from coa.protocol import Grammar, load_grammar
from coa.runs import Json
from coa.tasks.sets import DEFAULT_SET, KINDS, grammar_of, kind_of
from coa.tasks.task import Task
from coa.tools.base import Tool, Toolbox
from coa.tools.cache import ToolCache
from coa.tools.code import code_tool
from coa.tools.controls import (
    CODE_CONTROLS,
    WithheldWeb,
    WrongWeb,
    check_observations,
    withheld_search,
    wrong_search,
)
from coa.tools.declared import declared_tools
from coa.tools.replay import cached, check_mode
from coa.tools.sandbox import Sandbox
from coa.tools.search import PASSAGES, wiki_search
from coa.tools.web import CRAWL_S, CorpusSource, Source, crawl_page, web_search

if TYPE_CHECKING:
    from coa.tools.live import WebSettings

ToolboxOf = Callable[[Task], Toolbox]
READING = ("wiki_search", "web_search", "crawl_page")
KNOWN_TOOLS = (*READING, "code")
SESSIONS = 128
"""Rollouts whose programs share their variables at a time; each is a frozen process in between."""


@dataclass(frozen=True)
class KitSettings:
    """What the tools of a run depend on."""

    observations: str = "real"
    """real; withheld, wrong and closed_book are the controls."""
    passages: int = PASSAGES
    """Passages that one wiki_search returns."""
    corpus: str = ""
    """A corpus directory, atlas:K, or a .toml with `WebSettings` for the real web; empty: the Atlas
    of each task's world."""
    cache: str = ""
    """The file of recorded answers; empty: none."""
    mode: str = "live"
    """live, record or replay; see `coa.tools.replay`."""
    expire_days: float | None = None
    """Recording, older answers are asked for again; None: never."""
    code_session: bool = False
    """The programs of one rollout share their variables."""
    unsafe_code: bool = False
    """Run programs without a sandbox."""

    def __post_init__(self) -> None:
        check_observations(self.observations)
        check_mode(self.mode)
        if bool(self.cache) != (self.mode != "live"):
            raise ConfigError(
                f"tool cache {self.cache!r} with mode {self.mode!r}: record and replay need the "
                "file of a cache, and a cache needs one of these modes."
            )
        if self.observations == "wrong" and _is_web(self.corpus):
            raise ConfigError(
                f"observations 'wrong': needs a corpus, and {self.corpus} is the web."
            )

    def identity(self) -> Json:
        """What results depend on beyond the task's own world, for a manifest; empty by default."""
        found: Json = {}
        if _is_web(self.corpus):
            found["web"] = hashlib.sha256(Path(self.corpus).read_bytes()).hexdigest()[:16]
        elif self.corpus:
            found["corpus"] = _corpus(self.corpus).fingerprint
        if self.mode == "replay":
            stored = ToolCache(Path(self.cache), read_only=True)
            found["tools"] = f"replayed from answers {stored.fingerprint()}"
            stored.close()
        if self.code_session:
            found["code_session"] = True
        if self.unsafe_code:
            found["unsafe_code"] = True
        return found


@asynccontextmanager
async def open_kit(
    tasks: Sequence[Task], settings: KitSettings | None = None, grammar: Grammar | None = None
) -> AsyncIterator[ToolboxOf]:
    """The toolboxes of these tasks. The sandbox is opened only when a task needs it."""
    settings = settings or KitSettings()
    if settings.corpus:
        check_corpus(settings.corpus)
    async with AsyncExitStack() as stack:
        box = None
        programs = settings.observations == "real" and settings.mode != "replay"
        if programs and any("code" in tools_of(task, grammar) for task in tasks):
            opened = Sandbox(
                slots=min(cores(), len(tasks)), unsafe=settings.unsafe_code, sessions=SESSIONS
            )
            box = await stack.enter_async_context(opened)
        stored = None
        if settings.cache:
            stored = ToolCache(
                Path(settings.cache),
                read_only=settings.mode == "replay",
                expire_s=None if settings.expire_days is None else settings.expire_days * 86400,
            )
            stack.callback(stored.close)
            stack.callback(_say_missing, stored)
        kit = _Kit(settings, grammar, box, stored)
        stack.push_async_callback(kit.close)
        yield kit


def tools_of(task: Task, grammar: Grammar | None = None) -> tuple[str, ...]:
    """Names of a task's tools: those of its set, or else those that the grammar names (the task's
    own, where none is given); none of these for a task that declares its own."""
    if "tools" in task.meta:
        return ()
    if str(task.meta.get("set")) not in KINDS:
        grammar = grammar or load_grammar(grammar_of(task))
        named = [grammar.by_name[name].tool or name for name in grammar.tool_roles]
        known = tuple(name for name in named if name in KNOWN_TOOLS)
        if known:
            return known
    return kind_of(task).tools


def atlas_by_default(
    tasks: Iterable[Task], settings: KitSettings, grammar: Grammar | None = None
) -> str:
    """A line on tasks of other sets, a benchmark's for instance, whose tools look into the Atlas
    because nobody named a corpus; empty where there are none."""
    if settings.corpus or settings.mode == "replay" or settings.observations != "real":
        return ""
    found = {
        str(task.meta["set"])
        for task in one_of_each(tasks)
        if task.meta.get("set", DEFAULT_SET) not in KINDS
        and not set(READING).isdisjoint(tools_of(task, grammar))
    }
    listed = ", ".join(sorted(found))
    return f"{listed}: without --corpus the tools of these tasks search the Atlas" if found else ""


def one_of_each(tasks: Iterable[Task]) -> list[Task]:
    """A task of each set and grammar, with tools of its own and without: enough to say what to
    open."""
    found = {(str(t.meta.get("set")), grammar_of(t), "tools" in t.meta): t for t in tasks}
    return list(found.values())


def toolbox_for(observations: str = "real", passages: int = PASSAGES) -> ToolboxOf:
    """The toolboxes of tasks that need nothing opened: those over the Atlas, without programs."""
    return _Kit(KitSettings(observations, passages))


def atlas_toolbox(world: int = 0, observations: str = "real", passages: int = PASSAGES) -> Toolbox:
    """wiki_search over the Atlas of one world, or one of the controls."""
    return toolbox_for(observations, passages)(Task("?", meta={"world": world}))


class _Kit:
    """Makes toolboxes; what does not depend on the question is made once."""

    def __init__(
        self,
        settings: KitSettings,
        grammar: Grammar | None = None,
        box: Sandbox | None = None,
        stored: ToolCache | None = None,
    ) -> None:
        self._settings, self._grammar, self._box, self._stored = settings, grammar, box, stored
        self._first: Toolbox | None = None
        self._tools: dict[tuple[str, str], Tool] = {}
        self._sources: dict[str, Source] = {}
        web = settings.corpus if _is_web(settings.corpus) else ""
        self._summariser = _web(web).summariser() if web else None

    async def close(self) -> None:
        if self._summariser is not None:
            await self._summariser.close()

    def __call__(self, task: Task) -> Toolbox:
        names = tools_of(task, self._grammar)
        corpus = self._settings.corpus or f"atlas:{_world(task)}"
        if self._settings.observations == "closed_book":
            names = ()
        elif _is_web(corpus) and names:
            names = tuple(name for name in names if name != "wiki_search")
            if not names:
                raise UsageError(
                    f"{corpus}: the web has no passages for wiki_search; use --grammar web."
                )
        tools = [self._tool(name, corpus, task) for name in names]
        if self._settings.observations != "closed_book":
            tools += declared_tools(task)
        made = Toolbox(tools, beside=self._first)
        self._first = self._first or made
        if self._stored is None:
            return made
        return cached(made, self._stored, check_mode(self._settings.mode))

    def _tool(self, name: str, corpus: str, task: Task) -> Tool:
        if name == "crawl_page":
            source = self._source(corpus)
            seconds = _web(corpus).crawl_seconds if _is_web(corpus) else CRAWL_S
            return crawl_page(
                source, focus=task.question, summariser=self._summariser, timeout_s=seconds
            )
        if (name, corpus) not in self._tools:
            self._tools[name, corpus] = self._make(name, corpus)
        return self._tools[name, corpus]

    def _make(self, name: str, corpus: str) -> Tool:
        observations, passages = self._settings.observations, self._settings.passages
        if name == "code":
            return self._code()
        if name == "web_search":
            return web_search(self._source(corpus))
        if observations == "withheld":
            return withheld_search()
        if observations == "wrong":
            return wrong_search(_corpus(corpus), passages)
        return wiki_search(_corpus(corpus), passages)

    def _source(self, corpus: str) -> Source:
        if corpus not in self._sources:
            self._sources[corpus] = self._open_source(corpus)
        return self._sources[corpus]

    def _open_source(self, corpus: str) -> Source:
        if self._settings.observations == "withheld":
            return WithheldWeb()
        if _is_web(corpus):
            return _web(corpus).source()
        known = _corpus(corpus)
        if self._settings.observations == "wrong":
            return WrongWeb(known)
        return CorpusSource(known)

    def _code(self) -> Tool:
        control = CODE_CONTROLS.get(self._settings.observations)
        if self._box is None and self._settings.mode != "replay" and control is None:
            raise UsageError("a task needs the tool code; open its sandbox with `open_kit`.")
        # A control or a replay runs nothing: this one is never opened, it only names the answers.
        box = self._box or Sandbox(unsafe=self._settings.unsafe_code)
        real = code_tool(box, persistent=self._settings.code_session)
        return control(real) if control else real


def _say_missing(stored: ToolCache) -> None:
    if missing := stored.tally["missing"]:
        print(f"coa: {missing} answers of tools are not recorded in {stored.path}", file=sys.stderr)


@cache
def _corpus(name: str) -> Corpus:
    return load_corpus(name)


def check_corpus(name: str) -> None:
    """Say what is wrong with the name of a corpus before any work."""
    _web(name) if _is_web(name) else _corpus(name)


def _is_web(corpus: str) -> bool:
    return corpus.endswith(".toml")


@cache
def _web(recipe: str) -> WebSettings:
    from coa.tools.live import WebSettings

    return load_recipe(Path(recipe), (), WebSettings)


def _world(task: Task) -> int:
    world = str(task.meta.get("world", 0))
    if not world.isdecimal():
        raise RecordError(f"task {task.id}: world is {world!r}, expected the number of one.")
    return int(world)
