"""tests: whether the program in an answer passes the tests of its task, run in the sandbox.

The program is the last fenced block of the answer, or the answer itself. Every case is a run of its
own in a fresh state. A program that fails, prints too much or takes too long is wrong; a sandbox
that fails judges nobody (None).

Program and judge never share an interpreter. What the program printed, or the value that it says a
call has, is compared out here; a check runs in a sandbox of its own and calls the program by
literals (`coa.sandbox.inside.calls`). In the program's process there is its input and nothing of
the test: no expected value, no source of a check, no word that would mean "passed".
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import json
import math
import re
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import cache
from types import ModuleType
from typing import Any, Literal, get_args

from coa.errors import RecordError, did_you_mean
from coa.io.settings import check_ranges
from coa.rewards.answers import Part
from coa.sandbox import Limits, Outcome, Sandbox, SandboxError
from coa.sandbox.inside import calls
from coa.tasks import Task
from coa.tools.code import describe
from coa.trajectory import Trajectory

Compare = Literal["exact", "lines", "tokens", "float"]
COMPARISONS: tuple[str, ...] = get_args(Compare)
TOLERANCE = 1e-6
_FUTURE = re.compile(r"^from __future__ import [\w, ]+$", re.M)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_MODULES = "string re datetime collections heapq bisect copy math random statistics itertools"
_MODULES += " functools operator io sys json"
_IMPORTS = "; ".join(
    [
        *(f"from {name} import *" for name in _MODULES.split()),
        "from builtins import *",  # pow and open are meant to be Python's own
        "from typing import *",
        f"import {', '.join(_MODULES.split())}",
    ]
)
_LIBRARY = f"{_IMPORTS}; sys.setrecursionlimit(50_000)\n"
"""What sites with starter code import for everybody, and their starter code relies on; the list is
LiveCodeBench's."""


@dataclass(frozen=True, slots=True)
class ProgramCase:
    """One test: either an output, or the value of an expression, or a check that ends well."""

    stdin: str = ""
    output: str | None = None
    call: str = ""
    """An expression over the program's names; its value must be one of `values`."""
    values: tuple[Any, ...] = ()
    check: str = ""
    """A program that raises when it is not satisfied."""
    names: tuple[str, ...] = ()
    """The program's names, as a call or a check uses them."""


@dataclass(frozen=True, slots=True)
class Suite:
    cases: tuple[ProgramCase, ...]
    compare: Compare = "tokens"
    tolerance: float = TOLERANCE
    ignore_case: bool = False
    """`Yes` is YES."""
    library: bool = False
    """What sites import for everybody stands before programs that read their input, too."""
    given: str = ""
    """What a task defines for its programs."""


def read_suite(tests: Any) -> Suite:
    """The suite in `task.gold["tests"]`; what is wrong with it is a RecordError."""
    if not isinstance(tests, Mapping):
        raise RecordError(f"tests: found a {type(tests).__name__}, expected an object.")
    compare = tests.get("compare", "tokens")
    if compare not in COMPARISONS:
        hint = did_you_mean(str(compare), COMPARISONS)
        raise RecordError(f"tests: compare {compare!r} is not a choice.{hint}")
    tolerance = tests.get("tolerance", TOLERANCE)
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or tolerance < 0:
        raise RecordError(f"tests: tolerance is {tolerance!r}, expected a number of 0 or more.")
    switches = {name: tests.get(name, False) for name in ("ignore_case", "library")}
    for name, found in switches.items():
        if not isinstance(found, bool):
            raise RecordError(f"tests: {name} is {found!r}, expected true or false.")
    tests = _from_apps(tests)
    given, wanted = _texts(tests, "stdin"), _texts(tests, "expected_output")
    if len(given) != len(wanted):
        raise RecordError(f"tests: {len(given)} stdin and {len(wanted)} expected_output.")
    cases = [ProgramCase(stdin, output) for stdin, output in zip(given, wanted, strict=True)]
    cases += _calls(tests)
    function = _function(tests) if tests.get("function") else ""
    cases += [_as_call(text) or _check(text, function) for text in _texts(tests, "functional")]
    if not cases:
        raise RecordError(
            "tests: found none; expected stdin with expected_output, function with calls, or "
            "functional."
        )
    before = "\n".join(_texts(tests, "given"))
    return Suite(tuple(cases), compare, float(tolerance), given=before, **switches)


def suite_of(task: Task) -> Suite:
    """The suite of a task that has one; what is wrong with it names the task."""
    try:
        return read_suite(task.gold["tests"])
    except RecordError as error:
        raise RecordError(f"task {task.id}: {error}") from None


