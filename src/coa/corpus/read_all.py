"""Read many files at once, in processes of their own with limits of time and memory.

Batches go to workers and readings come back. A worker that dies takes its batch with it; those
files are then read one at a time, to find the one that kills.
"""

from __future__ import annotations

import faulthandler
import queue
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from coa.corpus import worker
from coa.corpus.page import Passage
from coa.corpus.read_file import Job, Limits, read_file
from coa.corpus.scan import Source
from coa.corpus.store import Reading, Stamp
from coa.runs import Json

_BATCH_BYTES, _BATCH_FILES = 1 << 20, 64
_SMALL_BYTES = 64_000
_PLAIN = (".txt", ".text", ".rst")
"""A few small files of these kinds are read here: no library is needed for them, and starting a
process takes longer than they can."""
_PATIENCE = 10.0
"""Seconds after its time is up until a file that nothing interrupts ends its worker."""
_DIED = "the process that read it died, for want of memory perhaps"
WORKER = worker.command_of("coa.corpus.read_all")


def read_all(
    jobs: Sequence[Job], limits: Limits, workers: int, command: Sequence[str] = WORKER
) -> Iterator[Reading]:
    """The reading of every file, in any order."""
    size = sum(job.file.stamp.size for job in jobs)
    if size < _SMALL_BYTES and all(job.file.path.suffix.lower() in _PLAIN for job in jobs):
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
        for each in crew:
            each.stop()


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
        asked = {"limits": asdict(self._limits), "jobs": [_job_to_json(job) for job in batch]}
        answer = worker.ask(process, asked)
        if answer is None:
            self._end()
            return None
        return [_reading_from_json(record) for record in answer["readings"]]

    def _running(self) -> subprocess.Popen[str] | None:
        """The process, started when there is none; None when it is time to stop."""
        with self._lock:
            if self._stopped:
                return None
            if self._process is None:
                self._process = worker.start(self._command)
            return self._process

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            worker.end(process)


def work() -> None:
    """The life of a worker process."""
    worker.serve(_answer)


def _answer(asked: Json) -> Json:
    limits = Limits(**asked["limits"])
    readings = (_in_time(_job_from_json(record), limits) for record in asked["jobs"])
    return {"readings": [asdict(reading) for reading in readings]}


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
