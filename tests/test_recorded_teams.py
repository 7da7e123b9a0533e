"""From the calls of a session to an episode: teams as frameworks send them, and every rule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.io.runs import dumps
from coa.recording.calls import CallLog, LoggedSession, read_sessions
from coa.recording.episode import (
    SYSTEM,
    USER,
    ChatMessage,
    Episode,
    EpisodeUsage,
    Message,
    ToolUse,
)
from coa.recording.graph import episode_of
from coa.recording.turns import as_text
from coa.recording.wire import FunctionCall, ServerUse, WireMessage, WireUsage
from coa.tasks import Task
from recorded_sessions import (
    INVOICES,
    JOB,
    QUESTION,
    TEAMS,
    SmolMemory,
    Team,
    agents_as_tools,
    call,
    code_prompt,
    code_team,
    crew,
    delegation_inside_a_tool,
    group_chat,
    handoff,
    pipeline,
    several_at_once,
    smolagents_team,
    supervisor,
    tool,
)


def flow(episode: Episode) -> list[str]:
    """Who spoke to whom, and who used which tool; `*` is what code carries."""
    return [
        f"{event.agent}:{event.tool}"
        if isinstance(event, ToolUse)
        else f"{event.agent}>{event.to}{'' if event.call or event.agent == USER else '*'}"
        for event in episode.events
    ]


def uses(episode: Episode) -> list[tuple[str, str, str]]:
    return [
        (event.tool, event.argument, event.result)
        for event in episode.events
        if isinstance(event, ToolUse)
    ]


def gaps(episode: Episode) -> dict[str, int]:
    found: dict[str, int] = episode.meta.get("gaps", {})
    return found


def check(session: LoggedSession) -> Episode:
    """What holds for every episode of whole and sound calls."""
    episode = episode_of(session)
    calls = list(episode.model_calls())
    assert len(calls) == len(session.calls)
    for (place, said), made in zip(calls, session.calls, strict=True):
        exchange = made.exchange
        sent = [ChatMessage("system", exchange.system)]
        for message in exchange.messages:
            role = "user" if message.role == "tool" else message.role
            sent += [ChatMessage(role, as_text(message))] if as_text(message) else []
        assert episode.messages_of(place) == sent, (place, said)
        assert said.call and exchange.reply and said.call.text == as_text(exchange.reply)
    line = dumps(episode.to_json())
    again = Episode.from_json(json.loads(line))
    assert again == episode and dumps(again.to_json()) == line
    return episode


# -- teams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEAMS)
def test_what_follows_or_is_stated_is_what_every_call_was_given(name: str) -> None:
    episode = check(TEAMS[name]())
    assert episode.answer and episode.error is None
    assert episode.events[0].agent == USER


def test_a_sub_agent_called_as_a_tool_is_a_message_out_and_one_back() -> None:
    episode = check(agents_as_tools())
    assert flow(episode) == [
        *("user>boss", "boss>researcher", "researcher>system", "researcher:look"),
        *("researcher:look", "researcher>boss", "boss>system", "boss:add", "boss>user"),
    ]
    out, back = episode.events[1], episode.events[5]
    assert isinstance(out, Message) and isinstance(back, Message)
    assert (out.text, out.thought) == (JOB, "Who knows?\nI ask.")
    assert back.text == INVOICES
    assert [tool.name for tool in episode.tools] == ["add", "look"]
    assert uses(episode)[0] == ("look", '{"q": "Acme"}', "three invoices")
    assert episode.answer == "42 dollars" and gaps(episode) == {}
    assert all(said.call and said.call.given is None for _, said in episode.model_calls())


def test_a_handoff_gives_the_answer_to_the_one_who_asked_first() -> None:
    episode = check(handoff())
    assert flow(episode) == [
        *("user>triage_agent", "triage_agent>system", "triage_agent:look"),
        *("triage_agent>refunds", "refunds>system", "refunds:pay", "refunds>user"),
    ]
    assert [tool.name for tool in episode.tools] == ["look", "pay"]


@pytest.mark.parametrize("whole", [False, True])
def test_a_supervisor_hands_over_and_is_told_the_result(whole: bool) -> None:
    episode = check(supervisor(whole))
    assert flow(episode) == [
        *("user>supervisor", "supervisor>finder", "finder>system", "finder:look"),
        *("finder>supervisor", "supervisor>adder", "adder>system", "adder:add"),
        *("adder>supervisor", "supervisor>user"),
    ]


def test_nodes_of_a_pipeline_speak_to_the_next_one_that_quotes_them() -> None:
    episode = check(pipeline())
    assert flow(episode) == [
        *("user>planner", "planner>worker", "worker>system", "worker:look"),
        *("worker>writer", "writer>user"),
    ]


def test_what_is_short_comes_from_the_only_possible_origin_or_from_nobody() -> None:
    def told(*words: str) -> list[str]:
        team = Team()
        for number, word in enumerate(words):
            agent = team.agent(f"You are the finder number {'abc'[number]} of it.", [tool(word)])
            agent.user(f"{QUESTION} Part {number}")
            agent.replies(word)
        writer = team.agent("You are the writer.")
        writer.user("The sum of it is x42. Write it.")
        writer.replies("Done with it.")
        return flow(episode_of(team.session()))

    assert told("x42")[1].endswith(">writer")
    assert told("x42", "yes")[1].endswith(">writer")
    assert told("x42", "x42")[1].endswith(">system")


def test_several_jobs_and_a_tool_in_one_reply_go_through_the_system_in_branches() -> None:
    episode = check(several_at_once())
    assert flow(episode) == [
        *("user>boss", "boss>system", "boss:look", "system>left*", "system>right*"),
        *("left>system", "left:open", "right>system", "right:open", "right>boss", "left>boss"),
        "boss>user",
    ]
    branches = [event.branch for event in episode.events]
    assert branches == ["", "", "", "1", "2", "1", "1", "2", "2", "2", "1", ""]


def test_an_agent_that_ends_by_a_tool_says_what_it_gives_the_tool() -> None:
    episode = check(delegation_inside_a_tool())
    back = episode.events[4]
    assert isinstance(back, Message) and back.to == "agent_1"
    assert json.loads(back.text)[1] == "a horse walks into a bar one day"
    assert [tool.name for tool in episode.tools] == ["look"]


def test_a_structured_output_is_what_an_agent_says_and_no_tool() -> None:
    team = Team()
    planner = team.agent("You are the planner.", [tool("Outline", title="string")])
    planner.user(QUESTION)
    points = ["Find every invoice of the customer", "Add up the amounts that they state"]
    planner.replies("", call("Outline", points=points, title="Invoices of Acme"))
    writer = team.agent("You are the writer.", [tool("Submission", text="string")])
    writer.user(f"Write 'Invoices of Acme': first {points[0]}, then {points[1]}.")
    writer.replies("", call("Submission", text="It was 42 dollars."))
    episode = check(team.session(answer="It was 42 dollars."))
    assert flow(episode) == ["user>planner", "planner>writer", "writer>user"]
    assert episode.tools == [] and gaps(episode) == {}


def test_planning_and_managed_agents_of_smolagents() -> None:
    episode = check(smolagents_team())
    assert flow(episode) == [
        *("user>agent_1", "agent_1>system", "agent_1>researcher", "researcher>system"),
        *("researcher>system", "researcher:look", "researcher:look", "researcher>system"),
        *("researcher>agent_1", "agent_1>user"),
    ]
    assert [result for _, _, result in uses(episode)] == ["three invoices", "42"]
    assert [tool.name for tool in episode.tools] == ["look"]
    assert episode.agents[0].system == "You can solve any task. You can ask researcher."
    assert episode.question == QUESTION and gaps(episode) == {}


def test_programs_are_the_calls_that_they_make() -> None:
    episode = check(code_team())
    assert uses(episode)[:2] == [
        ("look", '{"q": "Acme"}', "three invoices"),
        ("look", '{"q": "2014"}', "42"),
    ]
    (python,) = (used for used in uses(episode) if used[0] == "python")
    assert python[1].startswith("total = 0\nfor each") and "42" in python[2]
    assert uses(episode)[-1] == ("add", '{"a": 40, "b": 2}', "42")
    assert episode.answer == "42" and gaps(episode) == {"program_unread": 1}
    assert [tool.name for tool in episode.tools] == ["add", "look", "python"]
    thoughts = [said.thought for _, said in episode.model_calls()]
    assert thoughts == ["I ask.", "I look.", "Done.", "I add.", "Again.", "Done."]


def test_actions_written_as_text_are_calls() -> None:
    episode = check(crew())
    assert flow(episode) == [
        *("user>lead", "lead>Finder", "Finder>system", "Finder:look", "Finder>lead", "lead>user"),
    ]
    assert uses(episode) == [("look", '{"q": "Acme"}', "40 and 2")]
    assert episode.answer == "42 dollars"
    assert next(said.thought for _, said in episode.model_calls()) == "I ask."


def test_in_a_group_everybody_speaks_to_the_next_one() -> None:
    episode = check(group_chat())
    names = ["writer>critic", "critic>writer", "writer>critic", "critic>user"]
    assert flow(episode) == ["user>writer", *names]
    assert episode.answer == "Acme owed 42 dollars for 2014."  # stated by the program


# -- who is who --------------------------------------------------------------------------------


def agents_of(*prompts: tuple[str, list[str]], goes_on: bool = False) -> list[str]:
    """The agents of calls with these prompts and tools."""
    team = Team()
    memory: list[WireMessage] = [WireMessage("user", "Hello there, what is the news?")]
    for number, (system, names) in enumerate(prompts):
        agent = team.agent(system, [tool(name) for name in names])
        agent.messages = list(memory)
        agent.replies(f"This is what call number {number} of them says.")
        if goes_on:
            memory = [*agent.messages, WireMessage("user", f"Go on {number}.")]
    return [said.agent for _, said in episode_of(team.session()).model_calls()]


LONG = "You are the buyer. You buy what is asked for, at the best price, and say what it cost."


@pytest.mark.parametrize(
    ("first", "second", "goes_on", "same"),
    [
        ((f"{LONG} Today is 2026-11-18.", ["a"]), (f"{LONG} Today is 2026-12-01.", ["a"]), 0, 1),
        ((f"{LONG} On Monday, 4 May.", []), (f"{LONG} On Friday, 1 June.", []), 0, 1),
        ((LONG, ["a"]), (f"{LONG}\nMemory: the user likes tea.", ["a"]), 0, 1),
        ((LONG, ["a"]), (LONG, []), 1, 1),
        ((LONG, ["a"]), (LONG, ["b"]), 0, 0),
        ((LONG, []), (LONG.replace("buyer", "seller"), []), 0, 0),
        ((LONG, ["a"]), (LONG.replace("buyer", "seller"), ["a"]), 0, 0),
        ((f"{LONG} Memory: tea", ["a"]), (f"{LONG} Memory: coffee", ["a"]), 1, 1),
        ((LONG, ["a"]), ("You judge what others bought.", ["b"]), 1, 0),
        (("", []), (LONG, []), 0, 0),
    ],
)
def test_an_agent_is_a_prompt_and_tools_that_vary_only_a_little(
    first: Any, second: Any, goes_on: bool, same: bool
) -> None:
    one, other = agents_of(first, second, goes_on=goes_on)
    assert (one == other) == same


def test_the_source_knows_best_who_made_a_call() -> None:
    team = Team()
    for name in ("ann", "bob", "ann"):
        agent = team.agent("You are a helpful assistant.")
        agent.user("Hello")
        agent.replies(f"I am {name}", agent=name)
    calls = episode_of(team.session()).model_calls()
    assert [said.agent for _, said in calls] == ["ann", "bob", "ann"]


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("You are the researcher.", "researcher"),
        ("You are a tax expert who knows everything", "tax_expert"),
        ("You are Finder. You find.", "finder"),
        ("Hi! You're an agent named 'bob'.", "bob"),
        ("You are a helpful assistant.", "agent_1"),
        ("You are tasked with providing an answer.", "agent_1"),
        ("You are the user.", "user_agent"),
        ("", "agent_1"),
    ],
)
def test_a_name_is_what_the_prompt_says_or_a_number(prompt: str, name: str) -> None:
    assert agents_of((prompt, [])) == [name]


def test_a_last_answer_when_the_steps_have_run_out_is_the_agents_own() -> None:
    team = Team()
    agent = SmolMemory(team, "You can solve any task.", [tool("look", q="string")], QUESTION)
    agent.seen(agent.replies("", call("look", q="Acme")), "a page about it")
    agent.join(
        "user",
        f"Based on the above, please provide an answer to the following user task:\n{QUESTION}",
    )
    said = WireMessage("assistant", "It must be 42 dollars.")
    team.write("An agent got stuck. Answer instead:", (), agent.messages, said)
    episode = check(team.session())
    assert flow(episode) == ["user>agent_1", "agent_1>system", "agent_1:look", "agent_1>user"]
    assert uses(episode)[0][2] == "a page about it"
    assert episode.answer == "It must be 42 dollars."


# -- what was not said, or said twice ----------------------------------------------------------


def test_a_request_that_is_sent_again_counts_once() -> None:
    team = Team()
    agent = team.agent("You are the boss.")
    agent.user(QUESTION)
    # A refusal names the model that was asked for, a reply the version that answered.
    team.write(agent.system, (), agent.messages, None, status=500, model="model")
    team.write(agent.system, (), agent.messages, WireMessage("assistant", "It i"), cut="closed")
    agent.replies("It is 42.", retry=2)
    episode = episode_of(team.session())
    assert flow(episode) == ["user>boss", "boss>user"]
    assert episode.meta["retried"] == 2 and gaps(episode) == {}


def test_of_two_like_requests_at_once_the_one_that_failed_is_repeated() -> None:
    team = Team()
    agent = team.agent("You toss a coin.")
    agent.user("Toss it.")
    team.write(agent.system, (), agent.messages, None, status=500, request="d")
    for text, retry in (("heads it is", 0), ("tails it is", 1), ("heads again", 2)):
        said = WireMessage("assistant", text)
        team.write(agent.system, (), agent.messages, said, retry=retry, request="d")
    for order, superseded in (
        ([0, 1, 2], [True, False, False]),
        ([1, 0, 2], [False, True, False]),
        ([1, 2, 3], [True, True, False]),
    ):
        session = LoggedSession("run", end={})
        for at in order:
            session.add(team.calls[at])
        assert [call.superseded for call in session.calls] == superseded
        episode = episode_of(session)
        used = len([call for call in session.calls if call.answered])
        assert len(list(episode.model_calls())) == used
        assert episode.meta["retried"] == 3 - used


def test_the_same_request_without_a_failure_is_a_second_one() -> None:
    team = Team()
    for text in ("heads it is", "tails it is"):
        agent = team.agent("You toss a coin.")
        agent.user("Toss it.")
        agent.replies(text)
    assert len(list(episode_of(team.session()).model_calls())) == 2


def test_failed_and_cut_calls_are_gaps() -> None:
    team = Team()
    agent = team.agent("You are the boss.")
    agent.user(QUESTION)
    team.write(agent.system, (), [], None, status=429)
    team.write("Other.", (), agent.messages, None, unread="no JSON")
    agent.replies("It is", cut="the server closed the connection")
    session = team.session(end=None)
    episode = episode_of(session)
    assert gaps(episode) == {"call_failed": 1, "reply_unread": 1, "reply_cut": 1}
    assert episode.error == episode.meta["cut"] == "the recording was cut"
    assert episode.answer is None
    session.end = {"cut": "the program was killed by SIGKILL"}
    assert episode_of(session).error == "the program was killed by SIGKILL"


def test_what_a_server_did_not_count_is_unknown() -> None:
    team = Team()
    agent = team.agent("You are the boss.", [tool("look")])
    agent.user(QUESTION)
    looks = agent.replies("", call("look"), usage=WireUsage(100, 40, 10, 0.5))
    agent.result(looks, "42")
    agent.replies("42", usage=WireUsage(None, None, 7))
    episode = check(team.session())
    assert episode.usage == EpisodeUsage(None, None, 17, None)
    assert gaps(episode) == {"usage_unknown": 1}
    known = check(agents_as_tools())
    assert known.usage[:3] == (500, 0, 50) and known.usage.cost == pytest.approx(0.005)


def test_a_result_that_never_came_back_is_missing_unless_it_is_known_from_elsewhere() -> None:
    team = Team()
    agent = team.agent("You are the boss.", [tool("look", q="string")])
    agent.user(QUESTION)
    said = agent.replies("", call("look", q="x"))
    session = team.session()
    assert gaps(episode_of(session)) == {"result_missing": 1}
    session.results[said.calls[0].id] = WireMessage("tool", "the page", failed=True)
    (used,) = (each for each in episode_of(session).events if isinstance(each, ToolUse))
    assert (used.result, used.failure) == ("the page", "mistake")


def test_tools_that_the_server_ran_stand_before_the_words_that_follow_from_them() -> None:
    team = Team()
    boss = team.agent("You are the boss.")
    boss.user(QUESTION)
    boss.replies("42")
    ran = (
        ServerUse(call("web_search", query="Acme 2014"), "42 dollars"),
        ServerUse(call("file_search", queries=["Acme"])),
        ServerUse(call("open_page", url="http://x"), "not found", failed=True),
    )
    [only] = team.calls
    team.calls = [replace(only, exchange=replace(only.exchange, ran=ran))]
    episode = episode_of(team.session())
    assert [
        (event.tool, event.argument, event.result, event.failure)
        for event in episode.events[1:-1]
        if isinstance(event, ToolUse)
    ] == [
        ("web_search", '{"query": "Acme 2014"}', "42 dollars", None),
        ("file_search", '{"queries": ["Acme"]}', "", None),
        ("open_page", '{"url": "http://x"}', "not found", "mistake"),
    ]
    assert episode.answer == "42" and gaps(episode) == {"result_missing": 1}
    assert [tool.name for tool in episode.tools] == ["web_search", "file_search", "open_page"]


@pytest.mark.parametrize(
    ("used", "text", "unknown"), [("first", "first", 0), ("other", "other", 0), ("", "first", 1)]
)
def test_of_several_choices_the_one_that_a_later_call_shows_was_used(
    used: str, text: str, unknown: int
) -> None:
    team = Team()
    boss = team.agent("You are the boss.")
    boss.user(QUESTION)
    boss.replies("first")
    [only] = team.calls
    drafts = (WireMessage("assistant", "other"),)
    team.calls = [replace(only, exchange=replace(only.exchange, drafts=drafts))]
    if used:
        boss.messages[-1] = WireMessage("assistant", used)
        boss.user("And now?")
        boss.replies("42")
    episode = episode_of(team.session())
    said = [event.text for event in episode.events if isinstance(event, Message) and event.call]
    assert said[0] == text
    assert gaps(episode).get("choice_unknown", 0) == unknown


def test_results_are_told_apart_by_ids_also_where_ids_repeat() -> None:
    team = Team()
    agent = team.agent("You are the boss.", [tool("look", q="string")])
    agent.user(QUESTION)
    for round in "ab":
        calls = [replace(call("look", q=f"{round}{n}"), id=f"call_{n}") for n in (0, 1)]
        said = agent.replies("", *calls)
        for each in reversed(said.calls):
            agent.add("tool", f"page {each.arguments['q']}", answers=each.id)  # type: ignore[index]
    agent.replies("Done.")
    assert [result for _, _, result in uses(check(team.session()))] == [
        *("page a0", "page a1", "page b0", "page b1"),
    ]


def test_results_joined_in_one_text_are_told_apart_line_by_line_or_not_at_all() -> None:
    def seen(*texts: str) -> tuple[list[str], dict[str, int]]:
        team = Team()
        agent = SmolMemory(team, "You can solve any task.", [tool("look", q="string")], QUESTION)
        said = agent.replies("", call("look", q="a"), call("look", q="b"))
        agent.seen(said, *texts)
        agent.replies("", call("final_answer", answer="42"))
        episode = check(team.session())
        return [result for _, _, result in uses(episode)], gaps(episode)

    assert seen("one", "two") == (["one", "two"], {})
    assert seen("one\nmore", "two") == (["", ""], {"results_joined": 2})


def test_an_error_of_a_reply_that_was_left_out_is_its_result() -> None:
    team = Team()
    agent = SmolMemory(team, "You can solve any task.", [tool("look", q="string")], QUESTION)
    agent.seen(agent.replies("", call("look", q="a")), "page a")
    agent.replies("", call("look", q=5))
    agent.join(
        "user", "Error:\nq is no text\nNow let's retry: take care not to repeat previous errors!"
    )
    agent.replies("", call("final_answer", answer="42"))
    episode = check(team.session())
    assert [result for _, _, result in uses(episode)] == ["page a", "q is no text"]
    assert episode.answer == "42"


def test_an_error_of_a_first_reply_that_was_left_out_is_joined_to_the_task() -> None:
    team = Team()
    agent = SmolMemory(team, "You can solve any task.", [tool("look", q="string")], QUESTION)
    for found in ("q is no text", "q is too short"):
        agent.replies("", call("look", q=found))
        agent.join(
            "user", f"Error:\n{found}\nNow let's retry: take care not to repeat previous errors!"
        )
    agent.replies("", call("final_answer", answer="42"))
    episode = check(team.session())
    assert [result for _, _, result in uses(episode)] == ["q is no text", "q is too short"]
    assert episode.answer == "42" and gaps(episode) == {}


def test_a_summary_in_place_of_the_history_counts_nothing_twice() -> None:
    team = Team()
    agent = team.agent("You are the boss.", [tool("look", q="string")])
    agent.user(QUESTION)
    for number in range(3):
        agent.result(agent.replies("", call("look", q=str(number))), f"page {number}")
    agent.user("Sum up what happened so far.")
    summary = agent.replies("We looked at three pages, and nothing was found on any of them.")
    agent.messages = [WireMessage("user", f"So far: {summary.text} Go on.")]
    agent.result(agent.replies("", call("look", q="3")), "page 3")
    agent.replies("42")
    episode = check(team.session())
    assert flow(episode).count("boss:look") == 4
    assert flow(episode)[-4:] == ["boss>system", "boss>system", "boss:look", "boss>user"]
    assert gaps(episode) == {}


def test_an_agent_that_is_shown_the_transcript_of_another_repeats_nothing() -> None:
    team = Team()
    agent = team.agent("You are the boss.", [tool("look", q="string")])
    agent.user(QUESTION)
    agent.result(agent.replies("", call("look", q="Acme")), "42")
    judge = team.agent("You are the judge.", [tool("score")])
    judge.messages = [*agent.messages, WireMessage("user", "Is this going well?")]
    judge.replies("It is going very well indeed, go on like that.")
    agent.add("user", f"The judge says: {judge.messages[-1].text}")
    agent.replies("It is 42.")
    episode = check(team.session())
    assert flow(episode) == [
        *("user>boss", "boss>system", "boss:look", "system>judge*", "judge>boss", "boss>user"),
    ]


def test_a_reply_goes_on_from_the_one_that_it_names() -> None:
    team = Team()
    tools = [tool("look", q="string")]
    said = WireMessage("assistant", "", calls=(call("look", q="Acme"),))
    asked = WireMessage("user", QUESTION)
    team.write("You are the boss.", tools, [asked], said, id="resp_1")
    result = WireMessage("tool", "42", answers=said.calls[0].id)
    done = WireMessage("assistant", "It is 42.")
    team.write("You are the boss.", tools, [result], done, id="resp_2", follows="resp_1")
    episode = episode_of(team.session())
    assert uses(episode) == [("look", '{"q": "Acme"}', "42")] and gaps(episode) == {}
    place, _ = list(episode.model_calls())[1]
    assert episode.messages_of(place)[1:] == [
        ChatMessage("user", QUESTION),
        ChatMessage("assistant", as_text(said)),
        ChatMessage("user", "42"),
    ]
    team.write("You are the boss.", tools, [asked], done, follows="resp_unknown")
    assert gaps(episode_of(team.session()))["history_missing"] == 1


def test_a_system_prompt_that_the_server_keeps_is_that_of_what_follows(tmp_path: Path) -> None:
    team = Team()
    words = [WireMessage(role, text) for role, text in (("user", QUESTION), ("assistant", "42?"))]
    prompt = "You are the boss. Be short."
    team.write(prompt, (), words[:1], words[1], id="r1", kept=prompt)
    follow = WireMessage("user", "Are you sure?")
    done = WireMessage("assistant", "It is 42.")
    team.write("", (), [follow], done, id="r2", follows="r1")
    team.write("Now be quick.", (), [follow], done, id="r3", follows="r2")
    path = tmp_path / "log.jsonl"
    with CallLog(path) as log:
        for each in team.calls:
            log.write(each)
    (session,) = read_sessions(path)
    episode = episode_of(session)
    given = [episode.messages_of(place) for place, _ in episode.model_calls()]
    assert [said[0].text for said in given] == [
        *(prompt, prompt, f"Now be quick.\n\n{prompt}"),
    ]
    assert [message.text for message in given[2][1:]] == [
        *(QUESTION, "42?", "Are you sure?", "It is 42.", "Are you sure?"),
    ]
    assert len(episode.agents) == 1


def test_a_tool_that_makes_something_else_of_an_agents_work_stays_a_tool() -> None:
    team = Team()
    head = team.agent("You are the boss.", [tool("measure", about="string")])
    head.user(QUESTION)
    asks = head.replies("", call("measure", about="the invoices of Acme"))
    other = team.agent("You are the meter.")
    other.user("Text: there are 42 of the invoices of Acme. How many?")
    other.replies("There are forty and two of them, as it seems.")
    head.result(asks, "length: 45 letters")
    head.replies("42")
    episode = check(team.session())
    assert flow(episode) == [
        *("user>boss", "boss>system", "system>meter*", "meter>system", "boss:measure"),
        "boss>user",
    ]


def test_one_agent_may_be_asked_twice_at_once_by_one_tool_for_all() -> None:
    team = Team()
    boss = team.agent("You are the boss.", [tool("Task", prompt="string", subagent_type="string")])
    boss.user(QUESTION)
    jobs = ["Look into the drawer on the left.", "Look into the drawer on the right."]
    asks = boss.replies("", *(call("Task", prompt=job, subagent_type="general") for job in jobs))
    begun, found = team.clock, ["nothing", "42"]
    for job, text in zip(jobs, found, strict=True):
        agent = team.agent("You do as you are told.", [tool("open", drawer="string")])
        agent.user(job)
        opens = agent.replies("", call("open", drawer="it"), begun=begun + 1)
        agent.result(opens, f"{text} is inside")
        agent.replies(text, begun=begun + 3 + len(text) / 10)
    boss.result(asks, *found)
    boss.replies("42")
    episode = check(team.session())
    assert flow(episode) == [
        *("user>boss", "boss>system", "system>general*", "system>general*", "general>system"),
        *("general:open", "general>system", "general:open", "general>boss", "general>boss"),
        "boss>user",
    ]
    assert [event.branch for event in episode.events[2:-1]] == list("12112221")
    assert gaps(episode) == {}


def test_agents_that_nobody_asked_work_in_branches_where_they_work_at_once() -> None:
    team = Team()
    for number, name in enumerate(("finder", "counter")):
        agent = team.agent(f"You are the {name}.", [tool("look", q="string")])
        agent.user(QUESTION)
        said = agent.replies("", call("look", q=name), begun=10 + number, ended=12 + number)
        agent.result(said, "page")
        agent.replies(f"This is what the {name} found there.", begun=14 + number, ended=16 + number)
    writer = team.agent("You are the writer.")
    both = "This is what the finder found there. This is what the counter found there."
    writer.user(f"Join: {both}")
    writer.replies("42", begun=20, ended=21)
    episode = check(team.session())
    assert [
        (each, event.branch) for each, event in zip(flow(episode), episode.events, strict=True)
    ] == [
        ("user>finder", ""),
        ("finder>system", "1"),
        ("finder:look", "1"),
        ("system>counter*", "2"),
        ("counter>system", "2"),
        ("counter:look", "2"),
        ("finder>writer", "1"),
        ("counter>writer", "2"),
        ("writer>user", ""),
    ]


# -- what a session states ---------------------------------------------------------------------


def test_the_task_and_the_answer_are_those_that_are_stated() -> None:
    session = agents_as_tools()
    task = Task("How much did Acme owe?", id="t1")
    assert episode_of(session, task).task_id == "t1"
    assert episode_of(session, task).question == "How much did Acme owe?"
    opening = episode_of(session, task).events[0]
    assert isinstance(opening, Message) and opening.text == "How much did Acme owe?"
    session.about.update(task_id="t2", question=QUESTION, source="otel", success=1)
    session.end = {"answer": "forty-two"}
    episode = episode_of(session)
    assert (episode.task_id, episode.answer) == ("t2", "forty-two")
    assert episode.meta == {"source": "otel", "success": 1}
    session.end = {"exit_code": 3}
    assert episode_of(session).error == "the program ended with exit code 3"


def test_a_session_without_a_call_is_an_episode_without_events() -> None:
    episode = episode_of(LoggedSession("s", {"question": QUESTION}, [], {}))
    assert episode.events == [] and episode.error == "no final answer was recorded"
    assert Episode.from_json(json.loads(dumps(episode.to_json()))) == episode


def test_wall_clock_is_no_part_of_the_record() -> None:
    episode = episode_of(agents_as_tools())
    assert episode.seconds["total"] > episode.seconds["model"] > 0
    assert "seconds" not in episode.to_json()


# -- programs ----------------------------------------------------------------------------------


def programs(*steps: tuple[str, str, str]) -> Episode:
    """The episode of an agent that writes these programs: (code, what it prints, last value)."""
    team = Team()
    prompt = code_prompt("look(q: string) -> string", "count(q: string) -> integer")
    agent = SmolMemory(team, prompt, task=QUESTION)
    for code, logs, last in steps:
        agent.ran(agent.programs("So.", code), code, logs, last)
    agent.programs("So.", 'final_answer("42")')
    return check(team.session())


@pytest.mark.parametrize(
    ("code", "logs", "last", "expected"),
    [
        ('print(look(q="a"))', "x\ny\n", "None", [('{"q": "a"}', "x\ny")]),
        ('look("a")', "", "x\ny", [('{"q": "a"}', "x\ny")]),
        ('x = look("a")\nprint(f"It is {x}!")', "It is z!\n", "None", [('{"q": "a"}', "z")]),
        ('n = "b" + "c"\nx = look(q=f"{n}!")', "", "z", [('{"q": "bc!"}', "z")]),
        (
            'print(look("a"))\nprint(look("b"))',
            *("1\n2\n", "None"),
            [('{"q": "a"}', "1"), ('{"q": "b"}', "2")],
        ),
        ('print(look("a"))\nprint(look("b"))', "1\n2\n3\n", "None", None),
        ('x = look("a")\ny = look("b")\nprint(y)', "1\n", "None", None),
        ('print(look(q=len("a")))', "1\n", "None", None),
        ('if look("a"):\n    print(1)', "1\n", "None", None),
        ('import os\nprint(look("a"))', "1\n", "None", None),
        ('print(look("a"), other("b"))', "1 2\n", "None", None),
        ('print(look("a")[:3])', "1\n", "None", None),
        ("print(look(q)", "", "None", None),
        ('look(*["a"])', "", "x", None),
        ('__import__("os").system("x")', "", "0", None),
    ],
)
def test_a_program_is_read_where_it_only_calls_and_prints(
    code: str, logs: str, last: str, expected: list[tuple[str, str]] | None
) -> None:
    episode = programs((code, logs, last))
    if expected is None:
        assert [tool for tool, _, _ in uses(episode)] == ["python"]
        assert uses(episode)[0][1] == code and gaps(episode) == {"program_unread": 1}
    else:
        assert uses(episode) == [("look", *each) for each in expected] and gaps(episode) == {}


def test_names_keep_their_values_until_something_unread_may_change_them() -> None:
    sets = ('name = "Acme"\nn = count(name)\nprint(n)', "3\n", "None")
    used = ("print(look(q=name))", "page\n", "None")
    counted = ('print(look(q=f"{n} pages"))', "page\n", "None")
    changes = ('for name in ["b"]:\n    pass', "", "None")
    assert uses(programs(sets, used, counted))[1:] == [
        ("look", '{"q": "Acme"}', "page"),
        ("look", '{"q": "3 pages"}', "page"),
    ]
    assert gaps(programs(sets, changes, used)) == {"program_unread": 2}


def test_a_function_that_a_program_replaces_is_no_tool_any_more() -> None:
    replaced = ("def look(q):\n    return q", "", "None")
    used = ('print(look(q="a"))', "a\n", "None")
    assert [name for name, _, _ in uses(programs(used, replaced, used))] == [
        *("look", "python", "python"),
    ]
    assert [name for name, _, _ in uses(programs(('look = "x"', "", "x"), used))] == ["python"] * 2


@pytest.mark.parametrize("text", ["[" * 50_000, '{"a":' * 50_000, '{"a":[' * 300 + "]}" * 300])
def test_texts_that_are_nested_too_deeply_are_only_texts(text: str) -> None:
    team = Team()
    writer = SmolMemory(team, code_prompt("look(q: string) -> string"), task=QUESTION)
    writer.replies(text)
    actor = team.agent("You act.\nAction: the action\nAction Input: JSON\nlook")
    actor.user(f"{QUESTION} {text}")
    actor.replies(f"Action: look\nAction Input: {text}")
    reader = team.agent("You read.")
    reader.user(f"So it was: {text[:-40]}")
    reader.replies("It was 42.")
    assert len(list(check(team.session()).model_calls())) == 3


def test_the_only_call_of_a_program_that_failed_is_what_failed() -> None:
    team = Team()
    agent = SmolMemory(team, code_prompt("look(q: string) -> string"), task=QUESTION)
    code = 'page = look(q="a")'
    said = agent.programs("So.", code)
    agent.ran(said, code, "")
    error = "Call id: call_2\nError:\nno page a\nNow let's retry: take care not to repeat previous errors!"  # noqa: E501
    agent.messages[-1] = WireMessage("user", error)
    agent.programs("So.", "final_answer(page)")
    episode = check(team.session())
    (used,) = (each for each in episode.events if isinstance(each, ToolUse))
    assert (used.tool, used.result, used.failure) == ("look", "no page a", "mistake")
    assert episode.answer is None  # nobody knows what the name stands for


def test_words_that_are_left_of_a_reply_that_failed_are_known_by_their_place() -> None:
    team = Team()
    agent = SmolMemory(team, "You can solve any task.", [tool("look", q="string")], QUESTION)
    agent.replies("So.", call("look", q="a"))
    agent.join("assistant", "So.")
    agent.join(
        "user", "Error:\nno page a\nNow let's retry: take care not to repeat previous errors!"
    )
    agent.replies("", call("final_answer", answer="42"))
    episode = check(team.session())
    assert uses(episode) == [("look", '{"q": "a"}', "no page a")] and gaps(episode) == {}


# -- random teams ------------------------------------------------------------------------------


class Plan:
    """A random team, and what its episode must say."""

    def __init__(self, draw: Any, name: str) -> None:
        self.draw, self.name = draw, name
        self.team = Team(name)
        self.texts = 0
        self.uses: list[tuple[str, str]] = []
        self.said: list[tuple[str, str]] = []

    def text(self, what: str) -> str:
        self.texts += 1
        return f"{self.name}: {what} number {self.texts} of all that were said in this run"

    def work(self, name: str, task: str, depth: int, root: bool = False) -> str:
        """An agent at work; returns its reply."""
        below = [f"{name}_{letter}" for letter in "ab"] if depth else []
        jobs = [tool(each, task="string") for each in below]
        agent = self.team.agent(
            f"You work at desk {name}.", [tool(f"tool_{name}", q="string"), *jobs]
        )
        agent.user(task)
        for _ in range(self.draw(st.integers(0, 3))):
            kinds = self.draw(st.lists(st.sampled_from(["tool", *below]), min_size=1, max_size=3))
            if len(set(kinds) - {"tool"}) < len([kind for kind in kinds if kind != "tool"]):
                kinds = kinds[:1]  # one agent is not asked twice at once
            at_once = self.draw(st.booleans())
            calls = [
                call(f"tool_{name}", q=self.text("query"))
                if kind == "tool"
                else call(kind, task=self.text("job"))
                for kind in kinds
            ]
            said = agent.replies(self.draw(st.sampled_from(["", "So."])), *calls)
            results = []
            begun, ends = self.team.clock, [self.team.clock]
            for kind, made in zip(kinds, calls, strict=True):
                if kind != "tool" and at_once:
                    self.team.clock = begun + self.draw(st.integers(0, 3)) / 4
                if kind == "tool":
                    results.append(self.text("page"))
                    self.uses.append((made.name, results[-1]))
                else:
                    results.append(self.work(kind, made.arguments["task"], depth - 1))  # type: ignore[index]
                    self.said.append((kind, name))
                ends.append(self.team.clock)
            self.team.clock = max(ends)
            agent.result(said, *results)
        reply = self.text("reply")
        agent.replies(reply)
        if root:
            self.said.append((name, USER))
        return reply


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_team_of_agents_and_tools_is_found_as_it_was(choice: Any) -> None:
    plan = Plan(choice.draw, "run")
    answer = plan.work("root", plan.text("question"), 2, root=True)
    episode = check(plan.team.session())
    names = {
        spec.name: spec.system.removeprefix("You work at desk ").removesuffix(".")
        for spec in episode.agents
    }
    final = [
        (names[said.agent], names.get(said.to, said.to))
        for _, said in episode.model_calls()
        if said.to != SYSTEM and "reply number" in said.text
    ]
    assert sorted(final) == sorted(plan.said) and episode.answer == answer
    assert sorted((tool, result) for tool, _, result in uses(episode)) == sorted(plan.uses)
    assert gaps(episode) == {}
    order = [said.call for _, said in episode.model_calls()]
    ended = {as_text(made.exchange.reply): made.ended for made in plan.team.calls}  # type: ignore[arg-type]
    assert [ended[made.text] for made in order if made] == sorted(ended.values())
    for branch in {event.branch for event in episode.events} - {""}:
        places = [at for at, event in enumerate(episode.events) if event.branch == branch]
        assert all(episode.events[at].branch for at in range(places[0], places[-1]))
    texts = [event.text for event in episode.events if isinstance(event, Message)]
    jobs = [text for text in texts if "job number" in text]
    assert len(jobs) == len(set(jobs))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_sessions_that_are_recorded_at_once_do_not_mix(
    tmp_path_factory: pytest.TempPathFactory, choice: Any
) -> None:
    plans = [Plan(choice.draw, name) for name in ("one", "two")]
    for plan in plans:
        plan.work("root", QUESTION, 1, root=True)
    calls = [made for plan in plans for made in plan.team.calls]
    first = choice.draw(st.sampled_from(["one", "two"]))
    # Of two calls that ended at once in one session the log keeps the order.
    mixed = sorted(range(len(calls)), key=lambda at: (calls[at].ended, calls[at].session != first))
    path = tmp_path_factory.mktemp("log") / "calls.jsonl"
    with CallLog(path) as log:
        for plan in plans:
            log.begin(plan.name)
        for at in mixed:
            log.write(calls[at])
        for plan in plans:
            log.end(plan.name, exit_code=0)
    for plan, session in zip(plans, read_sessions(path), strict=True):
        assert episode_of(session) == episode_of(plan.team.session())


_WORDS = st.sampled_from(
    [
        *("", "yes", "Observation:\nx", "Error:\ny", "Calling tools:\n[]", "Final Answer: z"),
        *("Action: look\nAction Input: {}", "<code>\nx = look('a')\n</code>", '{"a": ["b"]}'),
        "This is a longer text that says something of its own.",
        "Calling tools:\n[{'id': '1', 'type': 'f', 'function': {'name': 'look', 'arguments': {}}}]",
    ]
)
_CALLS = st.lists(
    st.builds(
        FunctionCall,
        st.sampled_from(["", "1", "2"]),
        st.sampled_from(["look", "transfer_to_x", "final_answer", "python_interpreter", ""]),
        st.sampled_from([{}, {"q": "yes"}, {"q": 1, "r": ["yes"]}, "text"]),
    ),
    max_size=2,
).map(tuple)
_ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
_MESSAGES = st.builds(
    lambda role, text, calls, answers: WireMessage(
        role, text, calls=calls if role == "assistant" else (), answers=answers
    ),
    *(_ROLES, _WORDS, _CALLS, st.sampled_from(["", "1", "2"])),
)
_SYSTEMS = ["", "You are the boss.", "You are the user.", code_prompt("look(q: string) -> string")]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_whatever_is_said_every_call_is_one_message_and_what_it_was_given_is_known(
    choice: Any,
) -> None:
    team = Team()
    seen: list[WireMessage] = []
    for _ in range(choice.draw(st.integers(1, 6))):
        kept = seen[: choice.draw(st.integers(0, len(seen)))]
        seen = [*kept, *choice.draw(st.lists(_MESSAGES, max_size=3))]
        said = choice.draw(_MESSAGES.map(lambda each: replace(each, role="assistant")))
        begun = team.clock + choice.draw(st.integers(-3, 1))
        tools = [tool("look", q="string")][: choice.draw(st.integers(0, 1))]
        system = choice.draw(st.sampled_from(_SYSTEMS))
        ended = max(begun, team.clock) + 1
        team.write(system, tools, seen, said, begun=begun, ended=ended)
        seen = [*seen, said]
    session = team.session()
    for number, made in enumerate(session.calls):  # the same request twice is no retry here
        session.calls[number] = replace(made, exchange=replace(made.exchange, model=f"m{number}"))
    check(session)


def test_a_session_survives_its_log(tmp_path: Path) -> None:
    for name, made in TEAMS.items():
        session = made()
        path = tmp_path / f"{name}.jsonl"
        with CallLog(path) as log:
            log.begin(session.name, **session.about)
            for each in session.calls:
                log.write(each)
            log.end(session.name, **(session.end or {}))
        (again,) = read_sessions(path)
        assert episode_of(again) == episode_of(session), name
