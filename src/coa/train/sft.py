"""Supervised fine-tuning: a recipe in, a run directory with an adapter out, resumable to the bit.

The run directory (see `coa.io.runs`) holds `metrics.jsonl` (one line per update, nothing that
depends on the clock), `timings.jsonl`, `checkpoints/` (the last two) and, at the end, `adapter/`. A
checkpoint is a folder written beside, synced and renamed: adapter, optimiser, position. Ctrl-C
writes one, too. Starting again in the same folder continues from the newest one, and drops metrics
lines written after it. The order of rows depends on the seed and the epoch only, so with
`deterministic` the files are the same as without a kill.

A run may also end early, by a budget of tokens or minutes, and another one `continues` from its
adapter alone: at the next rows, at the learning rate of that place. So a long training can be done
in rounds, on several machines, with nothing to carry over but an adapter.

Of several processes every one has all rows, trains its share of each batch, and takes the same
step; the first writes the files, which all of them must see.

Before it costs anything one can look: `preview` shows the rows and their figures without loading
the model, `plan` tries two real parts and says what the whole run would take.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coa.engines.threads import use_threads
from coa.errors import (
    ConfigError,
    GrammarError,
    MissingExtra,
    RecordError,
    TrainingError,
    boundary,
)

try:
    import torch
except ImportError as exc:
    raise MissingExtra("Training", "train") from exc
from torch import Tensor

from coa.grammar.load import GrammarBook
from coa.io.machine import keep_freed_memory, memory_gb
from coa.io.progress import Progress, duration, say
from coa.io.runs import Json, Run, reached
from coa.io.settings import load_recipe, to_json, without_speed
from coa.models.codec import Codec, codec_of
from coa.models.references import identity, resolve
from coa.models.weights import MANIFEST, read_manifest
from coa.rollouts import known_grammars, remembered
from coa.train.checkpoint import Checkpoints, held_interrupt
from coa.train.losses import masked_cross_entropy
from coa.train.optimizer import (
    NotFinite,
    PolicyOptimizer,
    Predictions,
    balanced_share,
    micro_batches,
)
from coa.train.policy import Policy, make_policy
from coa.train.processes import Processes
from coa.train.rows import (
    Row,
    TooLong,
    batches,
    build_row,
    fingerprint,
    total_tokens,
)
from coa.train.settings import SftRecipe, SftSettings, TrainingSettings
from coa.trajectory import Trajectory, load_trajectories

if TYPE_CHECKING:
    from rich.console import Console

    from coa.train.row_report import RowReport

Note = Callable[[str], None]


@dataclass(frozen=True)
class Chosen:
    """Trajectories and the rows made of them, in the same order."""

    trajectories: list[Trajectory]
    rows: list[Row]
    left_out: int = 0

    def notes(self, settings: SftSettings) -> Iterator[str]:
        """What a reader of the result should know of its rows."""
        limit = f"sft.max_length {settings.max_length}"
        if shortened := sum(row.cut for row in self.rows):
            lost = "1 row lost its end" if shortened == 1 else f"{shortened} rows lost their end"
            yield f"{lost}: longer than {limit}"
        if self.left_out:
            yield f"{self.left_out} left out: nothing to train within {limit}"


@dataclass(frozen=True)
class SftPlan:
    """What a run would take, by two of its parts."""

    report: RowReport
    parameters: int
    tokens: int
    """Of all epochs, or of the budget."""
    tokens_per_second: float
    seconds: float
    memory_gb: float
    """The most that this process has used so far, two parts and a step included."""
    disk_mb: float
    """Two checkpoints, one that is being written, and the result."""

    def to_json(self) -> Json:
        return {**vars(self), "report": self.report.to_json()}

    def lines(self) -> Iterator[str]:
        yield from self.report.lines()
        has = memory_gb()
        machine = f" of {has:.1f}" if has else ""
        yield (
            f"{self.parameters:,} parameters, {self.tokens:,} tokens in {self.report.updates} "
            f"updates, {self.tokens_per_second:.0f} tokens/s here"
        )
        yield (
            f"about {duration(self.seconds)} in one process, {self.memory_gb:.1f}{machine} GB of "
            f"memory, {self.disk_mb:.0f} MB on disk; nothing was written"
        )


def sft_from_recipe(path: Path | None, overrides: Sequence[str], note: Note) -> Path:
    """Train by recipe; returns the adapter's folder."""
    recipe, trajectories = _read(path, overrides)
    return train_on(trajectories, recipe.sft, Path(recipe.out), note)


