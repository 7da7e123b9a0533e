"""build_corpus(): a folder of HTML, Markdown, text and PDF -> a corpus directory.

    manifest.json    schema, source, site, settings, counts, a digest of the content, and which
                     version is the present one
    vN/pages.sqlite  the pages, with the stamps of their files
    vN/index/        the search index over their passages

A build works on the version after the present one: it takes over what is there, reads the files
that are new or changed, drops those that are gone, and writes the index anew, so that what a search
returns depends on the files and never on the order of changes. Replacing the manifest makes the new
version the present one; until then every reader sees the old. A build that was killed goes on with
what it has read.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote

from coa.corpus.index import INDEX_VERSION, SearchIndex
from coa.corpus.page import Passage
from coa.corpus.readers import READERS, READERS_VERSION
from coa.corpus.site import INDEX, PAGES, SCHEMA, PageStore, read_manifest
from coa.corpus.source import ReadLimits, Scan, SourceFile, read_all, scan
from coa.errors import ConfigError, RecordError, UsageError, boundary
from coa.io.files import LOCK, lock
from coa.io.machine import cores
from coa.io.progress import Mode, Progress
from coa.io.runs import MANIFEST, Json, write_atomic

MIN_PASSAGE_CHARS = 200
_COMMIT_SECONDS = 0.25
_KINDS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class CorpusSettings:
    """How a folder becomes a corpus. Another choice reads all files again."""

    passage_chars: int = 1000
    """The most that one passage holds."""
    max_megabytes: float = 64.0
    """Larger files are left out."""
    seconds_per_file: float = 60.0
    """A file that takes longer to read is left out."""

    def __post_init__(self) -> None:
        if self.passage_chars < MIN_PASSAGE_CHARS:
            raise ConfigError(
                f"passage_chars (--passage) is {self.passage_chars!r}, "
                f"expected {MIN_PASSAGE_CHARS} or more."
            )
        for name, option in (("max_megabytes", " (--megabytes)"), ("seconds_per_file", "")):
            if not getattr(self, name) > 0:
                found = f"{name}{option} is {getattr(self, name)!r}"
                raise ConfigError(f"{found}, expected more than 0.")


@dataclass(frozen=True)
class BuildReport:
    """What a build did."""

    source: str
    target: str
    site: str
    pages: int
    passages: int
    read: int
    """Files that were read, because they are new or have changed."""
    unchanged: int
    removed: int
    skipped: dict[str, str] = field(default_factory=dict)
    """Why a file is not in the corpus, by path."""
    remarks: dict[str, str] = field(default_factory=dict)
    """What was odd about a file that is."""
    others: dict[str, int] = field(default_factory=dict)
    """Files of other kinds, by the end of their names."""
    seconds: float = 0.0

    def to_json(self) -> Json:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """The report for people: one line for each odd file, then the sums."""
        yield from (f"skipped {path}: {reason}" for path, reason in self.skipped.items())
        yield from (f"note {path}: {remark}" for path, remark in self.remarks.items())
        if self.others:
            common = Counter(self.others).most_common(_KINDS_SHOWN)
            kinds = ", ".join(f"{count} {kind}" for kind, count in common)
            more = ", ..." if len(self.others) > len(common) else ""
            yield f"{sum(self.others.values())} files of other kinds: {kinds}{more}"
        yield (
            f"{self.target}: {self.pages} pages, {self.passages} passages at {self.site} "
            f"({self.read} read, {self.unchanged} unchanged, {self.removed} removed, "
            f"{len(self.skipped)} skipped) in {self.seconds:.1f} s"
        )


def build_corpus(
    source: Path,
    target: Path,
    settings: CorpusSettings | None = None,
    *,
    name: str = "",
    workers: int = 0,
    progress: Mode = "auto",
) -> BuildReport:
    """Make the corpus of a folder, or bring it up to date. `name` is the host of its address."""
    started = time.perf_counter()
    settings = settings or CorpusSettings()
    if source.is_file():
        raise UsageError(
            f"{source}: is a file, expected a folder; give {str(source.parent)!r}, which holds it."
        )
    if not source.is_dir():
        raise UsageError(f"{source}: no such folder.")
    site = f"https://{_host(name or source.resolve().name)}.example"
    with _locked(source, target):
        report = _Build(source.resolve(), target, site, settings, progress).run(workers or cores())
        return replace(report, seconds=round(time.perf_counter() - started, 2))


def default_target(source: Path) -> Path:
    """Where a corpus goes when nobody says: beside the caller, not into the folder."""
    return Path(f"{source.resolve().name or 'corpus'}.corpus")


def _host(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-") or "corpus"


@contextlib.contextmanager
def _locked(source: Path, target: Path) -> Iterator[None]:
    """Hold the target alone; refuse one that is something else. Of a source that is refused
    nothing is left where nothing was."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: is a file, expected a directory for the corpus.")
    if target.is_dir() and target.samefile(source):
        raise UsageError(f"{target}: is the source itself; write the corpus somewhere else.")
    fresh = not (target / LOCK).exists()
    if fresh and target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{target}: is not empty and not a corpus; use a new or an empty one.")
    made = [folder for folder in (target, *target.parents) if not folder.exists()]
    target.mkdir(parents=True, exist_ok=True)

    def refuse(holder: str) -> None:
        raise UsageError(f"{target}: being built by another process (pid {holder}); wait for it.")

    with lock(target / LOCK, refuse):
        try:
            yield
        except UsageError:
            if fresh:
                for begun in target.glob("v*"):
                    shutil.rmtree(begun, ignore_errors=True)
                with contextlib.suppress(OSError):  # somebody else may have put something there
                    (target / LOCK).unlink()
                    for folder in made:
                        folder.rmdir()
            raise


