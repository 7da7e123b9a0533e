"""tests: whether the program in an answer passes the tests of its task, run in the sandbox.

The program is the last fenced block of the answer, or the answer itself. Every case is a run of its
own in a fresh state. A program that fails, prints too much or takes too long is wrong; a sandbox
that fails judges nobody (None).
"""

from __future__ import annotations

import ast
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, get_args

from coa.errors import RecordError, did_you_mean
from coa.io.settings import check_ranges
from coa.rewards.answers import Part
from coa.sandbox import Limits, Sandbox, SandboxError
from coa.tasks import Task
from coa.tools.code import describe
from coa.trajectory import Trajectory

Compare = Literal["exact", "lines", "tokens", "float"]
COMPARISONS: tuple[str, ...] = get_args(Compare)
TOLERANCE = 1e-6
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_MODULES = "string re datetime collections heapq bisect copy math random statistics itertools"
_MODULES += " functools operator io sys json"
_LIBRARY = "; ".join(
    [
        *(f"from {name} import *" for name in _MODULES.split()),
        "from builtins import *",  # pow and open are meant to be Python's own
        "from typing import *",
        f"import {', '.join(_MODULES.split())}",
        "sys.setrecursionlimit(50_000)\n",
    ]
)
"""What sites with starter code import for everybody, and their starter code relies on; the list is
LiveCodeBench's."""
_PLAIN = """
def _plain_(value):
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict):
        return {key: _plain_(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain_, value))
    if isinstance(value, list) or type(value).__name__ == "deque":
        return list(map(_plain_, value))
    if isinstance(value, frozenset):
        return set(value)
    if isinstance(value, float) and abs(value) == float("inf"):
        said = "1e999" if value > 0 else "-1e999"
        return type("", (float,), {"__repr__": lambda self: said})(value)
    return value
"""
"""What is equal to a literal as one: a Counter, a deque, an array of numpy, an infinity."""


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


@dataclass(frozen=True, slots=True)
class Suite:
    cases: tuple[ProgramCase, ...]
    compare: Compare = "tokens"
    tolerance: float = TOLERANCE
    ignore_case: bool = False
    """`Yes` is YES."""
    library: bool = False
    """What sites import for everybody stands before programs that read their input, too."""


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
    cases += [_as_call(text) or ProgramCase(check=text) for text in _texts(tests, "functional")]
    if not cases:
        raise RecordError(
            "tests: found none; expected stdin with expected_output, function with calls, or "
            "functional."
        )
    return Suite(tuple(cases), compare, float(tolerance), **switches)


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


def _calls(tests: Mapping[str, Any]) -> list[ProgramCase]:
    calls = tests.get("calls") or []
    if not calls:
        return []
    name = tests.get("function")
    if not isinstance(name, str) or not name.isidentifier():
        raise RecordError(f"tests: function is {name!r}, expected the name of what is called.")
    # Sites with starter code have it as a method of `Solution`, which goes first: what a program
    # imports may have the same name, as heapq has merge.
    method = f"hasattr(globals().get('Solution'), {name!r})"
    function = f"(Solution().{name} if {method} else {name})"
    try:
        return [
            ProgramCase(
                call=f"{function}({', '.join(map(repr, each['args']))})",
                values=(each["expected"], *([each["or"]] if "or" in each else [])),
            )
            for each in calls
        ]
    except (KeyError, TypeError):
        raise RecordError("tests: every call needs args (a list) and expected.") from None


def _as_call(check: str) -> ProgramCase | None:
    """`assert CALL == LITERAL`, or `result = CALL; assert result == LITERAL`, as a call with its
    value, which is compared out here."""
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
                    return ProgramCase(call=ast.unparse(call), values=(ast.literal_eval(expected),))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    return None


def program_for(case: ProgramCase, source: str, mark: str, *, library: bool = False) -> str:
    """What runs in the sandbox: the program, and for a call or a check what is asked of it.

    `mark` stands before what we read; a program that cannot know it cannot write it.
    """
    before = "" if "from __future__" in source else _LIBRARY
    if case.output is not None:
        return f"{before}{source}" if library else source
    said = repr(f"\n{mark}")
    if case.call:
        asked = f"_ = {case.call}\n{_PLAIN}print({said} + repr(_plain_(_)))\n"
        return f"{before}{_without(case.call) if before else ''}{source}\n\n{asked}"
    return f"{before}{source}\n\n{case.check}\nprint({said})\n"


def _without(call: str) -> str:
    """What is called is the program's own: `gcd` of the library must not stand in for it."""
    called = ast.parse(call, mode="eval").body
    assert isinstance(called, ast.Call), call
    names = {node.id for node in ast.walk(called.func) if isinstance(node, ast.Name)}
    return f"for _ in {sorted(names)!r}: globals().pop(_, None)\n"


def fault_of(suite: Suite, case: ProgramCase, stdout: str, mark: str) -> str:
    """Why what a program wrote, having ended well, is not what the case asks for; or nothing."""
    if case.output is not None:
        found, wanted = stdout, case.output
        if suite.ignore_case:
            found, wanted = found.lower(), wanted.lower()
        same = same_output(found, wanted, suite.compare, suite.tolerance)
        return "" if same else "another output"
    _, found, said = stdout.rpartition(f"\n{mark}")
    if not found:
        return "it ended before the test did"
    if not case.call:
        return ""
    try:
        value = ast.literal_eval(said.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
        return "another result"
    same = any(same_value(value, wanted, suite.tolerance) for wanted in case.values)
    return "" if same else "another result"


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
    if slack:
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

    def sandbox(self) -> Sandbox:
        """The sandbox that programs are tested in, not opened yet."""
        names = ("seconds", "cpu_seconds", "memory_mb", "output_bytes")
        limits = Limits(**{name: getattr(self, name) for name in names})
        return Sandbox(limits, self.slots, unsafe=self.unsafe)


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

    async def _fault(self, suite: Suite, case: ProgramCase, source: str) -> str:
        """Why a case is not passed; empty when it is."""
        mark = secrets.token_hex(8)
        program = program_for(case, source, mark, library=suite.library)
        outcome = await self._box.run(program, case.stdin)
        if outcome.ended == "ok":
            return fault_of(suite, case, outcome.stdout, mark)
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
