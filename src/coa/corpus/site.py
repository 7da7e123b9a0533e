"""Corpus: pages that can be searched and visited, such as somebody's folder.

    corpus = Corpus.open(Path("manual.corpus"))
    corpus.search("reset the device", 3)            # the best passages
    corpus.search_pages("reset the device", 3)      # the best pages, each with its best passage
    corpus.page("https://manual.example/faq.html#reset")

An address may come from a model: a missing scheme, a fragment, a query, a slash too many or a left
out `index.html` are forgiven. A fragment that names a section gives that section.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote, unquote_to_bytes, urlsplit

from coa.corpus.index import QUESTION_WORDS, STOP_WORDS, Hit, SearchIndex
from coa.corpus.page import Page, Passage, with_fragment
from coa.errors import CoaError, RecordError, UsageError
from coa.io.runs import MANIFEST, Json, read_object

SCHEMA = 1
INDEX, PAGES = "index", "pages.sqlite"
_ENDINGS = ("", "/index.html", ".html", ".md", "/index.htm", "/README.md", ".htm", ".txt", ".pdf")
_MOST_HITS = 4096
_PATH_SAFE = "/!$&'()*+,;=:@~"


class Site(Protocol):
    """Pages by key: the percent-encoded path of their address."""

    def find(self, keys: Iterable[str]) -> Page | None: ...

    def pages(self) -> Iterator[Page]: ...


def key_of(path: bytes) -> str:
    """The key of a path: percent-encoded, without empty steps and slashes around it."""
    steps = [step for step in path.split(b"/") if step not in (b"", b".")]
    return quote(b"/".join(steps), safe=_PATH_SAFE)


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
        return self._best(query, k, k, lambda hits: _first_of(hits, lambda hit: hit.text))

    def search_pages(self, query: str, k: int) -> list[Hit]:
        """The k best pages, each as its best passage that is on no better one."""

        def one_a_page(hits: Iterable[Hit]) -> list[Hit]:
            different = _first_of(hits, lambda hit: hit.text)
            return _first_of(different, lambda hit: hit.url.partition("#")[0])

        return self._best(query, k, 4 * k, one_a_page)

    def _best(
        self, query: str, k: int, limit: int, choose: Callable[[list[Hit]], list[Hit]]
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
        own = urlsplit(self.address).hostname
        try:
            parts = urlsplit(address.strip().strip("<>\"'`"))
            host = parts.hostname
        except ValueError:  # not an address at all
            return None
        path = parts.path
        if parts.scheme in ("http", "https"):
            if host not in (own, f"www.{own}"):
                return None
        elif parts.scheme or host:
            return None
        elif path.partition("/")[0].lower() == own:  # an address without its scheme
            path = path.partition("/")[2]
        key, anchor = key_of(unquote_to_bytes(path)), unquote(parts.fragment)
        page = self._site.find(f"{key}{ending}".lstrip("/") for ending in _ENDINGS)
        if page is None or not anchor:
            return page
        return page.part(anchor) or page

    def passages(self) -> Iterator[Passage]:
        """All passages, page by page."""
        for page in self.pages():
            yield from page.passages

    def pages(self) -> Iterator[Page]:
        return self._site.pages()


def _first_of(hits: Iterable[Hit], kind: Callable[[Hit], Hashable]) -> list[Hit]:
    """The first hit of each kind: a folder may hold a document twice."""
    found: dict[Hashable, Hit] = {}
    for hit in hits:
        found.setdefault(kind(hit), hit)
    return list(found.values())


def read_manifest(directory: Path) -> Json | None:
    """The manifest of a corpus, or None where there is none."""
    path = directory / MANIFEST
    if not path.is_file():
        return None
    held = read_object(path, "Delete the directory and build the corpus again.")
    if not {"site", "source", "version", "content"} <= held.keys():
        raise RecordError(f"{path}: not the manifest of a corpus. Use another directory.")
    if held.get("schema") != SCHEMA:
        raise RecordError(
            f"{path}: found corpus schema {held.get('schema')!r}, expected {SCHEMA}. "
            "Delete the directory and build the corpus again."
        )
    return held


# ------------------------------------------------------------------------------------------------
# The pages of a corpus in one SQLite file, with the stamp of the file each came from.
#
# The same file serves three ends: pages are found by address, a second build knows what has not
# changed, and a build that was killed goes on from its last commit. Keys are the percent-encoded
# paths below the source folder, so that any file name can be stored and be part of an address.
# ------------------------------------------------------------------------------------------------


_TABLES = """
CREATE TABLE IF NOT EXISTS recipe (text TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS file (
    key TEXT PRIMARY KEY, size INTEGER NOT NULL, mtime INTEGER NOT NULL, digest TEXT NOT NULL,
    problem TEXT NOT NULL, remark TEXT NOT NULL, title TEXT NOT NULL, links TEXT NOT NULL,
    passages TEXT NOT NULL, passage_count INTEGER NOT NULL
);
"""
_COLUMNS = "key, size, mtime, digest, problem, remark, title, links, passages, passage_count"
_MAX_VARIABLES = 500
_WORTHLESS = ("not a database", "malformed")
"""What SQLite says of a file of which nothing can be kept; all else (a full disk) may pass."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells whether a file has changed: size and time, and when these differ, the digest."""

    size: int
    mtime: int
    """Nanoseconds."""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """What came of reading one file: a page's content, or why there is none."""

    key: str
    stamp: Stamp
    problem: str = ""
    remark: str = ""
    title: str = ""
    links: tuple[str, ...] = ()
    """Keys of pages that it links to, whether they exist or not."""
    passages: tuple[Passage, ...] = ()
    unchanged: bool = False
    """The file has the digest it had before, so nothing was read."""


class PageStore:
    """Use as a context manager, or call `close`. Made by `create` or `open`."""

    def __init__(self, path: Path, site: str, use: str) -> None:
        self._path, self._site, self._use = path, site, use
        self._lock = threading.Lock()

    @classmethod
    def create(cls, path: Path, site: str, recipe: str) -> PageStore:
        """Open for writing. What another recipe has left there is thrown away."""
        store = cls(path, site, "written")
        with store._in_one_line():
            try:
                store._begin(recipe)
            except sqlite3.DatabaseError as error:
                if not any(sign in str(error) for sign in _WORTHLESS):
                    raise
                for worthless in (path, path.with_name(f"{path.name}-journal")):
                    worthless.unlink(missing_ok=True)
                store._begin(recipe)
        return store

    def _begin(self, recipe: str) -> None:
        self._connection = sqlite3.connect(self._path)
        try:
            self._connection.executescript(_TABLES)
            held = self._connection.execute("SELECT text FROM recipe").fetchone()
            if held != (recipe,):
                self._connection.execute("DELETE FROM file")
                self._connection.execute("DELETE FROM recipe")
                self._connection.execute("INSERT INTO recipe VALUES (?)", (recipe,))
                self._connection.commit()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: Path, site: str) -> PageStore:
        """Open for reading; nobody writes there any more."""
        if not path.is_file():
            raise RecordError(f"{path}: no such file; the corpus is damaged. Build it again.")
        store = cls(path, site, "read")
        uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
        with store._in_one_line():
            store._connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
        try:
            store._rows("SELECT key FROM file LIMIT 1")  # what is damaged shows now, not at its use
        except BaseException:
            store.close()
            raise
        return store

    @contextmanager
    def _in_one_line(self) -> Iterator[None]:
        """What SQLite complains of becomes a line with the file and, where it helps, what to do."""
        try:
            yield
        except sqlite3.Error as error:
            damaged = any(sign in str(error) for sign in _WORTHLESS) or self._use == "read"
            remedy = " Delete the corpus and build it again." if damaged else ""
            raise RecordError(f"{self._path}: cannot be {self._use} ({error}).{remedy}") from error

    def __enter__(self) -> PageStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def commit(self) -> None:
        with self._in_one_line():
            self._connection.commit()

    def stamps(self) -> dict[str, Stamp]:
        rows = self._rows("SELECT key, size, mtime, digest FROM file")
        return {key: Stamp(size, mtime, digest) for key, size, mtime, digest in rows}

    def put(self, reading: Reading) -> None:
        stamp = reading.stamp
        cut = [[p.text, p.section, p.names, p.anchors] for p in reading.passages]
        self._rows(
            f"INSERT OR REPLACE INTO file ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?)",
            (
                *(reading.key, stamp.size, stamp.mtime, stamp.digest, reading.problem),
                *(reading.remark, reading.title, json.dumps(reading.links)),
                *(json.dumps(cut, ensure_ascii=False), len(cut)),
            ),
        )

    def restamp(self, key: str, stamp: Stamp) -> None:
        """Note that a file was touched but not changed."""
        row = (stamp.size, stamp.mtime, key)
        self._rows("UPDATE file SET size = ?, mtime = ? WHERE key = ?", row)

    def drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._rows("DELETE FROM file WHERE key = ?", (key,))

    def counts(self) -> tuple[int, int]:
        """Pages and passages."""
        query = "SELECT count(*), coalesce(sum(passage_count), 0) FROM file WHERE problem = ''"
        pages, passages = self._rows(query)[0]
        return int(pages), int(passages)

    def fingerprint(self) -> str:
        """A digest of the recipe and of all files, whenever they were written."""
        made = hashlib.sha256(repr(self._rows("SELECT text FROM recipe")).encode())
        for row in self._rows("SELECT key, digest, problem FROM file ORDER BY key"):
            made.update(repr(row).encode())
        return made.hexdigest()

    def problems(self) -> dict[str, str]:
        """Why files could not be read, by key."""
        return dict(self._rows("SELECT key, problem FROM file WHERE problem != '' ORDER BY key"))

    def remarks(self) -> dict[str, str]:
        return dict(self._rows("SELECT key, remark FROM file WHERE remark != '' ORDER BY key"))

    def find(self, keys: Iterable[str]) -> Page | None:
        """The page of the first key that has one."""
        for key in keys:
            query = "SELECT key, title, links, passages FROM file WHERE key = ? AND problem = ''"
            if found := self._rows(query, (key,)):
                return self._page(*found[0])
        return None

    def pages(self) -> Iterator[Page]:
        """All pages in the order of their keys, without their links."""
        for (key,) in self._rows("SELECT key FROM file WHERE problem = '' ORDER BY key"):
            query = "SELECT key, title, '[]', passages FROM file WHERE key = ?"
            yield self._page(*self._rows(query, (key,))[0])

    def _page(self, key: str, title: str, links: str, passages: str) -> Page:
        url = f"{self._site}/{key}"
        made = tuple(
            Passage(
                title,
                with_fragment(url, anchors[-1]) if anchors else url,
                *(text, section, tuple(names), tuple(anchors)),
            )
            for text, section, names, anchors in json.loads(passages)
        )
        return Page(title, url, made, tuple(f"{self._site}/{k}" for k in self._live(links)))

    def _live(self, links: str) -> Iterator[str]:
        """Those links that lead to a page."""
        keys = json.loads(links)
        for start in range(0, len(keys), _MAX_VARIABLES):
            some = keys[start : start + _MAX_VARIABLES]
            marks = ",".join("?" * len(some))
            query = f"SELECT key FROM file WHERE problem = '' AND key IN ({marks})"
            live = {key for (key,) in self._rows(query, some)}
            yield from (key for key in some if key in live)

    def _rows(self, statement: str, values: Iterable[str | int] = ()) -> list[Any]:
        with self._lock, self._in_one_line():
            return self._connection.execute(statement, tuple(values)).fetchall()
