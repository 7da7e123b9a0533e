"""Captured traffic of five frameworks, sent through the proxy once more: what is recorded is what
the programs of the teams say.

The captures are `tests/data/traffic`, and its README says of what. What has to be found follows
from the programs (`examples/office/*_team.py`, `tests/teams/*_team.py`): who is in a team, and who
asks whom; from how their model decides (`examples/office/model.py`): the jobs; and from the tools
themselves (`office.py`): results and answers. Nothing of it is read from a recording.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from coa.io.runs import Json
from coa.recording.calls import LoggedSession
from coa.recording.episode import SYSTEM, USER, Message, ToolUse
from proxy_parts import only, proxying
from scripted_provider import Asked, Reply, ScriptedProvider
from test_recorded_teams import check, gaps

HERE = Path(__file__).resolve().parent
TRAFFIC = HERE / "data" / "traffic"
sys.path += [str(HERE.parent / "examples" / "office"), str(HERE / "teams")]

import office  # noqa: E402
from comparing import agents_by_prompt, differences  # noqa: E402
from model import Chat, Responses  # noqa: E402
from questions import discount  # noqa: E402

# -- what was asked, and what has to be done for it ------------------------------------------------

BOOKS, SOFTWARE = office.CUSTOMERS["Willow Books"], office.CUSTOMERS["Beacon Software"]
PAID, PERCENT = BOOKS.invoices[2014], discount(BOOKS)
RESEARCH = ("find_customer", "search_policy")
ACCOUNTS = ("lookup_invoice", "convert", "deduct", "add")


def invoice(customer: str, year: int) -> tuple[str, str, Json]:
    return "accountant", "lookup_invoice", {"customer": customer, "year": year}


@dataclass(frozen=True)
class Question:
    """A question, and how the model has the office answer it."""

    text: str
    uses: tuple[tuple[str, str, Json], ...]
    """(who, tool, arguments), in order; the model slips where it gives half of a name."""
    jobs: tuple[tuple[str, str, str], ...]
    """(who, job, report) of what the one who has the question does not do itself."""
    answer: str


WHOLE = "What did Willow Books pay in 2014 and 2015 together?"
YEN = "What did Beacon Software pay in 2013, in JPY?"
QUESTIONS = {
    "net": Question(
        "What did Willow Books owe for 2014 after its discount?",
        (
            ("researcher", "find_customer", {"name": BOOKS.name}),
            ("researcher", "search_policy", {"query": f"discounts for {BOOKS.group} customers"}),
            invoice(BOOKS.name, 2014),
            ("accountant", "deduct", {"amount": PAID, "percent": PERCENT}),
        ),
        (
            ("researcher", "What discount does Willow Books get?", f"{PERCENT} percent"),
            (
                "accountant",
                f"What did Willow Books owe for 2014 after {PERCENT} percent discount?",
                office.deduct(PAID, PERCENT),
            ),
        ),
        office.deduct(PAID, PERCENT),
    ),
    "pair": Question(
        "In which city is Willow Books, and what did it pay in 2014?",
        (("researcher", "find_customer", {"name": BOOKS.name}), invoice(BOOKS.name, 2014)),
        (
            ("researcher", "In which city is Willow Books?", BOOKS.city),
            ("accountant", "What did Willow Books pay in 2014?", f"{PAID} EUR"),
        ),
        f"{BOOKS.city}, {PAID} EUR",
    ),
    "both-slip": Question(
        WHOLE,
        (
            invoice("Willow", 2014),
            invoice(BOOKS.name, 2014),
            invoice(BOOKS.name, 2015),
            ("accountant", "add", {"first": PAID, "second": BOOKS.invoices[2015]}),
        ),
        (("accountant", WHOLE, office.add(PAID, BOOKS.invoices[2015])),),
        office.add(PAID, BOOKS.invoices[2015]),
    ),
    "slip-silent": Question(
        YEN,
        (
            invoice("Beacon", 2013),
            invoice(SOFTWARE.name, 2013),
            ("accountant", "convert", {"amount": SOFTWARE.invoices[2013], "currency": "JPY"}),
        ),
        (("accountant", YEN, office.convert(SOFTWARE.invoices[2013], "JPY")),),
        office.convert(SOFTWARE.invoices[2013], "JPY"),
    ),
}

# -- the teams -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Team:
    """A team as its program makes it."""

    prompts: dict[str, str]
    """Agent -> what only its own system prompt says; the first one speaks with the user."""
    names: dict[str, str]
    """Agent -> what it is called where others reach it, or what its prompt calls it; nothing on the
    wire names one of whom neither says so."""
    tells: bool = False
    """Whether its framework says of a result that the tool failed, in a way that is told apart from
    what tools return."""


BRIEF = "Answer with the value alone, or with: not found."
SMOLAGENTS = Team(
    {
        "manager": BRIEF,
        "researcher": "Look up a customer: the city it is in and its price group.",
        "accountant": "Look up what a customer paid in a year, in euros.",
    },
    {"manager": "agent_1", "researcher": "researcher", "accountant": "accountant"},
    tells=True,
)
TEAMS = {
    "smolagents": SMOLAGENTS,
    "smolagents_code": SMOLAGENTS,
    "langgraph": Team(
        {
            "supervisor": "You are the supervisor of an office. Hand over to one agent at a time. "
            "In the end answer with the value alone, or with: not found.",
            "researcher": "You are the researcher of an office. Find what is asked about "
            "customers, discounts and policies, and nothing else.",
            "accountant": "You are the accountant of an office. Look up what customers paid and "
            "calculate with the tools.",
        },
        {name: name for name in ("supervisor", "researcher", "accountant")},
    ),
    "agents_sdk": Team(
        {
            "front desk": "Hand the question over to the one who can answer it.",
            "researcher": f"You look customers, discounts and policies up. {BRIEF}",
            "accountant": f"You look up what customers paid, and calculate with the tools. {BRIEF}",
        },
        {"front desk": "agent_1", "researcher": "researcher", "accountant": "accountant"},
    ),
    "crewai": Team(
        {
            "researcher": "Your personal goal is: Look customers, discounts and policies up",
            "accountant": "Your personal goal is: Look up what customers paid, calculate, and "
            "answer",
        },
        {"researcher": "researcher", "accountant": "accountant"},
    ),
    "pydantic_ai": Team(
        {
            "desk": f"Ask your colleagues. {BRIEF}",
            "researcher": "You look customers, discounts and policies up.",
            "accountant": "You look up what customers paid, and calculate with the tools.",
        },
        {"desk": "agent_1", "researcher": "researcher", "accountant": "accountant"},
    ),
}
CAPTURES = [
    *(f"{team}-{kind}" for team in TEAMS for kind in ("net", "pair", "both-slip")),
    "smolagents-slip-silent",
]


def runs_of(framework: str, asked: Question) -> list[tuple[str, str, str, str, str]]:
    """(agent, who asked it, job, report, to whom) of each piece of work, by how a team is made."""
    answer, head = asked.answer, next(iter(TEAMS[framework].prompts))
    research = [(job, report) for who, job, report in asked.jobs if who == "researcher"]
    if framework == "crewai":  # each has its task, and the second is shown what the first found
        found = research[0][1] if research else "Nothing in the records that I have."
        return [
            ("researcher", "", "", found, "accountant"),
            ("accountant", "", "", answer, "user"),
        ]
    if framework == "agents_sdk":  # the accountant is handed all of it, and has a colleague
        helped = [
            ("researcher", "accountant", job, report, "accountant") for job, report in research
        ]
        return [*helped, ("accountant", head, "", answer, "user")]
    if framework == "langgraph":  # they share one conversation, so the last one knows all of it
        done = [("researcher", head, "", report, head) for _, report in research]
        done.append(("accountant", head, "", answer, head))
    else:
        done = [(who, head, job, report, head) for who, job, report in asked.jobs]
    return [*done, (head, "", asked.text, answer, "user")]


def talk_of(framework: str, asked: Question) -> Counter[tuple[str, str]]:
    """Who speaks to whom, and how often. What is asked for together, in one reply, goes out from
    `system`; a handoff says nothing else, and LangGraph's supervisor makes one at a time."""
    talk = Counter([(USER, next(iter(TEAMS[framework].prompts)))])
    together = asked is QUESTIONS["pair"] and framework != "langgraph"
    for agent, asker, job, _, to in runs_of(framework, asked):
        talk[agent, to] += 1
        if asker:
            talk[SYSTEM if together and job else asker, agent] += 1
    return talk


