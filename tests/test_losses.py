"""The policy loss by hand, by property and by finite differences; parity is in test_parity.py."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from coa.errors import ConfigError, TrainingError  # noqa: E402
from coa.train.losses import (  # noqa: E402
    PolicyTokens,
    Totals,
    join_metrics,
    masked_cross_entropy,
    policy_loss,
    sampler_correction,
    shares,
)
from coa.train.settings import RlLossSettings, preset  # noqa: E402

LEVELS = ("token", "sequence", "trajectory")
NORMALISATIONS = ("token", "sequence", "constant", "group")
ALL = RlLossSettings(
    dual_clip=3.0,
    constant_length=7,
    kl=0.1,
    entropy=0.02,
    correction="token",
    correction_cap=1.2,
)
"""Everything at once."""


def t(*values: float) -> Any:
    return torch.tensor(values)


def whole(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.long)


def tokens_of(weights: Any, sequence: Any, advantages: Any, **more: Any) -> PolicyTokens:
    return PolicyTokens(weights, sequence, advantages, **more)


def random_tokens(seed: int, lengths: list[int]) -> tuple[Any, PolicyTokens]:
    """Logprobs and tokens of sequences of any length, two to a group, some tokens of weight 0."""
    make = torch.Generator().manual_seed(seed)
    size = sum(lengths)
    sequence = torch.cat([torch.full((n,), at) for at, n in enumerate(lengths)])
    new = -3 * torch.rand(size, generator=make) - 0.1
    weights = (torch.rand(size, generator=make) < 0.7).float()
    weights[[sum(lengths[:at]) for at in range(len(lengths))]] = 1.0

    def near(spread: float) -> Any:
        return new + spread * torch.randn(size, generator=make)

    return new, PolicyTokens(
        weights=weights,
        sequence=sequence,
        advantages=torch.randn(len(lengths), generator=make)[sequence],
        old=near(0.3),
        sampled=near(0.3),
        reference=near(0.5),
        group=sequence // 2,
    )


def take(tokens: PolicyTokens, kept: Any) -> PolicyTokens:
    return PolicyTokens(
        **{f.name: getattr(tokens, f.name)[kept] for f in dataclasses.fields(tokens)}
    )


def gradient(new: Any, run: Callable[[Any], Any]) -> Any:
    leaf = new.clone().requires_grad_()
    run(leaf).backward()
    return leaf.grad


# The policy loss by hand.


def test_ratios_are_clipped_on_the_side_that_would_be_rewarded() -> None:
    ratios = t(0.5, 0.5, 1.0, 1.5, 1.5, 5.0)
    advantages = t(2.0, -2.0, 1.0, 2.0, -2.0, -1.0)
    tokens = tokens_of(torch.ones(6), torch.zeros(6).long(), advantages, old=t(*[-2.0] * 6))
    chosen = RlLossSettings(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    new = (-2.0 + ratios.log()).requires_grad_()
    found = policy_loss(new, tokens, chosen)
    found.loss.backward()
    loss = found.loss.item()
    # Per token: -0.5*2, 0.8*2 (clipped low), -1, -1.3*2 (clipped high), 1.5*2, 3 (dual).
    assert loss == pytest.approx((-1.0 + 1.6 - 1.0 - 2.6 + 3.0 + 3.0) / 6)
    expected = [-1.0 / 6, 0.0, -1.0 / 6, 0.0, 3.0 / 6, 0.0]
    assert new.grad.tolist() == pytest.approx(expected, abs=1e-6)
    metrics = found.metrics
    assert (metrics["clip_low"], metrics["clip_high"], metrics["clip_dual"]) == pytest.approx(
        (1 / 6, 1 / 6, 1 / 6)
    )
    assert metrics["ratio_max"] == pytest.approx(5.0)
    assert metrics["ratio_mean"] == pytest.approx(10.0 / 6)


def test_normalisations_by_hand() -> None:
    """Losses 1 1 1 1 | 3 | 5 of three sequences; the first two are one group."""
    sequence, group = whole(7, 7, 7, 7, 2, 9), whole(0, 0, 0, 0, 0, 1)
    losses, weights = t(1.0, 1.0, 1.0, 1.0, 3.0, 5.0), torch.ones(6)

    def mean(normalise: Any, **more: Any) -> float:
        group = more.pop("group", None)
        chosen = RlLossSettings(normalise=normalise, **more)
        return float((shares(weights, sequence, chosen, group) * losses).sum())

    assert mean("token") == pytest.approx(12 / 6)
    assert mean("sequence") == pytest.approx((1 + 3 + 5) / 3)
    assert mean("constant", constant_length=10) == pytest.approx((4 + 3 + 5) / 30)
    assert mean("group", group=group) == pytest.approx((7 / 5 + 5) / 2)


def test_the_ratio_of_a_sequence_is_a_geometric_mean_and_that_of_a_trajectory_a_product() -> None:
    tokens = tokens_of(torch.ones(3), whole(0, 0, 1), t(1.0, 1.0, 1.0), old=t(-1.0, -1.0, -1.0))
    new = t(-0.9, -0.8, -1.0)
    wide = {"clip_low": 0.9, "clip_high": 9.0, "normalise": "sequence"}
    by_sequence = policy_loss(new, tokens, RlLossSettings(ratio="sequence", **wide)).loss
    assert float(by_sequence) == pytest.approx(-(math.exp(0.15) + 1) / 2)
    product = policy_loss(new, tokens, RlLossSettings(ratio="trajectory", **wide)).loss
    assert float(product) == pytest.approx(-(math.exp(0.3) + 1) / 2)


def test_fresh_samples_have_the_gradient_of_reinforce_whatever_the_ratio() -> None:
    new, tokens = random_tokens(0, [3, 5, 2])
    tokens = dataclasses.replace(tokens, old=None)
    for level, normalise in [("token", "token"), ("sequence", "token"), ("trajectory", "sequence")]:
        chosen = RlLossSettings(ratio=level, normalise=normalise)
        found = gradient(new, lambda leaf, c=chosen: policy_loss(leaf, tokens, c).loss)
        divisor = 3 if level == "trajectory" else float(tokens.weights.sum())
        expected = -tokens.advantages * tokens.weights / divisor
        torch.testing.assert_close(found, expected)


def test_cispo_keeps_the_gradient_of_what_it_bounds() -> None:
    tokens = tokens_of(torch.ones(2), whole(0, 0), t(1.0, -1.0), old=t(-3.0, -3.0))
    new = t(-1.0, -1.0)  # both ratios are e**2
    found = gradient(new, lambda leaf: policy_loss(leaf, tokens, preset("cispo")).loss)
    assert found.tolist() == pytest.approx([-2.5, 2.5])


def test_a_correction_multiplies_and_has_no_gradient_of_its_own() -> None:
    tokens = tokens_of(torch.ones(2), whole(0, 1), t(1.0, 1.0), sampled=t(-1.0, -3.0))
    chosen = RlLossSettings(correction="token", correction_cap=2.0)
    new = t(-1.5, -1.5).requires_grad_()  # p(trainer) / p(sampler): e**-0.5, e**1.5 -> 2
    found = policy_loss(new, tokens, chosen)
    found.loss.backward()
    assert new.grad.tolist() == pytest.approx([-math.exp(-0.5) / 2, -2.0 / 2])
    metrics = found.metrics
    assert metrics["correction_changed"] == pytest.approx(0.5)
    assert metrics["sampler_gap"] == pytest.approx(1.0) and metrics["sampler_kl"] == pytest.approx(
        -0.5
    )
    assert metrics["sampler_gap_max"] == pytest.approx(1.5)
    low = math.exp(-0.5)
    assert join_metrics([metrics])["ess"] == pytest.approx((low + 2) ** 2 / 2 / (low**2 + 4))


def test_the_ratio_may_be_to_what_the_sampler_computed_and_then_needs_no_correction() -> None:
    make, tokens = random_tokens(3, [5, 4])
    sampled = make.detach() - 0.1
    bypass = RlLossSettings(old="sampler", correction="token", correction_cap=1.0)
    told = dataclasses.replace(tokens, old=make.detach() + 9.0, sampled=sampled)
    usual = dataclasses.replace(tokens, old=sampled, sampled=None)
    mine, theirs = policy_loss(make, told, bypass), policy_loss(make, usual, RlLossSettings())
    assert float(mine.loss) == pytest.approx(float(theirs.loss))
    assert mine.metrics["ratio_mean"] == pytest.approx(math.exp(0.1))
    assert mine.metrics["correction_mean"] == 1.0
    assert mine.metrics["sampler_gap"] == pytest.approx(0.1, abs=1e-6), "rounding is still seen"
    with pytest.raises(ConfigError, match="old = 'sampler' needs the logprobs of the sampler"):
        policy_loss(make, usual, bypass)


def test_a_correction_masks_or_cuts_what_is_beyond_its_bounds() -> None:
    old, sampled, sequence = t(-1.0, -1.0, -1.0), t(-1.0, -2.0, 0.0), whole(0, 0, 1)
    by_token = RlLossSettings(correction="token", correction_cap=2.0, correction_floor=0.5)
    cut = sampler_correction(old, sampled, sequence, by_token)
    assert cut.factors.tolist() == pytest.approx([1.0, 2.0, 0.5])
    masking = dataclasses.replace(by_token, correction_mode="mask")
    masked = sampler_correction(old, sampled, sequence, masking)
    assert masked.factors.tolist() == [1.0, 0.0, 0.0]
    assert masked.changed.tolist() == [False, True, True]
    together = RlLossSettings(correction="trajectory", correction_cap=9.0)
    product = sampler_correction(old.requires_grad_(), sampled, sequence, together)
    assert not product.factors.requires_grad
    assert product.factors.tolist() == pytest.approx([math.e, math.e, math.exp(-1)])
    by_sequence = dataclasses.replace(together, correction="sequence")
    mean = sampler_correction(old, sampled, sequence, by_sequence)
    assert mean.factors.tolist() == pytest.approx([math.exp(0.5), math.exp(0.5), math.exp(-1)])


def test_the_correction_of_a_sequence_does_not_depend_on_its_length() -> None:
    """The product of a small and even gap does: long rollouts would all be at the cap."""
    gaps = t(*[0.01] * 2000)
    both = dict.fromkeys(("sequence", "trajectory"), 0.0)
    for name in both:
        chosen = RlLossSettings(correction=name, correction_cap=2.0)
        found = sampler_correction(gaps, t(*[0.0] * 2000), whole(*[0] * 2000), chosen)
        both[name] = float(found.factors[0])
    assert both == {"sequence": pytest.approx(math.exp(0.01)), "trajectory": 2.0}


# Properties.


lengths = st.lists(st.integers(1, 6), min_size=2, max_size=6)
choices = st.tuples(st.sampled_from(LEVELS), st.sampled_from(NORMALISATIONS))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), sizes=lengths, choice=choices, cut=st.integers(1, 5))
def test_the_sum_of_parts_is_the_whole(
    seed: int, sizes: list[int], choice: tuple[Any, Any], cut: int
) -> None:
    new, tokens = random_tokens(seed, sizes)
    chosen = dataclasses.replace(ALL, ratio=choice[0], normalise=choice[1])
    cut = min(cut, len(sizes) - 1)  # a group may be split; a sequence is not
    totals = Totals.of(tokens.weights, tokens.sequence, tokens.group)
    parts = [(tokens.sequence < cut).nonzero()[:, 0], (tokens.sequence >= cut).nonzero()[:, 0]]
    once = policy_loss(new, tokens, chosen)
    slope = gradient(new, lambda leaf: policy_loss(leaf, tokens, chosen).loss)
    found = [policy_loss(new[kept], take(tokens, kept), chosen, totals) for kept in parts]
    torch.testing.assert_close(sum(part.loss for part in found), once.loss)
    summed = gradient(
        new,
        lambda leaf: sum(
            policy_loss(leaf[kept], take(tokens, kept), chosen, totals).loss for kept in parts
        ),
    )
    torch.testing.assert_close(summed, slope)
    metrics = join_metrics([part.metrics for part in found])
    assert metrics == pytest.approx(join_metrics([once.metrics]), rel=1e-4, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), sizes=lengths, choice=choices, order=st.randoms())
def test_the_order_of_tokens_and_the_names_of_sequences_mean_nothing(
    seed: int, sizes: list[int], choice: tuple[Any, Any], order: Any
) -> None:
    new, tokens = random_tokens(seed, sizes)
    chosen = dataclasses.replace(ALL, ratio=choice[0], normalise=choice[1])
    places = list(range(len(new)))
    order.shuffle(places)
    mixed = take(tokens, places)
    renamed = dataclasses.replace(mixed, sequence=1000 - 3 * mixed.sequence)
    once, again = policy_loss(new, tokens, chosen), policy_loss(new[places], renamed, chosen)
    torch.testing.assert_close(again.loss, once.loss)
    slope = gradient(new, lambda leaf: policy_loss(leaf, tokens, chosen).loss)
    turned = gradient(new[places], lambda leaf: policy_loss(leaf, renamed, chosen).loss)
    torch.testing.assert_close(turned, slope[places])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 9999),
    sizes=lengths,
    choice=choices,
    junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30, 0.0]),
)
def test_tokens_of_weight_0_have_no_influence_whatever_their_values(
    seed: int, sizes: list[int], choice: tuple[Any, Any], junk: float
) -> None:
    new, tokens = random_tokens(seed, sizes)
    chosen = dataclasses.replace(ALL, ratio=choice[0], normalise=choice[1])
    out = tokens.weights == 0
    names = ("advantages", "old", "sampled", "reference")
    filled = {name: getattr(tokens, name).masked_fill(out, junk) for name in names}
    spoilt, bad = dataclasses.replace(tokens, **filled), new.masked_fill(out, junk)
    kept = (~out).nonzero()[:, 0]
    without = policy_loss(new[kept], take(tokens, kept), chosen)
    found = policy_loss(bad, spoilt, chosen)
    assert float(found.loss) == float(without.loss) and found.metrics == without.metrics
    slope = gradient(bad, lambda leaf: policy_loss(leaf, spoilt, chosen).loss)
    assert float(slope[out].abs().sum()) == 0.0 and bool(torch.isfinite(slope).all())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 9999), sizes=lengths, choice=choices, factor=st.floats(0.1, 10))
def test_advantages_scale_the_loss_and_weights_do_not(
    seed: int, sizes: list[int], choice: tuple[Any, Any], factor: float
) -> None:
    new, tokens = random_tokens(seed, sizes)
    chosen = RlLossSettings(
        ratio=choice[0], normalise=choice[1], constant_length=7, correction="sequence"
    )
    once = policy_loss(new, tokens, chosen).loss
    larger = dataclasses.replace(tokens, advantages=tokens.advantages * factor)
    torch.testing.assert_close(policy_loss(new, larger, chosen).loss, once * factor)
    if choice[1] != "constant" and choice[0] != "trajectory":
        heavier = dataclasses.replace(tokens, weights=tokens.weights * factor)
        torch.testing.assert_close(policy_loss(new, heavier, chosen).loss, once)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 9999), sizes=lengths, choice=choices)
def test_gradients_are_those_of_finite_differences(
    seed: int, sizes: list[int], choice: tuple[Any, Any]
) -> None:
    """The sequence ratio is left out: its gradient is by definition not that of its value."""
    level = "token" if choice[0] == "sequence" else choice[0]
    new, tokens = random_tokens(seed, sizes)
    chosen = dataclasses.replace(ALL, ratio=level, normalise=choice[1], entropy=0.0)

    def loss(at: Any) -> float:
        return float(policy_loss(at, tokens, chosen).loss)

    slope = gradient(new, lambda leaf: policy_loss(leaf, tokens, chosen).loss)
    step = 2e-3
    for place in range(len(new)):
        move = torch.zeros_like(new)
        move[place] = step
        up, down, here = loss(new + move), loss(new - move), loss(new)
        sides = (up - here) / step, (here - down) / step
        low, high = min(sides), max(sides)  # a corner of the clip may lie between
        slack = 5e-3 + 0.02 * abs(high)
        assert low - slack <= float(slope[place]) <= high + slack


def test_inputs_of_any_precision_are_computed_in_float32() -> None:
    new, tokens = random_tokens(3, [4, 5])
    for kind in (torch.bfloat16, torch.float64):
        names = ("weights", "advantages", "old", "sampled", "reference")
        cast = dataclasses.replace(tokens, **{n: getattr(tokens, n).to(kind) for n in names})
        leaf = new.to(kind).requires_grad_()
        found = policy_loss(leaf, cast, ALL)
        found.loss.backward()
        assert found.loss.dtype == torch.float32 and leaf.grad.dtype == kind
        wide = dataclasses.replace(cast, **{n: getattr(cast, n).float() for n in names})
        assert found.loss.item() == float(policy_loss(new.to(kind).float(), wide, ALL).loss)


def test_a_policy_far_from_its_old_one_gives_large_numbers_but_finite_ones() -> None:
    tokens = tokens_of(torch.ones(2), whole(0, 1), t(-1.0, 1.0), old=t(-500.0, -0.1))
    new = t(-0.1, -500.0)
    for level in LEVELS:
        found = policy_loss(new, tokens, RlLossSettings(ratio=level))
        slope = gradient(
            new, lambda leaf, at=level: policy_loss(leaf, tokens, RlLossSettings(ratio=at)).loss
        )
        assert math.isfinite(float(found.loss)) and bool(torch.isfinite(slope).all())
        assert found.metrics["ratio_max"] == pytest.approx(math.exp(20))


# What cannot be computed says so.


@pytest.mark.parametrize("name", ["advantages", "old", "sampled", "reference"])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_named(name: str, junk: float) -> None:
    new, tokens = random_tokens(1, [2, 3])
    spoilt = getattr(tokens, name).clone()
    spoilt[2] = junk  # the first token of sequence 1 has weight 1
    what = {"advantages": "advantage"}.get(name, f"{name} logprob")
    with pytest.raises(
        TrainingError, match=rf"the {what} of token 2 \(sequence 1\) is -?(nan|inf)"
    ):
        policy_loss(new, dataclasses.replace(tokens, **{name: spoilt}), ALL)


def test_a_logprob_that_is_not_finite_is_named() -> None:
    new, tokens = random_tokens(1, [2, 3])
    bad = new.clone()
    bad[0] = math.nan
    with pytest.raises(TrainingError, match=r"the logprob of token 0 \(sequence 0\) is nan; expe"):
        policy_loss(bad, tokens, ALL)
    with pytest.raises(TrainingError, match=r"the logprob of token 0 is nan.*1 of 5 are not"):
        masked_cross_entropy(bad, torch.ones(5))


def test_nothing_to_train_is_an_error() -> None:
    new, tokens = random_tokens(1, [2, 3])
    none = dataclasses.replace(tokens, weights=torch.zeros(5))
    with pytest.raises(TrainingError, match="none of 5 tokens has a weight above 0"):
        policy_loss(new, none, ALL)
    with pytest.raises(TrainingError, match="none of 5 tokens has a weight above 0"):
        masked_cross_entropy(new, torch.zeros(5))
    with pytest.raises(TrainingError, match="none of 0 tokens"):
        masked_cross_entropy(new[:0], torch.zeros(0))


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_no_weight_is_an_error(bad: float) -> None:
    with pytest.raises(TrainingError, match=r"the weight of token 1 is .*; expected 0 or more"):
        masked_cross_entropy(t(-1.0, -1.0), t(1.0, bad))


def test_what_settings_need_and_is_missing_is_named() -> None:
    new, tokens = random_tokens(1, [2, 3])
    bare = PolicyTokens(tokens.weights, tokens.sequence, tokens.advantages)
    with pytest.raises(ConfigError, match=r"kl = 0\.1 needs the reference's logprobs; found none"):
        policy_loss(new, bare, RlLossSettings(kl=0.1))
    with pytest.raises(ConfigError, match="correction = 'token' needs the logprobs of the sampler"):
        policy_loss(new, bare, RlLossSettings(correction="token"))
    with pytest.raises(ConfigError, match="'constant' needs constant_length"):
        policy_loss(new, bare, preset("dr_grpo"))
    with pytest.raises(ConfigError, match="'group' needs the group of every token"):
        policy_loss(new, bare, RlLossSettings(normalise="group"))
