"""A slot without walls: a subprocess per program, for whoever asked for it with `unsafe`.

It keeps time, caps output and kills the process group, and that is all: a program has the rights
of whoever started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from coa.sandbox.limits import Limits
from coa.sandbox.slot import Ending
from coa.sandbox.walls import program_file

_NAMES = {b"J": "quiet", b"E": "echo", b"S": "session"}


class PlainSlot:
    """Does what `Slot` does, unprotected."""

    warm = True

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._why = "x"

    async def start(self) -> None:
        """Nothing waits: a process is started for each program."""

    def launch(self, kind: bytes, descriptors: Sequence[int]) -> None:
        self._why = "x"
        self._folder = tempfile.TemporaryDirectory(prefix="coa-unsafe-")
        command = [sys.executable, "-s", "-P", "-B", "-X", "utf8", str(program_file())]
        self._process = subprocess.Popen(
            [*command, _NAMES[kind], *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=list(descriptors),
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
            cwd=self._folder.name,
            start_new_session=True,
        )
        if kind != b"S":
            self.tell(b"C")

    def tell(self, word: bytes) -> None:
        if self._clock is not None:
            self._clock.cancel()
        if word == b"K":
            self._stop("k")
        elif word == b"F":
            self._signal(signal.SIGSTOP)
        else:
            self._signal(signal.SIGCONT)
            loop = asyncio.get_running_loop()
            self._clock = loop.call_later(self._limits.seconds, self._stop, "t")

    def _stop(self, why: str) -> None:
        if self._process is not None and self._process.poll() is None:
            self._why = why
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def ended(self, limit_s: float | None) -> Ending:
        assert self._process is not None
        while (status := self._process.poll()) is None:
            await asyncio.sleep(0.002)
        return Ending(self._why, status)

    async def settled(self) -> bool:
        await self.close()
        return True

    async def close(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = self._clock = None
