"""What looks on while a run trains: the live view, a tracker, and the alarms that end it."""

from __future__ import annotations

import importlib
import json
import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coa.errors import MissingExtra, TrainingError, Unavailable, boundary
from coa.io.progress import Mode
from coa.io.runs import TIMINGS, Json, read_jsonl, write_atomic
from coa.train.groups import Group
from coa.train.live_view import LiveView
from coa.train.settings import AlarmSettings, RlRecipe
from coa.view.plots import as_number

Record = Mapping[str, Any]

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
"""Record of rollouts, and of the training step; an update without rows has none of the latter."""
_FINITE = (*_TRAINED, "loss", "grad_norm", "kl_old", "reward")
_RISING = ("reward", "ess")
_ADVICE = {
    "not_finite": "a lower rl.lr, a smaller rl.grad_clip, or rl.dtype float32",
    "reward": "a lower rl.lr, rl.loss.kl above 0, or fewer rl.passes",
    "malformed": "a reward with *format, rl.loss.kl above 0, or a lower rl.lr",
    "truncated": "rl.loss.overlong_buffer above 0, or a larger rollout.tokens",
    "gap": "the same temperature, weights and dtype for sampler and trainer; rl.dtype float32; "
    "with rl.loss.old = sampler a lower rl.lr",
    "ess": "a higher rl.loss.correction_cap; if sampler_gap is large, find out why they differ",
    "entropy_rise": "a lower rl.lr, a lower rl.loss.clip_high, or no entropy bonus",
    "entropy_most": "a lower rl.lr, a lower rl.loss.clip_high, or no entropy bonus",
    "entropy_least": "a higher rl.loss.clip_high, rl.loss.entropy above 0, or a lower rl.lr",
    "barren": "easier tasks (select.least), a larger rl.group_size, or a better start",
    "environment": "the tools and what they need: the files of the rollouts say what failed",
    "solved": "harder tasks; on these the run is finished",
}
"""Sign -> what to try."""
_CUT = "rollouts cut by a budget"
_LIMITED = (
    ("gap", "sampler_gap", "gap_most", "gap between sampler and trainer"),
    ("ess", "ess", "ess_least", "share of tokens in effect after correction"),
    ("entropy_most", "entropy", "entropy_most", "entropy"),
    ("entropy_least", "entropy", "entropy_least", "entropy"),
)
"""Sign, figure, setting of its limit, and the figure in words."""
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

    def look(self, record: Record) -> Alarm | None:
        """See the next update; the first sign of collapse, if there is one."""
        if "rows" not in record:  # the line of an evaluation
            return None
        at = self._newest = int(record["update"])
        trained = record["rows"] != 0
        if text := _not_finite(record, _FINITE if trained else ("reward",)):
            return self._alarm(at, "not_finite", text)  # its other figures count for nothing
        for key in (*_ROLLED, *_TRAINED) if trained else _ROLLED:
            if math.isfinite(value := as_number(record.get(key))):
                self._curves[key].add(at, value)
        self._count_barren(at, record)
        found = self._signs()
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

    def _signs(self) -> dict[str, str]:
        """Sign of collapse -> what was found, empty where it does not hold."""
        limits, curves = self._settings, self._curves
        found = dict.fromkeys(_ADVICE, "")

        def sign(name: str, curve: _Curve, setting: str, holds: bool, text: str) -> None:
            on = bool(getattr(limits, setting)) and curve.full
            found[name] = text if on and holds else ""

        reward, drop = curves["reward"], limits.reward_drop
        # Rewards with penalties may be negative; there a share of them would be better, not worse.
        least = reward.best - (1 - drop) * abs(reward.best)
        text = (
            f"the reward fell to {reward.mean:.3g} over updates {reward.span}, from "
            f"{reward.best:.3g} over {reward.best_span} (limit {least:.3g}, alarms.reward_drop "
            f"{drop:g})"
        )
        sign("reward", reward, "reward_drop", reward.mean < least and reward.surely_worse, text)
        for name, what in (("malformed", "malformed rollouts"), ("truncated", _CUT)):
            rate, most = curves[f"{name}_rate"], float(getattr(limits, f"{name}_most"))
            text = (
                f"{rate.mean:.0%} {what} over updates {rate.span}, {rate.best:.0%} over "
                f"{rate.best_span} (limit {most:.0%}, alarms.{name}_most)"
            )
            rose = rate.best <= most / 2 and rate.mean > most and rate.surely_worse
            sign(name, rate, f"{name}_most", rose, text)
        entropy, times = curves["entropy"], limits.entropy_rise
        most = max(LOUD, times * entropy.first)
        text = (
            f"the entropy rose to {entropy.mean:.3g} over updates {entropy.span}, from "
            f"{entropy.first:.3g} in the first {limits.window} "
            f"(limit {most:.3g}, alarms.entropy_rise {times:g})"
        )
        rose = entropy.mean > most and entropy.surely_worse
        sign("entropy_rise", entropy, "entropy_rise", rose, text)
        for name, key, setting, what in _LIMITED:  # wrong beyond a limit, whatever it was before
            curve, limit = curves[key], float(getattr(limits, setting))
            beyond = curve.mean > limit if setting.endswith("most") else curve.mean < limit
            text = f"the {what} is {curve.mean:.3g} over updates {curve.span} (limit {limit:.3g}, "
            sign(name, curve, setting, beyond, f"{text}alarms.{setting})")
        return found

    def _count_barren(self, at: int, record: Record) -> None:
        # A figure that is missing is NaN, so that no comparison with it holds.
        counts = ("groups", "groups_flat", "groups_solved", "environment_rate")
        groups, flat, full_marks, failed = (as_number(record.get(key)) for key in counts)
        solved = full_marks / groups if groups else 0.0
        nothing = flat >= groups if self._compares else solved >= SOLVED
        if record["rows"] != 0 and not nothing:
            self._barren.clear()
            return
        self._solved = min(self._solved, solved) if self._barren else solved
        self._failed = min(self._failed, failed) if self._barren else failed
        self._barren.append(at)

    def _nothing_to_learn(self) -> tuple[str, str]:
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
        return f"{self._window[0][0]} to {self._window[-1][0]}" if self._window else ""

    @property
    def surely_worse(self) -> bool:
        """Whether the present window is worse than the best by more than chance explains."""
        # Neighbours differ by twice the variance of one; a difference of two means over n has 2/n.
        variance = self._squares / max(1, self._steps) / 2
        error = math.sqrt(2 * variance / max(1, len(self._window)))
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


