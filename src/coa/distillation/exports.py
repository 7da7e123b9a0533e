"""Exports: trajectories in, the files that other people's trainers read out.

Each format keeps as much of our loss mask as its trainer can express; docs/datasets.md says what
that is. What a format cannot hold faithfully is left out, counted, with its reason: nothing is
changed silently. Files are whole or not there, and the same trajectories give the same bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from coa.distillation.export_rows import (
    CHATML,
    NotExportable,
    TokenRow,
    alpaca_row,
    check_markers,
    frame_of,
    is_template,
    listing,
    message_row,
    opening,
    pieces,
    sharegpt_row,
    token_row,
)
from coa.errors import CoaError, ConfigError, GrammarError, RecordError, UsageError, did_you_mean
from coa.grammar import Grammar, load_grammar, system_prompt
from coa.io.files import first_record, foreign, whole_file
from coa.io.runs import Json, write_atomic, write_jsonl
from coa.io.tables import need_pyarrow
from coa.models.codec import Codec
from coa.rollouts import choose_environments
from coa.tasks import Task, TaskSet
from coa.trajectory import CHAT_MARKER, Author, StopReason, Trajectory

OWN = "coa_"
"""How the names of our datasets begin in a `dataset_info.json`."""


def save_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def with_dataset(path: Path, entry: Json) -> Json:
    """What a `dataset_info.json` lists, and `entry`; the datasets of others stay as they are."""
    listed = _listed(path) if path.exists() else {}
    for name, other in listed.items():
        for own in entry.values():
            same = isinstance(other, dict) and other.get("file_name") == own["file_name"]
            if same and name not in entry:
                raise RecordError(
                    f"{path}: the dataset {name!r} is in {own['file_name']}, which this export "
                    "would replace. Give another directory with --out."
                )
    return listed | entry


def own_rows(path: Path) -> set[str]:
    """The files that a `dataset_info.json` has for datasets of ours; none where it is not there."""
    try:
        listed = _listed(path) if path.is_file() else {}
    except RecordError:
        return set()
    ours = [each for name, each in listed.items() if name.startswith(OWN)]
    return {str(each.get("file_name")) for each in ours if isinstance(each, dict)}


def _listed(path: Path) -> Json:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, dict):
        raise RecordError(
            f"{path}: not a JSON object, so that nothing can be added to its datasets. "
            "Correct it, or give another directory with --out."
        )
    return listed


def save_parquet(path: Path, rows: Sequence[Json], schema: Any) -> None:
    """Write rows by an explicit `pyarrow.Schema`: types must not depend on what rows hold."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(list(rows), schema=schema)
    with whole_file(path) as file:
        pyarrow.parquet.write_table(table, file)


# ------------------------------------------------------------------------------------------------
# Where an export may be written: a folder that is new, empty, or holds an earlier export.
#
# Each file is known by what it holds, so that no marker lies among files of which a trainer reads
# the whole folder. Rows for LLaMA-Factory look like anybody's: they are ours when the list beside
# them says so. That list is the one file that is added to, whoever wrote it.
# ------------------------------------------------------------------------------------------------


TRAIN, TEMPLATE, LISTED = "train.jsonl", "chat_template.jinja", "dataset_info.json"
ALPACA, SHAREGPT = "alpaca.json", "sharegpt.json"
SFT, RL = "sft.parquet", "rl.parquet"
FILES = {
    "alpaca": (ALPACA, LISTED),
    "sharegpt": (SHAREGPT, LISTED),
    "trl": (TRAIN, TEMPLATE),
    "trl-tokens": (TRAIN,),
    "verl": (SFT, TEMPLATE),
}
"""Format -> what is written of chains; of tasks it is one more file, `RL`."""
_FIELDS = ({"task_id", "messages"}, {"task_id", "input_ids", "labels"})


def check_place(out: Path, names: Collection[str]) -> None:
    """Refuse a folder of somebody else's, and files under `names` that no export of ours wrote."""
    standing = next(each for each in (out, *out.parents) if each.exists())
    if not standing.is_dir():
        raise UsageError(f"{standing}: is a file, expected a folder. Name another one with --out.")
    held = sorted(each.name for each in out.glob("[!.]*") if not _is_empty(each))
    for name in names:
        if name in held and name != LISTED and not _is_ours(out / name):
            raise foreign(out / name, "a new file or one that coa export wrote")
    welcome = LISTED in names and LISTED in held
    if held and not welcome and not any(_is_ours(out / name) for name in held):
        raise UsageError(
            f"{out}: holds {held[0]!r} and no export, expected a folder that is new, empty or of "
            "an earlier export. Name another one with --out."
        )


