"""Who may ask, and what was asked for: from a request to an `ChatRequest`, or to a `Refused`.

Three kinds of parameters: those that a rollout has a place for; those that would change what comes
back in a way that it cannot (several choices, log probabilities), which are refused; and all
others, which are ignored and named in the response. A value that asks for nothing (null, or the
default of the API) is neither refused nor named.

Messages are three things: the last one of the user is the question, those before it are its
history, and those after it are steps of the chain that answers it: calls of the client's tools with
their results.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar

from coa.errors import CoaError
from coa.grammar import ChatMessage
from coa.io.runs import Json
from coa.io.settings import Option
from coa.tools.arguments import canonical, described, schema_problem
from coa.tools.base import clean
from coa.view.terminal import fold

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
TOOLS = 128
"""Most tools of a client."""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NOT_TEXT = "this agent answers in plain text"
CANNOT: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "one request is one rollout; send several requests"),
    "best_of": ((1,), "one request is one rollout; send several requests"),
    "functions": (([],), "send them as tools"),
    "function_call": (("none", "auto"), "send it as tool_choice"),
    "logprobs": ((False,), "the answer has no log probabilities here"),
    "top_logprobs": ((0,), "the answer has no log probabilities here"),
    "logit_bias": (({},), "tokens cannot be weighted here"),
    "stop": (([], ""), "the agent ends where its protocol ends"),
    "response_format": (({"type": "text"},), NOT_TEXT),
    "modalities": ((["text"],), NOT_TEXT),
    "audio": ((), NOT_TEXT),
    "prediction": ((), "predicted output is not used here"),
    "web_search_options": ((), "the agent has tools of its own"),
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
    try:
        return _cut(repr(value))
    except RecursionError:
        return "something nested very deeply"


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
    given = owner_of(headers)
    if any(hmac.compare_digest(given, _digest(each)) for each in keys_in(key)):
        return None
    message = "the key is missing or wrong; send it as Authorization: Bearer KEY."
    return Refused(message, 401, code="invalid_api_key")


def keys_in(text: str) -> list[str]:
    """Keys of clients, a line each."""
    return [line.strip() for line in text.split("\n") if line.strip()]


def owner_of(headers: Mapping[str, str]) -> bytes:
    """What stands for the key of a client; the same for all that send none."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    return _digest(given.strip()) if kind.lower() == "bearer" else b""


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
    conversation: int = 64_000
    """Characters of all messages."""
    schemas: int = 32_000
    """Characters of what a client says of its tools."""
    wait_s: Annotated[
        float, Option("Seconds that a chain waits for a tool of its client.", "--wait", least=0)
    ] = 300.0
    waiting: Annotated[
        int, Option("Chains that wait for tools of clients; the oldest go first.", least=0)
    ] = 256
    waiting_bytes: int = 64 << 20
    """All of them together, about."""
    stall_s: float = 60.0
    """A client that takes nothing for so long is given up."""


class ClientTool(NamedTuple):
    """A function of the client's."""

    name: str
    about: str
    """What a prompt says of it."""
    schema: str
    """Of its arguments, as JSON text."""


class ClientCall(NamedTuple):
    """A call of a function of the client's."""

    id: str
    name: str
    arguments: str

    def is_same(self, other: ClientCall) -> bool:
        """Whether it is the same call; clients may write the JSON of its arguments anew."""
        same = (self.id, self.name) == (other.id, other.name)
        return same and canonical(self.arguments) == canonical(other.arguments)

    def to_json(self) -> Json:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ClientStep(NamedTuple):
    """A message of the assistant's after the question: its text, its calls and their results."""

    text: str
    calls: tuple[ClientCall, ...] = ()
    results: tuple[str, ...] = ()


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
    history: tuple[ChatMessage, ...] = ()
    """What was said before the question."""
    steps: tuple[ClientStep, ...] = ()
    """What the chain has done with the client's tools so far."""
    tools: tuple[ClientTool, ...] = ()
    callable: tuple[str, ...] = ()
    """Names of the client's tools that may be called in this reply."""
    must_call: bool = False
    """The reply has to be a call of one of these."""
    size: int = field(default=0, compare=False)
    """Bytes of the body."""


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
    history, question, steps = _conversation(record.pop("messages", None), limits, ignored)
    tools = _tools(record.pop("tools", None), limits, ignored)
    chosen, must_call = _choice(record.pop("tool_choice", None), tools)
    _check_calls(steps, tools)
    _flag(record, "parallel_tool_calls")  # the chain makes one call at a time either way
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
    return ChatRequest(
        model,
        question,
        stream,
        include_usage,
        longest,
        sampling,
        tuple(ignored),
        history,
        steps,
        tools,
        chosen,
        must_call,
        len(body),
    )


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