def _not_finite(record: Record, known: Iterable[str]) -> str:
    for key in known:
        value = record.get(key)
        if isinstance(value, float) and not math.isfinite(value):
            return f"{key} is {value}, expected a finite number"
    return ""


# ------------------------------------------------------------------------------------------------
# Trackers: the figures of a run in TensorBoard or trackio, a copy of metrics.jsonl to look at.
#
# Both are written anew when a run is resumed, from the records of the updates that count, so that
# no update is there twice and none that was taken back remains: trackio cannot drop single
# updates, and of TensorBoard's two readers only the default one heeds `purge_step` (2.21).
# ------------------------------------------------------------------------------------------------


PROJECT = "coa"


def check_tracker(log: str) -> None:
    """Say at once which package would be missing after the first update."""
    if log != "none":
        _package(log)


def _package(log: str) -> Any:
    try:
        name = {"tensorboard": "torch.utils.tensorboard", "trackio": "trackio"}[log]
        return importlib.import_module(name)
    except ImportError as exc:
        raise MissingExtra(f"rl.log = {log!r}", log) from exc


def open_tracker(
    log: str, directory: Path, name: str, earlier: Iterable[tuple[int, Record]] = ()
) -> Tracker:
    """The tracker of a run directory; `earlier` are updates with their records, in order."""
    backend: _TensorBoard | _Trackio | None = None
    if log == "tensorboard":
        backend = _TensorBoard(directory)
    elif log == "trackio":
        backend = _Trackio(directory, name)
    tracker = Tracker(backend)
    for update, record in _timed(directory, earlier) if backend else ():
        tracker.log(update, record)
    return tracker


def _timed(directory: Path, earlier: Iterable[tuple[int, Record]]) -> Iterator[tuple[int, Record]]:
    """Earlier updates with their wall-clock figures, which stand in a file of their own."""
    path = directory / TIMINGS
    lines = read_jsonl(path, growing=True) if path.is_file() else ()
    timings = {line["update"]: line for _, line in lines if "update" in line}
    for update, record in earlier:
        of_update = "eval_accuracy" not in record  # else an evaluation after that update
        yield update, {**(timings.get(update, {}) if of_update else {}), **record}


