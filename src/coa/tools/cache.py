"""ToolCache: what tools answered, in one SQLite file that many processes share.

An answer is kept under a key, a hash of everything that decides it: the tool's name, its
fingerprint (a corpus, a question, settings) and the argument. The file grows up to a limit; then
the answers that were used least recently go. A file that is not a cache is never changed, and is an
error in one line.

`cached` puts the tools of a toolbox behind a cache, in one of three modes:

* `live`: every call goes to the tool; nothing is read or stored.
* `record`: an answer that is stored and has not expired is given; otherwise the tool is called
  and its answer stored. Calls with the same key that come at the same time are made once.
* `replay`: only what is stored, whatever its age, and the tool is never called, so that a run can
  be repeated without its tools. What is not stored is a `ToolError` that says so.

Answers and the mistakes of the model are stored. Failures of the world are not answers: they are
remembered for `replay` only, so that it repeats the run as it was, and `record` calls again; so is
a text of which a part failed (`Provisional`). When the same call first failed and then worked, what
worked is what remains. A call that was stopped by a time limit of the caller leaves nothing. A tool
that remembers (`session`) is recorded, too: its key holds the calls before in its session.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast, get_args

from coa.errors import (
    CoaError,
    ConfigError,
    RecordError,
    ToolError,
    ToolMistake,
    ToolTimeout,
    UsageError,
    boundary,
    did_you_mean,
)
from coa.tools.base import RunTool, Tool, Toolbox, Turns

Kind = Literal["text", "mistake", "provisional", "failed", "timeout"]

MAX_BYTES = 1_000_000_000
_APPLICATION = 0x636F6163  # 'coac', in the header of the file
_SCHEMA = 1
_BUSY_S = 60.0
_OVERHEAD = 200
"""Bytes that an entry is counted for besides its text."""
_KEPT = 0.9
"""Which part of the limit remains after old entries were dropped."""
_TOUCH_S = 60.0
"""How exact 'used least recently' is: reading writes no more often than that."""
_OF_PARENTS: list[sqlite3.Connection] = []
_TABLES = (
    "CREATE TABLE entries (key BLOB PRIMARY KEY, tool TEXT NOT NULL, argument BLOB NOT NULL, "
    "kind TEXT NOT NULL, text BLOB NOT NULL, size INTEGER NOT NULL, stored REAL NOT NULL, "
    "used REAL NOT NULL) WITHOUT ROWID",
    "CREATE INDEX entries_by_use ON entries (used)",
    "CREATE TABLE total (bytes INTEGER NOT NULL)",
    "INSERT INTO total VALUES (0)",
    "CREATE TRIGGER added AFTER INSERT ON entries "
    "BEGIN UPDATE total SET bytes = bytes + NEW.size; END",
    "CREATE TRIGGER changed AFTER UPDATE OF size ON entries "
    "BEGIN UPDATE total SET bytes = bytes + NEW.size - OLD.size; END",
    "CREATE TRIGGER dropped AFTER DELETE ON entries "
    "BEGIN UPDATE total SET bytes = bytes - OLD.size; END",
)
_OLDEST = """
DELETE FROM entries WHERE key IN (
    SELECT key FROM (
        SELECT key, sum(size) OVER (ORDER BY used, key) - size AS before FROM entries WHERE key != ?
    ) WHERE before < ?
)"""


class Provisional(str):
    """A text that a tool returns when a part of it failed and may succeed another time.

    It is shown like any text, but is remembered as a failure is: for `replay` only.
    """


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call came to: a text, or the message of an error of this kind."""

    kind: Kind
    text: str

    def give(self) -> str:
        """The text, or the error as the tool raised it."""
        if self.kind in ("text", "provisional"):
            return self.text
        raise {"mistake": ToolMistake, "timeout": ToolTimeout}.get(self.kind, ToolError)(self.text)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What the file holds."""

    entries: int
    bytes: int
    """As counted for the limit; the file itself is somewhat larger."""
    limit: int
    expired: int
    tools: dict[str, int] = field(default_factory=dict)
    """Entries of each tool."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Entries of each kind of answer."""


