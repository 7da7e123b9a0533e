"""What a recorded episode says that the framework's own objects (witness.py) do not, or the other
way round."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from coa.io.runs import Json
from coa.recording.episode import SYSTEM, USER, Episode, Message, ToolUse


def differences(truth: Json, episode: Episode) -> list[str]:
    """One line for each difference; empty: the recording is the truth."""
    try:
        names = agents_by_prompt(truth, episode)
    except LookupError as error:
        return [str(error)]
    found: list[str] = []
    if (episode.answer or "").strip() != truth["answer"].strip():
        found.append(f"answer: {truth['answer']!r} was recorded as {episode.answer!r}")
    reports = {(run["agent"], run["to"]) for run in truth["runs"]}
    asked = {run["agent"] for run in truth["runs"] if run["asker"]}
    said = [
        (names[each.agent], names[each.to], each.text.strip())
        for each in episode.events
        if isinstance(each, Message) and each.agent != USER and each.to != SYSTEM
    ]
    of_truth: dict[str, list[Any]] = {
        "use": [_use(use["agent"], use) for use in truth["uses"]],
        "job": [_job(run["agent"], run["job"], truth) for run in truth["runs"] if run["asker"]],
        "report": [(run["agent"], run["to"], run["report"].strip()) for run in truth["runs"]],
    }
    recorded: dict[str, list[Any]] = {
        "use": [
            _use(names[each.agent], {**_plain(each), "arguments": json.loads(each.argument)})
            for each in episode.events
            if isinstance(each, ToolUse)
        ],
        "job": [
            _job(to, text, truth)
            for agent, to, text in said
            if (agent, to) not in reports and (agent != SYSTEM or to in asked)
        ],
        "report": [each for each in said if each[:2] in reports],
    }
    for kind in of_truth:
        true, made = Counter(of_truth[kind]), Counter(recorded[kind])
        found += [f"{kind}: not recorded: {each}" for each in (true - made).elements()]
        found += [f"{kind}: made up: {each}" for each in (made - true).elements()]
    if not found and not any(each.branch for each in episode.events):
        for agent in truth["agents"]:
            orders = [
                [use for use in uses["use"] if use[0] == agent] for uses in (of_truth, recorded)
            ]
            if orders[0] != orders[1]:
                found.append(
                    f"order of the uses of {agent}: {orders[0]} was recorded as {orders[1]}"
                )
    return found


def agents_by_prompt(truth: Json, episode: Episode) -> dict[str, str]:
    """Name in the recording -> name in the framework: an agent is known by its system prompt, since
    a model is seldom told what the framework calls it."""
    names = {USER: USER, SYSTEM: SYSTEM}
    prompts = {name: _squashed(prompt) for name, prompt in truth["agents"].items()}
    for agent in episode.agents:
        fitting = [name for name, prompt in prompts.items() if prompt in _squashed(agent.system)]
        if len(fitting) != 1:
            raise LookupError(f"agent {agent.name!r} is {fitting or 'nobody'} in the framework")
        names[agent.name] = fitting[0]
    if sorted(names.values()) != sorted({*prompts, USER, SYSTEM}):
        missing = sorted({*prompts} - {*names.values()})
        raise LookupError(f"agents: {missing} not recorded, or one of them as several: {names}")
    return names


def _squashed(text: str) -> str:
    return " ".join(text.split())


def _use(agent: str, use: Json) -> tuple[str, ...]:
    """A tool use as something to compare, in which 7160 and 7160.0 are the same.

    Around what went wrong frameworks put words of their own for the model, each its own.
    """
    given = {
        name: float(value) if isinstance(value, int | float) else value
        for name, value in use["arguments"].items()
    }
    failed = re.search(r"no customer is called '[^']*'", use["result"])
    result = failed[0] if failed else use["result"].strip()
    return (agent, use["tool"], json.dumps(given, sort_keys=True), result)


def _plain(use: ToolUse) -> Json:
    return {"tool": use.tool, "result": use.result}


def _job(agent: str, text: str, truth: Json) -> tuple[str, str]:
    """A job as something to compare: one that an agent was handed without a word is any text."""
    worded = any(run["job"] for run in truth["runs"] if run["agent"] == agent)
    return (agent, text.strip() if worded else "")
