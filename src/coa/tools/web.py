"""web_search and crawl_page over a Source: a corpus that looks like the web, or the web itself.

Both write the same compact, stable text whatever the source, because small models are trained on
it: `[1] Title - address`, then the text. An address ends its line, so that it can be copied whole.
A page that fits is shown whole, a longer one by the parts that bear on the question of the task;
some links follow, so that the model can go on. Of several addresses the bad ones are one line each.
"""

from __future__ import annotations

import asyncio
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from coa.corpus.site import Corpus
from coa.corpus.web_page import Link, WebPage
from coa.errors import CoaError, ToolError, ToolMistake, boundary
from coa.tools.base import Tool, fingerprint_of
from coa.tools.cache import Provisional

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


# ------------------------------------------------------------------------------------------------
# The parts of a long text that bear on a question, in their order: an extractive summary.
#
# A text is cut into sentences. A sentence counts by the words that it shares with the question,
# each by how rare it is in the text, and by those that the lines just before it share: 'New in
# version 3.8.' belongs to the function named above it. The best sentences are taken one by one,
# and a word that is covered counts less from then on, so that the parts answer more than one half
# of a question. The same text, question and length always give the same summary.
# ------------------------------------------------------------------------------------------------


GAP = "[...]"
"""Stands where something was left out."""
LONGEST = 400
"""Letters of a sentence; a longer one is cut, or a text without full stops would be all or none."""
REACH = 8
"""For how many lines their subject is remembered."""
_FADE = 0.8
_CANDIDATES = 300
"""Of how many sentences the best are chosen: a page may have tens of thousands."""
_ENOUGH = 0.6
"""Which part of the room sentences about the question may take before their context is added."""
_WIDE_ENOUGH = 0.9
"""... and these with their context; the rest shows how the page begins."""
_CONTEXT = (1, -1, 2, 3)
"""Which neighbours of a sentence are added, in this order."""
_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+|(?<=[\u3002\uff01\uff1f])")
_WORD = re.compile(r"[^\W_]+")
_WIDE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_SUFFIXES = ("ingly", "edly", "ing", "ed", "es", "ly", "s")
_COMMON = frozenset(
    "a about an and any are as at be been between by can did do does for from had has have how in "
    "into is it its many much of on one or should than that the their them then there these they "
    "this those to was were what when where which while who whom whose why will with would "
    "you".split()
)


def terms(text: str) -> list[str]:
    """Words, folded and without their endings; of scripts without spaces, pairs of letters."""
    if not text.isascii():
        folded = unicodedata.normalize("NFKD", text)
        text = "".join(letter for letter in folded if not unicodedata.combining(letter))
        text = unicodedata.normalize("NFC", text)
    found = []
    for word in _WORD.findall(text.lower()):
        if _WIDE.search(word):
            found += [word[i : i + 2] for i in range(max(1, len(word) - 1))]
        elif word not in _COMMON:
            found.append(_stem(word))
    return found


def _stem(word: str) -> str:
    """Roughly: 'cities' and 'city' are one word, and so are 'priced', 'prices' and 'price'."""
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            word = word[: -len(suffix)]
            break
    if len(word) > 3:
        word = word.removesuffix("e")
        word = f"{word[:-1]}i" if word.endswith("y") else word
    return word


