"""The process that waits, warm, for programs: one job at a time, a forked child for each.

It talks to the host over one socket of whole messages. A job comes as `J` (or `E`, to echo the last
expression, `A`, to answer calls, `T`, to check who answers them, or `S`, a session) with file
descriptors beside it, so that what a program, its input or its output holds never passes through
here: the next child, a copy of this process, has nothing to find. Back go `D` with how the job
ended, when every process of it is dead, and `I` when its files are gone too. During a job `K` ends
it, `F` freezes it and `C` lets it go on.

In a process namespace of its own it is process 1: signals from inside do not reach it, orphans
come to it, and when it ends the kernel ends everything in there. Anything odd is a reason to end:
the host starts a new one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from . import confine, program

_LOOK_S, _REST_S = 0.02, 0.5
_BURST = 20
_FEW_FILES = 256
"""More are not deleted one by one: a new slot comes with an empty disk."""
COMMON = (
    "abc bisect cmath collections copy dataclasses datetime decimal enum fractions functools "
    "hashlib heapq itertools json math operator random re statistics string textwrap typing"
)
"""Modules of the standard library that programs import most; loaded once, here."""


class Zygote:
    """See the module."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._control = socket.socket(fileno=settings["control"])
        self._seconds: float = settings["seconds"]
        self._files: int = settings["files"]
        self._disk: str = settings["disk"]
        self._crowd: int = settings["crowd"]
        self._alone = os.getpid() == 1
        assert self._alone == settings["forks"], "forks need a process namespace of their own"
        self._confinement = confine.Confinement(**settings["confinement"], forks=settings["forks"])

    def serve(self) -> NoReturn:
        self._control.send(b"I")
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._control, 16, 6)
            if not message:
                sys.exit()
            if message not in (b"J", b"E", b"A", b"T", b"S"):
                continue  # K, F or C for a job that had just ended
            child = os.fork()
            if child == 0:
                self._become(message, descriptors)
            for each in descriptors:
                os.close(each)
            self._control.send(b"D" + self._watch(child, timed=message != b"S"))
            self._clean()
            self._control.send(b"I")

    def _become(self, message: bytes, descriptors: list[int]) -> NoReturn:
        try:
            os.setsid()
            confine.end_with_parent()  # without a namespace, nothing else would end it then
            session = message == b"S"
            program.reseed()
            # A session's time is what the host gives to each of its programs.
            changed: dict[str, int | None] = {"CPU": None} if session else {}
            if self._crowd:
                changed["NPROC"] = self._crowd + _tasks_of_user()
            self._confinement.enter(changed)
            if session:
                program.serve(descriptors[0])
            program.run_once(descriptors, message.decode())
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(
                    descriptors[min(3, len(descriptors) - 1)],
                    f"the sandbox failed: {error!r}\n".encode(),
                )
        finally:
            os._exit(121)

    def _watch(self, child: int, timed: bool) -> bytes:
        """Wait for the end of a job, or bring it about: a letter that says why, and the status."""
        watched = os.pidfd_open(child)
        poller = select.poll()
        poller.register(watched, select.POLLIN)
        poller.register(self._control, select.POLLIN)
        deadline = time.monotonic() + self._seconds if timed else None
        frozen = False
        try:
            while True:
                pause = _REST_S if frozen else _LOOK_S
                if deadline is not None:
                    pause = min(pause, max(0.0, deadline - time.monotonic()))
                events = dict(poller.poll(pause * 1000))
                if watched in events:
                    return self._end(child, b"x")
                if events:
                    message = self._control.recv(16)
                    if message == b"C":
                        deadline, frozen = time.monotonic() + self._seconds, False
                        self._signal(child, signal.SIGCONT)
                    elif message == b"F":
                        deadline, frozen = None, True
                    elif message == b"K":
                        return self._end(child, b"k")
                    elif not message:
                        self._end(child, b"k")
                        sys.exit()
                # Processes may wake each other while they are being stopped, so once is not enough.
                for _ in range(_BURST if frozen else 0):
                    self._signal(child, signal.SIGSTOP)
                if deadline is not None and time.monotonic() > deadline:
                    return self._end(child, b"t")
                if self._disk and self._files_in_use() > self._files:
                    return self._end(child, b"f")
        finally:
            os.close(watched)

    def _signal(self, child: int, number: int) -> None:
        """To all processes of the job: of the namespace when it is ours, else there is only one."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1 if self._alone else child, number)

    def _end(self, child: int, why: bytes) -> bytes:
        """Kill and reap every process of the job."""
        self._signal(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ChildProcessError):
            while self._alone:
                self._signal(child, signal.SIGKILL)
                os.waitpid(-1, 0)
        return why + struct.pack("!i", os.waitstatus_to_exitcode(status))

    def _files_in_use(self) -> int:
        found = os.statvfs(self._disk)
        return found.f_files - found.f_ffree

    def _clean(self) -> None:
        """Nothing that a job wrote is there for the next one."""
        if not self._disk:
            return
        if self._files_in_use() > _FEW_FILES:
            sys.exit()
        owned = Path(self._disk).stat().st_uid == os.getuid()
        if owned:
            Path(self._disk).chmod(0o1777)
        for entry in os.scandir(self._disk):
            if entry.is_dir(follow_symlinks=False):
                Path(entry).chmod(0o700)
                shutil.rmtree(entry)
            else:
                Path(entry).unlink()
        if owned:
            os.utime(self._disk, (0, 0))


def _tasks_of_user() -> int:
    """Processes and threads of this user: where others have the same uid, they count as well."""
    mine = f"\nUid:\t{os.getuid()}\t"
    found = 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            text = (folder / "status").read_text("utf-8", "replace")
            if mine in text:
                found += int(text.partition("\nThreads:")[2].split()[0])
    return found


def main(argument: str) -> NoReturn:
    """`argument`: the settings as JSON, written by the host."""
    settings = json.loads(argument)
    # Process 1 is deaf to signals from inside only while it has no function to answer them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if settings["uid"] is not None:
        confine.drop_to(settings["uid"], settings["uid"])
    Path(os.__file__).stat()  # readable to the new user too, or say so now
    confine.end_with_parent()
    sys.path += settings["site"]
    for name in [*COMMON.split(), *settings["preload"]]:
        importlib.import_module(name)
    if "numpy" in sys.modules:  # it loads its generator late, and `reseed` is to find it
        importlib.import_module("numpy.random")
    os.chdir(settings["disk"] or "/")
    zygote = Zygote(settings)
    gc.collect()
    gc.freeze()  # what is here stays: the collector of a child has no reason to touch the pages
    zygote.serve()
