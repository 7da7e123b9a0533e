"""PolicyOptimizer: schedules, parts, clipping, and steps that are taken or not at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from coa.errors import TrainingError  # noqa: E402
from coa.train.optimizer import PolicyOptimizer, balanced_share, micro_batches, schedule_factor  # noqa: E402
from coa.train.processes import Processes  # noqa: E402
from coa.train.rows import Row  # noqa: E402
from coa.train.settings import SftSettings  # noqa: E402
from rl_parts import side_by_side  # noqa: E402


class Line:
    """The smallest policy: two numbers."""

    device = torch.device("cpu")

    def __init__(self, *start: float) -> None:
        self.weight = torch.nn.Parameter(torch.tensor(start or (1.0, -2.0)))
        self.refreshed = 0

    @property
    def parameters(self) -> list[Any]:
        return [self.weight]

    def refresh(self) -> None:
        self.refreshed += 1

    def loss(self, target: float, share: float = 1.0) -> Any:
        return share * (self.weight - target).square().sum()


def optimizer(
    policy: Line, steps: int = 10, processes: Processes | None = None, **settings: Any
) -> PolicyOptimizer:
    extra = {name: settings.pop(name) for name in ("extra", "extra_lr") if name in settings}
    named: dict[str, Any] = {"lr": 0.1, "schedule": "constant", "warmup": 0.0}
    chosen = SftSettings(**(named | settings))
    return PolicyOptimizer(policy, chosen, steps, processes, **extra)  # type: ignore[arg-type]


def test_parts_add_up_to_one_step() -> None:
    one, other = Line(), Line()
    whole = optimizer(one).step(0, [lambda: one.loss(3.0)])
    parts = optimizer(other).step(0, [lambda: other.loss(3.0, 0.25), lambda: other.loss(3.0, 0.75)])
    assert whole.loss == pytest.approx(parts.loss) and whole.grad_norm == pytest.approx(
        parts.grad_norm
    )
    assert torch.allclose(one.weight, other.weight) and one.refreshed == other.refreshed == 1
    assert one.weight.grad is None


def test_processes_add_up_to_one_step_also_when_one_has_nothing() -> None:
    alone = Line()
    expected = optimizer(alone).step(0, [lambda: alone.loss(3.0)])

    def work(processes: Processes) -> tuple[Any, Any]:
        own = Line()
        parts = [lambda: own.loss(3.0)] if processes.main else []
        return optimizer(own, processes=processes).step(0, parts), own.weight.detach()

    for step, weight in side_by_side(3, work):
        assert step == expected and torch.equal(weight, alone.weight.detach())


def test_the_gradient_is_clipped_and_its_norm_is_told_before_that() -> None:
    policy = Line(100.0, 0.0)
    taught = optimizer(policy, grad_clip=0.5, weight_decay=0.0)
    held: list[Any] = []
    taught.optimizer.register_step_pre_hook(
        lambda *_: held.append(policy.weight.grad.norm().item())
    )
    step = taught.step(0, [lambda: policy.loss(0.0)])
    assert step.grad_norm == pytest.approx(200.0) and held == [pytest.approx(0.5, rel=1e-3)]


def test_parameters_beside_the_policy_are_clipped_by_themselves() -> None:
    """However wrong a value head is, the policy's gradient stays as it is."""
    policy, head = Line(3.0, 0.0), torch.nn.Parameter(torch.tensor([1000.0]))
    taught = optimizer(policy, grad_clip=10.0, weight_decay=0.0, extra=[head], extra_lr=0.1)
    held: list[tuple[float, float]] = []
    taught.optimizer.register_step_pre_hook(
        lambda *_: held.append((policy.weight.grad.norm().item(), head.grad.norm().item()))
    )
    step = taught.step(0, [lambda: policy.loss(0.0) + head.square().sum()])
    assert (step.grad_norm, step.extra_norm) == (pytest.approx(6.0), pytest.approx(2000.0))
    assert held == [(pytest.approx(6.0), pytest.approx(10.0))]
    assert optimizer(Line()).step(0, []).extra_norm is None


