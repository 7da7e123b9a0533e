"""PolicyOptimizer: optimiser steps of one policy, in one process or several, for SFT and RL.

A step is the gradient of a sum of parts: whoever calls has divided each part's loss by what belongs
to the whole batch, so it does not matter how the batch was split over parts and processes.

Several processes have all weights each, and their gradients are added up here; or accelerate was
told to shard the weights over them (see `ShardedModel`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from coa.engines.threads import adapt_threads
from coa.errors import TrainingError
from coa.train.policy import Policy
from coa.train.prefixes import alphabetical, common
from coa.train.processes import Processes, ShardedModel, sharding_wanted, whole
from coa.train.rows import Row
from coa.train.settings import Schedule, TrainingSettings

Part = Callable[[], Tensor]
"""Computes the loss of a part of a batch, with its graph."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What a step did."""

    loss: float
    grad_norm: float
    """Of the policy, before clipping."""
    lr: float
    scale: float = 1.0
    """By which that is smaller than the schedule says."""
    extra_norm: float | None = None
    """Of the parameters beside the policy's, which are clipped by themselves."""


class NotFinite(TrainingError):
    """A loss or a gradient that is no number; the step was not taken, or is not worth keeping."""


class PolicyOptimizer:
    """AdamW over a policy's parameters, with a schedule, clipping and a sum over processes."""

    def __init__(
        self,
        policy: Policy,
        settings: TrainingSettings,
        steps: int,
        processes: Processes | None = None,
        extra: Sequence[torch.nn.Parameter] = (),
        extra_lr: float = 0.0,
    ) -> None:
        """`steps` is how many there will be; `extra` are parameters beside the policy's, such as a
        value head's."""
        self._policy, self._settings, self._steps = policy, settings, steps
        self._processes = processes or Processes()

        def optimizer(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
            groups = [{"params": list(parameters), "peak": settings.lr, "lr": settings.lr}]
            if extra:
                groups.append({"params": list(extra), "peak": extra_lr, "lr": extra_lr})
            return torch.optim.AdamW(groups, weight_decay=settings.weight_decay, fused=True)

        self._sharded: ShardedModel | None = None
        if not sharding_wanted():
            self.optimizer = optimizer(policy.parameters)
            return
        if extra:
            raise TrainingError(
                "A value head cannot be trained beside weights that are spread over processes. "
                "Start without FSDP, or choose a baseline other than 'value'."
            )
        self._sharded = policy.shard(optimizer)
        self.optimizer = self._sharded.optimizer

    @property
    def saved(self) -> torch.optim.Optimizer | ShardedModel:
        """What a checkpoint holds of the optimiser; where it is sharded, all processes must ask."""
        return self._sharded or self.optimizer

    def step(self, at: int, parts: Iterable[Part], scale: float = 1.0) -> OptimizerStep:
        """Take step number `at` (from 0). Numbers that are none change nothing and are an error.

        `scale` makes it smaller by its learning rate: a factor on the gradient would do next to
        nothing, for AdamW divides by the gradient's own size and clipping by its norm.
        """
        try:
            loss, norm, *extra = self._gradient(parts)
            if not all(map(math.isfinite, (loss, norm, *extra))):
                norms = " and ".join(map(str, (norm, *extra)))
                raise NotFinite(f"loss {loss}, gradient norm {norms}; expected finite numbers.")
        except TrainingError:
            self.optimizer.zero_grad(set_to_none=True)
            raise
        settings = self._settings
        factor = schedule_factor(settings.schedule, at, self._steps, settings.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor * scale
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._policy.refresh()
        return OptimizerStep(loss, norm, self.optimizer.param_groups[0]["lr"], scale, *extra)

    def _gradient(self, parts: Iterable[Part]) -> list[float]:
        """The sum of the losses, and for each group of parameters the norm of its gradient before
        clipping; the gradient is left in the parameters.

        Groups are clipped apart: the errors of a value head are of another size than the policy's
        gradient, and would decide how far the policy moves.
        """
        sharded, processes = self._sharded, self._processes
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if sharded is not None:  # all compute as often as the one with most parts
            own = list(parts)
            most = max(processes.gather(len(own)))
            parts = [*own, *[self._policy.idle] * (most - len(own))]
        loss = torch.zeros((), device=self._policy.device)
        for part in parts:
            adapt_threads()
            found = part()
            # FSDP takes the mean over processes; the losses are parts of a sum.
            (found if sharded is None else found * processes.count).backward()
            loss += found.detach().float()
        if sharded is None:
            for parameter in parameters:  # a process without rows takes part in the sum
                if parameter.grad is None and processes.count > 1:
                    parameter.grad = torch.zeros_like(parameter)
            processes.add_up([*(p.grad for p in parameters if p.grad is not None), loss])
        else:
            processes.add_up([loss])
        norms = [
            torch.nn.utils.clip_grad_norm_(group["params"], self._settings.grad_clip)
            for group in self.optimizer.param_groups
        ]
        return [float(loss), *(float(whole(norm)) for norm in norms)]


def schedule_factor(kind: Schedule, done: int, steps: int, warmup: float) -> float:
    """Factor on the learning rate: a linear rise for a share of the steps, then by kind."""
    rise = round(steps * warmup)
    if done < rise:
        return (done + 1) / rise
    gone = (done - rise) / max(1, steps - rise)
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * gone))
    return 1.0 - gone if kind == "linear" else 1.0