def _is_empty(path: Path) -> bool:
    return path.is_file() and not path.stat().st_size


def _is_ours(path: Path) -> bool:
    return path.name in _KNOWN and path.is_file() and _KNOWN[path.name](path)


def _has_fields(path: Path) -> bool:
    return (first_record(path) or {}).keys() in _FIELDS


def _is_template(path: Path) -> bool:
    return is_template(path.read_text(encoding="utf-8", errors="replace"))


def _is_listed(path: Path) -> bool:
    return path.name in own_rows(path.with_name(LISTED))


def _has_columns(path: Path) -> bool:
    """Whether a parquet file has what only ours have: AFM's tasks have the rest of our columns."""
    pyarrow = need_pyarrow("Reading a parquet file")
    try:
        schema = pyarrow.parquet.read_metadata(path).schema
    except (pyarrow.ArrowException, OSError):
        return False
    found = {schema.column(number).path for number in range(len(schema))}
    if path.name == SFT:
        return {column.partition(".")[0] for column in found} == {"task_id", "messages"}
    return {"extra_info.index", "extra_info.gold"} <= found


_KNOWN: dict[str, Callable[[Path], bool]] = {
    TRAIN: _has_fields,
    TEMPLATE: _is_template,
    ALPACA: _is_listed,
    SHAREGPT: _is_listed,
    SFT: _has_columns,
    RL: _has_columns,
}


# ------------------------------------------------------------------------------------------------
# Which trajectories an export takes. What it leaves out is counted, with one line a reason.
# ------------------------------------------------------------------------------------------------


Note = Callable[[str], None]


