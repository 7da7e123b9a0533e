"""math: whether an answer is the same number, expression, set or interval as a gold answer.

math-verify compares, in worker processes: sympy may take forever over a few characters, and the
parser may run out of stack or memory. The kernel ends a process that takes too much CPU time over
one answer. CPU time, not the clock: a busy machine must not change a score.

An answer that cannot be read, or that takes too long, is wrong. A gold that is not even equal to
itself is compared as text alone, and a warning says so once. `|` joins no alternatives here: it may
stand for an absolute value.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from coa.errors import ConfigError, MissingExtra, ToolError
from coa.io.machine import cores
from coa.io.progress import say
from coa.io.runs import Json
from coa.io.workers import Work, WorkerDied, WorkerError, WorkerLimits, WorkerPool
from coa.rewards.answers import Checker, Part, normalise
from coa.tasks import Task
from coa.trajectory import Trajectory

_CLOCK = 20.0
"""Seconds by the clock for each second of CPU time, before a process counts as stuck."""
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
"""What ends a process that did nothing wrong, when memory is short for instance."""
_MOST_PROCESSES = 4
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
    if find_spec("math_verify") is None:
        raise MissingExtra("The reward 'math'", "tools")
    pool = WorkerPool(
        "coa.rewards.mathematics:comparer",
        {"cpu_seconds": settings.cpu_seconds},
        settings.processes or min(_MOST_PROCESSES, cores()),
        limits=WorkerLimits(_CLOCK * settings.cpu_seconds, settings.memory_mb),
    )
    try:
        await asyncio.wrap_future(pool.start()[0])  # what is wrong shows before it is needed
        yield MathChecker(pool)
    finally:
        pool.kill()


@asynccontextmanager
async def comparer(settings: Json) -> AsyncIterator[Work]:
    """Says whether any reading of an answer is equal to a gold, in a worker process."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # it warns that it has no time limits of its own

    def parsed(text: str) -> list[Any]:
        try:
            return list(parse(text, fallback_mode="no_fallback", parsing_timeout=None))
        except Exception:  # RecursionError and MemoryError included
            return []

    def same(gold: list[Any], found: list[Any]) -> bool:
        try:
            return bool(gold) and bool(verify(gold, found, timeout_seconds=None))
        except Exception:
            return False

    async def compare(item: Json) -> Json:
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_seconds"])  # its signal ends the process
        given = [found for answer in item["answers"] if (found := parsed(answer))]
        right = any(same(parsed(gold), found) for found in given for gold in item["golds"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        return {"right": right}

    yield compare


class MathChecker:
    """Judges by comparing with every gold answer; any of them is right."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
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
            found = await self._ask(readable, forms(answer))
        if found is True:
            return Part(1.0)
        unsound = [gold for gold in formulas if not await self._is_sound(task, gold)]
        if unsound and len(unsound) == len(golds):
            return Part(0.0, f"the gold answer {unsound[0]!r} is no formula, and another text")
        return Part(0.0, f"stopped by {found}" if isinstance(found, str) else "")

    async def _is_sound(self, task: Task, gold: str) -> bool:
        if gold not in self._sound:
            marked = _marked(gold)
            self._sound[gold] = await self._ask([marked], [marked]) is True
            if not self._sound[gold]:
                say(
                    f"coa: warning: task {task.id}: the gold answer {gold!r} cannot be read as "
                    "mathematics; it is compared as text. Write it as LaTeX, or use another "
                    "reward."
                )
        return self._sound[gold]

    async def _ask(self, golds: list[str], answers: list[str]) -> bool | str:
        """Whether they are equal, or what ended the process that compared them.

        A ToolError says that nobody could compare.
        """
        for _ in range(2):
            try:
                asked = self._pool.submit({"golds": golds, "answers": answers})
                return bool((await asyncio.wrap_future(asked))["right"])
            except WorkerDied as died:
                if not died.late and died.signal not in _FROM_OUTSIDE:
                    return died.signal or "an error"
            except WorkerError as error:  # one that took the place of another did not start, say
                raise ToolError(str(error)) from error
        raise ToolError("the process that compares was lost twice")


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
