"""Export files: whole, or not there; the same rows give the same bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coa.errors import RecordError
from coa.runs import Json, write_atomic
from coa.whole_files import whole_file

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
