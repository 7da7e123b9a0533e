"""Losses, by hand."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from coa.train.losses import (  # noqa: E402
    entropy,
    masked_cross_entropy,
    token_logprobs,
    weighted_positions,
)


def test_positions_predict_the_next_token() -> None:
    ids = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 0]])
    weights = torch.tensor([[0.0, 0.0, 1.0, 0.5], [9.0, 1.0, 0.0, 0.0]])
    places, targets, kept = weighted_positions(ids, weights)
    # row 0: position 1 predicts 12, position 2 predicts 13; row 1: position 0 predicts 21;
    # the weight 9 of a first token has nothing before it and counts nowhere.
    assert places.tolist() == [1, 2, 4]
    assert targets.tolist() == [12, 13, 21]
    assert kept.tolist() == [1.0, 0.5, 1.0]


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


def test_entropy_of_a_fair_coin() -> None:
    assert float(entropy(torch.tensor([[3.0, 3.0]]))) == pytest.approx(math.log(2))