def preview_from_recipe(path: Path, overrides: Sequence[str], out: Console | None) -> RowReport:
    """Figures of what would be trained on, printed with a few rows when `out` is given."""
    recipe, trajectories = _read(path, overrides)
    from coa.train.row_report import print_preview, row_report

    codec = codec_of(recipe.sft.model)
    chosen = choose(trajectories, recipe.sft, codec)
    report = row_report(chosen.trajectories, chosen.rows, recipe.sft, codec)
    if out is not None:
        print_preview(out, chosen.trajectories, chosen.rows, codec)
        for line in (*report.lines(), *chosen.notes(recipe.sft)):
            out.print(line)
    return report


def plan_from_recipe(
    path: Path, overrides: Sequence[str], note: Note = lambda line: None
) -> SftPlan:
    """What the run would take, by trying two of its parts; writes nothing."""
    recipe, trajectories = _read(path, overrides)
    from coa.train.row_report import row_report

    settings = recipe.sft
    note(f"{len(trajectories)} trajectories; loading {settings.model}")
    policy = make_policy(settings)
    note("making rows and trying two parts of an update")
    chosen = choose(trajectories, settings, policy.codec)
    report = row_report(chosen.trajectories, chosen.rows, settings, policy.codec)
    per_token, per_step = rehearse(settings, chosen.rows, policy)
    whole = round(report.tokens * settings.epochs)
    tokens = min(whole, settings.tokens or whole)
    seconds = tokens * per_token + report.updates * per_step * tokens / whole
    return SftPlan(
        report=report,
        parameters=policy.trainable,
        tokens=tokens,
        tokens_per_second=round(tokens / seconds, 1),
        seconds=round(seconds, 3),
        memory_gb=round(peak_memory() / 1e9, 2),
        # float32: the parameters, and in a checkpoint two moments of each
        disk_mb=round((3 * 3 + 1) * 4 * policy.trainable / 1e6, 1),
    )


def train_on(
    trajectories: Sequence[Trajectory], settings: SftSettings, directory: Path, note: Note
) -> Path:
    """Train on trajectories in a run directory; continues what is there."""
    processes = Processes.open()
    say = note if processes.main else lambda line: None
    say(f"{len(trajectories)} trajectories; loading {settings.model}")
    policy = make_policy(settings, note=say)
    chosen = choose(trajectories, settings, policy.codec)
    tokens, trained = total_tokens(chosen.rows), sum(row.trained for row in chosen.rows)
    say(
        f"{len(chosen.rows)} rows, {tokens} tokens, {trained} trained; "
        f"{policy.trainable:,} parameters ({policy.kind})"
    )
    for line in chosen.notes(settings):
        say(line)
    with ExitStack() as stack:
        bars: list[Progress] = []

        def on_update(report: UpdateReport) -> None:
            if not bars:  # only now is known how much an earlier part of the run has done
                bar = Progress("sft update", report.updates, done=report.update - 1)
                bars.append(stack.enter_context(bar))
            bars[0].advance(1, loss=report.loss, tokens_per_s=round(report.tokens_per_second))

        result = run_sft(
            settings,
            chosen.rows,
            directory,
            on_update=on_update,
            policy=policy,
            manifest=protocol_of(chosen.trajectories, settings.model),
            processes=processes,
        )
    if not result.trained:
        say(f"{result.adapter} is finished already")
    if result.updates < result.planned:
        say(
            f"stopped after update {result.updates} of {result.planned}; go on in another folder: "
            f"sft.model={policy.base}+{result.adapter} sft.continues=true"
        )
    return result.adapter


def choose(trajectories: Sequence[Trajectory], settings: SftSettings, codec: Codec) -> Chosen:
    """The rows to train on. A trajectory that cannot be one is an error, or left out if asked."""
    if not trajectories:
        raise RecordError("there is no trajectory to train on.")
    make = partial(
        build_row,
        codec=codec,
        err_weight=settings.err_weight,
        observation_weight=settings.observation_weight,
        max_length=settings.max_length,
    )
    kept: list[Trajectory] = []
    rows: list[Row] = []
    refused: list[TooLong] = []
    for trajectory in trajectories:
        try:
            rows.append(make(trajectory))
            kept.append(trajectory)
        except TooLong as wrong:
            refused.append(wrong)
    if refused and not (settings.skip_too_long and rows):
        more = f" {len(refused) - 1} more are as long." if len(refused) > 1 else ""
        raise TooLong(f"{refused[0]}{more} sft.skip_too_long = true leaves such tasks out.")
    return Chosen(kept, rows, len(refused))


