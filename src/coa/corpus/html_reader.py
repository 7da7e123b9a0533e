"""Read HTML: the main content of a page with its headings, definitions, code and links.

Files of a corpus become a Document, pages of the web a text; both are read alike.

What a page says about itself rather than about its subject is left out: navigation, menus, footers,
scripts, long lists of nothing but links (the links themselves are kept). Written on lxml and not on
an extractor of articles, because those drop definition lists, which hold a reference's signatures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from coa.corpus.page import TERM_LEVEL, Document, DocumentBlock
from coa.errors import MissingExtra

_SILENT = tuple(
    "script style noscript template svg iframe object canvas audio video input head".split()
)
_DROPPED = (*_SILENT, *"nav footer button select textarea label dialog".split())
_CONTAINERS = ("div", "section", "aside", "header", "ul", "ol", "table", "p", "a", "form")
_BLOCKS = frozenset(
    "address article aside blockquote body center dd details dir div dl dt fieldset figcaption "
    "figure form h1 h2 h3 h4 h5 h6 header hgroup hr html legend li main menu ol p pre section "
    "summary table tbody td tfoot th thead tr ul caption".split()
)
_NAVIGATION = re.compile(
    r"(?:site-?|page-?|main-?|global-?)?"
    r"(?:nav|navbar|navigation|menu|sidebar|breadcrumbs?|footer|toc|tocs?-?tree|pagination|pager|"
    r"table-of-contents|related|headerlink|anchor-?link|skip-?link|cookies?|cookie-\w+|share|"
    r"social|advert\w*|ads?|banner|noprint|sphinxsidebar)",
    re.IGNORECASE,
)
_ROLES = frozenset(("navigation", "banner", "contentinfo", "search", "menu", "complementary"))
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_MARKS = "\u00b6\uf0c1\U0001f517"
_PERMALINK = re.compile(rf"\s*[{_MARKS}]\s*$")
_SPACE = re.compile(r"\s+")
_TAG = re.compile(r"<[^<>]*>")
_LISTS = ("ul", "ol", "table")
_LINKS_CHARS, _LINKS_SHARE = 400, 0.8
"""A list or table longer than that, with more of its text in links than that, is navigation."""
_SHORT = 200
"""A main text below this many letters is compared with the whole text of the page."""
_CELL_CHARS = 600
"""A table with a longer cell lays out a page."""


def html_document(text: str, fallback_title: str) -> Document:
    """The main content of an HTML page."""
    root = _parse(text)
    if root is None:
        return Document(fallback_title, ())
    named, main = _inline(root.find(".//title")), _main(root)
    _prune(main)
    links = tuple(dict.fromkeys(href for _, href in _links(main) if not href.startswith("#")))
    _drop_link_lists(main)
    blocks, remark = _blocks(main)
    return _titled(blocks, named, fallback_title, links, remark)


def html_page(text: str) -> tuple[str, str, str, list[tuple[str, str]]]:
    """Of an HTML page the title, the main text or else all of it, the base of its links, and the
    words and address of each link, wherever it stands."""
    root = _parse(text)
    if root is None:
        return "", "", "", []
    bases = [str(each.get("href")) for each in root.iter("base") if each.get("href")]
    found = _inline(root.find(".//title")), (bases or [""])[0], list(_links(root))
    main = _main(root)
    _prune(main)
    _drop_link_lists(main)
    shown = "\n".join(block.text for block in _blocks(main)[0])
    if len(shown) < _SHORT:
        for element in list((root := _parse(text)).iter(*_SILENT)):
            _remove(element)
        whole = "\n".join(block.text for block in _blocks(root)[0])
        shown = max(shown, whole, key=len)
    return found[0], shown, *found[1:]


def _blocks(main: Any) -> tuple[list[DocumentBlock], str]:
    """The blocks of what is left of a page, and a remark where they could not be told apart."""
    walk = _Walk()
    try:
        walk.visit(main)
        walk.flush()
    except RecursionError:
        lines = _lines("".join(main.itertext()))
        remark = "nested too deeply; read as plain text"
        return [DocumentBlock("text", line) for line in lines], remark
    return walk.blocks, ""


def _titled(
    blocks: list[DocumentBlock], named: str, fallback: str, links: tuple[str, ...], remark: str
) -> Document:
    """The first main heading is the title; no passage needs it as a section as well."""
    first = next((block for block in blocks if block.kind == "heading" and block.level == 1), None)
    if first is None:
        return Document(named or fallback, tuple(blocks), links, remark)
    kept = [DocumentBlock("close", level=1) if block is first else block for block in blocks]
    return Document(first.text, tuple(kept), links, remark)


def _parse(text: str) -> Any:
    try:
        etree = import_module("lxml.etree")
    except ImportError:
        raise MissingExtra("Reading HTML and Markdown", "tools") from None
    # Bytes, because a str must not name its encoding; the name in the text no longer counts.
    parser = etree.HTMLParser(
        encoding="utf-8", huge_tree=True, remove_comments=True, remove_pis=True
    )
    try:
        root = etree.fromstring(text.encode("utf-8", "replace"), parser)
    except etree.XMLSyntaxError:  # nothing but white space, or nothing that is an element
        return None
    if any(each.type_name == "ERR_RESOURCE_LIMIT" for each in parser.error_log):
        return _parse(_TAG.sub(" ", text))  # nested deeper than libxml2 goes; the words are left
    return root


def _main(root: Any) -> Any:
    for path in (".//main", ".//*[@role='main']", ".//article"):
        found = root.findall(path)
        if len(found) == 1 and len(_SPACE.sub(" ", "".join(found[0].itertext()))) > 1:
            return found[0]
    body = root.find(".//body")
    return root if body is None else body


def _prune(main: Any) -> None:
    beside = ("aside",) if main.tag in ("body", "html") else ()
    for element in list(main.iter(*_DROPPED, *beside)):
        _remove(element)
    for element in list(main.iter(*_CONTAINERS)):
        if element is not main and _is_navigation(element):
            _remove(element)
    for heading in main.iter(*_HEADINGS, "dt"):
        _empty_permalinks(heading)
    for line_break in main.iter("br"):
        line_break.tail = f"\n{line_break.tail or ''}"


def _empty_permalinks(heading: Any) -> None:
    """Take the text out of links that are but a mark; a plain '#' may belong to a name ('C#')."""
    for link in heading.iter("a"):
        if "#" in link.get("href", "#") and _inline(link) in (*_MARKS, "#"):
            link[:] = []
            link.text = ""  # the link itself may be the anchor of its heading


def _is_navigation(element: Any) -> bool:
    if element.tag == "header" and next(element.iter("h1", "h2"), None) is None:
        return True
    attributes = element.attrib
    if not attributes:
        return False
    if attributes.get("role") in _ROLES or "hidden" in attributes:
        return True
    marks = attributes.get("class", "").split()
    # A section is often called after its heading, and one on menus is no menu.
    if "id" in attributes and not any(child.tag in _HEADINGS for child in element):
        marks.append(attributes["id"])
    return any(_NAVIGATION.fullmatch(mark) for mark in marks)


def _links(part: Any) -> Iterator[tuple[str, str]]:
    """The words and the address of each link."""
    for link in part.iter("a"):
        if href := link.get("href", "").strip():
            yield _inline(link), href


def _drop_link_lists(main: Any) -> None:
    """Take out lists and tables of links; of nested ones the outermost that is one."""
    seen: set[Any] = {main}
    for element in list(main.iter(*_LISTS)):
        whole = len("".join(element.itertext()).strip())
        linked = sum(len("".join(link.itertext())) for link in element.iter("a"))
        if element not in seen and whole > _LINKS_CHARS and linked > _LINKS_SHARE * whole:
            seen.update(element.iter(*_LISTS))
            _remove(element)


def _remove(element: Any) -> None:
    """Take an element out and keep the text after it."""
    parent = element.getparent()
    if parent is None:
        return
    if element.tail:
        before = element.getprevious()
        if before is None:
            parent.text = (parent.text or "") + element.tail
        else:
            before.tail = (before.tail or "") + element.tail
        element.tail = None
    parent.remove(element)


class _Walk:
    """Goes through the blocks of a page; text between them gathers until the next one begins."""

    def __init__(self) -> None:
        self.blocks: list[DocumentBlock] = []
        self._pending: list[str] = []
        self._mark = ""
        """What stands before the next text: the dash of a list item, or a term without anchor."""
        self._definitions = 0

    def visit(self, element: Any) -> None:
        if element.text:
            self._pending.append(element.text)
        for child in element:
            tag = child.tag
            if tag in _HEADINGS:
                self._heading(child, _HEADINGS[tag])
            elif tag == "pre":
                self._block("".join(child.itertext()).strip("\n").rstrip())
            elif tag == "dl":
                self._definition_list(child)
            elif tag == "table" and not _is_layout(child):
                self._table(child)
            elif tag in _BLOCKS:
                self.flush()
                self._mark = "- " if tag == "li" else self._mark
                self.visit(child)
                self.flush()
                self._mark = ""
            elif next(child.iter(*_BLOCKS), None) is not None:
                self.visit(child)
            else:
                self._pending.extend(child.itertext())
            if child.tail:
                self._pending.append(child.tail)

    def flush(self) -> None:
        text = _SPACE.sub(" ", "".join(self._pending)).strip()
        self._pending.clear()
        if text:
            self._emit(text)

    def _block(self, text: str) -> None:
        self.flush()
        if text.strip():
            self._emit(text)

    def _emit(self, text: str) -> None:
        self.blocks.append(DocumentBlock("text", self._mark + text))
        self._mark = ""

    def _heading(self, element: Any, level: int) -> None:
        self.flush()
        self._mark = ""
        if text := _PERMALINK.sub("", _inline(element)):
            anchor = _anchor_of(element) or slug(text)
            self.blocks.append(DocumentBlock("heading", text, level, (anchor,) if anchor else ()))

    def _table(self, table: Any) -> None:
        self.flush()
        for row in table.iter("tr", "caption"):
            cells = [_inline(cell) for cell in row if cell.tag in ("td", "th")]
            self._block(" | ".join(cells) if any(cells) else _inline(row))

    def _definition_list(self, element: Any) -> None:
        """Terms with an anchor open a scope; the others stand before their text."""
        self.flush()
        level = TERM_LEVEL + self._definitions
        self._definitions += 1
        terms: list[Any] = []
        for child in _definition_parts(element):
            if child.tag == "dt":
                terms.append(child)
                continue
            self._terms(terms, level)
            terms = []
            self.visit(child)
            self.flush()
        self._terms(terms, level)
        self._definitions -= 1
        self._mark = ""
        self.blocks.append(DocumentBlock("close", level=level))

    def _terms(self, terms: list[Any], level: int) -> None:
        texts = [text for term in terms if (text := _PERMALINK.sub("", _inline(term)))]
        anchors = [name for term in reversed(terms) if (name := _anchor_of(term))]
        if anchors and texts:
            self.blocks.append(DocumentBlock("term", "\n".join(texts), level, tuple(anchors)))
        elif texts:
            self._mark = f"{', '.join(texts)}: "


def _definition_parts(element: Any) -> Iterator[Any]:
    for child in element:
        if child.tag in ("dt", "dd"):
            yield child
        elif child.tag == "div":
            yield from (each for each in child if each.tag in ("dt", "dd"))


def _is_layout(table: Any) -> bool:
    if next(table.iter("h1", "h2", "h3", "h4", "pre", "dl"), None) is not None:
        return True
    if next(table.iterdescendants("table"), None) is not None:
        return True
    return any(len("".join(cell.itertext())) > _CELL_CHARS for cell in table.iter("td"))


def _anchor_of(element: Any) -> str:
    """The fragment that leads to a heading or a term: its own, or that of the section it opens."""
    if own := element.get("id"):
        return str(own)
    for link in element.iter("a"):
        if named := link.get("id") or link.get("name"):
            return str(named)
    before = element.itersiblings(preceding=True)
    if element.tag in _HEADINGS and all(each.tag in ("a", "span") for each in before):
        return str(element.getparent().get("id") or "")
    return ""


def slug(heading: str) -> str:
    """The fragment of a heading that has none, as code forges make it from Markdown."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())[:80]


def _inline(element: Any) -> str:
    return "" if element is None else _SPACE.sub(" ", "".join(element.itertext())).strip()


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if plain := _SPACE.sub(" ", line).strip():
            yield plain
