"""Readers of benchmarks whose answer is a program: tests become `gold["tests"]`, run in a sandbox.

LiveCodeBench publishes its hidden tests as base64 over zlib over a pickle of JSON text. A pickle
can run code, so it is opened by a reader that knows no class at all: texts, numbers and lists come
out, anything else is an error. Nothing here runs a program.
"""

from __future__ import annotations

import ast
import base64
import binascii
import io
import pickle
import zlib
from typing import Any

from coa.environments.published.questions import PublishedRow, task_of
from coa.io.runs import Json
from coa.tasks import Task

MOST_BYTES = 4 << 20
"""Of a problem's tests: a task file has to be read whole. The longest cases beyond it are left."""
MOST_OUTPUT = 1 << 20
"""What the reward `tests` reads of a program."""
_MOST_UNPACKED = 1 << 30
_STDIN = "Read the input from standard input and print the answer to standard output."
_ANSWER = "Answer with one complete Python program in a ```py fence."
SUITE_KEYS = (
    *("stdin", "expected_output", "functional", "function", "calls", "given"),
    *("inputs", "outputs", "fn_name"),
)
"""Keys of tests that the reward `tests` reads as they are."""
SUITE_CHOICES = ("compare", "tolerance", "ignore_case", "library")
_AS_LIVECODEBENCH = {"compare": "lines", "library": True}
_AS_CODECONTESTS = {"compare": "float", "tolerance": 1e-5, "ignore_case": True}
"""How their own testers compare."""
_SITES = ("unknown", "codechef", "codeforces", "hackerearth", "codejam", "atcoder", "aizu")
"""CodeContests numbers the sites."""


def livecodebench(row: PublishedRow) -> Task:
    """LiveCodeBench, as its authors publish it, or AFM's rows with the public tests."""
    meta = {name: row.get(name) for name in ("platform", "contest_date", "question_title")}
    meta |= {"family": row.get("platform"), "level": row.get("difficulty")}
    if isinstance(date := meta["contest_date"], (int, float)) or hasattr(date, "isoformat"):
        meta["contest_date"] = str(date)
    named = row.get("question_id", "index")
    if row.get("ground_truth") is not None:
        tests = _suite_in(row, _AS_LIVECODEBENCH)
        return task_of(row, row.text("question"), (), meta, {"tests": tests}, named)
    starter = str(row.get("starter_code") or "")
    tests, left = _livecode_tests(row)
    meta["tests_left_out"] = left or None
    asked = f"Use this starter code:\n```py\n{starter}\n```" if starter.strip() else _STDIN
    question = f"{row.text('question_content', 'question')}\n\n{asked}\n{_ANSWER}"
    return task_of(row, question, (), meta, {"tests": tests}, named)


def codecontests(row: PublishedRow) -> Task:
    """CodeContests: its public, hidden and generated tests together."""
    site = row.get("source")
    rating = row.get("cf_rating") or None  # 0 stands for none
    numbered = isinstance(site, int) and 0 <= site < len(_SITES)
    meta = {"family": _SITES[site] if numbered else site, "level": rating}
    if row.get("ground_truth") is not None:
        gold = {"tests": _suite_in(row, _AS_CODECONTESTS)}
        return task_of(row, row.text("question"), (), meta, gold, row.get("name", "index"))
    cases: list[tuple[str, str]] = []
    for name in ("public_tests", "private_tests", "generated_tests"):
        cases += _pairs(row, name)
    if not cases:
        row.need("public_tests")
        raise row.error("holds no test")
    kept = _within(cases)
    meta["tests_left_out"] = len(cases) - len(kept) or None
    given, said = [given for given, _ in kept], [said for _, said in kept]
    suite = {"stdin": given, "expected_output": said, **_AS_CODECONTESTS}
    question = f"{row.text('description')}\n\n{_STDIN}\n{_ANSWER}"
    return task_of(row, question, (), meta, {"tests": suite}, row.get("name"))


def humaneval(row: PublishedRow) -> Task:
    """HumanEval: a function to complete; `check` of its tests must run through."""
    prompt, entry = str(row.need("prompt")), row.text("entry_point")
    others = _others(row, prompt, entry)
    check = f"{others}\n{row.need('test')}\ncheck({entry})\n"
    question = (
        "Complete this Python function. Answer with the whole function, and what it needs, in one "
        f"```py fence.\n\n```py\n{prompt.rstrip()}\n```"
    )
    gold: Json = {"tests": {"functional": check, "function": entry}}
    if others:
        gold["tests"]["given"] = others
    if solution := row.get("canonical_solution"):
        gold["solution"] = f"{prompt}{solution}"
    return task_of(row, question, (), {"entry_point": entry}, gold)


