"""Experience: who takes part with which reward, who is left out and why, and what is known before
the first step."""

from __future__ import annotations

import random
import statistics
from collections.abc import Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from coa.engines.scripted import ByteCodec  # noqa: E402
from coa.errors import TrainingError  # noqa: E402
from coa.train.experience import (  # noqa: E402
    Experience,
    assign_advantages,
    check_judged,
    compute_before_update,
    experience_of,
    group_advantages,
    length_penalty,
    policy_tokens,
    sampled_logprobs,
    totals_of,
)
from coa.train.groups import Group, LeftOut  # noqa: E402
from coa.train.losses import gae, kl_estimate, policy_loss, whiten  # noqa: E402
from coa.train.optimizer import balanced_share  # noqa: E402
from coa.train.policy import (  # noqa: E402
    Policy,
    ValueHead,
)
from coa.train.processes import Processes  # noqa: E402
from coa.train.rows import Row, build_row  # noqa: E402
from coa.train.settings import (  # noqa: E402
    RlLossSettings,
    RlSettings,
    RolloutSettings,
    preset,
)
from coa.trajectory import StopReason, Trajectory  # noqa: E402
from rl_parts import CALL, WHOLE, group_of, made, side_by_side  # noqa: E402

ROW = partial(build_row, codec=ByteCodec())
GOOD, BAD = WHOLE.format("good"), WHOLE.format("bad")


def taken(*groups: Group, limit: int = 1000, loss: Any = None, **settings: Any) -> Experience:
    chosen = RlSettings(loss=loss or RlLossSettings(), **settings)
    return experience_of(groups, ROW, chosen, RolloutSettings(tokens=limit))


def assigned(*groups: Group, loss: Any = None, limit: int = 1000, **settings: Any) -> Experience:
    found = taken(*groups, loss=loss, limit=limit, **settings)
    assign_advantages(found, RlSettings(loss=loss or RlLossSettings(), **settings))
    return found


def advantages(found: Experience) -> list[float]:
    return [float(sample.advantages[0]) for sample in found.samples]


def left_out(found: Experience) -> dict[str, int]:
    return {reason: count for reason, count in found.left_out.items() if count}


def released_by(budget: str) -> Trajectory:
    found = made(CALL, stop=StopReason.RELEASED)
    found.meta["cut_by"] = budget
    return found


def test_only_what_the_model_wrote_is_trained_with_the_logprobs_of_the_sampler() -> None:
    turns = (CALL, GOOD)
    found = taken(group_of((made(*turns, logprob=-0.25), 1.0), (made(BAD), 0.0)))
    sample = found.samples[0]
    text = bytes(sample.ids[at] for at in sample.trained).decode()
    assert text == "".join(turns)
    assert bytes(sample.ids).decode() == f"p q? {CALL} seen {GOOD}"
    assert sampled_logprobs(sample).tolist() == [-0.25] * len("".join(turns))
    assert [sample.group for sample in found.samples] == [0, 0]
    assert [sample.reward for sample in found.samples] == [1.0, 0.0]


def test_the_environment_the_unjudged_and_the_empty_take_no_part_and_none_is_no_zero() -> None:
    found = assigned(
        group_of(
            (made(GOOD), 1.0),
            (made(BAD), 0.0),
            (made(GOOD), None),
            (made(CALL, stop=StopReason.TOOL_FAILED), 0.0),
            (made(CALL, stop=StopReason.ENGINE_FAILED), None),
            (made(CALL, stop=StopReason.TIME), 0.0),
            (released_by("time"), 1.0),
            (made(""), 0.0),
        )
    )
    assert left_out(found) == {"unjudged": 1, "environment": 4, "empty": 1}
    expected = group_advantages([1.0, 0.0], [0, 0])
    assert advantages(found) == pytest.approx(expected)


def test_who_has_nobody_to_be_compared_with_is_left_out() -> None:
    pair = group_of((made(GOOD), 1.0), (made(BAD), 0.0))
    alone = group_of((made(GOOD), 1.0), (made(BAD), None), task="t1")
    found = assigned(pair, alone)
    assert left_out(found) == {"unjudged": 1, "lonely": 1}
    assert len(found.samples) == 2 and {s.group for s in found.samples} == {0}


