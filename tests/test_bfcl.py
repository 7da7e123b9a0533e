"""The environment `bfcl`: its samples, the team on them, our judge beside BFCL's own checker."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import zipfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from coa.distillation.contamination import schema_of
from coa.environment import load_environment
from coa.environments.experts import Experts
from coa.environments.published import find_benchmark, load_benchmark
from coa.environments.published.environment import SAMPLES
from coa.environments.toolbox import openapi
from coa.environments.toolbox.catalogue import generated
from coa.environments.toolbox.tasks import PER_CATALOGUE, ToolboxMaking
from coa.errors import Unavailable, UsageError
from coa.grammar import system_prompt
from coa.io.download import Wheel, fetch_wheel
from coa.models.references import cache_dir
from coa.rewards import RewardSettings
from coa.rewards.chains import Call, same_calls
from coa.tasks import Task

AREA = {
    "name": "Math.area",
    "description": "Calculate the area.",
    "parameters": {
        "type": "dict",
        "properties": {
            "base": {"type": "integer"},
            "height": {"type": "integer", "description": "in metres"},
        },
        "required": ["base", "height"],
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as BFCL has it, with rows of ours."""
    (tmp_path / "possible_answer").mkdir()
    categories = {category for _, listed in SAMPLES.values() for category in listed}
    for category in sorted(categories):
        rows = [
            {
                "id": f"{category}_{k}",
                "question": [
                    [{"role": "user", "content": f"Find the area for base {k} and height 9{k}."}]
                ],
                "function": [AREA],
            }
            for k in range(160)
        ]
        gold = [
            {
                "id": row["id"],
                "ground_truth": [{"Math.area": {"base": [k], "height": [int(f"9{k}")]}}],
            }
            for k, row in enumerate(rows)
        ]
        name = f"BFCL_v4_{category}.json"
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        if "relevance" not in category:
            (tmp_path / "possible_answer" / name).write_text("\n".join(map(json.dumps, gold)))
    return tmp_path


def test_samples_are_fixed_and_of_the_sizes_that_are_reported(folder: Path) -> None:
    env = load_environment("bfcl", file=str(folder))
    tasks = env.load_tasks("test")
    sizes = Counter(task.meta["sample"] for task in tasks)
    assert sizes == {"simple": 150, "multiple": 150, "irrelevance": 100, "live": 200}
    assert tasks.tasks == load_environment("bfcl", file=str(folder)).load_tasks("test").tasks
    some = load_environment("bfcl", file=str(folder), samples="live").load_tasks("test")
    assert {task.meta["sample"] for task in some} == {"live"} and len(some) == 200
    families = Counter(task.meta["family"] for task in some)
    assert set(families) == set(SAMPLES["live"][1])


def test_nothing_of_it_is_for_training(folder: Path) -> None:
    env = load_environment("bfcl", file=str(folder))
    with pytest.raises(UsageError, match="'bfcl' has no tasks for 'train'"):
        env.load_tasks("train")
    with pytest.raises(UsageError, match=r"samples: 'simpel' is none .* Did you mean 'simple'"):
        load_environment("bfcl", samples="simpel")


def test_its_prompt_speaks_of_tools_and_describes_them(folder: Path) -> None:
    env = load_environment("bfcl", file=str(folder), samples="simple")
    task = env.load_tasks("test")[0]

    async def bound() -> str:
        async with env.open([task]) as opened:
            return system_prompt(await opened.bound(task))

    assert asyncio.run(bound()) == (
        "Answer the question with the tools. Blocks: <think> <answer>\nTools:\n"
        '<math_area> {"base": integer, "height": integer (in metres)} Calculate the area'
    )


def scores(tasks: list[Task], **settings: Any) -> dict[str, float]:
    """Task -> what the team gets for it."""
    from coa.distillation.dataset import convert_one

    env = load_environment("bfcl", **settings)

    async def all_of_them() -> dict[str, float]:
        found = {}
        async with env.open(tasks) as opened:
            await opened.open_rewards(RewardSettings(), tasks)
            for task in tasks:
                async with opened.session(task) as session:
                    episode = await Experts().record(task.public(), session.tools)
                made = await convert_one(task.id, episode, opened, task)
                found[task.id] = made.score or 0.0
        return found

    return asyncio.run(all_of_them())


def test_the_team_makes_the_calls_and_is_judged_by_them(folder: Path) -> None:
    env = load_environment("bfcl", file=str(folder), samples="simple")
    tasks = list(env.load_tasks("test"))[:5]
    assert set(scores(tasks, file=str(folder), samples="simple").values()) == {1.0}


# -- beside BFCL's own checker ---------------------------------------------------------------

CHECKER = """
import json, sys, types
sys.path.insert(0, sys.argv[1])
for name, has in {
    "bfcl_eval.constants.model_config": {"MODEL_CONFIG_MAPPING": {
        "ours": types.SimpleNamespace(underscore_to_dot=False)}},
    "bfcl_eval.eval_checker.ast_eval.type_convertor.java_type_converter":
        {"java_type_converter": None},
    "bfcl_eval.eval_checker.ast_eval.type_convertor.js_type_converter":
        {"js_type_converter": None},
}.items():
    stub = types.ModuleType(name)
    stub.__dict__.update(has)
    sys.modules[name] = stub
from bfcl_eval.constants.enums import Language
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
for line in sys.stdin:
    case = json.loads(line)
    given = case["functions"], case["calls"], case["gold"], Language.PYTHON, case["category"]
    print(int(ast_checker(*given, "ours")["valid"]))
"""
"""Runs in an interpreter of its own. What it does without reads Java, and other models' names."""


