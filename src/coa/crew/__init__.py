"""Crew: independent pieces of work, spread over processes.

    async with Crew("coa.teachers.stage:recorder", settings, workers=4) as crew:
        result = await crew.do(item)

The reference names a function of the settings that gives an asynchronous context; what that gives
does one item: JSON in, JSON out. Every worker opens it once. With one worker (or none) all of this
happens in this process, by the same interface and with the same results, so that small jobs need
not wait for a process to start.

Which worker does what, and in what order, changes no result. A worker that dies costs little: what
it had in hand is done once more, one item at a time in a process that does nothing else, so that
only the deadly one is blamed. A worker whose starter was killed closes what it holds, and ends.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Protocol, Self

from coa.crew.channel import CrewError, decoded, encoded, error_of, shortened
from coa.crew.process import Died, WorkerProcess
from coa.crew.worker import Work, answered, open_work
from coa.errors import ConfigError
from coa.machine import cores
from coa.runs import Json

__all__ = ["Crew", "CrewError", "Work", "crew_size"]

AT_ONCE = 8
"""Items that a worker has in hand at a time, so that a slow one holds up no other."""
_ITEMS_EACH = 200
"""Fewer items than this do not repay the start of a worker."""


def crew_size(items: int, most: int = 0) -> int:
    """Workers worth starting for so many items: at most `most`, or as many as there are cores."""
    return max(1, min(most or cores(), items // _ITEMS_EACH))


class Crew:
    """Workers that all do the same work; use it inside `async with`."""

    def __init__(
        self, reference: str, settings: Json, workers: int = 1, at_once: int = AT_ONCE
    ) -> None:
        if workers < 0 or at_once < 1:
            raise ConfigError(f"workers {workers!r}, {at_once!r} at once: expected 1 or more.")
        self._reference = reference
        self._opening = {"reference": reference, "settings": settings}
        self._shown: dict[str, object] = {}
        self._members: list[_Member] = [_Here(self._opening)]
        if workers > 1:
            self._members = [self._process() for _ in range(workers)]
        self._places = asyncio.Semaphore(len(self._members) * at_once)
        self._alone: WorkerProcess | None = None
        self._one_suspect = asyncio.Lock()
        self._closed = False

    def _process(self) -> WorkerProcess:
        return WorkerProcess(self._opening, self._shown)

    async def __aenter__(self) -> Self:
        opening = [member.open() for member in self._members]
        try:
            # Alone it is opened by the task that closes it, which some libraries insist on.
            await (opening[0] if len(opening) == 1 else asyncio.gather(*opening))
        except BaseException as error:
            await self._close()
            if isinstance(error, Died):
                raise CrewError(
                    f"{self._reference}: a worker {error} before it was ready."
                ) from None
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = await self._close()
        if failed and kind is None:
            raise failed[0]

    async def _close(self) -> list[BaseException]:
        self._closed = True
        members = [*self._members, *([self._alone] if self._alone else [])]
        ended = await asyncio.gather(*(each.close() for each in members), return_exceptions=True)
        return [each for each in ended if each is not None]

    async def do(self, item: Json, name: str = "") -> Json:
        """What the work makes of an item. `name` stands for the item in messages.

        An item that a worker has begun is finished there, also when nobody waits for it any more.
        """
        name = name or shortened(json.dumps(item))
        async with self._places:
            member = min(self._members, key=lambda each: each.in_hand)
            member.in_hand += 1
            try:
                return await member.ask(item, name)
            except Died as died:
                first = died
            finally:
                member.in_hand -= 1
        async with self._one_suspect:
            if self._closed:
                raise CrewError(f"{name}: the crew was closed before it was done.")
            self._alone = self._alone or self._process()
            try:
                return await self._alone.ask(item, name)
            except Died as second:
                raise CrewError(
                    f"{self._reference}, on {name}, ended two worker processes: one {first}, "
                    f"another that did nothing else {second}; for want of memory perhaps."
                ) from None


class _Member(Protocol):
    in_hand: int

    async def open(self) -> None: ...
    async def ask(self, item: Json, name: str) -> Json: ...
    async def close(self) -> None: ...


class _Here:
    """The only member of a small crew: this process."""

    def __init__(self, opening: Json) -> None:
        self.in_hand = 0
        self._opening, self._held = opening, AsyncExitStack()

    async def open(self) -> None:
        self._work = await self._held.enter_async_context(open_work(self._opening))

    async def ask(self, item: Json, name: str) -> Json:
        # By way of JSON, as between processes: what works here works there.
        reply = decoded(await answered(self._work, decoded(encoded({"number": 0, "item": item}))))
        if "fault" in reply:
            raise error_of(reply["fault"], f"{self._opening['reference']}, on {name},")
        value: Json = reply["value"]
        return value

    async def close(self) -> None:
        await self._held.aclose()
