"""Rewards: what a trajectory is worth, from 0 to 1, or None when nobody can judge.

`open_reward` opens what a recipe asks for, by an expression over the names below and one's own
(`module:attribute`); `docs/rewards.md` has the rules. The plain functions need no opening.
"""

from __future__ import annotations

from coa.rewards.answers import (
    Checker,
    Part,
    Scored,
    exact,
    exact_match,
    f1,
    normalise,
)
from coa.rewards.chains import FormatSettings, check_format
from coa.rewards.judge import JudgeSettings
from coa.rewards.mathematics import MathSettings
from coa.rewards.programs import ProgramSettings
from coa.rewards.reward import (
    REWARDS,
    Own,
    Reward,
    RewardSettings,
    auto,
    choose_reward,
    lacking,
    mean_parts,
    open_reward,
    parse_expression,
    reward_for,
    together,
)

__all__ = [
    "REWARDS",
    "Checker",
    "FormatSettings",
    "JudgeSettings",
    "MathSettings",
    "Own",
    "Part",
    "ProgramSettings",
    "Reward",
    "RewardSettings",
    "Scored",
    "auto",
    "check_format",
    "choose_reward",
    "exact",
    "exact_match",
    "f1",
    "lacking",
    "mean_parts",
    "normalise",
    "open_reward",
    "parse_expression",
    "reward_for",
    "together",
]
