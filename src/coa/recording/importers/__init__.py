"""Importers: what other programs wrote of a team at work, read as sessions or as episodes.

A format is a module of this package with two functions (`Importer`), named in `FORMATS`; it is
imported when a file is looked at. What is read is text of strangers: a reader takes what is sound,
and counts in `Notes` whatever it leaves out. It raises a `RecordError` where a file as a whole
cannot be read. Neither says what a user's texts say.

`import_episodes` writes the episodes file, whole or not at all, for its owner alone. Beside it are
its timings, and a manifest that says what it was made of, so that the same command may be given
again and another one does not write over it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from coa.errors import RecordError, UsageError, did_you_mean
from coa.io.download import sha256_of
from coa.io.files import foreign, whole_file
from coa.io.runs import Json, claim, dumps, manifest_beside
from coa.io.tables import keep_source
from coa.recording.calls import LoggedSession
from coa.recording.episode import Episode
from coa.recording.importers.reading import SECONDS, Notes, head_of
from coa.recording.importers.team import hand_out
from coa.tasks import Task, TaskSet

HEAD = 65536
"""Bytes of a file that `detect` is given: enough for the first record of what is no huge file."""


class Importer(Protocol):
    """What a module has that reads a format."""

    def detect(self, head: bytes, path: Path) -> bool:
        """Whether a file that begins so is of this format, by its shape and not by its name.

        `reading.opening(head)` is the JSON value that the file begins with, as far as it is there.
        """
        ...

    def read(self, files: Sequence[Path], notes: Notes) -> Iterator[LoggedSession | Episode]:
        """What these files hold, one run of a team after the other.

        They are all files of the format in a folder, or the one that was named: a trace may be
        spread over several, and one may name another.
        """
        ...


class ImportFormat(NamedTuple):
    """A format that `coa import` knows."""

    name: str
    about: str
    """What such a file holds and by what it is told, for the line that says what was looked for."""
    module: str

    def load(self) -> Importer:
        return cast(Importer, import_module(self.module))


_HERE = "coa.recording.importers"
FORMATS: tuple[ImportFormat, ...] = (
    ImportFormat("atif", "ATIF or ADP trajectories (agent and steps, or content)", f"{_HERE}.atif"),
    ImportFormat("otel", "spans of OpenTelemetry (OTLP in JSON or protobuf)", f"{_HERE}.spans"),
    ImportFormat("openinference", "spans as Phoenix exports them", f"{_HERE}.openinference"),
    ImportFormat("agents-sdk", "traces of the OpenAI Agents SDK", f"{_HERE}.agents_sdk"),
    ImportFormat(
        "langgraph",
        "messages of LangChain or LangGraph, or runs of LangSmith",
        f"{_HERE}.langgraph",
    ),
    ImportFormat(
        "smolagents", "memory of smolagents (steps, plans and tasks)", f"{_HERE}.smolagents"
    ),
    ImportFormat(
        "oagents", "result lines of OAgents (question, intermediate_steps)", f"{_HERE}.oagents"
    ),
)
"""One line registers a format: ImportFormat("otlp", "what it is told by", f"{_HERE}.otlp")."""


# -- which format --------------------------------------------------------------------------------


def formats_of(path: Path) -> list[ImportFormat]:
    """The formats that a file may be of: one, or it is not known which."""
    head = head_of(path, HEAD)
    return [each for each in FORMATS if each.load().detect(head, path)]


def format_named(name: str) -> ImportFormat:
    found = next((each for each in FORMATS if each.name == name), None)
    if found is None:
        known = [each.name for each in FORMATS]
        raise UsageError(f"--format {name!r} is none.{did_you_mean(name, ['auto', *known])}")
    return found


def unknown_format(path: Path, found: Sequence[str] = (), others: Sequence[str] = ()) -> UsageError:
    """What to raise where a file is of no format, or of several."""
    if found:
        what = f"may be {' or '.join(found)}; choose with --format"
        return UsageError(f"{path}: {what}.")
    looked = "; ".join([*(f"{each.name}: {each.about}" for each in FORMATS), *others])
    return UsageError(f"{path}: is of no format that is known. Looked for {looked}.")


def files_of(path: Path, out: Path) -> list[Path]:
    """A file, or the files of a folder, but not those that an import to `out` writes."""
    if not path.is_dir():
        return [path]
    written = (f"{out.name}.timings.jsonl", f"{out.stem}.rejected.jsonl")
    beside = (out, manifest_beside(out), *map(out.with_name, written))
    ours = {each.resolve() for each in beside}
    found = (each for each in path.rglob("*") if each.is_file() and each.resolve() not in ours)
    inside = (each for each in found if not _is_hidden(each.relative_to(path)))
    return sorted(inside)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _sorted_by_format(
    path: Path, files: Sequence[Path], asked: str, notes: Notes, known: Mapping[Path, str]
) -> dict[ImportFormat, list[Path]]:
    """The files of each format; what is of none is counted where there are several files."""
    chosen = None if asked == "auto" else format_named(asked)
    if chosen is not None and not path.is_dir():
        return {chosen: list(files)}
    held: dict[ImportFormat, list[Path]] = {}
    for file in files:
        try:
            found = formats_of(file)
        except RecordError:
            if not path.is_dir():
                raise
            notes.add("files that cannot be read left out", str(file.relative_to(path)))
            continue
        if chosen is not None:
            found = [each for each in found if each == chosen]
        if len(found) > 1 or (not found and not path.is_dir()):
            raise unknown_format(file, [each.name for each in found])
        if found:
            held.setdefault(found[0], []).append(file)
        else:
            what = f"files of {known[file]}" if file in known else "files of no known format"
            notes.add(f"{what} left out", str(file.relative_to(path)))
    if not held:
        raise unknown_format(path)
    return held


# -- the command ---------------------------------------------------------------------------------


@dataclass
class ImportReport:
    """What an import came to."""

    path: Path
    formats: list[str]
    episodes: int = 0
    answered: int = 0
    gaps: Counter[str] = field(default_factory=Counter)
    """What could not be known, summed over the episodes."""
    notes: Notes = field(default_factory=Notes)
    seconds: list[Json] = field(default_factory=list)
    """Wall-clock figures of the episodes, which are no part of them."""

    def to_json(self) -> Json:
        return {
            "out": str(self.path),
            "formats": self.formats,
            "episodes": self.episodes,
            "answered": self.answered,
            "gaps": dict(self.gaps),
            "notes": dict(self.notes.counts),
        }

    def lines(self) -> list[str]:
        """For a person: what there is, then one line for each kind of trouble."""
        said = f"{self.episodes} episodes in {self.path}, {self.answered} with an answer"
        lines = [f"{said} ({', '.join(self.formats)})", *self.notes.lines()]
        if self.gaps:
            told = (f"{name.replace('_', ' ')} {n}" for name, n in self.gaps.most_common())
            lines.append(f"not known: {', '.join(told)}")
        return lines


def import_episodes(
    path: Path,
    out: Path,
    format: str = "auto",
    tasks: Path | None = None,
    known: Mapping[Path, str] | None = None,
) -> ImportReport:
    """Read a file, or the files of a folder, and write the episodes file `out`.

    With `tasks` each episode has the id and the `meta` of the task that it is about, found by its
    id or by its question; they are judged when they are distilled. `known` says of files that hold
    no episodes what they are.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder.")
    if tasks is not None:
        keep_source(tasks, out)
    files = files_of(path, out)
    for file in files:
        keep_source(file, out)
    notes = Notes()
    held = _sorted_by_format(path, files, format, notes, known or {})
    names = [each.name for each in held]
    about = _Tasks(tasks, notes)
    report = ImportReport(out, names, notes=notes)
    if out.is_file() and out.stat().st_size and not manifest_beside(out).is_file():
        raise foreign(out, "a new file, or one that the same import wrote")
    fresh = not manifest_beside(out).is_file()
    recipe = {"import": names, "files": _fingerprint(held, path), "tasks": about.fingerprint}
    try:
        with claim(out, recipe), whole_file(out, private=True) as lines:
            try:
                for each in held:
                    for made in each.load().read(held[each], notes):
                        _write(made, each.name, about, report, lines)
            except RecursionError:
                raise RecordError(f"{path}: holds a value that is nested too deeply.") from None
            if not report.episodes:
                told = "; ".join(notes.lines())
                raise RecordError(f"{path}: holds no episode{f': {told}' if told else ''}.")
        with whole_file(out.with_name(f"{out.name}.timings.jsonl"), private=True) as lines:
            lines.writelines(dumps(each).encode() + b"\n" for each in report.seconds)
    except BaseException:
        if fresh and not out.exists():  # nothing was made that it could tell about
            manifest_beside(out).unlink(missing_ok=True)
        raise
    return report


