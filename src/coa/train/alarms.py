"""Alarms: has the run collapsed? One metrics record in, an alarm out, or nothing.

Every sign is a mean over a window of updates, since single updates are noise: a handful of tasks
decides their reward. What a sign is compared with is the run itself, because a weak start is not a
collapse: a reward must have been better, and a rate of malformed or cut rollouts must have been at
half its limit, before either can alarm. The change must be `SURE` times what chance moves such a
mean, measured by how much neighbouring updates differ, which a slow rise or fall leaves alone. And
it must hold for half a window, so that a dip is forgiven. A sudden collapse is found after about
one window. False alarms in simulated runs of 200 updates without learning (tests/test_alarms.py):
0 in 12,000 of 2 to 32 tasks an update at any pass rate; 1% where the ability itself strays by 0.35
logits; about 40% where it strays by 0.7, so that the reward does halve now and then.

Nothing is stored: `Alarms` is a function of the records it has seen, so a resumed run shows it the
lines of its metrics.jsonl again and is where it was.

The record of update u tells of rollouts by the weights of update u - 1, and of the step that made
those of u. So the last good weights are not those at the end of the best window but those that
played its last update: one before. A step that ruins them shows one record later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coa.train.rl_settings import AlarmSettings

Record = Mapping[str, Any]
Found = tuple[str, str]
"""A sign, and what was found; empty when it does not hold."""

SURE = 6.0
"""Standard errors between two windows from which on their difference is no accident."""
LOUD = 0.5
"""Nats a token: entropy below this is never too much, however small it was at first."""
SOLVED = 0.95
"""Share of the groups with full marks from which on flat groups mean success."""
FAILED = 0.5
"""Share of rollouts ended by the environment from which on it is to blame."""
_ROLLED = ("reward", "malformed_rate", "truncated_rate")
_TRAINED = ("entropy", "sampler_gap", "ess")
"""Figures of rollouts, and of the training step; an update without rows has none of the latter."""
_FINITE = (*_TRAINED, "loss", "grad_norm", "kl_old", "reward")
_RISING = ("reward", "ess")
_ADVICE = {
    "not_finite": "a lower rl.lr, a smaller rl.grad_clip, or rl.dtype float32",
    "reward": "a lower rl.lr, rl.loss.kl above 0, or fewer rl.passes",
    "malformed": "a reward with *format, rl.loss.kl above 0, or a lower rl.lr",
    "truncated": "rl.loss.overlong_buffer above 0, or a larger rollout.tokens",
    "gap": "the same temperature, weights and dtype for sampler and trainer; rl.dtype float32",
    "ess": "a higher rl.loss.correction_cap; if sampler_gap is large, find out why they differ",
    "entropy_rise": "a lower rl.lr, a lower rl.loss.clip_high, or no entropy bonus",
    "entropy_most": "a lower rl.lr, a lower rl.loss.clip_high, or no entropy bonus",
    "entropy_least": "a higher rl.loss.clip_high, rl.loss.entropy above 0, or a lower rl.lr",
    "barren": "easier tasks (select.least), a larger rl.group_size, or a better start",
    "environment": "the tools and what they need: the files of the rollouts say what failed",
    "solved": "harder tasks; on these the run is finished",
}
"""Sign -> what to try."""
_AT_ONCE = ("not_finite", "solved", "environment", "barren")


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why the run should stop."""

    line: str
    """For people: sign, since when, found, limit, the last good weights, what to try."""
    sign: str
    last_good: int
    """The update after which the weights were good; 0: those of the start."""


