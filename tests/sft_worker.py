"""Run a small SFT in a process of its own, so that a test can kill it."""

from __future__ import annotations

import sys
from pathlib import Path

from coa.train.rows import Row
from coa.train.settings import SftSettings
from coa.train.sft import run_sft


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


if __name__ == "__main__":
    run_sft(
        tiny_settings(Path(sys.argv[1])),
        tiny_rows(),
        Path(sys.argv[2]),
        on_update=lambda at: print(at.update, flush=True),
    )
