"""The agents of a team: who they are, what their prompts say, and in which form they reply.

The prompts (prompts.toml) have the content of a real system's and are shorter than most
(docs/cost.md). They are part of the record, because the cost of a multi-agent system is mostly the
prompts and contexts that its agents read again and again. The rule-based experts enact the agents
of `agents_of`; a team of language models (`roster_for`) has the same agents, each with a contract
behind its prompt that says in which form it replies.

A reply is labelled lines (`THOUGHT: ...`, `INPUT: ...`), not JSON: a small model forgets a quote or
a brace long before it forgets a word at the start of a line, a program needs no escaping, and a
reply that was cut still shows what is missing. `replies` reads them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from coa.errors import UsageError
from coa.recording.episode import AgentSpec
from coa.recording.recorder import CRITERIA
from coa.tools.base import Tool, Toolbox

TeamName = Literal["wiki", "web", "calculation", "coding", "general"]
"""A team for an encyclopedia, for a web site, for look-ups and a calculation, for programs alone,
and one whose prompts name no tool."""
CODE, CRAWL = "code", "crawl_page"


@cache
def _prompts() -> dict[str, dict[str, Any]]:
    return tomllib.loads(
        resources.files("coa.recording").joinpath("prompts.toml").read_text("utf-8")
    )


def agents_of(team: TeamName) -> list[AgentSpec]:
    """The agents of a team, each with its full system prompt."""
    own = _prompts()[team]
    given = {**_prompts()["wiki"], **own}
    return [AgentSpec(name, name, f"{own['team']}\n\n{given[name]}") for name in own["agents"]]


# -- contracts: the form in which agents of language models reply ----------------------------


def plan_contract(workers: Sequence[str]) -> str:
    who = either([*workers, "verifier"])
    return _contract("plan", first=workers[0], last=workers[-1], who=who)


def call_contract(tools: Sequence[Tool]) -> str:
    shapes = [f" (a JSON object by this schema: {t.schema})" if t.schema else "" for t in tools]
    lines = [f"- {t.name}: {t.about}{shape}" for t, shape in zip(tools, shapes, strict=True)]
    which = "TOOL: its name\n" if len(tools) > 1 else ""
    programs = all(tool.body == "code" for tool in tools)
    holds = "\n```py\nthe program\n```" if programs else " what the tool is given"
    return _contract("call", tools="\n".join(lines), which=which, holds=holds)


def report_contract(tools: Sequence[Tool]) -> str:
    report = _contract("report")
    return f"{report}\nOtherwise call a tool first. {call_contract(tools)}" if tools else report


def judge_contract(rated: bool, coding: bool) -> str:
    if rated:
        return _contract("rate", ratings="\n".join(f"{c}: good, average or poor" for c in CRITERIA))
    again = "write again" if coding else "read again, search again, plan again"
    return _contract("judge", again=again)


def verify_contract() -> str:
    return _contract("verify")


def _contract(name: str, **values: str) -> str:
    return str(_prompts()["contracts"][name]).format(**values)


def either(names: Sequence[str]) -> str:
    """'a, b or c', each name once."""
    names = list(dict.fromkeys(names))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


# -- teams of language models ----------------------------------------------------------------


@dataclass(frozen=True)
class Roster:
    """The agents of a team and what each may do."""

    agents: list[AgentSpec]
    tools: Mapping[str, list[Tool]]
    """Of each agent that has any."""
    workers: list[str]
    """Who can be given a step."""
    critic: str
    rated: bool
    """Its critic gives ratings; otherwise it says in words what is to be done."""


def roster_for(toolbox: Toolbox) -> Roster:
    """The team for these tools, each agent with its contract behind its prompt."""
    if not toolbox:
        raise UsageError("a team of language models needs at least one tool to work with.")
    others = [tool for name, tool in toolbox.items() if name != CODE]
    opening = [tool for tool in others if tool.name == CRAWL and len(others) > 1]
    searching = [tool for tool in others if tool not in opening]
    code = [toolbox[CODE]] if CODE in toolbox else []
    team: TeamName = "calculation" if code else "wiki"
    if not others:
        team = "coding"
    elif "web_search" in toolbox or CRAWL in toolbox:
        team = "web"
    elif "wiki_search" not in toolbox:
        team = "general"
    given = {"searcher": searching, "reader": opening, "coder": code}
    if team == "general":
        given = {"worker": others, "coder": code}
    tools = {name: each for name, each in given.items() if each}
    workers = [name for name in tools if name != "reader"]
    agents = agents_of(team)
    if code and not any(each.name == "coder" for each in agents):
        agents += [each for each in agents_of("calculation") if each.name == "coder"]
    critic, rated = "critic" if team == "coding" else "reflector", team not in ("wiki", "coding")
    contracts = {
        "planner": plan_contract(workers),
        "reader": report_contract(tools.get("reader", [])),
        critic: judge_contract(rated, coding=team == "coding"),
        "verifier": verify_contract(),
        **{name: call_contract(tools[name]) for name in workers},
    }
    agents = [AgentSpec(a.name, a.part, f"{a.system}\n\n{contracts[a.name]}") for a in agents]
    return Roster(agents, tools, workers, critic, rated)
