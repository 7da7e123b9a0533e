"""From the bytes of a request to an `Asked`, or to a `Refused` that says what to change.

Three kinds of parameters: those that a rollout has a place for; those that would change what comes
back in a way that it cannot (several choices, tools of the client's, log probabilities), which are
refused; and all others, which are ignored and named in the response. A value that asks for nothing
(null, or the default of the API) is neither refused nor named.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from coa.io.runs import Json
from coa.serving.errors import SHOWN, Refused, shown
from coa.tools.base import clean

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SEED_RANGE, COUNT_RANGE = 2**63, 2**31
NAMED = 20
"""Most ignored parameters that a response names."""
NOT_TEXT = "this agent answers in plain text"
ITS_OWN_TOOLS = "the agent has tools of its own and cannot call the client's"
CANNOT: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "one request is one rollout; send several requests"),
    "best_of": ((1,), "one request is one rollout; send several requests"),
    "tools": (([],), ITS_OWN_TOOLS),
    "tool_choice": (("none", "auto"), ITS_OWN_TOOLS),
    "functions": (([],), ITS_OWN_TOOLS),
    "function_call": (("none", "auto"), ITS_OWN_TOOLS),
    "logprobs": ((False,), "the answer has no log probabilities here"),
    "top_logprobs": ((0,), "the answer has no log probabilities here"),
    "logit_bias": (({},), "tokens cannot be weighted here"),
    "stop": (([], ""), "the agent ends where its protocol ends"),
    "response_format": (({"type": "text"},), NOT_TEXT),
    "modalities": ((["text"],), NOT_TEXT),
    "audio": ((), NOT_TEXT),
    "prediction": ((), "predicted output is not used here"),
    "web_search_options": ((), ITS_OWN_TOOLS),
}
"""Parameters that cannot be met: values that ask for nothing, and why others are refused."""
NOTHING_ASKED = {"presence_penalty": 0, "frequency_penalty": 0, "store": False}
"""Parameters without effect here whose default needs no mention."""


@dataclass(frozen=True)
class ServingLimits:
    """What one client, and all of them together, may take."""

    rollouts: int = 64
    """At a time; further ones wait."""
    queue: int = 128
    """Waiting at a time; further ones are refused (429)."""
    seconds: float = 300.0
    """Most for one rollout, and most for waiting."""
    tokens: int = 2048
    """Most sampled in one rollout."""
    turns: int = 12
    body_bytes: int = 1 << 20
    characters: int = 16_000
    """Of the question."""
    stall_s: float = 60.0
    """A client that takes nothing for so long is given up."""


@dataclass(frozen=True)
class Asked:
    """What a client wants. None: the server's default."""

    model: str
    question: str
    stream: bool = False
    include_usage: bool = False
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    ignored: tuple[str, ...] = ()
    """What was asked for and not done."""


def read_request(body: bytes, limits: ServingLimits) -> Asked:
    """Understand the body of a chat completion."""
    record, ignored = _object(body), list[str]()
    for name, (nothing, reason) in CANNOT.items():
        value = record.pop(name, None)
        if value is not None and value not in nothing:
            message = f"{name} is {shown(value)}: {reason}."
            raise Refused(message, code="unsupported_parameter", param=name)
    model = record.pop("model", None)
    if not isinstance(model, str) or not model:
        raise _wrong("model", model, "the name of a model; GET /v1/models lists them")
    question = _question(record.pop("messages", None), limits, ignored)
    stream = record.pop("stream", None) or False
    if not isinstance(stream, bool):
        raise _wrong("stream", stream, "true or false")
    return Asked(
        model=model,
        question=question,
        stream=stream,
        include_usage=_stream_options(record.pop("stream_options", None), stream, ignored),
        temperature=_number(record, "temperature", 0, 2),
        top_p=_number(record, "top_p", 0.001, 1) or 1.0,
        top_k=max(0, _whole(record, "top_k", -1, COUNT_RANGE) or 0),  # elsewhere -1 means all
        min_p=_number(record, "min_p", 0, 0.999) or 0.0,
        seed=_whole(record, "seed", -SEED_RANGE, SEED_RANGE),
        max_tokens=_max_tokens(record, limits, ignored),
        ignored=_named(record, ignored),
    )


