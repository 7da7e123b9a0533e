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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coa.io.progress import Mode, duration
from coa.view.plots import as_number
from coa.view.terminal import colour_of, fold

Record = Mapping[str, Any]
Row = tuple[RenderableType, ...]

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
FIGURES = {
    "groups": "{groups} drawn, {groups_flat} flat, {groups_solved} solved, {refills} refills",
    "rollouts": "{rollouts}: {answered_rate:.0%} answered, {malformed_rate:.0%} malformed, "
    "{truncated_rate:.0%} cut",
    "each": "{length_mean:.0f} tokens (most {length_max:.0f}), {turns:.1f} turns, "
    "{tool_calls:.1f} calls",
    "trained": "{rows} rows, {trained_tokens:,.0f} of {tokens:,.0f} tokens",
    "policy": "KL {kl_old:.2g}, clipped {clip_low:.1%} low {clip_high:.1%} high, "
    "ratio to {ratio_max}",
    "step": "loss {loss}, gradient {grad_norm}, lr {lr:.2g}, ess {ess:.0%}",
    "tokens/s": "{sampled_per_s:,.0f} sampled, {tokens_per_s:,.0f} trained",
}
"""The newest update in words: of its record, and in the last line of its timing."""
_LINE = (
    "reward {reward}  pass {pass_rate:.0%}  flat {groups_flat} of {groups}  "
    "length {length_mean:.0f}  malformed {malformed_rate:.0%}  entropy {entropy}  "
    "gap {sampler_gap}  gradient {grad_norm}"
)
_LEVELS = "".join(chr(0x2581 + level) for level in range(8))
_LEVELS_ASCII = "_.-=+*%#"
_WIDE, _TALL = 112, 23
"""Columns from which on, and lines up to which, the figures stand beside the curves."""
_NAME = 11
"""Width of the column of names."""
_RECENT = 8
"""Updates whose seconds tell how long the rest will take."""


