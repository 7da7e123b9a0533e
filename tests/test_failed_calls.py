"""A call that failed in a recorded team fails in its chain, too, in the student's own words."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from coa.distillation.dataset import Distilling, run_distillation
from coa.errors import UsageError
from coa.recording.episode import AgentSpec, Episode, Message, ToolUse
from coa.trajectory import Trajectory

TOOLS = '''"""Tools of a test."""


def find(name: str) -> str:
    """Find a customer."""
    if name != "Ash Books":
        raise LookupError(f"no customer is called {name!r}")
    return "Ghent"
'''
HOME = """name = "shop"
grammar = "react"
tools = ["shop_tools:find"]
reward = "exact"
"""


def distilled(folder: Path, said: str) -> list[Trajectory]:
    """The chains of an episode in which the call of a wrong name returned `said`."""
    (folder / "shop_tools.py").write_text(TOOLS)
    (folder / "environment.toml").write_text(HOME)
    task = {"id": "t", "question": "Where is Ash Books?", "answers": ["Ghent"]}
    (folder / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    events = [
        Message("a", "system", "", "I look it up.", {"part": "query"}),
        ToolUse("a", "find", "Ash", said),
        Message("a", "system", "", "The whole name.", {"part": "query"}),
        ToolUse("a", "find", "Ash Books", "Ghent"),
        Message("a", "user", "Ghent", facts={"part": "verdict"}),
    ]
    agents = [AgentSpec("a", "reader", "")]
    episode = Episode("t", task["question"], "recorded", agents, events, "Ghent")
    (folder / "episodes.jsonl").write_text(json.dumps(episode.to_json()) + "\n")
    asked = Distilling(
        folder / "episodes.jsonl", folder / "tasks.jsonl", env=(str(folder),), workers=1
    )
    with suppress(UsageError):  # where none is kept
        return run_distillation(asked, folder / "made").kept
    (rejected,) = (folder / "made" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(rejected)["reason"] == "does not replay"
    return []


def test_a_framework_may_put_words_of_its_own_around_a_failure(tmp_path: Path) -> None:
    said = "Error executing tool 'find': LookupError: no customer is called 'Ash'\nPlease try again"
    (chain,) = distilled(tmp_path, said)
    assert (
        "<observation>Error: find failed: LookupError: no customer is called 'Ash'<" in chain.text
    )


def test_a_call_that_failed_for_another_reason_is_another_call(tmp_path: Path) -> None:
    assert distilled(tmp_path, "Error: the register is locked") == []


def test_a_call_that_worked_then_and_fails_now_is_another_call(tmp_path: Path) -> None:
    assert distilled(tmp_path, "Ghent") == []
