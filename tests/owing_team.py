"""Episodes of a recorded team for tests, by hand: a lead who asks a scout, who looks things up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coa.io.runs import write_jsonl
from coa.recording.episode import AgentSpec, Episode, Message, ModelCall, ToolSpec, ToolUse

SCHEMA = {
    "type": "object",
    "properties": {"customer": {"type": "string"}, "year": {"type": "integer"}},
    "required": ["customer"],
}
LOOKUP = ToolSpec("lookup", "Look up what a customer owes", "json", json.dumps(SCHEMA))
UNUSED = ToolSpec("convert", "Convert money")
AGENTS = [AgentSpec("lead", "", "You lead."), AgentSpec("scout", "", "You look things up.")]
COUNTED = {"prompt_tokens": 100, "cached_tokens": 40, "sampled_tokens": 10, "cost": 0.002}
"""What the server says of each call."""


def question(number: int) -> str:
    return f"What does customer {number} owe?"


def call(text: str, counted: dict[str, Any] | None = None) -> ModelCall:
    return ModelCall("big-model", text, **(COUNTED if counted is None else counted))


def episode(
    number: int,
    answer: str | None = "10",
    *,
    counted: dict[str, Any] | None = None,
    tool: ToolSpec = LOOKUP,
    failure: str | None = None,
    **meta: Any,
) -> Episode:
    """Task `tN`: four model calls and one of the tool."""
    argument = json.dumps({"customer": str(number)})
    events: list[Message | ToolUse] = [
        Message("user", "lead", question(number)),
        Message("lead", "scout", "Find what it owes.", call=call("ask", counted)),
        Message("scout", "system", "", call=call("look", counted)),
        ToolUse("scout", tool.name, argument, "It owes 10.", failure),
        Message("scout", "lead", "10", call=call("10", counted)),
        Message("lead", "user", answer or "", call=call(answer or "", counted)),
    ]
    made = Episode(f"t{number}", question(number), "my team", AGENTS, events, answer)
    made.tools, made.meta = [tool, UNUSED], {"source": "proxy", **meta}
    return made


def cut(number: int) -> Episode:
    made = episode(number, None, cut=True)
    return replace(made, error="the program was stopped", events=made.events[:3])


def episodes(path: Path, made: Sequence[Episode]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(path, (each.to_json() for each in made))
    return path


def timings(path: Path, seconds: dict[str, float]) -> None:
    """What stands beside an episodes file."""
    beside = path.with_name(f"{path.name}.timings.jsonl")
    write_jsonl(beside, ({"task_id": name, "total": total} for name, total in seconds.items()))
