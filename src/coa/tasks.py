"""Task: a question with gold answers, frozen. TaskSet: an ordered list of them, on disk as JSONL.

Teachers, tools and prompts are given `task.public()`, which has no gold, so that a leak is a type
of mistake that cannot be made by accident.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from coa.errors import RecordError, UsageError, did_you_mean
from coa.grammar import ChatMessage
from coa.grammar.load import PRESETS
from coa.grammar.prompt import Speaker
from coa.io.files import check_replaceable, first_record
from coa.io.runs import Json, read_records, write_jsonl

SCHEMA = 1
TABLES = (".csv", ".tsv")
_FIELDS = ("schema", "id", "question", "answers", "answer", "meta", "gold", "history")


@dataclass(frozen=True, slots=True)
class Task:
    """One question. `id` is derived from the content when it is not given."""

    question: str
    answers: tuple[str, ...] = ()
    """Gold answers; any of them is right. Empty on a public task."""
    id: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What a report groups by: family, hops, split, phrasing, world. Never a gold answer."""
    gold: Mapping[str, Any] = field(default_factory=dict)
    """What only a scorer or a test may see besides the answers (reference hops, unit tests)."""
    history: tuple[ChatMessage, ...] = ()
    """What was said before the question: a system message, earlier turns. The prompt shows it."""

    def __post_init__(self) -> None:
        if not isinstance(self.question, str) or not self.question.strip():
            raise RecordError(f"task {self.id or '(no id)'}: the question is empty.")
        if isinstance(self.answers, str):  # type: ignore[unreachable]
            raise TypeError(f"answers must be a list of strings, found {self.answers!r}.")
        object.__setattr__(self, "answers", tuple(map(str, self.answers)))
        object.__setattr__(self, "history", tuple(ChatMessage(*each) for each in self.history))
        if not self.id:
            world = str(self.meta.get("world", ""))
            said = [world, self.question, *(text for each in self.history for text in each)]
            try:
                digest = hashlib.sha256("\0".join(said).encode()).hexdigest()
            except UnicodeEncodeError:
                raise RecordError(f"the question {self.question!r} is not text in UTF-8.") from None
            object.__setattr__(self, "id", digest[:16])

    def public(self) -> Task:
        """The task as everybody but the scorer may see it: no gold of any kind."""
        return replace(self, answers=(), gold={})

    def is_asked_by(self, text: str) -> bool:
        """Whether a text is this question, perhaps with a few words around it, or is part of it."""
        mine, other = (" ".join(each.split()).casefold() for each in (self.question, text))
        return mine in other or (bool(other) and other in mine)

    def to_json(self) -> Json:
        record: Json = {"schema": SCHEMA, "id": self.id, "question": self.question}
        record |= {"answers": list(self.answers), "meta": dict(self.meta), "gold": dict(self.gold)}
        return record | history_json(self.history)

    @classmethod
    def from_json(cls, record: Json) -> Task:
        if "events" in record or "segments" in record:
            raise RecordError("this is an episode or a trajectory, expected a task.")
        schema = record.get("schema", SCHEMA)
        if schema != SCHEMA:
            raise RecordError(
                f"task schema {schema!r} is newer than this package (schema {SCHEMA}). "
                "Update chain-of-agents."
            )
        unknown = next((key for key in record if key not in _FIELDS), None)
        if unknown is not None:
            hint = did_you_mean(unknown, _FIELDS)
            raise RecordError(
                f"{unknown!r} is not a field of a task.{hint} Fields of your own go under 'meta'."
            )
        given = {key: value for key, value in record.items() if value is not None}
        return cls(
            question=record["question"],
            answers=_answers(given.get("answers", given.get("answer", ()))),
            id=str(given.get("id", "")),
            meta=_table(given, "meta"),
            gold=_table(given, "gold"),
            history=read_history(given.get("history", ())),
        )


def history_json(history: Sequence[ChatMessage]) -> Json:
    """Earlier messages as a field of a record, in OpenAI's form; no field where there are none."""
    messages = [{"role": role, "content": text} for role, text in history]
    return {"history": messages} if messages else {}


def read_history(given: Any) -> tuple[ChatMessage, ...]:
    """Earlier messages of a record."""
    if not isinstance(given, (list, tuple)):
        raise RecordError(f"'history': found {str(given)[:60]!r}, expected a list of messages.")
    for each in given:
        match each:
            case {"role": role, "content": str(), **more} if role in get_args(Speaker) and not more:
                continue
        raise RecordError(
            f"'history': found {str(each)[:60]!r}, expected an object with a role (one of "
            f"{', '.join(get_args(Speaker))}) and a content that is a text."
        )
    return tuple(ChatMessage(each["role"], each["content"]) for each in given)


