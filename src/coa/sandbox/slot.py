"""A slot: one zygote behind its walls, seen from the host. It runs one job at a time.

`launch` hands a job over, `ended` waits for its end, `settled` for its traces to be gone. Whatever
is unclear is solved by `close`, which ends every process in there at once; `start` begins anew.
`Exchange` holds the streams of a program: descriptors to pass on, and capped reading.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from coa.sandbox.walls import INSIDE, Limits, SandboxError, Walls, give_back_uid, take_uid

_START_S, _SETTLE_S, _GRACE_S = 60.0, 5.0, 10.0
_WATCH_S = 0.02
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20 if hasattr(os, "sysconf") else 4096 / 2**20
_CHUNK = 65536
Ended = Literal["ok", "error", "timeout", "memory", "output", "files", "killed"]
"""How a program ended. `error`: an exception or a status other than 0. `timeout`: of the clock or
of the CPU. `files`: it made too many. `killed`: by a signal, so also by a forbidden system call."""
_REASONS: dict[str, Ended] = {"t": "timeout", "f": "files", "m": "memory"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program wrote and how it ended."""

    stdout: str
    stderr: str
    ended: Ended
    exit: int | None
    """The status, or minus the number of the signal that ended it."""
    seconds: float
    reply: str = ""
    """What was written where calls are answered, for a job that was asked something."""


class Ending(NamedTuple):
    """How a job ended: x exited, t time, f files, k by request, m memory; and its status."""

    why: str
    status: int


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    control: socket.socket
    pid: int
    """Of the zygote, as this side sees it."""
    handle: int
    """The kernel's descriptor of that process: a pid may be used again, this may not."""