def _object(body: bytes) -> Json:
    try:
        record = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refused(f"the body is not JSON: {reason[:200]}.", code="invalid_json") from None
    if not isinstance(record, dict):
        raise Refused(f"the body is {shown(record)}, expected a JSON object.", code="invalid_json")
    return record


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _wrong(name: str, value: object, expected: str) -> Refused:
    found = "missing" if value is None else shown(value)
    return Refused(f"{name} is {found}, expected {expected}.", code="invalid_value", param=name)


def _number(record: Json, name: str, low: float, high: float) -> float | None:
    value = record.pop(name, None)
    if value is None:
        return None
    # A whole number may be too large for a float; comparing it is safe, converting it is not.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _wrong(name, value, f"a number from {low:g} to {high:g}")
    return float(value)


def _whole(record: Json, name: str, low: int, high: int) -> int | None:
    value = record.pop(name, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < high:
        raise _wrong(name, value, f"a whole number from {low} to {high - 1}")
    return value


def _max_tokens(record: Json, limits: ServingLimits, ignored: list[str]) -> int | None:
    """The newer of the two names counts; more than the server allows is cut down and said."""
    old = _whole(record, "max_tokens", 1, SEED_RANGE)
    new = _whole(record, "max_completion_tokens", 1, SEED_RANGE)
    wanted = old if new is None else new
    if wanted is not None and wanted > limits.tokens:
        ignored.append(f"max_tokens above {limits.tokens}")
        return limits.tokens
    return wanted


def _stream_options(options: Any, stream: bool, ignored: list[str]) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict) or not stream:
        expected = "an object, and only with stream true"
        raise _wrong("stream_options", options, expected)
    wanted = options.pop("include_usage", None) or False
    if not isinstance(wanted, bool):
        raise _wrong("stream_options.include_usage", wanted, "true or false")
    ignored += [f"stream_options.{name}" for name, value in options.items() if value is not None]
    return wanted


def _named(record: Json, ignored: list[str]) -> tuple[str, ...]:
    """What is left over has no effect, and the client is told."""
    for name, value in record.items():
        if value is not None and not (name in NOTHING_ASKED and value == NOTHING_ASKED[name]):
            ignored.append(name)
    short = [name if len(name) <= SHOWN else f"{name[:SHOWN]}..." for name in ignored]
    more = len(short) - NAMED
    return tuple([*short[:NAMED], f"and {more} more"] if more > 0 else short)


def _question(messages: Any, limits: ServingLimits, ignored: list[str]) -> str:
    """The last message, which has to be the user's. The agent was trained on single questions, so
    what stands before it is not read, and the response says so."""
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list with at least one message")
    for place, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            expected = f"an object with a role, one of {', '.join(ROLES)}"
            raise _wrong(f"messages[{place}]", message, expected)
    last = messages[-1]
    where = f"messages[{len(messages) - 1}]"
    if last["role"] != "user":
        raise _wrong(f"{where}.role", last["role"], "'user': the last message is the question")
    system = sum(message["role"] in ("system", "developer") for message in messages)
    if system:
        ignored.append(f"system messages ({system})")
    if earlier := len(messages) - 1 - system:
        ignored.append(f"earlier messages ({earlier})")
    extra = [name for name in last if name not in ("role", "content") and last[name] is not None]
    ignored += [f"{where}.{name}" for name in extra]
    return _text(last.get("content"), f"{where}.content", limits)


def _text(content: Any, where: str, limits: ServingLimits) -> str:
    """The text of a message: a string, or parts that are all text."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts:
        raise _wrong(where, content, "the question as text")
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _wrong(where, part, "parts of type text: this agent reads nothing else")
        if not isinstance(part.get("text"), str):
            raise _wrong(where, part, "parts of type text with a string")
        texts.append(part["text"])
    question = clean("\n".join(texts))
    if not question:
        raise _wrong(where, content, "a question, and it is blank")
    if len(question) > limits.characters:
        message = f"{where} has {len(question)} characters, expected at most {limits.characters}."
        raise Refused(message, code="context_length_exceeded", param="messages")
    return question