class LeftOut:
    """Reasons and how often each was met."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, reason: str, count: int = 1) -> None:
        if count:
            self.counts[reason] += count

    def tell(self, note: Note, kept: int) -> None:
        """One line a reason; an error when nothing is left."""
        lines = [f"left out {count}: {reason}" for reason, count in self.counts.most_common()]
        if not kept:
            raise RecordError(f"there is nothing to export: {'; '.join(lines)}.")
        for line in lines:
            note(f"{line}.")


def choose_grammar(trajectories: Sequence[Trajectory], asked: str) -> str:
    """The name of the grammar to export: the asked one, or the most frequent."""
    if asked:
        return load_grammar(asked).name if asked.endswith(".toml") else asked
    counts = Counter(trajectory.grammar for trajectory in trajectories)
    return min(counts, key=lambda name: (-counts[name], name))


def sift(
    trajectories: Sequence[Trajectory], grammar: str, left: LeftOut, *, plain: bool
) -> list[Trajectory]:
    """Those of the grammar that a model can learn from.

    `plain`: a trainer will encode the text, so that nothing in it may read as a chat marker.
    """
    kept = []
    for trajectory in trajectories:
        reason = _objection(trajectory, grammar) or _oddity(trajectory, plain)
        if reason:
            left.add(reason)
        else:
            kept.append(trajectory)
    return kept


def _objection(trajectory: Trajectory, grammar: str) -> str:
    if trajectory.grammar != grammar:
        other = trajectory.grammar
        return f"of grammar {other!r}, not {grammar!r}; export them apart with --grammar {other}"
    if not trajectory.segments or trajectory.segments[0].author is not Author.PROMPT:
        return "without a prompt segment at the beginning"
    if trajectory.stop is not StopReason.ANSWERED:
        how = f"it stopped with {trajectory.stop.value!r}" if trajectory.stop else "no stop reason"
        return f"unfinished ({how}); only chains that end with an answer are exported"
    if not any(piece.trained and piece.text.strip() for piece in pieces(trajectory)):
        return "without any text to train on"
    return ""


def _oddity(trajectory: Trajectory, plain: bool) -> str:
    """What its text holds that a tokenizer could not read, or would read as its own."""
    texts = (trajectory.question, *(segment.text for segment in trajectory.segments))
    if plain and any(CHAT_MARKER.search(text) for text in texts):
        return (
            "with a chat marker such as <|im_end|> in their text, which a trainer's tokenizer "
            "would take for its own; only trl-tokens can hold them"
        )
    if not all(_is_utf8(text) for text in texts):
        return "with text that UTF-8 cannot write (half of a surrogate pair)"
    return ""


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ------------------------------------------------------------------------------------------------
# Parquet for verl: chains to imitate, and tasks with gold to learn from by trial.
#
# `ground_truth` is a struct `{target: [...], question}`: the scorers of AFM and verl that compare
# texts index it as a dict and fail on a JSON string. Scorers of mathematics take one plain
# string: `truth="text"` writes the first answer. Every task has an index of its own, because
# AFM's trainer groups rollouts by it. Tools are told the question and never the answer.
# ------------------------------------------------------------------------------------------------


Truth = Literal["struct", "text"]


def sft_schema(pyarrow: Any) -> Any:
    return pyarrow.schema([("task_id", pyarrow.string()), ("messages", _messages(pyarrow))])


def rl_rows(tasks: Iterable[Task], system: str, tools: Sequence[str], truth: Truth) -> list[Json]:
    """One row a task; those without a gold answer must have been left out."""
    return [_rl_row(task, system, tools, truth) for task in tasks]


def _rl_row(task: Task, system: str, tools: Sequence[str], truth: Truth) -> Json:
    source = str(task.meta.get("data_source") or task.meta.get("set") or "coa")
    told = {"question": task.question, "data_source": source, "ground_truth": ""}
    target: Any = list(task.answers)
    return {
        "data_source": source,
        "prompt": [
            {"role": "system", "content": system},
            {"role": "user", "content": task.question},
        ],
        "ability": "coding" if "code" in tools else "fact-reasoning",
        "reward_model": {
            "style": "rule",
            "ground_truth": task.answers[0]
            if truth == "text"
            else {"target": target, "question": task.question},
        },
        "extra_info": {
            "index": task.id,
            "split": str(task.meta.get("split", "train")),
            "question": task.question,
            "answer": target,
            "gold": json.dumps(dict(task.gold), ensure_ascii=False, sort_keys=True),
            "need_tools_kwargs": bool(tools),
            **({"tools_kwargs": {t: {"create_kwargs": told} for t in tools}} if tools else {}),
        },
    }


def rl_schema(pyarrow: Any, tools: Sequence[str], truth: Truth) -> Any:
    text, texts = pyarrow.string(), pyarrow.list_(pyarrow.string())
    target = pyarrow.struct([("target", texts), ("question", text)])
    told = [("question", text), ("data_source", text), ("ground_truth", text)]
    tool = pyarrow.struct([("create_kwargs", pyarrow.struct(told))])
    rest = [
        ("index", text),
        ("split", text),
        ("question", text),
        ("answer", texts),
        ("gold", text),
        ("need_tools_kwargs", pyarrow.bool_()),
    ]
    if tools:  # parquet has no struct without fields
        rest.append(("tools_kwargs", pyarrow.struct([(name, tool) for name in tools])))
    return pyarrow.schema(
        [
            ("data_source", text),
            ("prompt", _messages(pyarrow)),
            ("ability", text),
            (
                "reward_model",
                pyarrow.struct(
                    [("style", text), ("ground_truth", text if truth == "text" else target)]
                ),
            ),
            ("extra_info", pyarrow.struct(rest)),
        ]
    )


def _messages(pyarrow: Any) -> Any:
    text = pyarrow.string()
    return pyarrow.list_(pyarrow.struct([("role", text), ("content", text)]))


__all__ = ["FORMATS", "Format", "NotExportable", "check_markers", "export"]

Format = Literal["alpaca", "sharegpt", "trl", "trl-tokens", "verl"]
FORMATS: tuple[Format, ...] = get_args(Format)
MakeRow = Callable[[Trajectory], TokenRow]


def export(
    trajectories: Sequence[Trajectory],
    to: Format,
    out: Path,
    *,
    grammar: str = "",
    codec: Codec | None = None,
    make_row: MakeRow | None = None,
    tasks: Sequence[Task] = (),
    truth: Truth = "struct",
    note: Note = print,
) -> Json:
    """Write one format into the directory `out`; returns what was written and what was not.

    `grammar` chooses among several, the most frequent one by default. `codec` is of the model that
    will be trained: prompts then have its chat format (ChatML otherwise) and cuts lie between its
    tokens. `make_row` is needed by the tokenised format, which is made of training rows:
    `coa.train.rows.row_maker(codec)`. `tasks` with gold become verl's rows for reinforcement
    learning. An `out` that holds something else than an earlier export is refused.
    """
    if to not in FORMATS:
        raise UsageError(f"{to!r} is not an export format.{did_you_mean(to, FORMATS)}")
    if not trajectories and not (to == "verl" and tasks):
        raise UsageError("there is no trajectory to export.")
    check_place(out, [*FILES[to], *([RL] if to == "verl" and tasks else ())])
    name = choose_grammar(trajectories, grammar) if trajectories else grammar or _grammar_for(tasks)
    left = LeftOut()
    kept = sift(trajectories, name, left, plain=to != "trl-tokens")
    made = _rows(kept, _maker(to, codec, make_row), left)
    rows, used = [row for row, _ in made], [trajectory for _, trajectory in made]
    judged = [task for task in TaskSet(tuple(tasks)) if task.answers] if to == "verl" else []
    left.add("tasks without a gold answer", len(tasks) - len(judged) if to == "verl" else 0)
    left.tell(note, len(rows) + len(judged))
    report: Json = {"to": to, "grammar": name, "rows": len(rows), "rl_rows": len(judged)}
    report["left_out"] = dict(left.counts.most_common())
    report["mistakes_trained"] = _count_mistakes(used, to, codec, note)
    report["files"] = _save(to, out, rows, name, codec)
    if judged:
        chain = used[0] if used else None
        report["files"] += _save_rl(out, judged, grammar or name, chain, truth)
    return report


def _grammar_for(tasks: Sequence[Task]) -> str:
    """The grammar that all these tasks are made for."""
    environments, _ = choose_environments((), TaskSet(tuple(tasks)))
    found = sorted({env.value().name for env in environments})
    if len(found) > 1:
        listed = ", ".join(found)
        raise ConfigError(f"the tasks suit several grammars: {listed}. Choose one with --grammar.")
    return found[0]


def _maker(
    to: Format, codec: Codec | None, make_row: MakeRow | None
) -> Callable[[Trajectory], Json]:
    encode = codec.encode_with_offsets if codec else None
    if to == "trl-tokens":
        if codec is None or make_row is None:
            raise UsageError("trl-tokens needs the model whose tokens it writes: --model REF.")
        check_markers(codec)
        return lambda trajectory: token_row(trajectory, make_row(trajectory))
    if to == "alpaca":
        return lambda trajectory: alpaca_row(trajectory, trajectory.protocol.observation)
    if to == "sharegpt":
        frame = frame_of(codec) if codec else None
        return lambda trajectory: sharegpt_row(trajectory, frame, encode)
    return lambda trajectory: message_row(trajectory, encode)


def _rows(
    trajectories: Sequence[Trajectory], make: Callable[[Trajectory], Json], left: LeftOut
) -> list[tuple[Json, Trajectory]]:
    """A row of each; one that cannot be made is left out, the rest goes on."""
    made = []
    for trajectory in trajectories:
        try:
            made.append((make(trajectory), trajectory))
        except NotExportable as reason:
            left.add(str(reason))
        except CoaError as error:  # it begins with the name of the task
            left.add((str(error).partition(": ")[2] or str(error)).rstrip("."))
    return made


def _load(grammar: str) -> Grammar:
    try:
        return load_grammar(grammar)
    except GrammarError as error:
        raise UsageError(f"{error} Give its file with --grammar FILE.toml.") from None


def _count_mistakes(used: Sequence[Trajectory], to: Format, codec: Codec | None, note: Note) -> int:
    """How many rows train a marked mistake, because the format cannot mask it."""
    if to not in ("alpaca", "sharegpt") or (to == "sharegpt" and codec is not None):
        return 0
    count = sum(any(segment.errs for segment in t.segments) for t in used)
    if count:
        advice = "sharegpt with --model, " if to == "sharegpt" else ""
        note(
            f"{count} of {len(used)} rows hold marked mistakes, which {to} cannot mask: a trainer "
            f"will learn them. To mask them, use {advice}trl, trl-tokens or verl."
        )
    return count


def _save(
    to: Format, out: Path, rows: Sequence[Json], grammar: str, codec: Codec | None
) -> list[str]:
    if not rows:
        return []
    names = FILES[to]
    if LISTED in names:
        entry = listing(f"{OWN}{Path(grammar).stem}", names[0], to)
        # The list comes first: by it, rows that a kill left behind are known as ours.
        save_json(out / LISTED, with_dataset(out / LISTED, entry))
        save_json(out / names[0], rows)
    elif to == "verl":
        save_parquet(out / SFT, rows, sft_schema(need_pyarrow("A parquet file")))
    else:
        write_jsonl(out / TRAIN, rows)
    if TEMPLATE in names:
        write_atomic(out / TEMPLATE, (frame_of(codec) if codec else CHATML).template())
    return list(names)


def _save_rl(
    out: Path, tasks: Sequence[Task], grammar: str, chain: Trajectory | None, truth: Truth
) -> list[str]:
    """Tasks open as the chains do, which may have fewer tools than the grammar."""
    if chain is not None:
        system, tools = opening(chain), chain.tools
    else:
        loaded = _load(grammar)
        system, tools = system_prompt(loaded), list(loaded.tool_roles)
    schema = rl_schema(need_pyarrow("A parquet file"), tools, truth)
    save_parquet(out / RL, rl_rows(tasks, system, tools, truth), schema)
    return [RL]
