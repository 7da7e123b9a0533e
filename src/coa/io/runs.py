"""Files that survive: JSON lines, atomic writes, and the run directory.

A run directory holds `manifest.json` (resolved recipe, package versions, base-model hash, seed,
commit), `metrics.jsonl` and the stage's artefacts; wall-clock figures go to `timings.jsonl`, so
that the other files are the same whenever and wherever the same recipe is run.

Whole files are written beside and renamed. Growing files are append-only, one JSON object a line;
a line torn by `kill -9` is removed when the file is opened for appending again, and is an error
with its line number when the file is read. A file of another kind is refused and left as it is.

A run directory belongs to one recipe: opening it again with the same one continues it, with
another one is an error. One process at a time holds it, by a lock that the operating system drops
when the process dies, however it dies.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from coa.errors import ConfigError, RecordError, UsageError
from coa.io.files import LOCK, PART, lock_output, naming, refuse_directory, sweep, whole_file

Json = dict[str, Any]
T = TypeVar("T")

SCHEMA = 1
MANIFEST, METRICS, TIMINGS = "manifest.json", "metrics.jsonl", "timings.jsonl"
_BLANK = b" \t\r\n\0"
"""Bytes that say nothing; zeros are what a machine that lost power may leave of a line."""
_CUT = "Delete that line, or run the command that wrote the file again to continue it."
_PACKAGES = ("torch", "transformers", "peft", "tokenizers", "tantivy")


def dumps(record: Mapping[str, Any]) -> str:
    """Serialise one record the one way we do it: compact, unicode kept, keys in given order."""
    line = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    try:
        line.encode()
    except UnicodeEncodeError:  # half of a character, as models write them: UTF-8 has none
        return json.dumps(record, separators=(",", ":"))
    return line


def write_atomic(path: Path, text: str | Iterable[str], *, private: bool = False) -> None:
    """Write a whole file so that a reader sees the old content or the new, never a part; only its
    owner may read a `private` one."""
    with whole_file(path, private=private) as file:
        file.writelines(part.encode() for part in ([text] if isinstance(text, str) else text))


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]], *, private: bool = False) -> None:
    """Write a whole file of records, one a line."""
    write_atomic(path, (dumps(record) + "\n" for record in records), private=private)


def read_jsonl(path: Path, growing: bool = False) -> Iterator[tuple[int, Json]]:
    """Yield (line number, record); a line that is not one JSON object is a `RecordError`.

    `growing`: the file may be continued, so a last line that a kill has torn is left out.
    """
    if not path.is_file():
        found = "is a directory, expected a file" if path.is_dir() else "no such file"
        raise UsageError(f"{path}: {found}.")
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        yield from json_lines(path, file, growing)


def json_lines(
    path: Path, lines: Iterable[str], growing: bool = False, start: int = 1
) -> Iterator[tuple[int, Json]]:
    """The same from lines that were read already; `path` and the number of the first are for
    messages."""
    for number, line in enumerate(lines, start=start):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as exc:
            found = f"not JSON ({getattr(exc, 'msg', exc)})"
            advice = "Expected one JSON object a line."
            if not line.endswith("\n"):
                if growing:
                    return
                found, advice = "cut in the middle", _CUT
            raise RecordError(f"{path}:{number}: the line is {found}. {advice}") from None
        if not isinstance(record, dict):
            found = type(record).__name__
            raise RecordError(f"{path}:{number}: found a {found}, expected a JSON object.")
        yield number, record


def read_records(path: Path, parse: Callable[[Json], T], growing: bool = False) -> list[T]:
    """Read a JSONL file through `parse`; what `parse` rejects is reported with its line."""
    records = []
    for number, record in read_jsonl(path, growing):
        try:
            records.append(parse(record))
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            reason = f"no field {exc}" if isinstance(exc, KeyError) else " ".join(str(exc).split())
            raise RecordError(f"{path}:{number}: {reason}") from exc
    return records


class Appender:
    """An append-only JSONL file: each record is with the operating system when `write` returns.

    So a killed process loses nothing that was written; a machine that loses power may lose what
    was written since the file was opened, which is synced to the disk when it is closed. Opening
    it removes a last line that a killed writer left in the middle; one that lacks only its newline
    (other programs write such files) gets it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a+b")
        try:
            start, line = _unfinished_line(path, self._file)
        except BaseException:
            self._file.close()
            raise
        if _is_object(line):
            self._file.write(b"\n")
        elif line:
            self._file.truncate(start)

    def write(self, record: Mapping[str, Any]) -> None:
        with naming(self.path):
            self._file.write(dumps(record).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        if not self._file.closed:
            with naming(self.path):
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Standing:
    """What a stopped command leaves: the outputs that were open, outermost first, and how far the
    innermost was. An output that is finished is taken off; one that an error closes stays."""

    def __init__(self) -> None:
        self.outputs: list[Path] = []
        self.at = ""

    def line(self, why: str) -> str:
        """What is kept and how to go on, for whoever stopped a command."""
        if not self.outputs:
            return f"stopped ({why})"
        after = f" after {self.at}" if self.at else ""
        return (
            f"stopped ({why}){after}; everything up to there is in {self.outputs[0]}; "
            "give the same command again to go on"
        )


standing = _Standing()


def reached(at: str) -> None:
    """Say how far the work is that is open and saved, as 'update 7 of 20'."""
    standing.at = at


class Run:
    """One stage's directory: its manifest, metrics, timings and artefacts, locked while open.

    `resumed` says whether the directory held an earlier part of the same run. Use `Run.open`.
    """

    def __init__(self, root: Path, manifest: Json, lock: IO[str], resumed: bool) -> None:
        self.root = root
        self.manifest = manifest
        self.resumed = resumed
        self._lock = lock
        self._files: dict[str, Appender] = {}
        _opened(root)

    @classmethod
    def open(
        cls,
        path: Path,
        stage: str,
        settings: Json,
        inputs: Mapping[str, str],
        seed: int,
        base: str | None = None,
        counting: Callable[[Json], Json] = lambda recipe: recipe,
        brought: str = "",
    ) -> Run:
        """Make a run directory, or reopen the one that the same recipe and inputs made.

        `inputs` maps a name to the fingerprint of what is read; `base` is the base model's hash.
        `counting` leaves of a recipe, this one's and the directory's, what has to be the same.
        `brought` is a pattern of files that may be in a new directory already.
        """
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path}: is a file, expected a run directory.")
        asked: Json = {"schema": SCHEMA, "stage": stage, "recipe": settings, "inputs": {**inputs}}
        asked = json.loads(json.dumps(asked | {"seed": seed, "base": base}))  # as it is read again
        # NOTE: versions and commit are not compared: a run may be continued after an upgrade,
        # which then shows in timings.jsonl.
        made_with: Json = {"packages": _versions(), "python": sys.version.split()[0]}
        made_with["commit"] = _commit()
        path.mkdir(parents=True, exist_ok=True)
        _read_manifest(path, brought)  # in a folder that is no run not even a lock is put
        held_lock = lock_output(path)
        try:
            held = _read_manifest(path, brought)
            if held is not None:
                now = asked | {"recipe": counting(asked["recipe"])}
                _check_same(path, held | {"recipe": counting(held["recipe"])}, now)
            sweep(path)
            if held is None:
                text = json.dumps(asked | made_with, indent=2, ensure_ascii=False)
                write_atomic(path / MANIFEST, text + "\n")
        except BaseException:
            held_lock.close()
            raise
        run = cls(path, held or asked | made_with, held_lock, resumed=held is not None)
        changed = {k: v for k, v in made_with.items() if held is not None and held.get(k) != v}
        run.timing({"event": "resumed" if held else "started"} | changed)
        return run

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl: results only, nothing that depends on the clock."""
        self._append(METRICS, record)

    def timing(self, record: Mapping[str, Any]) -> None:
        """Add a line to timings.jsonl, with the time of day."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._append(TIMINGS, {"at": at, **record})

    def keep_metrics(self, keep: Callable[[Json], bool]) -> None:
        """Drop metrics that a resumed stage will write again: those after its checkpoint."""
        path = self.root / METRICS
        if held := self._files.pop(METRICS, None):
            held.close()
        if path.is_file():
            Appender(path).close()
            write_jsonl(path, [record for _, record in read_jsonl(path) if keep(record)])

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = Appender(self.root / name)
        self._files[name].write(record)

    def close(self) -> None:
        """Flush what was written and let another process have the directory."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._lock.close()

    def _is_bare(self) -> bool:
        return {each.name for each in self.root.iterdir()} <= {MANIFEST, TIMINGS, LOCK}

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            _finished(self.root)
        elif not self.resumed and self._is_bare():
            # What failed before it made anything may be given again with other settings.
            _finished(self.root)
            for name in (MANIFEST, TIMINGS):
                (self.root / name).unlink(missing_ok=True)
        self.close()


def _opened(output: Path) -> None:
    if output not in standing.outputs:
        standing.outputs.append(output)
    reached("")


def _finished(output: Path) -> None:
    if output in standing.outputs:
        standing.outputs.remove(output)
    reached("")


@contextmanager
def claim(path: Path, recipe: Json) -> Iterator[None]:
    """Hold a growing file, with what makes it in `path.manifest.json`; two recipes do not mix."""
    check_growing(path)
    manifest = manifest_beside(path)
    with lock_output(path):
        if path.is_file() and path.stat().st_size and manifest.is_file():
            held = read_object(manifest, f"Delete it and {path.name} to start again.")
            _check_same(path, held, json.loads(json.dumps(recipe)), whole=True)
        else:
            write_atomic(manifest, json.dumps(recipe, indent=2, ensure_ascii=False) + "\n")
        sweep(path)
        sweep(manifest)
        _opened(path)
        yield
        _finished(path)


def manifest_beside(path: Path) -> Path:
    """Where a growing file has what makes it."""
    return path.with_name(f"{path.name}.manifest.json")


def check_growing(path: Path) -> None:
    """Refuse what is not a file of JSON lines and cannot become one; nothing is written."""
    refuse_directory(path)
    if path.is_file():
        with path.open("rb") as file:
            _unfinished_line(path, file)


def _unfinished_line(path: Path, file: IO[bytes]) -> tuple[int, bytes]:
    """Where a last line without a newline starts, and the line; it is empty when there is none.

    A file of another kind is refused: what is torn there is not ours to remove. Our lines begin
    with a brace and a quote, however short they are cut.
    """
    if not file.seek(0, os.SEEK_END):  # nothing, or a device, which may have no end
        return 0, b""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        head = held[:65536].removeprefix(BOM_UTF8).lstrip(_BLANK)
        start = held.rfind(b"\n") + 1
        line = held[start:]
    ours = b'{"'.startswith(line[:2]) or _is_object(line) or not line.strip(_BLANK)
    if not ours or head[:1] not in (b"{", b""):
        raise UsageError(f"{path}: is not a file of JSON lines; name another.")
    return start, line


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def read_object(path: Path, advice: str = "") -> Json:
    """The JSON object that a small file holds; `advice` ends the line that says what is wrong."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise RecordError(f"{path}: not JSON ({exc}). {advice}".rstrip()) from None
    if not isinstance(held, dict):
        found = type(held).__name__
        raise RecordError(f"{path}: found a {found}, expected an object. {advice}".rstrip())
    return held