class ToolCache:
    """Answers by key, in a file. Safe to use from several threads and processes at once.

    `expire_s`: an answer older than that is asked for again (None: never). `clock` gives seconds.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = MAX_BYTES,
        expire_s: float | None = None,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_bytes < 1:
            raise ConfigError(f"cache: max_bytes is {max_bytes!r}, expected at least 1.")
        if expire_s is not None and not expire_s > 0:
            raise ConfigError(f"cache: expire_s is {expire_s!r}, expected more than 0.")
        self.path, self.max_bytes, self.expire_s = path, max_bytes, expire_s
        self.tally: Counter[str] = Counter()
        """Of this process: calls answered from the file (`stored`), made (`called`), not found."""
        self.read_only, self._clock = read_only, clock
        self._lock = threading.RLock()
        self._connections: dict[int, sqlite3.Connection] = {}
        """By process: one that was opened before a fork belongs to the parent, and closing it in
        the child, be it by forgetting it, could take the parent's files away."""
        self._seen: tuple[int, ...] = ()
        """The state in which a finished file is read, by a connection that is kept."""
        self.turns = Turns()
        """Of those who want the same answer: one makes the call."""
        with self._using():
            pass  # what is wrong with the file is said now, not in the middle of a run

    def get(self, key: bytes, *, any_age: bool = False) -> Answer | None:
        """What is stored, if it has not expired; with `any_age` also failures and what has."""
        with self._using() as connection:
            row = connection.execute(
                "SELECT kind, text, stored, used FROM entries WHERE key = ?", (key,)
            ).fetchone()
            if row is None:
                return None
            kind, text, stored, used = row
            now = self._clock()
            if not any_age:
                expired = self.expire_s is not None and now - stored > self.expire_s
                if expired or kind not in ("text", "mistake"):
                    return None
                if now - used > _TOUCH_S and not self.read_only:
                    connection.execute("UPDATE entries SET used = ? WHERE key = ?", (now, key))
            return Answer(kind, text.decode("utf-8", "surrogatepass"))

    def put(self, key: bytes, tool: str, argument: str, answer: Answer) -> None:
        """Store an answer; a failure never takes the place of an answer."""
        text = answer.text.encode("utf-8", "surrogatepass")
        asked = argument.encode("utf-8", "surrogatepass")
        size = len(text) + len(asked) + _OVERHEAD
        if size > self.max_bytes:
            return
        now = self._clock()
        row = (key, tool, asked, answer.kind, text, size, now, now)
        keep = "WHERE excluded.kind IN ('text', 'mistake') OR kind NOT IN ('text', 'mistake')"
        with self._using() as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE "
                "SET kind = excluded.kind, text = excluded.text, size = excluded.size, "
                f"stored = excluded.stored, used = excluded.used {keep}",
                row,
            )
            (total,) = connection.execute("SELECT bytes FROM total").fetchone()
            if total > self.max_bytes:
                connection.execute(_OLDEST, (key, total - int(self.max_bytes * _KEPT)))
            connection.execute("COMMIT")

    def stats(self) -> CacheStats:
        with self._using() as connection:
            (entries,) = connection.execute("SELECT count(*) FROM entries").fetchone()
            (total,) = connection.execute("SELECT bytes FROM total").fetchone()
            (expired,) = connection.execute(
                "SELECT count(*) FROM entries WHERE stored < ?", (self._oldest(),)
            ).fetchone()
            groups = "SELECT {0}, count(*) FROM entries GROUP BY {0} ORDER BY {0}"
            tools = dict(connection.execute(groups.format("tool")).fetchall())
            kinds = dict(connection.execute(groups.format("kind")).fetchall())
        return CacheStats(entries, total, self.max_bytes, expired, tools, kinds)

    def fingerprint(self) -> str:
        """Which answers are in it, and since when."""
        digest = hashlib.sha256()
        with self._using() as connection:
            for row in connection.execute("SELECT key, stored FROM entries ORDER BY key"):
                digest.update(repr(row).encode())
        return digest.hexdigest()[:16]

    def clear(self, tool: str = "", *, expired: bool = False) -> int:
        """Drop everything, or only one tool's entries, or only what has expired; how many."""
        conditions = ["tool = :tool"] if tool else []
        conditions += ["stored < :oldest"] if expired else []
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        values = {"tool": tool, "oldest": self._oldest()}
        with self._using() as connection:
            count = connection.execute(f"DELETE FROM entries{where}", values).rowcount
            with suppress(sqlite3.OperationalError):  # others are at work: the room is used again
                connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return count

    def _oldest(self) -> float:
        return float("-inf") if self.expire_s is None else self._clock() - self.expire_s

    def close(self) -> None:
        with self._lock:
            if held := self._connections.pop(os.getpid(), None):
                held.close()

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        """The connection of this process; what SQLite says becomes one line."""
        try:
            with self._lock:
                if self._seen and self._seen != self._state():
                    self.close()  # somebody records meanwhile
                connection = self._connections.get(os.getpid()) or self._open()
                try:
                    yield connection
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    if os.getpid() not in self._connections:
                        connection.close()
        except sqlite3.Error as error:
            raise _said(self.path, error) from error

    def _open(self) -> sqlite3.Connection:
        if self.read_only:
            if not self.path.is_file():
                raise UsageError(f"{self.path}: no such file. Record a run first.")
            # With nothing left to be written into the file, SQLite reads it as one that does not
            # change: it then makes no files beside it.
            *_, unfinished = state = self._state()
            found = _connect(self.path, f"mode=ro&immutable={int(not unfinished)}")
            if not unfinished:
                self._seen, self._connections[os.getpid()] = state, found
            return found
        _OF_PARENTS.extend(self._connections.values())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + _BUSY_S
        while True:
            try:
                made = self._connections[os.getpid()] = _connect(self.path, "mode=rwc")
                return made
            except sqlite3.OperationalError as error:
                # While others make the same file SQLite does not wait, for fear of a deadlock.
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
            time.sleep(0.02)

    def _state(self) -> tuple[int, ...]:
        """Of the file; last how much of it is in the log beside it, and not in the file yet."""
        log = self.path.with_name(f"{self.path.name}-wal")
        try:
            found = self.path.stat()
            unfinished = log.stat().st_size if log.is_file() else 0
        except OSError:  # one of them is being removed
            return (0,)
        return found.st_ino, found.st_mtime_ns, found.st_size, unfinished