# -- messages ----------------------------------------------------------------------------------


def _conversation(
    messages: Any, limits: ServingLimits, ignored: list[str]
) -> tuple[tuple[ChatMessage, ...], str, tuple[ClientStep, ...]]:
    """What was said before the question, the question, and the steps after it."""
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list with at least one message")
    for place, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            expected = f"an object with a role, one of {', '.join(ROLES)}"
            raise _wrong(f"messages[{place}]", message, expected)
    last = messages[-1]["role"]
    if last not in ("user", "tool"):
        expected = "'user' or 'tool': the last message is the question, or what a tool of the "
        expected += "client's returned for it"
        raise _wrong(f"messages[{len(messages) - 1}].role", last, expected)
    asked = max((at for at, each in enumerate(messages) if each["role"] == "user"), default=None)
    if asked is None:
        expected = "one of the user among them, which is the question"
        raise _wrong("messages", messages, expected)
    read = [_Message(each, f"messages[{at}]", ignored) for at, each in enumerate(messages)]
    question = read[asked].text
    where = f"messages[{asked}].content"
    if not question:
        raise _wrong(where, messages[asked].get("content"), "a question, and it is blank")
    if len(question) > limits.characters:
        message = f"{where} has {len(question)} characters, expected at most {limits.characters}."
        raise Refused(message, code="context_length_exceeded", param="messages")
    said = sum(len(each.text) + sum(map(len, map("".join, each.calls))) for each in read)
    if said > limits.conversation:
        message = f"the messages have {said} characters, expected at most {limits.conversation}; "
        message += "leave out the oldest."
        raise Refused(message, code="context_length_exceeded", param="messages")
    history = tuple(told for each in read[:asked] if (told := each.told()).text)
    return history, question, tuple(_steps(read[asked + 1 :]))


class _Message:
    """One message, read."""

    def __init__(self, message: Json, where: str, ignored: list[str]) -> None:
        self.where, self.role = where, message["role"]
        by_role = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}.get(self.role, ())
        for name in message:
            if name not in ("role", "content", *by_role) and message[name] is not None:
                ignored.append(_cut(f"{where}.{name}"))
        self.calls = self._calls(message.get("tool_calls")) if self.role == "assistant" else ()
        self.answers = message.get("tool_call_id")
        silent = self.role == "assistant" and message.get("content") is None
        self.text = "" if silent else self._text(message.get("content"))

    def _text(self, content: Any) -> str:
        where = f"{self.where}.content"
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list) or not parts:
            what = "the question" if self.role == "user" else "what was said"
            raise _wrong(where, content, f"{what} as text")
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise _wrong(where, part, "parts of type text: this agent reads nothing else")
            if not isinstance(part.get("text"), str):
                raise _wrong(where, part, "parts of type text with a string")
        return clean("\n".join(part["text"] for part in parts))

    def _calls(self, listed: Any) -> tuple[ClientCall, ...]:
        where = f"{self.where}.tool_calls"
        if not isinstance(listed, list | None):
            raise _wrong(where, listed, "a list of calls")
        calls = []
        for place, each in enumerate(listed or ()):
            match each:
                case {"id": str(), "function": {"name": str(), "arguments": str()} as function}:
                    name, arguments = clean(function["name"]), clean(function["arguments"])
                    calls.append(ClientCall(each["id"], name, arguments))
                case _:
                    expected = "an object with an id and a function that has a name and arguments"
                    raise _wrong(f"{where}[{place}]", each, f"{expected}, all texts")
        return tuple(calls)

    def told(self) -> ChatMessage:
        """It as a prompt shows it; calls are written behind what was said."""
        calls = [f"{call.name}({call.arguments})" for call in self.calls]
        text = "\n".join([*([self.text] if self.text else []), *calls])
        if self.role in ("user", "assistant"):
            return ChatMessage(self.role, text)
        return ChatMessage("tool" if self.role in ("tool", "function") else "system", text)


