"""Whole files: each is written beside its place and renamed, so that no reader sees a part.

What a user names as output may be a file of theirs: only what we wrote ourselves is replaced.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import secrets
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from coa.errors import UsageError

PART = ".coa-part"
"""How the name of a file ends while it is written: no file of a user's is taken for one."""


@contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """A file to write beside `path`, which takes its place at the end, or never when that fails.

    Who may read it: those who could read the file it replaces, or whoever may read a new file; its
    owner alone when it is `private`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o600 if private else _permissions(path) if path.is_file() else None
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


def make_private(path: Path) -> None:
    """Create a file that only its owner may read, or make it one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    path.chmod(0o600)


def is_private(path: Path) -> bool:
    """Whether nobody but its owner may read a file: then the same holds for what is made of it."""
    return not _permissions(path) & 0o077


def check_replaceable(
    path: Path, kind: str, again: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Refuse to write over what is not ours; nothing is written.

    Ours are JSON lines of which `again` makes the first as it stands; one that a person wrote has
    other fields. An empty file holds nothing that could be lost.
    """
    refuse_directory(path)
    if not path.is_file() or not path.stat().st_size:
        return
    record = first_record(path)
    try:
        ours = record is not None and again(record) == record
    except (AttributeError, KeyError, TypeError, ValueError):  # a record of another kind
        ours = False
    if not ours:
        raise foreign(path, f"a new file or {kind} that coa wrote")


def refuse_directory(path: Path) -> None:
    """Say what to do where a file is to be written and a directory is."""
    if path.is_dir():
        raise UsageError(f"{path}: is a directory, expected a file. Name one in it.")


def foreign(path: Path, expected: str) -> UsageError:
    """What to raise where a file of somebody else's would be replaced."""
    return UsageError(
        f"{path}: holds something else, expected {expected}. Write somewhere else, or delete it."
    )


def first_record(path: Path) -> dict[str, Any] | None:
    """The JSON object on the first line of a file; None where there is none."""
    with path.open("rb") as file:
        if file.read(1) != b"{":  # such a file may have no lines at all, and be large
            return None
        file.seek(0)
        line = file.readline()
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


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


# ------------------------------------------------------------------------------------------------
# Locks that the operating system drops when the process that holds them dies, however it dies.
# ------------------------------------------------------------------------------------------------


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


# ------------------------------------------------------------------------------------------------
# A whole folder or none: it is filled beside its place and renamed when it is complete.
# ------------------------------------------------------------------------------------------------


@contextmanager
def whole_folder(target: Path, *, replaces: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes `target` at the end, or never when that fails; the folder
    around it is for scratch files.

    What a killed process left is removed by the next one, and what it was about to replace is put
    back before anything is asked of the caller; a second one at the same time is refused.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100  # not through links, and "." has a name
    refuse_to_overwrite(target, replaces)
    part, folder, old = _places(target)
    part.mkdir(parents=True, exist_ok=True)
    with lock_output(part):
        try:
            _put_back(old, target)
            refuse_to_overwrite(target, replaces)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            yield folder
            sync_folder(folder)
            if target.exists():
                target.rename(old)
            folder.rename(target)
        finally:
            sweep_folder(target)


def sweep_folder(target: Path) -> None:
    """Remove what a killed process left beside a folder, and put back what it was replacing. Only
    for whoever owns the place."""
    part, _, old = _places(target)
    _put_back(old, target)
    shutil.rmtree(part, ignore_errors=True)


def _places(target: Path) -> tuple[Path, Path, Path]:
    """The folder beside a target, and in it the new one and the one that is replaced."""
    part = target.with_name(f".{target.name}.part")
    return part, part / target.name, part / f"{target.name}.replaced"


def _put_back(old: Path, target: Path) -> None:
    """Rename what was to be replaced back, or remove it when the new folder is in its place."""
    # What is removed is renamed first: half a folder must not look like one to put back.
    removed = old.with_name(f"{old.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    if old.exists() and target.exists():
        old.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    elif old.exists():
        old.rename(target)


def refuse_to_overwrite(target: Path, replaces: bool = False) -> None:
    """Only a new or an empty folder is written to, unless its files may be replaced."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: is a file, expected a new folder.")
    if not replaces and target.is_dir() and any(target.iterdir()):
        raise UsageError(f"{target}: exists and is not empty. Give a new folder with --out.")


def new_folder(folder: Path) -> None:
    """Make a folder, or take an empty one."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: is not empty. Name a folder that is new or empty.")
    folder.mkdir(parents=True, exist_ok=True)


def sync_folder(folder: Path) -> None:
    """fsync every file of a folder and the folder itself, so that a rename publishes it whole."""
    for path in [*(p for p in folder.rglob("*") if p.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ------------------------------------------------------------------------------------------------
# Names of files for what is read elsewhere: the directories of one machine mean nothing there.
# ------------------------------------------------------------------------------------------------


_BETWEEN = re.compile(r"([+|]|,\s*(?=[/~]))")
"""What stands between the parts of a reference, as in hf:MODEL+ADAPTER, or of a list of paths."""
_HOME = r"~(?:[A-Za-z_][\w.-]*)?/+"
_WHOLE = re.compile(rf"^([\w-]+:)?(?:{_HOME}|/[^/]+/+)(?!.*\s[/~])(?:.*/)?(?=[^/])")
"""Directories of a part that is one path and nothing else, so they may have spaces in their names;
hf: may stand before it."""
_IN_NAME = r"[^\s/'\",|+]"
_INSIDE = re.compile(
    rf"(?<![^\s:+=,|'\"(\[])(?:{_HOME}|/{_IN_NAME}+/+)(?:{_IN_NAME}+/+)*(?={_IN_NAME})"
)
"""Directories of a path inside a text, after what may stand before one."""


def portable(value: Any) -> Any:
    """The same without the directories of absolute paths, or of those in a home directory."""
    if isinstance(value, str):
        parts = (_WHOLE.sub(r"\1", part) for part in _BETWEEN.split(value))
        return "".join(_INSIDE.sub("", part) for part in parts)
    if isinstance(value, dict):
        return {key: portable(each) for key, each in value.items()}
    return [portable(each) for each in value] if isinstance(value, list) else value
