"""Page and Passage: what a corpus consists of, whoever wrote it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import quote

_FRAGMENT_SAFE = "!$&'()*+,;=:@/?"


@dataclass(frozen=True, slots=True)
class Passage:
    """A few sentences on one topic: the unit that is searched and shown."""

    title: str
    """Of its page."""
    url: str
    """Of its page, with the fragment of its section where there is one."""
    text: str
    section: str = ""
    """The headings above it within the page, joined by ' > '."""
    names: tuple[str, ...] = ()
    """What it defines, such as a function: a query that holds the name should find it."""
    anchors: tuple[str, ...] = ()
    """The fragments of the page that it belongs to, its own last."""

    @property
    def heading(self) -> str:
        return f"{self.title} > {self.section}" if self.section else self.title


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    url: str
    passages: tuple[Passage, ...]
    links: tuple[str, ...] = ()
    """Addresses of the pages this one mentions."""

    @property
    def text(self) -> str:
        """The passages, each section under a line with its headings."""
        parts, section = [], ""
        for passage in self.passages:
            if passage.section != section:
                section = passage.section
                parts += [f"## {section}"] if section else []
            parts.append(passage.text)
        return "\n\n".join(parts)

    def part(self, anchor: str) -> Page | None:
        """The section or definition that a fragment of the address names, as a page of its own."""
        inside = tuple(passage for passage in self.passages if anchor in passage.anchors)
        if not inside:
            return None
        url = with_fragment(self.url, anchor)
        return replace(self, url=url, passages=inside, links=(self.url, *self.links))


def with_fragment(url: str, anchor: str) -> str:
    return f"{url}#{quote(anchor, safe=_FRAGMENT_SAFE)}"
