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
from coa.tasks.task import Task
from coa.tools.arguments import described, without_words
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
        said = described(about, schema)
        if not isinstance(name, str):
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        raise RecordError(
            f"task {task.id}: a tool is {str(declaration)[:60]!r}, expected an object with name, "
            "description and parameters (a JSON schema)."
        ) from None
    plain = json.dumps(without_words(schema))
    return Tool(name, run=_note, about=said, body="json", schema=plain, pure=True)


async def _note(argument: str) -> str:
    return NOTED
