"""Supervised fine-tuning: masked cross-entropy over rows, resumable to the bit.

The run directory (see `coa.io.runs`) holds `metrics.jsonl` (one line per update, nothing that
depends on the clock), `timings.jsonl`, `checkpoints/` (the last two) and, at the end, `adapter/`. A
checkpoint is a folder written beside, synced and renamed: adapter, optimiser, position. Ctrl-C
writes one, too. Starting again in the same folder continues from the newest one, and drops metrics
lines written after it. The order of rows depends on the seed and the epoch only, so with
`deterministic` the files are the same as without a kill.

Of several processes every one has all rows, trains its share of each batch, and takes the same
step; the first writes the files, which all of them must see.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coa.errors import ConfigError, TrainingError, boundary
from coa.io.machine import fair_cores
from coa.io.runs import Run
from coa.io.settings import to_json, without_speed
from coa.models.references import identity
from coa.models.weights import MANIFEST
from coa.train.checkpoint import Checkpoints, held_interrupt
from coa.train.forward import computing_dtype
from coa.train.learner import Learner, NotFinite, deal, micro_batches, written
from coa.train.losses import masked_cross_entropy
from coa.train.policy import Policy
from coa.train.processes import Processes
from coa.train.rl_settings import RlSettings
from coa.train.rows import Row, batches, fingerprint, total_tokens
from coa.train.settings import SftSettings

POOL = 1024
"""Rows that are packed together; the next ones begin new packs, so every epoch has other packs."""


def packs(rows: Sequence[Row], limit: int, seed: int, epoch: int) -> list[list[Row]]:
    """Rows in packs of at most `limit` tokens, best fit first, packs in random order.

    The longest rows are placed first, each where the least space is left over. A row longer than
    the limit is a pack by itself.
    """
    rng = random.Random(f"{seed}|{epoch}|pack")
    order = list(range(len(rows)))
    rng.shuffle(order)
    made: list[list[Row]] = []
    for start in range(0, len(order), POOL):
        pool = sorted(order[start : start + POOL], key=lambda i: -len(rows[i].ids))
        made += _best_fit([rows[i] for i in pool], limit)
    rng.shuffle(made)
    return made


def _best_fit(rows: Sequence[Row], limit: int) -> list[list[Row]]:
    made: list[list[Row]] = []
    spaces: list[tuple[int, int]] = []  # (tokens left, pack), the fullest first
    for row in rows:
        at = bisect_left(spaces, (len(row.ids), -1))
        if at < len(spaces):
            left, pack = spaces.pop(at)
        else:
            left, pack = limit, len(made)
            made.append([])
        made[pack].append(row)
        insort(spaces, (left - len(row.ids), pack))
    return made


class Order:
    """The batches of a whole run: `batch(update)` for 0 <= update < `updates`.

    A batch is a list of units: single rows, or packs. Units are what processes share out, and a
    pack is always computed as one.
    """

    def __init__(self, rows: Sequence[Row], settings: SftSettings) -> None:
        self._rows, self._settings = rows, settings
        self._starts = [0]
        """The first update of every epoch, then the end: packs may be more in one than another."""
        for epoch in range(settings.epochs):
            self._epoch, self._batches = epoch, self._lay_out(epoch)
            self._starts.append(self._starts[-1] + len(self._batches))

    @property
    def updates(self) -> int:
        return self._starts[-1]

    def epoch_of(self, update: int) -> int:
        return bisect_left(self._starts, update + 1) - 1

    def batch(self, update: int) -> list[list[Row]]:
        epoch = self.epoch_of(update)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._lay_out(epoch)
        return self._batches[update - self._starts[epoch]]

    def fill(self) -> float:
        """Share of the places that hold a token: of packs, or of rows padded to their batch's."""
        held = total_tokens(self._rows)
        if self._settings.layout == "pack":
            filled = sum(len(batch) for batch in self._batches) * self._settings.pack_limit
        else:
            longest = (max(len(row.ids) for unit in b for row in unit) for b in self._batches)
            filled = sum(len(b) * n for b, n in zip(self._batches, longest, strict=True))
        return held / filled

    def _lay_out(self, epoch: int) -> list[list[list[Row]]]:
        size, seed = self._settings.batch_size, self._settings.seed
        if self._settings.layout == "bucket":
            return [[[row] for row in batch] for batch in batches(self._rows, size, seed, epoch)]
        made = packs(self._rows, self._settings.pack_limit, seed, epoch)
        return [made[at : at + size] for at in range(0, len(made), size)]


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
    processes: Processes | None = None,
) -> SftResult:
    """Train on rows in a run directory; the same call continues an interrupted run.

    `manifest` adds to the adapter's manifest what rows cannot say: the grammar, the prompt.
    """
    processes = processes or Processes.open()
    check_rows(rows, settings.max_length)
    if settings.batch_size < processes.count:
        raise ConfigError(
            f"sft.batch_size: found {settings.batch_size} with {processes.count} processes, "
            "expected at least one row for each of them."
        )
    set_up_torch(settings)
    if policy is None:
        policy = make_policy(settings)
    check_positions(rows, policy)
    run = _open_run(settings, rows, directory, policy, processes)
    with run or nullcontext():
        training = _Training(settings, rows, directory, run, policy, processes)
        if (training.adapter / MANIFEST).is_file():
            return _finished(training.adapter)
        result = training.execute(manifest or {}, on_update)
        if run is not None:
            run.timing({"event": "finished"})
    return result


