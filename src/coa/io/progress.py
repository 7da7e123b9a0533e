"""Progress: how far long work is, how fast it goes and when it will end.

On a terminal a bar that redraws itself (rich, imported only then); in a pipe or a log file a plain
line now and then; nothing when asked to be silent. It always writes to stderr: stdout belongs to
results. Figures given to `advance` (a loss, a reward) are shown beside the rate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, TextIO

Mode = Literal["auto", "bar", "plain", "silent"]


def say(line: str) -> None:
    """Tell a person something that is not a result: on stderr, in a line of its own."""
    print(line, file=sys.stderr)


class Progress:
    """Counts items of `what`; `done` of `total` were finished by an earlier part of the run."""

    def __init__(
        self,
        what: str,
        total: int | None = None,
        *,
        done: int = 0,
        mode: Mode = "auto",
        every: float = 30.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.done = what, total, done
        self._stream = stream or sys.stderr
        self._mode = mode
        if mode == "auto":
            self._mode = "bar" if self._stream.isatty() else "plain"
        self._every = every
        self._clock = clock
        self._first, self._start = done, clock()
        self._next = self._start + min(every, 5.0)
        self._figures = ""
        self._bar: Any = None
        self._row: Any = None

    def __enter__(self) -> Progress:
        if self._mode == "bar":
            self._bar = _rich_bar(self._stream)
            self._row = self._bar.add_task(
                self.what, total=self.total, completed=self.done, figures=""
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._mode == "plain" and self.done > self._first:
            print(self.line(), file=self._stream, flush=True)

    def advance(self, count: int = 1, **figures: float | str) -> None:
        """Count `count` more items; show `figures` from here on."""
        self.done += count
        if figures:
            self._figures = "  ".join(f"{name} {_figure(v)}" for name, v in figures.items())
        if self._bar is not None:
            shown = f"{self.rate():.3g}/s  {self._figures}"
            self._bar.update(self._row, completed=self.done, figures=shown)
        elif self._mode == "plain" and (now := self._clock()) >= self._next:
            self._next = now + self._every
            print(self.line(), file=self._stream, flush=True)

    def continue_from(self, done: int) -> None:
        """Take `done` items as finished by an earlier part of the run: they say nothing of rate."""
        self.done = self._first = done
        self._start = self._clock()

    def rate(self) -> float:
        """Items per second since this part of the run began."""
        elapsed = self._clock() - self._start
        return (self.done - self._first) / elapsed if elapsed > 0 else 0.0

    def line(self) -> str:
        """The state in one line: 'sft 120/480 25%  3.2/s  1m52s left  loss 1.31'."""
        parts = [f"{self.what} {self.done}"]
        rate = self.rate()
        if self.total:
            parts[0] += f"/{self.total} {100 * self.done // self.total}%"
        parts.append(f"{rate:.3g}/s")
        if self.total and rate and self.done < self.total:
            parts.append(f"{duration((self.total - self.done) / rate)} left")
        else:
            parts.append(f"{duration(self._clock() - self._start)} so far")
        return "  ".join([*parts, self._figures]).rstrip()


def duration(seconds: float) -> str:
    """Seconds as people say them: 8s, 1m52s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _rich_bar(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
        console=Console(file=stream),
        transient=False,
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
            else:
                bar.advance(done - bar.done)

        yield on_done
