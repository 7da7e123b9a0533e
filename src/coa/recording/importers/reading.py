"""How importers read JSON of strangers: tolerant, streaming where the file allows it, and counting.

`documents` yields the values of a file, `opening` the first one of a file of which only the head is
at hand, `Fields` reads the fields of an object as what they should be. What is something else is
counted in `Notes` and is as if it were not there.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, AnyStr, TypeGuard

from coa.errors import RecordError, UsageError
from coa.io.runs import Json

SECONDS = "seconds_known"
"""In `LoggedSession.about`: which wall-clock figures its times show; without it, all. Where a
source has no times, those of its calls only say their order."""


class Notes:
    """Counts what a reader could not take or had to guess at, with the first place of each kind.

    A kind is the text of a line, "copied steps left out"; neither it nor the place holds a word of
    what was recorded.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def add(self, kind: str, where: str = "", times: int = 1) -> None:
        if times:
            self.counts[kind] = self.counts.get(kind, 0) + times
            self.first.setdefault(kind, where)

    def lines(self) -> list[str]:
        """One line for each kind, the most frequent first."""
        told = sorted(self.counts, key=lambda kind: -self.counts[kind])
        return [
            f"{kind}: {self.counts[kind]}"
            + (f" (first: {self.first[kind]})" if self.first[kind] else "")
            for kind in told
        ]


class Fields:
    """An object of a stranger's file: each field as what it should be, or as if it were missing."""

    __slots__ = ("held", "notes", "where")

    def __init__(self, held: Json, where: str, notes: Notes) -> None:
        self.held, self.where, self.notes = held, where, notes

    def __contains__(self, name: str) -> bool:
        return self.held.get(name) is not None

    def at(self, name: str) -> str:
        """The place of a field, for a note."""
        return f"{self.where}: {name}"

    def wrong(self, name: str, expected: str) -> None:
        """Count a field that is something else than it should be."""
        found = kind_of(self.held.get(name))
        self.notes.add(f"{name} is {found}, expected {expected}", self.where)

    def value(self, name: str) -> Any:
        return self.held.get(name)

    def text(self, *names: str) -> str:
        """The first of these fields that there is."""
        for name in names:
            value = self.held.get(name)
            if isinstance(value, str):
                return value
            if value is not None:
                self.wrong(name, "a text")
        return ""

    def count(self, *names: str) -> int | None:
        """A whole number of 0 or more; None: not said."""
        for name in names:
            value = self.held.get(name)
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
            if value is not None:
                self.wrong(name, "a count")
        return None

    def number(self, *names: str) -> float | None:
        for name in names:
            value = self.held.get(name)
            if is_finite(value):
                return float(value)
            if value is not None:
                self.wrong(name, "a finite number")
        return None

    def flag(self, name: str) -> bool:
        value = self.held.get(name)
        if value is not None and not isinstance(value, bool):
            self.wrong(name, "true or false")
        return value is True

    def object(self, name: str) -> Fields:
        """An object inside this one; an empty one where there is none."""
        value = self.held.get(name)
        if value is not None and not isinstance(value, dict):
            self.wrong(name, "an object")
        return Fields(value if isinstance(value, dict) else {}, self.at(name), self.notes)

    def items(self, name: str) -> list[Any]:
        value = self.held.get(name)
        if value is not None and not isinstance(value, list):
            self.wrong(name, "a list")
        return value if isinstance(value, list) else []

    def objects(self, name: str) -> list[Fields]:
        """The objects of a list; what is none there is counted."""
        found = []
        for number, each in enumerate(self.items(name), start=1):
            where = f"{self.where}: {name} {number}"
            if isinstance(each, dict):
                found.append(Fields(each, where, self.notes))
            else:
                self.notes.add(f"{name} holds {kind_of(each)}, expected an object", where)
        return found


def is_finite(value: Any) -> TypeGuard[int | float]:
    """Whether it is a number that a float can hold: JSON has longer ones, and infinity."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max


def moment_of(value: Any) -> datetime | None:
    """A moment, of a text too; UTC where it does not say."""
    try:
        when = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        return None
    if not isinstance(when, datetime):
        return None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}


def kind_of(value: Any) -> str:
    """What a value is; what it says is the user's and in no message."""
    if value is None:
        return "nothing"
    return _KINDS.get(type(value), "a number")


