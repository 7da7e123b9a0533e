"""A page of the web: its bytes -> title, text and links.

Nothing here raises on account of what a page contains, but for a `ToolMistake` that says that it
has no text. `read_apart` reads it in a worker process, so that a page which hangs its reader or
exhausts memory costs that process alone.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import cache
from urllib.parse import urldefrag, urljoin, urlsplit

from coa.corpus.html_reader import html_page
from coa.corpus.readers import decoded, pdf_pages
from coa.errors import CoaError, MissingExtra, RecordError, ToolError, ToolMistake, ToolTimeout
from coa.io.machine import cores
from coa.io.runs import Json
from coa.io.workers import Work, WorkerDied, WorkerLimits, WorkerPool

READ_S = 15.0
"""Seconds for finding the text in a page that has arrived."""
MAX_LINKS = 400
MAX_PDF_PAGES = 40
MAX_HTML = 2_000_000
"""Letters of a page that are looked at; what follows is left out."""
TITLE_TEXT, LINK_TEXT, LINK_URL = 200, 80, 500
_MARKUP = ("html", "xml")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")


@dataclass(frozen=True, slots=True)
class Link:
    text: str
    url: str


@dataclass(frozen=True, slots=True)
class WebPage:
    """A page as it is read: whoever wrote it, and wherever it came from."""

    title: str
    url: str
    text: str
    links: tuple[Link, ...] = ()


def read_page(url: str, media_type: str, charset: str, body: bytes) -> WebPage:
    """The page in these bytes; a `ToolMistake` when there is nothing to read in it."""
    place = urlsplit(url).hostname or url[:80]
    is_pdf = body.startswith(b"%PDF-") or media_type == "application/pdf"
    try:
        page = _read_pdf(url, body) if is_pdf else _read_text(url, media_type, charset, body)
    except MissingExtra:
        kind = "a PDF" if is_pdf else "HTML"
        raise ToolError(
            f'the page is {kind}; to read it: pip install "chain-of-agents[tools]"'
        ) from None
    except RecordError as error:
        # Without what the library says in brackets: that differs from version to version.
        raise ToolMistake(f"{place}: {str(error).partition(' (')[0]}.") from error
    if not page.text:
        raise ToolMistake(f"{place}: the page has no text.")
    return page


def _read_pdf(url: str, body: bytes) -> WebPage:
    title, pages = pdf_pages(body, MAX_PDF_PAGES)
    return WebPage(" ".join(title.split())[:TITLE_TEXT], url, _tidy("\n".join(pages)))


def _read_text(url: str, media_type: str, charset: str, body: bytes) -> WebPage:
    may_declare = not media_type or media_type.endswith(_MARKUP)
    text, _ = decoded(body, charset, markup=may_declare)
    if _is_binary(text):
        raise RecordError("the page is binary, not text")
    text = text[:MAX_HTML]
    looks_like = re.match(r"\s*<(!doctype|html|head|body|\?xml)", text, re.I)
    if media_type.endswith(_MARKUP) or (not media_type and looks_like):
        return read_html(url, text)
    return WebPage("", url, _tidy(text))


def _is_binary(text: str) -> bool:
    """Control characters and failed decoding in quantity: a picture, an archive, a program."""
    head = text[:4000]
    odd = sum(1 for c in head if c == "\ufffd" or (c < " " and c not in "\t\n\r\f\x1b"))
    return odd * 20 > len(head)


def read_html(url: str, text: str) -> WebPage:
    """Title, main text and links of an HTML page."""
    title, main, base, linked = html_page(_CONTROL.sub(" ", text))
    base = _joined(url, base) or url
    links: dict[str, Link] = {}
    for words, href in linked:
        words, leads_to = words[:LINK_TEXT].rstrip(), _joined(base, href)
        if words and leads_to and leads_to != urldefrag(url).url and len(links) < MAX_LINKS:
            links.setdefault(leads_to, Link(words, leads_to))
    return WebPage(title[:TITLE_TEXT], url, _tidy(main), tuple(links.values()))


def _joined(base: str, reference: str) -> str:
    """The full address, without its fragment; '' when it is none of the web."""
    try:
        url = urldefrag(urljoin(base, reference)).url
        usable = urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
    except ValueError:
        return ""
    return url if usable and len(url) <= LINK_URL and not re.search(r"\s", url) else ""


def _tidy(text: str) -> str:
    """Lines without surplus space, and none that is empty."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


# ------------------------------------------------------------------------------------------------
# Pages are read in worker processes, which all of this program shares.
# ------------------------------------------------------------------------------------------------


async def read_apart(url: str, media_type: str, charset: str, body: bytes) -> WebPage:
    """As `read_page`, and a `ToolTimeout` for a page that takes too long."""
    item = {"url": url, "media_type": media_type, "charset": charset}
    item |= {"body": base64.b64encode(body).decode("ascii")}
    try:
        page = await asyncio.wrap_future(_pool(os.getpid()).submit(item))
    except WorkerDied as died:
        if died.late:
            raise ToolTimeout(f"the page could not be read within {READ_S:g} s.") from None
        raise ToolError(
            "the page ended the process that read it, for want of memory perhaps."
        ) from None
    return WebPage(**page | {"links": tuple(Link(**link) for link in page["links"])})


@cache
def _pool(pid: int) -> WorkerPool:
    """By process: after a fork the threads are gone, and the workers are the parent's."""
    return WorkerPool(
        "coa.corpus.web_page:page_reader", {}, max(2, cores()), limits=WorkerLimits(READ_S)
    )


@asynccontextmanager
async def page_reader(settings: Json) -> AsyncIterator[Work]:
    """Reads one page after the other, in a worker process."""

    async def read(item: Json) -> Json:
        body = base64.b64decode(item["body"])
        try:
            return asdict(read_page(item["url"], item["media_type"], item["charset"], body))
        except CoaError:
            raise
        except Exception as error:  # memory that ran out, say
            raise ToolError(f"the page cannot be read ({type(error).__name__}).") from None

    yield read
