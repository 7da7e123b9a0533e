"""Run a small SFT in a process of its own, so that a test can kill it or start several."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from coa.train.rows import Row
from coa.train.settings import SftSettings

WORKER = str(Path(__file__).resolve())


def surroundings() -> dict[str, str]:
    """The environment in which the worker finds this source, one thread and no network."""
    paths = [str(Path(WORKER).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    kept = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def tiny_rows(count: int = 8) -> list[Row]:
    made = []
    for index in range(count):
        ids = [1, 10 + index, 20, *((7 * index + 3 * step) % 300 + 5 for step in range(10 + index))]
        made.append(Row(f"t{index}", ids, [0.0, 0.0, 0.0, *[1.0] * (len(ids) - 3)]))
    return made


def tiny_settings(model: Path, **changes: object) -> SftSettings:
    settings: dict[str, object] = {
        "model": f"hf:{model}",
        "rank": 8,
        "lr": 2e-2,
        "epochs": 12,
        "batch_size": 3,
        "checkpoint_every": 4,
        "deterministic": True,
        "threads": 1,
        "max_length": 128,
    }
    return SftSettings(**(settings | changes))  # type: ignore[arg-type]


def main(model: str, directory: str, changes: str = "{}") -> None:
    from coa.errors import CoaError
    from coa.train.processes import Processes
    from coa.train.sft import run_sft

    place = Processes.open()
    print(f"process {place.index} of {place.count}", file=sys.stderr, flush=True)

    try:
        run_sft(
            tiny_settings(Path(model), **json.loads(changes)),
            tiny_rows(),
            Path(directory),
            on_update=lambda at: print(at.update, flush=True),
        )
    except CoaError as error:  # as the command line shows it
        raise SystemExit(f"coa: {error}") from None


if __name__ == "__main__":
    main(*sys.argv[1:])
