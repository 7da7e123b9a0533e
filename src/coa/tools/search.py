"""wiki_search: passages of an encyclopedia for a query."""

from __future__ import annotations

from collections.abc import Sequence

from coa.corpus.site import Corpus
from coa.tools.base import Tool, fingerprint_of

PASSAGES = 2
NOTHING = "Nothing was found."
WIKI_ABOUT = "Search the encyclopedia; the content is the query, and passages come back"


def show_passages(passages: Sequence[tuple[str, str]]) -> str:
    """Numbered passages, one a line; the title stands before a text that does not name it."""
    lines = []
    for number, (title, text) in enumerate(passages, start=1):
        flat = " ".join(text.split())
        lines.append(f"[{number}] {flat}" if title in flat else f"[{number}] {title}: {flat}")
    return "\n".join(lines) or NOTHING


def wiki_search(corpus: Corpus, passages: int = PASSAGES) -> Tool:
    """The search tool over the passages of a corpus."""

    async def search(query: str) -> str:
        return show_passages([(hit.heading, hit.text) for hit in corpus.search(query, passages)])

    name = fingerprint_of(corpus.fingerprint, passages)
    return Tool(
        "wiki_search", search, about=WIKI_ABOUT, fingerprint=name, pure=True, parameter="query"
    )
