"""Tools that a task brings along as JSON declarations, and that nobody implements.

A benchmark of function calls asks which calls are made, not what comes of them. Each declaration
under `meta["tools"]` (name, description, and parameters as a JSON schema: the `function` of what
OpenAI's clients send) becomes a tool whose arguments are checked like any other's, and which says
that the call was noted. The reward `calls` reads the calls from the chain.
"""

from __future__ import annotations

import json
from typing import Any

from coa.errors import RecordError
from coa.runs import Json
from coa.tasks.task import Task
from coa.tools.arguments import shape_of
from coa.tools.base import Tool

NOTED = "The call was noted. Make another one if the task needs it; otherwise answer."


def declared_tools(task: Task) -> list[Tool]:
    """The tools that a task declares; none where it does not."""
    listed = task.meta.get("tools") or []
    if not isinstance(listed, list):
        found = type(listed).__name__
        raise RecordError(f"task {task.id}: tools is a {found}, expected a list of declarations.")
    return [_tool(task, each) for each in listed]


def _tool(task: Task, declaration: Any) -> Tool:
    try:
        name, schema = declaration["name"], declaration["parameters"]
        about = str(declaration.get("description") or "").strip().rstrip(".")
        explained = _explained(schema)
        if not isinstance(name, str):
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        raise RecordError(
            f"task {task.id}: a tool is {str(declaration)[:60]!r}, expected an object with name, "
            "description and parameters (a JSON schema)."
        ) from None
    shape = f"the content is a JSON object {shape_of(schema)}"
    said = f"{about}; {shape}" if about else shape[0].upper() + shape[1:]
    plain = json.dumps(_without_words(schema))
    return Tool(name=name, run=_note, about=said + explained, body="json", schema=plain)


async def _note(argument: str) -> str:
    return NOTED


def _explained(schema: Json) -> str:
    """What the arguments mean, for the prompt."""
    parts = [
        f"{name}: {each['description'].strip().rstrip('.')}"
        for name, each in schema.get("properties", {}).items()
        if each.get("description")
    ]
    return f". {'; '.join(parts)}" if parts else ""


def _without_words(schema: Any) -> Any:
    """The schema without descriptions, which decide about no value."""
    if isinstance(schema, list):
        return [_without_words(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {k: v for k, v in schema.items() if k != "description" or not isinstance(v, str)}
    return {key: _without_words(value) for key, value in kept.items()}
