"""Export files: whole, or not there; the same rows give the same bytes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from coa.errors import MissingExtra
from coa.runs import Json, dumps, write_atomic


def save_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def save_jsonl(path: Path, rows: Iterable[Json]) -> None:
    write_atomic(path, "".join(dumps(row) + "\n" for row in rows))


def save_parquet(path: Path, rows: Sequence[Json], schema: Any) -> None:
    """Write rows by an explicit `pyarrow.Schema`: types must not depend on what rows hold."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(list(rows), schema=schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            pyarrow.parquet.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def need_pyarrow(what: str) -> Any:
    """The module, or the line that says how to get it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as exc:
        raise MissingExtra(what, "export") from exc
    return pyarrow
