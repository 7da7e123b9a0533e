"""Spans for tests: OTLP in JSON as exporters write it, and the same in protobuf.

The encoder is written from the published schema, independently of the reader.
"""

from __future__ import annotations

import json
import struct
from typing import Any

Json = dict[str, Any]
TRACE = "0af7651916cd43dd8448eb211c80319c"
BEGUN = 1_700_000_000_000_000_000


def value(held: Any) -> Json:
    if isinstance(held, bool):
        return {"boolValue": held}
    if isinstance(held, int):
        return {"intValue": str(held)}
    if isinstance(held, float):
        return {"doubleValue": held}
    if isinstance(held, list):
        return {"arrayValue": {"values": [value(each) for each in held]}}
    if isinstance(held, dict):
        return {"kvlistValue": {"values": attributes(held)}}
    return {"stringValue": held}


def attributes(held: Json) -> list[Json]:
    return [{"key": name, "value": value(each)} for name, each in held.items()]


def span(
    number: int, parent: int = 0, at: tuple[float, float | None] = (0, 1), **more: Any
) -> Json:
    """Span `number`, from `at[0]` to `at[1]` seconds. What else there is: `name`, `trace`, `error`,
    `flags`, and `held`, its attributes."""
    made: Json = {
        "traceId": more.get("trace", TRACE),
        "spanId": f"{number:016x}",
        "name": more.get("name", f"span {number}"),
        "kind": 1,
        "startTimeUnixNano": str(BEGUN + round(at[0] * 1e9)),
        "attributes": attributes(more.get("held", {})),
        "flags": more.get("flags", 0x101),
    }
    if at[1] is not None:
        made["endTimeUnixNano"] = str(BEGUN + round(at[1] * 1e9))
    if parent:
        made["parentSpanId"] = f"{parent:016x}"
    if "error" in more:
        made["status"] = {"code": 2, "message": more["error"]}
    if "events" in more:
        made["events"] = [
            {"name": name, "timeUnixNano": str(BEGUN + place), "attributes": attributes(held)}
            for place, (name, held) in enumerate(more["events"])
        ]
    return made


def request(*spans: Json, resource: Json | None = None) -> Json:
    scoped = {"scope": {"name": "tests"}, "spans": list(spans)}
    held = {"attributes": attributes(resource or {})}
    return {"resourceSpans": [{"resource": held, "scopeSpans": [scoped]}]}


def model(
    number: int, parent: int, at: tuple[float, float], asked: list[Json], said: Json, **held: Any
) -> Json:
    """A model call of the GenAI conventions."""
    own = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.input.messages": json.dumps(asked),
        "gen_ai.output.messages": json.dumps([said]),
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
    }
    return span(number, parent, at, held={**own, **held})


def text(role: str, words: str) -> Json:
    return {"role": role, "parts": [{"type": "text", "content": words}]}


def calling(name: str, call: str, **arguments: Any) -> Json:
    part = {"type": "tool_call", "id": call, "name": name, "arguments": arguments}
    return {"role": "assistant", "parts": [part]}


# -- protobuf ------------------------------------------------------------------------------------


def _number(held: int) -> bytes:
    held &= (1 << 64) - 1
    out = bytearray()
    while True:
        out.append((held & 0x7F) | (0x80 if held > 0x7F else 0))
        held >>= 7
        if not held:
            return bytes(out)


def _field(number: int, held: bytes) -> bytes:
    return _number(number << 3 | 2) + _number(len(held)) + held


def _any(held: Json) -> bytes:
    ((kind, inner),) = held.items()
    if kind == "stringValue":
        return _field(1, inner.encode())
    if kind == "boolValue":
        return _number(2 << 3) + _number(inner)
    if kind == "intValue":
        return _number(3 << 3) + _number(int(inner))
    if kind == "doubleValue":
        return _number(4 << 3 | 1) + struct.pack("<d", inner)
    if kind == "arrayValue":
        return _field(5, b"".join(_field(1, _any(each)) for each in inner["values"]))
    return _field(6, _pairs(1, inner["values"]))


def _pairs(number: int, held: list[Json]) -> bytes:
    return b"".join(
        _field(number, _field(1, each["key"].encode()) + _field(2, _any(each["value"])))
        for each in held
    )


def _span(held: Json) -> bytes:
    out = _field(1, bytes.fromhex(held["traceId"])) + _field(2, bytes.fromhex(held["spanId"]))
    if "parentSpanId" in held:
        out += _field(4, bytes.fromhex(held["parentSpanId"]))
    out += _field(5, held["name"].encode()) + _number(6 << 3) + _number(held["kind"])
    for number, name in ((7, "startTimeUnixNano"), (8, "endTimeUnixNano")):
        if name in held:
            out += _number(number << 3 | 1) + struct.pack("<Q", int(held[name]))
    out += _pairs(9, held["attributes"])
    for event in held.get("events", ()):
        at = _number(1 << 3 | 1) + struct.pack("<Q", int(event["timeUnixNano"]))
        out += _field(11, at + _field(2, event["name"].encode()) + _pairs(3, event["attributes"]))
    if "status" in held:
        status = held["status"]
        out += _field(15, _field(2, status["message"].encode()) + _number(3 << 3) + b"\x02")
    return out + _number(16 << 3 | 5) + struct.pack("<I", held["flags"]) + _field(99, b"newer")


def protobuf(held: Json) -> bytes:
    """A request of spans, with fields that no reader knows yet."""
    out = b""
    for group in held["resourceSpans"]:
        inner = _field(1, _pairs(1, group["resource"]["attributes"]))
        for scoped in group["scopeSpans"]:
            scope = _field(1, _field(1, scoped["scope"]["name"].encode()))
            inner += _field(2, scope + b"".join(_field(2, _span(s)) for s in scoped["spans"]))
        out += _field(1, inner)
    return out
