"""Reader of BFCL, the Berkeley Function Calling Leaderboard: single-turn questions in Python.

A task brings its own tools as JSON declarations (`meta["tools"]`), which nobody implements: what
counts is which calls were made. Gold has, for each call and each argument, the values that are
right; an empty text among them means that the argument may be left out. BFCL's other categories
(Java, JavaScript, several turns, memory, the web) are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from coa.environments.published.questions import PublishedRow, read_rows, task_of
from coa.errors import RecordError, UsageError
from coa.grammar import PRESETS, load_grammar
from coa.grammar.load import block_names
from coa.io.runs import Json
from coa.tasks import Task

CATEGORIES = (
    *("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
    *("live_irrelevance", "live_relevance"),
)
SOME = "some"
"""Gold of a question that needs a call, whichever."""
_FILE = re.compile(r"BFCL_v\d+_(\w+)\.json")
_TYPES = {
    **{"dict": "object", "object": "object", "array": "array", "list": "array", "tuple": "array"},
    **{"float": "number", "number": "number", "integer": "integer", "boolean": "boolean"},
    **{"string": "string", "any": "string"},
}


def function_call_rows(path: Path) -> Iterator[PublishedRow]:
    """The rows of a folder of BFCL files or of one file, each with its category and its gold."""
    if path.is_file():
        files = [path]
    else:
        files = sorted(each for each in path.glob("BFCL_v*.json") if _category(each) in CATEGORIES)
        if not files:
            raise UsageError(f"{path}: no file BFCL_v4_CATEGORY.json there.")
    for file in files:
        category = _category(file)
        if category not in CATEGORIES:
            listed = ", ".join(CATEGORIES)
            raise UsageError(f"{file}: expected BFCL_v4_CATEGORY.json with one of {listed}.")
        truths = {} if "relevance" in category else _truths(file)
        for row in read_rows(file):
            truth = SOME if category == "live_relevance" else truths.get(row.text("id"), [])
            columns = {"id": row.text("id"), "question": row.need("question")}
            columns |= {"function": row.listed("function"), "category": category}
            columns["ground_truth"] = {"calls": truth}
            if not truth and "irrelevance" not in category:
                raise row.error(f"{row.text('id')!r} is not in possible_answer/{file.name}")
            yield PublishedRow(columns, row.where)


def function_call(row: PublishedRow) -> Task:
    """A question with its tools; names become what a block can be called."""
    functions = row.listed("function")
    try:
        names = block_names([each["name"] for each in functions], _taken())
        tools = [_declared(each, names) for each in functions]
    except (KeyError, TypeError, AttributeError):
        raise row.error("'function' holds no list of name, description and parameters") from None
    truth = row.need("ground_truth")["calls"]
    calls = truth if truth == SOME else [_wanted(row, call, names) for call in truth]
    meta = {"family": row.text("category"), "tools": tools}
    return task_of(row, _conversation(row), (), meta, {"calls": calls})


def _category(file: Path) -> str:
    found = _FILE.fullmatch(file.name)
    return found[1] if found else ""


def _truths(file: Path) -> dict[str, Any]:
    beside = file.parent / "possible_answer" / file.name
    if not beside.is_file():
        raise RecordError(f"{file}: its gold, {beside}, is not there.")
    return {row.text("id"): row.need("ground_truth") for row in read_rows(beside)}


def _conversation(row: PublishedRow) -> str:
    """The words of the user; where others speak too, who said what."""
    try:
        (turn,) = row.need("question")
        said = [(str(each["role"]), str(each["content"])) for each in turn]
    except (TypeError, ValueError, KeyError):
        raise row.error("'question' is not one turn of messages") from None
    if len(said) == 1:
        return said[0][1]
    return "\n\n".join(f"{role.capitalize()}: {text}" for role, text in said)


@cache
def _taken() -> frozenset[str]:
    """Names of blocks that a function may not have, whichever grammar it is tried in."""
    return frozenset(tag for name in PRESETS for tag in load_grammar(name).tags)


def _declared(function: Json, names: Mapping[str, str]) -> Json:
    """A declaration as OpenAI's clients write it, with a standard JSON schema."""
    parameters = _schema(function["parameters"])
    parameters["additionalProperties"] = False
    about = str(function.get("description", ""))
    return {"name": names[function["name"]], "description": about, "parameters": parameters}


def _schema(part: Json) -> Json:
    """BFCL's types in JSON's words; of the rest only what says which values are right."""
    kind = _TYPES.get(str(part.get("type", "any")).lower(), "string")
    schema: Json = {"type": kind}
    if part.get("description"):
        schema["description"] = str(part["description"])
    if isinstance(part.get("enum"), list):
        schema["enum"] = part["enum"]
    if kind == "array" and isinstance(part.get("items"), dict):
        schema["items"] = _schema(part["items"])
    properties = part.get("properties")
    if kind == "object" and isinstance(properties, dict):
        schema["properties"] = {name: _schema(each) for name, each in properties.items()}
        required = part.get("required")
        schema["required"] = [each for each in required or [] if each in properties]
    return schema


def _wanted(row: PublishedRow, call: Any, names: Mapping[str, str]) -> Json:
    try:
        ((name, arguments),) = call.items()
        return {"name": names[name], "arguments": dict(arguments)}
    except (AttributeError, TypeError, ValueError, KeyError):
        raise row.error(f"gold {call!r} is not one call of a declared function") from None