def _write(
    made: LoggedSession | Episode, source: str, tasks: _Tasks, report: ImportReport, file: Any
) -> None:
    episode = _episode_of(made, tasks) if isinstance(made, LoggedSession) else made
    tasks.name(episode)
    episode.meta.setdefault("source", source)
    record = episode.to_json()
    line = dumps(record)
    try:
        Episode.from_json(json.loads(line))
    except RecordError:
        report.notes.add("episodes that could not be read back left out")
        return
    file.write(line.encode() + b"\n")
    report.episodes += 1
    report.answered += episode.answer is not None
    if episode.seconds:
        report.seconds.append({"task_id": episode.task_id, **episode.seconds})
    for name, count in (episode.meta.get("gaps") or {}).items():
        report.gaps[name] += count


def _episode_of(session: LoggedSession, tasks: _Tasks) -> Episode:
    graph = import_module("coa.recording.graph")
    question = str(session.about.get("question") or "")
    task = tasks.find(str(session.about.get("task_id") or ""), question)
    episode: Episode = graph.episode_of(session, task)
    if agents := session.about.get("agents"):
        hand_out(episode, agents)
    if (known := session.about.get(SECONDS)) is not None:
        episode.seconds = {name: episode.seconds[name] for name in known if name in episode.seconds}
    return episode