_CHUNK = 1 << 20

# -- whole files -------------------------------------------------------------------------------


def documents_of(
    files: Sequence[Path], notes: Notes, *, spread: bool = False
) -> Iterator[tuple[Path, str, Any]]:
    """(file, place, value) of the values of all files. One of several that cannot be read is
    counted; where it is the only one, that is an error."""
    for path in files:
        try:
            for where, value in documents(path, notes, spread=spread):
                yield path, where, value
        except RecordError as error:
            if len(files) == 1:
                raise
            reason = str(error).removeprefix(f"{path}: ").partition(" (")[0].rstrip(".")
            notes.add(f"files that cannot be read ({reason})", path.name)


def documents(path: Path, notes: Notes, *, spread: bool = False) -> Iterator[tuple[str, Any]]:
    """(place, value) of each JSON value of a file: one, or one a line.

    `spread`: the elements of a list that is a whole file are values of their own, and are read one
    by one, however large it is. A line that is no JSON is counted and passed over.
    """
    if _is_lined(path):
        yield from _lines(path, notes)
    elif spread and _begins(path) == b"[":
        yield from _elements(path, notes)
    else:
        with open_bytes(path) as file:
            text = _decoded(path, _read(path, file))
        try:
            yield path.name, json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _no_json(path, error) from None


def head_of(path: Path, size: int) -> bytes:
    """The first bytes of a file, unpacked where it is packed."""
    with open_bytes(path) as file:
        return _read(path, file, size)


def open_bytes(path: Path) -> IO[bytes]:
    if not path.is_file():
        raise UsageError(f"{path}: no such file.")
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return io.BufferedReader(_Unpacked(path), _CHUNK) if packed else path.open("rb")


class _Unpacked(io.RawIOBase):
    """What a gzip file holds; of one that is cut, what stands before the cut."""

    def __init__(self, path: Path) -> None:
        self.file = gzip.GzipFile(path)
        self.begun = self.cut = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            piece = self.file.read1(len(buffer))
        except EOFError:
            if not self.begun:
                raise
            piece, self.cut = b"", True
        self.begun = True
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self.file.close()
        super().close()


def note_cut(path: Path, file: IO[bytes], notes: Notes) -> None:
    """Count a gzip file that was found to be cut."""
    if getattr(getattr(file, "raw", None), "cut", False):
        notes.add("gzip files that are cut, read up to there", path.name)


def _read(path: Path, file: IO[AnyStr], size: int = -1, line: bool = False) -> AnyStr:
    try:
        return file.readline(size) if line else file.read(size)
    except UnicodeDecodeError:
        raise RecordError(f"{path}: not UTF-8. Save the file as UTF-8.") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RecordError(f"{path}: not a whole gzip file ({error}).") from None