class _Build:
    """One build of one corpus, whose directory is locked."""

    def __init__(
        self, source: Path, target: Path, site: str, settings: CorpusSettings, progress: Mode
    ) -> None:
        self._source, self._target, self._site = source, target, site
        self._settings, self._progress = settings, progress
        self._present = read_manifest(target)
        if self._present and self._present["source"] != str(source):
            raise ConfigError(
                f"{target}: was made from {self._present['source']}, and it is {source} here. "
                "Write somewhere else, or delete it to start again."
            )
        number = int(str(self._present["version"])[1:]) if self._present else 0
        self._version = target / f"v{number + 1}"

    def run(self, workers: int) -> BuildReport:
        found = self._scan()
        self._take_over()
        with PageStore.create(self._version / PAGES, self._site, self._recipe()) as store:
            removed = store.stamps().keys() - {file.key for file in found.files}
            store.drop(removed)
            read = self._read(store, list(_changed(found.files, store)), workers)
            pages, passages = store.counts()
            skipped, remarks = store.problems() | dict(found.problems), store.remarks()
            if not pages:
                key, reason = next(iter(skipped.items()))
                raise UsageError(
                    f"{self._source}: none of its {len(found.files)} files could be read; the "
                    f"first is {unquote(key)}: {reason}."
                )
            self._finish(store, {"pages": pages, "passages": passages, "skipped": len(skipped)})
        return BuildReport(
            source=str(self._source),
            target=str(self._target),
            site=self._site,
            pages=pages,
            passages=passages,
            read=read,
            removed=len(removed),
            unchanged=len(found.files) - read,
            skipped=_shown(skipped),
            remarks=_shown(remarks),
            others=dict(sorted(found.others.items())),
        )

    def _scan(self) -> Scan:
        def is_ours(folder: Path) -> bool:
            return (folder / MANIFEST).is_file() and (folder / LOCK).is_file()

        found = scan(self._source, frozenset(READERS), is_ours)
        if not found.files:
            kinds = ", ".join(sorted(found.others)) or "nothing"
            raise UsageError(
                f"{self._source}: holds no file of a kind that can be read "
                f"({', '.join(READERS)}); found {kinds}."
            )
        return found

    def _recipe(self) -> str:
        """What decides how a file is read and found."""
        versions = [SCHEMA, READERS_VERSION, INDEX_VERSION]
        return json.dumps([*versions, self._site, asdict(self._settings)])

    def _take_over(self) -> None:
        """Begin with the pages of the present version, unless this one was begun already."""
        pages = self._version / PAGES
        self._version.mkdir(exist_ok=True)
        if pages.exists() or self._present is None:
            return
        before = self._target / str(self._present["version"]) / PAGES
        if before.is_file():
            beside = pages.with_suffix(".part")
            shutil.copyfile(before, beside)
            beside.replace(pages)

    def _read(self, store: PageStore, files: Sequence[SourceFile], workers: int) -> int:
        """Read the files into the store, which is committed all the time; how many were read."""
        limits = ReadLimits(
            site=self._site,
            passage_chars=self._settings.passage_chars,
            max_bytes=int(self._settings.max_megabytes * 1e6),
            seconds=self._settings.seconds_per_file,
        )
        read, committed = 0, time.monotonic()
        try:
            with Progress("files", len(files), mode=self._progress) as bar:
                for reading in read_all(files, limits, workers):
                    if reading.unchanged:
                        store.restamp(reading.key, reading.stamp)
                    else:
                        store.put(reading)
                        read += 1
                    bar.advance()
                    if (now := time.monotonic()) > committed + _COMMIT_SECONDS:
                        store.commit()
                        committed = now
        finally:
            store.commit()
        return read

    def _finish(self, store: PageStore, counts: Json) -> None:
        """Publish this version if it differs from the present one; keep new stamps in any case."""
        manifest = {
            "schema": SCHEMA,
            "version": self._version.name,
            "source": str(self._source),
            "site": self._site,
            "settings": asdict(self._settings)
            | {"readers": READERS_VERSION, "index": INDEX_VERSION},
            "counts": counts,
            "content": store.fingerprint(),
        }
        held = self._present or {}
        present = self._target / str(held.get("version"))
        if held.get("content") == manifest["content"] and (present / INDEX).is_dir():
            (self._version / PAGES).replace(present / PAGES)
        else:
            self._index(store, counts["passages"])
            write_atomic(self._target / MANIFEST, json.dumps(manifest, indent=2) + "\n")
            present = self._version
        for folder in self._target.glob("v*"):
            if folder.name != present.name:
                shutil.rmtree(folder, ignore_errors=True)

    def _index(self, store: PageStore, total: int) -> None:
        index = self._version / INDEX
        if index.exists():  # half written by a build that was killed
            shutil.rmtree(index)
        with Progress("passages", total, mode=self._progress) as bar:

            def passages() -> Iterator[Passage]:
                for page in store.pages():
                    yield from page.passages
                    bar.advance(len(page.passages))

            with boundary(RecordError, f"{index}: writing the search index"):
                SearchIndex.build(passages(), index, total)


def _changed(files: Sequence[SourceFile], store: PageStore) -> Iterator[SourceFile]:
    """Files to look at: new ones, those with another stamp, those that could not be read before.

    One that could be read has its digest of then, so that it is read only if that differs.
    """
    held, broken = store.stamps(), store.problems()
    for file in files:
        if file.key in broken or file.key not in held:
            yield file
        elif (stamp := held[file.key]) != replace(file.stamp, digest=stamp.digest):
            yield replace(file, stamp=replace(file.stamp, digest=stamp.digest))


def _shown(by_key: dict[str, str]) -> dict[str, str]:
    """By path, each of them on one line whatever its name holds."""
    shown = {}
    for key, text in sorted(by_key.items()):
        path = unquote(key, errors="replace")
        shown["".join(c if c.isprintable() else "\ufffd" for c in path)] = text
    return shown
