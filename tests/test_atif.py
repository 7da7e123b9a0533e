"""Episodes and chains as ATIF: what another program reads, and what comes back."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import import_files as made
from coa.cli import app
from coa.errors import UsageError
from coa.recording.atif import atif_of, atif_of_chain, export_atif, restored
from coa.recording.episode import (
    SYSTEM,
    USER,
    AgentSpec,
    ChatMessage,
    Episode,
    EpisodeEvent,
    Message,
    ModelCall,
    ToolSpec,
    ToolUse,
    load_episodes,
)
from coa.recording.importers import import_episodes
from coa.trajectory import save_trajectories
from export_chains import short_chain

NAMES = ("manager", "researcher", "critic")
TEXT = st.text(max_size=12)
COUNT = st.none() | st.integers(0, 99)


@st.composite
def model_calls(draw: st.DrawFn) -> ModelCall | None:
    if draw(st.booleans()):
        return None
    given = draw(st.none() | st.lists(st.builds(ChatMessage, st.just("user"), TEXT), max_size=2))
    cost = draw(st.none() | st.floats(0, 1))
    counts = [draw(COUNT) for _ in range(3)]
    kept = draw(st.integers(0, 2))
    prompt, cached, sampled = counts
    return ModelCall(draw(TEXT), draw(TEXT), prompt, cached, sampled, cost, given, kept)


@st.composite
def events(draw: st.DrawFn) -> EpisodeEvent:
    branch = draw(st.sampled_from(["", "", "1", "2"]))
    erred = draw(st.booleans())
    if draw(st.booleans()):
        arguments = st.dictionaries(TEXT, st.integers() | TEXT, max_size=2).map(
            lambda held: json.dumps(held, sort_keys=True, ensure_ascii=False)
        )
        argument = draw(TEXT | arguments | st.just('{"b": 1, "a": 2}'))
        failure: Any = draw(st.sampled_from([None, "failed", "mistake"]))
        agent = draw(st.sampled_from(NAMES))
        tool = draw(st.sampled_from(["search", "multiply"]))
        return ToolUse(agent, tool, argument, draw(TEXT), failure, erred, branch)
    agent = draw(st.sampled_from([*NAMES, *NAMES, USER, SYSTEM]))
    to = draw(st.sampled_from([*NAMES, USER, SYSTEM]))
    facts = draw(st.dictionaries(st.sampled_from(["part", "score"]), TEXT, max_size=1))
    call = draw(model_calls()) if agent in NAMES else None
    return Message(agent, to, draw(TEXT), draw(TEXT), facts, erred, branch, call)


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    return Episode(
        task_id=draw(TEXT),
        question="What?",
        teacher="recorded",
        agents=[AgentSpec(name, draw(TEXT), draw(TEXT)) for name in NAMES],
        events=draw(st.lists(events(), max_size=12)),
        answer=draw(st.none() | TEXT),
        error=draw(st.none() | TEXT),
        seed=draw(st.integers(0, 3)),
        meta=draw(st.dictionaries(TEXT, st.integers(), max_size=2)),
        tools=[ToolSpec("search", "Finds.", "text"), ToolSpec("multiply", body="json")],
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(episode=episodes())
def test_an_episode_comes_back_from_atif_as_it_was(episode: Episode) -> None:
    document = json.loads(json.dumps(atif_of(episode)))
    assert restored(document) == episode
    check(document)


def check(document: dict[str, Any]) -> None:
    """The rules of ATIF 1.8 that its own package checks."""
    assert [step["step_id"] for step in document["steps"]] == [
        *range(1, len(document["steps"]) + 1)
    ]
    parts = document.get("subagent_trajectories", [])
    ids = [part["trajectory_id"] for part in parts]
    assert len(set(ids)) == len(ids)
    referred = []
    for step in document["steps"]:
        if step["source"] != "agent":
            assert not step.keys() & {"model_name", "reasoning_content", "tool_calls", "metrics"}
        elif step.get("llm_call_count") == 0:
            assert not step.keys() & {"metrics", "reasoning_content"}
        known = [call["tool_call_id"] for call in step.get("tool_calls", [])]
        for result in step.get("observation", {}).get("results", []):
            assert result.get("source_call_id") in [None, *known]
            referred += [ref["trajectory_id"] for ref in result.get("subagent_trajectory_ref", [])]
    assert sorted(referred) == sorted(ids)
    for part in parts:
        check(part)


def team(tmp_path: Path) -> Episode:
    path = made.write(tmp_path / "run.json", made.atif_team())
    import_episodes(path, tmp_path / "episodes.jsonl")
    (episode,) = load_episodes(tmp_path / "episodes.jsonl")
    return episode


def test_another_reader_finds_agents_messages_tools_usage_and_the_answer(tmp_path: Path) -> None:
    """Without our own marks the same team is read."""
    episode = team(tmp_path)
    document = json.loads(json.dumps(atif_of(episode)))
    plain = json.loads(
        json.dumps(document), object_hook=lambda held: {k: v for k, v in held.items() if k != "coa"}
    )
    path = made.write(tmp_path / "plain.json", plain)
    import_episodes(path, tmp_path / "again.jsonl")
    (again,) = load_episodes(tmp_path / "again.jsonl")
    assert [a.name for a in again.agents] == [a.name for a in episode.agents]
    assert again.tools == episode.tools and again.answer == episode.answer
    assert [e for e in again.events if isinstance(e, ToolUse)] == [
        e for e in episode.events if isinstance(e, ToolUse)
    ]
    told = [(m.agent, m.to, m.text, m.thought) for m in again.events if isinstance(m, Message)]
    assert told == [
        (m.agent, m.to, m.text, m.thought) for m in episode.events if isinstance(m, Message)
    ]
    assert [call.usage for call in (again, episode)] == [again.usage] * 2
    counted = [(m.call and m.call.prompt_tokens) for _, m in again.model_calls()]
    assert counted == [(m.call and m.call.prompt_tokens) for _, m in episode.model_calls()]


def test_marks_that_were_changed_are_not_believed(tmp_path: Path) -> None:
    document = atif_of(team(tmp_path))
    document["steps"][1]["extra"]["coa"]["event"] = 3
    assert restored(document) is None
    document["extra"] = {"coa": {"events": "many"}}
    assert restored(document) is None


def test_a_chain_is_one_agent_with_the_ids_it_was_sampled_with() -> None:
    made_chain = short_chain()
    for step in made_chain.steps:
        step.model.ids, step.model.logprobs = [1, 2], [-0.1, -0.2]
    document = json.loads(json.dumps(atif_of_chain(made_chain)))
    check(document)
    steps = [step for step in document["steps"] if step["source"] == "agent"]
    assert [step["message"] for step in steps] == [each.model.text for each in made_chain.steps]
    assert steps[0]["metrics"] == {
        "completion_token_ids": [1, 2],
        "completion_tokens": 2,
        "logprobs": [-0.1, -0.2],
    }
    (call,) = steps[0]["tool_calls"]
    (result,) = steps[0]["observation"]["results"]
    assert result["source_call_id"] == call["tool_call_id"]
    assert document["steps"][0]["source"] == "system"


def test_the_command_writes_episodes_and_datasets(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    team(tmp_path)
    done = CliRunner().invoke(app, ["export", str(tmp_path / "episodes.jsonl"), "--to", "atif"])
    assert done.exit_code == 0, done.output
    written = tmp_path / "exports" / "atif" / "atif.jsonl"
    assert written.stat().st_mode & 0o777 == 0o600
    assert json.loads(written.read_text())["agent"]["name"] == "manager"
    (tmp_path / "set").mkdir()
    save_trajectories(tmp_path / "set" / "trajectories.jsonl", [short_chain()])
    report = export_atif(tmp_path / "set", note=pytest.fail)
    assert report["rows"] == 1
    with pytest.raises(UsageError, match="nothing to export"):
        export_atif(tmp_path / "set", grammar="other", note=pytest.fail)
    written.write_text('{"mine": 1}\n')
    with pytest.raises(UsageError, match="holds something else"):
        export_atif(tmp_path / "episodes.jsonl", note=pytest.fail)


VALIDATE = """
import json, sys
from atif import Trajectory
for line in open(sys.argv[1]):
    Trajectory.model_validate(json.loads(line))
print("valid")
"""


@pytest.mark.slow
def test_the_atif_package_finds_what_we_write_valid(tmp_path: Path) -> None:
    folder = os.environ.get("COA_TEST_FRAMEWORKS", "")
    python = Path(folder) / "teams" / "bin" / "python"
    probe = [str(python), "-c", "import atif"]
    if not python.is_file() or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("the atif package is not there: make test-frameworks")
    path = tmp_path / "all.jsonl"
    with path.open("w") as file:

        @settings(max_examples=100, deadline=None)
        @given(episode=episodes())
        def write(episode: Episode) -> None:
            file.write(json.dumps(atif_of(episode)) + "\n")

        write()
        file.write(json.dumps(atif_of(team(tmp_path))) + "\n")
        file.write(json.dumps(atif_of_chain(short_chain())) + "\n")
    command = [str(python), "-c", VALIDATE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "valid\n", done.stderr[-2000:]
