"""RlUpdater: the gradient of an update, however it is cut into parts, steps and processes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from coa.engines.scripted import ByteCodec  # noqa: E402
from coa.errors import TrainingError  # noqa: E402
from coa.train.experience import Experience, experience_of, sampled_logprobs  # noqa: E402
from coa.train.groups import Group  # noqa: E402
from coa.train.losses import PolicyTokens, policy_loss  # noqa: E402
from coa.train.policy import Policy  # noqa: E402
from coa.train.processes import Processes  # noqa: E402
from coa.train.rl import RlUpdater, learning_record  # noqa: E402
from coa.train.rows import build_row  # noqa: E402
from coa.train.settings import (  # noqa: E402
    PRESETS,
    RlLossSettings,
    RlSettings,
    RolloutSettings,
    preset,
)
from rl_parts import CALL, WHOLE, group_of, made, side_by_side  # noqa: E402

ROW = partial(build_row, codec=ByteCodec())
LIMITS = RolloutSettings(tokens=200)
A, B, C = (WHOLE.format(text) for text in ("a", "bb bb", "ccc ccc ccc"))
LIVELY = (
    group_of((made(CALL, A), 1.0), (made(B), 0.0), (made(C), 0.25)),
    group_of((made(B, CALL, A), 0.0), (made(C, logprob=-1.5), 1.0), (made(A), 0.0), task="t1"),
)
FLAT = group_of((made(C), 1.0), (made(CALL, B), 1.0), (made(A), 1.0), task="t2")


@pytest.fixture(scope="module")
def start(tiny_model: Path) -> Policy:
    torch.set_num_threads(1)
    policy = Policy(f"hf:{tiny_model}", rank=4, max_length=256, keep_reference=True)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    policy.refresh()
    return policy


def settings_of(loss: RlLossSettings | None = None, **changes: Any) -> RlSettings:
    named: dict[str, Any] = {"updates": 1, "group_size": 3, "tasks_per_update": 2}
    return RlSettings(loss=loss or RlLossSettings(), **(named | changes))


def fixed(loss: RlLossSettings) -> RlLossSettings:
    constant = loss.normalise == "constant"
    return replace(loss, constant_length=50) if constant else loss


class Gradients:
    """Stands for the optimiser: keeps what it was given, and moves nothing."""

    def __init__(self, updater: RlUpdater) -> None:
        self.seen: list[list[Any]] = []
        self.param_groups = updater.optimizer.optimizer.param_groups
        self._parameters = [p for group in self.param_groups for p in group["params"]]
        updater.optimizer.optimizer = self

    def step(self) -> None:
        zeros = (p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters)
        self.seen.append([gradient.clone() for gradient in zeros])

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def gradients(
    policy: Policy,
    settings: RlSettings,
    groups: Sequence[Group] = LIVELY,
    force: bool = False,
    processes: Processes | None = None,
) -> list[list[Any]]:
    """The gradients of the steps of one update; `force` computes silent samples, too."""
    updater = RlUpdater(policy, replace(settings, grad_clip=1e9), 0.9, processes)
    if updater.value_head is not None:
        torch.nn.init.constant_(updater.value_head.weight, 0.01)
    optimizer = Gradients(updater)
    if force:
        updater._has_gradient = lambda sample: True  # type: ignore[method-assign]
    found = experience_of(groups, ROW, settings, LIMITS)
    updater.update(found, 0)
    return optimizer.seen


def same(one: list[list[Any]], other: list[list[Any]], tolerance: float = 2e-6) -> bool:
    assert len(one) == len(other)
    pairs = zip((g for s in one for g in s), (g for s in other for g in s), strict=True)
    return all(torch.allclose(a, b, atol=tolerance, rtol=1e-4) for a, b in pairs)


ALL_LOSSES = [pytest.param(fixed(loss), id=name) for name, loss in PRESETS.items()]
ALL_LOSSES += [
    pytest.param(RlLossSettings(normalise="group", kl=0.1, entropy=0.01), id="group, kl, entropy"),
    pytest.param(RlLossSettings(correction="token", correction_cap=1.5), id="corrected"),
]


@pytest.mark.parametrize("loss", ALL_LOSSES)
def test_the_gradient_does_not_depend_on_how_a_batch_is_cut(
    start: Policy, loss: RlLossSettings
) -> None:
    whole = gradients(start, settings_of(loss, micro_tokens=10_000))
    assert any(bool(g.abs().max() > 1e-4) for g in whole[0])
    assert same(whole, gradients(start, settings_of(loss, micro_tokens=1)))
    assert same(whole, gradients(start, settings_of(loss, micro_tokens=150)))


@pytest.mark.parametrize("loss", ALL_LOSSES)
def test_silent_samples_count_in_what_is_divided_by_and_need_no_computation(
    start: Policy, loss: RlLossSettings
) -> None:
    groups = [*LIVELY, FLAT]
    skipped = gradients(start, settings_of(loss), groups)
    assert same(skipped, gradients(start, settings_of(loss), groups, force=True))
    if loss.normalise in ("token", "sequence", "constant") and loss.baseline != "value":
        assert not same(skipped, gradients(start, settings_of(loss), LIVELY)), "they do count"


@pytest.fixture(scope="module")
def twins(start: Policy, tiny_model: Path) -> list[Policy]:
    """The same policy twice: threads that stand for processes must not share gradients."""
    made = [
        Policy(f"hf:{tiny_model}", rank=4, max_length=256, keep_reference=True) for _ in range(2)
    ]
    with torch.no_grad():
        for policy in made:
            for own, given in zip(policy.parameters, start.parameters, strict=True):
                own.copy_(given)
            policy.refresh()
    return made


@pytest.mark.parametrize("loss", ALL_LOSSES)
def test_two_processes_have_the_gradient_of_one(
    start: Policy, twins: list[Policy], loss: RlLossSettings
) -> None:
    settings = settings_of(loss, passes=2, minibatches=2)
    alone = gradients(start, settings)
    both = side_by_side(2, lambda p: gradients(twins[p.index], settings, processes=p))
    assert same(alone, both[0]) and same(both[0], both[1], tolerance=0)


def test_a_process_without_rows_takes_part_in_the_step(start: Policy, twins: list[Policy]) -> None:
    pair = [group_of((made(A), 1.0), (made("x"), 1.0), (made(B), 0.0))]
    settings = settings_of(micro_tokens=1)
    alone = gradients(start, settings, pair)
    found = side_by_side(2, lambda p: gradients(twins[p.index], settings, pair, processes=p))
    assert same(alone, found[0]) and same(found[0], found[1], tolerance=0)


def test_the_loss_is_policy_loss_over_all_samples(start: Policy) -> None:
    loss = RlLossSettings(correction="token")
    found = experience_of(LIVELY, ROW, settings_of(loss), LIMITS)
    updater = RlUpdater(start, settings_of(loss), 0.9)
    Gradients(updater)
    steps, metrics = updater.update(found, 0)
    logprobs, weights, sequence, advantages, sampled = [], [], [], [], []
    for sample in found.samples:
        with torch.no_grad():
            logits = start.logits(start.hidden([sample.ids])).float() / 0.9
        table = torch.log_softmax(logits, dim=-1)
        logprobs += [table[at - 1, sample.ids[at]] for at in sample.trained]
        weights += [1.0] * len(sample.trained)
        sequence += [sample.number] * len(sample.trained)
        advantages += sample.advantages.tolist()
        sampled += sampled_logprobs(sample).tolist()
    tokens = PolicyTokens(
        torch.tensor(weights),
        torch.tensor(sequence),
        torch.tensor(advantages),
        sampled=torch.tensor(sampled),
    )
    direct = policy_loss(torch.stack(logprobs), tokens, loss)
    assert steps[0].loss == pytest.approx(float(direct.loss), abs=1e-5)
    assert metrics[0]["entropy"] == pytest.approx(direct.metrics["entropy"], rel=1e-4)
    assert metrics[0]["sampler_gap"] == pytest.approx(direct.metrics["sampler_gap"], rel=1e-4)


def improved(policy: Policy, settings: RlSettings, update: int = 0) -> tuple[Any, Any, Experience]:
    found = experience_of(LIVELY, ROW, settings, LIMITS)
    steps, metrics = RlUpdater(policy, settings, 1.0).update(found, update)
    return steps, metrics, found


@pytest.fixture
def fresh(tiny_model: Path) -> Callable[[], Policy]:
    torch.set_num_threads(1)
    return lambda: Policy(f"hf:{tiny_model}", rank=4, max_length=256, keep_reference=True)


def test_passes_and_minibatches_are_steps_with_ratios_to_the_first_weights(
    fresh: Callable[[], Policy],
) -> None:
    settings = settings_of(passes=3, minibatches=2, lr=1e-2, schedule="linear")
    steps, metrics, found = improved(fresh(), settings)
    assert len(steps) == 6
    assert [step.lr for step in steps] == pytest.approx([1e-2 * (1 - i / 6) for i in range(6)])
    assert metrics[0]["ratio_max"] == pytest.approx(1.0, abs=1e-4), "nothing has moved yet"
    assert max(m["ratio_max"] for m in metrics[2:]) > 1.01, "and now it has"
    assert sum(m["weight"] for m in metrics) == 3 * sum(len(s.trained) for s in found.samples)


def test_one_step_has_no_ratio(fresh: Callable[[], Policy]) -> None:
    steps, metrics, found = improved(fresh(), settings_of())
    assert len(steps) == 1 and metrics[0]["ratio_max"] == 1.0
    assert all(sample.old is None for sample in found.samples)


def test_minibatches_are_of_whole_groups_in_an_order_that_depends_on_update_and_pass(
    start: Policy,
) -> None:
    updater = RlUpdater(start, settings_of(minibatches=2), 1.0)
    found = experience_of([*LIVELY, *LIVELY], ROW, settings_of(), LIMITS)
    for sample in found.samples:
        sample.advantages = torch.ones(len(sample.trained))

    def order(update: int, turn: int) -> list[list[int]]:
        return [[s.number for s in b] for b in updater._minibatches(found.samples, update, turn)]

    orders = [order(update, turn) for update in range(3) for turn in range(2)]
    assert all(sorted(n for batch in each for n in batch) == [*range(1, 13)] for each in orders)
    group = {sample.number: sample.group for sample in found.samples}
    for one, other in orders:
        assert {group[n] for n in one}.isdisjoint(group[n] for n in other)
    assert len({str(each) for each in orders}) > 3
    assert orders[0] == order(0, 0)


def test_a_batch_that_says_nothing_takes_no_step(fresh: Callable[[], Policy]) -> None:
    policy = fresh()
    before = [parameter.detach().clone() for parameter in policy.parameters]
    settings = settings_of(passes=2)
    for groups in ([FLAT], []):
        found = experience_of(groups, ROW, settings, LIMITS)
        assert RlUpdater(policy, settings, 1.0).update(found, 0) == ([], [])
    pairs = zip(before, policy.parameters, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_step_on_few_of_the_wanted_groups_is_smaller_by_as_much(
    fresh: Callable[[], Policy],
) -> None:
    """Those that are left out or lonely are not there; flat ones that stay are."""
    alone = group_of((made(A), 1.0), (made(B), None), task="t3")
    for groups, scale in (([LIVELY[0]], 0.125), ([*LIVELY, FLAT], 0.375), ([*LIVELY, alone], 0.25)):
        settings = settings_of(tasks_per_update=8, lr=1e-2)
        moved = []
        for chosen in (settings, replace(settings, scale_steps=False)):
            policy = fresh()
            before = [parameter.detach().clone() for parameter in policy.parameters]
            found = experience_of(groups, ROW, chosen, LIMITS)
            steps, metrics = RlUpdater(policy, chosen, 1.0).update(found, 0)
            record = learning_record(found, steps, metrics)
            assert record["step_scale"] == (scale if chosen.scale_steps else 1.0)
            assert record["lr"] == pytest.approx(1e-2 * record["step_scale"])
            pairs = zip(before, policy.parameters, strict=True)
            moved.append(sum(float((b - a).detach().abs().sum()) for a, b in pairs))
        assert moved[0] == pytest.approx(scale * moved[1], rel=1e-3)


def test_the_gradient_of_a_value_head_has_a_norm_of_its_own(fresh: Callable[[], Policy]) -> None:
    norms = {}
    for name in ("ppo", "dapo"):
        steps, metrics, found = improved(fresh(), settings_of(preset(name)))
        norms[name] = learning_record(found, steps, metrics).get("value_grad_norm")
    assert norms["ppo"] > 0 and norms["dapo"] is None


def test_a_divergence_from_the_start_pulls_back(fresh: Callable[[], Policy]) -> None:
    policy = fresh()
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    policy.refresh()
    settings = settings_of(RlLossSettings(kl=1.0), updates=20, lr=1e-2)
    updater = RlUpdater(policy, settings, 1.0)
    found = []
    for update in range(20):
        _, metrics = updater.update(experience_of([FLAT], ROW, settings, LIMITS), update)
        found.append(metrics[0]["kl_reference"])
    assert found[0] > 0.01 and found[-1] < 0.5 * found[0]


def test_ppo_trains_its_value_head_towards_the_returns(fresh: Callable[[], Policy]) -> None:
    settings = settings_of(preset("ppo", value_clip=None, scale="none"), updates=40, value_lr=2e-2)
    updater = RlUpdater(fresh(), replace(settings, lr=1e-9), 1.0)
    errors = []
    for update in range(40):
        found = experience_of(LIVELY, ROW, settings, LIMITS)
        updater.update(found, update)
        gaps = [float((s.values[-1] - s.reward) ** 2) for s in found.samples]
        errors.append(sum(gaps) / len(gaps))
        if update == 0:
            assert all(not sample.values.any() for sample in found.samples), "it begins at 0"
            assert all(float(s.returns[-1]) == pytest.approx(s.reward) for s in found.samples)
    assert errors[-1] < 0.5 * errors[0], "better than any constant"


class Poisoned(Policy):
    """A policy whose numbers become none after so many forward passes."""

    left = 10**9

    def logprobs(self, *given: Any) -> Any:
        self.left -= 1
        found = super().logprobs(*given)
        return found * float("nan") if self.left < 0 else found


@pytest.mark.parametrize("poison", ["first", "second part"])
def test_numbers_that_are_none_change_neither_policy_nor_optimiser(
    tiny_model: Path, poison: str
) -> None:
    policy = Poisoned(f"hf:{tiny_model}", rank=4, max_length=256)
    settings = settings_of(micro_tokens=100, updates=3)
    updater = RlUpdater(policy, settings, 1.0)
    updater.update(experience_of(LIVELY, ROW, settings, LIMITS), 0)
    before = copy.deepcopy([p.detach() for p in policy.parameters])
    state = copy.deepcopy(updater.optimizer.optimizer.state_dict())
    policy.left = 0 if poison == "first" else 1
    with pytest.raises(TrainingError, match=r"the logprob of token 0 \(sequence \d\) is nan"):
        updater.update(experience_of(LIVELY, ROW, settings, LIMITS), 1)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters, strict=True))
    assert all(parameter.grad is None for parameter in policy.parameters)
    after = updater.optimizer.optimizer.state_dict()
    for key, held in state["state"].items():
        assert all(torch.equal(value, after["state"][key][name]) for name, value in held.items())


def test_all_processes_hear_of_all_metrics(start: Policy) -> None:
    settings = settings_of(micro_tokens=1)

    def work(processes: Processes) -> int:
        updater = RlUpdater(start, settings, 1.0, processes)
        Gradients(updater)
        updater.optimizer.step = _ignore  # type: ignore[method-assign]
        found = experience_of(LIVELY, ROW, settings, LIMITS)
        return len(updater.update(found, 0)[1])

    assert side_by_side(3, work) == [6, 6, 6]


@torch.no_grad()
def _ignore(at: int, parts: Any, scale: float) -> Any:
    """Threads cannot take steps of the same parameters."""
    for part in parts:
        part()