def protocol_of(trajectories: Sequence[Trajectory], start: str = "") -> Json:
    """Grammar and prompt that the adapter will know, one each or a list of several."""
    grammars = [trajectory.grammar for trajectory in trajectories]
    said = (each.meta.get("environment") or each.meta.get("set") for each in trajectories)
    homes = [str(name) for name in said if name]
    known = known_by(start, grammars, homes, book_of(trajectories))
    prompts = sorted({trajectory.prompt for trajectory in trajectories})
    prompt = prompts[0] if len(prompts) == 1 else prompts
    return {"grammar": known["grammar"], "prompt": prompt, **known}


def known_by(start: str, grammars: Iterable[str], homes: Iterable[str], book: GrammarBook) -> Json:
    """The grammars that an adapter can be asked in, and the environments that it is at home in:
    those of its run, and those that its start was trained on, which it does not forget."""
    names = sorted({*grammars, *remembered("grammar", start)})
    known: Json = {"grammar": names[0] if len(names) == 1 else names}
    if everywhere := sorted({*homes, *remembered("environments", start)}):
        known["environments"] = everywhere
    return known | {"grammars": known_grammars(start) | book.to_json()}


def book_of(trajectories: Sequence[Trajectory], where: str = "the dataset") -> GrammarBook:
    """The grammars that trajectories were written in, of which no two have one name."""
    book = GrammarBook()
    seen = dict.fromkeys((t.grammar, t.grammar_id, t.book) for t in trajectories)
    for name, identifier, held in seen:
        try:
            book.add((held or GrammarBook()).find(name, identifier))
        except GrammarError:  # somebody else's file: what is trained does not depend on it
            continue
    book.check_names(where)
    return book


def _read(path: Path | None, overrides: Sequence[str]) -> tuple[SftRecipe, list[Trajectory]]:
    recipe = load_recipe(path, overrides, SftRecipe)
    if not recipe.trajectories:
        raise ConfigError(f"{path}: trajectories is not set; give the file to train on.")
    trajectories = load_trajectories(Path(recipe.trajectories))
    book_of(trajectories, recipe.trajectories)
    return recipe, trajectories


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
        for epoch in range(math.ceil(settings.epochs)):
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
        held = sum(total_tokens(unit) for batch in self._batches for unit in batch)
        if self._settings.layout == "pack":
            filled = sum(len(batch) for batch in self._batches) * self._settings.pack_limit
        else:
            longest = (max(len(row.ids) for unit in b for row in unit) for b in self._batches)
            filled = sum(len(b) * n for b, n in zip(self._batches, longest, strict=True))
        return held / filled

    def _lay_out(self, epoch: int) -> list[list[list[Row]]]:
        size, seed, rows = self._settings.batch_size, self._settings.seed, self._rows
        part = self._settings.epochs - epoch
        if part < 1:  # the last one is not whole
            count = max(1, round(part * len(rows)))
            rows = random.Random(f"{seed}|{epoch}|part").sample(rows, count)
        if self._settings.layout == "bucket":
            return [[[row] for row in batch] for batch in batches(rows, size, seed, epoch)]
        made = packs(rows, self._settings.pack_limit, seed, epoch)
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
    planned: int
    """Updates of all epochs; more than there were when a budget ended the run."""
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
    if settings.batch_size < processes.count:
        raise ConfigError(
            f"sft.batch_size: found {settings.batch_size} with {processes.count} processes, "
            "expected at least one row for each of them."
        )
    set_up_torch(settings)
    policy = policy or make_policy(settings)
    check_rows(rows, settings, policy)
    run = processes.by_main(lambda: _open_run(settings, rows, directory, policy.base_sha256))
    with run or nullcontext():
        adapter = directory / "adapter"
        if (adapter / MANIFEST).is_file():
            held = json.loads((adapter / MANIFEST).read_text(encoding="utf-8"))
            updates, loss = held["updates"], held.get("loss", math.nan)
            return SftResult(adapter, updates, loss, held.get("planned", updates), trained=False)
        result = _train(
            settings, rows, directory, run, policy, processes, manifest or {}, on_update
        )
        if run is not None:
            run.timing({"event": "finished"})
    return result


_LATER = ("observation_weight", "tokens", "minutes", "continues")
_ORDERING = ("seed", "epochs", "layout", "batch_size", "max_length", "pack_tokens")
"""Settings that decide which rows an update is of."""