def sentences(text: str) -> list[tuple[str, int]]:
    """The sentences of a text, each with the number of its line."""
    found = []
    for number, line in enumerate(text.splitlines()):
        for sentence in _END.split(line):
            rest = sentence.strip()
            while rest:
                cut = len(rest)
                if cut > LONGEST:
                    cut = rest.rfind(" ", LONGEST // 2, LONGEST)
                    cut = cut if cut > 0 else LONGEST
                found.append((rest[:cut].rstrip(), number))
                rest = rest[cut:].lstrip()
    return found


def summarise(text: str, focus: str, max_chars: int) -> str:
    """At most `max_chars` letters of the text: all of it, or what bears on the focus.

    Without a focus, or where nothing bears on it, it is the beginning.
    """
    if len(text) <= max_chars:
        return text
    parts = sentences(text)
    lengths = [len(part) + 1 for part, _ in parts]
    room = max_chars - len(GAP) - 2
    chosen = _choose(_weights(parts, terms(focus)), lengths, room)
    place = 0
    while place < len(parts):  # what is left of the room shows how the page begins
        if place not in chosen and not _fits(chosen | {place}, lengths, room):
            break
        chosen.add(place)
        place += 1
    return _joined(parts, sorted(chosen))[:max_chars]


def _weights(parts: Sequence[tuple[str, int]], wanted: Iterable[str]) -> list[dict[str, float]]:
    """How much each part says about each wanted term; the lines before it count, fading."""
    held = [set(terms(part)) for part, _ in parts]
    spread = Counter(term for each in held for term in each)
    rarity = {
        term: math.log(1 + len(parts) / spread[term])
        for term in dict.fromkeys(wanted)
        if spread[term]
    }
    weights: list[dict[str, float]] = []
    last: dict[str, int] = {}  # the line in which a term stood last
    for (_, line), each in zip(parts, held, strict=True):
        own = [term for term in rarity if term in each]
        last |= dict.fromkeys(own, line)
        near = {term: max(1, line - last[term]) for term in last if term not in own} if own else {}
        weights.append(
            {term: rarity[term] for term in own}
            | {term: rarity[term] * _FADE**far for term, far in near.items() if far <= REACH}
        )
    return weights


def _choose(weights: Sequence[Mapping[str, float]], lengths: Sequence[int], room: int) -> set[int]:
    """Greedily the part that adds most; a term that was covered counts half from then on."""
    left = {term: 1.0 for weight in weights for term in weight}
    chosen: dict[int, None] = {}  # in the order of their worth
    total = [sum(weight.values()) for weight in weights]
    candidates = [place for place, weight in enumerate(weights) if weight]
    candidates = sorted(candidates, key=lambda place: (-total[place], place))[:_CANDIDATES]
    while candidates:
        gain = {
            place: sum(value * left[term] for term, value in weights[place].items())
            / (1 + lengths[place] / LONGEST)
            for place in candidates
        }
        best = max(candidates, key=lambda place: (gain[place], -place))
        candidates.remove(best)
        if not _fits({*chosen, best}, lengths, room * _ENOUGH if chosen else room):
            break
        chosen[best] = None
        for term in weights[best]:
            left[term] *= 0.5
    return _with_context(list(chosen), lengths, room)


def _with_context(chosen: Sequence[int], lengths: Sequence[int], room: int) -> set[int]:
    """What was chosen and what stands around it: what follows a name is about it."""
    shown = set(chosen)
    for step in _CONTEXT:
        for place in chosen:
            near = place + step
            if 0 <= near < len(lengths) and _fits(shown | {near}, lengths, room * _WIDE_ENOUGH):
                shown.add(near)
    return shown


def _fits(chosen: set[int], lengths: Sequence[int], room: float) -> bool:
    gaps = sum(1 for place in chosen if place - 1 not in chosen)
    return sum(lengths[place] for place in chosen) + gaps * (len(GAP) + 1) <= room


def _joined(parts: Sequence[tuple[str, int]], places: Sequence[int]) -> str:
    pieces: list[str] = []
    last = -1
    for place in places:
        part, line = parts[place]
        if place != last + 1:
            pieces.append(f"\n{GAP}\n" if pieces else f"{GAP}\n")
        elif pieces:
            pieces.append("\n" if line != parts[last][1] else " ")
        pieces.append(part)
        last = place
    if places and last != len(parts) - 1:
        pieces.append(f"\n{GAP}")
    return "".join(pieces)


RESULTS = 5
SNIPPET_CHARS = 240
PAGE_CHARS = 3000
"""Letters of one observation of crawl_page, however many pages it shows."""
LINKS = 6
PAGES_AT_ONCE = 5
CRAWL_S = 60.0
_LONG = 20_000
"""Letters of a page that takes so long to summarise that a thread has to do it."""
_LEAST_CHARS = 200
"""A page is given this much even when many are asked for at once."""
_TITLE_CHARS = 100
_CLOSED_BY = {")": "(", "]": "[", "}": "{"}
_SEARCH_ABOUT = (
    "Search the web; the content is the query, and titles, addresses and snippets come back"
)
_CRAWL_ABOUT = (
    "Read pages; the content is one or more addresses joined by |, and their text comes back"
)

Summariser = Callable[[str, str], Awaitable[str]]
"""(text of a page, focus) -> its summary; its `fingerprint`, if any, is part of a cache's key."""


class SearchHit(Protocol):
    @property
    def title(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def text(self) -> str: ...


class Source(Protocol):
    """What the two tools read from."""

    @property
    def fingerprint(self) -> str:
        """Differs when the answers may differ; part of the key under which they are cached."""

    async def search_pages(self, query: str, k: int) -> Sequence[SearchHit]:
        """The k best pages for the query."""

    async def page(self, address: str) -> WebPage:
        """The page at an address; `ToolMistake` or `ToolError` when it cannot be read."""


@dataclass(frozen=True)
class CorpusSource:
    """A corpus as a Source."""

    corpus: Corpus

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    async def search_pages(self, query: str, k: int) -> Sequence[SearchHit]:
        return self.corpus.search_pages(query, k)

    async def page(self, address: str) -> WebPage:
        page = self.corpus.page(address)
        if page is None:
            raise ToolMistake("there is no such page; take addresses from search results.")
        links = tuple(Link("", url) for url in page.links)
        return WebPage(page.title, page.url, re.sub(r"\n\s*\n", "\n", page.text), links)


def web_search(source: Source, results: int = RESULTS) -> Tool:
    """The search tool over a source: numbered hits with title, address and snippet."""

    async def search(argument: str) -> str:
        query = " ".join(argument.split())
        if not query:
            raise ToolMistake("the query is empty; write what to search for.")
        hits = await source.search_pages(query, results)
        return show_hits(list(hits)[:results], query)

    name = fingerprint_of(source.fingerprint, results)
    return Tool(
        "web_search", search, about=_SEARCH_ABOUT, fingerprint=name, pure=True, parameter="query"
    )


def show_hits(hits: Sequence[SearchHit], query: str) -> str:
    lines = []
    for number, hit in enumerate(hits, start=1):
        snippet = summarise(" ".join(hit.text.split()), query, SNIPPET_CHARS)
        lines += [f"[{number}] {_named(hit.title, hit.url)}", " ".join(snippet.split())]
    return "\n".join(line for line in lines if line) or NOTHING


def crawl_page(
    source: Source,
    focus: str = "",
    *,
    max_chars: int = PAGE_CHARS,
    links: int = LINKS,
    summariser: Summariser | None = None,
    timeout_s: float = CRAWL_S,
) -> Tool:
    """The tool that reads pages. `focus` is the question of the task, never its answer.

    A `summariser` writes the summary of a page that is too long; without one, it is an extract.
    """

    async def crawl(argument: str) -> str:
        addresses = parse_addresses(argument)
        left_out = len(addresses) - PAGES_AT_ONCE
        views = [_View(n, each) for n, each in enumerate(addresses[:PAGES_AT_ONCE], start=1)]
        await asyncio.gather(*(view.read(source, focus, links) for view in views))
        room = max_chars - 80  # the line about what was left out
        room -= sum(len(view.head) + len(view.links) + 3 for view in views)
        rooms = share(room, [len(view.page.text) if view.page else 0 for view in views])
        pairs = zip(views, rooms, strict=True)
        await asyncio.gather(*(view.condense(focus, room, summariser) for view, room in pairs))
        failed = [view.error for view in views if view.error]
        settled = all(isinstance(error, ToolMistake) for error in failed)
        if len(views) == len(failed) == 1:
            raise failed[0]
        if len(views) == len(failed):
            kind = ToolMistake if settled else ToolError  # the world's if it failed at least once
            lines = "\n".join(view.head for view in views)
            raise kind(f"none of the pages could be read.\n{lines}")
        blocks = [view.shown() for view in views]
        if left_out > 0:
            blocks.append(f"{left_out} more were not read: at most {PAGES_AT_ONCE} at once.")
        return "\n".join(blocks) if settled else Provisional("\n".join(blocks))

    writer = "" if summariser is None else getattr(summariser, "fingerprint", "some summariser")
    name = fingerprint_of(source.fingerprint, focus, max_chars, links, writer)
    return Tool(
        "crawl_page",
        crawl,
        about=_CRAWL_ABOUT,
        timeout_s=timeout_s,
        max_chars=max_chars,
        fingerprint=name,
        origin=fingerprint_of(source.fingerprint, max_chars, links, writer),
        pure=True,
        parameter="url",
    )


@dataclass
class _View:
    """A page, or what was wrong with it, on its way into an observation."""

    number: int
    address: str
    page: WebPage | None = None
    error: CoaError | None = None
    text: str = ""
    links: str = ""

    async def read(self, source: Source, focus: str, links: int) -> None:
        try:
            with boundary(ToolError, "the page"):
                self.page = await source.page(self.address)
            self.links = show_links(self.page, focus, links)
        except CoaError as error:
            self.error = error

    async def condense(self, focus: str, room: int, summariser: Summariser | None) -> None:
        """Find what fits into this share of the room."""
        if self.page is None:
            return
        try:
            self.text = await _condensed(self.page.text, focus, room, summariser)
        except CoaError as error:
            self.error, self.links = error, ""

    @property
    def head(self) -> str:
        if self.error is not None:
            why = " ".join(str(self.error).split())
            return f"[{self.number}] {self.address[:200]} - not read: {why}"
        assert self.page is not None
        return f"[{self.number}] {_named(self.page.title, self.page.url)}"

    def shown(self) -> str:
        return "\n".join(part for part in (self.head, self.text, self.links) if part)


async def _condensed(text: str, focus: str, room: int, summariser: Summariser | None) -> str:
    if len(text) <= room:
        return text
    if summariser is None and len(text) < _LONG:
        return summarise(text, focus, room)
    if summariser is None:  # others wait in this event loop
        return await asyncio.to_thread(summarise, text, focus, room)
    with boundary(ToolError, "the summary"):
        summary = (await summariser(text, focus)).strip()
    if not summary:
        raise ToolError("the summary is empty.")
    return summarise(summary, focus, room)


def share(room: int, wanted: Sequence[int]) -> list[int]:
    """Split room fairly: who wants less than an equal part gets it, the others share the rest."""
    given = [0] * len(wanted)
    order = sorted((i for i, want in enumerate(wanted) if want), key=lambda i: wanted[i])
    for place, i in enumerate(order):
        fair = max(_LEAST_CHARS, room // (len(order) - place))
        given[i] = min(wanted[i], fair)
        room -= given[i]
    return given


def show_links(page: WebPage, focus: str, limit: int) -> str:
    """The links that share most words with the focus, then those within the text, in order."""
    wanted = set(terms(focus))

    def rank(numbered: tuple[int, Link]) -> tuple[int, bool, int]:
        place, link = numbered
        words = set(terms(f"{link.text} {link.url.partition('://')[2].partition('/')[2]}"))
        return -len(wanted & words), bool(link.text) and link.text not in page.text, place

    ranked = sorted(enumerate(page.links), key=rank)[: max(0, limit)]
    lines = [_named(link.text, link.url) for _, link in sorted(ranked, key=lambda pair: pair[0])]
    return "\n".join(["Links:", *lines]) if lines else ""


def _named(title: str, url: str) -> str:
    title = " ".join(title.split())
    title = title if len(title) <= _TITLE_CHARS else f"{title[:_TITLE_CHARS].rstrip()}..."
    return f"{title} - {url}" if title else url


def parse_addresses(argument: str) -> list[str]:
    """The addresses in a block: joined by `|`, spaces or lines, in Markdown, quoted.

    What cannot be an address stays as it is, so that reading it says what is wrong with it.
    """
    found: dict[str, None] = {}
    plain = re.sub(r"\]\((?=[a-z]+://)", "] ", argument, flags=re.IGNORECASE)
    for part in re.split(r"[|\n]+", plain):
        words = part.split()
        full = [word for word in words if "://" in word]
        likely = all("." in word or "/" in word for word in words)
        for word in full or (words if likely else [" ".join(words)]):
            if address := _bare(word):
                found[address] = None
    if not found:
        raise ToolMistake("no address was given; write one such as https://host/page.")
    return list(found)


def _bare(word: str) -> str:
    """Without the punctuation around it; a bracket that the address itself opened is kept."""
    word = word.strip("\"'`,;<>")
    scheme = re.search(r"[a-z][a-z0-9+.-]{0,20}://", word, re.IGNORECASE)
    word = word[scheme.start() if scheme else 0 :].rstrip(".,;:!\"'`>*")
    while word[-1:] in _CLOSED_BY and word.count(word[-1]) > word.count(_CLOSED_BY[word[-1]]):
        word = word[:-1].rstrip(".,;\"'`")
    return word.lstrip("([{-*")
