"""Packs: every row once, no pack too full, and the same loss and gradient as without them."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.errors import ConfigError
from coa.train.rows import Row, total_tokens
from coa.train.settings import Layout, SftSettings
from coa.train.sft import POOL, Order, packs
from sft_worker import tiny_rows
from tiny_model import make_tiny_model

torch = pytest.importorskip("torch")

from coa.train.policy import Policy  # noqa: E402
from coa.train.sft import sft_loss  # noqa: E402


def rows_of(lengths: list[int]) -> list[Row]:
    return [Row(f"t{i}", [7] * n, [1.0] * n) for i, n in enumerate(lengths)]


@given(st.lists(st.integers(1, 64), max_size=200), st.integers(64, 200), st.integers(0, 3))
def test_every_row_is_in_one_pack_and_none_is_too_full(
    lengths: list[int], limit: int, epoch: int
) -> None:
    rows = rows_of(lengths)
    made = packs(rows, limit, 0, epoch)
    assert sorted(r.task_id for pack in made for r in pack) == sorted(r.task_id for r in rows)
    assert all(0 < total_tokens(pack) <= limit for pack in made)
    assert made == packs(rows, limit, 0, epoch)
    # A pack is begun only for what fits nowhere, so no two could be one.
    loads = sorted(total_tokens(pack) for pack in made)
    assert len(loads) < 2 or loads[0] + loads[1] > limit


def test_packs_are_almost_full_and_differ_by_epoch_and_seed() -> None:
    rows = rows_of([(37 * i) % 700 + 100 for i in range(2 * POOL)])
    made = packs(rows, 2048, 0, 0)
    assert total_tokens(rows) / (len(made) * 2048) > 0.98
    assert made != packs(rows, 2048, 0, 1)
    assert made != packs(rows, 2048, 1, 0)


def test_a_row_goes_where_it_fits_best() -> None:
    made = packs(rows_of([6, 8, 2, 4]), 10, 0, 0)
    assert sorted(sorted(len(row.ids) for row in pack) for pack in made) == [[2, 8], [4, 6]]


def test_an_order_counts_the_updates_of_every_epoch() -> None:
    rows = rows_of([(37 * i) % 60 + 5 for i in range(70)])
    for layout in ("bucket", "pack"):
        settings = SftSettings(
            epochs=3, batch_size=4, max_length=64, pack_tokens=128, layout=layout
        )
        order, seen = Order(rows, settings), {0: [], 1: [], 2: []}
        for update in [*range(order.updates)][::-1]:  # any order of asking: a run may resume
            batch = order.batch(update)
            assert 0 < len(batch) <= 4
            seen[order.epoch_of(update)] += [row.task_id for unit in batch for row in unit]
        assert all(sorted(found) == sorted(r.task_id for r in rows) for found in seen.values())
        assert 0.8 < order.fill() <= 1
        assert order.batch(0) == Order(rows, settings).batch(0)


@pytest.mark.parametrize("layout", ["bucket", "pack"])
@pytest.mark.parametrize("epochs", [2.5, 0.1, 1.004])
def test_the_last_epoch_may_be_a_part_drawn_anew(layout: Layout, epochs: float) -> None:
    rows = rows_of([(37 * i) % 60 + 5 for i in range(70)])
    made = SftSettings(epochs=epochs, batch_size=4, max_length=64, pack_tokens=128, layout=layout)

    def drawn(settings: SftSettings) -> dict[int, list[str]]:
        order, seen = Order(rows, settings), defaultdict[int, list[str]](list)
        for update in [*range(order.updates)][::-1]:
            names = [row.task_id for unit in order.batch(update) for row in unit]
            seen[order.epoch_of(update)] += names
        assert order.fill() <= 1
        return seen

    found = drawn(made)
    *whole, last = (found[epoch] for epoch in sorted(found))
    assert len(whole) == math.ceil(epochs) - 1
    assert all(sorted(names) == sorted(row.task_id for row in rows) for names in whole)
    assert len(set(last)) == len(last) == max(1, round(epochs % 1 * 70))
    assert drawn(made) == found, "whoever resumes draws the same"
    assert epochs == 1.004 or set(drawn(replace(made, seed=1))[len(whole)]) != set(last)


def test_whole_epochs_are_laid_out_as_ever_whatever_part_follows() -> None:
    rows = rows_of([(37 * i) % 60 + 5 for i in range(70)])
    whole, more = (Order(rows, SftSettings(epochs=epochs)) for epochs in (2, 2.5))
    assert all(whole.batch(at) == more.batch(at) for at in range(whole.updates))


@pytest.mark.parametrize("epochs", [0, -1, math.nan, math.inf])
def test_a_number_of_epochs_that_is_none_is_refused(epochs: float) -> None:
    with pytest.raises(
        ConfigError, match=r"sft\.epochs: found .*, expected more than 0 and finite"
    ):
        SftSettings(epochs=epochs)


def test_a_pack_too_small_for_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sft\.pack_tokens: found 100, .* max_length 2048"):
        SftSettings(pack_tokens=100)


def gradient(policy: Policy, parts: list[list[Row]]) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradient of all rows, computed in these parts."""
    total = sum(sum(row.weights[1:]) for part in parts for row in part)
    loss = 0.0
    for part in parts:
        found = sft_loss(policy, part, total)
        found.backward()
        loss += float(found.detach())
    made = [p.grad.clone() for p in policy.parameters if p.grad is not None]
    policy.model.zero_grad()
    return loss, made


def joined(rows: list[Row]) -> Row:
    """What naive packing trains on: one sequence in which every row reads those before it."""
    ids = [i for row in rows for i in row.ids]
    # The first token of a row must not be learnt from the last one of the row before.
    weights = [w for row in rows for w in (0.0, *row.weights[1:])]
    return replace(rows[0], ids=ids, weights=weights)


def largest_gap(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("kind", "path"), [("llama", "fast"), ("qwen3", "fast"), ("llama", "plain"), ("qwen2", "plain")]
)
def test_packed_rows_have_the_loss_and_the_gradient_of_single_rows(
    kind: str, path: str, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / kind, kind=kind)
    # Checkpointing of activations is one of the things that take the transformers path.
    policy = Policy(
        f"hf:{model}", rank=4, max_length=256, checkpointing=path == "plain", note=lambda line: None
    )
    assert path == "fast" or policy._plain.packs
    with torch.no_grad():  # B starts at zero, which would hide half of the gradients
        torch.manual_seed(1)
        for parameter in policy.parameters:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    policy.refresh()
    rows = tiny_rows(6)
    made = packs(rows, 48, 0, 0)
    assert max(len(pack) for pack in made) >= 2
    loss, single = gradient(policy, [[row] for row in rows])
    packed_loss, packed = gradient(policy, made)
    assert packed_loss == pytest.approx(loss, abs=1e-5)
    assert largest_gap(packed, single) < 1e-5
    naive_loss, naive = gradient(policy, [[joined(pack)] for pack in made])
    assert not math.isclose(naive_loss, loss, abs_tol=1e-3)
    assert largest_gap(naive, single) > 1e-3
