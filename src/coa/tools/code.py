"""code: the tool that runs Python in a sandbox, and what the model is shown of it.

The block holds a program in a ```py fence (several are one program), or bare; a ```sh fence after
it is the standard input. What comes back is short and always worded the same, since small models
learn from it: the output, then on failure the program's own lines and the last line of the
traceback. It holds no time, no path and no address, so that the same program gives the same text.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import metadata

from coa.grammar.parse import parse_code
from coa.io.machine import signal_name
from coa.sandbox import Limits, Outcome, Sandbox
from coa.tools.base import Tool, ToolMistake, fingerprint_of

NOTHING = "The program ran but printed nothing."
EMPTY = "the block holds no program; write it in a ```py fence."
_LOST = " All variables are lost."
_SPARE_S = 30.0
"""On top of the program's own time: a slot may have to be started anew."""
_FRAMES, _MESSAGE_CHARS = 3, 600
_FRAME = re.compile(r'^  File "program\.py", line (\d+).*\n(?:    (.*)\n)?', re.M)
_SAYS = re.compile(r"^(?! )", re.M)
"""In a traceback only the exception stands at the start of a line."""
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,16}\b")


def code_tool(box: Sandbox, *, persistent: bool = False, max_chars: int = 2000) -> Tool:
    """The `code` tool over an open sandbox.

    `persistent`: the programs of one rollout share their variables, in a process of their own.
    """

    async def run(block: str) -> str:
        source, stdin = _read(block)
        return describe(await box.run(source, stdin, echo=True), box.limits)

    @contextlib.asynccontextmanager
    async def session() -> AsyncIterator[Callable[[str], Awaitable[str]]]:
        async with box.session() as state:

            async def run_on(block: str) -> str:
                source, stdin = _read(block)
                outcome = await state.run(source, stdin, echo=True)
                return describe(outcome, box.limits) + (_LOST if state.lost else "")

            yield run_on

    about = "Run a Python program and see what it prints; no network"
    if box.packages:
        about += f"; {', '.join(box.packages)} can be imported"
    if persistent:
        about += "; variables stay from one call to the next"
    return Tool(
        "code",
        run,
        about=about,
        body="code",
        timeout_s=box.limits.seconds + _SPARE_S,
        max_chars=max_chars,
        concurrency=box.sessions if persistent else box.slots,
        fingerprint=fingerprint_of(
            sys.version_info[:2], _releases(box.asked), box.limits, box.unsafe
        ),
        session=session if persistent else None,
        pure=not persistent,
    )


def _releases(packages: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each with its release as for Python itself ('2.3'): a mere correction keeps recordings."""
    found = []
    for name in packages:
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = ""
        found.append((name, ".".join(installed.split(".")[:2])))
    return found


def _read(block: str) -> tuple[str, str]:
    code = parse_code(block)
    if not code.source.strip():
        raise ToolMistake(EMPTY)
    return code.source, code.stdin


def describe(outcome: Outcome, limits: Limits) -> str:
    """What the model is shown."""
    parts = [outcome.stdout.rstrip()]
    if outcome.ended == "ok":
        if not parts[0]:
            parts = [outcome.stderr.strip() or NOTHING]
    elif outcome.ended == "error":
        parts.append(explain(outcome))
    else:
        parts.append(_stopped(outcome, limits))
    return _ADDRESS.sub("at 0x...", "\n".join(part for part in parts if part))


def explain(outcome: Outcome) -> str:
    """The program's own lines in a traceback, innermost last, and what the exception says."""
    text = outcome.stderr.strip("\n")
    text = text[max(0, text.rfind("Traceback (most recent call last):\n")) :]
    frames = list(_FRAME.finditer(text))
    if not frames:
        return text[-_MESSAGE_CHARS:] or f"The program exited with status {outcome.exit}."
    lines = [f"line {each[1]}: {(each[2] or '').strip()}".rstrip(": ") for each in frames]
    message = _SAYS.search(text, frames[-1].end())
    said = text[message.start() :] if message else ""
    return "\n".join([*lines[:1], *lines[1:][-(_FRAMES - 1) :], said[:_MESSAGE_CHARS]])


def _stopped(outcome: Outcome, limits: Limits) -> str:
    if outcome.ended == "timeout":
        return f"The program was stopped after {limits.seconds:g} s."
    if outcome.ended == "memory":
        return f"The program was stopped: it needs more than {limits.memory_mb} MB of memory."
    if outcome.ended == "output":
        return f"The program was stopped: it printed more than {limits.output_bytes} bytes."
    if outcome.ended == "files":
        return f"The program was stopped: it made more than {limits.files} files."
    if outcome.exit == -signal.SIGSYS:
        return "The program was stopped: it asked the system for something that is not allowed."
    return f"The program was ended by {signal_name(-(outcome.exit or 0))}."
