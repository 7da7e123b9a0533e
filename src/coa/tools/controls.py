"""Controls: tools that look like the real ones and do not help.

They answer one question about a trained model: does it read? `withheld` finds nothing, `wrong`
returns what belongs to other subjects, `closed_book` takes the tools away. A model that memorised
facts does not mind; a model that reads fails. Programs are tools, too: theirs print nothing, or
what another program would have printed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from coa.corpus.page import Page
from coa.corpus.site import Corpus
from coa.errors import ConfigError, ToolMistake, did_you_mean
from coa.tools.base import Tool, fingerprint_of
from coa.tools.code import NOTHING as PRINTED_NOTHING
from coa.tools.extract import WebPage
from coa.tools.web import NOTHING, PASSAGES, CorpusSource, SearchHit, show_passages

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
