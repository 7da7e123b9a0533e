"""A worker process, seen from where it was started."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import subprocess
import sys
import threading
from typing import IO

from coa.crew.channel import Channel, CrewError, encoded, error_of
from coa.crew.worker import ENDED, GRACE_S, OPENED
from coa.machine import signal_name
from coa.runs import Json

_START = "import sys; sys.path[:] = sys.argv[1:]; from coa.crew.worker import serve; serve()"
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Died(Exception):
    """A worker is gone; the message says how it ended."""


class WorkerProcess:
    """Starts when it is opened, and again when it is asked something after it died.

    It is a fresh interpreter, never a fork, with the search path of this one. `shown` has the lines
    that workers have printed: what each of them says is shown once.
    """

    def __init__(self, opening: Json, shown: dict[str, object]) -> None:
        self.in_hand = 0
        self._opening, self._shown = opening, shown
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        """None when there is no living process at its other end."""
        self._starting = asyncio.Lock()
        self._gone = asyncio.Event()

    async def open(self) -> None:
        async with self._starting:
            if self._channel is None:
                self._start()
                await self._reply(OPENED, self._opening, "opening")

    def _start(self) -> None:
        loop, pipe = asyncio.get_running_loop(), subprocess.PIPE
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, *sys.path],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=os.environ | _ONE_THREAD,
            start_new_session=True,  # Ctrl-C in a terminal is for us; we then close the worker
        )
        assert process.stdin and process.stdout and process.stderr
        relay = threading.Thread(target=self._relay, args=(process.stderr,), daemon=True)
        relay.start()

        def heard(message: Json | None) -> None:
            if message is None:
                process.wait()
                relay.join(1.0)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._heard, message)

        self._gone.clear()
        self._channel = Channel(process.stdout, process.stdin, heard)

    def _relay(self, stderr: IO[bytes]) -> None:
        """Show what the worker says, but for what another one has said already."""
        for line in io.TextIOWrapper(stderr, encoding="utf-8", errors="replace"):
            if self._shown.setdefault(line, self) is self:
                print(line, end="", file=sys.stderr, flush=True)

    def _heard(self, message: Json | None) -> None:
        if message is not None:
            waiting = self._waiting.get(message["number"])
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
            return
        assert self._process is not None and self._channel is not None
        self._channel.finish()
        self._channel = None
        self._gone.set()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Died(_ending(self._process.returncode)))

    async def ask(self, item: Json, name: str) -> Json:
        """What the work makes of an item; `Died` when the process ended meanwhile."""
        await self.open()
        number = next(self._numbers)
        reply = await self._reply(number, {"number": number, "item": item}, f"on {name}")
        value: Json = reply["value"]
        return value

    async def _reply(self, number: int, message: Json, doing: str) -> Json:
        """Send a message and wait for the reply of that number."""
        sent = encoded(message)
        if self._channel is None:
            raise Died("ended")
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(sent)
            reply = await self._waiting[number]
        finally:
            del self._waiting[number]
        if "fault" in reply:
            raise error_of(reply["fault"], f"{self._opening['reference']}, {doing},")
        return reply

    async def close(self) -> None:
        """Have the worker close what it holds, and see it end."""
        if self._channel is None or self._process is None:
            return
        try:
            async with asyncio.timeout(2 * GRACE_S):  # after half of it the worker ends by itself
                await self._reply(ENDED, {"end": True}, "closing")
                await self._gone.wait()
        except (Died, TimeoutError) as died:
            how = str(died) or "did not end, and was killed,"
            raise CrewError(
                f"{self._opening['reference']}: a worker {how} before all was closed."
            ) from None
        finally:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


def _ending(code: int) -> str:
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
