"""What one span tells of a team at work, in whichever convention it is written.

Conventions differ in names only: each has model calls, agents at work, and tools that are run.
`genai`, `openinference` and `agents_sdk` read a span into a `TracedWork`; `spans` puts the work of
a trace together. The functions here read what all of them have: messages, declared tools, counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from coa.io.runs import Json
from coa.recording.episode import ToolSpec
from coa.recording.importers.reading import is_finite
from coa.recording.wire import (
    FunctionCall,
    WireExchange,
    WireMessage,
    WireRole,
    WireUsage,
    arguments_of,
)

Kind = Literal["model", "agent", "tool", "other"]


@dataclass(frozen=True, slots=True)
class TracedWork:
    """A model call, an agent at work, or a tool that was run."""

    kind: Kind
    agent: str = ""
    """The agent that it is, or whose work it says to be."""
    exchange: WireExchange | None = None
    """Of a model call; of an agent where its span says what it was given and what it said."""
    tool: str = ""
    call: str = ""
    """The id of the call that a tool was run for."""
    arguments: Json | str = ""
    result: str | None = None
    """Of a tool or an agent, as text; None: nobody said."""
    tools: tuple[ToolSpec, ...] = ()
    """Tools that are declared elsewhere than in a request."""
    unread: str = ""
    """What could not be read, where that is so."""
    conversation: str = ""
    """What several traces may share."""
    odd: str = ""
    """What is to be counted of how it is written, as a line of `Notes`."""
    gap: str = ""
    """What cannot be known of it, as a session's gaps name it."""


OTHER = TracedWork("other")
NOT_CAPTURED = "no text was captured"
STRANGE = "of a form that is not known"
"""Why a text could not be read that was captured; among `WireMessage.other`, that there is one."""


def is_captured(exchange: WireExchange | None) -> bool:
    """Whether a model call says anything of what was said, in a form that is known."""
    return exchange is not None and bool(
        exchange.system
        or any(
            each.text or each.reasoning or each.calls or {*each.other} - {STRANGE}
            for each in _spoken(exchange)
        )
    )


def is_strange(exchange: WireExchange | None) -> bool:
    """Whether any message of a model call is of a form that is not known."""
    return exchange is not None and any(STRANGE in each.other for each in _spoken(exchange))


def unread_of(exchange: WireExchange | None) -> str:
    """Why nothing of what was said can be read; empty: something can."""
    if is_captured(exchange):
        return ""
    return STRANGE if is_strange(exchange) else NOT_CAPTURED


def _spoken(exchange: WireExchange) -> list[WireMessage]:
    return [*exchange.messages, *([exchange.reply] if exchange.reply else [])]


# -- values ------------------------------------------------------------------------------------


def parsed(value: Any) -> Any:
    """A value that is structured, or the JSON text of one; a text that is none stays itself."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def text_of(value: Any) -> str:
    """A value as the text that a model would be given of it."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def first(attributes: Mapping[str, Any], *names: str) -> Any:
    """The first of these attributes that there is."""
    return next((v for name in names if (v := attributes.get(name)) not in (None, "")), None)


def name_of(attributes: Mapping[str, Any], *names: str) -> str:
    """The first of these attributes that is a text."""
    return next((v for n in names if isinstance(v := attributes.get(n), str) and v.strip()), "")


def dicts(value: Any) -> list[Json]:
    """The objects of a list, or of the JSON text of one."""
    held = parsed(value)
    held = [held] if isinstance(held, dict) else held
    return [each for each in held if isinstance(each, dict)] if isinstance(held, list) else []


def count_of(attributes: Mapping[str, Any], *names: str) -> int | None:
    """The first of these attributes that is a count."""
    for name in names:
        value = attributes.get(name)
        if isinstance(value, float) and value.is_integer():  # numbers of JSON and of tables
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def usage_of(
    prompt: int | None, cached: int | None, sampled: int | None, cost: Any = None
) -> WireUsage:
    """Tokens of a call. Some count those of the cache beside the others, not among them."""
    if prompt is not None and cached is not None and cached > prompt:
        prompt += cached
    money = float(cost) if is_finite(cost) and cost >= 0 else None
    return WireUsage(prompt, cached, sampled, money)


# -- messages ----------------------------------------------------------------------------------

