"""Episodes as a view: a team of agents at work, who said what to whom, and what it cost."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from coa.errors import RecordError
from coa.io.runs import Json
from coa.recording.episode import (
    SYSTEM,
    USER,
    AgentSpec,
    Episode,
    Message,
    ModelCall,
    ToolUse,
    read_episodes,
)
from coa.view.browse import (
    View,
    bars,
    facts_of,
    grouped,
    histogram,
    origin,
    share_of,
    shown,
    unique,
)
from coa.view.terminal import colour_of

FLAGS = {
    "mistake": "an agent erred, or a critic did",
    "alarm": "a critic objected",
    "branches": "agents worked at the same time",
    "tool failed": "a tool failed",
    "unanswered": "ended without an answer",
}
NUMBERS = {
    "messages": "messages",
    "calls": "tool calls",
    "agents": "agents at work",
    "length": "characters",
    "mistakes": "mistakes",
    "tokens": "tokens",
    "cost": "cost",
}
_ROLE_OF_PART = {"planner": "plan", "reflector": "reflection", "verifier": "double_check"}
"""An agent has the colour of the blocks that its messages become."""
_OTHERS = ("cyan", "bright_blue", "bright_magenta", "bright_cyan", "green")
"""Colours of the other agents, in the order in which they are met."""


@dataclass
class _TeamTally:
    """What is counted over all episodes."""

    messages: Counter[str] = field(default_factory=Counter)
    mistakes: Counter[str] = field(default_factory=Counter)
    tools: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    sets: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)


def episodes_view(path: Path) -> View:
    """Read an episodes file; what is no episode stands on the page as `coa distill` drops it."""
    noun = ("episode", "episodes")
    view = View("episodes", noun, NUMBERS, ("messages", "calls"), FLAGS)
    tally, taken = _TeamTally(), set[str]()

    def add(episode: Episode) -> None:
        entry = _entry(episode, unique(episode.task_id, taken))
        view.entries.append(entry)
        view.records.append(_record(episode))
        for agent in episode.agents:
            view.looks.setdefault(agent.name, {"colour": _colour(agent, view), "kind": "agent"})
        _count(tally, episode, entry)

    for number, found in read_episodes(path):
        if wrong := found if isinstance(found, RecordError) else _odd_cost(found):
            view.dropped.append((f"line {number}", "dropped", "", "not an episode", str(wrong)))
        else:
            assert isinstance(found, Episode)
            add(found)
    if view.dropped and not view.entries:
        line, *_, why = view.dropped[0]
        raise RecordError(f"{path}:{line.removeprefix('line ')}: {why}")
    if view.dropped:
        view.figures.append(("left out", f"{len(view.dropped):,} that are no episodes"))
    _summarise(view, tally)
    return view


def _odd_cost(episode: Episode) -> RecordError | None:
    for event in episode.events:
        cost = event.call.cost if isinstance(event, Message) and event.call else None
        if cost is not None and not math.isfinite(cost):
            return RecordError(f"a model call costs {cost!r}, expected an amount or nothing")
    return None


def _colour(agent: AgentSpec, view: View) -> str:
    if agent.part in _ROLE_OF_PART:
        return colour_of(_ROLE_OF_PART[agent.part])
    return _OTHERS[sum(look["colour"] in _OTHERS for look in view.looks.values()) % len(_OTHERS)]


def _entry(episode: Episode, name: str) -> Json:
    group, family = origin(episode.meta)
    uses = [event for event in episode.events if isinstance(event, ToolUse)]
    said = [event for event in episode.events if isinstance(event, Message)]
    made = [event.call for event in said if event.call]
    held = {
        "mistake": any(event.erred for event in episode.events),
        "alarm": any(event.facts.get("part") == "alarm" for event in said),
        "branches": any(event.branch for event in episode.events),
        "tool failed": any(event.failure for event in uses),
        "unanswered": episode.answer is None,
    }
    numbers: dict[str, float] = {
        "messages": len(episode.calls),
        "calls": len(uses),
        "agents": len({event.agent for event in episode.events} - {USER, SYSTEM}),
        "length": sum(len(event.written) for event in said if event.agent not in (USER, SYSTEM)),
        "mistakes": sum(event.erred for event in said),
    }
    if made:
        numbers["tokens"] = sum(call.prompt_tokens + call.sampled_tokens for call in made)
    if (cost := episode.cost) is not None:
        numbers["cost"] = float(f"{cost:.6g}")
    return {
        "id": name,
        "question": episode.question,
        "answer": episode.answer,
        "set": group,
        "family": family,
        "numbers": numbers,
        "flags": [flag for flag, holds in held.items() if holds],
    }


def _record(episode: Episode) -> Json:
    facts = [("task", episode.task_id), ("teacher", episode.teacher)]
    if episode.error:
        facts.append(("error", episode.error))
    if (cost := episode.cost) is not None:
        facts.append(("cost", _money(cost)))
    return {
        "facts": facts + facts_of(episode.meta),
        "agents": [(agent.name, agent.part, agent.system) for agent in episode.agents],
        "spent": _spent(episode),
        "events": [_event(event) for event in episode.events],
    }


def _spent(episode: Episode) -> list[tuple[str, ...]]:
    """A table of what each agent's model calls took; empty where nobody counted."""
    rows: list[tuple[str, ...]] = []
    for agent in episode.agents:
        said = (event for event in episode.events if isinstance(event, Message))
        calls = [event.call for event in said if event.agent == agent.name and event.call]
        if not calls:
            continue
        costs = [call.cost for call in calls]
        known = [cost for cost in costs if cost is not None]
        rows.append(
            (
                agent.name,
                ", ".join(sorted({call.model for call in calls})),
                f"{len(calls):,}",
                f"{sum(call.prompt_tokens for call in calls):,}",
                f"{sum(call.cached_tokens for call in calls):,}",
                f"{sum(call.sampled_tokens for call in calls):,}",
                _money(sum(known)) if len(known) == len(costs) else "not known",
            )
        )
    return rows