def _answers(given: Any) -> tuple[str, ...]:
    """Gold answers as a file has them: a text, a number, or a list of these."""
    listed = given if isinstance(given, (list, tuple)) else [given]
    for answer in listed:
        if not isinstance(answer, (str, int, float)):
            raise RecordError(
                f"'answers': found {answer!r}, expected a text, a number or a list of these."
            )
    return tuple(map(str, listed)) if listed != [""] else ()


def _table(given: Json, name: str) -> Mapping[str, Any]:
    found = given.get(name, {})
    if not isinstance(found, Mapping):
        raise RecordError(f"{name!r}: found {found!r}, expected an object.")
    return found


def in_turn(queues: Iterable[Iterator[Task]]) -> Iterator[Task]:
    """One task of each queue after the other, until all are empty."""
    going = list(queues)
    while going:
        for queue in list(going):
            task = next(queue, None)
            if task is None:
                going.remove(queue)
            else:
                yield task


@dataclass(frozen=True)
class TaskSet(Sequence[Task]):
    """An ordered list of tasks with distinct ids."""

    tasks: tuple[Task, ...]
    name: str = "tasks"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        seen: set[str] = set()
        for task in self.tasks:
            if task.id in seen:
                raise RecordError(f"{self.name}: two tasks have the id {task.id!r}.")
            seen.add(task.id)

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: Any) -> Any:
        return self.tasks[index]

    def fingerprint(self) -> str:
        """A hash of the content, for manifests: the same set of tasks has the same fingerprint."""
        digest = hashlib.sha256()
        for task in self.tasks:
            digest.update(json.dumps(task.to_json(), sort_keys=True).encode())
        return digest.hexdigest()[:16]

    def save(self, path: Path) -> None:
        write_jsonl(path, (task.to_json() for task in self.tasks))

    @staticmethod
    def check_place(path: Path) -> None:
        """Refuse a place for tasks where something else is, or tasks that a person wrote."""
        check_replaceable(path, "tasks", lambda record: Task.from_json(record).to_json())

    @classmethod
    def load(cls, path: Path) -> TaskSet:
        """Read tasks from JSONL (ours), or CSV and TSV (columns question and answer)."""
        if path.suffix.lower() in TABLES:
            return read_table(path)
        try:
            tasks = read_records(path, Task.from_json)
        except RecordError as error:
            if path.suffix.lower() in (".jsonl", ".json") or first_record(path) is not None:
                raise
            raise RecordError(f"{error} A table has to end in {' or '.join(TABLES)}.") from None
        if not tasks:
            raise RecordError(f"{path}: holds no task.")
        return cls(tuple(tasks), name=path.stem)


QUESTION = ("question", "query", "prompt", "input")
ANSWER = ("answer", "answers", "gold", "target", "output")
REWARDS = ("exact", "squad", "f1", "calls", "auto", "format", "judge", "math", "tests")
"""Named again, because rewards are built on tasks; a test holds both together."""


def read_table(path: Path) -> TaskSet:
    """Read tasks from CSV or TSV; alternatives in the answer column are joined by `|`.

    A table that can only be read by guessing is refused with its line: a row with more cells than
    the first line, a quote that is not closed, two columns that mean the same.
    """
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
            raise RecordError(
                f"{path}:{line}: a cell of this row opens a quote and does not end with one "
                f'({error}). Close it where the cell ends, and write "" for a quote inside of it.'
            ) from None
        if row is None:
            return
        if row:
            yield line, row


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
    for name, value in meta.items():
        follows, expected = _ORDERS.get(name, (bool, ""))
        if not follows(value):
            raise RecordError(
                f"{where}: column {name!r} is {value!r}, expected {expected}. "
                "Rename the column if it means something else."
            )
    return Task(text, answers, named, meta, hidden), bool(named)


_ORDERS: dict[str, tuple[Callable[[str], object], str]] = {
    "tools": (lambda value: False, "no such column: only JSONL can declare tools"),
    "world": (str.isdecimal, "the number of a world"),
    "grammar": (
        lambda value: value in PRESETS or value.endswith(".toml"),
        f"a path ending in .toml or one of {', '.join(PRESETS)}",
    ),
    "reward": (
        lambda value: value in REWARDS or ":" in value,
        f"one of {', '.join(REWARDS)}",
    ),
}
"""Names in `meta` that give orders: whether a value can be followed, and what is expected. A column
that only happens to have such a name must not give one."""
