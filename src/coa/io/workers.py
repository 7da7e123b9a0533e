"""Crew: independent pieces of work, spread over processes.

    async with Crew("coa.recording.record:recorder", settings, workers=4) as crew:
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
import contextlib
import io
import itertools
import json
import os
import queue
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import IO, Protocol, Self

from coa.errors import CoaError, ConfigError
from coa.io.machine import cores, signal_name
from coa.io.runs import Json
from coa.io.settings import load_object

Heard = Callable[[Json | None], None]
_PLAIN = (str, int, float, type(None))


class CrewError(CoaError, RuntimeError):
    """Work that failed in a way nobody planned for, or that ended the process it was done in."""


class Channel:
    """Sends messages, and calls `heard` with each that comes, in a thread; with None at the end."""

    def __init__(self, inbox: IO[bytes], outbox: IO[bytes], heard: Heard) -> None:
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, args=(outbox,), daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, args=(inbox, heard), daemon=True).start()

    def send(self, message: bytes) -> None:
        self._unsent.put(message)

    def finish(self, wait_s: float = 0.0) -> None:
        """Close our end when all is written; wait for that so long."""
        self._unsent.put(None)
        self._writer.join(wait_s)

    def _write(self, outbox: IO[bytes]) -> None:
        with contextlib.suppress(OSError), outbox:  # nobody reads any more
            while (message := self._unsent.get()) is not None:
                outbox.write(struct.pack(">Q", len(message)))
                outbox.write(message)
                outbox.flush()

    def _read(self, inbox: IO[bytes], heard: Heard) -> None:
        with inbox:
            while len(head := inbox.read(8)) == 8:
                (size,) = struct.unpack(">Q", head)
                body = inbox.read(size)
                if len(body) < size:  # the writer was killed
                    break
                heard(decoded(body))
        heard(None)


def encoded(message: Json) -> bytes:
    # ASCII, so that halves of characters pass, too; strangers' texts hold such things.
    return json.dumps(message).encode("ascii")


def decoded(message: bytes) -> Json:
    record: Json = json.loads(message)
    return record


def fault_of(error: BaseException) -> Json:
    """An exception as JSON: one of ours can be made again from it, another can be told."""
    ours = [each for each in type(error).__mro__ if issubclass(each, CoaError)]
    said = str(error)
    if not ours:
        said = f"{type(error).__name__}: {shortened(said, 300)}".removesuffix(": ")
    return {
        "classes": [f"{each.__module__}:{each.__qualname__}" for each in ours],
        "arguments": [each for each in error.__reduce__()[1] if isinstance(each, _PLAIN)],
        "fields": {key: value for key, value in vars(error).items() if isinstance(value, _PLAIN)},
        "said": said,
        "traceback": "".join(traceback.format_exception(error)),
    }


def error_of(fault: Json, what: str) -> CoaError:
    """The error that was raised elsewhere, of the same class; its traceback there is a note."""
    error = _again(fault) or CrewError(f"{what} failed: {fault['said']}")
    error.add_note(fault["traceback"])
    return error


def _again(fault: Json) -> CoaError | None:
    """One of our errors, made as pickle makes it; of its base where it cannot be made here."""
    for reference in fault["classes"]:
        with contextlib.suppress(Exception):
            error: CoaError = load_object(reference)(*fault["arguments"])
            if str(error) == fault["said"]:
                vars(error).update(fault["fields"])
                return error
    return CoaError(fault["said"]) if fault["classes"] else None


def shortened(text: str, most: int = 80) -> str:
    """The text in one line, cut where it is longer than that."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


# ------------------------------------------------------------------------------------------------
# The life of a worker process: open the work, answer until told to end, close the work.
#
# The first message names the work and its settings; then come items with numbers, which are
# answered in whatever order they are done; then `end`, or the end of the pipe when the starter
# was killed.
# ------------------------------------------------------------------------------------------------


Work = Callable[[Json], Awaitable[Json]]
GRACE_S = 5.0
"""For closing what a worker holds. Work that hangs then ends with the process."""
OPENED, ENDED = -1, -2
"""Numbers of the replies that belong to no item."""


def serve() -> None:
    # The channel has descriptors to itself: work may read stdin and print, and disturbs nothing.
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    asyncio.run(_live(inbox, outbox))


async def _live(inbox: IO[bytes], outbox: IO[bytes]) -> None:
    loop = asyncio.get_running_loop()
    messages: asyncio.Queue[Json] = asyncio.Queue()

    def heard(message: Json | None) -> None:
        if message is None:  # the starter is gone, and with it whoever reads what is printed here
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            message = {"end": True}
        if "end" in message:
            last = threading.Timer(GRACE_S, os._exit, (1,))
            last.daemon = True
            last.start()
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends already
            loop.call_soon_threadsafe(messages.put_nowait, message)

    channel = Channel(inbox, outbox, heard)
    number = OPENED
    try:
        if "end" not in (opening := await messages.get()):
            async with open_work(opening) as work:
                channel.send(encoded({"number": number}))
                number = ENDED
                await _answer_all(work, messages, channel)
        channel.send(encoded({"number": ENDED}))
    except Exception as error:
        channel.send(encoded({"number": number, "fault": fault_of(error)}))
    channel.finish(GRACE_S)


async def _answer_all(work: Work, messages: asyncio.Queue[Json], channel: Channel) -> None:
    running: set[asyncio.Task[None]] = set()

    async def reply(message: Json) -> None:
        try:
            answer = await answered(work, message)
        except asyncio.CancelledError as error:  # work may do that to itself, and somebody waits
            answer = encoded({"number": message["number"], "fault": fault_of(error)})
        channel.send(answer)

    while "end" not in (message := await messages.get()):
        task = asyncio.create_task(reply(message))
        running.add(task)
        task.add_done_callback(running.discard)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def open_work(opening: Json) -> AbstractAsyncContextManager[Work]:
    work: AbstractAsyncContextManager[Work] = load_object(opening["reference"])(opening["settings"])
    return work


async def answered(work: Work, message: Json) -> bytes:
    number = message["number"]
    try:
        return encoded({"number": number, "value": await work(message["item"])})
    except (Exception, SystemExit) as error:
        return encoded({"number": number, "fault": fault_of(error)})


# ------------------------------------------------------------------------------------------------
# A worker process, seen from where it was started.
# ------------------------------------------------------------------------------------------------


_START = "import sys; sys.path[:] = sys.argv[1:]; from coa.io.workers import serve; serve()"
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
