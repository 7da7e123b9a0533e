"""Dumps of real frameworks: what is read equals what the frameworks' own objects say.

`make test-frameworks` has their environment; COA_TEST_FRAMEWORKS names it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coa.recording.episode import Message, ToolUse, load_episodes
from coa.recording.importers import import_episodes

pytestmark = pytest.mark.slow
WRITER = Path(__file__).with_name("framework_memory.py")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    python = Path(os.environ.get("COA_TEST_FRAMEWORKS", "")) / "teams" / "bin" / "python"
    probe = [str(python), "-c", "import smolagents, langgraph, langchain"]
    if not python.is_file() or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("smolagents, langgraph and langchain are not there: make test-frameworks")
    folder = tmp_path_factory.mktemp("dumps")
    command = [str(python), str(WRITER), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    yield folder


NAMES = [
    *("smolagents_full", "smolagents_succinct", "smolagents_alone_full", "smolagents_code"),
    *("smolagents_alone_succinct", "smolagents_result", "langchain_dict", "langchain_dumpd"),
    *("langchain_state", "langchain_openai", "langgraph_state"),
    *("oagents_scores", "oagents_sub_plans", "oagents_costs"),
]


def given(use: ToolUse) -> Any:
    """The arguments of a call, or its program."""
    return json.loads(use.argument) if use.tool != "python" else use.argument


@pytest.mark.parametrize("name", NAMES)
def test_an_episode_says_what_the_framework_says(name: str, dumps: Path, tmp_path: Path) -> None:
    expected: dict[str, Any] = json.loads((dumps / "expected.json").read_text())[f"{name}.json"]
    import_episodes(dumps / f"{name}.json", tmp_path / "episodes.jsonl")
    (episode,) = load_episodes(tmp_path / "episodes.jsonl")
    found: dict[str, Any] = {
        "answer": episode.answer,
        "agents": [agent.name for agent in episode.agents],
        "tools": [
            [use.agent, use.tool, given(use), use.result]
            for use in episode.events
            if isinstance(use, ToolUse)
        ],
        "jobs": [
            [m.agent, m.to, m.text]
            for m in episode.events
            if isinstance(m, Message) and m.call and m.to in {a.name for a in episode.agents}
        ],
        "calls": dict(Counter(message.agent for _, message in episode.model_calls())),
        "parts": [
            [m.facts.get("part"), m.facts.get("score")]
            for m in episode.events
            if isinstance(m, Message) and m.facts
        ],
    }
    found["jobs"] = [each for each in found["jobs"] if each in expected.get("jobs", [])]
    assert {name: found[name] for name in expected} == expected


def test_every_dump_is_tested(dumps: Path) -> None:
    assert set(json.loads((dumps / "expected.json").read_text())) == {f"{n}.json" for n in NAMES}