def test_the_same_task_drawn_twice_is_two_groups() -> None:
    first = group_of((made(GOOD), 1.0), (made(BAD), 0.5))
    second = group_of((made(GOOD), 0.5), (made(BAD), 0.0))
    found = assigned(first, second)
    assert advantages(found) == pytest.approx(group_advantages([1.0, 0.5, 0.5, 0.0], [0, 0, 1, 1]))


def test_overlong_shaping_is_part_of_the_reward_that_is_compared() -> None:
    long = made("x" * 90)
    loss = RlLossSettings(overlong_buffer=0.2, overlong_penalty=1.0)
    found = taken(group_of((long, 1.0), (made(GOOD), 1.0)), loss=loss, limit=100)
    assert [sample.reward for sample in found.samples] == pytest.approx([0.5, 1.0])


def test_a_chain_is_as_long_as_its_nearest_limit_says() -> None:
    loss, limits = preset("dapo"), RolloutSettings(tokens=100, context=200)

    def cost(sampled: int, length: int, stop: StopReason, cut_by: str = "") -> float:
        chain = released_by(cut_by) if cut_by else made("x", stop=stop)
        chain.usage.sampled_tokens = sampled
        return length_penalty(chain, length, loss, limits)

    done = StopReason.ANSWERED
    assert cost(50, 100, done) == 0
    assert cost(90, 100, done) == pytest.approx(-0.5), "what it wrote"
    assert cost(50, 180, done) == pytest.approx(-0.5), "the whole chain"
    assert cost(95, 180, done) == pytest.approx(-0.75), "the nearer one, not both"
    assert cost(100, 120, StopReason.TOKENS) == -1
    assert cost(10, 40, StopReason.CONTEXT) == -1, "an observation did not fit"
    assert cost(10, 40, done, cut_by="context") == -1, "and a suggestion was released"
    assert cost(10, 40, done, cut_by="turns") == cost(10, 40, StopReason.TURNS) == 0
    assert cost(10, 40, StopReason.TOKENS) == 0, "a turn was too long, not the chain"


def test_a_chain_that_the_context_cut_is_worth_less_than_one_that_failed_in_time() -> None:
    cut = made(CALL, "<think>cut", stop=StopReason.CONTEXT)
    found = assigned(group_of((cut, 0.0), (made(BAD), 0.0)), loss=preset("dapo"))
    assert [sample.reward for sample in found.samples] == pytest.approx([-1.0, 0.0])
    assert advantages(found)[0] < 0 < advantages(found)[1]


VOID = (CALL, "<think>and then nothing</think>")


def without(group: Group, *reasons: LeftOut) -> Group:
    return replace(group, without=frozenset(reasons))


def test_rollouts_with_void_turns_are_kept_or_all_left_out_before_anything_is_compared() -> None:
    lucky, unlucky = made("no tag", GOOD), made(*VOID, stop=StopReason.MALFORMED)
    group = group_of((lucky, 1.0), (unlucky, 0.0), (made(BAD), 0.0), (made(GOOD), 1.0))
    assert left_out(assigned(group)) == {}
    found = assigned(without(group, "void"))
    assert left_out(found) == {"void": 2}
    assert advantages(found) == pytest.approx(group_advantages([0.0, 1.0], [0, 0]))


def test_what_a_budget_cut_is_kept_or_all_left_out_whatever_it_earned() -> None:
    cut = made(CALL, "<think>cut", stop=StopReason.TOKENS)
    released = made(CALL, "<think>cut", stop=StopReason.RELEASED)
    group = group_of((cut, 0.0), (released, 1.0), (made(GOOD), 1.0), (made(BAD), 0.5))
    assert left_out(assigned(group)) == {}
    found = assigned(without(group, "truncated"))
    assert left_out(found) == {"truncated": 2}
    assert advantages(found) == pytest.approx(group_advantages([1.0, 0.5], [0, 0]))