class Slot:
    """One zygote and the walls around it."""

    def __init__(self, walls: Walls, limits: Limits, preload: bool = True) -> None:
        self._walls, self.limits, self._preload = walls, limits, preload
        self._running: _Running | None = None
        self._busy = False
        self._word: asyncio.Task[bytes] | None = None
        self._uid: int | None = None

    @property
    def warm(self) -> bool:
        return self._running is not None and not self._busy

    async def start(self) -> None:
        """Start the zygote and wait until it is ready."""
        await self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with tempfile.TemporaryFile() as complaints:
            try:
                with theirs:
                    process = self._spawn(theirs.fileno(), complaints.fileno())
            except (OSError, ValueError, subprocess.SubprocessError, SandboxError) as error:
                ours.close()
                raise SandboxError(f"{self._walls.way}: {error}") from error
            try:
                pid = await asyncio.wait_for(_first_word(ours), _START_S)
                handle = os.pidfd_open(pid)
            except BaseException as error:
                ours.close()
                # The group: bubblewrap's inner process would wait for the outer one for ever.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, (OSError, TimeoutError)):
                    raise
                complaints.seek(0)
                said = complaints.read(1 << 16).decode("utf-8", "replace").strip().splitlines()
                reason = said[-1] if said else f"no sign of life within {_START_S:g} s"
                raise SandboxError(f"{self._walls.way}: {reason}") from None
        self._running, self._busy = _Running(process, ours, pid, handle), False

    def _spawn(self, control: int, complaints: int) -> subprocess.Popen[bytes]:
        uid = self._uid = take_uid() if self._walls.drops else None
        settings = self._walls.settings(self.limits, self._preload)
        settings |= {"control": control, "uid": uid if self._walls.drops == "inside" else None}
        outside = uid if self._walls.drops == "outside" else None
        # The loop's own thread starts it: it is to die with the thread that started it.
        return subprocess.Popen(
            [*self._walls.command(self.limits), json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            pass_fds=[control],
            env=self._walls.environment(),
            cwd="/",
            start_new_session=True,
            user=outside,
            group=outside,
            extra_groups=None if outside is None else [],
        )

    async def run(self, kind: bytes, program: str, stdin: str = "", ask: str = "") -> Outcome:
        """Run a program as a job of this kind (J, E or A) to its end."""
        with Exchange(program, stdin, self, ask=ask) as exchange:
            self.launch(kind, exchange.passed)
            exchange.handed_over()
            return exchange.outcome(await self.ended(self.limits.seconds))

    def launch(self, kind: bytes, descriptors: Sequence[int]) -> None:
        """Hand over a job: J or E (echo) with four descriptors, A (answers calls) or T (checks who
        does) with six, S with the socket of a session."""
        assert self._running is not None and not self._busy
        self._busy = True
        try:
            socket.send_fds(self._running.control, [kind], list(descriptors))
        except OSError as error:
            raise SandboxError(f"the sandbox was gone: {error}") from error

    def tell(self, word: bytes) -> None:
        """K ends the job, F freezes it, C lets it go on."""
        if self._running is not None:
            with contextlib.suppress(OSError):
                self._running.control.send(word)

    async def ended(self, limit_s: float | None) -> Ending:
        """Wait for the end of the job, and end it when it takes too much memory.

        The zygote keeps the time; `limit_s` is when to wonder whether it is still there.
        """
        started, heavy = time.monotonic(), False
        self._word = asyncio.ensure_future(self._receive())
        try:
            while not (await asyncio.wait({self._word}, timeout=_WATCH_S))[0]:
                late = limit_s is not None and time.monotonic() - started > limit_s + _GRACE_S
                # When it was this process that hung, the answer is there: look once more.
                if late and not (await asyncio.wait({self._word}, timeout=1.0))[0]:
                    raise SandboxError("the sandbox hung and was replaced; run the program again.")
                if not heavy and self.memory_mb() > self.limits.memory_mb:
                    heavy = True
                    self.tell(b"K")
            if self._word.cancelled():
                raise SandboxError("the sandbox was closed while a program ran.")
            message = self._word.result()
        finally:
            await self._stop_receiving()
        if message[:1] != b"D" or len(message) != 6:
            raise SandboxError("the sandbox ended during a program and was replaced; run it again.")
        why = "m" if heavy else message[1:2].decode("ascii", "replace")
        return Ending(why, struct.unpack("!i", message[2:])[0])

    async def _receive(self) -> bytes:
        assert self._running is not None
        try:
            return await asyncio.get_running_loop().sock_recv(self._running.control, 64)
        except OSError:
            return b""

    async def _stop_receiving(self) -> None:
        """The loop must have let go of the socket before it is closed."""
        if self._word is not None and not self._word.done():
            self._word.cancel()
            await asyncio.wait({self._word})

    def memory_mb(self) -> float:
        """Memory of all processes of the job beyond what they share with the zygote.

        One process alone is held by the limit on its address space, and not looked at.
        """
        if self._running is None or not self._walls.alone:
            return 0.0
        pids = _descendants(self._running.pid)
        if len(pids) < 2:
            return 0.0
        base = _resident_mb(self._running.pid)
        return sum(max(0.0, _resident_mb(pid) - base) for pid in pids)

    async def settled(self) -> bool:
        """Whether the traces of the last job are gone; if not, the slot has to start again."""
        try:
            self._busy = await asyncio.wait_for(self._receive(), _SETTLE_S) != b"I"
        except TimeoutError:
            return False
        return not self._busy

    async def close(self) -> None:
        """End everything in there, now."""
        running, self._running, self._busy = self._running, None, False
        if self._uid is not None:
            give_back_uid(self._uid)
            self._uid = None
        if running is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(running.handle, signal.SIGKILL)
        os.close(running.handle)
        try:
            await self._stop_receiving()
            # The process that we started waits for the zygote and ends after it, in milliseconds.
            for pause in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0):
                if running.process.poll() is not None:
                    break
                await asyncio.sleep(pause)
        finally:  # cancelled, too
            running.control.close()
            running.process.kill()
            running.process.wait()