def _connect(path: Path, how: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        timeout=_BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        # Nothing is changed before it is certain that the file is ours. One transaction, so that
        # a file which another process is making is seen empty or whole.
        connection.execute("BEGIN")
        _check(path, connection)
        connection.execute("COMMIT")
        if how == "mode=rwc":
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN IMMEDIATE")
            if _check(path, connection) == 0:  # another process may have been first
                for statement in _TABLES:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                connection.execute(f"PRAGMA user_version = {_SCHEMA}")
            connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _check(path: Path, connection: sqlite3.Connection) -> int:
    """The version of the tables; 0 for an empty file. A file of another kind is an error."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not (application or version or tables):
        return 0
    if application != _APPLICATION:
        raise _foreign(path, "is a database of another program")
    if version != _SCHEMA:
        raise _foreign(path, f"is a tool cache of version {version}, expected {_SCHEMA}")
    return int(version)


def _foreign(path: Path, found: str) -> RecordError:
    return RecordError(f"{path}: {found}. It was left as it is; name another file for the cache.")


def _said(path: Path, error: sqlite3.Error) -> CoaError:
    said = str(error)
    if "not a database" in said:
        return _foreign(path, "is not a tool cache")
    if "malformed" in said:
        return RecordError(
            f"{path}: the tool cache is damaged. It was left as it is; move it away to begin anew."
        )
    return ToolError(f"{path}: the tool cache cannot be used ({said}).")


Mode = Literal["live", "record", "replay"]
MODES: tuple[str, ...] = get_args(Mode)
_KEY_VERSION = 1


def key_of(tool: Tool, argument: str, earlier: Sequence[str] | None = None) -> bytes:
    """The hash of everything that decides what a call answers.

    `earlier` are the arguments of the calls before in the same session: what a tool that remembers
    answers depends on these, too.
    """
    settings = [_KEY_VERSION, tool.name, tool.fingerprint, argument, earlier]
    return hashlib.sha256(json.dumps(settings).encode()).digest()


def check_mode(mode: str) -> Mode:
    """A mode by its name."""
    if mode not in MODES:
        raise ConfigError(f"cache mode {mode!r} is not a choice.{did_you_mean(mode, MODES)}")
    return cast(Mode, mode)


def cached(toolbox: Toolbox, cache: ToolCache, mode: Mode) -> Toolbox:
    """The same tools, answering through the cache in a mode; see the module."""
    if check_mode(mode) == "live":
        return toolbox
    if mode == "record" and cache.read_only:
        raise ConfigError(f"{cache.path}: was opened for reading only; nothing can be recorded.")
    if own := next((each.name for each in toolbox.values() if each.with_state is not None), ""):
        raise ConfigError(
            f"tool cache: {own} works on the state of its rollout, so its answers cannot be "
            "recorded. Leave the cache out."
        )
    tools = [_Through(each, cache, mode).tool() for each in toolbox.values()]
    return Toolbox(tools, beside=toolbox)


@dataclass(frozen=True)
class _Through:
    """One tool behind the cache."""

    real: Tool
    cache: ToolCache
    mode: Mode

    def tool(self) -> Tool:
        session = None if self.real.session is None else self._session
        return replace(self.real, run=self._run, session=session)

    async def _run(self, argument: str) -> str:
        key = key_of(self.real, argument)
        if self.mode == "replay":
            return await self._stored(key)
        async with self.cache.turns.of(key):
            answer = await asyncio.to_thread(self.cache.get, key)
            if answer is None:
                return await self._called(self.real.run, key, argument)
            self.cache.tally["stored"] += 1
            return answer.give()

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[RunTool]:
        """A session in which every call is keyed by those before it.

        Recording, each call is made even when its answer is stored: the next one may need what it
        left behind. Replaying, no session is opened at all.
        """
        earlier: list[str] = []
        async with AsyncExitStack() as stack:
            real = None
            if self.mode == "record" and self.real.session is not None:
                real = await stack.enter_async_context(self.real.session())

            async def run(argument: str) -> str:
                key = key_of(self.real, argument, earlier)
                earlier.append(argument)
                if real is None:
                    return await self._stored(key)
                return await self._called(real, key, argument)

            yield run

    async def _stored(self, key: bytes) -> str:
        answer = await asyncio.to_thread(lambda: self.cache.get(key, any_age=True))
        self.cache.tally["missing" if answer is None else "stored"] += 1
        if answer is None:
            name = self.real.name
            raise ToolError(f"no answer of {name} to this is recorded, and it is not called.")
        return answer.give()

    async def _called(self, run: RunTool, key: bytes, argument: str) -> str:
        self.cache.tally["called"] += 1
        try:
            with boundary(ToolError, self.real.name):
                text = await run(argument)
        except CoaError as error:
            kind: Kind = "failed"
            said = str(error)
            if isinstance(error, ToolMistake):
                kind = "mistake"
            elif isinstance(error, ToolTimeout):
                kind = "timeout"
            elif isinstance(error.__cause__, TimeoutError):
                kind, said = "timeout", f"{self.real.name} gave no answer in time."
            await self._store(key, argument, Answer(kind, said))
            raise
        if isinstance(text, str):  # what is not is the caller's to complain about
            kind = "provisional" if isinstance(text, Provisional) else "text"
            await self._store(key, argument, Answer(kind, text))
        return text

    async def _store(self, key: bytes, argument: str, answer: Answer) -> None:
        await asyncio.to_thread(self.cache.put, key, self.real.name, argument, answer)
