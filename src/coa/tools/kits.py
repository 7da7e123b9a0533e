"""Which tools a task gets, made of what is opened once for a run: a corpus, a sandbox, a cache.

The tools of a task are those of its set; a question of one's own gets those that the grammar names.
A corpus of one's own stands in for the Atlas; otherwise the task's world decides.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from coa.config import load_recipe
from coa.corpus.site import Corpus, load_corpus
from coa.errors import ConfigError, RecordError, UsageError
from coa.machine import cores
from coa.tasks.sets import kind_of
from coa.tasks.task import Task
from coa.tools.base import Tool, Toolbox
from coa.tools.cache import ToolCache
from coa.tools.code import code_tool
from coa.tools.controls import (
    WithheldWeb,
    WrongWeb,
    check_observations,
    withheld_search,
    wrong_search,
)
from coa.tools.replay import cached, check_mode
from coa.tools.sandbox import Sandbox
from coa.tools.search import PASSAGES, wiki_search
from coa.tools.web import CorpusSource, Source, crawl_page, web_search

if TYPE_CHECKING:
    from coa.tools.live import WebSettings

ToolboxOf = Callable[[Task], Toolbox]
KNOWN_TOOLS = ("wiki_search", "web_search", "crawl_page", "code")


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


@asynccontextmanager
async def open_kit(
    tasks: Iterable[Task], settings: KitSettings | None = None, tools: Iterable[str] | None = None
) -> AsyncIterator[ToolboxOf]:
    """The toolboxes of these tasks; `tools` names theirs, instead of what their sets say.

    The sandbox is opened only when a task needs it.
    """
    settings = settings or KitSettings()
    chosen = None if tools is None else tuple(name for name in tools if name in KNOWN_TOOLS)
    async with AsyncExitStack() as stack:
        needed = {name for task in tasks for name in (chosen or kind_of(task).tools)}
        box = None
        if "code" in needed and settings.mode != "replay":
            opened = Sandbox(slots=cores(), unsafe=settings.unsafe_code)
            box = await stack.enter_async_context(opened)
        stored = None
        if settings.cache:
            stored = ToolCache(Path(settings.cache), read_only=settings.mode == "replay")
            stack.callback(stored.close)
        yield _Kit(settings, chosen, box, stored)


def toolbox_for(observations: str = "real", passages: int = PASSAGES) -> ToolboxOf:
    """The toolboxes of tasks that need nothing opened: those over the Atlas, without programs."""
    return _Kit(KitSettings(observations, passages))


def atlas_toolbox(world: int = 0, observations: str = "real", passages: int = PASSAGES) -> Toolbox:
    """wiki_search over the Atlas of one world, or one of the controls."""
    return toolbox_for(observations, passages)(Task("?", meta={"world": world}))


class _Kit:
    """Makes toolboxes; tools that do not depend on the question are made once."""

    def __init__(
        self,
        settings: KitSettings,
        tools: tuple[str, ...] | None = None,
        box: Sandbox | None = None,
        stored: ToolCache | None = None,
    ) -> None:
        self._settings, self._tools, self._box, self._stored = settings, tools, box, stored
        self._first: Toolbox | None = None
        self._made: dict[tuple[str, str], Tool] = {}

    def __call__(self, task: Task) -> Toolbox:
        names = self._tools if self._tools is not None else kind_of(task).tools
        if self._settings.observations == "closed_book":
            names = tuple(name for name in names if name == "code")
        corpus = self._settings.corpus or f"atlas:{_world(task)}"
        if _is_web(corpus):  # which has no passages
            names = tuple(name for name in names if name != "wiki_search")
        made = Toolbox([self._tool(name, corpus, task) for name in names], beside=self._first)
        self._first = self._first or made
        return (
            made
            if self._stored is None
            else cached(made, self._stored, check_mode(self._settings.mode))
        )

    def _tool(self, name: str, corpus: str, task: Task) -> Tool:
        if name == "crawl_page":
            writer = _web(corpus).summariser() if _is_web(corpus) else None
            return crawl_page(self._source(corpus), focus=task.question, summariser=writer)
        if (name, corpus) not in self._made:
            self._made[name, corpus] = self._make(name, corpus)
        return self._made[name, corpus]

    def _make(self, name: str, corpus: str) -> Tool:
        if name == "code":
            return self._code()
        if name == "web_search":
            return web_search(self._source(corpus))
        observations, passages = self._settings.observations, self._settings.passages
        if observations == "withheld":
            return withheld_search()
        if observations == "wrong":
            return wrong_search(list(_corpus(corpus).passages()), passages)
        known = _corpus(corpus)
        return replace(wiki_search(known.index, passages), fingerprint=known.fingerprint)

    def _source(self, corpus: str) -> Source:
        if self._settings.observations == "withheld":
            return WithheldWeb()
        if _is_web(corpus):
            return _web(corpus).source()
        known = _corpus(corpus)
        if self._settings.observations == "wrong":
            return WrongWeb(known)
        return CorpusSource(known, known.fingerprint)

    def _code(self) -> Tool:
        if self._box is not None:
            return code_tool(self._box)
        if self._settings.mode == "replay":
            return code_tool(Sandbox())  # never opened: every answer is recorded
        raise UsageError("a task needs the tool code; open its sandbox with `open_kit`.")


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
