"""math: whether an answer is the same number, expression, set or interval as a gold answer.

math-verify compares, in a process of its own (see `math_process`). Here texts are made ready for
it, and its verdict is read: an answer that cannot be read, or that takes too long, is wrong. A gold
that is not even equal to itself is compared as text alone, and a warning says so once.
`|` joins no alternatives here: it may stand for an absolute value.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from coa.errors import ConfigError, MissingExtra, ToolError
from coa.io.machine import cores
from coa.rewards.answers import Checker, Part, normalise
from coa.tasks import Task
from coa.trajectory import Trajectory

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


LONGEST_ANSWER = 2000
"""Characters."""
_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s*\{([^{}]*)\}\s*")
_WORDS = re.compile(r"(?=.*[^\W\d_]{4})[^\W\d_]+(?:[ -][^\W\d_]+)*")
"""Four letters or more are a word; fewer may be a product, as in `abc`."""
_POWER = re.compile(r"\s*\*\*\s*(\w+|\([^()]*\))")
_SYMBOL = re.compile(r"\b(?:pi|oo)\b")
_SENTENCE = re.compile(r"(?:[A-Za-z]{2,}\s+){2,}|\banswer\b", re.I)
_LAST_CLAIM = re.compile(r".*(?:\b(?:is|are|be|equals?)\b|[:=])\s*(.+)", re.S)


@dataclass(frozen=True)
class MathSettings:
    """Limits for comparing one answer; see docs/rewards.md."""

    cpu_seconds: float = 5.0
    memory_mb: int = 2048
    processes: int = 0
    """At most so many; 0: one a core, up to four."""

    def __post_init__(self) -> None:
        if not self.cpu_seconds > 0 or self.memory_mb < 256 or self.processes < 0:
            raise ConfigError(
                f"reward.math: cpu_seconds {self.cpu_seconds!r}, memory_mb {self.memory_mb!r}, "
                f"processes {self.processes!r}: expected more than 0, at least 256, 0 or more."
            )


@asynccontextmanager
async def open_math(settings: MathSettings) -> AsyncIterator[Checker]:
    """The checker, with its processes."""
    processes = MathProcesses(settings.cpu_seconds, settings.memory_mb, settings.processes)
    try:
        await processes.start()
        yield MathChecker(processes)
    finally:
        await processes.close()


class MathChecker:
    """Judges by comparing with every gold answer; any of them is right."""

    def __init__(self, processes: MathProcesses) -> None:
        self._processes = processes
        self._sound: dict[str, bool] = {}
        """Gold -> whether it is equal to itself."""

    async def __call__(self, task: Task, trajectory: Trajectory) -> Part:
        golds = [gold.strip() for gold in task.answers if gold.strip()]
        if not golds:
            return Part(None, "the task has no gold answer")
        answer = (trajectory.answer or "").strip()
        if not answer:
            return Part(0.0, "no answer")
        if len(answer) > LONGEST_ANSWER:
            return Part(0.0, f"longer than {LONGEST_ANSWER} characters")
        if any(same_text(gold, answer) for gold in golds):
            return Part(1.0)
        said = normalise(_plain(answer))
        if said and any(said == normalise(words_in(gold) or "") for gold in golds):
            return Part(1.0)
        try:
            return await self._compare(task, golds, answer)
        except ToolError as error:
            return Part(None, str(error))

    async def _compare(self, task: Task, golds: list[str], answer: str) -> Part:
        formulas = [gold for gold in golds if words_in(gold) is None]
        found: bool | str = False
        if readable := [_marked(gold) for gold in formulas if self._sound.get(gold, True)]:
            found = await self._processes.ask(readable, forms(answer))
        if found is True:
            return Part(1.0)
        unsound = [gold for gold in formulas if not await self._is_sound(task, gold)]
        if unsound and len(unsound) == len(golds):
            return Part(0.0, f"the gold answer {unsound[0]!r} is no formula, and another text")
        return Part(0.0, f"stopped by {found}" if isinstance(found, str) else "")

    async def _is_sound(self, task: Task, gold: str) -> bool:
        if gold not in self._sound:
            marked = _marked(gold)
            self._sound[gold] = await self._processes.ask([marked], [marked]) is True
            if not self._sound[gold]:
                print(
                    f"coa: warning: task {task.id}: the gold answer {gold!r} cannot be read as "
                    "mathematics; it is compared as text. Write it as LaTeX, or use another "
                    "reward.",
                    file=sys.stderr,
                )
        return self._sound[gold]


def forms(answer: str) -> list[str]:
    """The ways to read an answer: as it stands, what a sentence claims at its end, and what a
    program printed, `2*pi` or `n**2 - 1`.

    A number is never picked out of a formula: `2x` is not 2, and `5, 6` is not 6.
    """
    text = _bare(answer)
    if _SENTENCE.search(text) and not any(mark in text for mark in _DELIMITERS):
        claim = _LAST_CLAIM.fullmatch(text)
        if claim is None:
            return []
        text = _bare(claim[1])
    read = [_marked(text)]
    if "\\" not in text and (printed := _as_latex(text)) != text:
        read.append(_marked(printed))
    return read


def _as_latex(text: str) -> str:
    """Python's or sympy's way to write a power, pi and infinity as LaTeX has it."""
    text = _POWER.sub(r"^{\1}", text)
    return _SYMBOL.sub(lambda found: {"pi": r"\pi ", "oo": r"\infty "}[found[0]], text)


def same_text(gold: str, answer: str) -> bool:
    return "".join(_bare(gold).split()) == "".join(_bare(answer).split())


def words_in(gold: str) -> str | None:
    """The words of a gold answer that is no formula, such as a name; None for a formula.

    Read as a formula `even` would be a product of letters, and equal to `neve`.
    """
    bare = _bare(gold)
    wrapped = _TEXT.fullmatch(bare)
    if wrapped:
        return wrapped[1]
    return bare if _WORDS.fullmatch(bare) else None


def _plain(answer: str) -> str:
    wrapped = _TEXT.fullmatch(_bare(answer))
    return wrapped[1] if wrapped else answer


def _bare(text: str) -> str:
    """Without the dollars and the box around it, those of money, and a full stop at the end."""
    text = text.strip()
    if len(text) > 1 and text[-1] == "." and not text.endswith("\\."):
        text = text[:-1].rstrip()
    if len(text) > 1 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        text = text[1:-1].strip()
    if text.startswith("\\boxed{") and _closing(text, len("\\boxed{")) == len(text) - 1:
        text = text.removeprefix("\\boxed{")[:-1].strip()
    return text.replace("\\$", "")


def _closing(text: str, at: int) -> int:
    """Where the brace is closed that was opened before `at`; -1 where it is not."""
    depth = 1
    for place in range(at, len(text)):
        if text[place - 1] != "\\":
            depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return place
    return -1


def _marked(text: str) -> str:
    """As math-verify finds a formula: between dollars."""
    bare = _bare(text)
    return bare if any(mark in bare for mark in _DELIMITERS) else f"${bare}$"