def result_of(framework: str, tool: str, arguments: Json) -> str:
    """What a tool returns, or what the agent is told where it raises."""
    try:
        return str(getattr(office, tool)(**arguments))
    except LookupError as error:
        if framework == "agents_sdk":  # the program had no function then that tells the model
            return "An error occurred while running the tool. Please try again."
        return str(error)


def truth_of(framework: str, asked: Question) -> Json:
    """The run in the form in which tests/teams/witness.py writes one down."""
    runs = runs_of(framework, asked)
    fields = ("agent", "asker", "job", "report", "to")
    seen = {name for run in runs for name in run[:2] if name}
    uses = [
        {
            "agent": who,
            "tool": tool,
            "arguments": given,
            "result": result_of(framework, tool, given),
        }
        for who, tool, given in asked.uses
    ]
    return {
        "answer": asked.answer,
        "agents": {n: text for n, text in TEAMS[framework].prompts.items() if n in seen},
        "runs": [dict(zip(fields, run, strict=True)) for run in runs],
        "uses": uses,
    }


# -- the wire ------------------------------------------------------------------------------------


async def sent_again(captured: list[Json], log: Path, stream: bool) -> LoggedSession:
    """The session of a capture: its requests through the proxy, and its replies back."""
    left = iter(captured)

    def script(asked: Asked) -> Reply:
        reply = next(left)["reply"]
        api = Responses() if asked.dialect == "responses" else Chat()
        events = [each for each in api.events(reply, asked.body) if each[1]]
        return Reply(captured=(reply, events))

    with ScriptedProvider(script) as provider:
        async with proxying(provider, log) as (_, client):
            for each in captured:
                body = each["request"]
                if stream:
                    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
                answer = await client.post(each["path"], json=body)
                assert stream or answer.json() == each["reply"]
                assert answer.content == provider.sent[-1]
                assert provider.asked[-1].body == body
    return only(log)