def _event(event: Message | ToolUse) -> Json:
    shared = {"agent": event.agent, "erred": bool(event.erred), "branch": event.branch}
    if isinstance(event, ToolUse):
        failure = shown(event.failure) if event.failure else ""
        return {
            **shared,
            "tool": event.tool,
            "text": event.argument,
            "result": event.result,
            "failure": failure,
        }
    facts = {name: value for name, value in event.facts.items() if name != "part"}
    return {
        **shared,
        "to": event.to,
        "text": event.text,
        "thought": event.thought,
        "part": shown(event.facts.get("part", "")),
        "facts": json.dumps(facts, indent=1, ensure_ascii=False, default=str) if facts else "",
        "call": _call(event.call),
    }


def _money(amount: float) -> str:
    """Never with an exponent, though a call costs very little."""
    return f"{Decimal(f'{amount:.6g}'):,f}"


def _call(call: ModelCall | None) -> Json | None:
    if call is None:
        return None
    given = f"{call.prompt_tokens:,} tokens in"
    cached = f" ({call.cached_tokens:,} cached)" if call.cached_tokens else ""
    cost = "" if call.cost is None else f", cost {_money(call.cost)}"
    return {
        "line": f"{call.model}: {given}{cached}, {call.sampled_tokens:,} out{cost}",
        "text": call.text,
        "given": "\n\n".join(f"[{role}] {text}" for role, text in call.given or ()),
    }


def _count(tally: _TeamTally, episode: Episode, entry: Json) -> None:
    for event in episode.events:
        if isinstance(event, ToolUse):
            tally.tools[event.tool] += 1
        elif event.agent not in (USER, SYSTEM):
            tally.messages[event.agent] += 1
            tally.mistakes[event.agent] += bool(event.erred)
    tally.families[entry["family"]] += 1
    tally.sets[entry["set"]] += 1
    tally.flags.update(entry["flags"])


def _summarise(view: View, tally: _TeamTally) -> None:
    count = len(view.entries)
    numbers = [entry["numbers"] for entry in view.entries]
    each = max(count, 1)
    view.figures = [
        ("episodes", f"{count:,}"),
        ("model calls each", f"{sum(n['messages'] for n in numbers) / each:.1f}"),
        ("tool calls each", f"{sum(n['calls'] for n in numbers) / each:.1f}"),
        ("answered", share_of(count - tally.flags["unanswered"], count)),
        ("with a mistake", share_of(tally.flags["mistake"], count)),
    ]
    if costs := [n["cost"] for n in numbers if "cost" in n]:
        view.figures.append(("cost", _money(sum(costs))))
    per_agent = ((name, total / each) for name, total in tally.messages.most_common())
    per_tool = ((name, total / each) for name, total in tally.tools.most_common())
    erred = [(name, total) for name, total in tally.mistakes.most_common() if total]
    flags = [(flag, tally.flags[flag]) for flag in FLAGS if tally.flags[flag]]
    view.charts = [
        bars(
            "Model calls in an episode",
            histogram([n["messages"] for n in numbers]),
            unit="episodes",
        ),
        bars("Messages of each agent", per_agent, unit="per episode"),
        bars("Mistakes of each agent", erred, unit="messages"),
        bars("Tool calls", per_tool, unit="per episode"),
        bars("Properties", flags, unit="episodes", filters="flag"),
        *grouped("set", tally.sets, "episodes"),
        *grouped("family", tally.families, "episodes"),
    ]
