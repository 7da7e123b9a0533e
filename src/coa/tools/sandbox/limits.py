"""What a program may use, and what came of it."""

from __future__ import annotations

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
