"""Losses as pure functions of tensors, checked by hand."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """float32 log-probability of each target under logits [n, vocab] / temperature."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    return -F.cross_entropy(scaled, targets, reduction="none")


def masked_cross_entropy(
    logprobs: Tensor, weights: Tensor, total: Tensor | float | None = None
) -> Tensor:
    """Weighted mean of -logprob: sum(w * -logprob) / total, where total defaults to sum(w).

    A caller that splits a batch into parts passes the whole batch's total to each part.
    """
    if total is None:
        total = weights.sum()
    return (-logprobs * weights).sum() / total