def updates_behind(settings: SftSettings, rows: Sequence[Row]) -> int:
    """How many updates over the same rows the adapter in `model` has behind it."""
    source = resolve(settings.model)
    folder = source.adapter or source.path
    manifest = read_manifest(folder) if folder else {}
    last = (manifest.get("stages") or [manifest])[-1]  # a packed one has its history
    then = last.get("settings") or last.get("recipe") or {}
    if last.get("stage") != "sft" or "updates" not in last:
        raise ConfigError(
            f"sft.continues: found sft.model {settings.model!r}, expected BASE+ADAPTER_DIR with an "
            "adapter from coa sft."
        )
    if (last.get("inputs") or {}).get("rows") != fingerprint(rows):
        raise ConfigError(
            f"sft.continues: {folder} was trained on other rows, expected those of this run. "
            "Without sft.continues it is where training on these begins."
        )
    for name in _ORDERING:
        if then.get(name) != (now := getattr(settings, name)):
            raise ConfigError(
                f"sft.{name}: found {now!r}, and {folder} was trained with {then.get(name)!r}: "
                "sft.continues needs the same, which decides the order of rows."
            )
    return int(last["updates"])


def _stretch(order: Order, settings: SftSettings, rows: Sequence[Row]) -> tuple[int, int]:
    """After how many updates this run begins, and after how many it ends at the latest."""
    first = updates_behind(settings, rows) if settings.continues else 0
    if first >= order.updates:
        raise ConfigError(
            f"sft.continues: {settings.model} has all {order.updates} updates behind it."
        )
    if settings.tokens is None:
        return first, order.updates
    spent, last = 0, first
    while last < order.updates and spent < settings.tokens:
        spent += sum(total_tokens(unit) for unit in order.batch(last))
        last += 1
    return first, last


def _open_run(settings: SftSettings, rows: Sequence[Row], directory: Path, base: str) -> Run:
    inputs = {"rows": fingerprint(rows)}
    inputs |= {k: v for k, v in identity(settings.model).items() if k != "base"}
    # As in runs from before there was a choice.
    recipe = {k: v for k, v in to_json(settings).items() if v or k not in _LATER}

    def counting(table: Json) -> Json:
        counted: Json = without_speed({"sft": table})["sft"]
        return counted

    seed = settings.seed
    return Run.open(directory, "sft", recipe, inputs, seed, base=base, counting=counting)


def set_up_torch(settings: TrainingSettings) -> None:
    """Threads, randomness and determinism; the processes of one machine share its cores."""
    use_threads(settings.threads, fixed=settings.deterministic)
    keep_freed_memory()
    torch.manual_seed(settings.seed)  # nothing draws from it, but checkpoints hold its state
    torch.use_deterministic_algorithms(settings.deterministic)


def check_rows(rows: Sequence[Row], settings: SftSettings, policy: Policy) -> None:
    """Raise, naming the task, unless every row can be trained on by this policy."""
    if not rows:
        raise TrainingError("There are no rows to train on.")
    for row in rows:
        size, most = len(row.ids), settings.max_length
        if size > most:
            raise TrainingError(
                f"Task {row.task_id!r}: its row has {size} tokens, max_length is "
                f"{most}. Raise sft.max_length or pass max_length to build_row."
            )
        if not row.places:
            raise TrainingError(f"Task {row.task_id!r}: its row has no trainable token.")
        if policy.positions is not None and size > policy.positions:
            raise TrainingError(
                f"Task {row.task_id!r}: its row has {size} tokens, and {policy.ref!r} is made for "
                f"at most {policy.positions}. Set sft.max_length = {policy.positions}."
            )


