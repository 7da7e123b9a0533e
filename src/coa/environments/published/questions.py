"""Readers of benchmarks whose answer is a short text, a number or a formula.

A reader turns a row into a task with gold answers. Only the fields named here are shown; whatever
else a row holds (a rationale, supporting pages, the way to the answer) stays behind.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from coa.errors import RecordError
from coa.io.runs import Json
from coa.io.tables import read_columns
from coa.tasks import Task


class LeftOutRow(Exception):
    """A row that does not belong to what is measured, with the reason; it is counted, not lost."""


class PublishedRow:
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

    def nested(self, name: str) -> PublishedRow:
        """An object under a column, also as JSON text; an empty row where there is none."""
        held = self.get(name)
        if isinstance(held, str):
            held = self.parsed(name, held)
        return PublishedRow(held if isinstance(held, dict) else {}, self.where)

    def parsed(self, name: str, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self.error(f"{name!r} is not JSON: {text[:40]!r}") from None

    def error(self, message: str) -> RecordError:
        return RecordError(f"{self.where}: {message}.")


def read_rows(path: Path) -> Iterator[PublishedRow]:
    """The rows of a file of any format that benchmarks are published in."""
    for number, columns in read_columns(path):
        yield PublishedRow(columns, f"{path}: row {number}")


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


Reader = Callable[[PublishedRow], Task]

QUESTION = ("question", "problem", "query", "input")
ANSWER = ("ground_truth", "golden_answers", "answers", "answer", "possible_answers")
_HOPS = re.compile(r"(\d)hop")


def plain(
    *,
    answer: tuple[str, ...] = ANSWER,
    family: tuple[str, ...] = (),
    level: tuple[str, ...] = (),
) -> Reader:
    """A reader of rows with a question, its answers, and fields that a report groups by."""

    def read(row: PublishedRow) -> Task:
        meta = {"family": row.get(*family), "level": row.get(*level)}
        return task_of(row, row.text(*QUESTION), row.answers(*answer), meta)

    return read


def task_of(
    row: PublishedRow,
    question: str,
    answers: tuple[str, ...] = (),
    meta: Json | None = None,
    gold: Json | None = None,
    own_id: Any = None,
) -> Task:
    """A task of a row, under the id that the row has; what is None is not said."""
    named = own_id or row.get("task_id", "_id", "id", "question_id", "unique_id", "questionid")
    kept = {key: value for key, value in (meta or {}).items() if value is not None}
    return Task(question, answers, str(named or ""), kept, gold or {})


# -- questions over an encyclopedia ----------------------------------------------------------


def trivia(row: PublishedRow) -> Task:
    """TriviaQA: the answer is an object with a value and its aliases."""
    return task_of(
        row, row.text("question"), row.answers("golden_answers", "answer", "ground_truth")
    )


def musique(row: PublishedRow) -> Task:
    """MuSiQue: aliases stand beside the answer, and the id says how many hops there are."""
    if str(row.get("answerable")).lower() == "false":
        raise LeftOutRow("made to be unanswerable")
    aliases = row.get("answer_aliases")
    answers = row.answers("golden_answers", "answer", "ground_truth")
    if aliases is not None:
        answers = tuple(dict.fromkeys([*answers, *row.answers("answer_aliases")]))
    hops = _HOPS.search(str(row.get("id", "_id") or ""))
    return task_of(row, row.text("question"), answers, {"hops": int(hops[1]) if hops else None})


# -- the web ---------------------------------------------------------------------------------


def gaia(row: PublishedRow) -> Task:
    """GAIA: tasks with a file beside them are left out, since the chain is text."""
    answer = row.text("final_answer", "answer")
    if answer == "?":
        raise row.error("'final_answer' is '?': the test split has no answers. Use validation")
    if row.get("file_name"):
        raise LeftOutRow("comes with a file")
    return task_of(row, row.text("question"), (answer,), {"level": row.get("level")})


def webwalker(row: PublishedRow) -> Task:
    """WebWalkerQA: the pages with the answer and the way to them are gold."""
    told = row.nested("info")
    meta = {"family": told.get("type"), "level": told.get("level"), "lang": told.get("lang")}
    meta |= {"domain": told.get("domain"), "root_url": row.get("root_url")}
    hidden = {name: told.get(name) for name in ("source_website", "golden_path")}
    gold = {name: value for name, value in hidden.items() if value is not None}
    return task_of(row, row.text("question"), row.answers("answer"), meta, gold)


def browsecomp(row: PublishedRow) -> Task:
    """BrowseComp: published encrypted, each row with the text (canary) that its key comes from."""
    question, answer = row.text("problem", "question"), row.text("answer")
    topic = row.get("problem_topic", "topic")
    if row.get("canary") is not None:
        canary = row.text("canary")
        try:
            question, answer = unsealed(question, canary), unsealed(answer, canary)
        except ValueError:
            raise row.error(
                "cannot be decrypted with its canary; expected the CSV as it was published"
            ) from None
    return task_of(row, question, (answer,), {"family": topic})


def unsealed(sealed: str, canary: str) -> str:
    """Base64, and each byte exclusive-or the SHA-256 of the canary, repeated."""
    try:
        hidden = base64.b64decode(sealed, validate=True)
    except binascii.Error as exc:
        raise ValueError(f"not base64: {exc}") from None
    key = cycle(hashlib.sha256(canary.encode()).digest())
    return bytes(a ^ b for a, b in zip(hidden, key, strict=False)).decode()


def hle(row: PublishedRow) -> Task:
    """Humanity's Last Exam: questions with a picture are left out, since the chain is text."""
    if row.get("image") is not None:
        raise LeftOutRow("comes with a picture")
    meta = {"family": row.get("category"), "answer_type": row.get("answer_type")}
    return task_of(row, row.text("question"), (row.text("answer"),), meta)


# -- mathematics -----------------------------------------------------------------------------


def olympiad(row: PublishedRow) -> Task:
    """OlympiadBench: several final answers are all asked for, in one text."""
    if row.get("ground_truth") is not None:
        answers = row.answers("ground_truth")
    else:
        answers = (", ".join(row.answers("final_answer", "answer")),)
    if row.get("image_1") is not None:
        raise LeftOutRow("comes with a picture")
    meta = {"family": row.get("subfield"), "answer_type": row.get("answer_type")}
    return task_of(row, row.text("question", "problem"), answers, meta)


_ASKED = re.compile(r"^(?:Question|Task):[ \t]*\n?", re.M)


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