def _others(row: PublishedRow, prompt: str, entry: str) -> str:
    """What a prompt defines beside the function to complete: the tests may call it, too."""
    try:
        defined = ast.parse(prompt).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # all that a parser raises
        raise row.error("'prompt' is not Python") from None
    kept = [each for each in defined if getattr(each, "name", "") != entry]
    return "\n".join(ast.unparse(each) for each in kept)


# -- tests -----------------------------------------------------------------------------------


def _suite_in(row: PublishedRow, how: Json) -> Json:
    """The tests of a row, compared as the row says, or else as the benchmark does."""
    truth = row.get("ground_truth")
    held = row.parsed("ground_truth", truth) if isinstance(truth, str) else truth
    tests = (
        {k: v for k, v in held.items() if k in SUITE_KEYS and v} if isinstance(held, dict) else {}
    )
    if not tests:
        raise row.error(f"'ground_truth' holds no tests, expected one of {', '.join(SUITE_KEYS)}")
    return tests | how | {key: held[key] for key in SUITE_CHOICES if key in held}


def _pairs(row: PublishedRow, name: str) -> list[tuple[str, str]]:
    """Inputs with their outputs, from two lists."""
    tests = row.nested(name)
    given, said = tests.get("input") or [], tests.get("output") or []
    if not isinstance(given, list) or not isinstance(said, list) or len(given) != len(said):
        raise row.error(f"{name!r} has no two lists of the same length under input and output")
    return [(str(one), str(other)) for one, other in zip(given, said, strict=True)]


def _livecode_tests(row: PublishedRow) -> tuple[Json, int]:
    """The suite of a problem's public and hidden tests, and how many cases were too long."""
    public, hidden = row.need("public_test_cases"), row.get("private_test_cases")
    listed = _case_list(row, "public_test_cases", public)
    listed += _case_list(row, "private_test_cases", hidden) if hidden is not None else []
    if not listed:
        raise row.error("'public_test_cases' holds no test")
    cases = _within([(str(each["input"]), str(each["output"])) for each in listed])
    left = len(listed) - len(cases)
    if listed[0].get("testtype") != "functional":
        given, said = [given for given, _ in cases], [said for _, said in cases]
        return {"stdin": given, "expected_output": said, **_AS_LIVECODEBENCH}, left
    called = row.nested("metadata").text("func_name")
    calls = [
        {
            "args": [row.parsed("input", line) for line in given.splitlines() if line.strip()],
            "expected": row.parsed("output", said),
        }
        for given, said in cases
    ]
    return {"function": called, "calls": calls}, left


def _case_list(row: PublishedRow, name: str, held: Any) -> list[Json]:
    if isinstance(held, str) and not held.lstrip().startswith("["):
        held = _unpacked(row, name, held)
    if isinstance(held, str):
        held = row.parsed(name, held)
    fitting = isinstance(held, list) and all(
        isinstance(each, dict) and "input" in each and "output" in each for each in held
    )
    if not fitting:
        raise row.error(f"{name!r} is not a list of tests with input and output")
    return list(held)


def _unpacked(row: PublishedRow, name: str, packed: str) -> Any:
    """What stands in base64 over zlib over a pickle: JSON text, in the real files."""
    try:
        compressed = base64.b64decode(packed, validate=True)
        unpacker = zlib.decompressobj()
        opened = unpacker.decompress(compressed, _MOST_UNPACKED)
        if unpacker.unconsumed_tail:
            raise row.error(f"{name!r} is larger than {_MOST_UNPACKED >> 20} MB")
        return _TextOnly(io.BytesIO(opened)).load()
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError) as exc:
        raise row.error(f"{name!r} cannot be unpacked ({exc})") from None
    except (IndexError, KeyError, TypeError, AttributeError, MemoryError, OverflowError) as exc:
        raise row.error(f"{name!r} is not a pickle ({type(exc).__name__})") from None


class _TextOnly(pickle.Unpickler):
    """Opens a pickle of texts, numbers, lists and the like; a class or a function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, expected text alone")


def _within(cases: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The cases in their order, without the longest where all are too much, and without those whose
    output is more than a program may print; at least one."""
    sizes = [len(given) + len(said) for given, said in cases]
    order = sorted(range(len(cases)), key=lambda at: sizes[at])
    order = [at for at in order if len(cases[at][1].encode()) < MOST_OUTPUT] or order[:1]
    kept, total = set(order[:1]), sizes[order[0]]
    for at in order[1:]:
        total += sizes[at]
        if total > MOST_BYTES:
            break
        kept.add(at)
    return [case for at, case in enumerate(cases) if at in kept]
