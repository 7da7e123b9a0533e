"""Task: a question with gold answers, frozen. TaskSet: an ordered list of them, on disk as JSONL.

Teachers, tools and prompts are given `task.public()`, which has no gold, so that a leak is a type
of mistake that cannot be made by accident.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coa.errors import RecordError, did_you_mean
from coa.runs import Json, read_records, write_jsonl
from coa.whole_files import check_replaceable, first_record

SCHEMA = 1
TABLES = (".csv", ".tsv")
_FIELDS = ("schema", "id", "question", "answers", "answer", "meta", "gold")


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

    def __post_init__(self) -> None:
        if not isinstance(self.question, str) or not self.question.strip():
            raise RecordError(f"task {self.id or '(no id)'}: the question is empty.")
        if isinstance(self.answers, str):  # type: ignore[unreachable]
            raise TypeError(f"answers must be a list of strings, found {self.answers!r}.")
        object.__setattr__(self, "answers", tuple(map(str, self.answers)))
        if not self.id:
            world = str(self.meta.get("world", ""))
            try:
                digest = hashlib.sha256(f"{world}\0{self.question}".encode()).hexdigest()
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
        record["answers"] = list(self.answers)
        record["meta"] = dict(self.meta)
        record["gold"] = dict(self.gold)
        return record

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
        )


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
        left = []
        for queue in going:
            task = next(queue, None)
            if task is not None:
                left.append(queue)
                yield task
        going = left


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

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

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
            from coa.tasks.table import read_table

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