def test_a_rollout_is_left_out_for_one_reason() -> None:
    both = made("no tag", "<think>cut", stop=StopReason.TOKENS)
    group = group_of((both, 0.0), (made(GOOD), 1.0), (made(BAD), 0.0))
    found = assigned(without(group, "truncated", "void"))
    assert left_out(found) == {"truncated": 1}


def test_one_that_is_left_of_its_group_is_lonely() -> None:
    found = assigned(without(group_of((made(GOOD), 1.0), (made(*VOID), 0.0)), "void"))
    assert left_out(found) == {"void": 1, "lonely": 1} and not found.samples


def push_on_void(
    chance: float, clean: float, void: float, reasons: Set[LeftOut] = frozenset()
) -> tuple[float, float]:
    """What one update does to the logit of "void" (mean and standard error over 20 updates of 100
    groups of 8), for a policy that with this chance takes a turn that neither calls nor answers,
    and solves the task with the chances `clean` and `void`; through everything but a model."""
    draw, settings = random.Random("void"), RlSettings(loss=preset("dapo", overlong_buffer=0.0))
    actions = [made("<think>and then nothing</think>"), made(GOOD)]

    def one_token(trajectory: Trajectory) -> Row:
        return Row("t0", [0, actions.index(trajectory)], [0.0, 1.0], [0.0, -1.0])

    logits = torch.tensor([chance, 1 - chance]).log().requires_grad_()
    slopes = []
    for _ in range(20):
        groups = []
        for _ in range(100):
            taken = [0 if draw.random() < chance else 1 for _ in range(8)]
            earned = [float(draw.random() < (void, clean)[action]) for action in taken]
            pairs = zip([actions[action] for action in taken], earned, strict=True)
            groups.append(without(group_of(*pairs), *reasons))
        found = experience_of(groups, one_token, settings, RolloutSettings())
        assign_advantages(found, settings)
        wrote = torch.tensor([s.ids[at] for s in found.samples for at in s.trained])
        tokens = policy_tokens(found.samples, torch.device("cpu"))
        loss = policy_loss(logits.log_softmax(0)[wrote], tokens, settings.loss).loss
        slopes.append(-float(torch.autograd.grad(loss, logits)[0][0]))
    return statistics.fmean(slopes), statistics.stdev(slopes) / len(slopes) ** 0.5


@pytest.mark.parametrize(
    ("case", "expected"), [((0.2, 0.5, 0.3), -0.055), ((0.3, 0.8, 0.4), -0.158)]
)
def test_a_void_turn_that_earns_less_is_never_made_more_likely(
    case: tuple[float, float, float], expected: float
) -> None:
    """By default it is made less likely. Left out, it is not touched at all: the advantages of what
    is left of a group add up to 0, and there is one action left. Leaving out failures alone, after
    the baseline, pushed it up by 0.039 and 0.005."""
    mean, error = push_on_void(*case)
    assert mean == pytest.approx(expected, abs=3 * error + 0.0005) and mean + 5 * error < 0
    mean, _ = push_on_void(*case, frozenset({"void"}))
    assert mean == pytest.approx(0.0, abs=1e-6)


def test_every_rollout_is_a_row_or_counted() -> None:
    members = [(made(GOOD), 1.0), (made(BAD), 0.0), (made(""), 0.0), (made(GOOD), None)]
    members += [(made(*VOID), 0.0), (made(CALL, stop=StopReason.TOOL_TIMEOUT), 0.0)]
    members += [(made(CALL, stop=StopReason.TIME), 0.0)]
    group = without(group_of(*members), "void")
    found = assigned(group, group_of(*members[:1], *members[3:4], task="t1"))
    assert len(found.samples) + sum(found.left_out.values()) == 9


def test_a_world_that_fails_for_all_is_one_line_with_the_first_reason() -> None:
    failed = made(CALL, stop=StopReason.TOOL_FAILED, error="wiki_search: no connection.")
    with pytest.raises(
        TrainingError,
        match=r"^Update 3: all 2 rollouts were ended by the environment, the first by: "
        r"wiki_search: no connection\. Put it right and give the same command again\.$",
    ):
        check_judged([group_of((failed, 0.0), (failed, None))], "Update 3")


