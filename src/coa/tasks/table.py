"""Tasks from a table: a CSV with a question column and, if answers are known, an answer column."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from coa.errors import RecordError, UsageError, boundary
from coa.protocol.load import PRESETS
from coa.tasks.task import Task, TaskSet

QUESTION = ("question", "query", "prompt", "input")
ANSWER = ("answer", "answers", "gold", "target", "output")
REWARDS = ("exact", "squad", "f1", "gym", "calls", "auto", "format", "judge", "math", "tests")
"""Named again, because rewards are built on tasks; a test holds both together."""


def read_csv(path: Path) -> TaskSet:
    """Read tasks from CSV; alternatives in the answer column are joined by `|`."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as exc:
        line = exc.object[: exc.start].count(b"\n") + 1
        raise RecordError(f"{path}:{line}: not UTF-8. Save the file as UTF-8.") from None
    with boundary(RecordError, f"{path}: reading it as CSV"):
        reader = csv.DictReader(io.StringIO(text, newline=""))
        columns = {(name or "").strip().lower(): name for name in reader.fieldnames or ()}
        question = next((columns[name] for name in QUESTION if name in columns), None)
        answer = next((columns[name] for name in ANSWER if name in columns), None)
        if question is None:
            found = ", ".join(repr(name) for name in reader.fieldnames or ()) or "nothing"
            raise RecordError(
                f"{path}: found columns {found}, expected one named 'question' "
                "(and 'answer' if answers are known), separated by commas. "
                "Rename the column in the first line."
            )
        tasks, lines = [], dict[str, int]()
        for row in reader:
            text = (row[question] or "").strip()
            if not text:
                raise RecordError(f"{path}:{reader.line_num}: the question is empty.")
            gold = (row[answer] or "").split("|") if answer is not None else []
            answers = tuple(part.strip() for part in gold if part.strip())
            taken = (question, answer, columns.get("id"))
            rest = {k: v for k, v in row.items() if k and k not in taken and v}
            # Any other column that sounds like an answer is for scorers only.
            hidden = {k: v for k, v in rest.items() if k.strip().lower() in ANSWER}
            meta = {k: v for k, v in rest.items() if k not in hidden}
            named = (row[columns["id"]] or "").strip() if "id" in columns else ""
            _check_orders(meta, f"{path}:{reader.line_num}")
            task = Task(text, answers, named, meta, hidden)
            first = lines.setdefault(task.id, reader.line_num)
            if first != reader.line_num:
                raise RecordError(
                    f"{path}:{reader.line_num}: the {'id' if named else 'question'} is that of "
                    f"line {first}. Remove one of them, or give each an id in a column 'id'."
                )
            tasks.append(task)
    if not tasks:
        raise RecordError(f"{path}: holds no task.")
    return TaskSet(tuple(tasks), name=path.stem)


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
        return f"module:attribute or one of {', '.join(REWARDS)}"
    return ""
