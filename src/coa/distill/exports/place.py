"""Where an export may be written: a folder that is new, empty, or holds an earlier export.

Each file is known by what it holds, so that no marker lies among files of which a trainer reads
the whole folder. Rows for LLaMA-Factory look like anybody's: they are ours when the list beside
them says so. That list is the one file that is added to, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from coa.distill.exports.files import own_rows
from coa.distill.exports.pieces import is_template
from coa.errors import UsageError
from coa.tasks.published import need_pyarrow
from coa.whole_files import first_record, foreign

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
