"""Sources of tools: what has to be opened before it gives any, a corpus, the web, a sandbox.

A source is a small value that says what to open; environments list it among their tools. It is
opened once for a process, and then gives the tools of each task.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from coa.corpus.page import Page
from coa.corpus.site import Corpus
from coa.corpus.web_page import WebPage
from coa.errors import ConfigError, ToolMistake, UsageError, did_you_mean
from coa.io.machine import cores
from coa.io.settings import find_recipe, load_recipe
from coa.sandbox import Sandbox
from coa.tasks import Task
from coa.tools.base import Tool, fingerprint_of
from coa.tools.code import NOTHING as PRINTED_NOTHING
from coa.tools.code import code_tool
from coa.tools.web import (
    NOTHING,
    PASSAGES,
    CorpusSource,
    SearchHit,
    Source,
    crawl_page,
    show_passages,
    web_search,
    wiki_search,
)

if TYPE_CHECKING:
    from coa.tools.live import WebSettings

READING = ("wiki_search", "web_search", "crawl_page")
SESSIONS = 128
"""Rollouts whose programs share their variables at a time; each is a frozen process in between."""
ToolsOf = Callable[[Task], Sequence[Tool]]


@dataclass(frozen=True)
class Opening:
    """How a run opens its tools."""

    rollouts: int = 1
    """Rollouts that there will be; nothing is opened for more at a time."""
    live: bool = True
    """False: recorded answers stand in for the tools, so nothing has to run."""
    observations: str = "real"
    code_session: bool = False
    unsafe_code: bool = False


class ToolSource(Protocol):
    """Opened once for a process; values that are equal are opened as one."""

    def open(self, how: Opening) -> AbstractAsyncContextManager[ToolsOf]: ...


@dataclass(frozen=True)
class CorpusTools:
    """Tools that read a corpus: `wiki_search` gives passages, `web_search` and `crawl_page` make
    it look like the web."""

    corpus: str | Corpus
    """A corpus directory, or an open corpus."""
    tools: tuple[str, ...] = ("wiki_search",)
    passages: int = PASSAGES
    """Most that one wiki_search returns."""

    def __post_init__(self) -> None:
        if self.passages < 1:
            raise ConfigError(f"passages is {self.passages!r}, expected at least 1.")
        for name in self.tools:
            if name not in READING:
                raise ConfigError(f"a corpus has no tool {name!r}; it has {', '.join(READING)}.")

    @asynccontextmanager
    async def open(self, how: Opening) -> AsyncIterator[ToolsOf]:
        held = self.corpus if isinstance(self.corpus, Corpus) else open_corpus(self.corpus)
        source: Source = CorpusSource(held)
        wiki = wiki_search(held, self.passages)
        if how.observations == "withheld":
            source, wiki = WithheldWeb(), withheld(wiki)
        elif how.observations == "wrong":
            source, wiki = WrongWeb(held), wrong_search(wiki, held, self.passages)
        made = {"wiki_search": wiki, "web_search": web_search(source)}

        def tools(task: Task) -> list[Tool]:
            return [made.get(n) or crawl_page(source, focus=task.question) for n in self.tools]

        yield tools


@dataclass(frozen=True)
class WebTools:
    """`web_search` and `crawl_page` on the web itself, as a recipe describes it."""

    recipe: str
    """A .toml with `WebSettings`."""
    tools: tuple[str, ...] = ("web_search", "crawl_page")

    def __post_init__(self) -> None:
        if odd := set(self.tools) - {"web_search", "crawl_page"}:
            raise UsageError(
                f"{self.recipe}: the web has no passages for {min(odd)}; use --grammar web."
            )

    @asynccontextmanager
    async def open(self, how: Opening) -> AsyncIterator[ToolsOf]:
        if how.observations == "wrong":
            raise ConfigError(
                f"observations 'wrong': needs a corpus, and {self.recipe} is the web."
            )
        settings = web_settings(self.recipe)
        source: Source = WithheldWeb() if how.observations == "withheld" else settings.source()
        summariser = settings.summariser()
        search = web_search(source)

        def tools(task: Task) -> list[Tool]:
            page = crawl_page(
                source,
                focus=task.question,
                summariser=summariser,
                timeout_s=settings.crawl_seconds,
            )
            return [search if name == "web_search" else page for name in self.tools]

        try:
            yield tools
        finally:
            if summariser is not None:
                await summariser.close()


@dataclass(frozen=True)
class SandboxTools:
    """`code`: runs Python programs in a sandbox."""

    tools: ClassVar[tuple[str, ...]] = ("code",)
    session: bool = False
    """The programs of one rollout share their variables."""

    @asynccontextmanager
    async def open(self, how: Opening) -> AsyncIterator[ToolsOf]:
        persistent = self.session or how.code_session
        box = Sandbox(slots=min(cores(), how.rollouts), unsafe=how.unsafe_code, sessions=SESSIONS)
        async with AsyncExitStack() as stack:
            if how.live and how.observations == "real":  # nothing else runs a program
                await stack.enter_async_context(box)
            made = code_control(code_tool(box, persistent=persistent), how.observations)
            yield lambda task: [made]


def corpus_tools(name: str | Path, *tools: str, passages: int = PASSAGES) -> CorpusTools | WebTools:
    """The tools of a corpus directory, or of the web where a .toml describes it; `wiki_search`
    unless others are named."""
    if is_web(str(name)):
        return WebTools(str(name), tools or ("web_search", "crawl_page"))
    return CorpusTools(str(name), tools or ("wiki_search",), passages)


sandbox_tools = SandboxTools


# ------------------------------------------------------------------------------------------------
# Controls: tools that look like the real ones and do not help.
#
# They answer one question about a trained model: does it read? `withheld` finds nothing, `wrong`
# returns what belongs to other subjects, `closed_book` takes the tools away. A model that memorised
# facts does not mind; a model that reads fails. Programs are tools, too: theirs print nothing, or
# what another program would have printed.
# ------------------------------------------------------------------------------------------------


OBSERVATIONS = ("real", "withheld", "wrong", "closed_book")


def check_observations(chosen: str) -> str:
    """The name of a control, or of none."""
    if chosen not in OBSERVATIONS:
        hint = did_you_mean(chosen, OBSERVATIONS)
        raise ConfigError(f"observations {chosen!r} is not a choice.{hint}")
    return chosen


def answering(real: Tool, answer: Callable[[str], str], name: str) -> Tool:
    """The tool as the model sees it, giving another answer, always the same for an argument."""

    async def run(argument: str) -> str:
        return answer(argument)

    same = replace(real, run=run, session=None, with_state=None, pure=True)
    return replace(same, fingerprint=name, origin="")


def withheld(real: Tool) -> Tool:
    """Any tool that never finds anything: what the model answers, it knew."""
    return answering(real, lambda argument: NOTHING, "withheld")


def wrong_search(real: Tool, corpus: Corpus, passages: int = PASSAGES) -> Tool:
    """A search that returns passages which have nothing to do with the query."""
    held = list(corpus.passages())

    def search(query: str) -> str:
        picks = [held[place] for place in _places(query, passages, len(held))]
        return show_passages([(passage.heading, passage.text) for passage in picks])

    return answering(real, search, fingerprint_of("wrong", corpus.fingerprint, passages))


def code_control(real: Tool, observations: str) -> Tool:
    """The tool `code` under a control: programs print nothing, or a number that has nothing to do
    with them."""
    if observations == "withheld":
        return answering(real, lambda block: PRINTED_NOTHING, "withheld")
    if observations == "wrong":
        return answering(real, lambda block: str(_places(block, 1, 1000)[0]), "wrong")
    return real


class WithheldWeb:
    """A web on which nothing is found."""

    fingerprint = "withheld"

    async def search_pages(self, query: str, k: int) -> Sequence[SearchHit]:
        return []

    async def page(self, address: str) -> WebPage:
        raise ToolMistake("there is no such page; take addresses from search results.")


class WrongWeb:
    """A web on which other pages are found, and other pages stand at the addresses."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus, self._real = corpus, CorpusSource(corpus)
        self.fingerprint = f"wrong {corpus.fingerprint}"

    @cached_property
    def _pages(self) -> list[Page]:
        return list(self._corpus.pages())

    async def search_pages(self, query: str, k: int) -> Sequence[SearchHit]:
        found = [self._pages[place] for place in _places(query, k, len(self._pages))]
        return [page.passages[0] for page in found if page.passages]

    async def page(self, address: str) -> WebPage:
        (place,) = _places(address, 1, len(self._pages))
        return await self._real.page(self._pages[place].url)


def _places(text: str, count: int, among: int) -> list[int]:
    """Places that depend on the text only."""
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return [int.from_bytes(digest[4 * i : 4 * i + 4], "big") % among for i in range(count)]


def is_web(name: str) -> bool:
    return name.endswith(".toml")


@cache
def open_corpus(name: str) -> Corpus:
    return Corpus.open(Path(name))


@cache
def web_settings(recipe: str) -> WebSettings:
    from coa.tools.live import WebSettings

    return load_recipe(find_recipe(recipe), (), WebSettings)
