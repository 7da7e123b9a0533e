"""From spans to episodes: one team is one episode, whoever wrote its spans down."""

from __future__ import annotations

from pathlib import Path

import pytest

from coa.recording.calls import CallLog, read_sessions
from coa.recording.episode import Episode, Message
from coa.recording.graph import episode_of
from test_span_files import ANSWER, BARE, FOUND, NAMED, captured

ASKED = "How much does Ada owe, in dollars?"


def told(episode: Episode) -> list[tuple[str, ...]]:
    return [
        (each.agent, each.to, each.text)
        if isinstance(each, Message)
        else (each.agent, f"{each.tool} {each.argument}", each.result)
        for each in episode.events
    ]


def work(boss: str, researcher: str) -> list[tuple[str, ...]]:
    return [
        (boss, researcher, ASKED),
        (researcher, "system", ""),
        (researcher, 'lookup {"customer": "Ada"}', "120 USD"),
        (researcher, boss, FOUND),
        (boss, "system", ""),
        (boss, 'convert {"amount": 120, "currency": "EUR"}', "108.0"),
        (boss, "user", ANSWER),
    ]


@pytest.mark.parametrize("name", [*NAMED, *BARE])
def test_one_team_is_one_episode_whoever_wrote_it_down(name: str) -> None:
    episode = episode_of(captured(name))
    # Where nothing names them, agents have names of the graph's own.
    names = ("manager", "researcher") if name in NAMED else tuple(a.name for a in episode.agents)
    assert told(episode)[1:] == work(*names)
    assert [agent.name for agent in episode.agents] == list(names)
    assert {tool.name for tool in episode.tools} == {"lookup", "convert"}
    assert (episode.answer, episode.error) == (ANSWER, None)
    assert episode.meta["source"] == ("agents-sdk" if "traces" in name else "otel")
    assert "gaps" not in episode.meta


def test_a_program_with_a_loop_is_what_its_spans_say() -> None:
    """In the order in which it ran: what the researcher said is what is converted."""
    episode = episode_of(captured("smolagents-code"))
    assert told(episode)[1:] == [
        ("manager", "system", ""),
        ("system", "researcher", ASKED),
        *work("manager", "researcher")[1:4],
        *work("manager", "researcher")[5:],
    ]
    assert {tool.name for tool in episode.tools} == {"lookup", "convert"}
    assert all(tool.schema for tool in episode.tools)
    assert "gaps" not in episode.meta


def test_a_log_of_what_spans_say_is_the_same_team(tmp_path: Path) -> None:
    session = captured("smolagents-code")
    path = tmp_path / "e.sessions.jsonl"
    with CallLog(path) as log:
        log.begin(session.name, **session.about)
        for call in session.calls:
            log.write(call)
        for result in session.results.values():
            log.result(session.name, result)
        log.end(session.name, **(session.end or {}))
    (again,) = read_sessions(path)
    assert told(episode_of(again)) == told(episode_of(session))


def test_gaps_of_the_source_are_gaps_of_the_episode() -> None:
    session = captured("pydantic-ai-5")
    session.about["gaps"] = {"text_not_captured": 2}
    assert episode_of(session).meta["gaps"] == {"text_not_captured": 2}
