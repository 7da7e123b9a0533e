"""Who may ask, and what was asked for: from a request to an `ChatRequest`, or to a `Refused`.

Three kinds of parameters: those that a rollout has a place for; those that would change what comes
back in a way that it cannot (several choices, tools of the client's, log probabilities), which are
refused; and all others, which are ignored and named in the response. A value that asks for nothing
(null, or the default of the API) is neither refused nor named.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from coa.errors import CoaError
from coa.io.runs import Json
from coa.io.settings import Option
from coa.tools.base import clean

N = TypeVar("N", int, float)
SHOWN = 60
"""Characters of a client's value that a message repeats."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
LARGEST = 2**63 - 1
SAMPLING: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.001, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 0.999),
    "seed": (-LARGEST - 1, LARGEST),
}
"""Name -> least and most; whole numbers where these are."""
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


class Refused(CoaError):
    """A request that is answered with an error object in OpenAI's shape.

    Whose fault it is decides the status: 4xx is the client's, 503 the world's, 500 ours. A message
    never holds a path, a traceback or an address of this side; the log does.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param
        self.headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)

    def to_json(self) -> Json:
        body = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": body}


def unavailable(message: str, code: str, retry_after_s: int = 5) -> Refused:
    """Something outside failed or is busy: it may work when it is tried again."""
    return Refused(message, 503, "server_error", code, retry_after_s=retry_after_s)


def shown(value: object) -> str:
    """A client's value as a message repeats it: whole when it is short."""
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def refuse_stranger(key: str, headers: Mapping[str, str]) -> Refused | None:
    """Why a request with these headers may not come in, if so.

    Without a key the names by which this machine calls itself are the only ones accepted, so that
    a page in a browser cannot reach the server under a name of its own.
    """
    if not key:
        host = headers.get("host", "")
        name, colon, _ = host.rpartition(":")
        if is_loopback(name if colon and not host.endswith("]") else host):
            return None
        message = "this server has no key and is for this machine alone; use 127.0.0.1."
        return Refused(message, 403, code="host_not_allowed")
    kind, _, given = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and hmac.compare_digest(_digest(given.strip()), _digest(key)):
        return None
    message = "the key is missing or wrong; send it as Authorization: Bearer KEY."
    return Refused(message, 401, code="invalid_api_key")


def _digest(key: str) -> bytes:
    """Digests have one length, so that comparing them does not tell that of the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True)
class ServingLimits:
    """What one client, and all of them together, may take."""

    rollouts: Annotated[int, Option("At a time; further ones wait.", least=1)] = 64
    queue: Annotated[int, Option("Waiting; further ones get 429.", least=0)] = 128
    seconds: Annotated[float, Option("Most for one rollout, or for waiting.", least=1)] = 300.0
    tokens: Annotated[int, Option("Most sampled in one rollout.", least=1)] = 2048
    turns: int = 12
    body_bytes: int = 1 << 20
    characters: int = 16_000
    """Of the question."""
    stall_s: float = 60.0
    """A client that takes nothing for so long is given up."""


@dataclass(frozen=True)
class ChatRequest:
    """What a client wants."""

    model: str
    question: str
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    """None: as many as the server allows."""
    sampling: Json = field(default_factory=dict)
    """Settings of a `Decoding` that were asked for."""
    ignored: tuple[str, ...] = ()
    """What was asked for and not done."""


def read_request(body: bytes, limits: ServingLimits) -> ChatRequest:
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
    stream = _flag(record, "stream")
    options = record.pop("stream_options", None)
    if options is not None and not (isinstance(options, dict) and stream):
        raise _wrong("stream_options", options, "an object, and only with stream true")
    options = {f"stream_options.{name}": value for name, value in (options or {}).items()}
    include_usage = _flag(options, "stream_options.include_usage")
    # The newer of the two names counts.
    longest = _number(record, "max_tokens", 1, LARGEST)
    longest = _number(record, "max_completion_tokens", 1, LARGEST) or longest
    if longest is not None and longest > limits.tokens:
        ignored.append(f"max_tokens above {limits.tokens}")
        longest = limits.tokens
    sampling = {name: _number(record, name, *bounds) for name, bounds in SAMPLING.items()}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    if sampling.get("top_k") == -1:  # elsewhere that means all
        sampling["top_k"] = 0
    for name, value in {**options, **record}.items():  # what is left over has no effect
        if value is not None and (name not in NOTHING_ASKED or value != NOTHING_ASKED[name]):
            ignored.append(_cut(name))
    if (more := len(ignored) - NAMED) > 0:
        ignored[NAMED:] = [f"and {more} more"]
    return ChatRequest(model, question, stream, include_usage, longest, sampling, tuple(ignored))


def _object(body: bytes) -> Json:
    def no_constant(name: str) -> float:
        raise ValueError(f"{name} is not a number of JSON")

    try:
        record = json.loads(body, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refused(f"the body is not JSON: {reason[:200]}.", code="invalid_json") from None
    if not isinstance(record, dict):
        raise Refused(f"the body is {shown(record)}, expected a JSON object.", code="invalid_json")
    return record


def _wrong(name: str, value: object, expected: str) -> Refused:
    found = "missing" if value is None else shown(value)
    return Refused(f"{name} is {found}, expected {expected}.", code="invalid_value", param=name)


def _flag(record: Json, name: str) -> bool:
    value = record.pop(name, None)
    if not isinstance(value, bool | None):
        raise _wrong(name, value, "true or false")
    return bool(value)


def _number(record: Json, name: str, low: N, high: N) -> N | None:
    """A number of the bounds' type, if there is one."""
    value, kind = record.pop(name, None), type(low)
    if value is None:
        return None
    # A whole number may be too large for a float; comparing it is safe, converting it is not.
    if isinstance(value, bool) or not isinstance(value, int | kind) or not low <= value <= high:
        whole = "whole " if kind is int else ""
        raise _wrong(name, value, f"a {whole}number from {low:.16g} to {high:.16g}")
    return kind(value)


def _question(messages: Any, limits: ServingLimits, ignored: list[str]) -> str:
    """The text of the last message, which has to be the user's. The agent was trained on single
    questions, so what stands before it is not read, and the response says so."""
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list with at least one message")
    for place, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            expected = f"an object with a role, one of {', '.join(ROLES)}"
            raise _wrong(f"messages[{place}]", message, expected)
    last, where = messages[-1], f"messages[{len(messages) - 1}]"
    if last["role"] != "user":
        raise _wrong(f"{where}.role", last["role"], "'user': the last message is the question")
    system = sum(message["role"] in ("system", "developer") for message in messages)
    if system:
        ignored.append(f"system messages ({system})")
    if earlier := len(messages) - 1 - system:
        ignored.append(f"earlier messages ({earlier})")
    extra = [name for name in last if name not in ("role", "content") and last[name] is not None]
    ignored += [_cut(f"{where}.{name}") for name in extra]
    content, where = last.get("content"), f"{where}.content"
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts:
        raise _wrong(where, content, "the question as text")
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _wrong(where, part, "parts of type text: this agent reads nothing else")
        if not isinstance(part.get("text"), str):
            raise _wrong(where, part, "parts of type text with a string")
    question = clean("\n".join(part["text"] for part in parts))
    if not question:
        raise _wrong(where, content, "a question, and it is blank")
    if len(question) > limits.characters:
        message = f"{where} has {len(question)} characters, expected at most {limits.characters}."
        raise Refused(message, code="context_length_exceeded", param="messages")
    return question
