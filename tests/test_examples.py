"""What a reader would copy works: examples, blocks in the documentation, public names."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import coa
from coa.distillation.dataset import Distilling, run_distillation
from coa.errors import RecordError
from coa.grammar import PRESETS, grammar_from_toml, load_grammar
from coa.io.runs import Json, dumps
from coa.recording.episode import AgentSpec, Episode, Message, ModelCall, ToolSpec, ToolUse
from coa.tasks import Task, TaskSet

ROOT = Path(__file__).resolve().parent.parent
LONGER = {"rl_loop": "tests/test_rl_example.py"}
"""Examples that are not a few lines -> where their tests are."""
EXAMPLES = sorted(p for p in (ROOT / "examples").glob("*.py") if p.stem not in LONGER)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAYS = {
    "own_tool": "<observation>42</observation>",
    "own_tasks": "('Peruvian sol', 'sol') {'level': '2'}",
    "own_reward": "0.5\n",
    "own_teacher": "<think> I read it.</think>\n<answer> Lima</answer>",
    "other_framework": "<visit> yaren.nr</visit>\n<observation>1968</observation>",
    "own_corpus": "<observation>[1] Pump: Hold the blue button to reset the pump.</observation>",
    "typed_tool": "<observation>26.2 mile = 42.165 km</observation>",
}
"""Example -> a part of what it prints."""


def run_python(path: Path, cwd: Path) -> str:
    command = [sys.executable, str(path)]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_says_what_it_prints() -> None:
    assert {path.stem for path in EXAMPLES} == SAYS.keys()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_runs(path: Path, tmp_path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    assert len(lines) < 30
    assert SAYS[path.stem] in run_python(path, tmp_path)


def blocks(language: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, match in enumerate(FENCE.finditer(page.read_text(encoding="utf-8"))):
            if match[1] == language:
                yield f"{page.name}-{number}", match[2]


@pytest.mark.parametrize(("name", "text"), list(blocks("python")))
def test_python_in_the_documentation_runs(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "block.py"
    path.write_text(text, encoding="utf-8")
    run_python(path, tmp_path)


@pytest.mark.parametrize(("name", "text"), list(blocks("toml")))
def test_toml_in_the_documentation_is_read(name: str, text: str) -> None:
    if "roles" in tomllib.loads(text):
        grammar = grammar_from_toml(text)
        assert grammar.of_kind("answer")


def test_the_table_of_presets_in_the_documentation_is_the_truth() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", page, re.MULTILINE))
    assert set(rows) == set(PRESETS)
    for name, text in rows.items():
        tools = re.search(rf"^\| `{name}` \| .+? \| (.+?) \|$", page, re.MULTILINE)
        grammar = load_grammar(name)
        assert tools and set(tools[1].split(", ")) == set(grammar.tool_roles), name
        if not text.startswith("those of"):
            assert set(text.partition(";")[0].split(", ")) == set(grammar.by_name), name


def shown(page: str, name: str) -> str:
    """The block of a page that stands after a comment with this name."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = FENCE.search(text, text.index(f"<!-- {name} -->"))
    assert found, name
    return found[2]


def test_the_episode_in_the_documentation_becomes_the_chain_beside_it(tmp_path: Path) -> None:
    record = json.loads(shown("distillation.md", "episode"))
    assert Episode.from_json(record).to_json() == record
    episodes, tasks = tmp_path / "episodes.jsonl", tmp_path / "tasks.jsonl"
    episodes.write_text(dumps(record) + "\n")
    TaskSet((Task(record["question"], ("Lima",), id=record["task_id"]),)).save(tasks)
    (chain,) = run_distillation(Distilling(episodes, tasks, workers=1), tmp_path / "made").kept
    assert chain.text == shown("distillation.md", "chain").rstrip()


def is_needed(name: str, record: Json) -> bool:
    """Whether an episode without this field cannot be read."""
    try:
        Episode.from_json({key: value for key, value in record.items() if key != name})
    except (KeyError, RecordError):
        return True
    return False


def test_the_table_of_the_fields_of_an_episode_is_the_truth() -> None:
    page = (ROOT / "docs" / "distillation.md").read_text(encoding="utf-8")
    table = page[page.index("| of | field | |") : page.index("Without `given`")]
    told: dict[str, list[str]] = {}
    of = ""
    for stated, names in re.findall(r"^\| (\w* ?)\| (.+?) \|", table, re.MULTILINE)[1:]:
        of = stated.strip() or of
        told.setdefault(of, []).extend(re.findall(r"\[?`\w+`\]?", names))
    episode = Episode("t", "q", "t", []).to_json()
    wanted = [f"`{name}`" if is_needed(name, episode) else f"[`{name}`]" for name in episode]
    assert sorted(told.pop("episode")) == sorted(wanted)
    kinds = {
        "agent": AgentSpec,
        "tool": ToolSpec,
        "say": Message,
        "use": ToolUse,
        "call": ModelCall,
    }
    assert set(told) == set(kinds)
    for of, kind in kinds.items():
        wanted = ["`kind`"] if of in ("say", "use") else []
        for each in fields(kind):
            needed = each.default is MISSING and each.default_factory is MISSING
            wanted.append(f"`{each.name}`" if needed else f"[`{each.name}`]")
        assert sorted(told[of]) == sorted(wanted), of


# -- public names ----------------------------------------------------------------------------


def test_every_public_name_resolves_to_where_it_is_defined() -> None:
    assert sorted(coa.__all__) == list(coa.__all__)
    assert set(dir(coa)) == {*coa.__all__, "__version__"}
    for name in coa.__all__:
        found = getattr(coa, name)
        assert found is not None and not inspect.ismodule(found), "a module took its name"
    with pytest.raises(AttributeError, match="module 'coa' has no attribute 'Grammer'"):
        coa.Grammer  # noqa: B018


def test_what_type_checkers_see_is_what_is_loaded() -> None:
    tree = ast.parse(inspect.getsource(coa))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: home for home, names in coa._HOMES.items() for name in names.split()}
    assert seen == homes
    assert set(coa.__all__) == set(homes)


def test_public_names_have_a_word_of_explanation() -> None:
    silent = [name for name in coa.__all__ if not inspect.getdoc(getattr(coa, name))]
    assert silent == []
