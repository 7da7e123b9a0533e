"""Read many files at once, in processes of their own with limits of time and memory.

A worker is a Python that is started for this alone and reads from its standard input, so that it
needs nothing of the program that calls us (a script without a guard, a notebook) and ends when that
ends, however it ends. Batches go in and readings come out, a line of JSON each. A worker that dies
takes its batch with it; those files are then read one at a time, to find the one that kills.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from coa.corpus.page import Passage
from coa.corpus.read_file import Job, Limits, read_file
from coa.corpus.scan import Source
from coa.corpus.store import Reading, Stamp
from coa.errors import ToolError
from coa.runs import Json

_WORKER_BYTES = 4 << 30
_BATCH_BYTES, _BATCH_FILES = 1 << 20, 64
_SMALL_BYTES = 1 << 20
"""Less than that is read at once, without starting processes; a PDF never is."""
_PATIENCE = 10.0
"""Seconds after its time is up until a file that nothing interrupts ends its worker."""
_READY = "ready\n"
_DIED = "the process that read it died, for want of memory perhaps"
_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from coa.corpus.read_all import work; work()"
WORKER = (sys.executable, "-P", "-c", _CODE, str(Path(__file__).parents[2]))


def read_all(
    jobs: Sequence[Job], limits: Limits, workers: int, command: Sequence[str] = WORKER
) -> Iterator[Reading]:
    """The reading of every file, in any order."""
    size = sum(job.file.stamp.size for job in jobs)
    if size < _SMALL_BYTES and not any(job.file.path.suffix.lower() == ".pdf" for job in jobs):
        yield from (read_file(job, limits) for job in jobs)
        return
    waiting = deque(_batches(jobs))
    done: queue.SimpleQueue[list[Reading] | Exception] = queue.SimpleQueue()
    crew = [_Worker(command, limits, waiting, done) for _ in range(min(workers, len(waiting)))]
    left = len(jobs)
    try:
        while left:
            readings = done.get()
            if isinstance(readings, Exception):
                raise readings
            left -= len(readings)
            yield from readings
    finally:
        waiting.clear()
        for worker in crew:
            worker.stop()


def _batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    batch: list[Job] = []
    size = 0
    for job in jobs:
        batch.append(job)
        size += job.file.stamp.size
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_FILES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Worker:
    """A thread that hands batches to a process, and starts another when that dies."""

    def __init__(
        self,
        command: Sequence[str],
        limits: Limits,
        waiting: deque[list[Job]],
        done: queue.SimpleQueue[list[Reading] | Exception],
    ) -> None:
        self._command, self._limits = command, limits
        self._waiting, self._done = waiting, done
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()  # so that the thread no longer waits for it
        self._thread.join()

    def _serve(self) -> None:
        try:
            while not self._stopped:
                try:
                    batch = self._waiting.popleft()
                except IndexError:
                    break
                readings = self._ask(batch)
                if readings is None:
                    readings = [reading for job in batch for reading in self._ask_alone(job)]
                self._done.put(readings)
        except Exception as exc:  # shown by the thread that waits for us
            self._done.put(exc)
        finally:
            self._end()

    def _ask_alone(self, job: Job) -> list[Reading]:
        return self._ask([job]) or [Reading(job.file.key, job.file.stamp, _DIED)]

    def _ask(self, batch: Sequence[Job]) -> list[Reading] | None:
        """What the process made of a batch; None when it died of it."""
        process = self._running()
        if process is None:
            return None
        assert process.stdin is not None and process.stdout is not None
        asked = {"limits": asdict(self._limits), "jobs": [_job_to_json(job) for job in batch]}
        try:
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):  # a pipe that is broken, or that `stop` has closed
            line = ""
        if not line.endswith("\n"):
            self._end()
            return None
        return [_reading_from_json(record) for record in json.loads(line)]

    def _running(self) -> subprocess.Popen[str] | None:
        """The process, started when there is none; None when it is time to stop."""
        with self._lock:
            if self._stopped:
                return None
            if self._process is None:
                self._process = _start(self._command)
            return self._process

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):  # what was not written can no longer be
                process.communicate()


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8")
    assert process.stdout is not None
    if process.stdout.readline() != _READY:
        said = process.communicate()[1].strip().splitlines() or ["no reason given"]
        raise ToolError(f"a process that reads files could not start: {said[-1]}")
    return process


def work() -> None:
    """The life of a worker process: a line of JSON in, a line of JSON out."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Libraries may write to stdout as well; the readings get a copy of it to themselves.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    print(_READY, end="", file=out, flush=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_WORKER_BYTES, _WORKER_BYTES))
    for line in sys.stdin:
        asked = json.loads(line)
        limits = Limits(**asked["limits"])
        readings = [_in_time(_job_from_json(record), limits) for record in asked["jobs"]]
        print(json.dumps([asdict(reading) for reading in readings]), file=out, flush=True)


def _in_time(job: Job, limits: Limits) -> Reading:
    """Read a file, or give up after its time. Only for a process of its own: it takes SIGALRM."""
    if not hasattr(signal, "setitimer"):
        return read_file(job, limits)

    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    # What holds the interpreter is not interrupted; this ends the process from outside of it.
    faulthandler.dump_traceback_later(limits.seconds + _PATIENCE, exit=True)
    try:
        # Again every second: a library may catch and forget what interrupts it.
        signal.setitimer(signal.ITIMER_REAL, limits.seconds, 1.0)
        reading = read_file(job, limits)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    return reading


def _job_to_json(job: Job) -> Json:
    return asdict(job) | {"file": asdict(job.file) | {"path": str(job.file.path)}}


def _job_from_json(record: Json) -> Job:
    file = record["file"]
    stamp = Stamp(**file["stamp"])
    return Job(Source(file["key"], Path(file["path"]), stamp), record["digest"])


def _reading_from_json(record: Json) -> Reading:
    passages = tuple(
        replace(Passage(**each), names=tuple(each["names"]), anchors=tuple(each["anchors"]))
        for each in record["passages"]
    )
    stamp, links = Stamp(**record["stamp"]), tuple(record["links"])
    return Reading(**record | {"stamp": stamp, "links": links, "passages": passages})
