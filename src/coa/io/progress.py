"""Progress: how far long work is, how fast it goes and when it will end.

On a terminal a bar that redraws itself (rich, imported only then); in a pipe or a log file a plain
line now and then; nothing when asked to be silent. It always writes to stderr: stdout belongs to
results. Figures given to `advance` (a loss, a reward) are shown beside the rate.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

Mode = Literal["auto", "bar", "plain", "silent"]
_FIRST_S, _EVERY_S = 5.0, 30.0
"""Seconds until the first plain line, and between those that follow."""
_RECENT_S, _RECENT_STEPS = 30.0, 4
"""The rate is that of the last seconds, and of no fewer steps than these."""
_SHOWS = 0.05
"""Before this share of the work, or those seconds, nothing is said of when it ends: the first of
many rollouts that run at once says nothing of those that follow."""


def say(line: str) -> None:
    """Tell a person something that is not a result: on stderr, in a line of its own."""
    print(line, file=sys.stderr, flush=True)


class Progress:
    """Counts items of `what`; `done` of `total` were finished by an earlier part of the run."""

    def __init__(
        self, what: str, total: int | None = None, *, done: int = 0, mode: Mode = "auto"
    ) -> None:
        self.what, self.total, self.done = what, total, done
        self._mode = mode
        if mode == "auto":
            self._mode = "bar" if sys.stderr.isatty() else "plain"
        self._figures = ""
        self._bar: Any = None
        self.continue_from(done)
        self._next = self._start + _FIRST_S

    def __enter__(self) -> Progress:
        if self._mode == "bar":
            self._bar = _rich_bar()
            self._row = self._bar.add_task(
                self.what, total=self.total, completed=self.done, figures=""
            )
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._mode == "plain" and self.done > self._first:
            say(self.line())

    def advance(self, count: int = 1, **figures: float | str) -> None:
        """Count `count` more items; show `figures` from here on."""
        self.done += count
        now = time.monotonic()
        self._steps.append((now, self.done))
        while len(self._steps) > _RECENT_STEPS + 1 and now - self._steps[1][0] >= _RECENT_S:
            self._steps.popleft()
        if figures:
            self._figures = "  ".join(
                f"{name} {value if isinstance(value, str) else f'{value:.4g}'}"
                for name, value in figures.items()
            )
        if self._bar is not None:
            shown = f"{self.rate():.3g}/s  {self._figures}"
            self._bar.update(self._row, completed=self.done, figures=shown)
        elif self._mode == "plain" and now >= self._next:
            self._next = now + _EVERY_S
            say(self.line())

    def continue_from(self, done: int) -> None:
        """Take `done` items as finished by an earlier part of the run: they say nothing of rate."""
        self.done = self._first = done
        self._start = time.monotonic()
        self._steps = deque([(self._start, done)])

    def rate(self) -> float:
        """Items per second of late: a machine that others begin to use is slower than it was."""
        since, done = self._steps[0]
        elapsed = time.monotonic() - since
        return (self.done - done) / elapsed if elapsed > 0 else 0.0

    def line(self) -> str:
        """The state in one line: 'sft 120/480 25%  3.2/s  1m52s left  loss 1.31'."""
        count, rate = f"{self.what} {self.done}", self.rate()
        if self.total:
            count += f"/{self.total} {100 * self.done // self.total}%"
        spent, new = time.monotonic() - self._start, self.done - self._first
        left = f"{duration(spent)} so far"
        told = self.total and (new >= _SHOWS * (self.total - self._first) or spent >= _RECENT_S)
        if self.total and told and rate and self.done < self.total:
            left = f"{duration((self.total - self.done) / rate)} left"
        return "  ".join([count, f"{rate:.3g}/s", left, self._figures]).rstrip()


def duration(seconds: float) -> str:
    """Seconds as people say them: 8s, 1m52s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _rich_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
        console=Console(stderr=True),
    )


@contextmanager
def counted(what: str, total: int, mode: Mode = "auto") -> Iterator[Callable[[int, int], None]]:
    """A progress bar as a callback on_done(done, total), for work that counts by itself.

    A first call with more than one done is an earlier part of the run, not speed.
    """
    with Progress(what, total, mode=mode) as bar:

        def on_done(done: int, _total: int = total) -> None:
            if bar.done == 0 and done > 1:
                bar.continue_from(done)
                if mode != "silent":
                    say(f"{what} goes on from {done} of {total}")
            else:
                bar.advance(done - bar.done)

        yield on_done
