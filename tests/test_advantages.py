"""From rewards to advantages, and the settings that choose how."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.errors import ConfigError, TrainingError
from coa.io.settings import load_recipe, to_json
from coa.train.experience import group_advantages, overlong_penalty
from coa.train.settings import PRESETS, RlLossSettings, preset


def test_grpo_by_hand_with_groups_in_any_order() -> None:
    rewards = [1.0, 0.0, 0.0, 3.0, 1.0]
    found = group_advantages(rewards, ["a", "b", "a", "b", "a"], epsilon=0.0)
    a, b = math.sqrt(1 / 3), math.sqrt(4.5)  # deviations of (1, 0, 1) and (0, 3)
    expected = [(1 / 3) / a, -1.5 / b, (-2 / 3) / a, 1.5 / b, (1 / 3) / a]
    assert found == pytest.approx(expected)


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    found = group_advantages([1.0, 0.0, 0.5], [7, 7, 7], "leave_one_out", "none")
    assert found == pytest.approx([1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5])


def test_the_batch_can_be_baseline_and_scale() -> None:
    rewards = [1.0, 0.0, 0.5, 0.1]
    spread = statistics.stdev(rewards)
    whitened = group_advantages(rewards, "abcd", "batch", "batch", 0.0)
    assert whitened == pytest.approx([(r - 0.4) / spread for r in rewards])
    mixed = group_advantages(rewards, "aabb", "group", "batch", 0.0)
    expected = [0.5 / spread, -0.5 / spread, 0.2 / spread, -0.2 / spread]
    assert mixed == pytest.approx(expected)
    assert group_advantages(rewards, "abcd", "none", "none") == rewards


def test_a_reward_that_could_not_be_judged_takes_no_part() -> None:
    found = group_advantages([1.0, None, 0.0, None, 1.0], "aaabb", "group", "none")
    assert found[:4] == [0.5, None, -0.5, None]
    assert found[4] is None  # nobody left to compare with


def test_an_alone_reward_is_used_where_groups_are_not_compared() -> None:
    found = group_advantages([1.0, 0.0, 0.0], "abb", "batch", "none")
    assert found == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert group_advantages([1.0], ["a"], "batch", "batch") == [None]


@pytest.mark.parametrize("reward", [0.1, 1.0, 1 / 3])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_equal_rewards_teaches_exactly_nothing(reward: float, scale: Any) -> None:
    """0.1 + 0.1 + 0.1 is not 0.3; over an epsilon of 1e-6 that would be a gradient."""
    found = group_advantages([reward] * 3 + [0.0, 1.0], "aaabb", "group", scale)
    assert found[:3] == [0.0, 0.0, 0.0]


rewards_of = st.lists(
    st.tuples(st.sampled_from("abc"), st.none() | st.floats(-5, 5, allow_subnormal=False)),
    min_size=1,
).filter(lambda rows: any(reward is not None for _, reward in rows))


@given(
    rewards_of,
    st.sampled_from(["group", "leave_one_out", "batch", "none"]),
    st.sampled_from(["group", "batch", "none"]),
    st.randoms(),
)
def test_the_order_of_trajectories_means_nothing(
    rows: list[tuple[str, float | None]], baseline: Any, scale: Any, order: random.Random
) -> None:
    places = list(range(len(rows)))
    order.shuffle(places)
    groups, rewards = [key for key, _ in rows], [reward for _, reward in rows]
    found = group_advantages(rewards, groups, baseline, scale)
    mixed = group_advantages(
        [rewards[at] for at in places], [groups[at] for at in places], baseline, scale
    )
    assert mixed == pytest.approx([found[at] for at in places])
    if baseline in ("group", "leave_one_out"):
        for key in set(groups):
            own = [v for v, k in zip(found, groups, strict=True) if k == key and v is not None]
            size = max(map(abs, own), default=0.0)
            assert math.fsum(own) == pytest.approx(0.0, abs=1e-6 * max(1.0, size))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_named(bad: float) -> None:
    with pytest.raises(TrainingError, match=r"Reward 1 \(group 'b'\) is .*; expected a finite"):
        group_advantages([1.0, bad], ["a", "b"])


def test_a_batch_that_nobody_could_judge_is_an_error() -> None:
    with pytest.raises(TrainingError, match="None of 2 rewards could be judged"):
        group_advantages([None, None], ["a", "a"])


def test_the_overlong_penalty_grows_over_the_buffer_and_then_stays() -> None:
    lengths = [0, 700, 875, 900, 950, 1000, 5000]
    found = [overlong_penalty(length, 1000, 0.125) for length in lengths]
    assert found == pytest.approx([0.0, 0.0, 0.0, -0.2, -0.6, -1.0, -1.0])
    assert overlong_penalty(1000, 1000, 0.2, penalty=0.5) == -0.5
    assert overlong_penalty(16_384, 20_480, 0.2) == 0.0  # DAPO's own numbers
    assert overlong_penalty(18_432, 20_480, 0.2) == pytest.approx(-0.5)
    assert overlong_penalty(10**6, 1000, 0.0) == 0.0


def test_presets_are_the_published_recipes() -> None:
    assert set(PRESETS) == {"grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo", "ppo"}
    dapo = preset("dapo")
    assert (dapo.clip_low, dapo.clip_high, dapo.normalise, dapo.kl) == (0.2, 0.28, "token", 0.0)
    assert preset("dr_grpo").scale == "none" and preset("gspo").ratio == "sequence"
    assert preset("dapo", dual_clip=10.0).dual_clip == 10.0


def test_an_unknown_preset_is_named_with_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"Loss 'dappo' is not known\. Did you mean 'dapo'"):
        preset("dappo")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_a_table_of_a_recipe_that_a_recipe_can_change(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "loss.toml"
    path.write_text("kl = 0.5\n", encoding="utf-8")
    found = load_recipe(path, ["gamma=0.5"], RlLossSettings, to_json(preset(name)))
    assert found == preset(name, kl=0.5, gamma=0.5)
    assert asdict(found)["gamma"] == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_low": 0.0}, "clip_low: found 0.0, expected more than 0, at most 1"),
        ({"clip_low": 1.5}, "clip_low: found 1.5"),
        ({"clip_high": math.nan}, "clip_high: found nan, expected more than 0"),
        ({"dual_clip": 1.1}, r"dual_clip: found 1.1, expected above 1 \+ clip_high \(1.28\)"),
        ({"constant_length": 0}, "constant_length: found 0, expected at least 1"),
        ({"kl": -1.0}, "kl: found -1.0, expected 0 or more"),
        ({"gamma": 1.1}, "gamma: found 1.1, expected between 0 and 1"),
        ({"lam": -0.1}, "lam: found -0.1"),
        ({"correction_cap": 0.5}, "correction_cap: found 0.5, expected at least 1"),
        ({"correction_floor": 2.0}, "correction_floor: found 2.0"),
        ({"overlong_buffer": 1.0}, "overlong_buffer: found 1.0, expected at least 0, below 1"),
        ({"value_clip": 0.0}, "value_clip: found 0.0, expected more than 0"),
        ({"baseline": "value"}, "scale: found 'group' with baseline 'value'"),
        (
            {"kl": 0.1, "kl_estimator": "k1"},
            "'k1' in the loss, where its expected gradient is zero",
        ),
        ({"surrogate": "cispo", "dual_clip": 3.0}, "found 'cispo' with ratio 'token' and dual_c"),
    ],
)
def test_settings_that_mean_nothing_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RlLossSettings(**change)


def test_k1_is_fine_in_the_reward_and_when_reweighted() -> None:
    assert RlLossSettings(kl=0.1, kl_estimator="k1", kl_place="reward").kl == 0.1
    assert RlLossSettings(kl=0.1, kl_estimator="k1", kl_reweighted=True).kl == 0.1


def test_settings_need_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, coa.train.settings; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
