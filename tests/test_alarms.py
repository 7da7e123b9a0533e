"""Alarms: every sign of collapse is found, with its reason; noise and weak starts are let be."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.errors import ConfigError
from coa.train.monitors import Alarm, Alarms
from coa.train.settings import AlarmSettings

HEALTHY: dict[str, Any] = {
    "reward": 0.5,
    "malformed_rate": 0.05,
    "truncated_rate": 0.1,
    "entropy": 0.3,
    "sampler_gap": 0.01,
    "ess": 0.98,
    "loss": 0.01,
    "grad_norm": 0.4,
    "kl_old": 0.001,
    "groups": 8,
    "groups_flat": 3,
    "groups_solved": 1,
    "rows": 40,
}
OFF = AlarmSettings(
    reward_drop=0,
    malformed_most=0,
    truncated_most=0,
    gap_most=0,
    ess_least=0,
    entropy_rise=0,
    barren=0,
)


def records(*parts: tuple[int, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """So many updates of each kind; neighbours differ a little, as they do."""
    update = 0
    for count, changes in parts:
        for _ in range(count):
            update += 1
            record = {"update": update, **HEALTHY, **changes}
            wiggle = 1 + 0.1 * (-1) ** update
            yield record | {key: record[key] * wiggle for key in ("reward", "entropy")}


def first_alarm(settings: AlarmSettings, *parts: tuple[int, dict[str, Any]]) -> Alarm | None:
    alarms = Alarms(settings)
    return next(filter(None, map(alarms.look, records(*parts))), None)


def test_a_healthy_run_is_let_be() -> None:
    assert first_alarm(AlarmSettings(), (200, {})) is None


def test_a_fallen_reward_is_told_with_everything_one_needs() -> None:
    alarm = first_alarm(AlarmSettings(), (20, {}), (20, {"reward": 0.05}))
    assert alarm is not None and alarm.sign == "reward"
    assert alarm.line == (
        "Update 29: the reward fell to 0.05 over updates 22 to 29, from 0.5 over 13 to 20 "
        "(limit 0.25, alarms.reward_drop 0.5), beyond it since update 26. The weights of update "
        "19 are the last good ones. Try a lower rl.lr, rl.loss.kl above 0, or fewer rl.passes."
    )


def test_the_last_good_weights_are_those_that_played_the_best_window() -> None:
    """Record 20 tells of rollouts by the weights of update 19; what step 20 made shows in 21."""
    alarms = Alarms(AlarmSettings())
    assert alarms.last_good == 0
    for record in records((20, {}), (20, {"reward": 0.0})):
        alarms.look(record)
    assert alarms.last_good == 19


def test_only_updates_with_a_checkpoint_can_be_gone_back_to() -> None:
    alarms = Alarms(AlarmSettings(), every=5)
    found = [alarms.look(record) for record in records((20, {}), (20, {"reward": 0.0}))]
    assert alarms.last_good == 15
    first = next(filter(None, found))
    assert first.last_good == 15 and "The weights of update 15 are the last good" in first.line


SIGNS: list[tuple[str, dict[str, Any], str]] = [
    ("malformed", {"malformed_rate": 0.9}, "malformed rollouts over updates"),
    ("truncated", {"truncated_rate": 1.0}, "rollouts cut by a budget over updates"),
    ("gap", {"sampler_gap": 2.0}, "the gap between sampler and trainer is"),
    ("ess", {"ess": 0.0}, "the share of tokens in effect after correction is"),
    ("entropy_rise", {"entropy": 4.0}, "the entropy rose to"),
]


@pytest.mark.parametrize(("sign", "bad", "words"), SIGNS)
def test_every_sign_is_found_within_two_windows(sign: str, bad: dict[str, Any], words: str) -> None:
    alarm = first_alarm(AlarmSettings(), (20, {}), (16, bad))
    assert alarm is not None and alarm.sign == sign
    assert words in alarm.line and "limit" in alarm.line and "Try " in alarm.line
    assert "beyond it since update 2" in alarm.line
    assert alarm.last_good >= 19


@pytest.mark.parametrize(("sign", "bad", "words"), SIGNS)
def test_a_dip_of_three_updates_is_forgiven(sign: str, bad: dict[str, Any], words: str) -> None:
    mild = {"sampler_gap": 1.0} if sign == "gap" else bad
    assert first_alarm(AlarmSettings(), (20, {}), (3, mild), (40, {})) is None


@pytest.mark.parametrize(
    ("settings", "sign", "bad"),
    [
        (AlarmSettings(entropy_least=0.05), "entropy_least", {"entropy": 0.001}),
        (AlarmSettings(entropy_most=2.0, entropy_rise=0), "entropy_most", {"entropy": 3.0}),
    ],
)
def test_limits_of_entropy_can_be_set(
    settings: AlarmSettings, sign: str, bad: dict[str, Any]
) -> None:
    alarm = first_alarm(settings, (20, {}), (16, bad))
    assert alarm is not None and alarm.sign == sign and f"alarms.{sign}" in alarm.line
    assert first_alarm(AlarmSettings(entropy_rise=0), (20, {}), (16, bad)) is None


@pytest.mark.parametrize("key", ["loss", "grad_norm", "reward", "entropy", "sampler_gap", "ess"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_alarms_at_once(key: str, value: float) -> None:
    alarm = first_alarm(AlarmSettings(), (12, {}), (1, {key: value}))
    assert alarm is not None and alarm.sign == "not_finite" and alarm.last_good == 11
    assert alarm.line.startswith(f"Update 13: {key} is {value}, expected a finite number. The wei")


def test_before_the_first_window_there_is_only_the_start_to_go_back_to() -> None:
    alarm = first_alarm(AlarmSettings(), (3, {}), (1, {"loss": math.nan}))
    assert alarm is not None and alarm.last_good == 0
    assert "the start is all there is to go back to" in alarm.line


def test_updates_without_a_group_to_learn_from_are_counted_in_a_row() -> None:
    flat = {"groups_flat": 8, "reward": 0.5}
    assert first_alarm(AlarmSettings(), (10, {}), (4, flat), (1, {}), (4, flat), (9, {})) is None
    alarm = first_alarm(AlarmSettings(), (10, {}), (5, flat))
    assert alarm is not None and alarm.sign == "barren"
    assert "there is no group to learn from since update 11 (limit 5 in a row" in alarm.line


def test_flat_groups_are_no_sign_where_nothing_is_compared() -> None:
    """With a value head a task may have one rollout, and such a group is always flat."""
    flat = list(records((20, {"groups_flat": 8, "groups_solved": 4})))
    solved = list(records((20, {"groups_flat": 8, "groups_solved": 8})))
    empty = list(records((20, {"groups_flat": 8, "rows": 0})))

    def sign(found: list[dict[str, Any]], compares: bool) -> str:
        alarms = Alarms(AlarmSettings(), compares=compares)
        return next((alarm.sign for alarm in map(alarms.look, found) if alarm), "")

    assert [sign(found, False) for found in (flat, solved, empty)] == ["", "solved", "barren"]
    assert [sign(found, True) for found in (flat, solved, empty)] == ["barren", "solved", "barren"]


def test_a_checkpoint_that_may_become_the_last_good_one_is_kept() -> None:
    """Evaluations write checkpoints between, and only the newest two are kept anyway."""
    alarms = Alarms(AlarmSettings(), every=10)
    for record in records((8, {}), (16, {"reward": 0.3}), (8, {"reward": 0.9})):
        kept = alarms.precious
        alarms.look(record)
        assert alarms.last_good in kept
    assert alarms.last_good == 30
    assert alarms.precious == {30}


def test_an_update_without_rows_is_barren_and_its_training_figures_say_nothing() -> None:
    none = {"rows": 0, "ess": 0.0, "loss": math.nan, "entropy": 99.0, "grad_norm": math.nan}
    alarms = Alarms(AlarmSettings())
    found = [alarms.look(record) for record in records((20, {}), (4, none), (30, {}))]
    assert found == [None] * 54
    alarm = first_alarm(AlarmSettings(), (20, {}), (5, none))
    assert alarm is not None and alarm.sign == "barren"


def test_lines_of_evaluations_are_passed_over() -> None:
    alarms = Alarms(AlarmSettings())
    found = []
    for record in records((20, {}), (5, {"groups_flat": 8})):
        found.append(alarms.look(record))
        assert alarms.look({"update": record["update"], "eval_accuracy": math.nan}) is None
    assert found[-1] is not None and found[-1].sign == "barren"


def test_when_everything_is_solved_the_alarm_says_so() -> None:
    solved = {"groups_flat": 8, "groups_solved": 8, "reward": 1.0, "rows": 0}
    alarm = first_alarm(AlarmSettings(), (20, {}), (5, solved))
    assert (
        alarm is not None and alarm.sign == "solved" and "full marks since update 21" in alarm.line
    )
    mixed = solved | {"groups_solved": 6}
    alarm = first_alarm(AlarmSettings(), (20, {}), (2, solved), (3, mixed))
    assert alarm is not None and alarm.sign == "barren"


def test_when_the_environment_fails_the_alarm_blames_it() -> None:
    down = {"groups_flat": 8, "rows": 0, "reward": None, "environment_rate": 0.9}
    alarms = Alarms(AlarmSettings())
    found = list(filter(None, map(alarms.look, _without_wiggle(20, 5, down))))
    assert [alarm.sign for alarm in found] == ["environment"]
    assert "the environment ended 90% of the rollouts, or more" in found[0].line
    assert found[0].last_good == 19, "the weights are as good as before"


def _without_wiggle(good: int, bad: int, changes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for update in range(1, good + bad + 1):
        yield {"update": update, **HEALTHY, **(changes if update > good else {})}


def test_a_weak_start_is_no_collapse() -> None:
    weak = {"malformed_rate": 0.97, "truncated_rate": 0.95, "reward": 0.01}
    assert first_alarm(AlarmSettings(), (50, weak), (50, {})) is None


def test_a_reward_below_zero_has_a_limit_further_down() -> None:
    assert first_alarm(AlarmSettings(), (30, {"reward": -0.2})) is None
    alarm = first_alarm(AlarmSettings(), (30, {"reward": -0.2}), (20, {"reward": -0.9}))
    assert alarm is not None and alarm.sign == "reward" and "limit -0.3," in alarm.line


def test_signs_can_be_turned_off() -> None:
    ruin: dict[str, Any] = {"groups_flat": 8}
    for _, bad, _ in SIGNS:
        ruin |= bad
    assert first_alarm(OFF, (20, {}), (40, ruin | {"reward": 0.0})) is None
    assert first_alarm(AlarmSettings(), (20, {}), (40, ruin | {"reward": 0.0})) is not None


def test_a_resumed_run_replays_its_metrics_and_is_where_it_was() -> None:
    lines = [json.dumps(record) for record in records((20, {}), (20, {"reward": 0.05}))]
    whole = Alarms(AlarmSettings())
    alarms = [whole.look(json.loads(line)) for line in lines]
    for done in range(len(lines) + 1):
        resumed = Alarms(AlarmSettings())
        assert [resumed.look(json.loads(line)) for line in lines[:done]] == alarms[:done]
        assert [resumed.look(json.loads(line)) for line in lines[done:]] == alarms[done:]
        assert resumed.last_good == whole.last_good


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(sorted(HEALTHY)),
            st.none() | st.floats() | st.integers(-9, 99) | st.text(max_size=2),
        ),
        max_size=40,
    )
)
def test_whatever_a_record_holds_there_is_an_alarm_of_one_line_or_none(
    found: list[dict[str, Any]],
) -> None:
    alarms = Alarms(AlarmSettings(window=3, entropy_least=0.1, entropy_most=2))
    seen = [0]
    for update, record in enumerate(found, start=1):
        alarm = alarms.look({"update": update, "rows": 9, **record})
        assert alarm is None or (alarm.line and "\n" not in alarm.line)
        assert alarms.last_good < update
        seen.append(alarms.last_good)
    assert all(later >= earlier for earlier, later in pairwise(seen))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 1}, "alarms.window: found 1, expected at least 2"),
        ({"reward_drop": 1.5}, "alarms.reward_drop: found 1.5, expected between 0 and 1"),
        ({"ess_least": -0.1}, "alarms.ess_least: found -0.1, expected between 0 and 1"),
        ({"gap_most": -1.0}, "alarms.gap_most: found -1.0, expected 0 or more"),
        ({"entropy_rise": math.nan}, "alarms.entropy_rise: found nan, expected 0 or more"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AlarmSettings(**changes)


def simulated(
    seed: int, *, updates: int, tasks: int, group: int, ability: float, wander: float = 0.0
) -> Iterator[dict[str, Any]]:
    """A run by chance alone: tasks of all kinds of difficulty, a few at a time, and no learning.

    `ability` is the logit of a middling task; `wander` how far it strays, as a standard deviation.
    """
    dice = np.random.default_rng(seed)
    steps = dice.normal(0, wander * math.sqrt(1 - 0.9**2), updates)
    drift = np.zeros(updates)
    for at in range(1, updates):
        drift[at] = 0.9 * drift[at - 1] + steps[at]
    logits = dice.normal(ability, 2.0, (updates, tasks)) + drift[:, None]
    right = dice.binomial(group, 1 / (1 + np.exp(-logits)))
    cut = dice.binomial(group, 1 / (1 + np.exp(-dice.normal(-1.2, 1.0, (2, updates, tasks)))))
    entropy = 0.3 * np.exp(np.cumsum(dice.normal(-0.002, 0.02, updates)))
    entropy *= np.exp(dice.normal(0, 0.2, updates))
    for at in range(updates):
        yield {
            "update": at + 1,
            "reward": float(right[at].mean() / group),
            "malformed_rate": float(cut[0, at].mean() / group),
            "truncated_rate": float(cut[1, at].mean() / group),
            "entropy": float(entropy[at]),
            "sampler_gap": float(abs(dice.normal(0.02, 0.01))),
            "ess": 0.97,
            "groups": 3 * tasks,  # with refills
            "groups_flat": 2 * tasks,
            "groups_solved": 0,
            "rows": 9,
        }


def false_alarms(seeds: int, **kind: Any) -> int:
    count = 0
    for seed in range(seeds):
        alarms = Alarms(AlarmSettings())
        count += any(alarms.look(record) for record in simulated(seed, **kind))
    return count


@pytest.mark.parametrize(
    ("tasks", "group", "ability"), [(2, 4, -4.0), (8, 8, -3.0), (8, 8, 0.0), (32, 8, 1.0)]
)
def test_noise_is_not_taken_for_collapse(tasks: int, group: int, ability: float) -> None:
    assert false_alarms(100, updates=150, tasks=tasks, group=group, ability=ability) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "group"), [(2, 4), (8, 8), (32, 8)])
@pytest.mark.parametrize("ability", [-4.0, -2.0, 0.0, 2.0])
def test_noise_is_not_taken_for_collapse_in_thousands_of_runs(
    tasks: int, group: int, ability: float
) -> None:
    assert false_alarms(1000, updates=200, tasks=tasks, group=group, ability=ability) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("wander", "most"), [(0.2, 5), (0.35, 30)])
def test_an_ability_that_strays_a_little_is_seldom_taken_for_collapse(
    wander: float, most: int
) -> None:
    """In logits, returning within some ten updates."""
    kind = {"updates": 200, "tasks": 8, "group": 8, "wander": wander}
    assert false_alarms(1000, ability=-1.0, **kind) <= most


def test_the_same_noise_does_not_hide_a_collapse() -> None:
    """From a middling run to nothing at update 60: found in every run, within two windows."""
    for seed in range(50):
        alarms = Alarms(AlarmSettings())
        late = 0
        for record in simulated(seed, updates=90, tasks=8, group=8, ability=0.0):
            if record["update"] > 60:
                record |= {"reward": 0.0}
            if alarm := alarms.look(record):
                assert alarm.sign == "reward" and alarm.last_good < 60
                late = record["update"]
                break
        assert 60 < late <= 76, (seed, late)
