"""Supervised fine-tuning: masked cross-entropy over rows, resumable to the bit.

The run directory (see `coa.runs`) holds `metrics.jsonl` (one line per update, nothing that depends
on the clock), `timings.jsonl`, `checkpoints/` (the last two) and, at the end, `adapter/`. A
checkpoint is a folder written beside, synced and renamed: adapter, optimiser, position. Ctrl-C
writes one, too. Starting again in the same folder continues from the newest one, and drops metrics
lines written after it. The order of rows depends on the seed and the epoch only, so with
`deterministic` the files are the same as without a kill.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coa.config import to_json
from coa.engines.local import choose_dtype
from coa.engines.lora import MANIFEST
from coa.engines.store import identity
from coa.errors import TrainingError
from coa.machine import cores
from coa.runs import Run
from coa.train.checkpoint import Checkpoints, held_interrupt
from coa.train.losses import masked_cross_entropy
from coa.train.policy import Policy
from coa.train.rows import Row, batches, fingerprint
from coa.train.settings import SftSettings


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What is told after each update."""

    update: int
    updates: int
    loss: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class SftResult:
    adapter: Path
    updates: int
    loss: float
    """Of the last update."""
    trained: bool = True
    """False when an earlier call had finished the run already."""


OnUpdate = Callable[[UpdateReport], None]


def run_sft(
    settings: SftSettings,
    rows: Sequence[Row],
    directory: Path,
    *,
    on_update: OnUpdate | None = None,
    policy: Policy | None = None,
    manifest: Mapping[str, Any] | None = None,
) -> SftResult:
    """Train on rows in a run directory; the same call continues an interrupted run.

    `manifest` adds to the adapter's manifest what rows cannot say: the grammar, the prompt.
    """
    if not rows:
        raise TrainingError("There are no rows to train on.")
    _check_rows(rows, settings)
    torch.set_num_threads(settings.threads or cores())
    torch.use_deterministic_algorithms(settings.deterministic)
    if policy is None:
        policy = make_policy(settings)
    recipe, inputs = to_json(settings), {"rows": fingerprint(rows)}
    inputs |= {name: value for name, value in identity(settings.model).items() if name != "base"}
    with Run.open(directory, "sft", recipe, inputs, settings.seed, base=policy.base_sha256) as run:
        training = _Training(settings, rows, run, policy, on_update)
        if (training.adapter / MANIFEST).is_file():
            return _finished(training.adapter)
        result = training.execute(manifest or {})
        run.timing({"event": "finished"})
    return result


def _finished(adapter: Path) -> SftResult:
    held = json.loads((adapter / MANIFEST).read_text(encoding="utf-8"))
    return SftResult(adapter, held["updates"], held.get("loss", math.nan), trained=False)


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


class _Training:
    def __init__(
        self,
        settings: SftSettings,
        rows: Sequence[Row],
        run: Run,
        policy: Policy,
        on_update: OnUpdate | None,
    ) -> None:
        self._settings, self._rows, self._policy = settings, rows, policy
        self._run, self._on_update = run, on_update
        self.adapter = run.root / "adapter"
        self._per_epoch = math.ceil(len(rows) / settings.batch_size)
        self._updates = self._per_epoch * settings.epochs
        self._optimizer = torch.optim.AdamW(
            policy.parameters, lr=settings.lr, weight_decay=settings.weight_decay, fused=True
        )
        self._checkpoints = Checkpoints(run.root / "checkpoints", policy, self._optimizer)

    def execute(self, manifest: Mapping[str, Any]) -> SftResult:
        done, loss = self._checkpoints.restore()
        reached = done
        self._run.keep_metrics(lambda record: record["update"] <= reached)
        started, tokens = time.perf_counter(), 0
        with held_interrupt() as interrupted:
            while done < self._updates:
                begun = time.perf_counter()
                line = self._update(self._batch(done), done)
                done, loss = done + 1, float(line["loss"])
                self._run.metrics(line)
                self._run.timing({"update": done, "seconds": time.perf_counter() - begun})
                tokens += int(line["tokens"])
                if self._on_update is not None:
                    speed = tokens / max(time.perf_counter() - started, 1e-9)
                    self._on_update(UpdateReport(done, self._updates, loss, speed))
                if done % self._settings.checkpoint_every == 0 or interrupted.is_set():
                    self._checkpoints.save(done, loss)
                if interrupted.is_set():
                    raise KeyboardInterrupt
        made_by = {"stage": "sft", "updates": done, "loss": loss}
        made_by["settings"] = asdict(self._settings)
        self._policy.save(self.adapter, **made_by, **manifest)
        return SftResult(self.adapter, done, loss)

    def _batch(self, done: int) -> list[Row]:
        epoch, index = divmod(done, self._per_epoch)
        made = batches(self._rows, self._settings.batch_size, self._settings.seed, epoch)
        return made[index]

    def _not_finite(self, done: int, found: str) -> TrainingError:
        self._optimizer.zero_grad(set_to_none=True)
        return TrainingError(
            f"Update {done + 1}: {found}; expected finite numbers. The last checkpoint is good; "
            "lower sft.lr and run it again."
        )

    def _update(self, batch: list[Row], done: int) -> dict[str, float | int]:
        lr = self._settings.lr * schedule(done, self._updates, self._settings.warmup)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        total = sum(sum(row.weights[1:]) for row in batch)
        loss = 0.0
        for part in _micro_batches(batch, self._settings.micro_tokens):
            try:
                part_loss = sft_loss(self._policy, part, total)
            except TrainingError as wrong:  # a logprob that is no number
                raise self._not_finite(done, str(wrong).rstrip(".")) from None
            part_loss.backward()
            loss += float(part_loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters, self._settings.grad_clip)
        if not math.isfinite(loss) or not math.isfinite(float(norm)):
            raise self._not_finite(done, f"loss {loss}, gradient norm {float(norm)}")
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


def sft_loss(policy: Policy, rows: Sequence[Row], total: float) -> Tensor:
    """Weighted cross-entropy of rows, normalised by `total` weight.

    Position t of a row predicts token t+1 and has that token's weight. Only weighted positions go
    through the output layer: logits of a 49k vocabulary are the largest tensor of a small model.
    """
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
