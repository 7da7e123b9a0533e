"""Bytes of a page -> title, text and links.

trafilatura finds the main text of an HTML page. Title, links and the text of pages that it cannot
read come from a small scanner of our own, which is linear in the length of the page whatever the
page contains. Nothing here raises on account of what a page contains, but for a `ToolMistake` that
says that it has no text.
"""

from __future__ import annotations

import html
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from urllib.parse import urldefrag, urljoin, urlsplit

from coa.corpus.readers import decoded, pdf_pages
from coa.errors import MissingExtra, RecordError, ToolError, ToolMistake

MAX_LINKS = 400
MAX_PDF_PAGES = 40
MAX_HTML = 2_000_000
"""Letters of a page that are looked at; what follows is left out."""
_MAX_MAIN = 1_000_000
"""Letters of markup in which the main text is looked for: it takes seconds, more for more."""
LINK_TEXT = 80
_SHORT = 200
"""A main text below this many letters is compared with the whole text of the page."""

_TOKEN = re.compile(
    r"<!--.*?(?:-->|\Z)|<(/?)([a-zA-Z][^\s/>]*)([^>]*)(?:>|\Z)|<[!?/][^>]*(?:>|\Z)|[^<]+|<",
    re.DOTALL,
)
_HREF = re.compile(r"""(?<![\w-])href\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", re.IGNORECASE)
_BLOCKS = frozenset(
    "address article aside blockquote body br dd div dl dt fieldset figcaption figure footer form "
    "h1 h2 h3 h4 h5 h6 head header hr li main nav ol option p pre section table tbody tfoot thead "
    "tr ul".split()
)
_MARKUP = ("html", "xml")
_SILENT = frozenset("script style template svg noscript iframe object math canvas".split())


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
    if body.startswith(b"%PDF-") or media_type == "application/pdf":
        page = _read_pdf(url, body)
    else:
        may_declare = not media_type or media_type.endswith(_MARKUP)
        text, _ = decoded(body, charset, markup=may_declare)
        if _is_binary(text):
            raise ToolMistake(f"{_place(url)}: the page is binary, not text.")
        if _is_markup(media_type, text):
            page = read_html(url, text[:MAX_HTML])
        else:
            page = WebPage("", url, _tidy(text[:MAX_HTML]))
    if not page.text:
        raise ToolMistake(f"{_place(url)}: the page has no text.")
    return page


def _is_binary(text: str) -> bool:
    """Control characters and failed decoding in quantity: a picture, an archive, a program."""
    head = text[:4000]
    odd = sum(1 for c in head if c == "\ufffd" or (c < " " and c not in "\t\n\r\f\x1b"))
    return odd * 20 > len(head)


def _is_markup(media_type: str, text: str) -> bool:
    if media_type.endswith(_MARKUP):
        return True
    return not media_type and bool(re.match(r"\s*<(!doctype|html|head|body|\?xml)", text, re.I))


def _place(url: str) -> str:
    return urlsplit(url).hostname or url[:80]


def read_html(url: str, text: str) -> WebPage:
    """Title, main text and links of an HTML page."""
    text = "".join(c if c >= " " or c in "\n\t\r" else " " for c in text.replace("\x00", ""))
    text = _unwrapped(text)
    scanned = _Scan(url, text)
    main = _tidy(_main_text(text)) if len(text) <= _MAX_MAIN else ""
    if len(main) < _SHORT and len(scanned.text) > len(main):
        main = scanned.text
    return WebPage(scanned.title, url, main, tuple(scanned.links.values()))


def _unwrapped(markup: str) -> str:
    """Line ends as spaces, but for those in preformatted text: elsewhere they mean nothing."""
    lower, parts, place = markup.lower(), [], 0
    while place < len(markup):
        start = lower.find("<pre", place)
        end = lower.find("</pre", start) if start >= 0 else -1
        start = start if start >= 0 else len(markup)
        end = end if end >= 0 else len(markup)
        parts += [markup[place:start].replace("\n", " "), markup[start:end]]
        place = end
    return "".join(parts)


def _main_text(text: str) -> str:
    """What trafilatura takes for the page's content; '' when it finds none or cannot be used."""
    extract = _extractor()
    if extract is None:
        return ""
    try:
        return extract(text, include_comments=False, include_tables=True) or ""
    except Exception:  # it is used on whatever strangers write; the scanner reads the rest
        return ""


@cache
def _extractor() -> Callable[..., str | None] | None:
    try:
        import trafilatura
    except ImportError as error:  # absent, or a part of it
        warnings.warn(
            f"trafilatura cannot be loaded ({error}), so that pages are read with their menus and "
            'footers. Install it with: pip install "chain-of-agents[tools]"',
            stacklevel=2,
        )
        return None
    # It reports every page that it cannot read as an error on the terminal.
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    return trafilatura.extract


class _Scan:
    """One pass over the markup: title, visible text, links in order."""

    def __init__(self, url: str, markup: str) -> None:
        self.title = ""
        self.links: dict[str, Link] = {}
        self._base = self._url = url
        self._seen: set[str] = set()
        self._parts: list[str] = []
        self._anchor: tuple[str, int] | None = None  # where it leads; where its text begins
        for closing, name, rest, words in _tokens(markup):
            if name == "title":
                self.title = self.title or " ".join(html.unescape(words).split())[:200]
            elif name:
                self._tag(bool(closing), name, rest)
            else:
                self._parts.append(html.unescape(words))
        self._close_anchor()
        self.text = _tidy("".join(self._parts))

    def _tag(self, closing: bool, name: str, rest: str) -> None:
        if name == "a":
            self._close_anchor()
            if not closing and (found := _href(rest)):
                self._anchor = (found, len(self._parts))
        elif name == "base" and not closing and (found := _href(rest)):
            self._base = _joined(self._url, found) or self._base
        if name in _BLOCKS:
            self._parts.append("\n")
        elif name in ("td", "th"):
            self._parts.append(" ")

    def _close_anchor(self) -> None:
        if self._anchor is None:
            return
        leads_to, start = self._anchor
        self._anchor = None
        words = " ".join("".join(self._parts[start:]).split())[:LINK_TEXT].rstrip()
        if not words or leads_to in self._seen or len(self.links) >= MAX_LINKS:
            return
        self._seen.add(leads_to)
        url = _joined(self._base, leads_to)
        if url and url not in self.links and url != urldefrag(self._url).url:
            self.links[url] = Link(words, url)


def _tokens(markup: str) -> Iterator[tuple[str, str, str, str]]:
    """(slash, tag, attributes, '') of tags and ('', '', '', text) of text; a title is one token."""
    place = 0
    while place < len(markup):
        found = _TOKEN.match(markup, place)
        assert found is not None, "every letter is a token of its own, if nothing else"
        place = found.end()
        name = (found[2] or "").lower()
        if not name:
            if not found[0].startswith(("<!", "<?", "</")):
                yield "", "", "", found[0]
        elif not found[1] and (name in _SILENT or name == "title"):
            end = re.compile(rf"</{name}\b", re.IGNORECASE).search(markup, place)
            inside = markup[place : end.start() if end else len(markup)]
            place = end.start() if end else len(markup)
            if name == "title":
                yield "", name, "", inside
        else:
            yield found[1] or "", name, found[3], ""


def _href(attributes: str) -> str:
    found = _HREF.search(attributes)
    return html.unescape(found[1] or found[2] or found[3] or "").strip() if found else ""


def _joined(base: str, reference: str) -> str:
    """The full address, without its fragment; '' when it is none of the web."""
    try:
        url = urldefrag(urljoin(base, reference)).url
        usable = urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
    except ValueError:
        return ""
    return url if usable and len(url) <= 500 and not re.search(r"\s", url) else ""


def _tidy(text: str) -> str:
    """Lines without surplus space, and none that is empty."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def _read_pdf(url: str, body: bytes) -> WebPage:
    try:
        title, pages = pdf_pages(body, MAX_PDF_PAGES)
    except MissingExtra:
        raise ToolError(
            'the page is a PDF; to read it: pip install "chain-of-agents[tools]"'
        ) from None
    except RecordError as error:
        # Without what the library says in brackets: that differs from version to version.
        raise ToolMistake(f"{_place(url)}: {str(error).partition(' (')[0]}.") from error
    return WebPage(" ".join(title.split())[:200], url, _tidy("\n".join(pages)))
