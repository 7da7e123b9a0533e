"""OpenInference: a span says its kind, and lists are flattened into its attributes.

`llm.input_messages.0.message.tool_calls.1.tool_call.function.name` is one attribute; Phoenix, which
exports such spans, has folded some of them into lists again. Both are read.

Frameworks are known by what only they do: smolagents has roles of its own for what it sends as the
assistant's and the user's, and runs tools with positional arguments; LangChain says in `metadata`
which agent is at work.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coa.io.runs import Json
from coa.recording.calls import LoggedSession
from coa.recording.episode import Episode
from coa.recording.importers.otlp import Span, begins_table, is_single, is_text
from coa.recording.importers.reading import Notes, opening
from coa.recording.importers.work import (
    STRANGE,
    TracedWork,
    count_of,
    first,
    joined,
    led,
    made_tool,
    messages_of,
    name_of,
    parsed,
    text_of,
    tool_spec,
    unread_of,
    usage_of,
)
from coa.recording.wire import WireExchange, WireMessage, arguments_of

KIND = "openinference.span.kind"
_ELSE = frozenset(
    {
        *("CHAIN", "RETRIEVER", "RERANKER", "EMBEDDING", "GUARDRAIL", "EVALUATOR", "PROMPT"),
        "UNKNOWN",
    }
)
"""Kinds that are no model call, no agent at work and no tool; some chains are agents."""
_HIDDEN = "__REDACTED__"
_SENT_AS = {"tool-call": "assistant", "tool-response": "user"}
"""How smolagents sends the roles that only it has, before it joins messages of one role."""
_PLUMBING = {
    *("LangGraph", "RunnableSequence", "agent", "model", "call_model", "llm", "chatbot", "tools"),
    *("generate", "respond", "__start__", "AgentExecutor"),
}
"""Names that frameworks and tutorials give to parts of a graph, which name nobody."""


def detect(head: bytes, path: Path) -> bool:
    """Whether this is an export of Phoenix: a page or lines of its spans, or its table."""
    if not is_text(head):
        return begins_table(head, path)
    begins = opening(head)
    held = begins.get("data") if isinstance(begins, dict) else begins
    if isinstance(held, list):
        begins = held[0] if held else None
    return isinstance(begins, dict) and is_single(begins) and "span_kind" in begins


def read(files: Sequence[Path], notes: Notes) -> Iterator[LoggedSession | Episode]:
    from coa.recording.importers import spans  # which reads what these conventions say

    yield from spans.read(files, notes)


def read_span(span: Span) -> TracedWork | None:
    """What a span of these conventions tells; None: it is of others."""
    held = dict(_flat(span.attributes))
    kind = str(held.get(KIND) or "").upper()
    if not kind:
        return None
    conversation = name_of(held, "session.id")
    odd = ""
    if kind not in ("LLM", "AGENT", "TOOL", *_ELSE):
        odd = "spans of an unknown kind, of which only the place is read"
        if _listed(held, "llm.output_messages."):
            kind, odd = "LLM", "spans of an unknown kind, read as model calls"
    if kind == "LLM":
        exchange = _exchange(held)
        return TracedWork(
            "model",
            _named(held),
            exchange,
            unread=unread_of(exchange),
            conversation=conversation,
            odd=odd,
        )
    if kind == "TOOL":
        return _tool(held, span.name, conversation)
    if kind == "AGENT" or (kind == "CHAIN" and _named(held, span.name)):
        name = name_of(held, "agent.name", "graph.node.id") or _named(held, span.name)
        if not name and "smolagents.max_steps" in held:
            name = span.name.removesuffix(".run")
        given = parsed(held.get("input.value"))
        asked = given.get("task") if isinstance(given, dict) else given
        plain = "json" not in str(held.get("output.mime_type"))
        result = _plain(held.get("output.value")) if plain else None
        told = _job(asked) if isinstance(asked, str) else ""
        return TracedWork("agent", name, None, "", "", told, result, conversation=conversation)
    return TracedWork("other", conversation=conversation, odd=odd)


_MANAGED = re.compile(r"task by your manager\.\n---\nTask:\n(.+?)\n---\n", re.DOTALL)
"""What smolagents puts around the task of a managed agent."""


def _job(task: str) -> str:
    """What an agent was asked, without what its framework puts around it."""
    found = _MANAGED.search(task)
    return found[1] if found else task


def _flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """All attributes with their full names, also those inside objects and lists of objects."""
    for name, each in value.items():
        yield from _flat_one(f"{before}{name}", each)


_WHOLE = ("metadata", "tool.parameters", ".json_schema", ".arguments")
"""Ends of names whose values are JSON texts, which Phoenix has read already."""


def _flat_one(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and name.endswith(_WHOLE):
        yield name, value
    elif isinstance(value, dict):
        yield from _flat(value, f"{name}.")
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        for number, each in enumerate(value):
            yield from _flat(each, f"{name}.{number}.")
    elif value is not None:
        yield name, value


def _listed(held: Json, prefix: str) -> list[Json]:
    """The records of a list that was flattened, each with the rest of its names."""
    found: dict[int, Json] = {}
    for name, value in held.items():
        if name.startswith(prefix):
            number, _, rest = name[len(prefix) :].partition(".")
            if number.isdecimal():
                found.setdefault(int(number), {})[rest] = value
    return [record for _, record in sorted(found.items())]


def _plain(value: Any) -> str | None:
    return None if value is None or value == _HIDDEN else text_of(value)


# -- model calls -------------------------------------------------------------------------------


def _exchange(held: Json) -> WireExchange:
    asked = _listed(held, "llm.input_messages.")
    said = _listed(held, "llm.output_messages.")
    given = [message for each in asked for message in _messages(each)]
    # A reply of several items is told as several messages, here and when it comes back.
    own_roles = any(each.get("message.role") in _SENT_AS for each in asked)
    given = joined(given, ("assistant", "user") if own_roles else ("assistant",))
    system, rest = led("", given)
    replies = [message for each in said for message in _messages(each, "assistant")]
    reply = joined([each for each in replies if each.role == "assistant"], ("assistant",))
    if not said and "json" not in str(held.get("output.mime_type")):
        text = _plain(held.get("output.value"))
        reply = [WireMessage("assistant", text)] if text else []
    if not asked and "json" not in str(held.get("input.mime_type")):
        text = _plain(held.get("input.value"))
        rest = (WireMessage("user", text),) if text else ()
    tools = (
        tool_spec(each.get("tool.json_schema") or _without(each, "tool.json_schema."))
        for each in _listed(held, "llm.tools.")
    )
    return WireExchange(
        name_of(held, "llm.model_name"),
        system,
        tuple(each for each in tools if each),
        rest,
        reply[0] if reply else None,
        usage_of(
            count_of(held, "llm.token_count.prompt"),
            count_of(held, "llm.token_count.prompt_details.cache_read"),
            count_of(held, "llm.token_count.completion"),
            held.get("llm.cost.total"),
        ),
        text_of(held.get("llm.finish_reason")),
    )


def _without(record: Json, prefix: str) -> Json:
    return {
        name.removeprefix(prefix): value
        for name, value in record.items()
        if name.startswith(prefix)
    }


_FIELDS = {
    *("role", "content", "contents", "name", "tool_calls", "tool_call_id"),
    *("function_call_name", "function_call_arguments_json"),
}
"""Of a message, as far as the conventions go."""


def _messages(record: Json, role: str = "user") -> Iterator[WireMessage]:
    """The messages that one flattened message is."""
    told = {**_without(record, "message.")} or record
    content: list[Json] = []
    for part in _listed(told, "contents."):
        kind = part.get("message_content.type") or "text"
        held = first(part, "message_content.text", "message_content.content")
        if held != _HIDDEN:
            content.append({"type": kind, "text": held})
    whole = told.get("content")
    calls = [
        {
            "id": call.get("tool_call.id"),
            "name": call.get("tool_call.function.name"),
            "arguments": call.get("tool_call.function.arguments"),
        }
        for call in _listed(told, "tool_calls.")
    ]
    if not (content or whole or calls) and any(
        name.partition(".")[0] not in _FIELDS for name in told
    ):
        content.append({"type": STRANGE})
    if told.get("function_call_name"):
        given = told.get("function_call_arguments_json")
        calls.append({"id": "", "name": told["function_call_name"], "arguments": given})
    own = str(told.get("role") or role)
    yield from messages_of(
        {
            "role": _SENT_AS.get(own, own),
            "content": content or (None if whole == _HIDDEN else whole),
            "tool_calls": calls,
            "tool_call_id": told.get("tool_call_id"),
            "name": told.get("name"),
        }
    )


def _named(held: Json, own: str = "") -> str:
    """The agent that LangChain says is at work: by its name, or that of its node in a graph.

    `own` is the name of the span itself, which is that of a graph where a graph begins.
    """
    told = parsed(held.get("metadata"))
    if not isinstance(told, dict):
        return ""
    agent = name_of(told, "lc_agent_name")
    if own:  # a span inside an agent's graph is no agent
        return agent if agent == own else ""
    node = name_of(told, "langgraph_node")
    return agent or ("" if node in _PLUMBING else node)


# -- tools -------------------------------------------------------------------------------------

_PRINTED = re.compile(r"content=(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
_ANSWERS = re.compile(r"\btool_call_id='([^']*)'")


def _tool(held: Json, span: str, conversation: str) -> TracedWork:
    name = name_of(held, "tool.name") or span
    schema = parsed(first(held, "tool.parameters", "tool.json_schema"))
    about = name_of(held, "tool.description")
    given = parsed(first(held, "input.value", "tool_call.function.arguments"))
    given = None if given == _HIDDEN else given
    if isinstance(given, dict) and "sanitize_inputs_outputs" in given:
        given = _by_name(given, schema)
    call, result = _answer(held.get("output.value"))
    return TracedWork(
        "tool",
        tool=name,
        call=name_of(held, "tool_call.id", "tool.id") or call,
        arguments=arguments_of(given) if given is not None else "",
        result=result,
        tools=(made_tool(name, about, schema),) if about or schema else (),
        conversation=conversation,
    )


def _by_name(given: Json, schema: Any) -> Json:
    """Arguments as smolagents notes them, each by the name that the tool's signature has."""
    positional, named = given.get("args"), given.get("kwargs")
    known = list(schema) if isinstance(schema, dict) and "properties" not in schema else []
    by_place = positional if isinstance(positional, list) else []
    return {
        **{
            (known[place] if place < len(known) else str(place)): value
            for place, value in enumerate(by_place)
        },
        **(named if isinstance(named, dict) else {}),
    }


def _answer(value: Any) -> tuple[str, str | None]:
    """(id of the call, result): LangChain notes the whole message that a tool's result became, as
    JSON or, before 2026, as Python prints it."""
    if value is None or value == _HIDDEN:
        return "", None
    held = parsed(value)
    if isinstance(held, dict) and held.get("type") == "tool" and isinstance(held.get("data"), dict):
        inner = held["data"]
        return name_of(inner, "tool_call_id"), text_of(inner.get("content"))
    if isinstance(value, str) and value.startswith("content="):
        called, said = _ANSWERS.search(value), _PRINTED.match(value)
        if called and said:
            return called[1], str(ast.literal_eval(said["text"]))
    return "", text_of(value)