def test_a_judge_that_judges_nothing_is_one_line_with_its_reason() -> None:
    failed = made(CALL, stop=StopReason.TOOL_FAILED)
    with pytest.raises(
        TrainingError,
        match=r"^Update 3: none of 3 rollouts could be judged, and the environment ended 1 "
        r"\(judge: no answer of the judge\)\. They are kept",
    ):
        check_judged([group_of((made(GOOD), None), (made(BAD), None), (failed, None))], "Update 3")


def test_one_judged_rollout_is_enough_and_so_is_none_at_all() -> None:
    check_judged([group_of((made(GOOD), None), (made(BAD), 0.0))], "Update 3")
    check_judged([], "Update 3")


def test_a_batch_in_which_the_model_wrote_nothing_is_no_error() -> None:
    group = group_of((made(""), 0.0), (made(""), 0.0))
    check_judged([group], "Update 3")
    found = assigned(group)
    assert not found.samples and left_out(found) == {"empty": 2}


def with_reference(found: Experience) -> Experience:
    for place, sample in enumerate(found.samples):
        own = sampled_logprobs(sample)
        sample.reference = own - 0.1 * (place + 1)
    return found


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_divergence_in_the_reward_is_taken_off_before_rewards_are_compared(
    estimator: str,
) -> None:
    loss = RlLossSettings(kl=0.1, kl_place="reward", kl_estimator=estimator)
    found = with_reference(taken(group_of((made(GOOD), 1.0), (made(BAD), 0.0)), loss=loss))
    assign_advantages(found, RlSettings(loss=loss))
    taken_off = [
        0.1 * float(kl_estimate(sampled_logprobs(s), s.reference, estimator).sum())
        for s in found.samples
    ]
    expected = group_advantages([1.0 - taken_off[0], 0.0 - taken_off[1]], [0, 0])
    assert advantages(found) == pytest.approx(expected, abs=1e-6)
    assert [sample.reward for sample in found.samples] == [1.0, 0.0], "the record stays as it was"


def test_with_a_value_head_rewards_and_divergence_go_through_gae_over_the_models_tokens() -> None:
    loss = preset("ppo", kl=0.1, kl_place="reward", kl_estimator="k1", gamma=0.99)
    group = group_of((made(CALL, GOOD), 1.0), (made(BAD), 0.0))
    found = with_reference(taken(group, loss=loss, group_size=2))
    for sample in found.samples:
        sample.values = torch.linspace(0, 0.5, len(sample.trained))
    assign_advantages(found, RlSettings(loss=loss, group_size=2))
    pieces = []
    for place, sample in enumerate(found.samples):
        count = len(sample.trained)
        rewards = torch.full((count,), -0.1 * 0.1 * (place + 1))
        rewards[-1] += float(sample.reward)
        pieces.append(
            gae(rewards, sample.values, torch.ones(count), torch.zeros(count).long(), 0.99, 0.95)
        )
    raw = torch.cat([piece.advantages for piece in pieces])
    expected = whiten(raw, torch.ones(len(raw)))
    assert torch.allclose(torch.cat([s.advantages for s in found.samples]), expected, atol=1e-5)
    returns = torch.cat([piece.returns for piece in pieces])
    assert torch.allclose(torch.cat([s.returns for s in found.samples]), returns, atol=1e-6)


def test_with_a_value_head_one_rollout_of_a_task_is_enough() -> None:
    loss = preset("ppo")
    found = taken(group_of((made(GOOD), 1.0)), loss=loss, group_size=1)
    found.samples[0].values = torch.zeros(len(found.samples[0].trained))
    assign_advantages(found, RlSettings(loss=loss, group_size=1))
    assert not left_out(found) and found.samples[0].advantages is not None


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    torch.set_num_threads(1)
    policy = Policy(f"hf:{tiny_model}", rank=4, max_length=256, keep_reference=True)
    with torch.no_grad():  # away from its start, so that the reference is another model
        for parameter in policy.parameters:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    policy.refresh()
    return policy


