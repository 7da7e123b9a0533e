"""From rewards to advantages: one number for each trajectory, compared within its group.

Groups are given by key (the task), never by position: a trajectory that is missing, late or in
another order cannot be compared with a stranger's. A reward of None (a judge that could not judge)
takes no part in any mean and gets None, which means: leave this trajectory out of the update. So
does a reward that has nobody to be compared with. A reward that is not a number is an error.

Rewards are few, so this is plain Python in double precision and needs no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from coa.errors import TrainingError
from coa.train.loss_settings import Baseline, Scale


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages in the order of the rewards, and what was found on the way."""

    values: list[float | None]
    """None: no gradient."""
    flat: frozenset[Hashable]
    """Groups whose rewards are all the same: they teach nothing where groups are compared."""
    lonely: frozenset[Hashable]
    """Groups in which fewer than two rewards were given."""
    unjudged: int
    """Rewards that were None."""


def group_advantages(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    baseline: Baseline = "group",
    scale: Scale = "group",
    epsilon: float = 1e-6,
) -> Advantages:
    """reward - baseline, over the standard deviation (of a sample, n - 1) + epsilon.

    With the baselines `group` and `leave_one_out`, or the scale `group`, a lonely reward gets None.
    """
    assert len(rewards) == len(groups), (len(rewards), len(groups))
    assert baseline != "value", "advantages over a value head are gae()"
    _check_rewards(rewards, groups)
    members: dict[Hashable, list[float]] = {key: [] for key in groups}
    for reward, key in zip(rewards, groups, strict=True):
        if reward is not None:
            members[key].append(float(reward))
    judged = [reward for found in members.values() for reward in found]
    lonely = frozenset(key for key, found in members.items() if len(found) < 2)
    compared = baseline in ("group", "leave_one_out") or scale == "group"
    deviations = {key: _deviation(found) for key, found in members.items()}
    batch_deviation = _deviation(judged)

    def advantage(reward: float | None, key: Hashable) -> float | None:
        if reward is None or (compared and key in lonely) or (scale == "batch" and len(judged) < 2):
            return None
        found = members[key]
        if baseline == "group":
            centred = _minus(reward, found)
        elif baseline == "leave_one_out":
            centred = _minus(reward, found) * len(found) / (len(found) - 1)
        else:
            centred = _minus(reward, judged) if baseline == "batch" else reward
        if scale == "none" or centred == 0.0:
            return centred
        return centred / ((deviations[key] if scale == "group" else batch_deviation) + epsilon)

    return Advantages(
        values=[advantage(reward, key) for reward, key in zip(rewards, groups, strict=True)],
        flat=frozenset(key for key, found in members.items() if found and _is_flat(found)),
        lonely=lonely,
        unjudged=len(rewards) - len(judged),
    )


def overlong_penalty(length: int, limit: int, buffer: float, penalty: float = 1.0) -> float:
    """What is added to the reward of an answer that comes near to its limit: 0 or negative.

    0 up to (1 - buffer) of the limit, then linear, -penalty at the limit and beyond (DAPO,
    equation 13). `buffer` is a share: DAPO's own is 0.2, that of the paper's code agent 0.125.
    """
    assert limit > 0 and 0 <= buffer < 1, (limit, buffer)
    room = limit * buffer
    if room == 0:
        return 0.0
    return -penalty * min(1.0, max(0.0, (length - (limit - room)) / room))


def _check_rewards(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> None:
    for at, (reward, key) in enumerate(zip(rewards, groups, strict=True)):
        if reward is not None and not math.isfinite(reward):
            raise TrainingError(
                f"Reward {at} (group {key!r}) is {reward}; expected a finite number, or None where "
                "it cannot be judged."
            )
    if all(reward is None for reward in rewards):
        raise TrainingError(
            f"None of {len(rewards)} rewards could be judged; there is nothing to learn from. "
            "Look at the reward, or at its judge."
        )


def _is_flat(found: Sequence[float]) -> bool:
    return max(found) == min(found)


def _minus(reward: float, found: Sequence[float]) -> float:
    """Reward - mean, exactly 0 where all are the same: dividing by epsilon would show rounding."""
    return 0.0 if _is_flat(found) else reward - statistics.fmean(found)


def _deviation(found: Sequence[float]) -> float:
    return statistics.stdev(found) if len(found) > 1 else 0.0
