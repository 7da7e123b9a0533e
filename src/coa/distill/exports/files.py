"""Export files: whole, or not there; the same rows give the same bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coa.runs import Json, write_atomic
from coa.whole_files import whole_file


def save_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def save_parquet(path: Path, rows: Sequence[Json], schema: Any) -> None:
    """Write rows by an explicit `pyarrow.Schema`: types must not depend on what rows hold."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(list(rows), schema=schema)
    with whole_file(path) as file:
        pyarrow.parquet.write_table(table, file)
