"""Imports of the datasets that were published with AFM: chains to imitate, and tasks with gold.

Fine-tuning rows have alpaca's keys: instructions and question in one message, the whole chain in
the answer. A row becomes a `Trajectory`: the grammar is told by the tags, observations become the
environment's, framed as our runtime frames them, and the prompt is the grammar's own, so that what
is trained is what `coa eval` will send. Rows for reinforcement learning (and benchmark files of
the same family) become `Task`s. A row that does not fit is left out with its reason; the rest
goes on.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from coa.distillation.exports import QUESTION
from coa.environments.published.programs import SUITE_CHOICES, SUITE_KEYS
from coa.environments.published.questions import after_instructions, asked_in
from coa.errors import CoaError, RecordError
from coa.grammar import PRESETS, Block, Grammar, check, load_grammar, parse, system_prompt
from coa.grammar.prompt import PromptKind
from coa.io.files import check_replaceable
from coa.io.runs import Json, dumps, write_jsonl
from coa.io.tables import keep_source, read_columns
from coa.recording.importers import HEAD
from coa.recording.importers.reading import head_of, opening
from coa.tasks import Task, TaskSet
from coa.trajectory import Author, Segment, StopReason, Trajectory, Usage, save_trajectories

Note = Callable[[str], None]
T = TypeVar("T")

KINDS = ("afm-sft", "afm-rl")
"""What was published: chains to imitate, and tasks with gold."""
RARE = 0.02
"""A tag in fewer of a file's rows than this does not decide about its grammar."""
_OBSERVATION = re.compile(r"<(observation|information)>.*?</\1>", re.S)
_PLAIN_BREAK = re.compile(r"(?<!\r)\n")
_TARGETS = ("target", "ground_truth", "answers", "answer", "golden_answers")
_TESTS = (*SUITE_KEYS, "tests", *SUITE_CHOICES)
"""What `coa.rewards.programs` reads."""
_SHOWN = (
    *("index", "split", "difficulty", "level", "platform", "contest_date", "contest_id"),
    *("question_title", "starter_code", "root_url"),
)
"""Fields that a task may show; whatever is not in this list may hold the answer."""


