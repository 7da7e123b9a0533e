"""PageStore: the pages of a corpus in one SQLite file, with the stamp of the file each came from.

The same file serves three ends: pages are found by address, a second build knows what has not
changed, and a build that was killed goes on from its last commit. Keys are the percent-encoded
paths below the source folder, so that any file name can be stored and be part of an address.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from coa.corpus.page import Page, Passage, with_fragment
from coa.errors import RecordError

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
_PATH_SAFE = "/!$&'()*+,;=:@~"


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


@contextmanager
def _in_one_line(path: Path, cannot_be: str) -> Iterator[None]:
    """What SQLite complains of becomes a line with the file and, where it helps, what to do."""
    try:
        yield
    except sqlite3.Error as error:
        damaged = any(sign in str(error) for sign in _WORTHLESS) or cannot_be == "read"
        remedy = " Delete the corpus and build it again." if damaged else ""
        raise RecordError(f"{path}: cannot be {cannot_be} ({error}).{remedy}") from error


class PageStore:
    """Use as a context manager, or call `close`."""

    def __init__(self, connection: sqlite3.Connection, path: Path, site: str, use: str) -> None:
        self._connection, self._path, self._use = connection, path, use
        self._site = site
        self._lock = threading.Lock()

    @classmethod
    def create(cls, path: Path, site: str, recipe: str) -> PageStore:
        """Open for writing. What another recipe has left there is thrown away."""
        with _in_one_line(path, "written"):
            try:
                return cls._made(path, site, recipe)
            except sqlite3.DatabaseError as error:
                if not any(sign in str(error) for sign in _WORTHLESS):
                    raise
            for worthless in (path, path.with_name(f"{path.name}-journal")):
                worthless.unlink(missing_ok=True)
            return cls._made(path, site, recipe)

    @classmethod
    def _made(cls, path: Path, site: str, recipe: str) -> PageStore:
        connection = sqlite3.connect(path)
        try:
            connection.executescript(_TABLES)
            if connection.execute("SELECT text FROM recipe").fetchone() != (recipe,):
                connection.execute("DELETE FROM file")
                connection.execute("DELETE FROM recipe")
                connection.execute("INSERT INTO recipe VALUES (?)", (recipe,))
                connection.commit()
        except BaseException:
            connection.close()
            raise
        return cls(connection, path, site, "written")

    @classmethod
    def open(cls, path: Path, site: str) -> PageStore:
        """Open for reading; nobody writes there any more."""
        if not path.is_file():
            raise RecordError(f"{path}: no such file; the corpus is damaged. Build it again.")
        uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
        with _in_one_line(path, "read"):
            connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
            try:
                connection.execute("SELECT key FROM file LIMIT 1").fetchone()  # now, not at its use
            except BaseException:
                connection.close()
                raise
        return cls(connection, path, site, "read")

    def __enter__(self) -> PageStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def commit(self) -> None:
        with _in_one_line(self._path, self._use):
            self._connection.commit()

    def stamps(self) -> dict[str, Stamp]:
        rows = self._rows("SELECT key, size, mtime, digest FROM file")
        return {key: Stamp(size, mtime, digest) for key, size, mtime, digest in rows}

    def put(self, reading: Reading) -> None:
        stamp = reading.stamp
        cut = [[p.text, p.section, p.names, p.anchors] for p in reading.passages]
        self._change(
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
        self._change("UPDATE file SET size = ?, mtime = ? WHERE key = ?", row)

    def drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._change("DELETE FROM file WHERE key = ?", (key,))

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

    def problems(self) -> list[tuple[str, str]]:
        """(key, reason) of the files that could not be read."""
        return list(self._rows("SELECT key, problem FROM file WHERE problem != '' ORDER BY key"))

    def remarks(self) -> list[tuple[str, str]]:
        return list(self._rows("SELECT key, remark FROM file WHERE remark != '' ORDER BY key"))

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
            rows = self._rows("SELECT key, title, passages FROM file WHERE key = ?", (key,))
            for found, title, passages in rows:
                yield self._page(found, title, "[]", passages)

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

    def _rows(self, query: str, values: Iterable[str] = ()) -> list[Any]:
        with self._lock, _in_one_line(self._path, self._use):
            return self._connection.execute(query, tuple(values)).fetchall()

    def _change(self, statement: str, values: tuple[str | int, ...]) -> None:
        with _in_one_line(self._path, self._use):
            self._connection.execute(statement, values)


def key_of(path: bytes) -> str:
    """The key of a path: percent-encoded, without empty steps and slashes around it."""
    steps = [step for step in path.split(b"/") if step not in (b"", b".")]
    return quote(b"/".join(steps), safe=_PATH_SAFE)
