"""Locks that the operating system drops when the process that holds them dies, however it dies."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO

from coa.errors import UsageError

LOCK = ".lock"


def lock(path: Path, busy: Callable[[str], None]) -> IO[str]:
    """Lock a file until it is closed or this process dies, however it dies.

    When another process has it, `busy` is given that process's id; if it returns, we wait.
    """
    file = path.open("a+", encoding="utf-8")
    try:
        _flock(file, busy)
    except BaseException:
        file.close()
        raise
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _flock(file: IO[str], busy: Callable[[str], None]) -> None:
    try:
        import fcntl
    except ImportError:  # not a POSIX system: nothing can be locked, and the renames still hold
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        busy(file.read().strip() or "unknown")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as exc:
        warnings.warn(
            f"{file.name}: this file system cannot lock ({exc.strerror}); start only one process "
            "on this directory.",
            stacklevel=4,
        )


def lock_output(path: Path) -> IO[str]:
    """Lock a run directory, or a growing file by a file beside it; in use is an error."""

    def refuse(holder: str) -> None:
        raise UsageError(
            f"{path}: in use by another process (pid {holder}). Wait for it, or write elsewhere."
        )

    beside = path / LOCK if path.is_dir() else path.with_name(f".{path.name}{LOCK}")
    beside.parent.mkdir(parents=True, exist_ok=True)
    return lock(beside, refuse)