def _decoded(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RecordError(f"{path}: not UTF-8. Save the file as UTF-8.") from None


def _no_json(path: Path, error: Exception) -> RecordError:
    said = getattr(error, "msg", type(error).__name__)
    place = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
    return RecordError(f"{path}: not JSON ({said}{place}); it is cut or not a file of JSON.")


def _begins(path: Path) -> bytes:
    return head_of(path, 4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _is_lined(path: Path) -> bool:
    """Whether a file has one JSON value on each line, and more than one line.

    Of the first lines one may be damaged; a list or an object that is spread over lines has none
    that is a whole value and begins at the margin.
    """
    if not _goes_on(path):
        return False
    with open_bytes(path) as file:
        whole = 0
        for number in range(1, 5):
            line = _read(path, file, line=True)
            if not line:
                break
            whole += line[:1] in b"{[" and _is_json(line)
            if whole and number > 1:
                return True
    return False


def _goes_on(path: Path) -> bool:
    """Whether anything stands after the first line, which may be a list of gigabytes: no more than
    a piece of it is held."""
    with open_bytes(path) as file:
        while (piece := _read(path, file, _CHUNK, line=True)) and not piece.endswith(b"\n"):
            pass
        return bool(_read(path, file, _CHUNK).strip())


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict | list)
    except (ValueError, RecursionError):
        return False


def _lines(path: Path, notes: Notes) -> Iterator[tuple[str, Any]]:
    number = 0
    with open_bytes(path) as file:
        while line := _read(path, file, line=True):
            number += 1
            if not line.strip():
                continue
            where = f"{path.name}: line {number}"
            try:
                value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                notes.add("lines that are not UTF-8 left out", where)
            except (ValueError, RecursionError):
                cut = not line.endswith(b"\n")
                what = "a last line that is cut" if cut else "lines that are no JSON"
                notes.add(f"{what} left out", where)
            else:
                yield where, value
        note_cut(path, file, notes)


_BETWEEN = re.compile(r"[\s,]*")
_WORD = 12
"""Characters that no word of JSON, and no character that is escaped, is longer than."""


def _elements(path: Path, notes: Notes) -> Iterator[tuple[str, Any]]:
    """The elements of a list that is a whole file, as far as the file goes. No more of it is held
    than one of them needs: what is read at once doubles until it holds one."""
    decoder, number, size = json.JSONDecoder(), 0, _CHUNK
    with open_bytes(path) as packed:
        file: IO[Any] = io.TextIOWrapper(packed, "utf-8-sig", newline="")
        text, at, whole = _read(path, file, size).lstrip()[1:], 0, False
        while True:
            at += len(_BETWEEN.match(text, at)[0])  # type: ignore[index]
            if ended := text.startswith("]", at):
                break
            with suppress(_Cut):
                value, at = _element(decoder, text, at, whole, f"{path}: element {number + 1}")
                number, size = number + 1, _CHUNK
                yield f"{path.name}: element {number}", value
                continue
            if whole:
                break
            more = _read(path, file, size)
            text, at, whole, size = text[at:] + more, 0, not more, 2 * size
        if ended and (text[at + 1 :].strip() or _read(path, file, _CHUNK).strip()):
            notes.add("texts after the end of a list left out", path.name)
    if not ended:
        notes.add("a list that is cut, its last element left out", f"{path.name}: {number + 1}")


class _Cut(Exception):
    """Not an error: a value goes on behind the text that is there."""


def _element(
    decoder: json.JSONDecoder, text: str, at: int, whole: bool, where: str
) -> tuple[Any, int]:
    """The value at a place of a text, and where it ends; `whole`: nothing comes behind the text."""
    try:
        value, end = decoder.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        ends = isinstance(error, json.JSONDecodeError) and (
            error.pos + (0 if whole else _WORD) >= len(text.rstrip()) or "Unterminated" in error.msg
        )
        if ends:
            raise _Cut from None
        said = getattr(error, "msg", type(error).__name__)
        raise RecordError(f"{where} is not JSON ({said}).") from None
    if end == len(text) and not whole:  # a number may go on
        raise _Cut
    return value, end


# -- what a file begins with -------------------------------------------------------------------

_MARK = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\],]', re.DOTALL)
_DEEPEST = 100
"""Objects within objects that are looked into."""


def opening(head: bytes) -> Any:
    """The JSON value that a file begins with; what the head cuts off is left out of it.

    None where it begins with something else.
    """
    text = head.decode("utf-8-sig", "ignore").lstrip()
    if text[:1] not in ("{", "["):
        return None
    decoder = json.JSONDecoder(strict=False)
    try:
        return decoder.raw_decode(text)[0]
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError):  # not so of a number of thousands of digits
            text = text[: error.pos]
    at, ends = 0, ""  # up to where no value is cut, and what closes those that are open there
    for found in _MARK.finditer(text):
        mark = found[0]
        if mark in "}]" and not ends.startswith(mark):
            break
        if mark in "{[}]":
            ends = {"{": "}", "[": "]"}[mark] + ends if mark in "{[" else ends[1:]
        if len(ends) > _DEEPEST:
            ends = ends[1:]
            break
        if mark[0] != '"':
            at = found.start() if mark == "," else found.end()
    try:
        return decoder.decode(text[:at] + ends)
    except ValueError:
        return None
