"""Read one file into a page, or say why that is not possible.

A file is the work of strangers: it may be broken, endless, or made to exhaust memory. Whatever goes
wrong is a reason on its Reading, never an error of the build.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePosixPath
from urllib.parse import unquote, unquote_to_bytes, urljoin, urlsplit

from coa.corpus.page import NAME_CHARS, passages_of
from coa.corpus.readers import read_document
from coa.corpus.scan import SourceFile
from coa.corpus.store import Reading, Stamp, key_of
from coa.errors import CoaError

_MAX_LINKS = 5000


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How files are read."""

    site: str
    passage_chars: int
    max_bytes: int
    seconds: float
    """For one file."""


@dataclass(frozen=True, slots=True)
class Job:
    file: SourceFile
    digest: str = ""
    """Of the file when it was read before: with the same one it is not read again."""


def read_file(job: Job, limits: ReadLimits) -> Reading:
    """What came of one file."""
    key, stamp = job.file.key, job.file.stamp
    if stamp.size > limits.max_bytes:
        found, most = stamp.size / 1e6, limits.max_bytes / 1e6
        return Reading(key, stamp, f"{found:.1f} MB, more than the limit of {most:.1f} MB")
    try:
        content = job.file.path.read_bytes()
        stamp = Stamp(stamp.size, stamp.mtime, hashlib.sha256(content).hexdigest())
        if stamp.digest == job.digest:
            return Reading(key, stamp, unchanged=True)
        return _read_content(key, stamp, content, limits)
    except CoaError as exc:
        return Reading(key, stamp, str(exc))
    except OSError as exc:
        if isinstance(exc, TimeoutError):  # raised by whoever watches the time
            return Reading(key, stamp, f"reading it takes longer than {limits.seconds:g} s")
        return Reading(key, stamp, (exc.strerror or type(exc).__name__).lower())
    except MemoryError:
        return Reading(key, stamp, "reading it takes too much memory")
    except Exception as exc:  # a library that stumbles over one file must not stop the others
        reason = " ".join(str(exc).split())[:160]
        return Reading(key, stamp, f"its reader failed ({type(exc).__name__}: {reason})")


def _read_content(key: str, stamp: Stamp, content: bytes, limits: ReadLimits) -> Reading:
    document = read_document(PurePosixPath(unquote(key, errors="replace")), content)
    url = f"{limits.site}/{key}"
    passages = passages_of(document, url, limits.passage_chars)
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