def _read_manifest(path: Path, brought: str = "") -> Json | None:
    """The manifest of a run; None in an empty directory, and any other one is refused."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        _check_empty(path, brought)
        return None
    held = read_object(manifest, "Delete the run directory.")
    if (found := held.get("schema")) != SCHEMA:
        raise RecordError(
            f"{manifest}: found manifest schema {found!r}, expected {SCHEMA}. "
            "Use the version of chain-of-agents that wrote it, or another directory."
        )
    return held


def _check_empty(path: Path, brought: str) -> None:
    names = {entry.name for entry in path.iterdir()}
    known = {LOCK, *(entry.name for entry in path.glob(brought))} if brought else {LOCK}
    strangers = sorted(name for name in names - known if not name.endswith(PART))
    if strangers and MANIFEST not in names:  # it is there when another process began just now
        raise ConfigError(
            f"{path}: holds {strangers[0]!r} but no {MANIFEST}, so it is not a run directory. "
            "Use a new or an empty one."
        )


def _check_same(path: Path, held: Json, asked: Json, *, whole: bool = False) -> None:
    """Raise, naming the first difference, unless both describe the same run. What is held may say
    more than what is asked, about the machine for instance, unless it is `whole`."""
    before, after = _flat(held), _flat(asked)
    ours = {key for key in before if whole or key.split(".")[0] in asked}
    for key in [*after, *sorted(ours - after.keys())]:
        if key in before and key in after and before[key] == after[key]:
            continue
        was, now = (
            "none" if flat.get(key, "") is None else repr(flat[key]) if key in flat else "not set"
            for flat in (before, after)
        )
        name = key.removeprefix("recipe.").replace("inputs.", "input ")
        raise ConfigError(
            f"{path}: this was started with {name} {was}, and it is {now} here. "
            "Write somewhere else, or delete it to start again."
        )


def _flat(value: Any, at: str = "") -> Json:
    if not isinstance(value, dict) or (at and not value):
        return {at: value}
    flat: Json = {}
    for name, item in value.items():
        flat |= _flat(item, f"{at}.{name}" if at else name)
    return flat


def _versions() -> dict[str, str]:
    from importlib import metadata

    found: dict[str, str] = {}
    for name, package in (("coa", "chain-of-agents"), *((p, p) for p in _PACKAGES)):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(package)
    return found


def _commit() -> str | None:
    """The commit of the repository around the current directory, '-dirty' if it was edited."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
