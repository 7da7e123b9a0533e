"""Worker processes: pieces of work that are spread over processes, which may hang or die.

    async with Workers("coa.recording.record:recorder", settings, workers=4) as pool:
        result = await pool.do(item)

The reference names a function of the settings that gives an asynchronous context; what that gives
does one item: JSON in, JSON out. Every worker opens it once.

`WorkerPool` hands items to processes. With `WorkerLimits` it is for what strangers wrote: a process
has one item at a time, and an item that takes too long or too much memory costs that process alone.
`Workers` is for work of our own. With one worker (or none) all of it happens in this process, with
the same results, so that small jobs need not wait for a process to start. Of a worker that dies the
items are done once more, one at a time in a process that does nothing else, so that only the deadly
one is blamed.

A worker is a fresh interpreter, never a fork, with the search path of this one: it needs nothing of
the program that starts it (a script without a guard, a notebook). When that is killed, the worker
closes what it holds, and ends. The sandbox has processes of its own: behind walls no pipe but one
leads out, and each program needs a fork of a prepared interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import io
import itertools
import json
import os
import queue
import resource
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, Any, Self

from coa.errors import CoaError, ConfigError
from coa.io.machine import cores, signal_name
from coa.io.plugins import load_object
from coa.io.runs import Json

Work = Callable[[Json], Awaitable[Json]]
AT_ONCE = 8
"""Items that a worker of `Workers` has at a time, so that a slow one holds up no other."""
_ITEMS_EACH = 200
"""Fewer items than this do not repay the start of a worker."""
_GRACE_S = 5.0
"""For closing what a worker holds. Work that hangs then ends with the process."""
_OPENED, _ENDED = -1, -2
"""Numbers of the replies that belong to no item."""
_PLAIN = (str, int, float, type(None))


class WorkerError(CoaError, RuntimeError):
    """Work that failed in a way nobody planned for, or that ended the process it was done in."""


class WorkerDied(Exception):
    """The process that had an item ended; the message says how."""

    def __init__(self, code: int, late: bool = False) -> None:
        self.signal = signal_name(-code) if code < 0 else ""
        self.late = late
        """It ended because the time for the item was over."""
        super().__init__(f"was killed by {self.signal}" if code < 0 else f"ended with code {code}")


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one item may take. What the worker prints is not shown."""

    seconds: float
    memory_mb: int = 4096
    """Of address space."""