def test_a_scaled_step_is_as_much_smaller_also_under_adam_and_clipping() -> None:
    moved = {}
    for scale in (1.0, 0.125):
        policy = Line(3.0, 0.0)
        step = optimizer(policy, grad_clip=0.5, weight_decay=0.0).step(
            0, [lambda policy=policy: policy.loss(0.0)], scale
        )
        moved[scale] = 3.0 - float(policy.weight.detach()[0])
        assert step.lr == pytest.approx(0.1 * scale)
    assert moved[0.125] == pytest.approx(moved[1.0] / 8, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none_take_no_step(bad: float) -> None:
    policy = Line()
    taught = optimizer(policy)
    taught.step(0, [lambda: policy.loss(3.0)])
    before, state = policy.weight.detach().clone(), str(taught.optimizer.state_dict())
    with pytest.raises(TrainingError, match=r"loss (nan|inf), gradient norm .*expected finite"):
        taught.step(1, [lambda: policy.loss(3.0), lambda: policy.loss(bad)])
    assert torch.equal(policy.weight, before) and policy.weight.grad is None
    assert str(taught.optimizer.state_dict()) == state and policy.refreshed == 1


def test_a_part_that_raises_leaves_no_gradient_behind() -> None:
    policy = Line()
    taught = optimizer(policy)

    def broken() -> Any:
        raise TrainingError("no token")

    with pytest.raises(TrainingError, match="no token"):
        taught.step(0, [lambda: policy.loss(3.0), broken])
    assert policy.weight.grad is None
    fresh = Line()
    optimizer(fresh).step(0, [lambda: fresh.loss(3.0)])
    taught.step(0, [lambda: policy.loss(3.0)])
    assert torch.equal(policy.weight, fresh.weight)


def test_parameters_beside_the_policys_have_a_rate_of_their_own() -> None:
    policy, head = Line(), torch.nn.Parameter(torch.zeros(1))
    taught = optimizer(policy, extra=[head], extra_lr=0.5, schedule="linear")
    taught.step(5, [lambda: policy.loss(3.0) + (head - 1).square().sum()])
    assert [group["lr"] for group in taught.optimizer.param_groups] == pytest.approx([0.05, 0.25])
    assert head.item() == pytest.approx(0.25, abs=1e-3)


def test_the_rate_rises_and_then_goes_by_the_schedule() -> None:
    def curve(kind: Any) -> list[float]:
        return [schedule_factor(kind, done, 10, 0.2) for done in range(10)]

    assert curve("constant") == [0.5] + [1.0] * 9
    assert curve("linear") == pytest.approx([0.5, 1.0, 1.0, *(1 - i / 8 for i in range(1, 8))])
    cosine = curve("cosine")
    assert cosine[2] == 1.0 and cosine[6] == pytest.approx(0.5) and 0 < cosine[9] < 0.05


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(1, 50),
    st.floats(0, 1),
)
def test_no_step_is_without_a_rate_and_none_is_above_the_peak(
    kind: Any, steps: int, warmup: float
) -> None:
    assert all(0 < schedule_factor(kind, done, steps, warmup) <= 1 for done in range(steps))


@dataclass
class Sized:
    size: int

    @property
    def ids(self) -> Sequence[int]:
        return range(self.size)


@given(st.lists(st.integers(1, 50)), st.integers(1, 100))
def test_micro_batches_keep_order_and_limit(sizes: list[int], limit: int) -> None:
    parts = micro_batches([Sized(size) for size in sizes], limit)
    assert [row.size for part in parts for row in part] == sizes
    assert all(len(part) == 1 or sum(row.size for row in part) <= limit for part in parts)
    joined = pairwise(parts)
    assert all(sum(r.size for r in part) + after[0].size > limit for part, after in joined)


def test_what_rows_share_counts_once_and_brings_them_together() -> None:
    rows = [Row(name, ids, [1.0] * len(ids)) for name, ids in SHARING.items()]
    parts = micro_batches(rows, 14, shares=True)
    assert [[row.task_id for row in part] for part in parts] == [["a", "b", "c"], ["d"]]
    assert [len(part) for part in micro_batches(rows, 14)] == [1, 1, 1, 1]


SHARING = {
    "a": [1] * 8,
    "d": [9] * 12,
    "b": [*[1] * 8, 2, 2],
    "c": [*[1] * 8, 2, 3, 4, 5],
}


@given(st.lists(st.integers(1, 50)), st.integers(1, 5))
def test_every_row_is_dealt_to_one_process(sizes: list[int], count: int) -> None:
    rows = [Row(str(at), list(range(size)), [1.0] * size) for at, size in enumerate(sizes)]
    shares = [balanced_share(rows, Processes(index, count)) for index in range(count)]
    assert sorted(int(row.task_id) for share in shares for row in share) == list(range(len(rows)))
