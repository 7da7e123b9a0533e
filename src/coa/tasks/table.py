"""Tasks from a table: a CSV with a question column and, if answers are known, an answer column.

A table that can only be read by guessing is refused with its line: a row with more cells than the
first line, a quote that is not closed, two columns that mean the same. A TSV is the same with tabs.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from coa.errors import RecordError, UsageError
from coa.protocol.load import PRESETS
from coa.tasks.task import Task, TaskSet

QUESTION = ("question", "query", "prompt", "input")
ANSWER = ("answer", "answers", "gold", "target", "output")
REWARDS = ("exact", "squad", "f1", "calls", "auto", "format", "judge", "math", "tests")
"""Named again, because rewards are built on tasks; a test holds both together."""


def read_table(path: Path) -> TaskSet:
    """Read tasks from CSV or TSV; alternatives in the answer column are joined by `|`."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file.")
    mark = "\t" if path.suffix.lower() == ".tsv" else ","
    rows = _rows(path, mark)
    top, names = next(rows, (1, []))
    columns = _columns(f"{path}:{top}", names)
    if not any(name in columns for name in QUESTION):
        found = ", ".join(map(repr, names)) or "nothing"
        raise RecordError(
            f"{path}: found columns {found}, expected one named 'question' "
            f"(and 'answer' if answers are known), separated by {_said(mark)}s. "
            "Rename the column in the first line."
        )
    tasks, lines = [], dict[str, int]()
    for line, row in rows:
        where = f"{path}:{line}"
        _check_width(where, row, names, mark)
        task, named = _task(where, dict(zip(names, row, strict=False)), columns)
        first = lines.setdefault(task.id, line)
        if first != line:
            raise RecordError(
                f"{where}: the {'id' if named else 'question'} is that of "
                f"line {first}. Remove one of them, or give each an id in a column 'id'."
            )
        tasks.append(task)
    if not tasks:
        raise RecordError(f"{path}: holds no task.")
    return TaskSet(tuple(tasks), name=path.stem)


def _rows(path: Path, mark: str) -> Iterator[tuple[int, list[str]]]:
    """The line on which each row begins, and its cells; empty lines are no rows."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as exc:
        line = exc.object[: exc.start].count(b"\n") + 1
        raise RecordError(f"{path}:{line}: not UTF-8. Save the file as UTF-8.") from None
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            _check_quotes(path, text, mark)
            raise RecordError(f"{path}:{line}: not a table ({error}).") from None
        if row is None:
            return
        if row:
            yield line, row


def _check_quotes(path: Path, text: str, mark: str) -> None:
    """Name the line where the first quote opens that does not end its cell; csv names the last."""
    quoted, plain = r'"(?:[^"]+|"")*+"', rf'(?!")[^{mark}\n]*+'
    cell = re.compile(rf"(?:{quoted}|{plain})(?:{mark}|\n|\Z)")
    at = 0
    while at < len(text) and (found := cell.match(text, at)):
        at = found.end()
    if at < len(text):
        line, shown = text.count("\n", 0, at) + 1, text[at : at + 40].partition("\n")[0]
        raise RecordError(
            f"{path}:{line}: the cell that begins with {shown!r} opens a quote and does not end "
            'with one. Close it where the cell ends, and write "" for a quote inside of it.'
        )


def _columns(where: str, names: Sequence[str]) -> dict[str, str]:
    """Each name as it is understood -> as it is written; those that cannot be told apart are
    refused. Columns without a name (pandas writes one for its index) are nobody's."""
    columns: dict[str, str] = {}
    for name in names:
        key = name.strip().lower()
        if key and key in columns:
            raise RecordError(
                f"{where}: two columns are named {key!r}. Rename one of them, or remove it."
            )
        columns[key] = name
    asking = [columns[key] for key in QUESTION if key in columns]
    if len(asking) > 1:
        raise RecordError(
            f"{where}: the columns {asking[0]!r} and {asking[1]!r} both mean the question. "
            "Rename one of them, or remove it."
        )
    return columns


def _check_width(where: str, row: Sequence[str], names: Sequence[str], mark: str) -> None:
    """Refuse cells without a column: most often one before them was cut at a comma of its own."""
    named = max(number for number, name in enumerate(names, start=1) if name.strip())
    # Spreadsheets add empty columns at the end, to the first line as well.
    if len(row) > len(names) or any(cell.strip() for cell in row[named:]):
        raise RecordError(
            f"{where}: found {len(row)} cells, expected {named}, as many as the first line names. "
            f"Put a cell that holds a {_said(mark)} in quotes."
        )


def _said(mark: str) -> str:
    return "tab" if mark == "\t" else "comma"


def _task(where: str, cells: Mapping[str, str], columns: Mapping[str, str]) -> tuple[Task, bool]:
    """The task of a row, and whether the row names it; a missing cell is an empty one."""
    question = next(columns[name] for name in QUESTION if name in columns)
    answer = next((columns[name] for name in ANSWER if name in columns), "")
    text = cells.get(question, "").strip()
    if not text:
        raise RecordError(f"{where}: the question is empty. Write one, or remove the row.")
    gold = cells.get(answer, "").split("|") if answer else []
    answers = tuple(part.strip() for part in gold if part.strip())
    taken = (question, answer, columns.get("id"))
    rest = {k: v for k, v in cells.items() if k.strip() and k not in taken and v}
    # Any other column that sounds like an answer is for scorers only.
    hidden = {k: v for k, v in rest.items() if k.strip().lower() in ANSWER}
    meta = {k: v for k, v in rest.items() if k not in hidden}
    named = cells.get(columns["id"], "").strip() if "id" in columns else ""
    _check_orders(meta, where)
    return Task(text, answers, named, meta, hidden), bool(named)


def _check_orders(meta: dict[str, str], where: str) -> None:
    """Some names in `meta` give orders; a column that only happens to have such a name must not."""
    for name, value in meta.items():
        if expected := _expected(name, value):
            raise RecordError(
                f"{where}: column {name!r} is {value!r}, expected {expected}. "
                "Rename the column if it means something else."
            )


def _expected(name: str, value: str) -> str:
    """What an order that cannot be followed should be; nothing for all else."""
    if name == "tools":
        return "no such column: only JSONL can declare tools"
    if name == "world" and not value.isdecimal():
        return "the number of a world of the Atlas"
    if name == "grammar" and value not in PRESETS and not value.endswith(".toml"):
        return f"a path ending in .toml or one of {', '.join(PRESETS)}"
    if name == "reward" and value not in REWARDS and ":" not in value:
        return f"one of {', '.join(REWARDS)}"
    return ""
