"""Agentic RL: roll out groups, compare what they earned, make the better ones more likely.

One update: draw groups of rollouts with the present weights, turn them into rows, give advantages,
take optimiser steps, hand the new weights to the engine. The tokens trained are the tokens sampled,
because a row is made of the ids and logprobs that the engine returned.

The run directory holds `metrics.jsonl` (a line per update, nothing that depends on the clock),
`timings.jsonl`, `rollouts/` (every trajectory), `checks/` (evaluations), `checkpoints/`, `best/`
and at the end `adapter/`. A killed run continues from its newest checkpoint and takes over the
rollouts that were finished since, for they are of the same weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, cast, get_args

from torch import Tensor

from coa.engines.base import Engine
from coa.errors import CoaError, TrainingError, boundary
from coa.grammar import parse
from coa.io.files import sweep, sweep_folder, whole_folder
from coa.io.runs import METRICS, Json, Run, reached, read_jsonl, write_atomic
from coa.models.weights import Adapter
from coa.rewards import mean_parts
from coa.train.checkpoint import Checkpoints
from coa.train.experience import (
    Experience,
    TrainingSample,
    assign_advantages,
    check_judged,
    compute_before_update,
    experience_of,
    joined,
    policy_tokens,
    totals_of,
)
from coa.train.groups import Drawn, LeftOut, Sampler
from coa.train.losses import Metrics, Totals, join_metrics, policy_loss, value_loss
from coa.train.monitors import Monitors
from coa.train.optimizer import (
    OptimizerStep,
    Part,
    PolicyOptimizer,
    Predictions,
    balanced_share,
    micro_batches,
)
from coa.train.policy import Policy, ValueHead
from coa.train.processes import Processes
from coa.train.rows import build_row, total_tokens
from coa.train.settings import RlRecipe, RlSettings
from coa.trajectory import Author, StopReason, Trajectory
from coa.view.plots import curve


def rollout_record(drawn: Drawn) -> Json:
    """Of all rollouts that were drawn, used or not: every one counts."""
    rollouts = [rollout for group in drawn.all for rollout in group.rollouts]
    trajectories = [rollout.trajectory for rollout in rollouts]
    judged = [rollout.score for rollout in rollouts if rollout.score is not None]
    flat = [group for group in drawn.all if group.flat]
    n = max(1, len(rollouts))
    lengths = [t.usage.sampled_tokens for t in trajectories] or [0]
    record: Json = {
        "reward": fmean(judged) if judged else None,
        "pass_rate": fmean(score >= 1.0 for score in judged) if judged else None,
        "environment_rate": sum(t.ended_outside for t in trajectories) / n,
        "groups": len(drawn.all),
        "groups_used": len(drawn.groups),
        "groups_flat": len(flat),
        "groups_solved": sum(group.solved for group in flat),
        "refills": drawn.refills,
        "rollouts": len(rollouts),
        "length_mean": fmean(lengths),
        "length_max": max(lengths),
        "turns": sum(t.usage.turns for t in trajectories) / n,
        "tool_calls": sum(t.usage.tool_calls for t in trajectories) / n,
        "answered_rate": sum(t.stop is StopReason.ANSWERED for t in trajectories) / n,
        "malformed_rate": sum(t.usage.malformed > 0 for t in trajectories) / n,
        "truncated_rate": sum(t.truncated and not t.ended_outside for t in trajectories) / n,
        "suspect_rate": sum(rollout.scored.suspect for rollout in rollouts) / n,
        "agents": agent_shares(trajectories),
    }
    if len(parts := mean_parts([rollout.scored for rollout in rollouts])) > 1:
        record["parts"] = {name: part["mean"] for name, part in parts.items()}
    return record


def learning_record(
    experience: Experience, steps: Sequence[OptimizerStep], metrics: Sequence[Metrics]
) -> Json:
    """Of the rows that were trained on; without any step only their number."""
    rows = [sample.row for sample in experience.samples]
    record: Json = {
        "rows": len(rows),
        "tokens": total_tokens(rows),
        "trained_tokens": sum(row.trained for row in rows),
        "left_out": {reason: experience.left_out[reason] for reason in get_args(LeftOut)},
    }
    if steps and metrics:
        record |= {"loss": fmean(step.loss for step in steps)}
        record |= {"grad_norm": max(step.grad_norm for step in steps)}
        if norms := [step.extra_norm for step in steps if step.extra_norm is not None]:
            record["value_grad_norm"] = max(norms)
        record |= {"lr": steps[-1].lr, "step_scale": steps[-1].scale}
        record |= join_metrics(metrics)
        del record["weight"]  # trained_tokens, once for every pass
    return record


def agent_shares(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The share of sampled tokens that each role wrote, its tags included; `none` is outside.

    Tokens of a turn are shared out by characters.
    """
    tokens: Counter[str] = Counter()
    for trajectory in trajectories:
        bound = trajectory.protocol
        for segment in trajectory.segments:
            if segment.author is not Author.MODEL or not segment.text:
                continue
            each = len(segment.ids or ()) / len(segment.text)
            inside = 0
            for block in parse(bound, segment.text).blocks:
                size = block.end - block.start
                tokens[block.role] += each * size  # type: ignore[assignment]
                inside += size
            tokens["none"] += each * (len(segment.text) - inside)  # type: ignore[assignment]
    total = sum(tokens.values()) or 1.0
    return {role: round(count / total, 4) for role, count in sorted(tokens.items())}