@pytest.fixture(scope="module")
def wheel() -> Path:
    held = find_benchmark("bfcl").wheel
    assert held is not None
    try:
        asked = Wheel(held.requirement, held.file, held.sha256)
        return fetch_wheel(asked, cache_dir() / "checked", print)
    except Unavailable as away:
        pytest.skip(str(away))


def made_calls(gold: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls that are right: the first value of each argument that must be given."""
    return [
        {name: {k: v[0] for k, v in arguments.items() if "" not in v}}
        for each in gold
        for name, arguments in each.items()
    ]


def changed(calls: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The same calls with something changed, each in its own way."""
    ((name, arguments),) = calls[0].items()
    found = [[*calls, calls[0]], calls[1:], [{f"{name}x": arguments}, *calls[1:]]]
    found.append([{name: {**arguments, "unknown": 1}}, *calls[1:]])
    for key, value in arguments.items():
        without = {k: v for k, v in arguments.items() if k != key}
        found.append([{name: without}, *calls[1:]])
        for other in (f"{value} ", str(value).upper(), [value], 12345, None, True):
            found.append([{name: {**arguments, key: other}}, *calls[1:]])
        if isinstance(value, int) and not isinstance(value, bool):
            found.append([{name: {**arguments, key: float(value)}}, *calls[1:]])
    return found


@pytest.mark.slow
def test_the_samples_are_judged_as_bfcls_own_checker_judges_them(
    wheel: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as held:
        held.extractall(tmp_path, [n for n in held.namelist() if "/multi_turn" not in n])
    rows = tmp_path / "bfcl_eval" / "data"
    tasks = {t.id: t for t in load_environment("bfcl", file=str(rows)).load_tasks("test")}
    cases, ours = [], []
    for path in sorted((rows / "possible_answer").glob("BFCL_v4_*.json")):
        category = path.stem.removeprefix("BFCL_v4_")
        functions = {
            row["id"]: row["function"]
            for row in map(json.loads, (rows / path.name).read_text().splitlines())
            if "function" in row
        }
        for row in map(json.loads, path.read_text().splitlines()):
            task = tasks.get(f"bfcl-{row['id']}")
            if task is None:
                continue
            gold = row["ground_truth"]
            names = dict(zip([f["name"] for f in functions[row["id"]]],
                             [t["name"] for t in task.meta["tools"]], strict=True))  # fmt: skip
            declared = {t["name"]: t["parameters"] for t in task.meta["tools"]}
            right = made_calls(gold)
            for calls in [right, *changed(right)]:
                case = {"functions": functions[row["id"]], "calls": calls, "gold": gold}
                cases.append({**case, "category": category})
                made = [Call(names.get(n, n), a) for each in calls for n, a in each.items()]
                ours.append(int(same_calls(made, task.gold["calls"], declared)))
    lines = "".join(f"{json.dumps(case)}\n" for case in cases)
    done = subprocess.run(
        [sys.executable, "-I", "-c", CHECKER, str(tmp_path)],
        input=lines, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = [int(each) for each in done.stdout.split()]
    assert len(theirs) == len(cases) > 3000
    odd = [case for case, a, b in zip(cases, ours, theirs, strict=True) if a != b]
    assert not odd, odd[:3]


@pytest.mark.slow
def test_the_team_on_the_samples(wheel: Path, tmp_path: Path, capsys: Any) -> None:
    """Prints what docs/benchmarks.md says: pytest -m slow -s tests/test_bfcl.py"""
    with zipfile.ZipFile(wheel) as held:
        held.extractall(tmp_path, [n for n in held.namelist() if n.startswith("bfcl_eval/data/")])
    rows = tmp_path / "bfcl_eval" / "data"
    tasks = list(load_environment("bfcl", file=str(rows)).load_tasks("test"))
    found = scores(tasks, file=str(rows))
    for sample in SAMPLES:
        own = [found[task.id] for task in tasks if task.meta["sample"] == sample]
        with capsys.disabled():
            print(f"\n{sample}: {sum(own):g} of {len(own)}", end="")
        assert sum(own) > 0.1 * len(own)


@pytest.mark.slow
def test_no_tool_that_training_may_draw_is_one_of_the_benchmark(
    wheel: Path, tmp_path: Path, capsys: Any
) -> None:
    """Prints what docs/toolbox.md says. Real descriptions are compared where they can be had."""
    with zipfile.ZipFile(wheel) as held:
        held.extractall(tmp_path, [n for n in held.namelist() if n.startswith("bfcl_eval/data/")])
    tasks = load_benchmark("bfcl", tmp_path / "bfcl_eval" / "data").tasks
    known = {schema_of(tool) for task in tasks for tool in task.meta["tools"]}
    catalogues = [generated(number) for number in range(ToolboxMaking().schemas // PER_CATALOGUE)]
    with suppress(Unavailable):
        catalogues += openapi.catalogues(False)
    tools = [schema_of(o.declaration) for each in catalogues for o in each.operations]
    with capsys.disabled():
        print(f"\n{len(tools)} tools, {len(set(tools))} different; {len(known)} of BFCL")
    assert len(known) > 2000 and not known & set(tools)
