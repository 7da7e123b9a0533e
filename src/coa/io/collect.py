"""collect(): many independent pieces of work into one JSONL file, resumable and ordered.

Each result is appended as soon as it is there, so `kill -9` loses at most what is in flight; the
same call again does only what is missing. When everything is there the file is put into the order
that was asked for, so it does not depend on which piece finished first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from coa.errors import RecordError
from coa.io.progress import duration
from coa.io.runs import Appender, Json, dumps, reached, read_records, write_jsonl


class Record(Protocol):
    def to_json(self) -> Json: ...


@dataclass(frozen=True, slots=True)
class Line:
    """A record that is passed on as it is."""

    record: Json

    def to_json(self) -> Json:
        return self.record


R = TypeVar("R", bound=Record)
K = TypeVar("K", bound=Hashable)
OnDone = Callable[[int, int], None]


async def collect(
    path: Path,
    work: Mapping[K, Callable[[], Awaitable[R]]],
    *,
    parse: Callable[[Json], R],
    key: Callable[[R], K],
    redo: Callable[[R], bool] = lambda record: False,
    concurrency: int = 32,
    on_record: Callable[[R], None] | None = None,
    on_done: OnDone | None = None,
) -> list[R]:
    """Results for every key of `work`, in its order. `redo` says which stored ones do not count."""
    Appender(path).close()  # drops a line torn by a kill before anything is read
    have: dict[K, R] = {}
    for record in read_records(path, parse):
        if redo(record):
            continue
        held = have.setdefault(key(record), record)
        if held is not record and dumps(held.to_json()) != dumps(record.to_json()):
            raise RecordError(
                f"{path}: holds two different records of {key(record)!r}, and only one would be "
                "kept. Write somewhere else, or move one of them to another file."
            )
    foreign = [k for k in have if k not in work]
    if foreign:
        raise RecordError(
            f"{path}: holds {len(foreign)} records that do not belong to this work, the first is "
            f"{foreign[0]!r}. Write somewhere else, or delete the file to start again."
        )
    missing = [k for k in work if k not in have]
    gate = asyncio.Semaphore(concurrency)
    if on_done and have:
        on_done(len(have), len(work))

    async def one(name: K, file: Appender) -> None:
        async with gate:
            record = await work[name]()
        have[name] = record
        file.write(record.to_json())
        reached(f"{len(have)} of {len(work)}")
        if on_record:
            on_record(record)
        if on_done:
            on_done(len(have), len(work))

    if missing:
        with Appender(path) as file:
            try:
                async with asyncio.TaskGroup() as group:
                    for name in missing:
                        group.create_task(one(name, file))
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None  # the first one cancelled the others
    ordered = [have[name] for name in work]
    write_jsonl(path, (record.to_json() for record in ordered))
    return ordered


# ------------------------------------------------------------------------------------------------
# Rehearsal: a few items of long work are tried, to say what all of them would take.
# ------------------------------------------------------------------------------------------------


T = TypeVar("T")


@dataclass(frozen=True)
class Rehearsal:
    """What a stage would take, by a few of its items."""

    what: str
    items: int
    done: int
    """Of these, by an earlier part of the run."""
    tried: int
    good: int
    workers: int
    seconds: float
    """Of the tried ones, in one process."""
    characters: int
    """Written for the tried ones."""

    @property
    def seconds_left(self) -> float:
        left = self.items - self.done
        return left * self.seconds / max(1, self.tried) / self.workers

    def to_json(self) -> Json:
        return {**vars(self), "seconds_left": round(self.seconds_left, 1)}

    def lines(self) -> list[str]:
        left, each = self.items - self.done, self.characters / max(1, self.tried)
        return [
            f"{self.items} {self.what}, {self.done} of them done, {left} to do",
            f"tried {self.tried}: {self.good} good, {self.seconds:.1f}s in one process",
            f"the rest would take about {duration(self.seconds_left)} with {self.workers} "
            f"processes and {each * left / 1e6:.0f} MB; nothing was written",
        ]


async def timed(
    opening: AbstractAsyncContextManager[Callable[[Json], Awaitable[Json]]], items: Sequence[Json]
) -> tuple[float, list[Json]]:
    """Seconds that the items take, and what becomes of them; opening does not count."""
    async with opening as work:
        for _ in ("opening what is opened once", "timed"):
            begun = time.monotonic()
            made = [await work(item) for item in items]
        return time.monotonic() - begun, made


TRIED = 24
"""Items of a rehearsal."""


def spread_out(items: Sequence[T], most: int = TRIED) -> list[T]:
    """A few of the items, from the first to the last."""
    count = min(most, len(items))
    return [items[place * (len(items) - 1) // max(1, count - 1)] for place in range(count)]
