"""What a program may use, and what came of it."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from coa.errors import CoaError, ConfigError

Ended = Literal["ok", "error", "timeout", "memory", "output", "files", "killed"]
"""How a program ended. `error`: an exception or a status other than 0. `timeout`: of the clock or
of the CPU. `files`: it made too many. `killed`: by a signal, so also by a forbidden system call."""


class SandboxError(CoaError, RuntimeError):
    """Programs cannot be run here, or the sandbox (not a program in it) failed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use."""

    seconds: float = 10.0
    """By the clock."""
    cpu_seconds: int = 10
    """Of each process; a session is limited by the clock alone."""
    memory_mb: int = 1024
    """Of address space in each process, and of memory in all of them together."""
    output_bytes: int = 65536
    """On standard output, and as many on standard error."""
    file_mb: int = 64
    """All files together: they are in memory."""
    processes: int = 16
    """Processes and threads together."""
    open_files: int = 64
    files: int = 4096
    """How many there may be."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            fits = isinstance(value, (int, float) if each.name == "seconds" else int)
            if not fits or isinstance(value, bool) or not value > 0:
                kind = "a number" if each.name == "seconds" else "a whole number"
                raise ConfigError(f"limits.{each.name} is {value!r}, expected {kind} above 0.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program wrote and how it ended."""

    stdout: str
    stderr: str
    ended: Ended
    exit: int | None
    """The status, or minus the number of the signal that ended it."""
    seconds: float


_CHUNK = 65536


class Exchange:
    """The streams of one program. Use it as a context: leaving closes what is open."""

    def __init__(self, program: str, stdin: str, limit: int, flooded: Callable[[], None]) -> None:
        self._limit, self._flooded = limit, flooded
        self.overflow = False
        self._kept: dict[int, bytearray] = {}
        self._open: list[int] = []
        self.passed: list[int] = []
        """For the program: its source, and its three streams."""
        try:
            self.passed += [_holding(program), _holding(stdin)]
            self._ends = [self._pipe(), self._pipe()]
        except BaseException:
            self.close()
            raise

    def _pipe(self) -> int:
        reading, writing = os.pipe()
        self._open.append(reading)
        self.passed.append(writing)
        os.set_blocking(reading, False)
        self._kept[reading] = bytearray()
        return reading

    def __enter__(self) -> Exchange:
        loop = asyncio.get_running_loop()
        for end in self._ends:
            loop.add_reader(end, self._read, end)
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
                self._flooded()
        return True

    def drain(self) -> tuple[str, str]:
        """All that was written, after the program's end (standard output, standard error)."""
        self._flooded = lambda: None  # there is nothing left to end
        for end in self._ends:
            while self._read(end) and not self.overflow:
                pass
        out, err = (bytes(self._kept[end]).decode("utf-8", "replace") for end in self._ends)
        return out, err

    def close(self) -> None:
        self.handed_over()
        while self._open:
            end = self._open.pop()
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