class Alarms:
    """Watches the records of one run, in their order; it can go back to every `every`-th update.

    `compares` says whether the loss compares the rollouts of a task. Where it does not, as with a
    value head, groups may be flat, and those of one rollout always are.
    """

    def __init__(self, settings: AlarmSettings, every: int = 1, compares: bool = True) -> None:
        self._settings, self._every, self._compares = settings, every, compares
        self._newest = 0
        self._curves = {
            key: _Curve(settings.window, rising=key in _RISING) for key in (*_ROLLED, *_TRAINED)
        }
        self._since: dict[str, list[int]] = {}
        """Sign -> the updates, in a row, at which it held."""
        self._barren: list[int] = []
        self._solved = self._failed = 0.0
        """Least share of solved groups, and of rollouts the environment ended, in those updates."""

    @property
    def last_good(self) -> int:
        """The update whose weights played the end of the best window, or the newest before it that
        has a checkpoint; 0: none is known yet."""
        return self._safe(max(0, self._curves["reward"].best_end - 1))

    @property
    def precious(self) -> frozenset[int]:
        """Checkpoints to keep: of the last good update, and the newest that may become it."""
        return frozenset({self.last_good, self._safe(self._newest)})

    def _safe(self, update: int) -> int:
        """The newest update up to this one that has a checkpoint for certain."""
        return update - update % self._every

    def replay(self, records: Iterable[Record]) -> Alarm | None:
        """See what an earlier part of the run has written; the alarm of its newest update."""
        alarm = None
        for record in records:
            alarm = self.look(record)
        return alarm

    def look(self, record: Record) -> Alarm | None:
        """See the next update; the first sign of collapse, if there is one."""
        if "rows" not in record:  # the line of an evaluation
            return None
        at = self._newest = int(record["update"])
        trained = record["rows"] != 0
        if text := _not_finite(record, _FINITE if trained else ("reward",)):
            return self._alarm(at, "not_finite", text)  # its other figures count for nothing
        for key in (*_ROLLED, *_TRAINED) if trained else _ROLLED:
            if math.isfinite(value := _number(record, key)):
                self._curves[key].add(at, value)
        self._count_barren(at, record)
        found = {
            "reward": self._reward_fell(),
            "malformed": self._rose("malformed_rate", "malformed_most", "malformed rollouts"),
            "truncated": self._rose("truncated_rate", "truncated_most", "rollouts cut by a budget"),
            "gap": self._above("sampler_gap", "gap_most", "gap between sampler and trainer"),
            "ess": self._below("ess", "ess_least", "share of tokens in effect after correction"),
            "entropy_rise": self._entropy_rose(),
            "entropy_most": self._above("entropy", "entropy_most", "entropy"),
            "entropy_least": self._below("entropy", "entropy_least", "entropy"),
        }
        sign, text = self._nothing_to_learn()
        found[sign] = text
        for sign, text in found.items():
            self._since[sign] = [*self._since.get(sign, ()), at] if text else []
        patience = max(1, self._settings.window // 2)
        for sign, text in found.items():
            if text and (sign in _AT_ONCE or len(self._since[sign]) >= patience):
                return self._alarm(at, sign, text)
        return None

    def _alarm(self, at: int, sign: str, text: str) -> Alarm:
        since = "" if sign in _AT_ONCE else f", beyond it since update {self._since[sign][0]}"
        good = f"The weights of update {self.last_good} are the last good ones"
        if not self.last_good:
            good = "There is no good window before it: the start is all there is to go back to"
        line = f"Update {at}: {text}{since}. {good}. Try {_ADVICE[sign]}."
        return Alarm(line, sign, self.last_good)

    def _reward_fell(self) -> str:
        curve, share = self._curves["reward"], self._settings.reward_drop
        # Rewards with penalties may be negative; there a share of them would be better, not worse.
        limit = curve.best - (1 - share) * abs(curve.best)
        if not share or not curve.full or curve.mean >= limit or not curve.surely_worse:
            return ""
        return (
            f"the reward fell to {curve.mean:.3g} over updates {curve.span}, from {curve.best:.3g} "
            f"over {curve.best_span} (limit {limit:.3g}, alarms.reward_drop {share:g})"
        )

    def _rose(self, key: str, setting: str, what: str) -> str:
        """A rate that was at half its limit or less, and is beyond it now."""
        curve, limit = self._curves[key], float(getattr(self._settings, setting))
        if not limit or not curve.full or curve.best > limit / 2:
            return ""
        if curve.mean <= limit or not curve.surely_worse:
            return ""
        return (
            f"{curve.mean:.0%} {what} over updates {curve.span}, {curve.best:.0%} over "
            f"{curve.best_span} (limit {limit:.0%}, alarms.{setting})"
        )

    def _entropy_rose(self) -> str:
        curve, times = self._curves["entropy"], self._settings.entropy_rise
        limit = max(LOUD, times * curve.first)
        if not times or not curve.full or curve.mean <= limit or not curve.surely_worse:
            return ""
        return (
            f"the entropy rose to {curve.mean:.3g} over updates {curve.span}, from "
            f"{curve.first:.3g} in the first {self._settings.window} "
            f"(limit {limit:.3g}, alarms.entropy_rise {times:g})"
        )

    def _above(self, key: str, setting: str, what: str) -> str:
        """A figure that is wrong beyond its limit, whatever it was before."""
        curve, limit = self._curves[key], float(getattr(self._settings, setting))
        return self._outside(curve, what, setting, limit) if curve.mean > limit > 0 else ""

    def _below(self, key: str, setting: str, what: str) -> str:
        curve, limit = self._curves[key], float(getattr(self._settings, setting))
        return self._outside(curve, what, setting, limit) if curve.mean < limit else ""

    def _outside(self, curve: _Curve, what: str, setting: str, limit: float) -> str:
        if not curve.full:
            return ""
        found = f"the {what} is {curve.mean:.3g} over updates {curve.span}"
        return f"{found} (limit {limit:.3g}, alarms.{setting})"

    def _count_barren(self, at: int, record: Record) -> None:
        groups, flat = _number(record, "groups"), _number(record, "groups_flat")
        solved = _number(record, "groups_solved") / groups if groups else 0.0
        nothing = flat >= groups if self._compares else solved >= SOLVED
        if record["rows"] != 0 and not nothing:
            self._barren.clear()
            return
        failed = _number(record, "environment_rate")
        self._solved = min(self._solved, solved) if self._barren else solved
        self._failed = min(self._failed, failed) if self._barren else failed
        self._barren.append(at)

    def _nothing_to_learn(self) -> Found:
        limit = self._settings.barren
        if not limit or len(self._barren) < limit:
            return "barren", ""
        span = f"since update {self._barren[0]} (limit {limit} in a row, alarms.barren)"
        none = f"there is no group to learn from {span}"
        if self._solved >= SOLVED:
            text = f"every rollout of every task has full marks {span}: nothing is left to learn"
            return "solved", text
        if self._failed >= FAILED:
            text = f"{none}: the environment ended {self._failed:.0%} of the rollouts, or more"
            return "environment", text
        return "barren", f"{none}: all rollouts of a task earn the same, or take no part"


class _Curve:
    """A figure over updates: its window now, its best window, and how much chance moves it."""

    def __init__(self, window: int, rising: bool) -> None:
        self._sign = 1.0 if rising else -1.0
        self._window: deque[tuple[int, float]] = deque(maxlen=window)
        self._squares, self._steps = 0.0, 0
        self.first = self.best = self.mean = math.nan
        self.best_end, self.best_span = 0, ""

    @property
    def full(self) -> bool:
        return len(self._window) == self._window.maxlen

    @property
    def span(self) -> str:
        return f"{self._window[0][0]} to {self._window[-1][0]}"

    @property
    def surely_worse(self) -> bool:
        """Whether the present window is worse than the best by more than chance explains."""
        # Neighbours differ by twice the variance of one; a difference of two means over n has 2/n.
        variance = self._squares / max(1, self._steps) / 2
        error = math.sqrt(2 * variance / len(self._window))
        return self._sign * (self.best - self.mean) > SURE * error

    def add(self, at: int, value: float) -> None:
        if self._window:
            step = value - self._window[-1][1]
            self._squares += step * step
            self._steps += 1
        self._window.append((at, value))
        self.mean = sum(value for _, value in self._window) / len(self._window)
        if not self.full:
            return
        if math.isnan(self.first):
            self.first = self.mean
        if not self.best_end or self._sign * (self.mean - self.best) >= 0:
            self.best, self.best_end, self.best_span = self.mean, at, self.span


def _number(record: Record, key: str) -> float:
    """A figure of a record; NaN when it is missing or no number, so that no comparison holds."""
    value = record.get(key)
    return float(value) if isinstance(value, int | float) else math.nan


def _not_finite(record: Record, known: Iterable[str]) -> str:
    for key in known:
        value = record.get(key)
        if isinstance(value, float) and not math.isfinite(value):
            return f"{key} is {value}, expected a finite number"
    return ""
