"""wiki_search: passages of an encyclopedia for a query, and the controls that replace it.

The controls answer one question about a trained model: does it read? `withheld` finds nothing,
`wrong` returns passages about other subjects, `closed_book` takes the tool away. A model that
memorised facts does not mind; a model that reads fails.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache

from coa.corpus.atlas import atlas_passages
from coa.corpus.index import SearchIndex, atlas_index
from coa.corpus.page import Passage
from coa.errors import ConfigError, RecordError, did_you_mean
from coa.tasks.task import Task
from coa.tools.base import Tool, Toolbox

OBSERVATIONS = ("real", "withheld", "wrong", "closed_book")
PASSAGES = 2
NOTHING = "Nothing was found."
_ABOUT = "Search the encyclopedia; the content is the query, and passages come back"


def show_passages(passages: Sequence[tuple[str, str]]) -> str:
    """Numbered passages, one a line; the title stands before a text that does not name it."""
    lines = []
    for number, (title, text) in enumerate(passages, start=1):
        flat = " ".join(text.split())
        lines.append(f"[{number}] {flat}" if title in flat else f"[{number}] {title}: {flat}")
    return "\n".join(lines) or NOTHING


def wiki_search(index: SearchIndex, passages: int = PASSAGES) -> Tool:
    """The search tool over an index of passages."""

    async def search(query: str) -> str:
        return show_passages([(hit.title, hit.text) for hit in index.search(query, passages)])

    return Tool("wiki_search", search, about=_ABOUT)


def withheld_search() -> Tool:
    """A search that never finds anything: what the model answers, it knew."""

    async def search(query: str) -> str:
        return NOTHING

    return Tool("wiki_search", search, about=_ABOUT)


def wrong_search(corpus: Sequence[Passage], passages: int = PASSAGES) -> Tool:
    """A search that returns passages which have nothing to do with the query, always the same."""

    async def search(query: str) -> str:
        digest = hashlib.sha256(query.encode("utf-8", "replace")).digest()
        picks = [
            corpus[int.from_bytes(digest[4 * i : 4 * i + 4], "big") % len(corpus)]
            for i in range(passages)
        ]
        return show_passages([(passage.title, passage.text) for passage in picks])

    return Tool("wiki_search", search, about=_ABOUT)


@cache
def atlas_toolbox(world: int = 0, observations: str = "real", passages: int = PASSAGES) -> Toolbox:
    """The tools over the Atlas of one world, or one of the controls in `OBSERVATIONS`."""
    if observations == "real":
        return Toolbox([wiki_search(atlas_index(world), passages)])
    if observations == "closed_book":
        return Toolbox()
    if observations == "withheld":
        return Toolbox([withheld_search()])
    if observations == "wrong":
        return Toolbox([wrong_search(atlas_passages(world), passages)])
    raise _no_such(observations)


def _no_such(observations: str) -> ConfigError:
    hint = did_you_mean(observations, OBSERVATIONS)
    return ConfigError(f"observations {observations!r} is not a choice.{hint}")


def toolbox_for(observations: str = "real", passages: int = PASSAGES) -> Callable[[Task], Toolbox]:
    """The toolbox of a task: the Atlas of the world that the task was made in."""
    if observations not in OBSERVATIONS:
        raise _no_such(observations)

    def of(task: Task) -> Toolbox:
        world = str(task.meta.get("world", 0))
        if not world.isdecimal():
            raise RecordError(f"task {task.id}: world is {world!r}, expected the number of one.")
        return atlas_toolbox(int(world), observations, passages)

    return of