def _from_apps(tests: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same tests by our names. APPS wraps some results in a list: either form is right."""
    if "inputs" not in tests:
        return tests
    given, wanted = tests["inputs"], tests.get("outputs")
    if not isinstance(given, list) or not isinstance(wanted, list) or len(given) != len(wanted):
        raise RecordError("tests: inputs and outputs are not two lists of the same length.")
    if not tests.get("fn_name"):
        return {**tests, "stdin": given, "expected_output": wanted}
    calls = [
        {"args": args, "expected": expected, "or": expected[0]}
        if isinstance(expected, list) and len(expected) == 1
        else {"args": args, "expected": expected}
        for args, expected in zip(given, wanted, strict=True)
    ]
    return {**tests, "function": tests["fn_name"], "calls": calls}


def _texts(tests: Mapping[str, Any], key: str) -> list[str]:
    found = tests.get(key) or []
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, Sequence) or not all(isinstance(text, str) for text in found):
        raise RecordError(f"tests: {key} is not a list of texts.")
    return list(found)


def _function(tests: Mapping[str, Any]) -> str:
    name = tests.get("function")
    if not isinstance(name, str) or not name.isidentifier():
        raise RecordError(f"tests: function is {name!r}, expected the name of what is called.")
    return name


def _calls(tests: Mapping[str, Any]) -> list[ProgramCase]:
    calls = tests.get("calls") or []
    if not calls:
        return []
    name = _function(tests)
    # Sites with starter code have it as a method of `Solution`, which goes first: what a program
    # imports may have the same name, as heapq has merge.
    method = f"hasattr(globals().get('Solution'), {name!r})"
    function = f"(Solution().{name} if {method} else {name})"
    try:
        return [
            ProgramCase(
                call=f"{function}({', '.join(map(repr, each['args']))})",
                values=(each["expected"], *([each["or"]] if "or" in each else [])),
                names=("Solution", name),
            )
            for each in calls
        ]
    except (KeyError, TypeError):
        raise RecordError("tests: every call needs args (a list) and expected.") from None


def _as_call(check: str) -> ProgramCase | None:
    """`assert CALL == LITERAL`, or `result = CALL; assert result == LITERAL`, as a call with its
    value, which is compared out here. All that the call does is the program's own."""
    try:
        match ast.parse(check.strip()).body:
            case [ast.Assign(targets=[ast.Name(id=name)], value=call), ast.Assert(test=test)]:
                pass
            case [ast.Assert(test=ast.Compare(left=call) as test)]:
                name = ""
            case _:
                return None
        match test:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[expected]):
                same = left is call or (isinstance(left, ast.Name) and left.id == name)
                if same and isinstance(call, ast.Call):
                    names = (_called(call),)
                    values = (ast.literal_eval(expected),)
                    return ProgramCase(call=ast.unparse(call), values=values, names=names)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    return None


