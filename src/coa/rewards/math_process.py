"""Processes that compare mathematics, seen from where they are used: each has one pair at a time.

A question that ends its child is answered by what ended it; see `math_worker`. A process that
gives no sign within the clock's limit, which is long, is killed with its child and started anew:
that is nobody's fault, so the question is asked once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from importlib.util import find_spec

from coa.errors import MissingExtra, ToolError
from coa.machine import cores

_START = "import sys; sys.path[:] = sys.argv[3:]; from coa.rewards.math_worker import serve; "
_START += "serve(float(sys.argv[1]), int(sys.argv[2]))"
_CLOCK = 20.0
"""Seconds by the clock for each second of CPU time, before a process counts as stuck."""
_STARTING_S = 120.0
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
"""What ends a child that did nothing wrong, when memory is short for instance."""
_MOST = 4


class MathProcesses:
    """`await processes.ask(golds, answers)`: True, False, or the name of the signal that ended it.

    A ToolError says that nobody could compare.
    """

    def __init__(self, cpu_seconds: float, memory_mb: int, processes: int = 0) -> None:
        """`processes`: how many at most; 0 takes one a core, up to four."""
        if find_spec("math_verify") is None:
            raise MissingExtra("The reward 'math'", "tools")
        self._cpu_seconds, self._memory_mb = cpu_seconds, memory_mb
        self._places = asyncio.Semaphore(processes or min(_MOST, cores()))
        self._idle: list[Process] = []
        self._all: set[Process] = set()

    async def ask(self, golds: list[str], answers: list[str]) -> bool | str:
        question = json.dumps({"golds": golds, "answers": answers}).encode() + b"\n"
        for _ in range(2):
            reply = await self._ask(question)
            if reply is not None and (ended := reply.get("ended")) not in _FROM_OUTSIDE:
                return str(ended) if ended is not None else bool(reply["right"])
        raise ToolError("the process that compares was lost twice")

    async def _ask(self, question: bytes) -> dict[str, object] | None:
        """The reply; None when the process gave no sign."""
        async with self._places:
            process = self._idle.pop() if self._idle else await self._start()
            whole = False
            try:
                assert process.stdin is not None
                process.stdin.write(question)
                reply = await self._line(process, _CLOCK * self._cpu_seconds)
                whole = reply is not None
            except (BrokenPipeError, ConnectionResetError):
                reply = None
            finally:  # also when whoever asked was cancelled: nobody may read that reply
                if whole:
                    self._idle.append(process)
                else:
                    await self._end(process)
        return reply

    async def start(self) -> None:
        """Start the first one, so that what is wrong with it shows before it is needed."""
        if not self._all:
            self._idle.append(await self._start())

    async def _start(self) -> Process:
        limits = (str(self._cpu_seconds), str(self._memory_mb))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", _START, *limits, *sys.path),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,  # to be ended together with its child; and Ctrl-C is for us
        )
        self._all.add(process)
        if await self._line(process, _STARTING_S) is None:
            await self._end(process)
            raise ToolError("the reward 'math' cannot be started: math-verify does not load.")
        return process

    async def _line(self, process: Process, seconds: float) -> dict[str, object] | None:
        """The next message; None when the process ended or is stuck."""
        assert process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = await process.stdout.readline()
        except TimeoutError:
            return None
        message: dict[str, object] | None = json.loads(line) if line.endswith(b"\n") else None
        return message

    async def _end(self, process: Process) -> None:
        self._all.discard(process)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())

    async def close(self) -> None:
        for process in list(self._all):
            await self._end(process)
        self._idle.clear()
