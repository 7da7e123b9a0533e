"""Traces of the OpenAI Agents SDK, as one of its trace processors writes them.

A line is a span or a trace, what `span.export()` and `trace.export()` return. Of a call of the
Responses API this has the id and the usage only: what was said is in `span.span_data.input` and
`.response`, which five lines more write beside it (docs/otel.md). Both are read, and what the
first leaves out is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coa.errors import RecordError
from coa.io.runs import Json
from coa.recording.calls import LoggedSession
from coa.recording.episode import Episode, ToolSpec
from coa.recording.importers.otlp import Span, Telemetry, json_documents, moment, no_span
from coa.recording.importers.reading import Notes, opening
from coa.recording.importers.work import (
    NOT_CAPTURED,
    OTHER,
    TracedWork,
    count_of,
    dicts,
    is_captured,
    name_of,
    text_of,
    usage_of,
)
from coa.recording.wire import DIALECTS, WireExchange, arguments_of

SCOPE = "agents-sdk"
CAPTURE_ADVICE = (
    "A span of a response exports its id and usage only. Write span.span_data.input and "
    ".response beside it, as the processor in docs/otel.md does, and run the program again, "
    "without trace_include_sensitive_data=False, which hides all of it."
)
_CHAT, _RESPONSES = (
    next(each for each in DIALECTS if each.name == name) for name in ("chat", "responses")
)


_KINDS = frozenset(
    {
        *("agent", "custom", "function", "generation", "guardrail", "handoff", "mcp_call"),
        *("mcp_tools", "response", "speech", "speech_group", "task", "transcription", "turn"),
    }
)
"""Types of `span_data` that the SDK has had so far."""


def detect(head: bytes, path: Path) -> bool:
    begins = opening(head)
    begins = begins[0] if isinstance(begins, list) and begins else begins
    return isinstance(begins, dict) and begins.get("object") in ("trace", "trace.span")


def read(files: Sequence[Path], notes: Notes) -> Iterator[LoggedSession | Episode]:
    from coa.recording.importers.spans import sessions_of

    found, groups = Telemetry(notes=notes), dict[str, str]()
    for path in files:
        for where, document in json_documents(path, notes):
            for each in document if isinstance(document, list) else [document]:
                _take(each, where, found, groups)
    named = ", ".join(path.name for path in files)
    if not found.spans:
        raise no_span(named, notes, "spans of the OpenAI Agents SDK")
    yield from sessions_of(found, named, SCOPE, groups)


def _take(record: Any, where: str, found: Telemetry, groups: dict[str, str]) -> None:
    """A span, or a trace, of which only the conversation that it belongs to is of interest."""
    if not isinstance(record, dict) or record.get("object") not in ("trace", "trace.span"):
        found.notes.add("records that are neither traces nor spans left out", where)
    elif record["object"] == "trace":
        if group := name_of(record, "group_id"):
            groups[name_of(record, "id")] = group
    elif not isinstance(record.get("span_data"), dict) or not name_of(record, "id", "trace_id"):
        found.notes.add("spans that cannot be read left out", where)
    else:
        if record["span_data"].get("type") not in [*_KINDS]:  # it need not be hashable
            found.notes.add("spans of an unknown type, of which only the place is read", where)
        with found.reading("spans"):
            found.spans.append(_span(record))


def _span(record: Json) -> Span:
    error = record.get("error")
    return Span(
        name_of(record, "trace_id"),
        name_of(record, "id"),
        name_of(record, "parent_id"),
        name_of(record["span_data"], "name", "type"),
        moment(record.get("started_at")) or 0,
        moment(record.get("ended_at")),
        record["span_data"],
        error="error" if error else "",
        scope=SCOPE,
        parent_here=True,
    )


def read_span(span: Span) -> TracedWork:
    """What a span of the SDK tells; its attributes are its `span_data`."""
    held = span.attributes
    kind = held.get("type")
    if kind == "agent":
        named = [each for each in held.get("tools") or () if isinstance(each, str)]
        # NOTE: only their names; what they take stands in the response, where that was written.
        tools = tuple(ToolSpec(name, "", "json") for name in named)
        return TracedWork("agent", name_of(held, "name"), tools=tools)
    if kind in ("function", "mcp_call"):
        output = held.get("output")
        return TracedWork(
            "tool",
            tool=name_of(held, "name"),
            arguments=arguments_of(held.get("input")) if held.get("input") is not None else "",
            result=None if output is None else text_of(output),
        )
    if kind not in ("generation", "response"):
        return OTHER
    try:
        exchange = _generation(held) if kind == "generation" else _response(held)
    except RecordError as wrong:
        return TracedWork("model", exchange=WireExchange("", "", (), ()), unread=str(wrong))
    return TracedWork(
        "model", exchange=exchange, unread="" if is_captured(exchange) else NOT_CAPTURED
    )


def _generation(held: Json) -> WireExchange:
    """A call of chat completions: its messages and its reply, without the tools on offer."""
    asked = _CHAT.request({"model": held.get("model"), "messages": held.get("input")})
    replies = dicts(held.get("output"))
    said = _CHAT.reply({"choices": [{"message": replies[-1]}]})[0] if replies else None
    return _with(asked, said, held.get("usage"))


def _response(held: Json) -> WireExchange:
    """A call of the Responses API, as much of it as was written."""
    whole = held.get("response")
    response = whole if isinstance(whole, dict) else {}
    names = ("model", "instructions", "tools")
    asked = _RESPONSES.request(
        {**{name: response.get(name) for name in names}, "input": held.get("input")}
    )
    said = _RESPONSES.reply(response)[0] if response else None
    return _with(
        asked,
        said,
        held.get("usage") or response.get("usage"),
        name_of(held, "response_id") or name_of(response, "id"),
        name_of(response, "status"),
        name_of(response, "previous_response_id"),
    )


def _with(
    asked: WireExchange, said: Any, usage: Any, name: str = "", stop: str = "", follows: str = ""
) -> WireExchange:
    counted = usage if isinstance(usage, dict) else {}
    inner = counted.get("input_tokens_details") or counted.get("prompt_tokens_details")
    details = inner if isinstance(inner, dict) else {}
    tokens = usage_of(
        count_of(counted, "input_tokens", "prompt_tokens"),
        count_of(details, "cached_tokens"),
        count_of(counted, "output_tokens", "completion_tokens"),
    )
    return replace(asked, reply=said, usage=tokens, stop=stop, id=name, follows=follows)
