"""Losses, by hand."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from coa.train.losses import masked_cross_entropy, token_logprobs  # noqa: E402


def test_cross_entropy_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))
    logprobs = token_logprobs(logits, torch.tensor([1, 2]))
    assert logprobs.tolist() == pytest.approx([math.log(0.25), math.log(0.7)])
    weights = torch.tensor([1.0, 0.5])
    by_hand = (-math.log(0.25) - 0.5 * math.log(0.7)) / 1.5
    assert float(masked_cross_entropy(logprobs, weights)) == pytest.approx(by_hand)
    half = float(masked_cross_entropy(logprobs, weights, 3.0))
    assert half == pytest.approx(by_hand / 2)


def test_temperature_divides_logits() -> None:
    logits = torch.tensor([[2.0, 0.0]])
    expected = math.log(math.exp(1.0) / (math.exp(1.0) + 1.0))
    assert float(token_logprobs(logits, torch.tensor([0]), 2.0)) == pytest.approx(expected)