class LiveView:
    """Shows a run of so many updates."""

    def __init__(self, updates: int, *, mode: Mode = "auto", stream: TextIO | None = None) -> None:
        self._updates, self._done = updates, 0
        self._stream = stream or sys.stderr
        self._mode: Mode = mode
        if mode == "auto":
            redraws = self._stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
            self._mode = "bar" if redraws else "plain"
        self._phase, self._part = "starting", (0, 0)
        self._record: Record = {}
        self._timing: Record = {}
        self._evaluation = ""
        """The interval of the newest evaluation, and after which update it was."""
        self._rollout: tuple[str, str, float] | None = None
        self._curves: dict[str, list[float]] = {key: [] for key, *_ in CURVES}
        self._began = [monotonic()]
        """When the newest updates began, the present one last."""
        self._live: Live | None = None

    def __enter__(self) -> LiveView:
        self._began = [monotonic()]
        if self._mode == "bar":
            # What others print goes above the picture, but what is meant for a pipe stays there.
            self._live = Live(
                self,
                console=Console(file=self._stream, highlight=False, markup=False),
                refresh_per_second=2,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start()
        return self

    def __exit__(self, failed: object, *error: object) -> None:
        if self._live is not None:
            self.phase("stopped" if failed else "finished")
            self._live.stop()  # draws once more and gives the cursor back
            self._live = None

    def phase(self, what: str, done: int = 0, total: int = 0) -> None:
        """Say what is done now, and how much of it."""
        self._phase, self._part = what, (done, total)

    def recall(self, record: Record) -> None:
        """Take over a line of metrics: of an earlier part of the run, or of an evaluation."""
        for key, values in self._curves.items():
            # An update without some figure leaves a gap, so that the curves stay side by side.
            if key in record or ("reward" in record and key != "eval_accuracy"):
                values.append(as_number(record.get(key)))
        if "reward" in record:
            self._record = dict(record)
            if not math.isnan(update := as_number(record.get("update"))):
                self._done = max(self._done, int(update))
        if "eval_accuracy" in record:
            self._evaluation = fill("[{eval_low:.1%}, {eval_high:.1%}] at {update}", record)

    def evaluated(self, record: Record) -> None:
        """An evaluation is done now."""
        self.recall(record)
        self._print(f"rl evaluation  {fill('{eval_accuracy:.1%}', record)} {self._evaluation}")

    def update(self, record: Record, timing: Record) -> None:
        """An update is done."""
        self._began = [*self._began[-_RECENT:], monotonic()]
        self.recall(record)
        self._timing = dict(timing)
        self._print(self.line())

    def rollout(self, question: str, answer: str, score: float | None) -> None:
        """One rollout to look at: what was asked, what the model answered, what it earned."""
        self._rollout = (question, answer, as_number(score))

    def _print(self, line: str) -> None:
        if self._mode == "plain":
            print(line, file=self._stream, flush=True)

    def line(self) -> str:
        """Return the newest update in one line of plain text."""
        left = self._times()[1]
        parts = [f"rl {self._done}/{self._updates}", f"{left} left" if left else ""]
        parts += [fill(_LINE, self._record), _seconds(self._timing)]
        return "  ".join(filter(None, parts))

    def _times(self) -> tuple[str, str]:
        """Return how long an update took lately, and how long the rest will take."""
        if not (finished := len(self._began) - 1):
            return "", ""
        each = (self._began[-1] - self._began[0]) / finished
        left = (self._updates - self._done) * each - (monotonic() - self._began[-1])
        return duration(each), duration(max(0.0, left)) if self._done < self._updates else ""

    # -- the picture ------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = console.height - 1
        curves, figures = self._curve_rows(), self._figure_rows()
        blocks = [curves, figures]
        if options.max_width >= _WIDE and height < _TALL:
            both = Table.grid(padding=(0, 1), expand=True)
            both.add_column(ratio=1)
            both.add_column(ratio=1)
            both.add_row(_grid(curves), _grid(figures))
            blocks = [[(both,)] * max(len(curves), len(figures))]
        head = self._progress()
        yield _grid(head)
        used = len(head)
        for rows in (*blocks, self._agents(), self._newest_rollout()):
            if rows and used + 1 + len(rows) <= height:
                used += 1 + len(rows)
                yield Text()
                yield _grid(rows) if len(rows[0]) > 1 else rows[0][0]

    def _progress(self) -> list[Row]:
        """Return how far the run is, and how far its present phase."""
        each, left = self._times()
        times = f"{each} each{f', {left} left' if left else ''}" if each else ""
        phase = fold(PHASES.get(self._phase, self._phase), 2 * _NAME)
        return [
            ("rl update", *_bar(self._done, self._updates, "green"), times),
            (phase, *_bar(*self._part, "blue"), ""),
        ]

    def _curve_rows(self) -> list[Row]:
        """Return a row for each curve: newest value, course, smallest and largest value."""
        rows: list[Row] = []
        for key, name, spec, colour in CURVES:
            values = self._curves[key]
            known = [value for value in values if not math.isnan(value)] or [math.nan]
            low, high, newest = (_compact(v, spec) for v in (min(known), max(known), known[-1]))
            beside = self._evaluation if key == "eval_accuracy" else f"{low} to {high}"
            drawn = (Sparkline(values, colour), Text(beside, "dim")) if values else ("", "")
            rows.append((name, newest, *drawn))
        return rows

    def _figure_rows(self) -> list[Row]:
        """Return the newest update in words."""
        left_out = self._record.get("left_out")
        reasons = left_out.items() if isinstance(left_out, Mapping) else ()
        lost = [f"{Figure(as_number(n))} {fold(str(why), 20)}" for why, n in reasons if n]
        rows = {
            name: fill(text, {**self._record, **self._timing}) for name, text in FIGURES.items()
        }
        rows["trained"] += f"; without {', '.join(lost)}" if lost else ""
        rows["time"] = _seconds(self._timing) or "-"
        return [(name, Text(text)) for name, text in rows.items()]

    def _agents(self) -> list[Row]:
        """Return who wrote the sampled tokens: a bar in the agents' colours, and its legend."""
        agents = self._record.get("agents")
        shares = {
            fold(str(role), 30): share
            for role, value in (agents.items() if isinstance(agents, Mapping) else ())
            if 0 < (share := as_number(value)) <= 1
        }
        ordered = sorted(shares.items(), key=lambda item: -item[1])
        legend = (Text(f"{role} {share:.0%}", colour_of(role)) for role, share in ordered)
        return [("written by", Shares(ordered)), ("", Text("  ").join(legend))] if shares else []

    def _newest_rollout(self) -> list[Row]:
        if self._rollout is None:
            return []
        question, answer, score = self._rollout
        mark = (f"{score:.2g}", "green" if score >= 1 else "red")
        said = (fold(answer, 60) or "no answer", "bold")
        earned = ("not judged", "dim") if math.isnan(score) else mark
        return [("an answer", Text.assemble(earned, "  ", said, f"  to: {fold(question)}"))]


def _grid(rows: Sequence[Row]) -> Table:
    """Return rows as columns that are never wrapped: a name, and perhaps a figure, something that
    takes the room there is, and a remark."""
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(justify="right", width=_NAME, style="dim", no_wrap=True)
    if len(rows[0]) > 2:
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(ratio=1, min_width=8)
    grid.add_column(no_wrap=True, ratio=None if len(rows[0]) > 2 else 1)
    for name, *cells in rows:
        grid.add_row(Text(str(name)), *cells)
    return grid


def _bar(done: int, total: int, colour: str) -> tuple[RenderableType, RenderableType]:
    if total < 1:
        return "", ""
    shown = ProgressBar(
        total, min(max(done, 0), total), complete_style=colour, finished_style=colour
    )
    return f"{done}/{total}", shown


def _compact(value: float, spec: str) -> str:
    return "<1e-4" if 0 < value < 1e-4 else format(Figure(value), spec)


class Figure(float):
    """A number of a record; as text a dash when it is missing."""

    def __format__(self, spec: str) -> str:
        if math.isnan(self):
            return "-"
        if not spec and self.is_integer() and abs(self) < 1e6:
            return str(int(self))
        return super().__format__(spec or ".3g")


def fill(template: str, record: Record) -> str:
    """Fill a template with the figures of a record."""
    known = {key: Figure(as_number(value)) for key, value in record.items()}
    return template.format_map(defaultdict(lambda: Figure(math.nan), known))


def _seconds(timing: Record) -> str:
    """Return the seconds by phase, the longest first."""
    phases = [
        (as_number(value), name.removesuffix("_s"))
        for name, value in timing.items()
        if name.endswith("_s") and not name.endswith("_per_s")
    ]
    ordered = sorted((each for each in phases if each[0] >= 0.5), reverse=True)
    return ", ".join(f"{name} {duration(seconds)}" for seconds, name in ordered)


@dataclass(frozen=True)
class Shares:
    """A bar as wide as there is room, with a part for each agent in its colour."""

    shares: Sequence[tuple[str, float]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bar, begun = Text(), 0.0
        for role, share in self.shares:
            cells = round((begun + share) * options.max_width) - round(begun * options.max_width)
            begun += share
            bar.append(("#" if options.ascii_only else chr(0x2588)) * cells, colour_of(role))
        bar.truncate(options.max_width)
        yield bar


@dataclass(frozen=True)
class Sparkline:
    """Values as a row of blocks, as wide as there is room at most."""

    values: Sequence[float]
    colour: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.line(options.max_width, options.ascii_only), self.colour, no_wrap=True)

    def line(self, width: int, ascii_only: bool = False) -> str:
        """Return the blocks; means of neighbours when there are more values."""
        levels = _LEVELS_ASCII if ascii_only else _LEVELS
        values, count = self.values, min(len(self.values), width)
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