def _called(node: ast.expr) -> str:
    """The name that an expression of attributes and calls with literals begins with; ValueError for
    another one, such as `sorted(f(1))`, where not all is the program's."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name) if name[0] != "_" and name not in calls.TOLD:
            return _called(value)
        case ast.Call(func=function, args=args, keywords=keywords):
            for each in (*args, *(keyword.value for keyword in keywords)):
                ast.literal_eval(each)
            return _called(function)
    raise ValueError


def _check(check: str, function: str) -> ProgramCase:
    """A check with the names in it that are the program's: the function, and what neither the check
    nor Python nor the library defines. A name of the library is the program's where there is no
    other: a program must not get to say what `sqrt` means in its test."""
    try:
        nodes = list(ast.walk(ast.parse(check)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ProgramCase(check=check)
    used, bound = set[str](), set(dir(builtins))
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=other):
                bound.add(other or name.partition(".")[0])
    library = _library()
    own = {name for name in used - bound if name not in library}
    own |= {function} if function else set()
    if not own:
        own = {name for name in used - bound if not isinstance(library[name], ModuleType)}
    if not own and len(used) == 1 and used <= set(dir(builtins)):
        own = used  # a function that has the name of one of Python's
    return ProgramCase(check=check, names=tuple(sorted(own)))


@cache
def _library() -> dict[str, Any]:
    """What the library defines."""
    found: dict[str, Any] = {}
    exec(_IMPORTS, found)
    return found


def program_for(suite: Suite, case: ProgramCase, source: str) -> str:
    """What runs in the sandbox: the program, after what it may expect to be there."""
    future = "".join(f"{line.strip()}; " for line in _FUTURE.findall(source))
    before, source = f"{future}{_LIBRARY}", _FUTURE.sub("", source)
    if case.output is not None:
        return f"{before}{source}" if suite.library else f"{future}{source}"
    # What is called is the program's own: `gcd` of the library must not stand in for it.
    before += f"for _ in {list(case.names)!r}: globals().pop(_, None)\n{suite.given}\n"
    return f"{before}{source}\n"


def check_for(case: ProgramCase, keeps: bool = False) -> str:
    """What runs in the sandbox of checks. `keeps`: a call with a result changes no argument."""
    return f"{_LIBRARY}_program_(globals(), {list(case.names)!r}, {keeps})\n{case.check}\n"


def judge_output(suite: Suite, case: ProgramCase, stdout: str) -> Part:
    """What a program printed, having ended well, against what the case asks for."""
    found, wanted = stdout, case.output or ""
    if suite.ignore_case:
        found, wanted = found.lower(), wanted.lower()
    same = same_output(found, wanted, suite.compare, suite.tolerance)
    return Part(1.0) if same else Part(0.0, "another output")


def judge_reply(suite: Suite, case: ProgramCase, said: str) -> Part:
    """What a program says that a call gave, having ended well, against what it should give."""
    if not said:
        return Part(0.0, _ENDED_EARLY, suspect=True)
    line, _, more = said.partition("\n")
    try:
        reply = calls.read_reply(line, 1)
        value = calls.decode(reply.get("value"))
    except ValueError:
        return Part(0.0, calls.FORGED, suspect=True)
    if more:
        return Part(0.0, calls.FORGED, suspect=True)
    if "raised" in reply:
        return Part(0.0, f"{', '.join(reply['raised'][:1])}: {reply.get('text', '')}"[:_SAID])
    if "held" in reply:
        lies = "__eq__" in str(reply.get("own"))
        return Part(0.0, f"its result is a {reply.get('type')}, no literal"[:_SAID], lies)
    same = any(same_value(value, wanted, suite.tolerance) for wanted in case.values)
    return Part(1.0) if same else Part(0.0, "another result")


def same_output(found: str, wanted: str, compare: str, tolerance: float) -> bool:
    """`exact`: by lines, but for spaces at their ends and empty lines at the end. `lines`: by
    lines, of each its words, and 1.0 is 1. `tokens`: by words, wherever lines end. `float`: by
    words, and numbers within the tolerance."""
    if compare == "exact":
        return _lines(found) == _lines(wanted)
    if compare == "lines":
        ours, theirs = found.strip().splitlines(), wanted.strip().splitlines()
        return len(ours) == len(theirs) and all(
            same_output(one, other, "tokens", tolerance)
            for one, other in zip(ours, theirs, strict=True)
        )
    given, asked = found.split(), wanted.split()
    slack = tolerance if compare == "float" else 0.0
    return len(given) == len(asked) and all(map(lambda a, b: _same(a, b, slack), given, asked))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same(found: str, wanted: str, slack: float) -> bool:
    if found == wanted:
        return True
    if not (_NUMBER.fullmatch(found) and _NUMBER.fullmatch(wanted)):
        return False
    if slack and math.isfinite(float(found)) and math.isfinite(float(wanted)):
        return _near(float(found), float(wanted), slack)
    if found.lstrip("+-").isdigit() and wanted.lstrip("+-").isdigit():
        return False  # 007 may be a code, and is not 7
    try:
        return Decimal(found) == Decimal(wanted)
    except InvalidOperation:
        return False


def same_value(found: Any, wanted: Any, tolerance: float) -> bool:
    """Equal as Python values; a tuple may be a list, as JSON has no other, and floats be near."""
    if isinstance(wanted, (list, tuple)):
        return (
            isinstance(found, (list, tuple))
            and len(found) == len(wanted)
            and all(map(lambda a, b: same_value(a, b, tolerance), found, wanted))
        )
    if isinstance(wanted, Mapping):
        return (
            isinstance(found, Mapping)
            and found.keys() == wanted.keys()
            and all(same_value(found[key], wanted[key], tolerance) for key in wanted)
        )
    if isinstance(found, bool) is not isinstance(wanted, bool):
        return False
    if isinstance(found, float) or isinstance(wanted, float):
        numbers = isinstance(found, (int, float)) and isinstance(wanted, (int, float))
        return numbers and _near(found, wanted, tolerance)
    return bool(found == wanted)


def _near(found: float, wanted: float, slack: float) -> bool:
    try:
        return math.isclose(found, wanted, rel_tol=slack, abs_tol=slack)
    except OverflowError:
        return False


_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.S | re.M)
_NOT_PYTHON = {"sh", "bash", "shell", "text", "txt", "stdin", "input", "output", "console"}
_SAID = 200
"""Characters of a program's last words in a reason."""
_ENDED_EARLY = "it ended before the test did"
_CHANGED = "the test passes only with the arguments that the program changed"
_CHECKS_S = 5.0
"""How much longer by the clock a check may take than the program that it waits for."""


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

    def __post_init__(self) -> None:
        check_ranges(self, "reward.tests", {"at least 1": "slots"})
        self.sandbox()  # says what is wrong with the limits

    def sandbox(self, longer_s: float = 0.0) -> Sandbox:
        """The sandbox that programs are tested in, not opened yet."""
        names = ("cpu_seconds", "memory_mb", "output_bytes")
        limits = {name: getattr(self, name) for name in names}
        return Sandbox(
            Limits(seconds=self.seconds + longer_s, **limits), self.slots, unsafe=self.unsafe
        )