def worker_count(items: int) -> int:
    """Workers worth starting for so many items: at most as many as there are cores."""
    return max(1, min(cores(), items // _ITEMS_EACH))


def shortened(text: str, most: int = 80) -> str:
    """The text in one line, cut where it is longer than that."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


# ------------------------------------------------------------------------------------------------
# Messages between processes, and errors as messages.
# ------------------------------------------------------------------------------------------------


class _Channel:
    """Sends messages, and calls `heard` with each that comes, in a thread; with None at the end."""

    def __init__(
        self, inbox: IO[bytes], outbox: IO[bytes], heard: Callable[[Json | None], None]
    ) -> None:
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
                _write(outbox, message)

    def _read(self, inbox: IO[bytes], heard: Callable[[Json | None], None]) -> None:
        with inbox:
            while len(head := inbox.read(8)) == 8:
                (size,) = struct.unpack(">Q", head)
                body = inbox.read(size)
                if len(body) < size:  # the writer was killed
                    break
                heard(json.loads(body))
        heard(None)


def _write(outbox: IO[bytes], message: bytes) -> None:
    outbox.write(struct.pack(">Q", len(message)) + message)
    outbox.flush()


def _encoded(message: Json) -> bytes:
    # ASCII, so that halves of characters pass, too; strangers' texts hold such things.
    return json.dumps(message).encode("ascii")


def _fault_of(error: BaseException) -> Json:
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


def _error_of(fault: Json, what: str) -> CoaError:
    """The error that was raised elsewhere, of the same class; its traceback there is a note.

    It is made as pickle makes it; of the nearest base where it cannot be made here.
    """
    said = fault["said"]
    error = CoaError(said) if fault["classes"] else WorkerError(f"{what} failed: {said}")
    for reference in fault["classes"]:
        with contextlib.suppress(Exception):
            made: CoaError = load_object(reference)(*fault["arguments"])
            if str(made) == said:
                vars(made).update(fault["fields"])
                error = made
                break
    error.add_note(fault["traceback"])
    return error


# ------------------------------------------------------------------------------------------------
# The life of a worker process: open the work, answer until told to end, close the work.
#
# The first message names the work and its settings; then come items with numbers, which are
# answered in whatever order they are done; then `end`, or the end of the pipe when the starter
# was killed.
# ------------------------------------------------------------------------------------------------


def serve() -> None:
    # The channel has descriptors to itself: work may read stdin and print, and disturbs nothing.
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    asyncio.run(_live(inbox, outbox))


def _be_silent() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


async def _live(inbox: IO[bytes], outbox: IO[bytes]) -> None:
    loop = asyncio.get_running_loop()
    messages: asyncio.Queue[Json] = asyncio.Queue()

    def heard(message: Json | None) -> None:
        if message is None:  # the starter is gone, and with it whoever reads what is printed here
            _be_silent()
            message = {"end": True}
        if "end" in message:
            last = threading.Timer(_GRACE_S, os._exit, (1,))
            last.daemon = True
            last.start()
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends already
            loop.call_soon_threadsafe(messages.put_nowait, message)

    channel = _Channel(inbox, outbox, heard)
    number = _OPENED
    try:
        if "end" not in (opening := await messages.get()):
            seconds = _limit(opening["limits"])
            async with _open_work(opening) as work:
                _write(outbox, _encoded({"number": number}))  # now: an item may end the process
                number = _ENDED
                await _answer_all(work, messages, channel, seconds)
        channel.send(_encoded({"number": _ENDED}))
    except Exception as error:
        channel.send(_encoded({"number": number, "fault": _fault_of(error)}))
    channel.finish(_GRACE_S)


def _limit(limits: Json | None) -> float:
    """Set the limits of this process; returns the seconds for an item, 0 where there is none."""
    if limits is None:
        return 0.0
    _be_silent()
    # A thread of the channel that ends without memory leaves us deaf or mute, and somebody waits.
    threading.excepthook = lambda _: os._exit(1)
    with contextlib.suppress(OSError, ValueError):  # a lower one is set already
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (limits["memory_mb"] << 20,) * 2)
    return float(limits["seconds"])


async def _answer_all(
    work: Work, messages: asyncio.Queue[Json], channel: _Channel, seconds: float
) -> None:
    running: set[asyncio.Task[None]] = set()

    async def reply(message: Json) -> None:
        try:
            if seconds:  # it ends the process even when something holds the interpreter
                faulthandler.dump_traceback_later(seconds, exit=True)
            answer = await _answered(work, message)
        except asyncio.CancelledError as error:  # work may do that to itself, and somebody waits
            answer = _encoded({"number": message["number"], "fault": _fault_of(error)})
        except Exception:  # there is no memory for the watch, or for saying what is wrong
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()
        channel.send(answer)

    while "end" not in (message := await messages.get()):
        task = asyncio.create_task(reply(message))
        running.add(task)
        task.add_done_callback(running.discard)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _open_work(opening: Json) -> AbstractAsyncContextManager[Work]:
    work: AbstractAsyncContextManager[Work] = load_object(opening["reference"])(opening["settings"])
    return work


async def _answered(work: Work, message: Json) -> bytes:
    number = message["number"]
    try:
        return _encoded({"number": number, "value": await work(message["item"])})
    except (Exception, SystemExit) as error:
        return _encoded({"number": number, "fault": _fault_of(error)})


# ------------------------------------------------------------------------------------------------
# Worker processes, seen from where they were started.
# ------------------------------------------------------------------------------------------------


_START = "import sys; sys.path[:] = sys.argv[1:]; from coa.io.workers import serve; serve()"
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class _WorkerProcess:
    """One process, from its start to its end. `shown` has the lines that workers have printed."""

    def __init__(self, opening: Json, shown: dict[str, object]) -> None:
        self.is_alive = True
        self._reference, self._shown = opening["reference"], shown
        self._seconds = (opening["limits"] or {}).get("seconds", 0.0)
        self._since = 0.0
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[Future[Any], str]] = {}
        self._lock = threading.Lock()
        pipe = subprocess.PIPE
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, *sys.path],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=os.environ | _ONE_THREAD,
            start_new_session=True,  # Ctrl-C in a terminal is for us; we then close the worker
        )
        assert process.stdin and process.stdout and process.stderr
        self._relay = threading.Thread(target=self._show, args=(process.stderr,), daemon=True)
        self._relay.start()
        self.opened: Future[Any] = Future()
        with self._lock:  # what is heard waits until there is a channel
            self._channel = _Channel(process.stdout, process.stdin, self._heard)
        self._ask(_OPENED, opening, "opening", self.opened)

    def _show(self, stderr: IO[bytes]) -> None:
        """Show what the worker says, but for what another one has said already."""
        for line in io.TextIOWrapper(stderr, encoding="utf-8", errors="replace"):
            if self._shown.setdefault(line, self) is self:
                print(line, end="", file=sys.stderr, flush=True)

    def send(self, item: Json, name: str, result: Future[Any]) -> None:
        """Have an item done; `result` becomes what the work makes of it, or `WorkerDied`."""
        number = next(self._numbers)
        self._ask(number, {"number": number, "item": item}, f"on {name}", result)

    def _ask(self, number: int, message: Json, doing: str, result: Future[Any]) -> None:
        sent = _encoded(message)
        with self._lock:
            self._waiting[number] = result, doing
            gone = self._process.returncode is not None
            self._since = time.monotonic()
        self._channel.send(sent)
        if gone:
            self._heard(None)

    def _heard(self, message: Json | None) -> None:
        if message is None:
            self._process.wait()
            self._relay.join(1.0)
            with self._lock:
                self.is_alive = False
                self._channel.finish()
                left, self._waiting = self._waiting, {}
            error = self._ending()
            for result, _ in left.values():
                _settle(result, error)
            return
        with self._lock:
            result, doing = self._waiting.pop(message["number"], (Future(), ""))
            self._since = time.monotonic()
        fault = message.get("fault")
        what = f"{self._reference}, {doing},"
        _settle(result, _error_of(fault, what) if fault else message.get("value"))

    def _ending(self) -> Exception:
        # About: the clocks of the two processes start a moment apart.
        late = 0 < 0.8 * self._seconds <= time.monotonic() - self._since
        died = WorkerDied(self._process.returncode, late)
        if not self.opened.done():
            return WorkerError(f"{self._reference}: a worker {died} before it was ready.")
        refused = self.opened.exception()
        return refused if isinstance(refused, Exception) else died

    def close(self) -> None:
        """Have the worker close what it holds, and see it end."""
        if not self.is_alive:
            return
        ended: Future[Any] = Future()
        try:
            self._ask(_ENDED, {"end": True}, "closing", ended)
            ended.result(2 * _GRACE_S)  # after half of it the worker ends by itself
            self._process.wait(_GRACE_S)
        except (WorkerDied, TimeoutError, subprocess.TimeoutExpired) as error:
            how = str(error) if isinstance(error, WorkerDied) else "did not end, and was killed,"
            raise WorkerError(f"{self._reference}: a worker {how} before all was closed.") from None
        finally:
            self.kill()

    def kill(self) -> None:
        self.is_alive = False
        self._process.kill()
        self._process.wait()


def _settle(result: Future[Any], found: Any) -> None:
    if result.set_running_or_notify_cancel():  # else nobody waits for it any more
        (result.set_exception if isinstance(found, Exception) else result.set_result)(found)


class WorkerPool:
    """Processes that do items: each has up to `at_once`, one where there are limits.

    A process starts when it is needed, and another takes its place when it dies. What a died one
    had fails with `WorkerDied`. It can be used from any thread and any event loop.
    """

    def __init__(
        self,
        reference: str,
        settings: Json,
        workers: int,
        at_once: int = 1,
        limits: WorkerLimits | None = None,
    ) -> None:
        self._opening: Json = {"reference": reference, "settings": settings}
        self._opening["limits"] = asdict(limits) if limits else None
        self._shown: dict[str, object] = {}
        self._members: list[_WorkerProcess | None] = [None] * workers
        self._free = deque(list(range(workers)) * (1 if limits else at_once))
        self._waiting: deque[tuple[Json, str, Future[Json]]] = deque()
        self._lock = threading.RLock()
        self._killed = False

    def start(self, workers: int = 1) -> list[Future[Any]]:
        """Start so many now; each is done when its work is open, or says why it is not."""
        return [self._member(place).opened for place in range(workers)]

    def _member(self, place: int) -> _WorkerProcess:
        member = self._members[place]
        if member is None or not member.is_alive:
            member = self._members[place] = _WorkerProcess(self._opening, self._shown)
        return member

    def submit(self, item: Json, name: str = "an item") -> Future[Json]:
        """What the work makes of an item. Cancelling it ends its process where there are limits."""
        result: Future[Json] = Future()
        with self._lock:
            if self._killed:
                result.set_exception(WorkerError(f"{name}: the workers were ended before it."))
                return result
            self._waiting.append((item, name, result))
            self._hand_out()
        return result

    def _hand_out(self) -> None:
        while self._waiting and self._free:
            item, name, result = self._waiting.popleft()
            if not result.cancelled():
                place = self._free.popleft()
                member = self._member(place)
                result.add_done_callback(partial(self._done, place, member))
                member.send(item, name, result)

    def _done(self, place: int, member: _WorkerProcess, result: Future[Json]) -> None:
        if result.cancelled() and self._opening["limits"]:
            # In a thread: who cancels one item may be about to cancel those that wait as well, and
            # each would start a process in this place only to have it killed.
            threading.Thread(target=self._replace, args=(place, member), daemon=True).start()
        else:
            self._give_back(place)

    def _replace(self, place: int, member: _WorkerProcess) -> None:
        member.kill()
        self._give_back(place)

    def _give_back(self, place: int) -> None:
        with self._lock:
            self._free.appendleft(place)
            self._hand_out()

    def kill(self) -> None:
        """End all, and take no more items."""
        with self._lock:
            self._killed = True
            while self._waiting:
                self._waiting.popleft()[-1].cancel()
            for member in filter(None, self._members):
                member.kill()

    async def close(self) -> None:
        """Have all close what they hold; raises the first error of those that could not."""
        closing = [asyncio.to_thread(each.close) for each in filter(None, self._members)]
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if error is not None:
                raise error


class Workers:
    """Work of our own, in this process or spread over others; use it inside `async with`."""

    def __init__(
        self, reference: str, settings: Json, workers: int = 1, at_once: int = AT_ONCE
    ) -> None:
        if workers < 0 or at_once < 1:
            raise ConfigError(f"workers {workers!r}, {at_once!r} at once: expected 1 or more.")
        self._reference, self._settings, self._workers = reference, settings, workers
        self._pool = WorkerPool(reference, settings, workers, at_once)
        self._alone = WorkerPool(reference, settings, 1)
        """Does what was in hand when a worker died, one item at a time."""
        self._here = AsyncExitStack()
        self._closed = False

    async def __aenter__(self) -> Self:
        if self._workers <= 1:
            opening = {"reference": self._reference, "settings": self._settings}
            self._work = await self._here.enter_async_context(_open_work(opening))
            return self
        try:
            await asyncio.gather(*map(asyncio.wrap_future, self._pool.start(self._workers)))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = await self._close()
        if failed and kind is None:
            raise failed[0]

    async def _close(self) -> list[Exception]:
        self._closed = True
        failed = []
        for close in (self._here.aclose, self._pool.close, self._alone.close):
            try:
                await close()
            except Exception as error:
                failed.append(error)
        return failed

    async def do(self, item: Json, name: str = "") -> Json:
        """What the work makes of an item. `name` stands for the item in messages.

        An item that a worker has begun is finished there, also when nobody waits for it any more.
        """
        name = name or shortened(json.dumps(item))
        if self._workers <= 1:
            return await self._do_here(item, name)
        try:
            return await asyncio.wrap_future(self._pool.submit(item, name))
        except WorkerDied as died:
            first = died
        if self._closed:
            raise WorkerError(f"{name}: the workers were closed before it was done.")
        try:
            return await asyncio.wrap_future(self._alone.submit(item, name))
        except WorkerDied as second:
            raise WorkerError(
                f"{self._reference}, on {name}, ended two worker processes: one {first}, another "
                f"that did nothing else {second}; for want of memory perhaps."
            ) from None

    async def _do_here(self, item: Json, name: str) -> Json:
        # By way of JSON, as between processes: what works here works there.
        message = json.loads(_encoded({"number": 0, "item": item}))
        reply = json.loads(await _answered(self._work, message))
        if "fault" in reply:
            raise _error_of(reply["fault"], f"{self._reference}, on {name},")
        value: Json = reply["value"]
        return value