def _steps(messages: Sequence[_Message]) -> list[ClientStep]:
    """The messages after the question: each call of the assistant's has a result."""
    steps = list[ClientStep]()
    results: dict[str, str | None] = {}
    """Of the last step, by the ids of its calls."""
    for each in [*messages, None]:
        if each is not None and each.role == "tool":
            if results.get(str(each.answers), "") is not None:
                expected = "the id of a call in the assistant's message before it, once"
                raise _wrong(f"{each.where}.tool_call_id", each.answers, expected)
            results[str(each.answers)] = each.text
            continue
        told = tuple(text for text in results.values() if text is not None)
        if len(told) < len(results):
            missing = next(id for id, text in results.items() if text is None)
            message = f"messages: the call {shown(missing)} has no message of the role tool."
            raise Refused(message, code="invalid_value", param="messages")
        if steps:
            steps[-1] = steps[-1]._replace(results=told)
        if each is None:
            break
        if each.role != "assistant":
            expected = "'assistant' or 'tool': after the question only calls and their results come"
            raise _wrong(f"{each.where}.role", each.role, expected)
        steps.append(ClientStep(each.text, each.calls))
        results = dict.fromkeys((call.id for call in each.calls), None)
        if len(results) < len(each.calls):
            raise _wrong(f"{each.where}.tool_calls", [*results], "an id of its own for each call")
    return steps


# -- tools of the client -----------------------------------------------------------------------


def _tools(given: Any, limits: ServingLimits, ignored: list[str]) -> tuple[ClientTool, ...]:
    if not isinstance(given, list | None) or len(given or ()) > TOOLS:
        found = f"a list of {len(given)}" if isinstance(given, list) else shown(given)
        message = f"tools is {found}, expected a list of at most {TOOLS} functions."
        raise Refused(message, code="invalid_value", param="tools")
    tools = [_tool(each, f"tools[{place}]", ignored) for place, each in enumerate(given or ())]
    names = [each.name for each in tools]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise _wrong("tools", names, f"each name once, and {twice!r} is there again")
    told = sum(len(each.about) + len(each.schema) for each in tools)
    if told > limits.schemas:
        message = f"tools have {told} characters, expected at most {limits.schemas}; send fewer."
        raise Refused(message, code="context_length_exceeded", param="tools")
    return tuple(tools)


def _tool(given: Any, where: str, ignored: list[str]) -> ClientTool:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind != "function":
        raise _wrong(where, given, "an object of the type 'function': no other tools are known")
    outer, where = where, f"{where}.function"
    function = given.get("function")
    if not isinstance(function, dict):
        raise _wrong(where, function, "an object with a name and parameters")
    name, said = function.get("name"), function.get("description") or ""
    schema = function.get("parameters")
    schema = {"type": "object", "properties": {}} if schema is None else schema
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise _wrong(f"{where}.name", name, "1 to 64 letters, digits, underscores and hyphens")
    if not isinstance(said, str):
        raise _wrong(f"{where}.description", said, "a text")
    try:
        problem = schema_problem(schema)
        about = "" if problem else clean(described(clean(said).rstrip("."), schema))
        written = json.dumps(schema, allow_nan=False)
    except (RecursionError, ValueError):
        problem = "it cannot be written out."
    if problem:
        message = fold(f"{where}.parameters: {problem}", 300)
        raise Refused(message, code="invalid_value", param=f"{where}.parameters")
    known = ("name", "description", "parameters", "strict")  # arguments are checked in any case
    extra = [f"{where}.{each}" for each in function if each not in known]
    extra += [f"{outer}.{each}" for each in given if each not in ("type", "function")]
    ignored += map(_cut, extra)
    return ClientTool(name, about, written)


def _choice(given: Any, tools: Sequence[ClientTool]) -> tuple[tuple[str, ...], bool]:
    """Which tools the reply may call, and whether it has to."""
    names = tuple(tool.name for tool in tools)
    if given in (None, "auto", "none"):
        return () if given == "none" else names, False
    if given == "required" and names:
        return names, True
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(name, str) and name in names and given.get("type") == "function":
        return (name,), True
    one = ", or a function that is among the tools" if names else ": there are no tools"
    raise _wrong("tool_choice", given, f"none, auto{', required' if names else ''}{one}")


def _check_calls(steps: Sequence[ClientStep], tools: Sequence[ClientTool]) -> None:
    """Refuse steps with tools that are none of the client's: their chain could not go on."""
    names = [tool.name for tool in tools]
    for call in (call for step in steps for call in step.calls):
        if call.name not in names:
            message = f"a message calls {shown(call.name)}, which is not among the tools."
            raise Refused(message, code="invalid_value", param="tools")
