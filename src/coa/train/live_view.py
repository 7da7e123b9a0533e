"""The live view of an RL run: on a terminal a picture that redraws itself, in a pipe one line per
update, and nothing when asked to be silent. It writes to stderr: stdout belongs to results.

    with LiveView(updates) as view:
        view.recall(record)                     # a line that an earlier part of the run has written
        view.phase("rollout", 37, 64)           # what it is doing now
        view.update(record, timing)             # an update is done

The picture has what somebody asks who comes by: how far, how long still, what it does now, whether
it learns (curves), what the newest update was like, who writes the tokens, and one rollout to read.
It fits the terminal: on a low one curves and figures stand side by side, or the least important
parts are left out. Records may lack any figure, and texts of the model are made harmless.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from coa.io.progress import Mode, duration
from coa.view.terminal import colour_of, fold

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

Record = Mapping[str, Any]

PHASES = {
    "rollout": "rolling out",
    "score": "scoring",
    "train": "training",
    "evaluate": "evaluating",
    "load": "loading weights",
    "checkpoint": "saving",
}
"""Phase -> what people are told; another name is shown as it is."""
CURVES = (
    ("reward", "reward", ".3g", "green"),
    ("pass_rate", "pass rate", ".0%", "green"),
    ("eval_accuracy", "evaluation", ".1%", "bold green"),
    ("entropy", "entropy", ".3g", "yellow"),
    ("length_mean", "length", ".0f", "cyan"),
    ("sampler_gap", "sampler gap", ".2g", "magenta"),
)
"""Figure, its name, how it is written, its colour."""
_LEVELS = "".join(chr(0x2581 + level) for level in range(8))
_LEVELS_ASCII = "_.-=+*%#"
_WIDE, _TALL = 112, 23
"""Columns from which on, and lines up to which, the figures stand beside the curves."""
_NAME, _VALUE, _EXTENT = 11, 6, 22
"""Width of the column of names, of a curve's newest value, and of what stands behind it."""
_RECENT = 8
"""Updates whose seconds tell how long the rest will take."""


@dataclass(slots=True)
class Seen:
    """What the view has been told so far."""

    updates: int
    done: int
    phase: str = "starting"
    part: tuple[int, int] = (0, 0)
    record: Record = field(default_factory=dict)
    """Of the newest update."""
    timing: Record = field(default_factory=dict)
    interval: str = ""
    """Of the newest evaluation, and after which update it was."""
    rollout: tuple[str, str, float | None] | None = None
    """Question, answer, score."""
    curves: dict[str, list[float]] = field(default_factory=lambda: {row[0]: [] for row in CURVES})
    each: float | None = None
    """Seconds of an update, lately."""
    left: float | None = None


