"""Readers: the bytes of an HTML, Markdown, text or PDF file -> a Document.

A file that cannot be read raises `RecordError` with the reason alone; whoever has the path names
it. What could be read in spite of something odd (another charset than declared) says so in
`Document.remark`.
"""

from __future__ import annotations

import codecs
import io
import logging
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import PurePath
from typing import Any

from coa.corpus.html_reader import html_document, slug
from coa.corpus.page import Document, DocumentBlock
from coa.errors import MissingExtra, RecordError


def pdf_pages(content: bytes, most: int | None = None) -> tuple[str, list[str]]:
    """The title, or '', and the text of each page, of the first `most` only where that is given.

    A document that is locked without a password is opened. `RecordError` has the reason alone.
    """
    try:
        import pypdf
    except ImportError:
        raise MissingExtra("Reading PDF", "tools") from None
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # its warnings are not about our work
    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise RecordError("the PDF needs a password")
        title = str((reader.metadata and reader.metadata.title) or "").strip()
        return title, [page.extract_text() for page in islice(reader.pages, most)]
    except (RecordError, MemoryError, TimeoutError):
        raise
    except pypdf.errors.DependencyError:  # AES, which most locked documents use
        raise MissingExtra("Reading an encrypted PDF", "tools") from None
    except Exception as exc:  # pypdf raises what it stumbles over, of any type
        reason = " ".join(str(exc).split())[:160]
        raise RecordError(f"not a PDF that can be read ({type(exc).__name__}: {reason})") from None


# ------------------------------------------------------------------------------------------------
# Bytes of strangers -> text, whatever charset they are in and whatever they say of it.
#
# A byte order mark counts first, then what a file or its server declares, then UTF-8, then a
# guess. Only charsets that texts are written in can be declared: Python's codecs hold others
# ('unicode_escape', 'utf-7', 'idna') that are slow or build text which is not there.
# ------------------------------------------------------------------------------------------------


_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_DECLARED = re.compile(
    rb"""<(?:meta\b[^>]*?\bcharset|\?xml\b[^>]*?\bencoding)\s*=\s*["']?\s*([\w.:-]{2,40})""",
    re.IGNORECASE,
)
_DECLARED_WITHIN = 4096
_CODECS = re.compile(
    r"utf-(?:8|(?:16|32)(?:-[lb]e)?)|iso8859-\d+|koi8-[rtu]|mac-\w+|gb18030|big5\w*|euc_\w+|"
    r"iso2022_\w+|shift_jis\w+|johab|hz|cp(?:437|7[237]\d|8[56]\d|874|932|949|950|125\d)"
)
_EXTENDED = {
    **dict.fromkeys(("ascii", "iso8859-1"), "cp1252"),
    **dict.fromkeys(("gb2312", "gbk"), "gb18030"),
    **dict.fromkeys(("iso8859-11", "tis-620"), "cp874"),
    **{"iso8859-9": "cp1254", "shift_jis": "cp932", "euc_kr": "cp949"},
}
"""Charsets whose name pages give though they are written in an extension of it."""
_WITH_ZEROS = ("utf-16", "utf-32")
_LAST_RESORT = "cp1252"
_SAMPLE = 65536
_ENOUGH = 16
"""Bytes beyond ASCII that a guess takes; with fewer, every charset is as likely."""
_BEYOND_ASCII = bytes(range(128, 256))
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\f\x1b"))
_CONTROL_SHARE = 0.02
"""More control characters than that, and a file is no text."""


def decoded(content: bytes, label: str = "", *, markup: bool = True) -> tuple[str, str]:
    """The text, and a remark when the charset is not the declared one or had to be guessed.

    `label` is what a server says of it. What cannot be read becomes replacement characters. Only
    `markup` declares its charset: plain text that holds a <meta> quotes one.
    """
    for mark, codec in _BOMS:
        if content.startswith(mark):
            return content[len(mark) :].decode(codec, "replace"), ""
    found = _DECLARED.search(content, 0, _DECLARED_WITHIN) if markup else None
    declared = [each for each in (label, found[1].decode("ascii") if found else "") if each]
    known = [codec for each in declared if (codec := codec_of(each))]
    if b"\0" not in content[:512]:  # markup in these has zeros, whatever the label says
        known = [codec for codec in known if not codec.startswith(_WITH_ZEROS)]
    said = declared[0].lower() if declared else ""
    for codec in dict.fromkeys((*known, "utf-8")):
        try:
            text = content.decode(codec)
        except ValueError:
            continue
        wrong = said and codec not in known
        return text, f"declared as {said} but is {codec}" if wrong else ""
    others = [codec for codec in known if codec != "utf-8"]
    codec = others[0] if others else _guessed(content)
    trouble = f"declared as {said} but is not" if said else "not UTF-8"
    remark = "not all of it is UTF-8" if codec == "utf-8" else f"{trouble}; read as {codec}"
    return content.decode(codec, "replace"), remark


def codec_of(label: str) -> str:
    """The codec for the name of a charset; '' for a name that no text is written in."""
    try:
        name = codecs.lookup(label).name
    except (LookupError, ValueError):
        return ""
    name = _EXTENDED.get(name, name)
    return name if _CODECS.fullmatch(name) else ""


def is_binary(content: bytes) -> bool:
    """Whether this is no text: zeros without a byte order mark, or many control characters."""
    if any(content.startswith(mark) for mark, _ in _BOMS):
        return False
    sample = content[:_SAMPLE]
    share = 1 - len(sample.translate(None, _CONTROL)) / max(1, len(sample))
    return b"\0" in content or share > _CONTROL_SHARE