def _open_run(
    settings: SftSettings,
    rows: Sequence[Row],
    directory: Path,
    policy: Policy,
    processes: Processes,
) -> Run | None:
    """The run directory, in the main process."""

    def open_run() -> Run:
        inputs = {"rows": fingerprint(rows)}
        inputs |= {k: v for k, v in identity(settings.model).items() if k != "base"}
        base = policy.base_sha256
        recipe = to_json(settings)
        if not settings.observation_weight:  # as in runs from before there was a choice
            del recipe["observation_weight"]
        return Run.open(
            directory,
            "sft",
            recipe,
            inputs,
            settings.seed,
            base=base,
            counting=lambda table: without_speed({"sft": table})["sft"],
        )

    return processes.by_main(open_run)


def _finished(adapter: Path) -> SftResult:
    held = json.loads((adapter / MANIFEST).read_text(encoding="utf-8"))
    return SftResult(adapter, held["updates"], held.get("loss", math.nan), trained=False)


def set_up_torch(settings: SftSettings | RlSettings) -> None:
    """Threads, randomness and determinism; the processes of one machine share its cores."""
    torch.set_num_threads(settings.threads or fair_cores())
    torch.manual_seed(settings.seed)  # nothing draws from it, but checkpoints hold its state
    torch.use_deterministic_algorithms(settings.deterministic)


def make_policy(settings: SftSettings, note: Callable[[str], None] | None = None) -> Policy:
    """The policy that these settings train; its codec encodes the rows."""
    return Policy(
        settings.model,
        full=settings.full,
        rank=settings.rank,
        alpha=settings.alpha,
        dtype=computing_dtype(settings.dtype, settings.deterministic),
        seed=settings.seed,
        max_length=settings.max_length,
        checkpointing=settings.checkpointing,
        note=note,
    )


def check_rows(rows: Sequence[Row], max_length: int) -> None:
    """Raise, naming the task, unless every row can be trained on."""
    if not rows:
        raise TrainingError("There are no rows to train on.")
    for row in rows:
        if len(row.ids) > max_length:
            raise TrainingError(
                f"Task {row.task_id!r}: its row has {len(row.ids)} tokens, max_length is "
                f"{max_length}. Raise sft.max_length or pass max_length to build_row."
            )
        if not any(weight > 0 for weight in row.weights[1:]):
            raise TrainingError(f"Task {row.task_id!r}: its row has no trainable token.")


def check_positions(rows: Sequence[Row], policy: Policy) -> None:
    """Raise, naming the task, unless the model was made for sequences as long as these rows."""
    longest = max(rows, key=lambda row: len(row.ids))
    if policy.positions is not None and len(longest.ids) > policy.positions:
        raise TrainingError(
            f"Task {longest.task_id!r}: its row has {len(longest.ids)} tokens, and {policy.ref!r} "
            f"is made for at most {policy.positions}. Set sft.max_length = {policy.positions}."
        )


