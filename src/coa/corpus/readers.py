"""Readers: the bytes of an HTML, Markdown, text or PDF file -> a Document.

A file that cannot be read raises `RecordError` with the reason alone; whoever has the path names
it. What could be read in spite of something odd (another charset than declared) says so in
`Document.remark`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import PurePath

from coa.corpus import charset
from coa.corpus.document import Block, Document
from coa.corpus.html_reader import html_document, slug
from coa.corpus.pdf_reader import pdf_pages
from coa.errors import MissingExtra, RecordError

READERS_VERSION = 3
"""Goes up when the same file would be read differently, so that corpora are read again."""

_TITLE_CHARS = 120
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_UNDERLINE = re.compile(r"([=\-~^*#\"'+])\1{2,}\s*")


def read_document(path: PurePath, content: bytes) -> Document:
    """What a file says, by the kind that its name promises."""
    read = READERS[path.suffix.lower()]
    if not content.strip():
        raise RecordError("the file is empty")
    return read(content, path.stem)


def _html(content: bytes, stem: str) -> Document:
    return _with_remark(content, lambda text: html_document(text, stem), markup=True)


def _markdown(content: bytes, stem: str) -> Document:
    return _with_remark(content, lambda text: markdown_document(text, stem))


def _text(content: bytes, stem: str) -> Document:
    return _with_remark(content, lambda text: text_document(text, stem))


def _with_remark(content: bytes, read: Callable[[str], Document], markup: bool = False) -> Document:
    text, remark = decode(content, markup)
    document = read(text)
    remarks = "; ".join(each for each in (remark, document.remark) if each)
    return Document(document.title, document.blocks, document.links, remarks)


def decode(content: bytes, markup: bool = True) -> tuple[str, str]:
    """The text, and a remark when the charset is not the declared one or had to be guessed."""
    if charset.is_binary(content):
        raise RecordError("binary content, expected text")
    text, remark = charset.decode(content, markup=markup)
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
    blocks: list[Block] = []
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
            blocks.append(Block("heading", name, level, (slug(name),)))
            lines = lines[2:]
        if body := "\n".join(lines).strip("\n"):
            blocks.append(Block("text", body))
    title = _first_line(blocks) or fallback_title
    if blocks and blocks[0].kind == "heading" and blocks[0].level == 1:
        blocks[0] = Block("close", level=1)
    return Document(title, tuple(blocks))


def _first_line(blocks: list[Block]) -> str:
    """A short first line is the title."""
    first = blocks[0].text.strip().partition("\n")[0].strip() if blocks else ""
    return first if len(first) <= _TITLE_CHARS and re.search(r"\w", first) else ""


def pdf_document(content: bytes, fallback_title: str) -> Document:
    """PDF, page by page; a page is a section with the fragment that PDF viewers understand."""
    named, texts = pdf_pages(content)
    pages = [list(_paragraphs(_plain(text))) for text in texts]
    if not any(pages):
        raise RecordError("the PDF holds no text, only images perhaps; it needs OCR first")
    blocks: list[Block] = []
    for number, paragraphs in enumerate(pages, start=1):
        blocks.append(Block("heading", f"page {number}", 1, (f"page={number}",)))
        blocks += [Block("text", paragraph) for paragraph in paragraphs]
    empty = sum(not paragraphs for paragraphs in pages)
    remark = f"{empty} of {len(pages)} pages hold no text" if empty else ""
    return Document(_plain(named) or fallback_title, tuple(blocks), remark=remark)


def _paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a PDF's page: lines are joined, words cut at a line's end are mended."""
    for paragraph in re.split(r"\n\s*\n", text):
        joined = re.sub(r"(?<=[^\W\d_])-\n(?=[a-z])", "", paragraph)
        if flat := " ".join(joined.split()):
            yield flat


READERS: dict[str, Callable[[bytes, str], Document]] = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), _html),
    **dict.fromkeys((".md", ".markdown"), _markdown),
    **dict.fromkeys((".txt", ".text", ".rst"), _text),
    ".pdf": pdf_document,
}
"""How each kind of file is read, by the end of its name."""
