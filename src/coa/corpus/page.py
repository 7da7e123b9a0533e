"""Page and Passage: what a corpus consists of, whoever wrote it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Passage:
    """A few sentences on one topic: the unit that is searched and shown."""

    title: str
    url: str
    text: str


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    url: str
    passages: tuple[Passage, ...]
    links: tuple[str, ...] = ()
    """Addresses of the pages this one mentions."""

    @property
    def text(self) -> str:
        return "\n\n".join(passage.text for passage in self.passages)