def figures(record: Record, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a record by name; those of a table within it as table/name."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from figures(value, f"{prefix}{key}/")
        elif key == "update" or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        elif math.isfinite(value):
            yield f"{prefix}{key}", float(value)


class Tracker:
    """Where figures go, or nowhere. It may fail: that is said once, and training goes on."""

    def __init__(self, backend: _TensorBoard | _Trackio | None) -> None:
        self._backend = backend

    def log(self, update: int, record: Record) -> None:
        if backend := self._backend:
            found = dict(figures(record))
            self._try(f"at update {update}", lambda: backend.log(update, found))

    def close(self) -> None:
        if backend := self._backend:
            self._try("at the end", backend.close)

    def _try(self, when: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as exc:
            self._backend = None
            reason = " ".join(str(exc).split()) or type(exc).__name__
            warnings.warn(
                f"The tracker failed {when} ({reason}); the run goes on without it, and "
                "metrics.jsonl has all its figures.",
                stacklevel=3,
            )


class _TensorBoard:
    """Event files in `tensorboard/` of the run directory, by torch's own writer."""

    def __init__(self, directory: Path) -> None:
        folder = directory / "tensorboard"
        with boundary(Unavailable, f"TensorBoard's writer in {folder}"):
            for old in folder.glob("events.out.tfevents.*") if folder.is_dir() else ():
                old.unlink()
            # A reader that is open now is told to forget what it has read.
            self._writer = _package("tensorboard").SummaryWriter(str(folder), purge_step=0)

    def log(self, update: int, found: Mapping[str, float]) -> None:
        for key, value in found.items():
            self._writer.add_scalar(key, value, update)
        self._writer.flush()  # what a kill takes would be missing for ever

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    """Rows of the project `coa` in the user's own trackio folder (`TRACKIO_DIR`); which of the runs
    there is this one is kept in `trackio.json`. trackio greets on stdout, which is for results."""

    def __init__(self, directory: Path, name: str) -> None:
        self._trackio = _package("trackio")
        noted = directory / "trackio.json"
        with boundary(Unavailable, "trackio"), redirect_stdout(sys.stderr):
            self._delete_run(noted)
            # Its own figures of the machine are left out: threads that wake up while we compute.
            self._run: Any = self._trackio.init(
                project=PROJECT,
                name=name,
                resume="never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
            write_atomic(noted, json.dumps({"project": PROJECT, "id": self._run.id}) + "\n")

    def log(self, update: int, found: Mapping[str, float]) -> None:
        self._run.log(dict(found), step=update)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            try:
                self._trackio.finish()  # also forgets the run, which would be finished at exit
            except RuntimeError:  # it was opened in another context, where it is remembered
                self._run.finish()

    def _delete_run(self, noted: Path) -> None:
        """Delete what an earlier part of this run has left with trackio, and only that."""
        try:
            held = json.loads(noted.read_text(encoding="utf-8"))
            runs = list(self._trackio.Api().runs(held["project"]))
        except (OSError, ValueError, KeyError, TypeError):
            return  # nothing is noted, or nothing is left of it
        for run in runs:
            if run.id == held.get("id"):
                run.delete()


class Monitors:
    """Passes what happens on to the view, the tracker and the alarms."""

    def __init__(self, view: LiveView, alarms: Alarms, log: str, root: Path) -> None:
        self.alarms = alarms
        self._view, self._log, self._root = view, log, root
        self._earlier: list[tuple[int, Json]] = []
        self._tracker: Tracker | None = None
        self.solved = ""
        """Why there is nothing left to learn, when that is so: the run ends well."""

    def phase(self, what: str, done: int = 0, total: int = 0) -> None:
        self._view.phase(what, done, total)

    def group(self, group: Group) -> None:
        """Show one rollout of a group."""
        trajectory, scored = group.rollouts[0]
        self._view.rollout(group.task.question, trajectory.answer or "", scored.score)

    def recall(self, record: Json) -> None:
        """A line of metrics that an earlier part of the run has written."""
        self._view.recall(record)
        self._look(record)
        self._earlier.append((int(record["update"]), record))

    def evaluated(self, record: Json) -> None:
        self._view.evaluated(record)
        self._track(record)

    def update(self, record: Json, timing: Json) -> None:
        """Raises a TrainingError when the run has collapsed."""
        self._view.update(record, timing)
        self._track({**record, **timing})
        if alarm := self._look(record):
            good = self._root / "checkpoints" / f"update-{alarm.last_good:07d}" / "adapter"
            where = f" Go on from {good} in a new directory." if good.is_dir() else ""
            raise TrainingError(f"{alarm.line}{where}")

    def _look(self, record: Json) -> Alarm | None:
        """The sign of a collapse, if there is one; that all is solved is none."""
        alarm = self.alarms.look(record)
        if alarm is None or alarm.sign != "solved":
            return alarm
        self.solved = alarm.line
        return None

    def _track(self, record: Json) -> None:
        if self._tracker is None:  # only now is known what the earlier part of the run has logged
            self._tracker = open_tracker(self._log, self._root, self._root.name, self._earlier)
        self._tracker.log(int(record["update"]), record)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()


@contextmanager
def open_monitors(recipe: RlRecipe, root: Path, quiet: bool) -> Iterator[Monitors]:
    """`quiet` shows nothing and tracks nothing; the alarms are on."""
    mode: Mode = "silent" if quiet else "auto"
    log = "none" if quiet else recipe.rl.log
    with LiveView(recipe.rl.updates, mode=mode) as view:
        alarms = Alarms(recipe.alarms, recipe.rl.checkpoint_every, recipe.rl.compares)
        monitors = Monitors(view, alarms, log, root)
        try:
            yield monitors
        finally:
            monitors.close()