class _Training:
    def __init__(
        self,
        settings: SftSettings,
        rows: Sequence[Row],
        directory: Path,
        run: Run | None,
        policy: Policy,
        processes: Processes,
    ) -> None:
        self._settings, self._policy, self._processes = settings, policy, processes
        self._run = run
        self.adapter = directory / "adapter"
        self._order = Order(rows, settings)
        self._learner = Learner(
            policy,
            lr=settings.lr,
            steps=self._order.updates,
            schedule=settings.schedule,
            warmup=settings.warmup,
            weight_decay=settings.weight_decay,
            grad_clip=settings.grad_clip,
            processes=processes,
        )
        self._checkpoints = Checkpoints(
            directory / "checkpoints", policy, processes, optimizer=self._learner.saved
        )

    def execute(self, manifest: Mapping[str, Any], on_update: OnUpdate | None) -> SftResult:
        done, loss = self._restore()
        updates, started, tokens = self._order.updates, time.perf_counter(), 0
        with held_interrupt() as interrupted:
            while done < updates:
                begun = time.perf_counter()
                line = self._update(done)
                done, loss = done + 1, float(line["loss"])
                tokens += int(line["tokens"])
                if self._run is not None:
                    self._run.metrics(line)
                    self._run.timing({"update": done, "seconds": time.perf_counter() - begun})
                    if on_update is not None:
                        speed = tokens / max(time.perf_counter() - started, 1e-9)
                        on_update(UpdateReport(done, updates, loss, speed))
                stop = any(self._processes.gather(interrupted.is_set()))
                if stop or done % self._settings.checkpoint_every == 0:
                    made_by = self._made(done, loss, manifest)
                    save = partial(self._checkpoints.save, done, {"loss": loss}, made_by)
                    self._processes.all_or_none(save)
                if stop:
                    raise KeyboardInterrupt
        self._processes.all_or_none(partial(self._finish, self._made(done, loss, manifest)))
        return SftResult(self.adapter, done, loss)

    def _made(self, done: int, loss: float, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """What the manifest of the weights says of where they come from."""
        made: dict[str, Any] = {"stage": "sft", "updates": done, "loss": loss}
        return made | {"settings": asdict(self._settings), **manifest}

    def _finish(self, made_by: Mapping[str, Any]) -> None:
        if self._processes.main or self._policy.is_spread:
            with boundary(TrainingError, f"{self.adapter}: writing it"):
                self._policy.save(self.adapter, **made_by)

    def _restore(self) -> tuple[int, float]:
        held = self._checkpoints.restore() or {"update": 0, "loss": math.nan}
        done = int(held["update"])
        if self._run is not None:
            self._run.keep_metrics(lambda record: record["update"] <= done)
        return done, float(held["loss"])

    def _update(self, done: int) -> dict[str, float | int]:
        batch = self._order.batch(done)
        rows = [row for unit in batch for row in unit]
        total = sum(sum(row.weights[1:]) for row in rows)
        parts = parts_of(batch, self._settings, self._processes)
        losses = [partial(sft_loss, self._policy, part, total) for part in parts]
        try:
            step = self._learner.step(done, losses)
        except NotFinite as wrong:
            raise TrainingError(
                f"Update {done + 1}: {str(wrong).rstrip('.')}. The last checkpoint is good; lower "
                "sft.lr and run it again."
            ) from None
        return {
            "update": done + 1,
            "epoch": self._order.epoch_of(done),
            "loss": step.loss,
            "lr": step.lr,
            "grad_norm": step.grad_norm,
            "tokens": total_tokens(rows),
            "trained_tokens": sum(row.trained for row in rows),
        }


def parts_of(
    batch: Sequence[list[Row]], settings: SftSettings, processes: Processes
) -> list[list[Row]]:
    """What this process computes of a batch, each part at once: packs, or rows side by side."""
    if settings.layout == "pack":
        return processes.share(batch)
    rows = deal([row for unit in batch for row in unit], processes)
    return micro_batches(rows, settings.micro_tokens)


def sft_loss(policy: Policy, rows: Sequence[Row], total: float) -> Tensor:
    """Weighted cross-entropy of rows, normalised by `total` weight."""
    hidden, targets = written(policy, rows)
    weights = [row.weights[at] for row in rows for at in row.places]
    logprobs = policy.logprobs(hidden, targets)
    return masked_cross_entropy(logprobs, torch.tensor(weights, device=hidden.device), total)


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What two parts and a step took."""

    seconds_per_token: float
    seconds_per_step: float
    peak_bytes: int


def rehearse(settings: SftSettings, rows: Sequence[Row], policy: Policy) -> Rehearsed:
    """Time a middling and the largest part of a run, and a step. The policy is spent afterwards."""
    check_rows(rows, settings.max_length)
    check_positions(rows, policy)
    set_up_torch(settings)
    order = Order(rows, settings)
    batches = (order.batch(update) for update in range(order.updates))
    alone = Processes()
    parts = sorted((p for b in batches for p in parts_of(b, settings, alone)), key=total_tokens)
    learner = Learner(policy, lr=settings.lr, steps=2)
    # What is done first is slow, and the optimiser has no state before its first step.
    learner.step(0, [partial(sft_loss, policy, parts[0], 1.0)])
    chosen = [parts[len(parts) // 2], parts[-1]]
    begun = time.perf_counter()
    for part in chosen:
        sft_loss(policy, part, 1.0).backward()
    between = time.perf_counter()
    learner.step(1, [])
    ended = time.perf_counter()
    tokens = sum(total_tokens(part) for part in chosen)
    return Rehearsed((between - begun) / tokens, ended - between, peak_memory())


def peak_memory() -> int:
    """The most bytes that this process has held."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