ROLES: Mapping[str, WireRole] = {
    "system": "system",
    "developer": "system",
    "assistant": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Roles by the names that they are given; any other is the user's."""
_TEXT = ("text", "input_text", "output_text", "refusal")
_THOUGHT = ("reasoning", "thinking")
_PLACED = frozenset(
    {
        *("role", "name", "parts", "content", "tool_calls", "tool_call_id", "id", "index", "type"),
        *("finish_reason", "reasoning", "reasoning_content", "status"),
    }
)
"""What a message may have that says nothing; what else one has may be its text."""


def messages_of(given: Json) -> Iterator[WireMessage]:
    """The messages that one message of a conversation is: its parts, or its content and calls.

    Results of tools inside it are messages of their own, before it, as in Anthropic's; so is the
    summary that a server put in place of earlier turns, which nobody said.
    """
    role = ROLES.get(str(given.get("role", "")).lower(), "user")
    said, thought, other, summed = list[str](), list[str](), list[str](), list[str]()
    calls, results = list[FunctionCall](), list[WireMessage]()
    content = first(given, "parts", "content")
    content = parsed(content) if role != "tool" else content
    if isinstance(content, dict) and "type" not in content and "content" not in content:
        content = text_of(content)
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict):
            said += [text_of(part)] if part is not None else []
            continue
        kind = str(part.get("type") or "text")
        held = first(part, "content", "text", kind)
        if (summary := summary_of(part)) is not None:
            summed.append(summary)
        elif held is None and kind in _TEXT and _says_more(part):
            other.append(STRANGE)
        elif kind in _THOUGHT:
            thought.append(text_of(held))
        elif kind in ("tool_call", "tool_use", "function_call"):
            calls.append(_call(part))
        elif kind in ("tool_call_response", "tool_result"):
            results.append(_result(part))
        elif kind in _TEXT:
            said.append(text_of(held))
        else:
            other.append(kind)
    if isinstance(listed := parsed(given.get("tool_calls")), list):
        calls += [_call(each) for each in listed if isinstance(each, dict)]
    yield from results
    yield from (WireMessage("user", each) for each in summed if each)
    reasoning = first(given, "reasoning_content", "reasoning")
    thought += [reasoning] if isinstance(reasoning, str) else []
    text = "\n".join(each for each in said if each)
    if not (text or thought or calls or other or results or summed) and _says_more(given):
        other.append(STRANGE)
    only_others = bool(results) or (bool(summed) and role != "assistant")
    if role == "tool":
        answers = text_of(first(given, "tool_call_id", "id"))
        if text or answers or other:
            yield WireMessage("tool", text, answers=answers, other=tuple(other))
    elif text or thought or calls or other or not only_others:
        name = name_of(given, "name")
        said_so = "\n".join(thought)
        yield WireMessage(role, text, said_so, tuple(calls), name=name, other=tuple(other))


def summary_of(part: Any) -> str | None:
    """The summary that a server put in place of earlier turns; empty: it does not show it; None:
    this is another part of a message."""
    if not isinstance(part, dict) or part.get("type") != "compaction":
        return None
    return text_of(part.get("content"))


def _says_more(held: Json) -> bool:
    """Whether a message or a part of one, in which no text was found, may have one all the same."""
    return any(
        value not in (None, "", [], {}) and name not in _PLACED and "." not in name
        for name, value in held.items()
    )


def _call(part: Json) -> FunctionCall:
    """A call, with its function inside it or flat."""
    inner = part.get("function")
    what = inner if isinstance(inner, dict) else part
    given = first(what, "arguments", "args", "input")
    name = text_of(what.get("name"))
    return FunctionCall(text_of(first(part, "id", "call_id")), name, arguments_of(given))


def _result(part: Json) -> WireMessage:
    # NOTE: the specification has `response`; its own example, and pydantic-ai, write `result`.
    held = first(part, "response", "result", "content")
    if isinstance(held, list) and all(isinstance(e, dict) and "text" in e for e in held):
        held = "\n".join(text_of(each["text"]) for each in held)
    answers = text_of(first(part, "id", "tool_use_id", "call_id"))
    return WireMessage("tool", text_of(held), answers=answers, failed=part.get("is_error") is True)


def led(system: str, messages: Iterable[WireMessage]) -> tuple[str, tuple[WireMessage, ...]]:
    """The system prompt, of `system` and of the system messages that come first, and the rest."""
    rest = list(messages)
    told = [system] if system else []
    while rest and rest[0].role == "system":
        if rest[0].text and rest[0].text not in told:
            told.append(rest[0].text)
        rest.pop(0)
    return "\n\n".join(told), tuple(rest)


def joined(messages: Sequence[WireMessage], roles: Sequence[WireRole]) -> list[WireMessage]:
    """The messages, with those of one of these roles that follow each other made one."""
    made: list[WireMessage] = []
    for message in messages:
        if made and message.role in roles and made[-1].role == message.role:
            made[-1] = one_of([made[-1], message])
        else:
            made.append(message)
    return made


def one_of(messages: Sequence[WireMessage]) -> WireMessage:
    """One message of the parts in which it was written down."""
    return WireMessage(
        messages[0].role,
        "\n".join(each.text for each in messages if each.text),
        "\n".join(each.reasoning for each in messages if each.reasoning),
        tuple(call for each in messages for call in each.calls),
        name=messages[0].name,
        other=tuple(kind for each in messages for kind in each.other),
    )


# -- tools -------------------------------------------------------------------------------------


def tool_spec(declared: Any) -> ToolSpec | None:
    """A tool as any provider's API has it declared."""
    held = parsed(declared)
    if not isinstance(held, dict):
        return None
    inner = held.get("function")
    what = inner if isinstance(inner, dict) else held
    schema = parsed(first(what, "parameters", "input_schema", "parameters_json_schema"))
    if schema is None and "properties" in what:  # a bare schema
        schema = what
    name = name_of(what, "name", "title")
    return made_tool(name, name_of(what, "description"), schema) if name else None


def made_tool(name: str, about: str, schema: Any) -> ToolSpec:
    """A tool; what smolagents writes is the properties of a schema without the schema."""
    held = parsed(schema)
    if isinstance(held, dict) and "properties" not in held and "type" not in held:
        optional = [
            n for n, each in held.items() if isinstance(each, dict) and each.get("nullable")
        ]
        required = [each for each in held if each not in optional]
        held = {"type": "object", "properties": held, "required": required}
    text = json.dumps(held, sort_keys=True) if isinstance(held, dict) else ""
    return ToolSpec(name, about.strip(), "json", text)


def tool_specs(declared: Any) -> tuple[ToolSpec, ...]:
    held = parsed(declared)
    listed = held if isinstance(held, list) else []
    return tuple(spec for each in listed if (spec := tool_spec(each)))
