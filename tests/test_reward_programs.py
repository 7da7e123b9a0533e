"""The tests reward: programs in the sandbox, every shape of test, and no way around them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.environments.published.afm import import_rl, read_rows
from coa.errors import RecordError
from coa.io.runs import Json
from coa.rewards import Part, ProgramSettings, Reward, RewardSettings, choose_reward, open_reward
from coa.rewards.programs import ProgramChecker, program_in, read_suite, same_output, same_value
from coa.sandbox import Sandbox, SandboxError, Tier, reach_tier
from coa.tasks import Task
from coa.trajectory import Trajectory

BENCHMARKS = os.environ.get("COA_TEST_BENCHMARKS", "")
QUICK = ProgramSettings(cpu_seconds=1, seconds=20.0, slots=1, output_bytes=4096)

SUM = {"stdin": ["1 2\n", "3 4\n"], "expected_output": ["3\n", "7\n"], "question_id": "abc_1"}
SUMS = "a, b = map(int, input().split())\nprint(a + b)"
PAIRS: Json = {
    "functional": "\nresult = Solution().pairs([3, 1, 3], 2)\n"
    'assert result == [[3, 2]], f"Expected [[3, 2]], but got {repr(result)}"\n'
}
PAIRS_SOLVED = """class Solution:
    def pairs(self, nums: List[int], k: int) -> List[List[int]]:
        return [(n, c) for n, c in Counter(nums).items() if c >= k]"""
ADD: Json = {"function": "add", "calls": [{"args": [1, 2], "expected": 3}]}
MERGE: Json = {"function": "merge", "calls": [{"args": [[1], [0]], "expected": [0, 1]}]}
MERGED = """from heapq import *
class Solution:
    def merge(self, one, other):
        return sorted(one + other)"""
SQUARES: Json = {"functional": "for n in range(4):\n    assert square(n) == n * n"}


@pytest.fixture
async def reward() -> AsyncIterator[Reward]:
    if reach_tier()[0] < Tier.FULL:
        pytest.skip("this machine has no full sandbox")
    async with open_reward(RewardSettings("tests", tests=QUICK)) as opened:
        yield opened


async def judged(reward: Reward, tests: Any, answer: str | None) -> Part:
    task = Task("Write it.", gold={"tests": tests})
    trajectory = Trajectory(task.id, task.question, "code", answer=answer)
    return (await reward.score(task, trajectory)).parts["tests"]


async def test_programs_that_solve_the_task_pass(reward: Reward) -> None:
    fenced = f"It reads and adds:\n```py\n{SUMS}\n```\nThat is all."
    as_main = f"def main():\n    {SUMS.replace(chr(10), chr(10) + '    ')}\n"
    as_main += "if __name__ == '__main__':\n    main()"
    for tests, answer in [
        (SUM, SUMS),
        (MERGE, MERGED),
        (MERGE, "def merge(one, other): return sorted(one + other)"),
        (SUM, fenced),
        (SUM, as_main),
        (PAIRS, f"```python\n{PAIRS_SOLVED}\n```"),
        (ADD, "def add(a, b): return a + b"),
        (ADD, "class Solution:\n    def add(self, a, b): return a + b"),
        (ADD, "import numpy as np\ndef add(a, b): return np.array([a, b]).sum()"),
        (SQUARES, "def square(n): return n ** 2"),
        (SQUARES, "from __future__ import annotations\ndef square(n): return n ** 2"),
        ({"inputs": ["1 2", "5 5"], "outputs": ["3", "10"]}, SUMS),
        ({"inputs": [[1, 2], [2, 2]], "outputs": [[3], 4], "fn_name": "add"}, "add = int.__add__"),
    ]:
        assert await judged(reward, tests, answer) == Part(1.0), (tests, answer)


@pytest.mark.parametrize(
    ("tests", "answer", "says"),
    [
        (SUM, "a, b = input().split()\nprint(a + b)", "case 1 of 2: another output"),
        (SUM, "print(3)", "case 2 of 2: another output"),
        (SUM, "print(1 / 0)", "case 1 of 2: line 1: print(1 / 0) ZeroDivisionError"),
        (SUM, "def f(:", "SyntaxError"),
        (SUM, "while True: pass", "it took more than 1 s of CPU, or 20 s"),
        (SUM, "while True: print('x' * 999)", "it printed more than 4096 bytes"),
        (SUM, "x = 'x' * (1 << 31)", "memory"),
        (SUM, "", "no program"),
        (SUM, None, "no program"),
        (SUM, "```sh\nls\n```", "no program"),
        (PAIRS, "class Solution:\n    def pairs(self, n, k): return [[3, 1]]", "another result"),
        (PAIRS, "class Solution: pass", "AttributeError"),
        (ADD, "def sub(a, b): return a - b", "NameError"),
        ({"functional": "assert gcd(4, 6) == 2"}, "def lcm(a, b): return 12", "NameError"),
        (SQUARES, "def square(n): return n", "AssertionError"),
    ],
)
async def test_what_fails_a_case_is_wrong_and_says_why(
    reward: Reward, tests: Json, answer: str | None, says: str
) -> None:
    found = await judged(reward, tests, answer)
    assert found.score == 0.0 and says in found.reason, found


@pytest.mark.parametrize(
    "trick",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "class Same:\n    def __eq__(self, other): return True\n"
        "class Solution:\n    def pairs(self, *_): return Same()\n"
        "def add(*_): return Same()",
        "class Same(list):\n    def __eq__(self, other): return True\n"
        "class Solution:\n    def pairs(self, *_): return Same()\ndef add(*_): return Same()",
        "import builtins; builtins.repr = lambda value: '[[3, 1]]'\ndef add(*_): return 1\n"
        "class Solution:\n    def pairs(self, *_): return 1",
    ],
)
async def test_a_program_cannot_talk_its_way_out_of_a_test(reward: Reward, trick: str) -> None:
    for tests in (PAIRS, ADD, SUM):
        assert (await judged(reward, tests, trick)).score == 0.0, tests


async def test_the_share_that_passes_counts_by_a_setting() -> None:
    if reach_tier()[0] < Tier.FULL:
        pytest.skip("this machine has no full sandbox")
    partial = ProgramSettings(partial=True, slots=1)
    async with open_reward(RewardSettings("tests", tests=partial)) as reward:
        assert await judged(reward, SUM, "print(3)") == Part(0.5, "case 2 of 2: another output")
        assert await judged(reward, SUM, SUMS) == Part(1.0)


async def test_a_sandbox_that_fails_judges_nobody() -> None:
    class Failing(Sandbox):
        async def run(self, *_: Any, **__: Any) -> Any:
            raise SandboxError("the slot does not start.")

    checker = ProgramChecker(Failing(), QUICK)
    task = Task("Add.", gold={"tests": SUM})
    found = await checker(task, Trajectory(task.id, "q?", "code", answer=SUMS))
    assert found == Part(None, "the sandbox failed: the slot does not start.")
    without = Task("Add.", ("3",))
    found = await checker(without, Trajectory(task.id, "q?", "code", answer=SUMS))
    assert found == Part(None, "the task has no tests")


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ([], "tests: found a list, expected an object."),
        ({}, "tests: found none; expected stdin with expected_output, function with calls, or"),
        ({"stdin": ["1"]}, "tests: 1 stdin and 0 expected_output."),
        ({"stdin": [1], "expected_output": ["1"]}, "tests: stdin is not a list of texts."),
        ({**SUM, "compare": "token"}, "compare 'token' is not a choice. Did you mean 'tokens'?"),
        ({**SUM, "tolerance": -1}, "tolerance is -1, expected a number of 0 or more."),
        ({"calls": [{}]}, "function is None, expected the name of what is called."),
        ({**ADD, "function": "os.system"}, "function is 'os.system', expected the name"),
        ({**ADD, "calls": [{"args": [1]}]}, "every call needs args (a list) and expected."),
        ({"inputs": ["1"], "outputs": []}, "inputs and outputs are not two lists of the same"),
    ],
)
async def test_what_is_wrong_with_tests_is_one_line_with_the_task(tests: Any, says: str) -> None:
    with pytest.raises(RecordError) as caught:
        read_suite(tests)
    assert says in str(caught.value)
    task = Task("Add.", gold={"tests": tests})
    with pytest.raises(RecordError, match=f"task {task.id}: tests: "):
        await ProgramChecker(Sandbox(), QUICK)(task, Trajectory(task.id, "q?", "code"))


@pytest.mark.parametrize(
    ("found", "wanted", "exact", "tokens", "near"),
    [
        ("3\n", "3", True, True, True),
        ("1 2 \n3\n\n", "1 2\n3", True, True, True),
        ("1  2", "1 2", False, True, True),
        ("1\n2", "1 2", False, True, True),
        ("1 2", "1\n2", False, True, True),
        ("Yes", "YES", False, False, False),
        ("1.0", "1", False, True, True),
        ("0.50", "0.5", False, True, True),
        ("0.3333333", "0.33333333", False, False, True),
        ("0.333", "0.334", False, False, False),
        ("007", "7", False, False, True),
        ("nan", "nan", True, True, True),
        ("nan", "1", False, False, False),
        ("1e999", "1e998", False, False, False),  # though both are infinite as floats
        ("1e999", "9" * 400, False, False, False),
        ("9" * 400 + ".0", "9" * 400, False, True, True),
        ("", "1", False, False, False),
        ("1 2", "1", False, False, False),
    ],
)
def test_outputs_are_compared_by_the_rule_that_the_task_names(
    found: str, wanted: str, exact: bool, tokens: bool, near: bool
) -> None:
    rules = {"exact": exact, "tokens": tokens, "float": near}
    assert {rule: same_output(found, wanted, rule, 1e-6) for rule in rules} == rules


def test_by_lines_what_belongs_to_a_line_stands_in_it() -> None:
    assert same_output("YES\nNO\n", " YES \nNO", "lines", 0)
    assert same_output("1.0  2\n3\n\n", "1 2.00\n3", "lines", 0)
    assert not same_output("YES NO", "YES\nNO", "lines", 0)
    assert not same_output("YES\n\nNO", "YES\nNO", "lines", 0)


async def test_a_tests_own_rules_are_kept(reward: Reward) -> None:
    tests = {"stdin": [""], "expected_output": ["YES 0.33333333"]}
    near = {"compare": "float", "tolerance": 1e-5, "ignore_case": True}
    answer = "print('Yes', 1 / 3)"
    assert (await judged(reward, tests | near, answer)).score == 1.0
    assert (await judged(reward, tests | near | {"ignore_case": False}, answer)).score == 0.0
    assert (await judged(reward, tests, answer)).score == 0.0
    gcd = "print(gcd(4, 6), inf)"
    tests = {"stdin": [""], "expected_output": ["2 inf"]}
    assert (await judged(reward, tests | {"library": True}, gcd)).score == 1.0
    assert (await judged(reward, tests, gcd)).score == 0.0, "a program must import what it uses"


async def test_a_result_that_is_equal_to_the_literal_is_right_whatever_its_type(
    reward: Reward,
) -> None:
    for program, wanted in (
        ("Counter([1, 1, 2])", "{1: 2, 2: 1}"),
        ("defaultdict(list, a=[1])", "{'a': [1]}"),
        ("deque([1, 2])", "[1, 2]"),
        ("[inf, -inf]", "[1e999, -1e999]"),
        ("frozenset([1])", "{1}"),
        ("{'a': deque([Counter('x')])}", "{'a': [{'x': 1}]}"),
    ):
        tests = {"functional": f"assert f() == {wanted}"}
        answer = f"def f():\n    return {program}"
        assert (await judged(reward, tests, answer)).score == 1.0, program
    wrong = "def f():\n    return Counter([1])"
    assert (await judged(reward, {"functional": "assert f() == {1: 2}"}, wrong)).score == 0.0


def test_values_are_compared_as_python_values() -> None:
    assert same_value((1, [2]), [1, [2]], 0) and same_value({"a": 1.0}, {"a": 1}, 1e-6)
    assert same_value(0.1 + 0.2, 0.3, 1e-6) and not same_value(0.1, 0.2, 1e-6)
    assert not same_value(True, 1, 0) and not same_value("1", 1, 0)
    assert not same_value([1], [1, 2], 0) and not same_value({"a": 1}, {"b": 1}, 0)
    assert not same_value(10**400, 1.0, 1e-6) and same_value({1, 2}, {2, 1}, 0)


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("print(1)", "print(1)"),
        ("```py\nprint(1)\n```", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```py\na\n```\nbetter:\n```py\nb\n```\n```text\nout\n```", "b\n"),
        ("```py\nprint('```')\n```", "print('```')\n"),
        ("```py\nprint(1)", "print(1)"),
        ("```sh\nls\n```", ""),
        ("", ""),
    ],
)
def test_the_program_is_the_last_fenced_one_or_the_answer_itself(answer: str, program: str) -> None:
    assert program_in(answer) == program


@given(st.text("`py\n a1", max_size=60))
def test_any_answer_has_a_program_or_none(answer: str) -> None:
    assert isinstance(program_in(answer), str)


def test_what_asserts_a_literal_is_compared_outside_of_the_sandbox() -> None:
    (case,) = read_suite(PAIRS).cases
    assert case.call == "Solution().pairs([3, 1, 3], 2)" and case.values == ([[3, 2]],)
    (case,) = read_suite({"functional": "assert f(1) == (2, 'a'), 'no'"}).cases
    assert case.call == "f(1)" and case.values == ((2, "a"),)
    for other in (
        "assert f(1) == g(1)",
        "x = f(1)\nassert y == 1",
        "assert f(1) > 2",
        "(",
        "1",
        "assert f() == {[1]: 2}",
    ):
        (case,) = read_suite({"functional": other}).cases
        assert case.check == other and not case.call


@pytest.mark.skipif(not BENCHMARKS, reason="COA_TEST_BENCHMARKS names no folder")
@pytest.mark.parametrize("name", ["livecodebench_v4", "livecodebench_v5"])
async def test_the_tests_of_the_benchmarks_are_read_and_pass_by_their_gold(
    reward: Reward, name: str
) -> None:
    """There is no gold program, so one that prints what is wanted stands for it."""
    tasks = import_rl(read_rows(Path(BENCHMARKS) / f"{name}.parquet")).items
    assert choose_reward("auto", tasks) == "tests"
    for task in tasks:
        suite = read_suite(task.gold["tests"])
        assert suite.cases and not any(case.check for case in suite.cases)
    for task in tasks[::20]:
        cases = read_suite(task.gold["tests"]).cases
        known = {case.stdin: case.output for case in cases}
        program = f"import sys\nprint({known!r}[sys.stdin.read()])"
        if cases[0].call:
            method = cases[0].call.partition(".")[2].partition("(")[0]
            program = f"class Solution:\n    def {method}(self, *_): return {cases[0].values[0]!r}"
        answer = Trajectory(task.id, task.question, "code", answer=f"```py\n{program}\n```")
        assert (await reward.score(task, answer)).score == 1.0, task.id
        blank = Trajectory(task.id, task.question, "code", answer="print()")
        assert (await reward.score(task, blank)).score == 0.0, task.id
