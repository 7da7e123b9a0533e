"""Whole files: each is written beside its place and renamed, so that no reader sees a part."""

from __future__ import annotations

import glob
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PART = ".coa-part"
"""How the name of a file ends while it is written: no file of a user's is taken for one."""


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write beside `path`, which takes its place at the end, or never when that fails.

    Who may read it: those who could read the file it replaces, or whoever may read a new file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = _permissions(path) if path.is_file() else None
    beside, descriptor = _new_beside(path, 0o666 if mode is None else mode)
    try:
        with naming(path), os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:  # the umask may have taken some of it
            beside.chmod(mode)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def open_to_others(path: Path) -> None:
    """Let those read a file who may read a new one: some libraries write it for its owner alone."""
    # A new file is asked, since to ask for the umask is to change it, for all threads.
    probe, descriptor = _new_beside(path, 0o666)
    try:
        os.close(descriptor)
        path.chmod(_permissions(probe))
    finally:
        probe.unlink()


def sweep(path: Path) -> None:
    """Remove what a killed process left of a file it wrote beside: of this one, or of all in here.

    Only for whoever owns the place: what another process is writing just now looks the same.
    """
    folder, name = (path, "*") if path.is_dir() else (path.parent, glob.escape(path.name))
    for left in folder.glob(f".{name}.{'[0-9a-f]' * 8}{PART}"):
        left.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let a failure (a full disk) say of which file; the system does so only for names."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _new_beside(path: Path, mode: int) -> tuple[Path, int]:
    """A new file and its descriptor; the system takes the umask from `mode`."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
    return beside, os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)


def _permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode) & 0o777
