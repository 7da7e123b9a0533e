"""tests: whether the program in an answer passes the tests of its task, run in the sandbox.

The program is the last fenced block of the answer, or the answer itself. Every case is a run of its
own in a fresh state. A program that fails, prints too much or takes too long is wrong; a sandbox
that fails judges nobody (None).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from coa.errors import ConfigError
from coa.rewards.scored import Checker, Part
from coa.rewards.suites import Case, Suite, fault_of, program_for, suite_of
from coa.tasks.task import Task
from coa.tools.code import describe
from coa.tools.sandbox import Limits, Outcome, Sandbox, SandboxError
from coa.trajectory import Trajectory

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.S | re.M)
_NOT_PYTHON = {"sh", "bash", "shell", "text", "txt", "stdin", "input", "output", "console"}
_SAID = 200
"""Characters of a program's last words in a reason."""


@dataclass(frozen=True)
class ProgramSettings:
    """How programs are tested; see docs/rewards.md."""

    partial: bool = False
    """The share of cases that pass; otherwise all must."""
    cpu_seconds: int = 6
    seconds: float = 30.0
    """By the clock: longer, so that a busy machine does not decide."""
    memory_mb: int = 1024
    output_bytes: int = 1 << 20
    slots: int = 2
    """Programs at once."""
    unsafe: bool = False
    """Run them without a sandbox, with all your rights."""

    def limits(self) -> Limits:
        return replace(
            Limits(),
            seconds=self.seconds,
            cpu_seconds=self.cpu_seconds,
            memory_mb=self.memory_mb,
            output_bytes=self.output_bytes,
        )

    def __post_init__(self) -> None:
        self.limits()
        if self.slots < 1:
            raise ConfigError(f"reward.tests: slots is {self.slots!r}, expected 1 or more.")


@asynccontextmanager
async def open_tests(settings: ProgramSettings) -> AsyncIterator[Checker]:
    """The checker, with its sandbox."""
    box = Sandbox(settings.limits(), settings.slots, unsafe=settings.unsafe)
    async with box:
        yield ProgramChecker(box, settings)


class ProgramChecker:
    """Judges by running the program of an answer."""

    def __init__(self, box: Sandbox, settings: ProgramSettings) -> None:
        self._box, self._settings = box, settings

    async def __call__(self, task: Task, trajectory: Trajectory) -> Part:
        if "tests" not in task.gold:
            return Part(None, "the task has no tests")
        suite = suite_of(task)
        source = program_in(trajectory.answer or "")
        if not source.strip():
            return Part(0.0, "no program")
        try:
            return await self._run(suite, source)
        except SandboxError as error:
            return Part(None, f"the sandbox failed: {error}")

    async def _run(self, suite: Suite, source: str) -> Part:
        passed, first = 0, ""
        for number, case in enumerate(suite.cases, start=1):
            fault = await self._fault(suite, case, source)
            passed += not fault
            if fault:
                first = first or f"case {number} of {len(suite.cases)}: {fault}"
                if not self._settings.partial:
                    return Part(0.0, first)
        return Part(passed / len(suite.cases), first)

    async def _fault(self, suite: Suite, case: Case, source: str) -> str:
        """Why a case is not passed; empty when it is."""
        mark = secrets.token_hex(8)
        outcome = await self._box.run(
            program_for(case, source, mark, library=suite.library), case.stdin
        )
        if outcome.ended != "ok":
            return self._last_words(outcome)
        return fault_of(suite, case, outcome.stdout, mark)

    def _last_words(self, outcome: Outcome) -> str:
        if outcome.ended == "timeout":
            limits = self._settings
            return f"it took more than {limits.cpu_seconds} s of CPU, or {limits.seconds:g} s"
        said = describe(replace(outcome, stdout=""), self._box.limits)
        return " ".join(said.split())[-_SAID:]


def program_in(answer: str) -> str:
    """The last fenced program of an answer, or all of it where there is no fence."""
    fences = [(found[1].lower(), found[2]) for found in _FENCE.finditer(answer)]
    programs = [text for language, text in fences if language not in _NOT_PYTHON]
    if programs:
        return programs[-1]
    return "" if fences else answer.strip("\n")
