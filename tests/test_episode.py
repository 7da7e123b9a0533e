"""Episodes: what an agent was given, what it cost, branches, and records of other frameworks."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.distillation.convert import NotConvertible, check_record, convert, in_one_line
from coa.environments import make_tasks
from coa.environments.experts import Experts
from coa.errors import RecordError
from coa.grammar import load_grammar
from coa.io.runs import dumps
from coa.recording.episode import (
    SCHEMA,
    SYSTEM,
    USER,
    AgentSpec,
    ChatMessage,
    Episode,
    Message,
    ModelCall,
    Tokens,
    ToolSpec,
    ToolUse,
    load_episodes,
    read_episodes,
)
from coa.recording.recorder import EpisodeRecorder
from coa.tasks import Task
from coa.tools import Tool, Toolbox
from scripts import TOOLBOX_OF, episodes_of, texts_of

TEAM = [AgentSpec("a", "planner", "A."), AgentSpec("b", "searcher", "B.")]


def episode_of(*events: Message | ToolUse, answer: str | None = "x") -> Episode:
    return Episode("t", "q?", "mine", TEAM, [Message("user", "a", "q?"), *events], answer)


# -- what a call was given -------------------------------------------------------------------


def test_messages_have_the_roles_of_a_chat() -> None:
    episode = episode_of(
        Message("a", "b", "find", "hm"),
        ToolUse("b", "look", "it", "page"),
        Message("b", "a", "found"),
    )
    assert episode.messages_of(3) == [
        ChatMessage("system", "B."),
        ChatMessage("user", "find"),
        ChatMessage("user", "page"),
    ]
    assert episode.context_of("b", "", episode.events)[-1] == ChatMessage("assistant", "found")


def test_an_agent_in_a_branch_does_not_see_what_happens_in_another() -> None:
    episode = episode_of(
        Message("a", "b", "both"),
        Message("b", "a", "one", branch="1"),
        Message("b", "a", "two", branch="2"),
        ToolUse("b", "look", "it", "page", branch="1"),
        Message("b", "a", "one more", branch="1"),
        Message("b", "a", "after"),
    )
    assert texts_of(episode, 3) == ["B.", "both"]
    assert texts_of(episode, 5) == ["B.", "both", "one", "page"]
    assert texts_of(episode, 6) == ["B.", "both", "one", "two", "page", "one more"]


def test_an_agent_in_a_later_branch_has_seen_all_branches_that_ended_before() -> None:
    episode = episode_of(
        Message("a", "b", "both"),
        Message("b", "a", "one", branch="1"),
        Message("b", "a", "two", branch="2"),
        Message("a", "b", "again"),
        Message("b", "a", "three", branch="1"),
        Message("b", "a", "four", branch="2"),
    )
    before = ["B.", "both", "one", "two", "again"]
    assert texts_of(episode, 5) == texts_of(episode, 6) == before


def test_a_record_may_state_what_a_call_was_given() -> None:
    said = [ChatMessage("system", "other"), ChatMessage("user", "else")]
    call = ModelCall("m", "raw", given=said)
    episode = episode_of(Message("a", "b", "read out", call=call), Message("b", "a", "ok"))
    assert episode.messages_of(1) == said
    assert texts_of(episode, 2) == ["B.", "read out"]
    assert episode.context_of("a", "", episode.events)[2] == ChatMessage("assistant", "raw")


# -- what it cost ----------------------------------------------------------------------------


def test_counts_and_prices_of_a_server_are_taken_as_they_are() -> None:
    paid = ModelCall("m", "w1 w2", prompt_tokens=10, cached_tokens=4, sampled_tokens=3, cost=0.5)
    episode = episode_of(Message("a", "b", "w1", call=paid), Message("b", "a", "f1 f2"))
    assert episode.count_tokens(lambda text: len(text.split())) == Tokens(10 + 2, 4, 3 + 2)
    assert episode.cost is None  # nobody knows what the second call cost
    assert episode_of(Message("a", "b", "w1", call=paid)).cost == 0.5
    assert episode_of().cost is None


def test_the_branches_of_an_agent_share_what_was_sent_before_them() -> None:
    episode = episode_of(
        Message("a", "b", "w w"),
        Message("b", "a", "x", branch="1"),  # in: 1 + 2
        Message("b", "a", "y", branch="2"),  # in: 1 + 2, all of it sent already
        Message("b", "a", "z"),  # in: 1 + 2 + 1 + 1; the first branch's call begins like it
    )
    tokens = episode.count_tokens(lambda text: len(text.split()))
    assert tokens == Tokens(prompt=2 + 3 + 3 + 5, cached=0 + 0 + 3 + 4, sampled=2 + 1 + 1 + 1)


# -- concurrent agents -----------------------------------------------------------------------


def test_branches_are_put_one_after_the_other_and_nothing_is_lost() -> None:
    events = [
        Message("a", "b", "m1"),
        *(
            Message("b", "a", f"{branch}{n}", branch=branch)
            for n in (1, 2)
            for branch in ("10", "2")
        ),
        Message("a", "b", "m2"),
        Message("b", "a", "end", branch="3"),
    ]
    texts = [event.text for _, event in in_one_line(events) if isinstance(event, Message)]
    assert texts == ["m1", "21", "22", "101", "102", "m2", "end"]


@given(st.lists(st.sampled_from(["", "1", "2", "3"])))
def test_putting_in_one_line_keeps_every_event_and_the_order_of_each_branch(
    branches: list[str],
) -> None:
    events = [Message("a", "b", str(n), branch=branch) for n, branch in enumerate(branches)]
    line = [event for _, event in in_one_line(events)]
    assert sorted(line, key=lambda e: int(e.text)) == events
    for branch in set(branches):
        assert [e for e in line if e.branch == branch] == [e for e in events if e.branch == branch]
    assert in_one_line(line) == list(enumerate(line, start=1))


def test_comparisons_are_looked_up_at_the_same_time_and_say_so() -> None:
    started: list[str] = []

    def box(task: Task, hold: float) -> Toolbox:
        real = TOOLBOX_OF(task)["wiki_search"]

        async def run(query: str) -> str:
            started.append(query)
            await asyncio.sleep(hold * random.random())
            return await real.run(query)

        return Toolbox([Tool("wiki_search", run)])

    (task,) = make_tasks("atlas-mhqa", "train", 1, 3, families=["more_populous_country"])
    team = Experts(error_rate=0.5)
    first, *others = [
        asyncio.run(team.record(task.public(), box(task, hold), seed=1)) for hold in (0, 0.02, 0.02)
    ]
    assert {event.branch for event in first.events} == {"", "1", "2"}
    assert all(other.to_json() == first.to_json() for other in others)
    alone = episodes_of(make_tasks("atlas-mhqa", "train", 3, 3, families=["city_currency"]))
    assert {event.branch for episode in alone for event in episode.events} == {""}


async def test_what_branches_count_is_added_up_in_their_order() -> None:
    desk = EpisodeRecorder(episode_of(), Toolbox())

    async def work(own: EpisodeRecorder, wait: float, name: str) -> float:
        await asyncio.sleep(wait)
        own.count("alarms", 2)
        own.episode.meta.setdefault("first", name)
        own.fail(name)
        own.say("b", "a", name)
        return own.rng.random()

    waits = ((0.02, "slow"), (0.0, "fast"))
    dice = await desk.together([lambda own, w=w, n=n: work(own, w, n) for w, n in waits])
    assert desk.episode.meta == {"alarms": 4, "first": "slow"} and desk.episode.error == "slow"
    said = [(e.text, e.branch) for e in desk.episode.events[1:] if isinstance(e, Message)]
    assert said == [("slow", "1"), ("fast", "2")]
    assert dice[0] != dice[1]


# -- files -----------------------------------------------------------------------------------

words = st.text(st.characters(codec="utf-8"), max_size=12)
somebody = st.sampled_from([*(agent.name for agent in TEAM), USER, SYSTEM])
says = st.builds(
    Message,
    agent=somebody,
    to=somebody,
    text=words,
    thought=words,
    facts=st.dictionaries(words, st.integers() | words, max_size=2),
    erred=st.booleans(),
    branch=words,
    call=st.none()
    | st.builds(
        ModelCall,
        model=words,
        text=words,
        prompt_tokens=st.integers(0, 9),
        cost=st.none() | st.floats(0, 1),
        given=st.none() | st.lists(st.builds(ChatMessage, st.just("user"), words), max_size=2),
    ),
)
failures = st.sampled_from([None, "mistake", "failed", "timeout"])
uses = st.builds(ToolUse, somebody, words.filter(bool), words, words, failures, branch=words)


tools = st.builds(ToolSpec, words, words, st.sampled_from(["text", "json"]), words)


@given(st.lists(says | uses, max_size=4), st.lists(tools, max_size=2))
def test_any_episode_comes_back_from_its_line(
    events: list[Message | ToolUse], had: list[ToolSpec]
) -> None:
    episode = Episode("t", "q?", "mine", TEAM, events, tools=had)
    line = dumps(episode.to_json())
    again = Episode.from_json(json.loads(line))
    assert again == episode and dumps(again.to_json()) == line


@pytest.mark.parametrize("schema", [1, 2, 3])
def test_records_of_earlier_schemas_are_read(schema: int) -> None:
    event = {"kind": "say", "agent": "a", "to": "user", "text": "x", "thought": "", "facts": {}}
    old = {
        **{"schema": schema, "task_id": "t", "question": "q?", "teacher": "mine", "seed": 0},
        **{"answer": "x", "error": None, "meta": {}},
        "agents": [{"name": "a", "part": "planner", "system": "A."}],
        "events": [{**event, "erred": False}],
    }
    read = Episode.from_json(old)
    assert read.events == [Message("a", "user", "x")] and read.tools == []
    assert read.to_json()["schema"] == SCHEMA


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"kind": "use", "agent": "b", "result": "page"}, "event 1: has no tool."),
        ({"kind": "use", "agent": "b", "tool": "t", "result": "page"}, "event 1: has no argument."),
        ({"kind": "sing", "agent": "b"}, "event 1 has the kind 'sing', expected say or use"),
        ({"kind": "say", "agent": "b", "song": 1}, "event 1: 'song' is not a field of a Message"),
    ],
)
def test_an_event_that_cannot_be_read_is_one_clear_line_and_the_rest_goes_on(
    event: dict[str, str], said: str, tmp_path: Path
) -> None:
    good = episode_of().to_json()
    path = tmp_path / "e.jsonl"
    path.write_text("".join(dumps(r) + "\n" for r in (good, {**good, "events": [event]}, good)))
    (_, first), (line, wrong), (_, last) = read_episodes(path)
    assert first == last == episode_of() and line == 2
    assert isinstance(wrong, RecordError) and said in str(wrong)
    with pytest.raises(RecordError, match=r"e\.jsonl:2: "):
        load_episodes(path)


@pytest.mark.parametrize(
    ("episode", "reason"),
    [
        (episode_of(Message("user", "b", "another q?")), None),
        (
            episode_of(Message("user", "b", "another?")),
            r"disagree on the question: event 2 \(user\)",
        ),
        (
            episode_of(Message("b", "a", "I work", facts={"question": "where is it?"})),
            r"event 2 \(b\): says 'where is it\?', the episode 'q\?'",
        ),
        (episode_of(answer=None), "the episode has no answer"),
    ],
)
def test_a_record_of_no_single_team_and_question_is_rejected(
    episode: Episode, reason: str | None
) -> None:
    if reason is None:
        check_record(episode)
        return
    with pytest.raises(NotConvertible, match=reason):
        convert(episode, load_grammar("mhqa"))
