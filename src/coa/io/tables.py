"""Files as others publish them: JSON, JSON lines, CSV, TSV or parquet in, the columns of each row
out. What is wrong with a file is one line that names it and the place.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from coa.errors import MissingExtra, RecordError, UsageError
from coa.io.runs import Json

FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_LISTS = ("data", "questions", "rows", "examples")
"""Keys under which a JSON object holds the rows of a whole file."""
_ASKED = re.compile(r"^(?:Question|Task):[ \t]*\n?", re.M)


def read_columns(path: Path) -> Iterator[tuple[int, Json]]:
    """The number of each row, or its line, and its columns as they are named there."""
    if not path.is_file():
        found = "is a folder, expected a file" if path.is_dir() else "no such file"
        raise UsageError(f"{path}: {found}.")
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if suffix not in FORMATS:
        raise UsageError(f"{path}: expected one of {', '.join(FORMATS)}, also with .gz after it.")
    empty = True
    for row in _READERS[suffix](path):
        empty = False
        yield row
    if empty:
        raise RecordError(f"{path}: holds no row.")


def keep_source(source: Path, *written: Path) -> None:
    """Refuse to write over the file that is read: it may be the only copy."""
    for out in written:
        if out.resolve() == source.resolve():
            raise UsageError(f"{out}: is the file to read. Name another one with --out.")


def asked_in(prompt: Any) -> str:
    """The question in a prompt: a text, or messages of which the last user's counts."""
    if isinstance(prompt, list):
        said = [m.get("content") for m in prompt if isinstance(m, dict) and m.get("role") == "user"]
        prompt = said[-1] if said else ""
    return after_instructions(prompt) if isinstance(prompt, str) else ""


def after_instructions(text: str) -> str:
    """What follows the last line that begins with `Question:` or `Task:`; else the whole text."""
    marks = list(_ASKED.finditer(text))
    return text[marks[-1].end() :].strip() if marks else text.strip()


# -- formats ---------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[tuple[int, Json]]:
    with _text_of(path) as file:
        for number, line in enumerate(_decoded(path, file), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as exc:
                why = getattr(exc, "msg", exc)  # without the place in the line
                raise RecordError(
                    f"{path}:{number}: the line is not JSON ({why}). Expected one object a line."
                ) from None
            yield number, _object(path, number, row)


def _json(path: Path) -> Iterator[tuple[int, Json]]:
    """One list, an object that holds one, or (as BFCL names it) one object a line."""
    with _text_of(path) as file:
        content = "".join(_decoded(path, file))
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError) as exc:
        if content.lstrip()[:1] == "{":
            yield from _lines(path)
            return
        raise RecordError(f"{path}: not JSON ({exc}). Expected a list of objects.") from None
    if isinstance(whole, dict):
        held = {key.lower(): value for key, value in whole.items()}
        whole = next((held[key] for key in _LISTS if isinstance(held.get(key), list)), [whole])
    if not isinstance(whole, list):
        raise RecordError(f"{path}: found a {type(whole).__name__}, expected a list of objects.")
    yield from ((number, _object(path, number, row)) for number, row in enumerate(whole, start=1))


def _table(path: Path, delimiter: str) -> Iterator[tuple[int, Json]]:
    csv.field_size_limit(sys.maxsize)  # a program's tests are longer than what csv allows
    with _text_of(path) as file:
        rows = csv.DictReader(_decoded(path, file), delimiter=delimiter)
        try:
            for number, row in enumerate(rows, start=1):
                yield number, {key: value for key, value in row.items() if key is not None}
        except csv.Error as exc:
            raise RecordError(f"{path}:{rows.line_num}: not a table ({exc}).") from None


def need_pyarrow(what: str) -> Any:
    """The module, or the line that says how to get it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as exc:
        raise MissingExtra(what, "export") from exc
    return pyarrow


def _parquet(path: Path) -> Iterator[tuple[int, Json]]:
    pyarrow = need_pyarrow("Reading a parquet file")
    try:
        with _open(path) as file:
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=64)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from enumerate(rows, start=1)
    except (pyarrow.ArrowException, OSError) as exc:
        raise RecordError(f"{path}: not a parquet file ({exc}).") from None


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, Json]]]] = {
    ".jsonl": _lines,
    ".json": _json,
    ".csv": lambda path: _table(path, ","),
    ".tsv": lambda path: _table(path, "\t"),
    ".parquet": _parquet,
}


def _open(path: Path) -> Any:
    return gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")


def _text_of(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="")


def _decoded(path: Path, file: io.TextIOWrapper) -> Iterator[str]:
    try:
        yield from file
    except UnicodeDecodeError:
        raise RecordError(f"{path}: not UTF-8. Save the file as UTF-8.") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as exc:
        raise RecordError(f"{path}: not a whole gzip file ({exc}).") from None


def _object(path: Path, number: int, row: Any) -> Json:
    if not isinstance(row, dict):
        found = type(row).__name__
        raise RecordError(f"{path}: row {number} is a {found}, expected an object.")
    return row


def markdown_table(
    head: Sequence[object], rows: Iterable[Sequence[object]], align: str = ""
) -> list[str]:
    """The lines of a table in Markdown; `align` has l or r for each column, by default the first is
    text and the others are numbers."""
    lines = [_markdown_row(head)]
    rules = ("---" if each == "l" else "---:" for each in align or "l" + "r" * (len(head) - 1))
    lines.append("|" + "|".join(rules) + "|")
    return lines + [_markdown_row(row) for row in rows]


def _markdown_row(cells: Sequence[object]) -> str:
    shown = (f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in shown) + " |"