ADAPTER, BEST, ROLLOUTS, CHECKS = "adapter", "best", "rollouts", "checks"


class Loadable(Engine, Protocol):
    """An engine that takes new weights."""

    async def load(self, adapter: Adapter | None, version: str) -> None: ...


Check = Callable[[Path], Awaitable[Json]]
"""Evaluates the engine's present weights into a folder: eval_accuracy, eval_low, eval_high."""


@dataclass(frozen=True, slots=True)
class RlResult:
    adapter: Path
    updates: int
    trained: bool = True
    """False when an earlier call had finished the run already."""


@dataclass(slots=True)
class RlLoop:
    """The loop, with everything it needs opened."""

    recipe: RlRecipe
    sampler: Sampler
    updater: RlUpdater
    run: Run | None
    """None in processes that are not the main one: they write nothing."""
    monitors: Monitors
    check: Check | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)
    root: Path = field(init=False)
    policy: Policy = field(init=False)
    processes: Processes = field(init=False)
    _checkpoints: Checkpoints = field(init=False)
    _safe: int = -1
    """The update of the newest checkpoint."""

    def __post_init__(self) -> None:
        self.root, self.policy = Path(self.recipe.out), self.updater.policy
        self.processes = self.sampler.processes
        saved: dict[str, Any] = {"optimizer": self.updater.optimizer.saved}
        if self.updater.value_head is not None:
            saved["value_head"] = self.updater.value_head
        folder = self.root / "checkpoints"
        self._checkpoints = Checkpoints(folder, self.policy, self.processes, **saved)

    async def execute(self, note: Callable[[str], None] = lambda line: None) -> RlResult:
        """Train from the newest checkpoint to the last update."""
        done, position = self._restore()
        if done:
            note(f"goes on from {self._named(done)} ({self.root})")
        evaluated = self._recall(done)
        while True:
            clock = Clock()
            try:
                with clock("load"):
                    await self._hand_over(done)
                if self.check is not None and done not in evaluated and self._is_due(done):
                    self._save(done, position)  # what was measured is never gone back behind
                    with clock("check"):
                        evaluated[done] = await self._evaluate(done, evaluated)
                if self._is_over(done):
                    break
                drawn = await self._draw(done, position, clock)
            except (asyncio.CancelledError, CoaError):
                # Ctrl-C, or a tool or judge that fails. It comes where something is awaited; there
                # the weights are those of `done`, and finished rollouts are in files.
                if not self.policy.is_sharded:  # others may have gone
                    self._save(done, position)
                raise
            record = self._learn(drawn, done, clock)
            done, position = done + 1, drawn.position
            self._record(done, position, record, clock)
        return RlResult(self._finish(done, evaluated), done)

    def _restore(self) -> tuple[int, int]:
        """Take over the newest checkpoint: its update, and the place in the stream of tasks."""
        state = self._checkpoints.restore() or {"update": -1, "position": 0}
        self._safe = int(state["update"])
        reached(self._named(max(0, self._safe)))
        return max(0, self._safe), int(state["position"])

    async def _draw(self, done: int, position: int, clock: Clock) -> Drawn:
        settings = self.recipe.rl
        refills = settings.refills if settings.compares else 0
        with clock("rollout"):
            wanted = settings.tasks_per_update
            drawn = await self.sampler.draw(done + 1, position, wanted, refills)
        check_judged(drawn.all, f"Update {done + 1}")
        self.monitors.group(drawn.all[0])
        return drawn

    def _learn(self, drawn: Drawn, done: int, clock: Clock) -> Json:
        """Optimiser steps on what was drawn; the record of the update."""
        settings, rollout = self.recipe.rl, self.recipe.rollout
        make_row = partial(build_row, codec=self.policy.codec, max_length=rollout.context)
        with clock("train"):
            try:
                experience = experience_of(drawn.groups, make_row, settings, rollout)
                steps, found = self.updater.update(experience, done, self.monitors.phase)
            except TrainingError as wrong:
                raise TrainingError(f"Update {done + 1}: {wrong}") from None
        record = {"update": done + 1, **rollout_record(drawn)}
        return record | learning_record(experience, steps, found)

    async def _hand_over(self, done: int) -> None:
        """Give the present weights to the engine; their hash tells them from any others."""
        adapter = self.policy.adapter()
        engine = cast("Loadable", self.sampler.engine)
        await engine.load(adapter, f"update-{done}-{digest(adapter)[:8]}")

    def _record(self, done: int, position: int, record: Json, clock: Clock) -> None:
        timing = clock.record(record)
        self.monitors.update(record, timing)
        if self.run is not None:
            self.run.metrics(record)
            self.run.timing({"update": done, **timing})
        every, last = self.recipe.rl.checkpoint_every, self.recipe.rl.updates
        if done % every == 0 or done == last:
            self._save(done, position)
            if not self.recipe.rl.keep_rollouts and self.run is not None:
                self._forget_rollouts(done)

    def _forget_rollouts(self, done: int) -> None:
        """Remove those that no checkpoint needs; other processes may write the next ones by now."""
        for path in self.sampler.directory.glob("*.jsonl"):
            if int(path.name.partition("-")[0]) <= done:
                path.unlink()

    def _save(self, done: int, position: int) -> None:
        if done == self._safe:
            return
        self.monitors.phase("checkpoint")
        kept = self.monitors.alarms.precious
        self._checkpoints.save(done, {"position": position}, self._made(done), kept)
        self._safe = done
        reached(self._named(done))

    def _named(self, done: int) -> str:
        return f"update {done} of {self.recipe.rl.updates}"

    @property
    def _takes_part(self) -> bool:
        """Whether this process is needed to write weights: one writes, and all gather what is
        sharded over them."""
        return self.run is not None or self.policy.is_sharded

    def _recall(self, done: int) -> dict[int, float]:
        """Drop what was written after the checkpoint, show the rest to who looks on; evaluations
        that are there already."""
        if self.run is not None:
            self._sweep()
            self.run.keep_metrics(lambda record: record["update"] <= done)
        self.processes.wait()
        path, evaluated = self.root / METRICS, {}
        for _, record in read_jsonl(path) if path.is_file() else ():
            if "eval_accuracy" in record:
                evaluated[record["update"]] = float(record["eval_accuracy"])
            self.monitors.recall(record)
        return evaluated

    def _sweep(self) -> None:
        """Remove what a killed process was writing beside."""
        for name in (BEST, ADAPTER):
            sweep_folder(self.root / name)
        for folder in (self.sampler.directory, *self.root.glob(f"{CHECKS}/*")):
            if folder.is_dir():
                sweep(folder)

    def _is_over(self, done: int) -> bool:
        return done == self.recipe.rl.updates or bool(self.monitors.solved)

    def _is_due(self, done: int) -> bool:
        return done % self.recipe.check.every == 0 or self._is_over(done)

    async def _evaluate(self, done: int, before: Mapping[int, float]) -> float:
        """Measure the present weights, and keep them if they are the best so far."""
        assert self.check is not None
        self.monitors.phase("evaluate")
        found = await self.check(self.root / CHECKS / f"update-{done:07d}")
        accuracy = float(found["eval_accuracy"])
        if self._takes_part and accuracy > max(before.values(), default=-1.0):
            with boundary(TrainingError, f"{self.root / BEST}: writing the best weights"):
                self.policy.save(self.root / BEST, **self._made(done), **found)
        if self.run is not None:
            self.run.metrics({"update": done, **found})
        self.monitors.evaluated({"update": done, **found})
        self.processes.wait()
        return accuracy

    def _finish(self, done: int, evaluated: Mapping[int, float]) -> Path:
        """Write `adapter`: the best weights that were measured, or the last."""
        adapter = self.root / ADAPTER
        if self.run is not None:  # before the adapter, which says that all is done
            write_atomic(self.root / "curves.svg", curve(self.root / METRICS, "Learning curves"))
        with boundary(TrainingError, f"{adapter}: writing the result"):
            if self.recipe.check.keep == "last" or not evaluated:
                if self._takes_part:
                    self.policy.save(adapter, **self._made(done))
            elif self.run is not None:
                with whole_folder(adapter, replaces=True) as copy:
                    shutil.copytree(self.root / BEST, copy, dirs_exist_ok=True)
        if self.run is not None:
            self.run.timing({"event": "finished"})
        self.processes.wait()
        return adapter

    def _made(self, done: int) -> Json:
        return {"stage": "rl", "updates": done, **self.manifest}