class _Unfit(CoaError, ValueError):
    """A row that is left out: a reason to count by, and what exactly was found."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass
class Imported(Generic[T]):
    """What was taken, and each row that was not, with the reason."""

    items: list[T] = field(default_factory=list)
    rejected: list[Json] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def take(self, row: int, make: Callable[[], T]) -> None:
        """Add what `make` makes of a row (counted from 1), or the reason that it raises."""
        try:
            self.items.append(make())
        except _Unfit as unfit:
            self.reasons[unfit.reason] += 1
            self.rejected.append({"row": row, "reason": str(unfit)})

    def tell(self, note: Note, where: Path) -> None:
        """One line a reason, with its first row; an error when nothing was taken."""
        lines = []
        for reason, count in self.reasons.most_common():
            first = next(r for r in self.rejected if r["reason"].startswith(reason))
            lines.append(f"left out {count}: {reason} (first: row {first['row']})")
        if not self.items:
            raise RecordError(
                f"{where}: no row can be imported; {'; '.join(lines) or 'it is empty'}."
            )
        for line in lines:
            note(f"{line}.")


def read_rows(path: Path) -> list[Json]:
    """All rows of a file, in any format that such files are published in."""
    return [columns for _, columns in read_columns(path)]


def kind_of(path: Path) -> str:
    """Which of `KINDS` a file is, by the columns of its first row; empty: it is none."""
    head = head_of(path, HEAD)
    first = next(iter(read_columns(path)), (0, {}))[1] if head[:4] == b"PAR1" else opening(head)
    if isinstance(first, list):
        first = first[0] if first else None
    if not isinstance(first, dict):
        return ""
    if isinstance(first.get("instruction"), str) and isinstance(first.get("output"), str):
        return "afm-sft"
    if first.keys() & {"reward_model", "extra_info"} and first.keys() & {"prompt", "extra_info"}:
        return "afm-rl"
    return ""


# -- fine-tuning -----------------------------------------------------------------------------


def import_sft(rows: Sequence[Json], grammar: str = "") -> Imported[Trajectory]:
    """Chains of an AFM fine-tuning set, under the given grammar or the one their tags tell."""
    outputs = [row["output"] for row in rows if isinstance(row.get("output"), str)]
    if not outputs:
        raise RecordError(
            "no row has text under 'output'; expected the keys instruction and output."
        )
    chosen = load_grammar(grammar or detect_grammar(outputs))
    imported: Imported[Trajectory] = Imported()
    seen: Counter[str] = Counter()
    for number, row in enumerate(rows, start=1):

        def make(row: Json = row) -> Trajectory:
            trajectory = _chain(row, chosen)
            trajectory.sample = seen[trajectory.task_id]
            seen[trajectory.task_id] += 1
            return trajectory

        imported.take(number, make)
    return imported


def detect_grammar(outputs: Sequence[str]) -> str:
    """The smallest preset that has all tags which are usual in these chains."""
    tags = {name: set(load_grammar(name).tags) for name in PRESETS}
    counts: Counter[str] = Counter()
    for output in outputs:
        observed = set(_OBSERVATION.findall(output))
        rest = _OBSERVATION.sub("", output)
        counts.update(observed | {t for t in set().union(*tags.values()) if f"</{t}>" in rest})
    used = {tag for tag, count in counts.items() if count >= RARE * len(outputs)}
    fitting = [name for name in PRESETS if used <= tags[name]]
    if not used or not fitting:
        found = ", ".join(f"<{tag}>" for tag in sorted(used)) or "none that is known"
        raise RecordError(f"blocks found: {found}; no preset has them all. Choose with --grammar.")
    return min(fitting, key=lambda name: len(tags[name]))


def _chain(row: Json, grammar: Grammar) -> Trajectory:
    instruction, output = row.get("instruction"), row.get("output")
    if not isinstance(instruction, str) or not isinstance(output, str):
        raise _Unfit("no text under 'instruction' and 'output'")
    if row.get("history"):
        raise _Unfit("a conversation of several turns ('history')")
    if not isinstance(row.get("input") or "", str):
        raise _Unfit("'input' is not text")
    instruction, output = _plain_lines(instruction), _plain_lines(output)
    bound = _bind(grammar, f"{instruction}{output}")
    kind, question = _question(instruction, _plain_lines(str(row.get("input") or "")), bound)
    if not question.strip():
        raise _Unfit("no question after the instructions")
    blocks = parse(bound, output, env=True).blocks
    segments = [Segment(Author.PROMPT, system_prompt(bound, kind))]
    segments += _segments(output, blocks, bound)
    trajectory = Trajectory(
        task_id=_task(question).id,
        question=question,
        grammar=bound.name,
        segments=segments,
        tools=list(bound.tool_roles),
        prompt=kind,
        weights="imported",
    )
    fault = check(bound, parse(bound, trajectory.text, env=True))
    if fault is not None:
        raise _Unfit(f"not legal under {bound.name!r}, {fault.kind}", fault.message)
    trajectory.stop, trajectory.answer = StopReason.ANSWERED, blocks[-1].body.strip()
    calls = sum(segment.author is Author.ENV for segment in segments)
    trajectory.usage = Usage(turns=calls + 1, tool_calls=calls)
    return trajectory


def _plain_lines(text: str) -> str:
    """Written on Windows, with plain line breaks. Where only some are Windows' (a page in a chain
    of ours), they belong to the text."""
    return text if _PLAIN_BREAK.search(text) else text.replace("\r\n", "\n")


def _bind(grammar: Grammar, text: str) -> Grammar:
    """The grammar with the tools that instructions or chain name; with all if they name none."""
    named = [grammar.by_name[name] for name in grammar.tool_roles if f"<{name}>" in text]
    return grammar.with_tools(named) if named else grammar


def _question(instruction: str, asked: str, grammar: Grammar) -> tuple[PromptKind, str]:
    """Which prompt of ours it is (compact for a stranger's), and the question after it."""
    for kind in get_args(PromptKind):
        opening = f"{system_prompt(grammar, kind)}{QUESTION}"
        if instruction.startswith(opening):
            return kind, instruction.removeprefix(opening)
    if asked.strip():
        return "compact", asked.strip()
    return "compact", after_instructions(instruction)


def _segments(text: str, blocks: Sequence[Block], grammar: Grammar) -> Iterable[Segment]:
    """Model and environment by turns. Line breaks around an observation belong to its frame."""
    position = 0
    for before, block in zip([None, *blocks], blocks, strict=False):
        if block.role != grammar.observation:
            continue
        if before is None or before.role not in grammar.tool_roles:
            raise _Unfit("an observation without a call before it")
        if f"<{grammar.observation}>" in block.body:  # it took in what the model wrote next
            raise _Unfit("an observation that is not closed before the next one")
        written = text[position : block.start].strip("\n")
        yield Segment(Author.MODEL, written)
        yield Segment(Author.ENV, grammar.render_observation(block.body, written))
        position = block.end
    yield Segment(Author.MODEL, text[position:].strip("\n"))


# -- reinforcement learning ------------------------------------------------------------------


def import_rl(rows: Sequence[Json]) -> Imported[Task]:
    """Tasks with gold: rows as verl and AFM write them, or with `question` and `answer`."""
    imported: Imported[Task] = Imported()
    first: dict[str, int] = {}
    for number, row in enumerate(rows, start=1):

        def make(row: Json = row, number: int = number) -> Task:
            task = _rl_task(row)
            if first.setdefault(task.id, number) != number:
                raise _Unfit("asked before", f"in row {first[task.id]}")
            return task

        imported.take(number, make)
    return imported


def _rl_task(row: Json) -> Task:
    if "segments" in row:
        raise _Unfit("a chain of ours, whose answer is no gold")
    extra, model = _held(row, "extra_info"), _held(row, "reward_model")
    question = extra.get("question") or row.get("question") or asked_in(row.get("prompt"))
    if not isinstance(question, str) or not question.strip():
        raise _Unfit("no question: neither 'extra_info.question', 'question' nor a user's 'prompt'")
    truth = model.get("ground_truth")
    if truth is None:
        truth = next((row[key] for key in _TARGETS if row.get(key) is not None), None)
    answers, gold = _gold(truth)
    if not answers and not gold:
        raise _Unfit("no ground truth")
    meta = {key: _shown(value) for key in _SHOWN if (value := extra.get(key, row.get(key)))}
    for key in ("data_source", "ability"):
        if row.get(key):
            meta[key] = str(row[key])
    task = _task(question.strip(), answers, meta, gold)
    try:
        dumps(task.to_json())
    except (TypeError, ValueError) as exc:  # a table may hold bytes
        raise _Unfit("holds what JSON cannot", str(exc)) from None
    return task


def _shown(value: Any) -> Any:
    """As JSON has it; a date becomes text."""
    return value if isinstance(value, (str, int, float, list, dict)) else str(value)


def _held(row: Json, key: str) -> Json:
    """An object under `key`, which tables hold as JSON text; nothing where there is none."""
    held = row.get(key) or {}
    if isinstance(held, str):
        try:
            held = json.loads(held)
        except (ValueError, RecursionError):
            held = None
    if not isinstance(held, dict):
        raise _Unfit(f"{key!r} is not an object")
    return held


def _task(
    question: str, answers: tuple[str, ...] = (), meta: Json | None = None, gold: Json | None = None
) -> Task:
    try:
        return Task(question, answers, meta=meta or {}, gold=gold or {})
    except RecordError as error:
        raise _Unfit("the question is not text", str(error)) from None


def _gold(truth: Any) -> tuple[tuple[str, ...], Json]:
    """Answers, and tests of a program. A string is JSON only when it is an object that we know:
    `[1, 2]` and `204` are answers as they stand."""
    if isinstance(truth, str):
        held = _known_object(truth)
        return _gold(held) if held else ((truth,) if truth.strip() else (), {})
    if isinstance(truth, dict):
        if isinstance(truth.get("tests"), dict):
            return (), {"tests": truth["tests"]}
        if tests := {key: value for key, value in truth.items() if key in _TESTS and value}:
            return (), {"tests": tests}
        return _gold(next((truth[key] for key in _TARGETS if truth.get(key) is not None), None))
    if isinstance(truth, (list, tuple)):
        return tuple(text for item in truth for text in _gold(item)[0]), {}
    missing = truth is None or truth != truth  # NaN, which tables write for nothing
    return (() if missing else (str(truth),)), {}


def _known_object(text: str) -> Json | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return held if isinstance(held, dict) and {*held} & {*_TARGETS, *_TESTS} else None


# -- the commands ----------------------------------------------------------------------------


def run_import_sft(file: Path, out: Path, grammar: str = "", note: Note = print) -> Json:
    """`coa import afm-sft`: a trajectories file, and what was left out beside it."""
    _keep_others(file, out)
    check_replaceable(out, "trajectories", lambda row: Trajectory.from_json(row).to_json())
    rows = read_rows(file)
    try:
        imported = import_sft(rows, grammar)
    except RecordError as error:
        raise RecordError(f"{file}: {error}") from None
    imported.tell(note, file)
    save_trajectories(out, imported.items)
    report = _report(imported, out)
    return report | {"grammar": imported.items[0].grammar}


def run_import_rl(file: Path, out: Path, note: Note = print) -> Json:
    """`coa import afm-rl`: a task file, and what was left out beside it."""
    _keep_others(file, out)
    TaskSet.check_place(out)
    imported = import_rl(read_rows(file))
    imported.tell(note, file)
    TaskSet(tuple(imported.items), name=file.stem).save(out)
    return _report(imported, out)


def _keep_others(file: Path, out: Path) -> None:
    """Refuse to write over the source, or over what somebody else keeps beside `out`."""
    keep_source(file, out, _rejects(out))
    known = ("row", "reason")
    check_replaceable(_rejects(out), "rejected rows", lambda row: {k: row[k] for k in known})


def _rejects(out: Path) -> Path:
    """Where the rows are told that were left out."""
    return out.with_name(f"{out.stem}.rejected.jsonl")


def _report(imported: Imported[Any], out: Path) -> Json:
    files = [str(out)]
    if imported.rejected:
        write_jsonl(_rejects(out), imported.rejected)
        files.append(str(_rejects(out)))
    else:  # what an earlier import left out, this one took
        _rejects(out).unlink(missing_ok=True)
    left = dict(imported.reasons.most_common())
    return {"rows": len(imported.items), "left_out": left, "files": files}