def _fingerprint(held: dict[ImportFormat, list[Path]], root: Path) -> str:
    """Of the files that are read: their names below the folder, and what they hold."""
    digest = hashlib.sha256()
    for file in (file for files in held.values() for file in files):
        digest.update(str(file.relative_to(root) if root.is_dir() else file.name).encode())
        digest.update(sha256_of(file).encode())
    return digest.hexdigest()[:20]


class _Tasks:
    """The tasks that imported episodes may be about."""

    def __init__(self, path: Path | None, notes: Notes) -> None:
        self.notes = notes
        self.given = path is not None
        loaded = TaskSet.load(path) if path is not None else None
        self.fingerprint = loaded.fingerprint() if loaded is not None else ""
        self.tasks = list(loaded.tasks) if loaded is not None else []
        self.by_id = {task.id: task for task in self.tasks}
        self.by_question: dict[str, list[Task]] = {}
        for task in self.tasks:
            self.by_question.setdefault(_plain(task.question), []).append(task)
        self._seen: set[str] = set()

    def find(self, name: str, question: str) -> Task | None:
        """The task with this id, or the only one with this question, perhaps with words around."""
        found = self._like(name, question)
        return found[0].public() if len(found) == 1 else None

    def _like(self, name: str, question: str) -> list[Task]:
        if name in self.by_id:
            return [self.by_id[name]]
        asked = _plain(question)
        inside = (held for text, held in self.by_question.items() if text and text in asked)
        return self.by_question.get(asked) or [task for held in inside for task in held]

    def name(self, episode: Episode) -> None:
        """Give an episode the id and the `meta` of its task."""
        task = self.find(episode.task_id, episode.question)
        if task is not None:
            episode.task_id, episode.question = task.id, task.question
            episode.history = task.history
            episode.meta = {**task.meta, **episode.meta}
        elif self.given:
            several = self._like(episode.task_id, episode.question)
            self.notes.add(f"episodes about {'several' if several else 'none'} of the tasks")
        if task is None and episode.task_id in self._seen:
            self.notes.add("episodes that share their task id", "")
        self._seen.add(episode.task_id)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