def _train(
    settings: SftSettings,
    rows: Sequence[Row],
    directory: Path,
    run: Run | None,
    policy: Policy,
    processes: Processes,
    manifest: Mapping[str, Any],
    on_update: OnUpdate | None,
) -> SftResult:
    """Train from the newest checkpoint to the last update."""
    order, adapter = Order(rows, settings), directory / "adapter"
    updates = order.updates
    first, last = _stretch(order, settings, rows)
    optimizer = PolicyOptimizer(policy, settings, updates, processes)
    folder = directory / "checkpoints"
    checkpoints = Checkpoints(folder, policy, processes, optimizer=optimizer.saved)
    held = checkpoints.restore() or {"update": first, "loss": math.nan}
    done, loss = int(held["update"]), float(held["loss"])
    if run is not None:
        start = done
        run.keep_metrics(lambda record: record["update"] <= start)
        reached(f"update {done} of {updates}" if done else "")
        if done and on_update is not None:
            say(f"goes on from update {done} of {updates} ({directory})")
    started, tokens = time.perf_counter(), 0

    def made() -> dict[str, Any]:
        """What the manifest of the weights says of where they come from."""
        found: dict[str, Any] = {"stage": "sft", "updates": done, "planned": updates, "loss": loss}
        inputs = {"rows": fingerprint(rows)}
        return found | {"inputs": inputs, "settings": asdict(settings), **manifest}

    def finish() -> None:
        if processes.main or policy.is_sharded:
            with boundary(TrainingError, f"{adapter}: writing it"):
                policy.save(adapter, **made())

    with held_interrupt() as interrupted:
        while done < last:
            begun = time.perf_counter()
            line = _update(done, order, settings, policy, optimizer, processes, first)
            done, loss = done + 1, float(line["loss"])
            tokens += int(line["tokens"])
            if run is not None:
                run.metrics(line)
                run.timing({"update": done, "seconds": time.perf_counter() - begun})
                if on_update is not None:
                    speed = tokens / max(time.perf_counter() - started, 1e-9)
                    on_update(UpdateReport(done, last, loss, speed))
            late = time.perf_counter() - started >= 60 * (settings.minutes or math.inf)
            stop, late = map(any, zip(*processes.gather((interrupted.is_set(), late)), strict=True))
            last = done if late else last
            if stop or done % settings.checkpoint_every == 0:
                save = partial(checkpoints.save, done, {"loss": loss}, made())
                processes.all_or_none(save)
                reached(f"update {done} of {updates}")
            if stop:
                raise KeyboardInterrupt
    processes.all_or_none(finish)
    return SftResult(adapter, done, loss, updates)


def _update(
    done: int,
    order: Order,
    settings: SftSettings,
    policy: Policy,
    optimizer: PolicyOptimizer,
    processes: Processes,
    first: int,
) -> dict[str, float | int]:
    """Take one step; the line of metrics.jsonl.

    A run that begins after `first` updates of another one has an optimiser that knows nothing yet:
    its learning rate rises to what the schedule says as it does at the very beginning.
    """
    batch = order.batch(done)
    rows = [row for unit in batch for row in unit]
    total = sum(sum(row.weights[1:]) for row in rows)
    parts = parts_of(batch, settings, processes)
    rise = round(order.updates * settings.warmup) if first else 0
    scale = min(1.0, (done - first + 1) / max(1, rise))
    try:
        losses = [partial(sft_loss, policy, part, total) for part in parts]
        step = optimizer.step(done, losses, scale)
    except NotFinite as wrong:
        raise TrainingError(
            f"Update {done + 1}: {str(wrong).rstrip('.')}. The last checkpoint is good; lower "
            "sft.lr and run it again."
        ) from None
    return {
        "update": done + 1,
        "epoch": order.epoch_of(done),
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
    rows = balanced_share([row for unit in batch for row in unit], processes)
    return micro_batches(rows, settings.micro_tokens)


def sft_loss(policy: Policy, rows: Sequence[Row], total: float) -> Tensor:
    """Weighted cross-entropy of rows, normalised by `total` weight."""
    found = Predictions.of(policy, rows)
    weights = [row.weights[at] for row in rows for at in row.places]
    logprobs = found.for_each(policy.logprobs(found.hidden, found.targets))
    return masked_cross_entropy(logprobs, torch.tensor(weights, device=logprobs.device), total)


def rehearse(settings: SftSettings, rows: Sequence[Row], policy: Policy) -> tuple[float, float]:
    """Seconds of a token, by a middling and the largest part of a run, and of a step. The policy is
    spent afterwards."""
    check_rows(rows, settings, policy)
    set_up_torch(settings)
    order = Order(rows, settings)
    batches = (order.batch(update) for update in range(order.updates))
    alone = Processes()
    parts = sorted((p for b in batches for p in parts_of(b, settings, alone)), key=total_tokens)
    optimizer = PolicyOptimizer(policy, settings, 2)
    # What is done first is slow, and the optimiser has no state before its first step.
    optimizer.step(0, [partial(sft_loss, policy, parts[0], 1.0)])
    chosen = [parts[len(parts) // 2], parts[-1]]
    begun = time.perf_counter()
    for part in chosen:
        sft_loss(policy, part, 1.0).backward()
    between = time.perf_counter()
    optimizer.step(1, [])
    ended = time.perf_counter()
    return (between - begun) / sum(total_tokens(part) for part in chosen), ended - between


def peak_memory() -> int:
    """The most bytes that this process has held."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
