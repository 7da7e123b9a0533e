"""Benchmarks through `coa eval`: a task file says its grammar, its tools and its reward itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmark_rows import ROWS, write
from coa.engines.scripted import ScriptedEngine
from coa.environment import load_environment, open_environments
from coa.environments.published import BENCHMARKS, load_benchmark
from coa.errors import ConfigError, RecordError, UsageError
from coa.evaluation.run import EvalSettings, run_eval
from coa.grammar import system_prompt
from coa.grammar.constrain import turn_grammar
from coa.grammar.grammar import GrammarState
from coa.rewards import REWARDS
from coa.rollouts import choose_environments
from coa.tasks import Task, TaskSet
from coa.tools.base import ToolCall
from coa.tools.functions import NOTED, declared_tools
from coa.trajectory import load_trajectories
from test_benchmark_calls import bfcl
from test_benchmark_scores import wheel_file

AREA = '<think>t</think><geo_area>{"base": 2.0}</geo_area>'
ANSWER = "<think>t</think><answer>done</answer>"


def saved(name: str, rows: Path, out: Path) -> str:
    load_benchmark(name, rows).tasks.save(out)
    return str(out)


def test_a_call_is_noted_judged_and_never_run(tmp_path: Path) -> None:
    tasks = saved("bfcl", bfcl(tmp_path / "files"), tmp_path / "tasks.jsonl")
    engine = ScriptedEngine([AREA, ANSWER])
    summary = run_eval(EvalSettings("m", tasks=tasks), tmp_path / "run", engine=engine, quiet=True)
    assert (summary["reward"], summary["accuracy"]) == ("calls", 1.0)
    (chain,) = load_trajectories(tmp_path / "run")
    assert chain.grammar == "react" and chain.tools == ["geo_area", "call_answer"]
    assert NOTED in chain.text and '"base": number' in chain.segments[0].text


def test_a_call_that_the_schema_refuses_is_explained_and_wrong(tmp_path: Path) -> None:
    tasks = saved("bfcl", bfcl(tmp_path / "files"), tmp_path / "tasks.jsonl")
    engine = ScriptedEngine([AREA.replace("2.0", '"two"'), AREA, ANSWER])
    summary = run_eval(EvalSettings("m", tasks=tasks), tmp_path / "run", engine=engine, quiet=True)
    assert summary["accuracy"] == 0.0
    (chain,) = load_trajectories(tmp_path / "run")
    assert 'base is "two", expected a number' in chain.text


def test_a_function_of_humaneval_is_written_in_the_code_grammar(tmp_path: Path) -> None:
    rows = write(tmp_path / "h.jsonl", ROWS["humaneval"])
    tasks = saved("humaneval", rows, tmp_path / "tasks.jsonl")
    program = "```py\ndef twice(n):\n    return 2 * n\n```"
    turn = f"<plan>p</plan><think>t</think><answer>{program}</answer>"
    summary = run_eval(
        EvalSettings("m", tasks=tasks), tmp_path / "run", engine=ScriptedEngine([turn]), quiet=True
    )
    assert (summary["reward"], summary["accuracy"]) == ("tests", 1.0)
    assert load_trajectories(tmp_path / "run")[0].grammar == "code"


def test_every_benchmark_is_answered_in_its_own_grammar(tmp_path: Path) -> None:
    found = {}
    for name in ("nq", "gaia", "math500"):
        tasks = load_benchmark(name, write(tmp_path / "r.jsonl", ROWS[name])).tasks
        environments, _ = choose_environments((), tasks)
        found[name] = [env.value().name for env in environments]
    assert found == {"nq": ["mhqa"], "gaia": ["web"], "math500": ["code"]}


def test_a_benchmark_with_a_judge_says_so_before_any_work(tmp_path: Path) -> None:
    tasks = saved("gaia", write(tmp_path / "g.jsonl", ROWS["gaia"]), tmp_path / "tasks.jsonl")
    with pytest.raises(ConfigError, match=r"reward 'judge' needs a model.* or --judge"):
        run_eval(
            EvalSettings("m", tasks=tasks), tmp_path / "run", engine=ScriptedEngine([]), quiet=True
        )


def test_a_task_without_wanted_calls_is_refused_before_any_work(tmp_path: Path) -> None:
    TaskSet((Task("Draw it.", meta={"reward": "calls", "tools": []}),)).save(tmp_path / "t.jsonl")
    with pytest.raises(UsageError, match="has no calls, so 'calls' cannot judge it"):
        run_eval(
            EvalSettings("m", tasks=str(tmp_path / "t.jsonl")),
            tmp_path / "run",
            engine=ScriptedEngine([]),
            quiet=True,
        )


@pytest.mark.parametrize(
    "tools", ["area", ["area"], [{"name": "area"}], [{"name": 3, "parameters": {}}]]
)
def test_declarations_that_are_none_are_one_line(tools: object) -> None:
    with pytest.raises(RecordError, match=r"task t: .* expected"):
        declared_tools(Task("Draw it.", id="t", meta={"tools": tools}))


def test_a_task_without_declarations_has_the_tools_of_its_set() -> None:
    async def tools_of(task: Task) -> list[str]:
        environments, tasks = choose_environments((), TaskSet((task,)), grammar="react")
        async with open_environments(environments, tasks) as opened:
            return list(await opened.toolbox(task))

    assert asyncio.run(tools_of(Task("Which town?"))) == ["wiki_search"]
    assert asyncio.run(tools_of(Task("Which town?", meta={"tools": []}))) == []


@pytest.mark.slow
def test_every_declaration_of_the_real_bfcl_binds_and_constrains() -> None:
    llguidance = pytest.importorskip("llguidance")
    tasks = load_benchmark("bfcl", wheel_file("bfcl")).tasks
    assert len(tasks) == 3491
    environments, tasks = choose_environments((), tasks)
    assert [env.value().name for env in environments] == ["react"]

    async def check() -> None:
        async with open_environments(environments, tasks) as opened:
            for place, task in enumerate(tasks):
                toolbox = await opened.toolbox(task.public())
                bound = await opened.bound(task.public())
                assert all(
                    f"<{each['name']}>" in system_prompt(bound) for each in task.meta["tools"]
                )
                if place % 20 == 0:
                    lark = turn_grammar(bound, GrammarState(), None, toolbox.schemas(bound))
                    made = llguidance.LLMatcher.grammar_from_lark(lark)
                    assert not llguidance.LLMatcher.validate_grammar(made), task.id

    asyncio.run(check())


def test_a_noted_call_is_checked_like_any_other() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    task = Task("Draw it.", meta={"tools": [{"name": "area", "parameters": schema}]})

    async def observe(argument: str) -> str:
        async with load_environment("search").open([task]) as opened:
            return (await (await opened.toolbox(task)).call(ToolCall("area", argument))).text

    assert asyncio.run(observe(json.dumps({"n": 1}))) == NOTED
    assert "n is missing" in asyncio.run(observe("{}"))


def test_every_reward_that_a_benchmark_names_is_known() -> None:
    assert {each.reward for each in BENCHMARKS.values()} <= {*REWARDS}
