"""Exports: trajectories in, the files that other people's trainers read out.

Each format keeps as much of our loss mask as its trainer can express; docs/datasets.md says what
that is. What a format cannot hold faithfully is left out, counted, with its reason: nothing is
changed silently. Files are whole or not there, and the same trajectories give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

from coa.distill.exports.files import OWN, save_json, save_parquet, with_dataset
from coa.distill.exports.pieces import CHATML, check_markers, frame_of
from coa.distill.exports.place import FILES, LISTED, RL, SFT, TEMPLATE, TRAIN, check_place
from coa.distill.exports.rows import (
    NotExportable,
    TokenRow,
    alpaca_row,
    listing,
    message_row,
    opening,
    sharegpt_row,
    token_row,
)
from coa.distill.exports.sift import LeftOut, Note, choose_grammar, sift
from coa.distill.exports.verl import Truth, rl_rows, rl_schema, sft_schema
from coa.engines.codec import Codec
from coa.errors import CoaError, ConfigError, GrammarError, UsageError, did_you_mean
from coa.protocol import Grammar, load_grammar, system_prompt
from coa.rollouts import choose_environments
from coa.runs import Json, write_atomic, write_jsonl
from coa.tasks.published import need_pyarrow
from coa.tasks.task import Task, TaskSet
from coa.trajectory import Trajectory

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
