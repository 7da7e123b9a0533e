"""Improver: experience in, optimiser steps out. The arithmetic of an RL update.

A batch is gone over in passes, each in a few steps, each in parts that fit into memory. What a loss
is divided by is taken of the whole step's samples, on all processes, so that the result does not
depend on how they were split.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from coa.train.experience import (
    Experience,
    Sample,
    assign_advantages,
    look_before,
    policy_tokens,
    totals_of,
)
from coa.train.learner import Learner, Part, Step, deal, micro_batches, written
from coa.train.losses import PolicyMetrics, Totals, policy_loss, value_loss
from coa.train.policy import Policy
from coa.train.processes import Processes
from coa.train.rl_settings import RlSettings
from coa.train.value_head import ValueHead

OnPart = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, of how much."""


class Improver:
    """Turns experience into optimiser steps of the policy."""

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
        self.learner = Learner(
            policy,
            lr=settings.lr,
            steps=settings.updates * settings.steps_per_update,
            schedule=settings.schedule,
            warmup=settings.warmup,
            weight_decay=settings.weight_decay,
            grad_clip=settings.grad_clip,
            processes=self.processes,
            extra=[] if self.value_head is None else list(self.value_head.parameters()),
            extra_lr=settings.value_lr,
        )

    def improve(
        self, experience: Experience, update: int, on_part: OnPart | None = None
    ) -> tuple[list[Step], list[PolicyMetrics]]:
        """Advantages, then `passes` times over the experience in `minibatches` steps each."""
        settings = self.settings
        look_before(
            experience, self.policy, self.value_head, settings, self.temperature, self.processes
        )
        assign_advantages(experience, settings)
        steps: list[Step] = []
        found: list[PolicyMetrics] = []
        for turn in range(settings.passes):
            for batch in self._minibatches(experience.samples, update, turn):
                at = update * settings.steps_per_update + len(steps)
                steps.append(self.learner.step(at, self._parts(batch, found, on_part)))
        everywhere = [one for share in self.processes.gather(found) for one in share]
        return steps, everywhere

    def _minibatches(
        self, samples: Sequence[Sample], update: int, turn: int
    ) -> Iterator[list[Sample]]:
        """Samples in equal parts, in an order that depends on seed, update and pass; those that
        have something to say."""
        order = list(samples)
        count = self.settings.minibatches
        if count > 1:
            random.Random(f"{self.settings.seed}|{update}|{turn}").shuffle(order)
        for at in range(count):
            batch = order[at::count]
            if any(self._says_something(sample) for sample in batch):
                yield batch

    def _says_something(self, sample: Sample) -> bool:
        """Whether a sample has a gradient: one of a flat group has none by itself."""
        loss = self.settings.loss
        added = loss.entropy != 0 or (loss.kl > 0 and loss.kl_place == "loss")
        assert sample.advantages is not None
        return added or self.value_head is not None or bool(sample.advantages.any())

    def _parts(
        self, batch: Sequence[Sample], found: list[PolicyMetrics], on_part: OnPart | None
    ) -> Iterator[Part]:
        """The losses of one step, part by part. Silent samples count in what is divided by, but
        nothing is computed for them."""
        totals = totals_of(batch)
        own = deal([s for s in batch if self._says_something(s)], self.processes)
        parts = micro_batches(own, self.settings.micro_tokens)
        for at, part in enumerate(parts):
            if on_part is not None:
                on_part("train", at, len(parts))
            yield lambda part=part: self._loss(part, totals, found)  # type: ignore[misc]

    def _loss(self, part: list[Sample], totals: Totals, found: list[PolicyMetrics]) -> Tensor:
        settings = self.settings.loss
        hidden, targets = written(self.policy, [sample.row for sample in part])
        logprobs = self.policy.logprobs(hidden, targets, self.temperature)
        tokens = policy_tokens(part, hidden.device)
        made = policy_loss(logprobs, tokens, settings, totals)
        found.append(made.metrics)
        loss = made.loss
        if self.value_head is not None:
            loss = (
                loss
                + settings.value_weight
                * value_loss(
                    self.value_head.values(hidden),
                    _joined([s.returns for s in part], hidden.device),
                    tokens.weights,
                    tokens.sequence,
                    old_values=_joined([s.values for s in part], hidden.device),
                    clip=settings.value_clip,
                    normalise=settings.normalise,
                    constant_length=settings.constant_length,
                    group=tokens.group,
                    totals=totals,
                ).loss
            )
        return loss


def _joined(pieces: Sequence[Tensor | None], device: torch.device) -> Tensor:
    return torch.cat([piece for piece in pieces if piece is not None]).to(device)
