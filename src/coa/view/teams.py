"""Episodes as a view: a team of agents at work, who said what to whom, and what it cost."""

from __future__ import annotations

import json
import math
from collections import Counter
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
    total,
)
from coa.view.browse import Dropped, View, bars, each_of, facts_of, histogram, shown
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


def episodes_view(path: Path) -> View:
    """Read an episodes file; what is no episode stands on the page as `coa distill` drops it."""
    noun = ("episode", "episodes")
    view = View("episodes", noun, NUMBERS, ("messages", "calls"), FLAGS)
    messages, erred, tools = Counter[str](), Counter[str](), Counter[str]()
    for number, found in read_episodes(path):
        if wrong := found if isinstance(found, RecordError) else _odd_cost(found):
            view.dropped.append(
                Dropped(f"line {number}", "dropped", "", "not an episode", str(wrong))
            )
            continue
        assert isinstance(found, Episode)
        _add(view, found)
        for event in found.events:
            if isinstance(event, ToolUse):
                tools[event.tool] += 1
            elif event.agent not in (USER, SYSTEM):
                messages[event.agent] += 1
                erred[event.agent] += bool(event.erred)
    if view.dropped and not view.entries:
        first = view.dropped[0]
        raise RecordError(f"{path}:{first.task.removeprefix('line ')}: {first.detail}")
    count = len(view.entries)
    view.figures = [
        ("episodes", f"{count:,}"),
        ("model calls each", view.mean("messages")),
        ("tool calls each", view.mean("calls")),
        ("answered", view.share("unanswered", without=True)),
        ("with a mistake", view.share("mistake")),
    ]
    if costs := view.values("cost"):
        view.figures.append(("cost", _money(sum(costs))))
    calls = histogram(view.values("messages"))
    view.add_charts(
        bars("Model calls in an episode", calls, unit="episodes"),
        bars("Messages of each agent", each_of(messages, count), unit="per episode"),
        bars("Mistakes of each agent", each_of(+erred, 1), unit="messages"),
        bars("Tool calls", each_of(tools, count), unit="per episode"),
    )
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


def _add(view: View, episode: Episode) -> None:
    for agent in episode.agents:
        view.looks.setdefault(agent.name, {"colour": _colour(agent, view), "kind": "agent"})
    uses = [event for event in episode.events if isinstance(event, ToolUse)]
    said = [event for event in episode.events if isinstance(event, Message)]
    made = [event.call for event in said if event.call]
    flags = {
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
    used = episode.usage
    if made and used.prompt is not None and used.sampled is not None:
        numbers["tokens"] = used.prompt + used.sampled
    facts = [("task", episode.task_id), ("teacher", episode.teacher)]
    if episode.error:
        facts.append(("error", episode.error))
    if (cost := episode.cost) is not None:
        numbers["cost"] = float(f"{cost:.6g}")
        facts.append(("cost", _money(cost)))
    record = {
        "facts": facts + facts_of(episode.meta),
        "agents": [(agent.name, agent.part, agent.system) for agent in episode.agents],
        "spent": _spent(episode.agents, said),
        "events": [_event(event) for event in episode.events],
    }
    view.add(episode, record, numbers, flags)


def _spent(agents: list[AgentSpec], said: list[Message]) -> list[tuple[str, ...]]:
    """Return a table of what each agent's model calls took; empty where nobody counted."""
    rows: list[tuple[str, ...]] = []
    for agent in agents:
        calls = [event.call for event in said if event.agent == agent.name and event.call]
        if not calls:
            continue
        known = [call.cost for call in calls if call.cost is not None]
        totals = (
            total([getattr(call, name) for call in calls])
            for name in ("prompt_tokens", "cached_tokens", "sampled_tokens")
        )
        rows.append(
            (
                agent.name,
                ", ".join(sorted({call.model for call in calls})),
                f"{len(calls):,}",
                *map(_count, totals),
                _money(sum(known)) if len(known) == len(calls) else "not known",
            )
        )
    return rows


def _event(event: Message | ToolUse) -> Json:
    shared = {"agent": event.agent, "erred": bool(event.erred), "branch": event.branch}
    if isinstance(event, ToolUse):
        return shared | {
            "tool": event.tool,
            "text": event.argument,
            "result": event.result,
            "failure": shown(event.failure) if event.failure else "",
        }
    facts = {name: value for name, value in event.facts.items() if name != "part"}
    return shared | {
        "to": event.to,
        "text": event.text,
        "thought": event.thought,
        "part": shown(event.facts.get("part", "")),
        "facts": json.dumps(facts, indent=1, ensure_ascii=False, default=str) if facts else "",
        "call": _call(event.call) if event.call else None,
    }


def _money(amount: float) -> str:
    """Never with an exponent, though a call costs very little."""
    return f"{Decimal(f'{amount:.6g}'):,f}"


def _count(tokens: int | None) -> str:
    return "not known" if tokens is None else f"{tokens:,}"


def _call(call: ModelCall) -> Json:
    cached = f" ({call.cached_tokens:,} cached)" if call.cached_tokens else ""
    cost = "" if call.cost is None else f", cost {_money(call.cost)}"
    used = f"{_count(call.prompt_tokens)} tokens in{cached}, {_count(call.sampled_tokens)} out"
    return {
        "line": f"{call.model}: {used}{cost}",
        "text": call.text,
        "given": "\n\n".join(f"[{role}] {text}" for role, text in call.given or ()),
    }
