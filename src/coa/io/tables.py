"""Files as others publish them: JSON, JSON lines, CSV, TSV or parquet in, the columns of each row
out. What is wrong with a file is one line that names it and the place.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from coa.errors import MissingExtra, RecordError, UsageError
from coa.io.runs import Json, json_lines

FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_LISTS = ("data", "questions", "rows", "examples")
"""Keys under which a JSON object holds the rows of a whole file."""


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


# -- formats ---------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[tuple[int, Json]]:
    return json_lines(path, _text(path))


def _json(path: Path) -> Iterator[tuple[int, Json]]:
    """One list, an object that holds one, or (as BFCL names it) one object a line."""
    content = "".join(_text(path))
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
    for number, row in enumerate(whole, start=1):
        if not isinstance(row, dict):
            found = type(row).__name__
            raise RecordError(f"{path}: row {number} is a {found}, expected an object.")
        yield number, row


def _table(path: Path, delimiter: str) -> Iterator[tuple[int, Json]]:
    csv.field_size_limit(sys.maxsize)  # a program's tests are longer than what csv allows
    rows = csv.DictReader(_text(path), delimiter=delimiter)
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


def _text(path: Path) -> Iterator[str]:
    """The lines of a file, with their ends."""
    try:
        with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as file:
            yield from file
    except UnicodeDecodeError:
        raise RecordError(f"{path}: not UTF-8. Save the file as UTF-8.") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as exc:
        raise RecordError(f"{path}: not a whole gzip file ({exc}).") from None


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