class LiveView:
    """Shows a run of `updates`, of which `done` were finished by an earlier part of it."""

    def __init__(
        self,
        updates: int,
        *,
        done: int = 0,
        mode: Mode = "auto",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seen = Seen(updates, done)
        self._stream = stream or sys.stderr
        self._mode: Mode = mode
        if mode == "auto":
            redraws = self._stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
            self._mode = "bar" if redraws else "plain"
        self._clock = clock
        self._began = [clock()]
        """When the newest updates began, the present one last."""
        self._live: Any = None

    def __enter__(self) -> LiveView:
        self._began = [self._clock()]
        if self._mode == "bar":
            from rich.console import Console
            from rich.live import Live

            # What others print goes above the picture, but what is meant for a pipe stays there.
            self._live = Live(
                self,
                console=Console(file=self._stream, highlight=False, markup=False),
                refresh_per_second=2,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self.phase("stopped" if kind else "finished")
            self._live.stop()  # draws once more and gives the cursor back
            self._live = None

    def phase(self, what: str, done: int = 0, total: int = 0) -> None:
        """Say what is done now, and how much of it."""
        self._seen.phase, self._seen.part = what, (done, total)

    def recall(self, record: Record) -> None:
        """Take over a line of metrics: of an earlier part of the run, or of an evaluation."""
        seen = self._seen
        for key, values in seen.curves.items():
            # An update without some figure leaves a gap, so that the curves stay side by side.
            if key in record or ("reward" in record and key != "eval_accuracy"):
                values.append(number(record.get(key)))
        if "reward" in record:
            seen.record = dict(record)
            if not math.isnan(update := number(record.get("update"))):
                seen.done = max(seen.done, int(update))
        if "eval_accuracy" in record:
            low, high = shown(record, "eval_low", ".1%"), shown(record, "eval_high", ".1%")
            seen.interval = f"[{low}, {high}] at {shown(record, 'update')}"

    def evaluated(self, record: Record) -> None:
        """An evaluation is done now."""
        self.recall(record)
        if self._mode == "plain":
            line = f"rl evaluation  {shown(record, 'eval_accuracy', '.1%')} {self._seen.interval}"
            print(line, file=self._stream, flush=True)

    def update(self, record: Record, timing: Record) -> None:
        """An update is done."""
        self._began = [*self._began[-_RECENT:], self._clock()]
        self.recall(record)
        self._seen.timing = dict(timing)
        self._foresee()
        if self._mode == "plain":
            print(plain_line(self._seen), file=self._stream, flush=True)

    def rollout(self, question: str, answer: str, score: float | None) -> None:
        """One rollout to look at: what was asked, what the model answered, what it earned."""
        self._seen.rollout = (question, answer, score)

    def _foresee(self) -> None:
        seen, finished = self._seen, len(self._began) - 1
        if not finished:
            return
        seen.each = (self._began[-1] - self._began[0]) / finished
        since = self._clock() - self._began[-1]
        seen.left = max(0.0, (seen.updates - seen.done) * seen.each - since)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self._foresee()
        yield from picture(
            self._seen, options.max_width, console.height - 1, ascii_only=options.ascii_only
        )


def plain_line(seen: Seen) -> str:
    """The newest update in one line of plain text."""
    found = seen.record
    parts = [f"rl {seen.done}/{seen.updates}"]
    if seen.left is not None and seen.done < seen.updates:
        parts.append(f"{duration(seen.left)} left")
    parts.append(f"reward {shown(found, 'reward')}")
    parts.append(f"pass {shown(found, 'pass_rate', '.0%')}")
    parts.append(f"flat {shown(found, 'groups_flat')} of {shown(found, 'groups')}")
    parts.append(f"length {shown(found, 'length_mean', '.0f')}")
    parts.append(f"malformed {shown(found, 'malformed_rate', '.0%')}")
    for key, name in (("entropy", "entropy"), ("sampler_gap", "gap"), ("grad_norm", "gradient")):
        if key in found:
            parts.append(f"{name} {shown(found, key)}")
    return "  ".join([*parts, _seconds(seen.timing)]).rstrip()


def picture(seen: Seen, width: int, height: int, ascii_only: bool = False) -> list[Text]:
    """The lines of the picture that fit into a terminal."""
    from rich.text import Text

    head = _progress(seen, width, ascii_only)
    half = width // 2 - 4
    wide = width >= _WIDE and height < _TALL
    curves, figures = _curves(seen, half if wide else width, ascii_only), _figures(seen)
    middle = [_beside(curves, figures, half + 2)] if wide else [curves, figures]
    lines = list(head)
    for part in (*middle, _agents(seen, width, ascii_only), _rollout(seen)):
        if part and len(lines) + 1 + len(part) <= height:
            lines += [Text(), *part]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines


def _beside(left: Sequence[Text], right: Sequence[Text], width: int) -> list[Text]:
    """Two blocks side by side, the first one `width` wide."""
    from rich.text import Text

    lines = []
    for at in range(max(len(left), len(right))):
        line = left[at].copy() if at < len(left) else Text()
        line.truncate(width, overflow="ellipsis", pad=True)
        lines.append(line.append_text(right[at]) if at < len(right) else line)
    return lines


def _line(name: str, *parts: str | tuple[str, str]) -> Text:
    """A name in the first column, and what there is to say."""
    from rich.text import Text

    return Text.assemble((f"{name:>{_NAME}} ", "dim"), *parts)


def _progress(seen: Seen, width: int, ascii_only: bool) -> list[Text]:
    """How far the run is, and how far its present phase."""
    times = f" {duration(seen.each)} each" if seen.each is not None else ""
    if seen.left is not None and seen.done < seen.updates:
        times += f", {duration(seen.left)} left"
    done, total = seen.part
    counts = [f"{seen.done}/{seen.updates} ", f"{done}/{total} " if total else ""]
    longest = max(map(len, counts))
    room = max(0, width - _NAME - 1 - longest - len(times))
    phase = fold(PHASES.get(seen.phase, seen.phase), 2 * _NAME)
    run = _line("rl update", (counts[0].rjust(longest), "bold"))
    run.append_text(_bar(seen.done, seen.updates, room, "green", ascii_only)).append(times)
    now = _line(phase, counts[1].rjust(longest))
    return [run, now.append_text(_bar(done, total, room, "blue", ascii_only))]


def _bar(done: int, total: int, width: int, colour: str, ascii_only: bool) -> Text:
    from rich.text import Text

    if total < 1:
        return Text()
    full = round(width * min(max(done, 0), total) / total)
    filled, empty = ("#", "-") if ascii_only else (chr(0x2501), chr(0x2500))
    return Text.assemble((filled * full, colour), (empty * (width - full), "dim"))


def _curves(seen: Seen, width: int, ascii_only: bool) -> list[Text]:
    """A line for each curve: its newest value, its course, its smallest and largest value."""
    room = width - _NAME - _VALUE - _EXTENT - 4
    lines = []
    for key, name, spec, colour in CURVES:
        known = [value for value in seen.curves[key] if not math.isnan(value)]
        if not known:
            lines.append(_line(name, f"{'-':>{_VALUE}}"))
            continue
        newest = f"{_compact(known[-1], spec):>{_VALUE}}  "
        extent = f" {_compact(min(known), spec)} to {_compact(max(known), spec)}"
        if key == "eval_accuracy":
            extent = f" {seen.interval}"
        course = sparkline(seen.curves[key], max(8, room), ascii_only).ljust(max(8, room))
        lines.append(_line(name, newest, (course, colour), (extent, "dim")))
    return lines


def _compact(value: float, spec: str) -> str:
    return "<1e-4" if 0 < value < 1e-4 else format(value, spec)


def _figures(seen: Seen) -> list[Text]:
    """The newest update in words."""
    found = seen.record

    def of(key: str, spec: str = ".3g") -> str:
        return shown(found, key, spec)

    left_out = found.get("left_out")
    reasons = left_out.items() if isinstance(left_out, Mapping) else ()
    lost = ", ".join(f"{shown({0: n}, 0)} {fold(str(why), 20)}" for why, n in reasons if n)
    rows = {
        "groups": f"{of('groups')} drawn, {of('groups_flat')} flat, {of('groups_solved')} solved, "
        f"{of('refills')} refills",
        "rollouts": f"{of('rollouts')}: {of('answered_rate', '.0%')} answered, "
        f"{of('malformed_rate', '.0%')} malformed, {of('truncated_rate', '.0%')} cut",
        "each": f"{of('length_mean', '.0f')} tokens (most {of('length_max', '.0f')}), "
        f"{of('turns', '.1f')} turns, {of('tool_calls', '.1f')} calls",
        "trained": f"{of('rows')} rows, {of('trained_tokens', ',.0f')} of {of('tokens', ',.0f')} "
        f"tokens{'; without ' + lost if lost else ''}",
        "policy": f"KL {of('kl_old', '.2g')}, clipped {of('clip_low', '.1%')} low "
        f"{of('clip_high', '.1%')} high, ratio to {of('ratio_max')}",
        "step": f"loss {of('loss')}, gradient {of('grad_norm')}, lr {of('lr', '.2g')}, "
        f"ess {of('ess', '.0%')}",
        "time": _seconds(seen.timing) or "-",
        "tokens/s": f"{shown(seen.timing, 'sampled_per_s', ',.0f')} sampled, "
        f"{shown(seen.timing, 'tokens_per_s', ',.0f')} trained",
    }
    return [_line(name, text) for name, text in rows.items()]


def _agents(seen: Seen, width: int, ascii_only: bool) -> list[Text]:
    """Who wrote the sampled tokens: one bar in the agents' colours, and its legend."""
    agents = seen.record.get("agents")
    shares = {
        fold(str(role), 30): share
        for role, value in (agents.items() if isinstance(agents, Mapping) else ())
        if 0 < (share := number(value)) <= 1
    }
    if not shares:
        return []
    bar, legend = _line("written by"), _line("")
    room, begun = max(0, width - _NAME - 1), 0.0
    for role, share in sorted(shares.items(), key=lambda item: -item[1]):
        cells = round((begun + share) * room) - round(begun * room)
        begun += share
        bar.append(("#" if ascii_only else chr(0x2588)) * cells, style=colour_of(role))
        legend.append(f"{role} {share:.0%}  ", style=colour_of(role))
    legend.rstrip()
    return [bar, legend]


def _rollout(seen: Seen) -> list[Text]:
    if seen.rollout is None:
        return []
    question, answer, score = seen.rollout
    earned = number(score)
    colour = "dim" if math.isnan(earned) else "green" if earned >= 1 else "red"
    mark = "not judged" if math.isnan(earned) else f"{earned:.2g}"
    said = (fold(answer, 60) or "no answer", "bold")
    return [_line("an answer", (mark, colour), "  ", said, f"  to: {fold(question)}")]


def _seconds(timing: Record) -> str:
    """Seconds by phase, the longest first."""
    phases = [
        (number(value), name.removesuffix("_s"))
        for name, value in timing.items()
        if name.endswith("_s") and not name.endswith("_per_s")
    ]
    ordered = sorted((each for each in phases if each[0] >= 0.5), reverse=True)
    return ", ".join(f"{name} {duration(seconds)}" for seconds, name in ordered)


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """Values as a row of blocks, at most `width`: means of neighbours when there are more."""
    levels = _LEVELS_ASCII if ascii_only else _LEVELS
    count = min(len(values), width)
    bins = []
    for at in range(count):
        part = values[at * len(values) // count : (at + 1) * len(values) // count]
        known = [value for value in part if math.isfinite(value)]
        bins.append(sum(known) / len(known) if known else math.nan)
    known = [value for value in bins if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        # Halves, since the difference of two huge numbers may be infinite.
        place = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
        return levels[min(len(levels) - 1, int(place * len(levels)))]

    return "".join(map(block, bins))


def number(value: object) -> float:
    """A finite number, or NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) <= sys.float_info.max else math.nan


def shown(record: Mapping[Any, Any], key: Any, spec: str = ".3g") -> str:
    """A figure of a record as text; a dash when it is missing or no number."""
    value = number(record.get(key))
    if math.isnan(value):
        return "-"
    if spec == ".3g" and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return format(value, spec)