class PlainSlot(Slot):
    """A slot without walls: a subprocess per program, for whoever asked for it with `unsafe`.

    It keeps time, caps output and kills the process group, and that is all: a program has the
    rights of whoever started it.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._why = "x"

    @property
    def warm(self) -> bool:
        return True

    async def start(self) -> None:
        """Nothing waits: a process is started for each program."""

    def launch(self, kind: bytes, descriptors: Sequence[int]) -> None:
        self._why = "x"
        self._folder = tempfile.TemporaryDirectory(prefix="coa-unsafe-")
        start = (
            f"import sys; sys.path.insert(0, {str(INSIDE.parent)!r}); from inside.program import "
        )
        start += "main; del sys.path[0]; main(*sys.argv[1:])"
        command = [sys.executable, "-s", "-P", "-B", "-X", "utf8", "-c", start]
        self._process = subprocess.Popen(
            [*command, kind.decode(), *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=list(descriptors),
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
            cwd=self._folder.name,
            start_new_session=True,
        )
        if kind != b"S":
            self.tell(b"C")

    def tell(self, word: bytes) -> None:
        if self._clock is not None:
            self._clock.cancel()
        if word == b"K":
            self._stop("k")
        elif word == b"F":
            self._signal(signal.SIGSTOP)
        else:
            self._signal(signal.SIGCONT)
            loop = asyncio.get_running_loop()
            self._clock = loop.call_later(self.limits.seconds, self._stop, "t")

    def _stop(self, why: str) -> None:
        if self._process is not None and self._process.poll() is None:
            self._why = why
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def ended(self, limit_s: float | None) -> Ending:
        assert self._process is not None
        while (status := self._process.poll()) is None:
            await asyncio.sleep(0.002)
        return Ending(self._why, status)

    async def settled(self) -> bool:
        await self.close()
        return True

    async def close(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = self._clock = None


class Exchange:
    """The streams of one program. Use it as a context: leaving closes what is open.

    Output is read as it comes, so a program never blocks on a full pipe. What is beyond the limit
    is not kept; the first byte of it ends the program.
    """

    def __init__(
        self, program: str, stdin: str, slot: Slot, ends: Sequence[int] = (), ask: str = ""
    ) -> None:
        """`ends`: what a job of calls reads and writes; they are the program's now. `ask`: it reads
        this, and what it writes is kept."""
        self._slot, self._limit = slot, slot.limits.output_bytes
        self.overflow = False
        self._kept: dict[int, bytearray] = {}
        """What was read, by our ends of the pipes: standard output, standard error, replies."""
        self.passed: list[int] = list(ends)
        """For the program: its source, its three streams, and what it answers calls over."""
        try:
            self.passed[0:0] = [_holding(program), _holding(stdin), self._pipe(), self._pipe()]
            if ask:
                self.passed += [_holding(ask)]
                self.passed += [self._pipe()]
        except BaseException:
            self.close()
            raise

    def _pipe(self) -> int:
        """Where the program writes; what it writes is kept."""
        reading, writing = os.pipe()
        self._kept[reading] = bytearray()
        os.set_blocking(reading, False)
        return writing

    def __enter__(self) -> Exchange:
        loop = asyncio.get_running_loop()
        for end in self._kept:
            loop.add_reader(end, self._read, end)
        self._started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def handed_over(self) -> None:
        """The program has its ends; ours of them are closed, so that an end is an end."""
        while self.passed:
            os.close(self.passed.pop())

    def _read(self, end: int) -> bool:
        """Take what is there; whether there may be more."""
        try:
            chunk = os.read(end, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            asyncio.get_running_loop().remove_reader(end)
            return False
        kept = self._kept[end]
        kept += chunk[: self._limit - len(kept) + 1]
        if len(kept) > self._limit:
            del kept[self._limit :]
            if not self.overflow:
                self.overflow = True
                self._slot.tell(b"K")
        return True

    def outcome(self, ending: Ending) -> Outcome:
        """What the program wrote in all, and how it ended in one word; after its end."""
        seconds = time.monotonic() - self._started
        for end in self._kept:
            while self._read(end) and not self.overflow:
                pass
        texts = [bytes(kept).decode("utf-8", "replace") for kept in self._kept.values()]
        stdout, stderr, *reply = texts
        ended: Ended = "ok" if ending.status == 0 else "error"
        if self.overflow:
            ended = "output"
        elif ending.why in _REASONS:
            ended = _REASONS[ending.why]
        elif ending.status == -signal.SIGXCPU:
            ended = "timeout"
        elif ending.status < 0:
            ended = "killed"
        elif ending.status and "MemoryError" in stderr.rstrip().rpartition("\n")[2]:
            ended = "memory"
        return Outcome(stdout, stderr, ended, ending.status, seconds, *reply)

    def close(self) -> None:
        self.handed_over()
        while self._kept:
            end, _ = self._kept.popitem()
            try:
                asyncio.get_running_loop().remove_reader(end)
            finally:
                os.close(end)


def _holding(text: str) -> int:
    """A descriptor of a file in memory with this text, which nobody can change any more."""
    content = text.encode("utf-8", "replace")
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.seek(0)
            return os.dup(file.fileno())
    import fcntl

    file_in_memory = os.memfd_create("text", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file_in_memory, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(file_in_memory, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file_in_memory, fcntl.F_ADD_SEALS, seals)
    return file_in_memory


async def _first_word(control: socket.socket) -> int:
    """Wait until the zygote is ready; its pid, which the kernel translates to our namespace."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(control, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(control)
    message, attached, _, _ = control.recvmsg(16, socket.CMSG_SPACE(12))
    if message != b"I":
        raise OSError("it ended before it was ready")
    credentials = array.array("i", attached[0][2][:12])
    return credentials[0]


def _descendants(root: int) -> list[int]:
    """All processes below this one."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        try:
            for thread in Path(f"/proc/{waiting.pop()}/task").iterdir():
                children = [int(each) for each in (thread / "children").read_text().split()]
                found += children
                waiting += children
        except OSError:
            continue  # it ended while we looked
    return found


def _resident_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_MB
    except (OSError, IndexError):
        return 0.0
