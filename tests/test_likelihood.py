"""Cross-entropy, divergence and entropy: values by hand, and gradients of their means."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from coa.train.losses import (  # noqa: E402
    PolicyTokens,
    kl_estimate,
    masked_cross_entropy,
    policy_loss,
    sampled_entropy,
    token_logprobs,
)
from coa.train.settings import RlLossSettings  # noqa: E402


def t(*values: float) -> Any:
    return torch.tensor(values)


def one_sequence(weights: Any, advantages: Any, **more: Any) -> PolicyTokens:
    return PolicyTokens(weights, torch.zeros(len(weights)).long(), advantages, **more)


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


def test_cross_entropy_of_bfloat16_is_computed_in_float32() -> None:
    logprobs = torch.full((4096,), -1.01, dtype=torch.bfloat16)
    found = masked_cross_entropy(logprobs, torch.ones(4096, dtype=torch.bfloat16))
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(-float(logprobs[0]), rel=1e-6)


def all_tokens(logits: Any) -> tuple[Any, Any]:
    """Probability and logprob of every token of one distribution."""
    logs = torch.log_softmax(logits, dim=-1)
    return logs.exp().detach(), logs


def test_kl_estimators_by_hand() -> None:
    new, reference = t(-1.0, -2.0), t(-1.5, -1.0)
    assert kl_estimate(new, reference, "k1").tolist() == pytest.approx([0.5, -1.0])
    assert kl_estimate(new, reference, "k2").tolist() == pytest.approx([0.125, 0.5])
    expected = [math.exp(-0.5) - 1 + 0.5, math.e - 1 - 1]
    assert kl_estimate(new, reference, "k3").tolist() == pytest.approx(expected)


def test_k1_and_k3_have_the_mean_of_the_kl_and_only_k2_its_gradient() -> None:
    logits = t(0.3, -1.0, 2.0, 0.1).requires_grad_()
    reference = torch.log_softmax(t(0.5, 0.5, 0.5, -2.0), dim=-1)
    p, logs = all_tokens(logits)
    true = (logs.exp() * (logs - reference)).sum()
    slope = torch.autograd.grad(true, logits, retain_graph=True)[0]

    def mean(kind: Any) -> tuple[Any, Any]:
        estimate = (p * kl_estimate(logs, reference, kind)).sum()
        return estimate.detach(), torch.autograd.grad(estimate, logits, retain_graph=True)[0]

    for kind in ("k1", "k3"):
        torch.testing.assert_close(mean(kind)[0], true.detach())
    torch.testing.assert_close(mean("k2")[1], slope)
    assert float(mean("k1")[1].abs().max()) < 1e-6  # the trap
    assert float((mean("k3")[1] - slope).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_a_reweighted_kl_has_the_right_gradient(kind: Any) -> None:
    logits = t(0.3, -1.0, 2.0).requires_grad_()
    reference = torch.log_softmax(t(0.5, 0.5, -0.5), dim=-1)
    p, logs = all_tokens(logits)
    true = torch.autograd.grad((logs.exp() * (logs - reference)).sum(), logits, retain_graph=True)[
        0
    ]
    # Weights are probabilities, so that the sum over all tokens is the expectation.
    tokens = one_sequence(p, torch.zeros(3), reference=reference)
    chosen = RlLossSettings(kl=1.0, kl_estimator=kind, kl_reweighted=True)
    found = torch.autograd.grad(policy_loss(logs, tokens, chosen).loss, logits)[0]
    torch.testing.assert_close(found, true)


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    logs = torch.log_softmax(logits, dim=-1)
    return -(logs.exp() * logs).sum()


def test_sampled_entropy_has_the_mean_and_the_mean_gradient_of_the_entropy() -> None:
    logits = t(0.3, -1.0, 2.0, 0.1).requires_grad_()
    p, logs = all_tokens(logits)
    true = entropy_of(logits)
    estimate = (p * sampled_entropy(logs)).sum()
    torch.testing.assert_close(estimate, true)
    slope = torch.autograd.grad(true, logits, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(estimate, logits, retain_graph=True)[0], slope)
    plain = torch.autograd.grad(-(p * logs).sum(), logits)[0]
    assert float(plain.abs().max()) < 1e-6 < float(slope.abs().max())


def test_the_bonus_raises_entropy() -> None:
    logits = torch.tensor([2.0, 0.0, 0.0]).requires_grad_()
    p, logs = all_tokens(logits)
    found = policy_loss(logs, one_sequence(p, torch.zeros(3)), RlLossSettings(entropy=0.5))
    found.loss.backward()
    true = float(entropy_of(logits.detach()))
    assert found.loss.item() == pytest.approx(-0.5 * true)
    assert float(entropy_of(logits.detach() - 0.1 * logits.grad)) > true
