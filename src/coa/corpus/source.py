"""The files of a folder: find those that a corpus is made of, and read them into pages.

Hidden files are passed over, and so are folders that generators of sites fill with copies
(`_sources`) or decoration (`_static`). Symbolic links are followed within the folder, and not out
of it: whoever wrote the folder does not decide what else of this machine is read. A folder is
entered once.

A file is the work of strangers: it may be broken, endless, or made to exhaust memory. So files are
read in worker processes with limits, and whatever goes wrong is a reason on a file's Reading, never
an error of the build.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, unquote_to_bytes, urljoin, urlsplit

from coa.corpus.page import NAME_CHARS, Passage, passages_of
from coa.corpus.readers import read_document
from coa.corpus.site import Reading, Stamp, key_of
from coa.errors import CoaError
from coa.io.runs import Json
from coa.io.workers import Work, WorkerDied, WorkerLimits, WorkerPool

PASSED_OVER = ("_sources", "_static", "__pycache__", "node_modules")
_OUTSIDE = "a link that leaves the folder"
_MAX_LINKS = 5000
_PLAIN = (".txt", ".text", ".rst")
_SMALL_BYTES = 64_000
"""Files of these kinds, no larger in all, are read here: no library is needed for them, and
starting a process takes longer than they can."""
_BYTES_EACH, _FILES_EACH = 1 << 20, 64
"""What repays the start of another process."""
_READER = "coa.corpus.source:reader"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read."""

    key: str
    path: Path
    stamp: Stamp
    """Its digest is that of the file when it was read before: with the same one it is not read
    again."""


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
    for entry, key in _entries(root, found, is_ours):
        suffix = Path(entry.name).suffix.lower()
        if suffix not in suffixes:
            found.others[suffix or "without ending"] += 1
            continue
        try:
            status = entry.stat()
            problem = "" if stat.S_ISREG(status.st_mode) else "not a regular file"
        except OSError as exc:
            problem = _reason(exc)
        if _leaves(entry, root):
            problem = _OUTSIDE
        if problem:
            found.problems.append((key, problem))
        else:
            stamp = Stamp(status.st_size, status.st_mtime_ns)
            found.files.append(SourceFile(key, Path(entry.path), stamp))
    found.files.sort(key=lambda file: file.key)
    found.problems.sort()
    return found


def _entries(
    root: Path, found: Scan, is_ours: Callable[[Path], bool]
) -> Iterator[tuple[os.DirEntry[str], str]]:
    """Everything below a folder that is not a folder, with its key."""
    seen: dict[tuple[int, int], str] = {}
    todo = deque([(root, "")])
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
            path, below = Path(entry.path), f"{at}/{entry.name}"
            if not _is_folder(entry):
                yield entry, key_of(os.fsencode(below))
            elif _leaves(entry, root):
                found.problems.append((key_of(os.fsencode(below)), _OUTSIDE))
            elif entry.is_symlink():
                todo.append((path, below))  # after all that are no links
            elif not is_ours(path):
                folders.append((path, below))
        todo.extendleft(reversed(folders))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads in circles
        return False


def _leaves(entry: os.DirEntry[str], root: Path) -> bool:
    try:
        return entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # in circles; looking at it says so
        return False


def _reason(exc: OSError) -> str:
    return (exc.strerror or type(exc).__name__).lower()


# ------------------------------------------------------------------------------------------------
# Read files, in worker processes.
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How files are read."""

    site: str
    passage_chars: int
    max_bytes: int
    seconds: float
    """For one file."""


def read_all(files: Sequence[SourceFile], limits: ReadLimits, workers: int) -> Iterator[Reading]:
    """The reading of every file, in any order."""
    size = sum(file.stamp.size for file in files)
    if size < _SMALL_BYTES and all(file.path.suffix.lower() in _PLAIN for file in files):
        yield from (read_file(file, limits) for file in files)
        return
    workers = min(workers, 1 + max(size // _BYTES_EACH, len(files) // _FILES_EACH))
    pool = WorkerPool(_READER, asdict(limits), workers, limits=WorkerLimits(limits.seconds))
    try:
        asked = {pool.submit(asdict(f) | {"path": str(f.path)}, f.key): f for f in files}
        for done in as_completed(asked):
            yield _reading(done, asked.pop(done), limits)
    finally:
        pool.kill()


def _reading(done: Future[Json], file: SourceFile, limits: ReadLimits) -> Reading:
    try:
        record = done.result()
    except WorkerDied as died:
        why = "the process that read it died, for want of memory perhaps"
        late = f"reading it takes longer than {limits.seconds:g} s"
        return Reading(file.key, replace(file.stamp, digest=""), late if died.late else why)
    passages = tuple(
        replace(Passage(**each), names=tuple(each["names"]), anchors=tuple(each["anchors"]))
        for each in record["passages"]
    )
    stamp, links = Stamp(**record["stamp"]), tuple(record["links"])
    return Reading(**record | {"stamp": stamp, "links": links, "passages": passages})


@asynccontextmanager
async def reader(settings: Json) -> AsyncIterator[Work]:
    """Reads one file after the other, in a worker process."""
    limits = ReadLimits(**settings)

    async def read(item: Json) -> Json:
        file = SourceFile(item["key"], Path(item["path"]), Stamp(**item["stamp"]))
        return asdict(read_file(file, limits))

    yield read


def read_file(file: SourceFile, limits: ReadLimits) -> Reading:
    """What came of one file."""
    key, stamp = file.key, replace(file.stamp, digest="")
    if stamp.size > limits.max_bytes:
        found, most = stamp.size / 1e6, limits.max_bytes / 1e6
        return Reading(key, stamp, f"{found:.1f} MB, more than the limit of {most:.1f} MB")
    try:
        content = file.path.read_bytes()
        stamp = replace(stamp, digest=hashlib.sha256(content).hexdigest())
        if stamp.digest == file.stamp.digest:
            return Reading(key, stamp, unchanged=True)
        return _read_content(key, stamp, content, limits)
    except CoaError as exc:
        return Reading(key, stamp, str(exc))
    except OSError as exc:
        return Reading(key, stamp, _reason(exc))
    except MemoryError:
        return Reading(key, stamp, "reading it takes too much memory")
    except Exception as exc:  # a library that stumbles over one file must not stop the others
        reason = " ".join(str(exc).split())[:160]
        return Reading(key, stamp, f"its reader failed ({type(exc).__name__}: {reason})")


def _read_content(key: str, stamp: Stamp, content: bytes, limits: ReadLimits) -> Reading:
    document = read_document(PurePosixPath(unquote(key, errors="replace")), content)
    passages = passages_of(document, f"{limits.site}/{key}", limits.passage_chars)
    links = tuple(islice(dict.fromkeys(_internal(document.links, key, limits.site)), _MAX_LINKS))
    title = document.title[:NAME_CHARS]
    problem = "" if passages or links else "no text was found in it"
    return Reading(key, stamp, problem, document.remark, title, links, passages)


def _internal(links: Sequence[str], key: str, site: str) -> Iterator[str]:
    """The keys of those links that stay on the site."""
    for link in links:
        try:
            parts = urlsplit(urljoin(f"{site}/{key}", link))
        except ValueError:
            continue
        target = key_of(unquote_to_bytes(parts.path))
        if f"{parts.scheme}://{parts.netloc}" == site and target != key:
            yield f"{target}/index.html".lstrip("/") if parts.path.endswith("/") else target
