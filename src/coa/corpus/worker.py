"""Processes that read what strangers wrote: they may hang, exhaust memory and die, and only they.

A worker is a Python that is started for this alone. It reads from its standard input, so that it
needs nothing of the program that started it (a script without a guard, a notebook) and ends when
that ends, however it ends. A line of JSON goes in, a line of JSON comes out.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from coa.errors import ToolError
from coa.io.runs import Json

_BYTES = 4 << 30
"""Of address space."""
_READY = "ready\n"


def command_of(module: str) -> tuple[str, ...]:
    """The command of a worker that runs `work()` of a module of ours."""
    code = f"import sys; sys.path.insert(0, sys.argv[1]); from {module} import work; work()"
    return (sys.executable, "-P", "-c", code, str(Path(__file__).parents[2]))


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    """A worker that is ready to be asked."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8")
    assert process.stdout is not None
    if process.stdout.readline() != _READY:
        said = process.communicate()[1].strip().splitlines() or ["no reason given"]
        raise ToolError(f"a process that reads files could not start: {said[-1]}")
    return process


def ask(process: subprocess.Popen[str], question: Json) -> Json | None:
    """What a worker answers; None when it died of the question, and then it has to be ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except (OSError, ValueError):  # a pipe that is broken, or that somebody has closed
        return None
    return json.loads(line) if line.endswith("\n") else None


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with contextlib.suppress(OSError):  # what was not written can no longer be
        process.communicate()


def serve(answer: Callable[[Json], Json]) -> None:
    """The life of a worker, until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Libraries may write to stdout as well; the answers get a copy of it to themselves.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    print(_READY, end="", file=out, flush=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=out, flush=True)


# ------------------------------------------------------------------------------------------------
# Read one file into a page, or say why that is not possible.
#
# A file is the work of strangers: it may be broken, endless, or made to exhaust memory. Whatever
# goes wrong is a reason on its Reading, never an error of the build.
# ------------------------------------------------------------------------------------------------
