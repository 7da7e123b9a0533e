"""Corpus: pages that can be searched and visited, such as somebody's folder.

    corpus = Corpus.open(Path("manual.corpus"))
    corpus.search("reset the device", 3)            # the best passages
    corpus.search_pages("reset the device", 3)      # the best pages, each with its best passage
    corpus.page("https://manual.example/faq.html#reset")

An address may come from a model: a missing scheme, a fragment, a query, a slash too many or a left
out `index.html` are forgiven. A fragment that names a section gives that section.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from coa.corpus.index import (
    QUESTION_WORDS,
    STOP_WORDS,
    Hit,
    SearchIndex,
)
from coa.corpus.page import Page, Passage
from coa.corpus.store import PageStore, key_of
from coa.errors import CoaError, RecordError, UsageError
from coa.io.runs import MANIFEST, Json

SCHEMA = 1
INDEX, PAGES = "index", "pages.sqlite"
_ENDINGS = ("", "/index.html", ".html", ".md", "/index.htm", "/README.md", ".htm", ".txt", ".pdf")
_MOST_HITS = 4096


class Site(Protocol):
    """Pages by key: the percent-encoded path of their address."""

    def find(self, keys: Iterable[str]) -> Page | None: ...

    def pages(self) -> Iterator[Page]: ...


class Corpus:
    """Pages under one address, with an index over their passages.

    Two corpora with the same fingerprint give the same answers.
    """

    def __init__(self, index: SearchIndex, site: Site, address: str, fingerprint: str) -> None:
        self.index, self.address, self.fingerprint = index, address, fingerprint
        self._site = site

    @classmethod
    def open(cls, directory: Path) -> Corpus:
        """Open a corpus that `build_corpus` made."""
        manifest = read_manifest(directory)
        if manifest is None:
            raise UsageError(
                f"{directory}: holds no corpus. Make one of a folder with: coa corpus build FOLDER"
            )
        version, address = directory / str(manifest["version"]), str(manifest["site"])
        try:
            site = PageStore.open(version / PAGES, address)
            index = SearchIndex.open(version / INDEX, STOP_WORDS | QUESTION_WORDS)
            return cls(index, site, address, str(manifest["content"]))
        except CoaError:
            if read_manifest(directory) == manifest:
                raise
        return cls.open(directory)  # a build has just replaced what we were about to open

    def __len__(self) -> int:
        """How many passages there are."""
        return len(self.index)

    def search(self, query: str, k: int) -> list[Hit]:
        """The k best passages, best first; none has the text of a better one."""
        return self._best(query, k, k, _different)

    def search_pages(self, query: str, k: int) -> list[Hit]:
        """The k best pages, each as its best passage that is on no better one."""
        return self._best(query, k, 4 * k, _one_a_page)

    def _best(
        self, query: str, k: int, limit: int, choose: Callable[[Sequence[Hit]], list[Hit]]
    ) -> list[Hit]:
        """The first k of those hits that are chosen, of as many hits as that takes."""
        while True:
            hits = self.index.search(query, limit)
            best = choose(hits)
            if len(best) >= k or len(hits) < limit or limit >= _MOST_HITS:
                return best[:k]
            limit *= 4

    def page(self, address: str) -> Page | None:
        """The page at an address or a path, or its section that the fragment names."""
        path, fragment = self._split(address)
        if path is None:
            return None
        page = self._site.find(f"{path}{ending}".lstrip("/") for ending in _ENDINGS)
        if page is None or not fragment:
            return page
        return page.part(fragment) or page

    def passages(self) -> Iterator[Passage]:
        """All passages, page by page."""
        for page in self._site.pages():
            yield from page.passages

    def pages(self) -> Iterator[Page]:
        return self._site.pages()

    def _split(self, address: str) -> tuple[str | None, str]:
        """Path and fragment of an address; no path when it is not of this site."""
        own = urlsplit(self.address)
        try:
            parts = urlsplit(address.strip().strip("<>\"'`"))
            host = parts.hostname
        except ValueError:  # not an address at all
            return None, ""
        path = parts.path
        if parts.scheme in ("http", "https"):
            if host not in (own.hostname, f"www.{own.hostname}"):
                return None, ""
        elif parts.scheme or host:
            return None, ""
        elif path.partition("/")[0].lower() == own.hostname:  # an address without its scheme
            path = path.partition("/")[2]
        return key_of(unquote_to_bytes(path)), unquote(parts.fragment)


def _different(hits: Sequence[Hit]) -> list[Hit]:
    """Without what a better one says word for word: a folder may hold a document twice."""
    by_text: dict[str, Hit] = {}
    for hit in hits:
        by_text.setdefault(hit.text, hit)
    return list(by_text.values())


def _one_a_page(hits: Sequence[Hit]) -> list[Hit]:
    by_page: dict[str, Hit] = {}
    for hit in _different(hits):
        by_page.setdefault(hit.url.partition("#")[0], hit)
    return list(by_page.values())


def load_corpus(name: str) -> Corpus:
    """The corpus in a directory."""
    if not Path(name).is_dir():
        raise UsageError(
            f"corpus {name!r}: no such directory. Make one of a folder of documents with: "
            "coa corpus build FOLDER"
        )
    return Corpus.open(Path(name))


def read_manifest(directory: Path) -> Json | None:
    """The manifest of a corpus, or None where there is none."""
    path = directory / MANIFEST
    if not path.is_file():
        return None
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise RecordError(f"{path}: not JSON ({exc}). Delete the directory, build again.") from None
    if not isinstance(held, dict) or not {"site", "source", "version", "content"} <= held.keys():
        raise RecordError(f"{path}: not the manifest of a corpus. Use another directory.")
    if held.get("schema") != SCHEMA:
        raise RecordError(
            f"{path}: found corpus schema {held.get('schema')!r}, expected {SCHEMA}. "
            "Delete the directory and build the corpus again."
        )
    return held
