"""OpenTelemetry's conventions for generative AI, in the versions that instrumentations write.

What was said stands, by version: in attributes (`gen_ai.input.messages`, since 1.37), in one event
with these attributes (`gen_ai.client.inference.operation.details`), in an event for each message
(`gen_ai.user.message` ... `gen_ai.choice`), as a log record or on the span, or in OpenLLMetry's
`gen_ai.prompt.0.content`. None of it is captured unless somebody asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from coa.io.runs import Json
from coa.recording.episode import ToolSpec
from coa.recording.importers.otlp import LogEvent, Span
from coa.recording.importers.work import (
    ROLES,
    Kind,
    TracedWork,
    count_of,
    dicts,
    first,
    led,
    made_tool,
    messages_of,
    name_of,
    one_of,
    parsed,
    summary_of,
    text_of,
    tool_specs,
    unread_of,
    usage_of,
)
from coa.recording.wire import WireExchange, arguments_of

_MODEL = ("chat", "text_completion", "generate_content", "completion", "responses")
_ELSE = frozenset(
    {
        *("embeddings", "embedding", "rerank", "retrieval", "fetch_response", "plan", "unknown"),
        *("create_agent", "invoke_workflow", "search_memory", "create_memory", "update_memory"),
        *("upsert_memory", "delete_memory", "create_memory_store", "delete_memory_store"),
    }
)
"""Operations that are no model call, no agent at work and no tool."""
NEWEST = 44
"""The minor version of OpenTelemetry's conventions up to which those for generative AI are known.
They were last changed there in 1.41, and have gone to a repository of their own since."""
NEWER = f"spans of conventions of a version that is not known, read as 1.{NEWEST}"
_VERSION = re.compile(r"https?://opentelemetry\.io/schemas/1\.(\d+)\.\d+/?")
DETAILS = "gen_ai.client.inference.operation.details"
_SAID = ("gen_ai.input.messages", "gen_ai.output.messages")
_NUMBERED = re.compile(r"(gen_ai\.(?:prompt|completion)|llm\.request\.functions)\.(\d+)\.(.+)")


def read_span(span: Span, logs: Sequence[LogEvent]) -> TracedWork:
    """What a span of these conventions tells; `logs` are the log records that belong to it."""
    told = _read(span, logs)
    matched = _VERSION.fullmatch(span.schema)
    if not span.schema or told.kind == "other" or (matched and int(matched[1]) <= NEWEST):
        return told
    return replace(told, odd=told.odd or NEWER)


def _read(span: Span, logs: Sequence[LogEvent]) -> TracedWork:
    held = span.attributes
    kind, odd = _kind(span)
    conversation = name_of(held, "gen_ai.conversation.id", "session.id")
    agent = name_of(held, "gen_ai.agent.name", "agent_name")
    if kind == "tool":
        return _tool(held, agent, conversation)
    exchange, gap = None, ""
    if kind in ("model", "agent"):
        exchange, gap = _exchange(held, [*span.events, *logs])
    if kind == "model":
        return TracedWork(
            "model",
            agent,
            exchange,
            unread=unread_of(exchange),
            conversation=conversation,
            odd=odd,
            gap=gap,
        )
    if kind == "agent":
        agent = agent or name_of(held, "traceloop.entity.name")
        result = first(held, "final_result", "traceloop.entity.output")
        told = None if result is None else text_of(result)
        said = exchange if exchange and exchange.reply else None
        return TracedWork("agent", agent, said, result=told, conversation=conversation)
    return TracedWork("other", conversation=conversation, odd=odd)


def _kind(span: Span) -> tuple[Kind, str]:
    """What kind of work it is; what is to be counted, where its operation is not known."""
    held = span.attributes
    operation = str(held.get("gen_ai.operation.name") or held.get("llm.request.type") or "").lower()
    entity = held.get("traceloop.span.kind")
    if operation in _MODEL:
        return "model", ""
    if operation == "invoke_agent" or entity == "agent":
        return "agent", ""
    if operation == "execute_tool" or entity == "tool" or "gen_ai.tool.name" in held:
        return "tool", ""
    if operation in _ELSE:
        return "other", ""
    if operation and all(first(held, name) for name in _SAID):
        return "model", "operations that are not known, read as model calls"
    if operation:
        return "other", "operations that are not known, of which only the place is read"
    if "gen_ai.agent.name" in held or "agent_name" in held:
        return "agent", ""
    spoken = any(name.startswith(("gen_ai.prompt.", "gen_ai.completion.")) for name in held)
    asked = "gen_ai.request.model" in held and bool(first(held, "gen_ai.system", *_SAID))
    return "model" if spoken or asked else "other", ""


def _tool(held: Json, agent: str, conversation: str) -> TracedWork:
    name = name_of(held, "gen_ai.tool.name", "traceloop.entity.name")
    given = first(held, "gen_ai.tool.call.arguments", "tool_arguments", "traceloop.entity.input")
    result = first(held, "gen_ai.tool.call.result", "tool_response", "traceloop.entity.output")
    about = name_of(held, "gen_ai.tool.description")
    return TracedWork(
        "tool",
        agent,
        tool=name,
        call=name_of(held, "gen_ai.tool.call.id"),
        arguments=arguments_of(given) if given is not None else "",
        result=None if result is None else text_of(result),
        tools=(made_tool(name, about, None),) if name and about else (),
        conversation=conversation,
    )


def _exchange(held: Json, events: Sequence[LogEvent]) -> tuple[WireExchange, str]:
    """A model call; what cannot be known of what it was given."""
    for event in events:
        if event.name == DETAILS:
            body = event.body if isinstance(event.body, dict) else {}
            held = {**held, **body, **event.attributes}
    system, asked, said, tools = _attributes(held)
    if not asked and not said:
        asked, said = _events(held, events)
    if not asked and not said:
        asked, said, tools = _numbered(held)
    asked = _since_summary(asked)
    hidden = any(summary_of(part) == "" for each in asked for part in _parts(each))
    system, rest = led(system, (each for given in asked for each in messages_of(given)))
    replies = [each for given in said for each in messages_of({"role": "assistant", **given})]
    replies = [each for each in replies if each.role == "assistant"]
    stops = first(held, "gen_ai.response.finish_reasons", "gen_ai.completion.0.finish_reason")
    stops = parsed(stops)
    stop = stops[0] if isinstance(stops, list) and stops else stops
    stop = stop or next((each.get("finish_reason") for each in said), "")
    exchange = WireExchange(
        name_of(held, "gen_ai.response.model", "gen_ai.request.model"),
        system,
        tools or _declared(held),
        rest,
        one_of(replies) if replies else None,
        usage_of(
            count_of(
                held,
                *("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
                "llm.usage.prompt_tokens",
            ),
            count_of(
                held,
                *("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens"),
                *("gen_ai.usage.details.cache_read_tokens", "gen_ai.usage.input_tokens.cached"),
            ),
            count_of(
                held,
                *("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
                "llm.usage.completion_tokens",
            ),
            first(held, "operation.cost", "gen_ai.usage.cost"),
        ),
        text_of(stop),
        name_of(held, "gen_ai.response.id"),
    )
    return exchange, "summary_hidden" if hidden else ""


def _attributes(held: Json) -> tuple[str, list[Json], list[Json], tuple[ToolSpec, ...]]:
    """System prompt, conversation, reply and tools of the present conventions."""
    told = parsed(held.get("gen_ai.system_instructions"))
    parts = {"role": "system", "parts": told} if isinstance(told, list) else {"content": told}
    system = "\n".join(each.text for each in messages_of(parts)) if told else ""
    asked = _spoken(held.get("gen_ai.input.messages"))
    said = _spoken(held.get("gen_ai.output.messages"))
    return system, asked, said, tool_specs(held.get("gen_ai.tool.definitions"))


def _since_summary(asked: list[Json]) -> list[Json]:
    """What a model was given of a conversation: where a server put a summary in place of earlier
    turns, that from the last one on, and the system prompts."""
    for place in reversed(range(len(asked))):
        parts = _parts(asked[place])
        summed = [number for number, part in enumerate(parts) if summary_of(part)]
        if summed:
            before = (
                each for each in asked[:place] if ROLES.get(str(each.get("role"))) == "system"
            )
            rest = {**asked[place], "parts": parts[summed[-1] :]}
            return [*before, rest, *asked[place + 1 :]]
    return asked


def _parts(message: Json) -> list[Any]:
    held = parsed(first(message, "parts", "content"))
    return held if isinstance(held, list) else []


def _spoken(value: Any) -> list[Json]:
    """Messages; a text alone is what a user says."""
    held = parsed(value)
    return [{"content": held}] if isinstance(held, str) and held else dicts(held)


def _declared(held: Json) -> tuple[ToolSpec, ...]:
    """Tools of instrumentations from before there was an attribute for them."""
    declared = parsed(first(held, "model_request_parameters", "gen_ai.request.tools"))
    if isinstance(declared, dict):  # pydantic-ai
        declared = [*dicts(declared.get("function_tools")), *dicts(declared.get("output_tools"))]
    return tool_specs(declared)


_MESSAGES: Mapping[str, str] = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
}


def _events(held: Json, events: Iterable[LogEvent]) -> tuple[list[Json], list[Json]]:
    """What was asked and said in an event for each message."""
    told = [(each.name, _body(each)) for each in sorted(events, key=lambda each: each.at)]
    # pydantic-ai writes its first version's events into one attribute of the span.
    told += [(str(each.get("event.name")), each) for each in dicts(held.get("events"))]
    asked, said = list[Json](), list[Json]()
    for name, body in told:
        if name in _MESSAGES:
            # What a message says of itself is better: pydantic-ai's instructions are a user's.
            asked.append({"role": _MESSAGES[name], **body})
        elif name == "gen_ai.choice":
            inner = parsed(body.get("message"))
            message = inner if isinstance(inner, dict) else body
            said.append({"finish_reason": body.get("finish_reason"), **message})
        elif name == "gen_ai.content.prompt":
            asked += _spoken(first(body, "gen_ai.prompt", "gen_ai.event.content"))
        elif name == "gen_ai.content.completion":
            said += _spoken(first(body, "gen_ai.completion", "gen_ai.event.content"))
    return asked, said


def _body(event: LogEvent) -> Json:
    """What an event says, which is its body, its attributes, or a JSON text in one of them."""
    body = parsed(event.body)
    inner = parsed(event.attributes.get("gen_ai.event.content"))
    return {
        **event.attributes,
        **(inner if isinstance(inner, dict) else {}),
        **(body if isinstance(body, dict) else {"content": body} if body else {}),
    }


def _numbered(held: Json) -> tuple[list[Json], list[Json], tuple[ToolSpec, ...]]:
    """OpenLLMetry's numbered attributes: gen_ai.prompt.0.role, gen_ai.prompt.0.content ..."""
    found: dict[str, dict[int, Json]] = {}
    for name, value in held.items():
        if matched := _NUMBERED.fullmatch(name):
            what, number, rest = matched[1], int(matched[2]), matched[3]
            record = found.setdefault(what, {}).setdefault(number, {})
            if called := re.fullmatch(r"tool_calls\.(\d+)\.(.+)", rest):
                calls = record.setdefault("tool_calls", {})
                calls.setdefault(int(called[1]), {})[called[2]] = value
            else:
                record[rest] = value
    listed: dict[str, list[Json]] = {}
    for what, records in found.items():
        for _, record in sorted(records.items()):
            if isinstance(calls := record.get("tool_calls"), dict):
                record["tool_calls"] = [call for _, call in sorted(calls.items())]
            listed.setdefault(what, []).append(record)
    tools = tool_specs(listed.get("llm.request.functions", []))
    return listed.get("gen_ai.prompt", []), listed.get("gen_ai.completion", []), tools
