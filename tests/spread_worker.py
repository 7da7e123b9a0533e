"""Train a few steps with weights spread over processes, in processes of their own.

Started by `accelerate launch` with two processes, or alone; writes what it found to a file.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coa.train.optimizer import OptimizerStep, PolicyOptimizer
from coa.train.policy import Policy
from coa.train.processes import Processes
from coa.train.rows import Row
from coa.train.settings import SftSettings
from sft_worker import tiny_rows

STEPS = 3


def part_loss(policy: Policy, rows: list[Row], total: float) -> torch.Tensor:
    places, targets, first = [], [], 0
    for row in rows:
        places += [first + at for at in range(2, len(row.ids) - 1)]
        targets += row.ids[3:]
        first += len(row.ids)
    hidden = policy.hidden([row.ids for row in rows])[torch.tensor(places)]
    return -policy.logprobs(hidden, torch.tensor(targets)).sum() / total


def train(model: Path, out: Path, kind: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    policy = Policy(
        f"hf:{model}",
        full=kind != "low",
        rank=4,
        dtype=torch.bfloat16 if kind == "bf16" else torch.float32,
        keep_reference=True,
        max_length=64,
    )
    processes = Processes.open()
    settings = SftSettings(lr=1e-2, schedule="constant", warmup=0.0)
    optimizer = PolicyOptimizer(policy, settings, STEPS, processes)
    rows = tiny_rows(3)  # an odd number: one process has a part more than the other
    total = float(sum(len(row.ids) - 3 for row in rows))
    record: dict[str, Any] = {"processes": processes.count, "losses": [], "norms": []}

    def step(at: int) -> OptimizerStep:
        own = processes.share(rows)
        return optimizer.step(at, [partial(part_loss, policy, [row], total) for row in own])

    def hidden() -> list[list[float]]:
        with torch.no_grad():
            return policy.hidden([rows[0].ids]).tolist()

    start = hidden()
    for at in range(STEPS):
        done = step(at)
        record["losses"].append(done.loss)
        record["norms"].append(done.grad_norm)
        if at == 0:
            policy.write(out / "early", policy.gathered(), update=1)
            held = optimizer.saved.state_dict()
            if processes.main:
                torch.save(held, out / "early.pt")
            processes.wait()
    policy.save(out / "trained")
    adapter = policy.adapter()
    record["tensors"] = len(adapter.whole or adapter.pairs)
    record["hidden"] = hidden()
    with policy.reference():
        record["reference_is_start"] = hidden() == start
    policy.restore(out / "early")
    optimizer.saved.load_state_dict(torch.load(out / "early.pt", weights_only=True))
    record["again"] = step(1).loss
    if processes.main:
        (out / "record.json").write_text(json.dumps(record), encoding="utf-8")
    processes.wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[3:]:  # model:kind
        model, kind = case.split(":")
        train(Path(sys.argv[1]) / model, Path(sys.argv[2]) / f"{model}-{kind}", kind)