def _guessed(content: bytes) -> str:
    sample = content[:_SAMPLE]
    text = sample.decode("utf-8", "replace")
    wrong = text.count("\ufffd")
    if len(text) - len(text.encode("ascii", "ignore")) > 2 * wrong:
        return "utf-8"  # most of it is, so that another charset would spoil more than it mends
    letters = len(sample) - len(sample.translate(None, _BEYOND_ASCII))
    if is_binary(content) or letters < _ENOUGH:
        return _LAST_RESORT
    try:
        from charset_normalizer import from_bytes
    except ImportError:
        return _LAST_RESORT
    best = from_bytes(sample).best()
    return (codec_of(best.encoding) if best is not None else "") or _LAST_RESORT


READERS_VERSION = 3
"""Goes up when the same file would be read differently, so that corpora are read again."""

_TITLE_CHARS = 120
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_UNDERLINE = re.compile(r"([=\-~^*#\"'+])\1{2,}\s*")


def read_document(path: PurePath, content: bytes) -> Document:
    """What a file says, by the kind that its name promises."""
    suffix = path.suffix.lower()
    if not content.strip():
        raise RecordError("the file is empty")
    if suffix == ".pdf":
        return pdf_document(content, path.stem)
    text, remark = decode(content, suffix in _HTML)
    document = READERS[suffix](text, path.stem)
    remarks = "; ".join(each for each in (remark, document.remark) if each)
    return replace(document, remark=remarks)


def decode(content: bytes, markup: bool = True) -> tuple[str, str]:
    """The text, and a remark when the charset is not the declared one or had to be guessed."""
    if is_binary(content):
        raise RecordError("binary content, expected text")
    text, remark = decoded(content, markup=markup)
    return _plain(text), remark


def _plain(text: str) -> str:
    """Composed letters, plain line ends, nothing that could not be stored."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def markdown_document(text: str, fallback_title: str) -> Document:
    """Markdown by way of HTML, so that both are read alike."""
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise MissingExtra("Reading Markdown", "tools") from None

    if front := _FRONT_MATTER.match(text):
        text = text[front.end() :]
        stated = re.search(r"^title:\s*(.+?)\s*$", front[1], re.MULTILINE)
        fallback_title = stated[1].strip("\"'") if stated else fallback_title
    rendered = MarkdownIt("commonmark").enable("table").render(text)
    return html_document(f"<body>{rendered}</body>", fallback_title)


def text_document(text: str, fallback_title: str) -> Document:
    """Plain text: paragraphs between blank lines; an underlined line is a heading."""
    blocks: list[DocumentBlock] = []
    marks: list[str] = []
    """Underlines in the order in which they first occur: that is their level."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line.rstrip() for line in paragraph.strip("\n").split("\n")]
        if len(lines) > 1 and _UNDERLINE.fullmatch(lines[0]) and lines[0][:1] == lines[-1][:1]:
            lines = lines[1:]  # a line above the heading as well
        if len(lines) > 1 and _UNDERLINE.fullmatch(lines[1]) and len(lines[0]) <= _TITLE_CHARS:
            mark = lines[1][0]
            marks += [mark] if mark not in marks else []
            name = lines[0].strip()
            level = min(6, marks.index(mark) + 1)
            blocks.append(DocumentBlock("heading", name, level, (slug(name),)))
            lines = lines[2:]
        if body := "\n".join(lines).strip("\n"):
            blocks.append(DocumentBlock("text", body))
    first = blocks[0].text.strip().partition("\n")[0].strip() if blocks else ""
    is_title = len(first) <= _TITLE_CHARS and re.search(r"\w", first)
    title = first if is_title else fallback_title
    if blocks and blocks[0].kind == "heading" and blocks[0].level == 1:
        blocks[0] = DocumentBlock("close", level=1)
    return Document(title, tuple(blocks))


def pdf_document(content: bytes, fallback_title: str) -> Document:
    """PDF, page by page; a page is a section with the fragment that PDF viewers understand."""
    named, texts = pdf_pages(content)
    pages = [list(_paragraphs(_plain(text))) for text in texts]
    if not any(pages):
        raise RecordError("the PDF holds no text, only images perhaps; it needs OCR first")
    blocks: list[DocumentBlock] = []
    for number, paragraphs in enumerate(pages, start=1):
        blocks.append(DocumentBlock("heading", f"page {number}", 1, (f"page={number}",)))
        blocks += [DocumentBlock("text", paragraph) for paragraph in paragraphs]
    empty = sum(not paragraphs for paragraphs in pages)
    remark = f"{empty} of {len(pages)} pages hold no text" if empty else ""
    return Document(_plain(named) or fallback_title, tuple(blocks), remark=remark)


def _paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a PDF's page: lines are joined, words cut at a line's end are mended."""
    for paragraph in re.split(r"\n\s*\n", text):
        joined = re.sub(r"(?<=[^\W\d_])-\n(?=[a-z])", "", paragraph)
        if flat := " ".join(joined.split()):
            yield flat


_HTML = (".html", ".htm", ".xhtml")
READERS: dict[str, Callable[[Any, str], Document]] = {
    **dict.fromkeys(_HTML, html_document),
    **dict.fromkeys((".md", ".markdown"), markdown_document),
    **dict.fromkeys((".txt", ".text", ".rst"), text_document),
    ".pdf": pdf_document,
}
"""What reads each kind of file, by the end of its name."""
