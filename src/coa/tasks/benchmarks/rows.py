"""Rows of a benchmark's file, one `Row` at a time.

The same benchmark is published under several spellings ('Question', 'question', 'problem'), so
columns are compared in lower case with underscores. Rows as verl and AFM write them (a prompt in
messages, the truth under `reward_model`) are unfolded into plain columns. What a row lacks is one
line that names the file, the row, what was found and what was expected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coa.errors import RecordError
from coa.runs import Json
from coa.tasks.published import asked_in, read_columns


class LeftOut(Exception):
    """A row that does not belong to what is measured, with the reason; it is counted, not lost."""


class Row:
    """One row: its columns by any of their names, and what is missing as an error."""

    def __init__(self, columns: Json, where: str) -> None:
        self.where = where
        self._columns = _unfolded({_plain_name(key): value for key, value in columns.items()})

    def get(self, *names: str) -> Any:
        """The first of these columns that holds something, or None."""
        for name in names:
            if not _is_nothing(value := self._columns.get(name)):
                return value
        return None

    def need(self, *names: str) -> Any:
        """As `get`, where there must be something."""
        value = self.get(*names)
        if value is None:
            wanted = " or ".join(repr(name) for name in names)
            empty = next((name for name in names if name in self._columns), None)
            if empty is not None:
                raise self.error(f"{empty!r} is empty")
            found = ", ".join(repr(name) for name in self._columns) or "nothing"
            raise self.error(f"found the columns {found}, expected {wanted}")
        return value

    def text(self, *names: str) -> str:
        """A column that must hold text."""
        value = self.need(*names)
        if isinstance(value, (dict, list)):
            raise self.error(f"{names[0]!r} is a {type(value).__name__}, expected text")
        return str(value).strip()

    def listed(self, name: str) -> list[Any]:
        """A column that must be there, and may be an empty list."""
        value = self._columns.get(name)
        if not isinstance(value, list):
            value = [self.need(name)]
        return value

    def answers(self, *names: str) -> tuple[str, ...]:
        """Gold answers: a text, a list of them (also as JSON text), or a value with aliases."""
        found = tuple(dict.fromkeys(_answers(self.need(*names))))
        if not found:
            raise self.error(f"{names[0]!r} holds no answer")
        return found

    def nested(self, name: str) -> Row:
        """An object under a column, also as JSON text; an empty row where there is none."""
        held = self.get(name)
        if isinstance(held, str):
            held = self.parsed(name, held)
        return Row(held if isinstance(held, dict) else {}, self.where)

    def parsed(self, name: str, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self.error(f"{name!r} is not JSON: {text[:40]!r}") from None

    def error(self, message: str) -> RecordError:
        return RecordError(f"{self.where}: {message}.")


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file of any format that benchmarks are published in."""
    for number, columns in read_columns(path):
        yield Row(columns, f"{path}: row {number}")


# -- columns ---------------------------------------------------------------------------------


def _plain_name(name: Any) -> str:
    return "_".join(str(name).strip().lower().split())


def _unfolded(columns: Json) -> Json:
    """Columns of verl's rows as others have them; what a row says itself is kept."""
    truth = columns.get("reward_model")
    if not isinstance(truth, dict):
        return columns
    extra = columns.get("extra_info")
    unfolded = {**extra} if isinstance(extra, dict) else {}
    unfolded |= {"ground_truth": truth.get("ground_truth")}
    if asked := asked_in(columns.get("prompt")):
        unfolded["question"] = asked
    return unfolded | {key: value for key, value in columns.items() if not _is_nothing(value)}


def _is_nothing(value: Any) -> bool:
    """None, an empty text or list, or NaN, which tables write for nothing."""
    return value is None or value in ("", [], {}) or value != value


def _answers(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        held = {_plain_name(key): each for key, each in value.items()}
        for key in ("value", "target", "aliases"):
            yield from _answers(held.get(key))
        return
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _answers(each)
        return
    if isinstance(value, str) and value.lstrip().startswith('["'):
        try:
            listed = json.loads(value)
        except (ValueError, RecursionError):
            listed = None
        if isinstance(listed, list):  # a table can hold a list only as text
            yield from _answers(listed)
            return
    if not _is_nothing(value) and str(value).strip():
        yield str(value).strip()