def digest(adapter: Adapter) -> str:
    """A hash of what was trained."""
    found = hashlib.sha256(repr(adapter.scale).encode())
    whole = {name: (tensor,) for name, tensor in adapter.whole.items()}
    for name, tensors in sorted((adapter.pairs | whole).items()):
        found.update(name.encode())
        for tensor in tensors:
            found.update(tensor.detach().cpu().float().contiguous().numpy().data)
    return found.hexdigest()


class Clock:
    """Seconds of an update by phase."""

    def __init__(self) -> None:
        self._begun, self._seconds = time.perf_counter(), Counter[str]()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - begun  # type: ignore[assignment]

    def record(self, made: Json) -> Json:
        """For timings.jsonl: seconds by phase, and speed."""
        sampled = made["length_mean"] * made["rollouts"]
        return {
            "seconds": round(time.perf_counter() - self._begun, 3),
            **{f"{name}_s": round(value, 3) for name, value in self._seconds.items()},
            "tokens_per_s": round(made["tokens"] / max(1e-9, self._seconds["train"]), 1),
            "sampled_per_s": round(sampled / max(1e-9, self._seconds["rollout"]), 1),
        }


OnPart = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, of how much."""


class RlUpdater:
    """Turns the experience of an update into optimiser steps of the policy.

    A batch is gone over in passes, each in a few steps, each in parts that fit into memory. What a
    loss is divided by is taken of the whole step's samples, on all processes, so that the result
    does not depend on how they were split.
    """

    def __init__(
        self,
        policy: Policy,
        settings: RlSettings,
        temperature: float,
        processes: Processes | None = None,
    ) -> None:
        self.policy, self.settings, self.temperature = policy, settings, temperature
        self.processes = processes or Processes()
        by_value = settings.loss.baseline == "value"
        self.value_head = ValueHead(policy.hidden_size).to(policy.device) if by_value else None
        self.optimizer = PolicyOptimizer(
            policy,
            settings,
            settings.updates * settings.steps_per_update,
            self.processes,
            extra=[] if self.value_head is None else list(self.value_head.parameters()),
            extra_lr=settings.value_lr,
        )

    def update(
        self, experience: Experience, number: int, on_part: OnPart | None = None
    ) -> tuple[list[OptimizerStep], list[Metrics]]:
        """Advantages, then `passes` times over the experience in `minibatches` steps each."""
        settings, processes = self.settings, self.processes
        compute_before_update(
            experience, self.policy, self.value_head, settings, self.temperature, processes
        )
        assign_advantages(experience, settings)
        steps: list[OptimizerStep] = []
        found: list[Metrics] = []
        scale = self._step_scale(experience)
        for turn in range(settings.passes):
            for batch in self._minibatches(experience.samples, number, turn):
                at = number * settings.steps_per_update + len(steps)
                parts = self._parts(batch, found, on_part)
                steps.append(self.optimizer.step(at, parts, scale))
        return steps, [one for share in processes.gather(found) for one in share]

    def _step_scale(self, experience: Experience) -> float:
        """The share of the wanted groups that there is something of. The fewer there are, the more
        their gradient is chance; a step of the whole size would follow it as far."""
        left = len({sample.group for sample in experience.samples})
        return min(1.0, left / self.settings.tasks_per_update) if self.settings.scale_steps else 1.0

    def _minibatches(
        self, samples: Sequence[TrainingSample], update: int, turn: int
    ) -> Iterator[list[TrainingSample]]:
        """Samples in parts of as many groups each, in an order that depends on seed, update and
        pass; parts without a gradient are left out. A group is never divided: its rollouts are
        compared with one another, and what they have in common is computed once."""
        groups: dict[int, list[TrainingSample]] = {}
        for sample in samples:
            groups.setdefault(sample.group, []).append(sample)
        order, count = [*groups.values()], self.settings.minibatches
        if count > 1:
            random.Random(f"{self.settings.seed}|{update}|{turn}").shuffle(order)
        for at in range(count):
            batch = [sample for group in order[at::count] for sample in group]
            if any(self._has_gradient(sample) for sample in batch):
                yield batch

    def _has_gradient(self, sample: TrainingSample) -> bool:
        """Whether a sample has one: the advantages of a flat group are 0, and give none."""
        loss = self.settings.loss
        added = loss.entropy != 0 or (loss.kl > 0 and loss.kl_place == "loss")
        assert sample.advantages is not None
        return added or self.value_head is not None or bool(sample.advantages.any())

    def _parts(
        self, batch: Sequence[TrainingSample], found: list[Metrics], on_part: OnPart | None
    ) -> Iterator[Part]:
        """The losses of one step, part by part. Samples without a gradient count in what is divided
        by, but nothing is computed for them."""
        totals = totals_of(batch)
        own = balanced_share([s for s in batch if self._has_gradient(s)], self.processes)
        parts = micro_batches(own, self.settings.micro_tokens, self.policy.shares_prefixes)
        for at, part in enumerate(parts):
            if on_part is not None:
                on_part("train", at, len(parts))
            yield lambda part=part: self._loss(part, totals, found)  # type: ignore[misc]

    def _loss(self, part: list[TrainingSample], totals: Totals, found: list[Metrics]) -> Tensor:
        settings = self.settings.loss
        states = Predictions.of(self.policy, [sample.row for sample in part])
        logprobs = states.for_each(
            self.policy.logprobs(states.hidden, states.targets, self.temperature)
        )
        tokens = policy_tokens(part, logprobs.device)
        made = policy_loss(logprobs, tokens, settings, totals)
        found.append(made.metrics)
        if self.value_head is None:
            return made.loss
        values = states.for_each(self.value_head.values(states.hidden))
        returns = joined(part, "returns", values.device)
        old = joined(part, "values", values.device)
        off = value_loss(values, returns, old, tokens, settings, totals)
        return made.loss + settings.value_weight * off