@asynccontextmanager
async def open_programs(settings: ProgramSettings) -> AsyncIterator[ProgramChecker]:
    """The checker, with its sandboxes."""
    async with AsyncExitStack() as held:
        box = await held.enter_async_context(settings.sandbox())
        yield ProgramChecker(box, settings, held)


class ProgramChecker:
    """Judges by running the program of an answer."""

    def __init__(
        self, box: Sandbox, settings: ProgramSettings, held: AsyncExitStack | None = None
    ) -> None:
        self._box, self._settings = box, settings
        self._held = held or AsyncExitStack()
        self._checks: Sandbox | None = None
        self._opening = asyncio.Lock()

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
        """One case that fails decides, and otherwise one that cannot be judged."""
        passed, first, suspect, unjudged = 0.0, "", False, ""
        for number, case in enumerate(suite.cases, start=1):
            found = await self._judge(suite, case, source)
            reason = f"case {number} of {len(suite.cases)}: {found.reason}"
            suspect = suspect or found.suspect
            if found.score is None:
                unjudged = unjudged or reason
            elif found.score == 0:
                first = first or reason
                if not self._settings.partial:
                    return Part(0.0, first, suspect)
            passed += found.score or 0.0
        if unjudged:
            return Part(None, unjudged, suspect)
        return Part(passed / len(suite.cases), first, suspect)

    async def _judge(self, suite: Suite, case: ProgramCase, source: str) -> Part:
        program = program_for(suite, case, source)
        if case.check:
            return await self._judge_check(case, program)
        asked = {"n": 1, "eval": case.call, "names": case.names}
        ask = json.dumps(asked) + "\n" if case.call else ""
        outcome = await self._box.run(program, case.stdin, ask=ask)
        if outcome.ended != "ok":
            return self._failed(outcome)
        if case.call:
            return judge_reply(suite, case, outcome.reply)
        return judge_output(suite, case, outcome.stdout)

    async def _judge_check(self, case: ProgramCase, program: str, keeps: bool = False) -> Part:
        if not case.names:
            return Part(None, "the test names nothing of the program, or is no Python")
        async with self._opening:
            if self._checks is None:
                checks = self._settings.sandbox(_CHECKS_S)
                self._checks = await self._held.enter_async_context(checks)
        checked, outcome = await self._checks.check(check_for(case, keeps), program, self._box)
        if checked.ended != "ok":
            return Part(0.0, f"the test did not come to its end: {checked.ended}")
        try:
            found = json.loads(checked.stdout)
            verdict, reason, suspect = found["verdict"], found["reason"], found["suspect"]
        except (ValueError, LookupError, TypeError):
            return Part(None, "the test gave no verdict")
        if verdict == calls.PASSED:
            if found["changed"] and not keeps:
                # What the test found right may be what the program made of the test's own values,
                # as `sort(xs) == sorted(xs)` is of one that empties its list.
                same = (await self._judge_check(case, program, keeps=True)).score == 1.0
                return Part(1.0) if same else Part(None, _CHANGED, suspect=True)
            return Part(1.0)
        if verdict == calls.UNJUDGED:
            return Part(None, str(reason), bool(suspect))
        return Part(0.0, str(reason), bool(suspect)) if reason else self._failed(outcome)

    def _failed(self, outcome: Outcome) -> Part:
        """Why a program did not live to the end of its test."""
        if outcome.ended == "ok":
            return Part(0.0, _ENDED_EARLY, suspect=True)
        if outcome.ended == "timeout":
            limits = self._settings
            took = f"it took more than {limits.cpu_seconds} s of CPU, or {limits.seconds:g} s"
            return Part(0.0, took)
        said = describe(replace(outcome, stdout=""), self._box.limits)
        # A call that only attackers make ends the process by this signal.
        forbidden = outcome.exit == -signal.SIGSYS
        return Part(0.0, " ".join(said.split())[-_SAID:], suspect=forbidden)


def program_in(answer: str) -> str:
    """The last fenced program of an answer, or all of it where there is no fence."""
    fences = [(found[1].lower(), found[2]) for found in _FENCE.finditer(answer)]
    programs = [text for language, text in fences if language not in _NOT_PYTHON]
    if programs:
        return programs[-1]
    return "" if fences else answer.strip("\n")
