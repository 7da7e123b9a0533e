"""Supervised fine-tuning: masked cross-entropy over rows, resumable to the bit.

A run directory holds `metrics.jsonl` (one line per update, nothing that depends on the clock),
`timings.jsonl`, `checkpoints/` (the last two) and, at the end, `adapter/`. A checkpoint is a folder
written beside, synced and renamed: adapter, optimiser, position. Ctrl-C writes one, too. Starting
again in the same folder continues from the newest one, and drops metrics lines written after it.
The order of rows depends on the seed and the epoch only, so with `deterministic` the files are the
same as without a kill.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from coa.engines.local import choose_dtype
from coa.errors import TrainingError
from coa.runs import Appender, read_jsonl, write_atomic
from coa.train.checkpoint import Checkpoints, held_interrupt
from coa.train.losses import masked_cross_entropy
from coa.train.policy import Policy
from coa.train.rows import Row, batches, fingerprint
from coa.train.settings import SftSettings


@dataclass(frozen=True, slots=True)
class Progress:
    """What a progress line shows."""

    update: int
    updates: int
    loss: float
    tokens_per_second: float
    seconds_left: float


@dataclass(frozen=True, slots=True)
class SftResult:
    adapter: Path
    updates: int
    loss: float
    """Of the last update."""


OnProgress = Callable[[Progress], None]


def run_sft(
    settings: SftSettings,
    rows: Sequence[Row],
    run_dir: Path,
    *,
    progress: OnProgress | None = None,
    policy: Policy | None = None,
) -> SftResult:
    """Train on rows and write `run_dir/adapter`; the same call continues an interrupted run."""
    if not rows:
        raise TrainingError("There are no rows to train on.")
    _check_rows(rows, settings)
    threads = settings.threads or (os.cpu_count() or 1)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(settings.deterministic)
    if policy is None:
        policy = make_policy(settings)
    run_dir.mkdir(parents=True, exist_ok=True)
    return _Run(settings, rows, run_dir, policy, progress).execute()


def make_policy(settings: SftSettings) -> Policy:
    """The policy that these settings train; its codec encodes the rows."""
    return Policy(
        settings.model,
        rank=settings.rank,
        alpha=settings.alpha,
        dtype=choose_dtype(settings.dtype, settings.deterministic),
        seed=settings.seed,
        max_length=settings.max_length,
    )


def _check_rows(rows: Sequence[Row], settings: SftSettings) -> None:
    for row in rows:
        if len(row.ids) > settings.max_length:
            raise TrainingError(
                f"Task {row.task_id!r}: its row has {len(row.ids)} tokens, max_length is "
                f"{settings.max_length}. Raise sft.max_length or pass max_length to build_row."
            )
        if not any(weight > 0 for weight in row.weights[1:]):
            raise TrainingError(f"Task {row.task_id!r}: its row has no trainable token.")


class _Run:
    def __init__(
        self,
        settings: SftSettings,
        rows: Sequence[Row],
        run_dir: Path,
        policy: Policy,
        progress: OnProgress | None,
    ) -> None:
        self._settings, self._rows, self._policy = settings, rows, policy
        self._dir, self._progress = run_dir, progress
        self._per_epoch = math.ceil(len(rows) / settings.batch_size)
        self._updates = self._per_epoch * settings.epochs
        self._optimizer = torch.optim.AdamW(
            policy.parameters, lr=settings.lr, weight_decay=settings.weight_decay, fused=True
        )
        identity = {"settings": asdict(settings), "rows": fingerprint(rows)}
        self._checkpoints = Checkpoints(run_dir / "checkpoints", policy, self._optimizer, identity)

    def execute(self) -> SftResult:
        done, loss = self._checkpoints.restore()
        _drop_lines_after(self._dir / "metrics.jsonl", done)
        first = done
        metrics = Appender(self._dir / "metrics.jsonl")
        timings = Appender(self._dir / "timings.jsonl")
        started, tokens = time.perf_counter(), 0
        with metrics, timings, held_interrupt() as interrupted:
            while done < self._updates:
                begun = time.perf_counter()
                line = self._update(self._batch(done), done)
                done, loss = done + 1, float(line["loss"])
                metrics.write(line)
                timings.write({"update": done, "seconds": time.perf_counter() - begun})
                tokens += int(line["tokens"])
                self._report(done, loss, tokens, time.perf_counter() - started, first)
                if done % self._settings.checkpoint_every == 0 or interrupted.is_set():
                    self._checkpoints.save(done, loss)
                if interrupted.is_set():
                    raise KeyboardInterrupt
        adapter = self._dir / "adapter"
        self._policy.save(adapter, stage="sft", updates=done, settings=asdict(self._settings))
        return SftResult(adapter, done, loss)

    def _batch(self, done: int) -> list[Row]:
        epoch, index = divmod(done, self._per_epoch)
        made = batches(self._rows, self._settings.batch_size, self._settings.seed, epoch)
        return made[index]

    def _update(self, batch: list[Row], done: int) -> dict[str, float | int]:
        lr = self._settings.lr * schedule(done, self._updates, self._settings.warmup)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        total = sum(sum(row.weights[1:]) for row in batch)
        loss = 0.0
        for part in _micro_batches(batch, self._settings.micro_tokens):
            part_loss = sft_loss(self._policy, part, total)
            part_loss.backward()
            loss += float(part_loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters, self._settings.grad_clip)
        if not math.isfinite(loss) or not math.isfinite(float(norm)):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"Update {done + 1}: loss {loss}, gradient norm {float(norm)}; expected finite "
                "numbers. The last checkpoint is good; lower sft.lr and run it again."
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._policy.refresh()
        return {
            "update": done + 1,
            "epoch": done // self._per_epoch,
            "loss": loss,
            "lr": lr,
            "grad_norm": float(norm),
            "tokens": sum(len(row.ids) for row in batch),
            "trained_tokens": sum(row.trained for row in batch),
        }

    def _report(self, done: int, loss: float, tokens: int, seconds: float, first: int) -> None:
        if self._progress is None:
            return
        left = (self._updates - done) * seconds / max(1, done - first)
        self._progress(Progress(done, self._updates, loss, tokens / max(seconds, 1e-9), left))


def sft_loss(policy: Policy, rows: Sequence[Row], total: float) -> Tensor:
    """Weighted cross-entropy of rows, normalised by `total` weight."""
    places, targets, weights, offset = [], [], [], 0
    for row in rows:
        for at, weight in enumerate(row.weights[1:]):
            if weight > 0:
                places.append(offset + at)
                targets.append(row.ids[at + 1])
                weights.append(weight)
        offset += len(row.ids)
    hidden = policy.hidden([row.ids for row in rows])
    logprobs = policy.logprobs(hidden[torch.tensor(places)], torch.tensor(targets))
    return masked_cross_entropy(logprobs, torch.tensor(weights), total)


def _micro_batches(batch: list[Row], limit: int) -> list[list[Row]]:
    parts: list[list[Row]] = [[]]
    for row in batch:
        if parts[-1] and sum(len(r.ids) for r in parts[-1]) + len(row.ids) > limit:
            parts.append([])
        parts[-1].append(row)
    return parts


def schedule(done: int, updates: int, warmup: float) -> float:
    """Factor on the learning rate: a linear rise, then half a cosine down to 0."""
    rise = max(1, round(updates * warmup))
    if done < rise:
        return (done + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (done - rise) / max(1, updates - rise)))


def _drop_lines_after(path: Path, update: int) -> None:
    """Remove lines of updates that the checkpoint does not contain, and a torn last line."""
    if not path.exists():
        return
    Appender(path).close()
    with path.open(encoding="utf-8") as file:
        lines = file.readlines()
    kept = [
        line
        for line, (_, record) in zip(lines, read_jsonl(path), strict=True)
        if record.get("update", 0) <= update
    ]
    if len(kept) < len(lines):
        write_atomic(path, "".join(kept))
