"""The agents of a team: who they are, what their prompts say, and in which form they reply.

The prompts (prompts.toml) have the content of a real system's and are shorter than most
(docs/cost.md). They are part of the record, because the cost of a multi-agent system is mostly the
prompts and contexts that its agents read again and again. The rule-based experts enact the agents
of `agents_of`; a team of language models (`roster_for`) has the same agents, each with a contract
behind its prompt that says in which form it replies.

A reply is a JSON object by a schema (`replies`). A small model copies what it is shown, so an agent
is shown one worked example and no placeholder.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from coa.errors import UsageError
from coa.recording.episode import AgentSpec
from coa.recording.replies import (
    ReplyForm,
    answer_form,
    call_form,
    check_form,
    judge_form,
    plan_form,
    report_form,
)
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
    who = f" and who does it ({either(workers)})," if len(workers) > 1 else ""
    return _contract("plan", plan_form(workers), who=who)


def call_contract(tools: Sequence[Tool]) -> str:
    only = "program" if tools[0].body == "code" else "input of the tool"
    holds = "call: the name of a tool, and its input" if len(tools) > 1 else only
    return _contract("call", call_form(tools), tools=_listed(tools), holds=holds)


def report_contract(tools: Sequence[Tool]) -> str:
    report = _contract("report", report_form(tools))
    return f"{_words('open', tools=_listed(tools))}\n{report}" if tools else report


def judge_contract(rated: bool, coding: bool) -> str:
    form = judge_form(rated, coding)
    if rated:
        return _contract("rate", form)
    verdicts = either(form.schema["properties"]["verdict"]["enum"])
    return _contract("judge", form, verdicts=verdicts)


def verify_contract() -> str:
    return f"{_contract('answer', answer_form())}\n{_contract('check', check_form())}"


def _contract(name: str, form: ReplyForm[Any], **values: str) -> str:
    shown = json.dumps(form.example, ensure_ascii=False)
    return f"{_words(name, **values)}\nAn example: for {form.given} you would write\n{shown}"


def _words(name: str, **values: str) -> str:
    return str(_prompts()["contracts"][name]).format(**values)


def _listed(tools: Sequence[Tool]) -> str:
    shapes = [f" Its input: {t.schema}" if t.schema else "" for t in tools]
    return "\n".join(f"- {t.name}: {t.about}{s}" for t, s in zip(tools, shapes, strict=True))


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

    @property
    def coding(self) -> bool:
        return self.critic == "critic"


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
