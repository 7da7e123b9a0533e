"""The layout of losses: flat tokens, whose sequence each is, and how they are averaged.

`weights` [n] say how much a token counts (0: not at all), `sequence` [n] whose it is, `group` [n]
of which task that is; the last two are integers that mean nothing but "the same".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from coa.errors import ConfigError, TrainingError
from coa.train.loss_settings import Normalise


@dataclass(frozen=True, slots=True)
class Totals:
    """What a batch is divided by. Take it of the whole batch and pass it to each of its parts.

    A sequence must not be split over parts; a group may be. `+` joins parts that share no sequence,
    such as those of several processes.
    """

    weight: float
    sequences: int
    """Those that have a trained token."""
    groups: Mapping[int, float]
    """Group -> its weight; empty when no groups were given."""

    @classmethod
    def of(cls, weights: Tensor, sequence: Tensor, group: Tensor | None = None) -> Totals:
        kept = trained(weights)
        weights, sequence = weights[kept].double(), sequence[kept]
        by_group: dict[int, float] = {}
        if group is not None:
            names, index = torch.unique(group[kept], return_inverse=True)
            sums = sum_by(index, weights, len(names))
            by_group = dict(zip(names.tolist(), sums.tolist(), strict=True))
        return cls(float(weights.sum()), len(torch.unique(sequence)), by_group)

    def __add__(self, other: Totals) -> Totals:
        keys = [*self.groups, *(key for key in other.groups if key not in self.groups)]
        groups = {key: self.groups.get(key, 0.0) + other.groups.get(key, 0.0) for key in keys}
        return Totals(self.weight + other.weight, self.sequences + other.sequences, groups)


def shares(
    weights: Tensor,
    sequence: Tensor,
    normalise: Normalise = "token",
    *,
    group: Tensor | None = None,
    constant_length: int | None = None,
    totals: Totals | None = None,
) -> Tensor:
    """The factor of each token's loss: a loss is the sum of share times loss of a token. float32.

    `token`: weight over the weight of the batch. `sequence`: over that of its sequence, and the
    number of sequences. `constant`: over `constant_length` and that number. `group`: over the
    weight of its group, and the number of groups.
    """
    weights = weights.float()
    if totals is None:
        totals = Totals.of(weights, sequence, group)
    if normalise == "token":
        return weights / totals.weight
    if normalise == "sequence":
        index, count = numbered(sequence)
        return weights / sum_by(index, weights, count).clamp_min(1e-30)[index] / totals.sequences
    if normalise == "constant":
        if constant_length is None:
            raise ConfigError(
                "normalise = 'constant' needs constant_length, the same number throughout a run."
            )
        return weights / (constant_length * totals.sequences)
    if group is None or not totals.groups:
        raise ConfigError("normalise = 'group' needs the group of every token.")
    names, index = torch.unique(group, return_inverse=True)
    of_group = [totals.groups.get(int(name), 1.0) for name in names]  # absent: all weights are 0
    return weights / torch.tensor(of_group, device=weights.device)[index] / len(totals.groups)


def trained(weights: Tensor) -> Tensor:
    """Places of the tokens that count; an error when there are none, or weights are no weights."""
    assert weights.dim() == 1, f"expected flat tokens, found shape {tuple(weights.shape)}"
    bad = ~(torch.isfinite(weights) & (weights >= 0))
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise TrainingError(
            f"Loss: the weight of token {at} is {float(weights[at])}; expected 0 or more."
        )
    kept = (weights > 0).nonzero()[:, 0]
    if len(kept) == 0:
        raise TrainingError(
            f"Loss: none of {len(weights)} tokens has a weight above 0; expected at least one that "
            "the model wrote."
        )
    return kept


def pick(what: str, values: Tensor, kept: Tensor, sequence: Tensor | None = None) -> Tensor:
    """The float32 values of the tokens that count; an error that names the first not finite."""
    assert values.dim() == 1, f"{what}: expected flat tokens, found shape {tuple(values.shape)}"
    picked = values[kept].float()
    finite = torch.isfinite(picked)
    if not bool(finite.all()):
        place = int((~finite).nonzero()[0])
        at = int(kept[place])
        whose = "" if sequence is None else f" (sequence {int(sequence[at])})"
        raise TrainingError(
            f"Loss: the {what} of token {at}{whose} is {float(picked[place])}; expected a finite "
            f"number ({int((~finite).sum())} of {len(picked)} are not)."
        )
    return picked


def numbered(keys: Tensor) -> tuple[Tensor, int]:
    """The same keys as 0, 1, 2 ..., and how many there are."""
    names, index = torch.unique(keys, return_inverse=True)
    return index, len(names)


def sum_by(index: Tensor, values: Tensor, count: int) -> Tensor:
    """Sums of values [n] by index [n] -> [count]."""
    return values.new_zeros(count).index_add(0, index, values)