class Sequenced(Protocol):
    """Anything with token ids: a row, or what holds one."""

    @property
    def ids(self) -> Sequence[int]: ...


R = TypeVar("R", bound=Sequenced)


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a policy predicts of the tokens that count in some rows.

    Rows that share a beginning share its predictions; each is here once. Only these states go
    through the output layer: logits of a 49k vocabulary are the largest tensor of a small model.
    """

    hidden: Tensor
    """States [n, hidden] before those tokens."""
    targets: Tensor
    """The tokens [n]."""
    places: Tensor
    """Of each token that counts, of all rows in order: its prediction."""

    @classmethod
    def of(cls, policy: Policy, rows: Sequence[Row]) -> Predictions:
        states, own = policy.states([row.ids for row in rows])
        found: dict[tuple[int, int], int] = {}
        places, offset = [], 0
        for row in rows:
            for at in row.places:
                predicted = own[offset + at - 1], row.ids[at]
                places.append(found.setdefault(predicted, len(found)))
            offset += len(row.ids)
        before, targets = torch.tensor([*found], device=states.device).t()
        return cls(states[before], targets, torch.tensor(places, device=states.device))

    def for_each(self, values: Tensor) -> Tensor:
        """A value of each prediction, for each token that counts."""
        return values[self.places]


def micro_batches(rows: Iterable[R], limit: int, shares: bool = False) -> list[list[R]]:
    """Rows in their order, in parts of at most `limit` tokens; a longer row is a part by itself.

    With `shares` rows that begin alike are made neighbours, and what a row has in common with the
    one before it counts once, as it is computed once.
    """
    rows = list(rows)
    if shares:
        rows = [rows[at] for at in alphabetical([row.ids for row in rows])]
    parts: list[list[R]] = []
    room = 0
    for row in rows:
        shared = common(parts[-1][-1].ids, row.ids) if shares and parts else 0
        if not parts or len(row.ids) - shared > room:
            parts.append([])
            room, shared = limit, 0
        parts[-1].append(row)
        room -= len(row.ids) - shared
    return parts


def balanced_share(rows: Sequence[R], processes: Processes) -> list[R]:
    """This process's share of rows that all have: about as many tokens for each, longest first."""
    loads = [0] * processes.count
    own = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        least = loads.index(min(loads))
        loads[least] += len(row.ids)
        if least == processes.index:
            own.append(row)
    return own
