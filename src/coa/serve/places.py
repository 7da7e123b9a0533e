"""Places: how many rollouts run, how many wait, and who is sent away.

A `Ticket` is taken at once or not at all (429); whoever has one waits in line for a place. It is
given back when the rollout ends, when its client goes away while it waits or runs, and at the
latest when the request does; giving it back twice is harmless.
"""

from __future__ import annotations

import asyncio
import math
import time
from types import TracebackType

from coa.serve.refusals import Refused, unavailable

FIRST_GUESS_S = 2.0
"""What a rollout is taken to last before one has ended."""


class Places:
    """Room for `rollouts` at a time and `queue` more in line."""

    def __init__(self, rollouts: int, queue: int) -> None:
        self.rollouts, self.queue = rollouts, queue
        self.running = self.waiting = 0
        self._free = asyncio.Semaphore(rollouts)
        self._lasted_s = FIRST_GUESS_S

    def take(self) -> Ticket:
        """A ticket, or `Refused` when the line is full."""
        if self.running + self.waiting >= self.rollouts + self.queue:
            raise Refused(
                f"{self.running} requests are being answered and {self.waiting} wait; try later.",
                429,
                "rate_limit_error",
                "queue_full",
                retry_after_s=self.retry_after_s(),
            )
        return Ticket(self)

    def retry_after_s(self) -> int:
        """When a place in line should be free, as far as rollouts last what they lasted so far."""
        return max(1, math.ceil(self._lasted_s * (1 + self.waiting / self.rollouts)))

    def note_seconds(self, seconds: float) -> None:
        self._lasted_s += 0.1 * (seconds - self._lasted_s)


class Ticket:
    """One request's claim to a place."""

    def __init__(self, places: Places) -> None:
        self._places, self._started = places, 0.0
        self._holds = self._done = False
        places.waiting += 1

    async def wait(self, seconds: float) -> None:
        """Until a place is free."""
        try:
            async with asyncio.timeout(seconds):
                await self._places._free.acquire()
        except TimeoutError:
            message = f"no place became free within {seconds:g} s; try later."
            raise unavailable(message, "busy", self._places.retry_after_s()) from None
        if self._done:  # given back meanwhile
            self._places._free.release()
            return
        self._holds, self._started = True, time.monotonic()
        self._places.waiting -= 1
        self._places.running += 1

    def give_back(self) -> None:
        if self._done:
            return
        self._done = True
        if not self._holds:
            self._places.waiting -= 1
            return
        self._places.running -= 1
        self._places.note_seconds(time.monotonic() - self._started)
        self._places._free.release()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.give_back()
