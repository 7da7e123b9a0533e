"""Run a program in this process as Python would, and nothing of ours beside it.

What comes in are file descriptors: the source, the three standard streams, and for a job of calls
the two ends that `calls` speaks over. A program's mistake is shown as Python shows it, without the
frames of this file. When the last statement is an expression and nothing was printed, its value is,
as in a notebook: models forget to print.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import os
import random
import socket
import struct
import sys
import threading
import traceback
import types
from typing import Any

from . import calls

NAME = "program.py"
_ENCODING = "utf-8"


class _Output(io.TextIOWrapper):
    """Standard output that remembers whether anything was written."""

    written = False

    def write(self, text: str, /) -> int:
        self.written = self.written or bool(text)
        return super().write(text)


def connect(stdin: int, stdout: int, stderr: int) -> None:
    """Make these descriptors the standard streams, for C code and for Python."""
    for source, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.set_inheritable(target, True)
    reader = io.BufferedReader(io.FileIO(0, "r", closefd=False))
    writer = io.BufferedWriter(io.FileIO(1, "w", closefd=False))
    errors = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(reader, _ENCODING, "replace")  # type: ignore[misc]
    # By lines: what was printed is there even when the program has to be killed.
    sys.stdout = sys.__stdout__ = _Output(  # type: ignore[misc]
        writer, _ENCODING, "backslashreplace", line_buffering=True
    )
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(  # type: ignore[misc]
        errors, _ENCODING, "backslashreplace", line_buffering=True
    )


def reseed() -> None:
    """The same program gives the same output: no program sees how far another one got."""
    random.seed(0)  # noqa: TID251 - the program's generator, not ours
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(0)


def main_module() -> dict[str, Any]:
    """A fresh `__main__`, and the names a program would find in it."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [NAME]
    module.__dict__["__builtins__"] = __builtins__
    return module.__dict__


def read_all(descriptor: int) -> str:
    with open(descriptor, "rb") as file:
        return file.read().decode(_ENCODING, "replace")


def run(source: str, scope: dict[str, Any], echo: bool) -> int:
    """Run it to its end; the status that Python would exit with."""
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    try:
        tree = ast.parse(source, NAME)
        last = tree.body[-1] if echo and tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, NAME, "exec", dont_inherit=True), scope)
        if isinstance(last, ast.Expr):
            shown = ast.Expression(last.value)
            value = eval(compile(shown, NAME, "eval", dont_inherit=True), scope)
            if value is not None and not getattr(sys.stdout, "written", True):
                print(repr(value))
        return 0
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        _show(error)
        return 1


def _show(error: BaseException) -> None:
    """The traceback from the program's first frame on."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != NAME:
        frame = frame.tb_next
    try:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        traceback.print_exception(type(error), error, frame)
    except BaseException:  # out of memory, or a __str__ that fails
        with contextlib.suppress(OSError):
            os.write(2, f"{type(error).__name__}\n".encode())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()


def run_once(descriptors: list[int], kind: str) -> None:
    """Run the one program of this process, and end the process. `E` shows the value of a last
    expression, `A` answers calls afterwards, `T` runs a check that calls another program."""
    status = 1
    try:
        program, *streams = descriptors
        ends = streams[3:]
        connect(*streams[:3])
        _close_from(3, {program, *ends})
        source, scope = read_all(program), main_module()
        if kind == "T":
            calls.run_check(source, scope, *ends)
            status = 0
            return
        status = run(source, scope, kind == "E")
        if kind == "A" and status == 0:
            calls.Answering(scope).serve(*ends)
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            __import__("atexit")._run_exitfuncs()
    finally:
        _flush()
        os._exit(status)


def serve(descriptor: int) -> None:
    """Run one program after another in the same `__main__`, as the other end asks."""
    try:
        _close_from(3, {descriptor})
        channel = socket.socket(fileno=descriptor)
        scope = main_module()
        while True:
            request, descriptors, _, _ = socket.recv_fds(channel, 16, 4)
            if not request:
                break
            program, *streams = descriptors
            connect(*streams)
            for each in streams:
                os.close(each)
            status = run(read_all(program), scope, request == b"E")
            _flush()
            channel.send(struct.pack("!i", status))
    finally:
        os._exit(0)


def _close_from(first: int, kept: set[int]) -> None:
    """Close all descriptors but these: no channel of the zygote stays in a program's reach."""
    for each in sorted(kept):
        os.closerange(first, each)
        first = each + 1
    os.closerange(first, 1 << 16)


def main(kind: str, *descriptors: str) -> None:
    """A process for one job or session, without walls: `coa.sandbox.slot.PlainSlot`."""
    reseed()
    if kind == "S":
        serve(int(descriptors[0]))
    run_once([int(each) for each in descriptors], kind)
