"""Trackers: the figures of a run in TensorBoard or trackio, beside metrics.jsonl.

    tracker = open_tracker("tensorboard", run_directory, "rl", earlier)
    tracker.log(update, record | timing)
    tracker.close()

metrics.jsonl is the record; a tracker is a copy to look at. When a run is resumed, `earlier` are
the records of the updates that count, and the tracker's copy agrees with them afterwards: no update
is there twice, and none that was taken back remains.

* TensorBoard: event files in `tensorboard/` of the run directory; `tensorboard --logdir DIRECTORY`.
  Written by torch's own writer, which needs the package `tensorboard`. (tensorboardX would save
  60 MB, but who writes such files also wants to look at them.)
* trackio: rows in the user's own trackio folder (`TRACKIO_DIR`, otherwise its default), project
  `coa`; `trackio show --project coa`. It needs no network and no account. Which of the runs there
  is this one is kept in `trackio.json`.

Both are written anew when a run is resumed, with the figures of timings.jsonl (in trackio at the
price of the earlier updates' time of day). trackio cannot drop single updates, and of TensorBoard's
two readers only the one that it uses by default heeds `purge_step` (2.21; the other one,
--load_fast=false, shows such updates twice).
"""

from __future__ import annotations

import calendar
import contextlib
import importlib
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from coa.errors import ConfigError, MissingExtra, Unavailable, boundary, did_you_mean
from coa.runs import TIMINGS, read_jsonl, write_atomic

Record = Mapping[str, Any]
PROJECT = "coa"
AT = "%Y-%m-%dT%H:%M:%SZ"
"""How timings.jsonl writes the time of day."""


class Tracker(Protocol):
    """Where figures go."""

    def log(self, update: int, record: Record) -> None: ...

    def close(self) -> None: ...


def check_tracker(log: str) -> None:
    """Say at once what would be missing after the first update: a name, or a package."""
    if log == "tensorboard":
        _summary_writer()
    elif log == "trackio":
        _trackio()
    elif log != "none":
        known = ("none", "tensorboard", "trackio")
        raise ConfigError(f"rl.log: found {log!r}.{did_you_mean(log, known)}")


def open_tracker(
    log: str, directory: Path, name: str, earlier: Iterable[tuple[int, Record]] = ()
) -> Tracker:
    """The tracker of a run directory; `earlier` are updates with their records, in order."""
    check_tracker(log)
    if log == "tensorboard":
        return Lenient(_TensorBoard(directory, _timed(directory, earlier)))
    if log == "trackio":
        return Lenient(_Trackio(directory, name, _timed(directory, earlier)))
    return _Nowhere()


def _timed(directory: Path, earlier: Iterable[tuple[int, Record]]) -> list[tuple[int, Record]]:
    """Earlier updates with their wall-clock figures, which stand in a file of their own."""
    path = directory / TIMINGS
    lines = read_jsonl(path, growing=True) if path.is_file() else ()
    timings = {line["update"]: line for _, line in lines if "update" in line}
    merged: list[tuple[int, Record]] = []
    for update, record in earlier:
        timing = timings.get(update, {})
        if "eval_accuracy" in record:  # an evaluation after that update, not the update itself
            timing = {key: timing[key] for key in ("at",) if key in timing}
        merged.append((update, {**timing, **record}))
    return merged


def _wall_time(record: Record) -> float | None:
    """Seconds since the epoch, where the record knows its time of day."""
    try:
        return float(calendar.timegm(time.strptime(str(record["at"]), AT)))
    except (KeyError, ValueError):
        return None


def figures(record: Record, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a record by name; those of a table within it as table/name."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from figures(value, f"{prefix}{key}/")
        elif key == "update" or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        elif math.isfinite(value):
            yield f"{prefix}{key}", float(value)


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as exc:
        raise MissingExtra("rl.log = 'tensorboard'", "tensorboard") from exc
    return SummaryWriter


def _trackio() -> Any:
    try:
        return importlib.import_module("trackio")
    except ImportError as exc:
        raise MissingExtra("rl.log = 'trackio'", "trackio") from exc


class Lenient:
    """A tracker that may fail: that is said once, and training goes on without it."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker: Tracker = tracker

    def log(self, update: int, record: Record) -> None:
        self._try(f"at update {update}", lambda: self._tracker.log(update, record))

    def close(self) -> None:
        self._try("at the end", self._tracker.close)

    def _try(self, when: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as exc:
            self._tracker = _Nowhere()
            reason = " ".join(str(exc).split()) or type(exc).__name__
            warnings.warn(
                f"The tracker failed {when} ({reason}); the run goes on without it, and "
                "metrics.jsonl has all its figures.",
                stacklevel=3,
            )


class _Nowhere:
    def log(self, update: int, record: Record) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, directory: Path, earlier: list[tuple[int, Record]]) -> None:
        folder = directory / "tensorboard"
        with boundary(Unavailable, f"TensorBoard's writer in {folder}"):
            for old in folder.glob("events.out.tfevents.*") if folder.is_dir() else ():
                old.unlink()
            # A reader that is open now is told to forget what it has read.
            self._writer: Any = _summary_writer()(str(folder), purge_step=0)
        for update, record in earlier:
            self.log(update, record)

    def log(self, update: int, record: Record) -> None:
        for key, value in figures(record):
            self._writer.add_scalar(key, value, update, walltime=_wall_time(record))
        self._writer.flush()  # what a kill takes would be missing for ever

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, directory: Path, name: str, earlier: list[tuple[int, Record]]) -> None:
        self._trackio = _trackio()
        noted = directory / "trackio.json"
        with boundary(Unavailable, "trackio"), _to_stderr():
            _delete_run(self._trackio, noted)
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
            for update, record in earlier:
                self.log(update, record)

    def log(self, update: int, record: Record) -> None:
        self._run.log(dict(figures(record)), step=update)

    def close(self) -> None:
        with _to_stderr():
            try:
                self._trackio.finish()  # also forgets the run, which would be finished at exit
            except RuntimeError:  # it was opened in another context, where it is remembered
                self._run.finish()


def _delete_run(trackio: Any, noted: Path) -> None:
    """Delete what an earlier part of this run has left with trackio, and only that."""
    try:
        held = json.loads(noted.read_text(encoding="utf-8"))
        runs = list(trackio.Api().runs(held["project"]))
    except (OSError, ValueError, KeyError, TypeError):
        return  # nothing is noted, or nothing is left of it
    for run in runs:
        if run.id == held.get("id"):
            run.delete()


@contextlib.contextmanager
def _to_stderr() -> Iterator[None]:
    """trackio greets on stdout, which belongs to results."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
