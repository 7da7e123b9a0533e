"""Controls under every grammar: a model that reads fails without real pages, one that knows not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from coa.engines.scripted import ScriptedEngine
from coa.environment import ToolSettings
from coa.environments import make_tasks
from coa.environments.atlas.pages import read
from coa.evaluation.run import EvalSettings, run_eval
from coa.tasks import Task, TaskSet
from coa.trajectory import load_trajectories
from playing import SEARCH

COUNTRIES = {"Peru": "Lima", "Kenya": "Nairobi", "Norway": "Oslo", "Chile": "Santiago"}
CLOSED = {
    "mhqa": "<think>t</think><plan>p</plan><think>u</think><answer>{}</answer>",
    "web": "<think>t</think><plan>p</plan><think>u</think><suggested_answer>{0}</suggested_answer>"
    "<think>v</think><double_check>Score: 4</double_check><think>w</think><answer>{0}</answer>",
}
LOOK = {
    "mhqa": SEARCH,
    "web": "<think>t</think><plan>p</plan><think>u</think><web_search>{}</web_search>",
}
THEN = {
    "mhqa": "<think>r</think><answer>{}</answer>",
    "web": "<think>u</think><suggested_answer>{0}</suggested_answer>"
    "<think>v</think><double_check>Score: 4</double_check><think>w</think><answer>{0}</answer>",
}


SETS = [("mhqa", "atlas-mhqa"), ("web", "atlas-web")]


def capitals(countries: Mapping[str, str], name: str, world: int = 0) -> TaskSet:
    meta = {"set": name, "world": world}
    asked = ((f"What is the capital of {country}?", gold) for country, gold in countries.items())
    return TaskSet(tuple(Task(question, (gold,), meta=meta) for question, gold in asked))


class Agent:
    """Asked for a capital, it looks it up and believes what it sees; or knows it by heart."""

    def __init__(self, grammar: str, *, reads: bool) -> None:
        self.grammar, self.reads = grammar, reads

    def __call__(self, prompt: str, turn: int) -> str:
        country = re.findall(r"capital of ([A-Z][\w -]*)\?", prompt)[0]
        if not self.reads:
            return CLOSED[self.grammar].format(COUNTRIES.get(country, "unknown"))
        if turn == 0:
            return LOOK[self.grammar].format(f"capital of {country}")
        seen = re.sub(r"\[\d+\] ", "", prompt.rpartition("<observation>")[2])
        found = read("capital", country, seen)
        return THEN[self.grammar].format(found[0] if found else "unknown")


def accuracy(folder: Path, observations: str, agent: Agent, tasks: TaskSet) -> float:
    folder.mkdir(parents=True, exist_ok=True)
    tasks.save(folder / "tasks.jsonl")
    settings = EvalSettings(
        model="scripted:unused",
        tasks=str(folder / "tasks.jsonl"),
        grammar=agent.grammar,
        tools=ToolSettings(observations),
        context=99_999,
        turn_tokens=9999,
    )
    out = folder / f"{observations}-{agent.reads}"
    found = run_eval(settings, out, engine=ScriptedEngine(agent), quiet=True)
    assert found["n"] == len(tasks)
    return float(found["accuracy"])


@pytest.mark.parametrize(("grammar", "name"), SETS)
def test_who_reads_fails_the_controls_and_who_knows_does_not(
    grammar: str, name: str, tmp_path: Path
) -> None:
    tasks = capitals(COUNTRIES, name)
    reader, knower = Agent(grammar, reads=True), Agent(grammar, reads=False)
    found = {
        observations: (
            accuracy(tmp_path, observations, reader, tasks),
            accuracy(tmp_path, observations, knower, tasks),
        )
        for observations in ("real", "withheld", "wrong", "closed_book")
    }
    assert found == {
        "real": (1.0, 1.0),
        "withheld": (0.0, 1.0),
        "wrong": (0.0, 1.0),
        "closed_book": (0.0, 1.0),
    }
    for chain in load_trajectories(tmp_path / "closed_book-True"):
        assert chain.tools == [] and chain.usage.tool_calls == 0


@pytest.mark.parametrize(("grammar", "name"), SETS)
def test_in_a_counterfactual_world_only_reading_helps(
    grammar: str, name: str, tmp_path: Path
) -> None:
    made = make_tasks("atlas-mhqa", "train", 9, seed=3, world_seed=7, families=["country_capital"])
    named = [(re.findall(r"capital(?: city)? of (\w+)[?.]", t.question), t.answers) for t in made]
    tasks = capitals({found[0]: answers[0] for found, answers in named if found}, name, world=7)
    assert len(tasks) > 4
    assert accuracy(tmp_path, "real", Agent(grammar, reads=True), tasks) == 1.0
    assert accuracy(tmp_path, "real", Agent(grammar, reads=False), tasks) == 0.0


def computing(prompt: str, turn: int) -> str:
    """Asked for a product, it runs a program and believes what that prints."""
    product = re.findall(r"What is (\d+ \* \d+)\?", prompt)[0]
    if turn == 0:
        return f"<plan>p</plan><think>t</think><code>```py\nprint({product})\n```</code>"
    if "<observation>" not in prompt:
        return "<think>u</think><answer>unknown</answer>"
    seen = prompt.rpartition("<observation>")[2].partition("</observation>")[0]
    return f"<reflection>r</reflection><think>u</think><answer>{seen.strip()}</answer>"


def test_who_runs_programs_fails_the_controls(tmp_path: Path) -> None:
    meta = {"set": "gym-code"}
    asked = [(n, n + 7) for n in (1234, 2345, 3456)]
    tasks = [Task(f"What is {a} * {b}?", (str(a * b),), meta=meta) for a, b in asked]
    TaskSet(tuple(tasks)).save(tmp_path / "tasks.jsonl")
    found = {}
    for observations in ("real", "withheld", "wrong", "closed_book"):
        settings = EvalSettings(
            model="scripted:unused",
            tasks=str(tmp_path / "tasks.jsonl"),
            reward="exact",
            tools=ToolSettings(observations),
            context=99_999,
            turn_tokens=9999,
        )
        run = run_eval(
            settings, tmp_path / observations, engine=ScriptedEngine(computing), quiet=True
        )
        found[observations] = (run["accuracy"], run["tool_calls_by_agent"])
    once = {"code": 1.0}
    assert found == {
        "real": (1.0, once),
        "withheld": (0.0, once),
        "wrong": (0.0, once),
        "closed_book": (0.0, {}),
    }
