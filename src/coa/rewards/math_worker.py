"""The life of a process that compares mathematics; it is started by `math_process`.

    {"golds": ["$\\frac{1}{2}$"], "answers": ["$0.5$"]}  ->  {"right": true}

sympy may take forever over a few characters, and the parser may run out of stack or memory. So this
process only imports the packages and forks; its child answers, one line after the other, and has a
limit of CPU time for each that the kernel enforces by ending it. Then the next child is forked, at
once and warm, and {"ended": SIGNAL} says what happened. CPU time, not the clock: a busy machine
must not change a score.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from typing import Any

STATUS_DONE = 0


def serve(cpu_seconds: float, memory_mb: int) -> None:
    """Fork children that answer, until the starter closes the pipe."""
    import math_verify  # noqa: F401  (here, so that every child has it)

    os.write(1, b'{"ready": true}\n')
    while True:
        child = os.fork()
        if not child:
            status = 1
            try:
                _answer_all(cpu_seconds, memory_mb)
                status = STATUS_DONE
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if status == STATUS_DONE:
            return
        ended = signal.Signals(status & 0x7F).name if status & 0x7F else "an error"
        with contextlib.suppress(BrokenPipeError):
            os.write(1, json.dumps({"ended": ended}).encode() + b"\n")


def _answer_all(cpu_seconds: float, memory_mb: int) -> None:
    import logging

    logging.disable(logging.CRITICAL)  # it warns that it has no time limits of its own
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # where the system has a lower limit already
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    while line := _read_line():
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        right = is_right(asked["golds"], asked["answers"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(1, json.dumps({"right": right}).encode() + b"\n")


def _read_line() -> bytes:
    """One line from the pipe, and no byte more: what is buffered would die with this child."""
    line = bytearray()
    while chunk := os.read(0, 65536):  # one question at a time: a chunk never holds two
        line += chunk
        if line.endswith(b"\n"):
            return bytes(line)
    return b""


def is_right(golds: list[str], answers: list[str]) -> bool:
    """Whether any reading of the answer is equal to a gold."""
    given = [found for answer in answers if (found := _parsed(answer))]
    return any(_same(_parsed(gold), found) for found in given for gold in golds)


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    try:
        found: list[Any] = parse(text, fallback_mode="no_fallback", parsing_timeout=None)
    except Exception:  # RecursionError and MemoryError included
        return []
    return found


def _same(gold: list[Any], found: list[Any]) -> bool:
    from math_verify import verify

    try:
        return bool(gold) and bool(verify(gold, found, timeout_seconds=None))
    except Exception:
        return False


if __name__ == "__main__":
    sys.setrecursionlimit(2000)
    serve(float(sys.argv[1]), int(sys.argv[2]))
