"""Find the files of a folder that a corpus is made of.

Hidden files are passed over, and so are folders that generators of sites fill with copies
(`_sources`) or decoration (`_static`). Symbolic links are followed within the folder, and not out
of it: whoever wrote the folder does not decide what else of this machine is read. A folder is
entered once.
"""

from __future__ import annotations

import os
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from coa.corpus.store import Stamp, key_of

_OUTSIDE = "a link that leaves the folder"


PASSED_OVER = ("_sources", "_static", "__pycache__", "node_modules")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read."""

    key: str
    path: Path
    stamp: Stamp


@dataclass
class Scan:
    """What is in the folder."""

    files: list[SourceFile] = field(default_factory=list)
    """Sorted by key."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """(key, reason) of what cannot be read or is left out for a reason worth saying."""
    others: Counter[str] = field(default_factory=Counter)
    """How many files of other kinds there are, by the end of their names."""


def scan(folder: Path, suffixes: frozenset[str], is_ours: Callable[[Path], bool]) -> Scan:
    """All files below the folder with one of the suffixes, except in folders that are ours."""
    found, root = Scan(), folder.resolve()
    seen: dict[tuple[int, int], str] = {}
    for entry, key in _entries(folder, "", found, seen, is_ours, root):
        suffix = Path(entry.name).suffix.lower()
        if suffix not in suffixes:
            found.others[suffix or "without ending"] += 1
            continue
        if entry.is_symlink() and _leaves(Path(entry.path), root):
            found.problems.append((key, _OUTSIDE))
            continue
        try:
            status = entry.stat()
        except OSError as exc:
            found.problems.append((key, _reason(exc)))
            continue
        if not stat.S_ISREG(status.st_mode):
            found.problems.append((key, "not a regular file"))
            continue
        stamp = Stamp(status.st_size, status.st_mtime_ns)
        found.files.append(SourceFile(key, Path(entry.path), stamp))
    found.files.sort(key=lambda file: file.key)
    found.problems.sort()
    return found


def _entries(
    folder: Path,
    at: str,
    found: Scan,
    seen: dict[tuple[int, int], str],
    is_ours: Callable[[Path], bool],
    root: Path,
) -> Iterator[tuple[os.DirEntry[str], str]]:
    """Everything below a folder that is not a folder."""
    todo = deque([(folder, at)])
    while todo:
        folder, at = todo.popleft()
        key = key_of(os.fsencode(at)) or "."
        try:
            status = folder.stat()
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as exc:
            found.problems.append((key, _reason(exc)))
            continue
        if (before := seen.setdefault((status.st_dev, status.st_ino), key)) != key:
            found.problems.append((key, f"leads to {before}, which is read already"))
            continue
        folders = []
        for entry in entries:
            if entry.name.startswith(".") or entry.name in PASSED_OVER:
                continue
            below = f"{at}/{entry.name}"
            if not _is_folder(entry):
                yield entry, key_of(os.fsencode(below))
            elif entry.is_symlink() and _leaves(Path(entry.path), root):
                found.problems.append((key_of(os.fsencode(below)), _OUTSIDE))
            elif entry.is_symlink():
                todo.append((Path(entry.path), below))  # after all that are no links
            elif not is_ours(Path(entry.path)):
                folders.append((Path(entry.path), below))
        todo.extendleft(reversed(folders))


def _leaves(link: Path, root: Path) -> bool:
    try:
        return not link.resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # in circles; looking at it says so
        return False


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads in circles
        return False


def _reason(exc: OSError) -> str:
    return (exc.strerror or type(exc).__name__).lower()