def test_every_capture_is_one_of_these() -> None:
    assert sorted(path.stem for path in TRAFFIC.glob("*.json")) == sorted(CAPTURES)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CAPTURES)
async def test_traffic_of_a_team_is_recorded_as_the_run_that_it_was(
    tmp_path: Path, name: str, stream: bool
) -> None:
    framework, _, kind = name.partition("-")
    asked, team = QUESTIONS[kind], TEAMS[framework]
    captured = json.loads((TRAFFIC / f"{name}.json").read_text(encoding="utf-8"))
    session = await sent_again(captured, tmp_path / "log.jsonl", stream)
    truth = truth_of(framework, asked)
    episode = check(session)  # every call has a message, and what it was given word by word

    assert differences(truth, episode) == []
    names = agents_by_prompt(truth, episode)
    said = (each for each in episode.events if isinstance(each, Message) and each.to != SYSTEM)
    assert Counter((names[each.agent], names[each.to]) for each in said) == talk_of(
        framework, asked
    )
    assert {each.name for each in episode.agents} == {team.names[n] for n in truth["agents"]}
    assert episode.answer == asked.answer and episode.error is None and gaps(episode) == {}
    assert episode.question == asked.text or framework == "crewai"  # which has it in a task

    uses = [each for each in episode.events if isinstance(each, ToolUse)]
    failed = [json.loads(each.argument) for each in uses if each.failure]
    slips = [given for _, _, given in asked.uses if given.get("customer") in ("Willow", "Beacon")]
    assert failed == (slips if team.tells else [])

    tools = [*(RESEARCH if "researcher" in truth["agents"] else ()), *ACCOUNTS]
    if "researcher" not in truth["agents"] and framework in ("agents_sdk", "pydantic_ai"):
        tools.append("ask_researcher")  # nobody asked, so nothing shows that this is an agent
    assert sorted(tool.name for tool in episode.tools) == sorted(tools)

    calls = [said.call for _, said in episode.model_calls() if said.call]
    given, written = ("prompt_tokens", "completion_tokens")
    if framework == "agents_sdk":
        given, written = ("input_tokens", "output_tokens")
    counted = [each["reply"]["usage"] for each in captured]
    assert [(call.prompt_tokens, call.cached_tokens, call.sampled_tokens) for call in calls] == [
        (each[given], each[f"{given}_details"]["cached_tokens"], each[written]) for each in counted
    ]