def directly(policy: Policy, sample: Any, temperature: float) -> Any:
    """Logprobs of the trained tokens from a whole row of logits."""
    with torch.no_grad():
        logits = policy.logits(policy.hidden([sample.ids])).float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    return torch.stack([logprobs[at - 1, sample.ids[at]] for at in sample.trained])


SEVERAL = (
    group_of((made(CALL, GOOD), 1.0), (made(BAD), 0.0)),
    group_of((made(CALL, CALL, BAD), 0.0), (made(GOOD), 1.0), task="t1"),
)


def test_old_logprobs_the_reference_and_values_are_those_before_the_first_step(
    policy: Policy,
) -> None:
    settings = RlSettings(loss=preset("ppo", kl=0.1), passes=2, micro_tokens=100)
    head = ValueHead(policy.hidden_size)
    torch.nn.init.normal_(head.weight)
    found = taken(*SEVERAL)
    compute_before_update(found, policy, head, settings, 0.7, Processes())
    for sample in found.samples:
        assert torch.allclose(sample.old, directly(policy, sample, 0.7), atol=1e-4)
        with policy.reference():
            start = directly(policy, sample, 0.7)
        assert torch.allclose(sample.reference, start, atol=1e-4)
        assert not torch.allclose(sample.reference, sample.old, atol=1e-3)
        with torch.no_grad():
            hidden = policy.hidden([sample.ids])[[at - 1 for at in sample.trained]]
            assert torch.allclose(sample.values, head.values(hidden), atol=1e-4)


def test_nothing_is_computed_before_one_step_without_reference_and_values(policy: Policy) -> None:
    found = taken(*SEVERAL)
    compute_before_update(found, policy, None, RlSettings(), 1.0, Processes())
    assert all(s.old is None and s.reference is None and s.values is None for s in found.samples)


def test_nothing_is_computed_before_several_steps_when_the_ratio_is_to_the_sampler(
    policy: Policy,
) -> None:
    found = taken(*SEVERAL)
    settings = RlSettings(minibatches=2, loss=preset("dapo", old="sampler"))
    compute_before_update(found, policy, None, settings, 1.0, Processes())
    assert all(sample.old is None for sample in found.samples)


def test_processes_share_the_forward_passes_and_all_know_all(policy: Policy) -> None:
    settings = RlSettings(passes=2)
    alone = taken(*SEVERAL)
    compute_before_update(alone, policy, None, settings, 1.0, Processes())

    def look(processes: Processes) -> Experience:
        found = taken(*SEVERAL)
        compute_before_update(found, policy, None, settings, 1.0, processes)
        return found

    for found in side_by_side(3, look):
        for sample, expected in zip(found.samples, alone.samples, strict=True):
            assert torch.allclose(sample.old, expected.old, atol=1e-5)


def test_rows_are_dealt_once_each_and_evenly() -> None:
    samples = taken(*SEVERAL, *SEVERAL).samples
    shares = [balanced_share(samples, Processes(index, 3)) for index in range(3)]
    numbers = sorted(sample.number for share in shares for sample in share)
    assert numbers == [sample.number for sample in samples]
    loads = [sum(len(sample.ids) for sample in share) for share in shares]
    assert max(loads) - min(loads) <= max(len(sample.ids) for sample in samples)


def test_what_the_loss_is_told_has_one_number_for_each_trained_token() -> None:
    found = assigned(*SEVERAL)
    tokens = policy_tokens(found.samples, torch.device("cpu"))
    sizes = [len(sample.trained) for sample in found.samples]
    assert len(tokens.weights) == sum(sizes) and bool((tokens.weights == 1).all())
    assert tokens.sequence.unique_consecutive(return_counts=True)[1].tolist() == sizes
    assert tokens.group.tolist() == [0] * sum(sizes[:2]) + [1] * sum(sizes[2:])
    totals = totals_of(found.samples)
    assert (totals.weight, totals.sequences) == (sum(sizes), 4)
