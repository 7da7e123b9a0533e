"""What is said between a program and a model server, in whichever of three dialects.

Chat completions, Responses and Anthropic's messages say the same things in different words. A
`Dialect` reads a request and a reply of one of them into an `WireExchange`; a reply that came as a
stream of events is first put together to the body that the same server would have sent at once.

All of it is text of strangers: a reader raises `RecordError` and nothing else, in words that quote
none of it. What a part is that is no text (an image, a file) is named in `WireMessage.other`, and
what a server did not count is None: nothing is made up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from coa.errors import RecordError
from coa.io.runs import Json
from coa.recording.episode import ToolSpec

WireRole = Literal["system", "user", "assistant", "tool"]
_ROLES: Mapping[str, WireRole] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


HIDDEN = "encrypted_reasoning"
"""Among `WireMessage.other`: a thought that its server does not show."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a tool that a model wrote."""

    id: str
    name: str
    arguments: Json | str
    """The text itself where it is no JSON object."""


@dataclass(frozen=True, slots=True)
class WireMessage:
    """One message of a conversation."""

    role: WireRole
    text: str = ""
    reasoning: str = ""
    calls: tuple[FunctionCall, ...] = ()
    answers: str = ""
    """Of a tool's message: the id of the call that it is the result of."""
    failed: bool = False
    """The program says that the tool failed."""
    name: str = ""
    other: tuple[str, ...] = ()
    """Kinds of its parts that are no text."""

    def to_json(self) -> Json:
        """Fields that are not empty."""
        record = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name)}
        if self.calls:
            record["calls"] = [[call.id, call.name, call.arguments] for call in self.calls]
        return record

    @classmethod
    def from_json(cls, record: Json) -> WireMessage:
        calls = tuple(FunctionCall(*call) for call in record.get("calls", ()))
        other = tuple(record.get("other", ()))
        return cls(**{**record, "calls": calls, "other": other})


@dataclass(frozen=True, slots=True)
class WireUsage:
    """Tokens and money as the server counted them; None: it did not say."""

    prompt: int | None = None
    """All that went in, those of a cache among them."""
    cached: int | None = None
    sampled: int | None = None
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class ServerUse:
    """A tool that the provider's own server called and answered while it wrote a reply."""

    call: FunctionCall
    result: str = ""
    """Empty where the server does not show it."""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class WireExchange:
    """One model call: what was given, and what came back."""

    model: str
    system: str
    tools: tuple[ToolSpec, ...]
    messages: tuple[WireMessage, ...]
    """Without the system prompt, except where one stands later in the conversation."""
    reply: WireMessage | None = None
    """None: nothing came back that could be read."""
    usage: WireUsage = field(default_factory=WireUsage)
    stop: str = ""
    """The server's own word for why the reply ended."""
    id: str = ""
    """Of the reply, by which a later request may refer to it."""
    follows: str = ""
    """The id of the reply that this request goes on from; its messages are not repeated here."""
    drafts: tuple[WireMessage, ...] = ()
    """Further choices for the reply (`n` above 1); a later request may show which one was used."""
    ran: tuple[ServerUse, ...] = ()
    """Tools that the server ran itself for this reply (its web search, its interpreter). They are
    no calls of the reply, which may well be the last word of its agent."""
    kept: str = ""
    """What of the system prompt was sent as messages, where the server keeps those: it holds for
    requests that go on from this one, too."""


class Dialect(Protocol):
    """One API: where it is, and how its requests, replies and streams are read."""

    name: str
    path: str
    """After the version: chat/completions, responses, messages."""

    def request(self, body: Json) -> WireExchange:
        """What a model was given."""
        ...

    def reply(self, body: Json) -> tuple[WireMessage, WireUsage, str, str]:
        """What came back, what it cost, why it ended, and its id."""
        ...

    def beside(self, body: Json) -> tuple[list[WireMessage], list[ServerUse]]:
        """Further choices for the reply, and tools that the server ran for it."""
        ...

    def assembled(self, events: Iterable[Json]) -> tuple[Json, bool]:
        """The body that these events of a stream amount to, and whether the stream came to its
        end. One that ended with an error has it under `error`."""
        ...


def exchange_of(dialect: Dialect, request: Json, reply: Json | None = None) -> WireExchange:
    """What was asked, and what came back where something did."""
    with _reading("a model call"):
        asked = dialect.request(request)
        if reply is None:
            return asked
        said, usage, stop, name = dialect.reply(reply)
        drafts, ran = dialect.beside(reply)
        model = _text(reply.get("model")) or asked.model
    return replace(
        asked,
        model=model,
        reply=said,
        usage=usage,
        stop=stop,
        id=name,
        drafts=tuple(drafts),
        ran=tuple(ran),
    )


def assembled(dialect: Dialect, events: Iterable[Json]) -> tuple[Json, bool]:
    """`Dialect.assembled`, for events of strangers."""
    with _reading("a stream"):
        return dialect.assembled(events)


def read_body(raw: bytes, what: str) -> Json:
    """The JSON object that a body holds."""
    with _reading(what):
        try:
            return _object(json.loads(raw), what)
        except (ValueError, RecursionError) as wrong:  # its message may quote the text
            if isinstance(wrong, RecordError):
                raise
            raise RecordError(f"{what}: {len(raw)} bytes that are not JSON.") from None


# -- what all of them have ---------------------------------------------------------------------


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Text of strangers may be nested deeper than anybody reads."""
    try:
        yield
    except RecursionError:
        raise RecordError(f"{what}: is nested too deeply.") from None


def _object(value: Any, what: str) -> Json:
    if not isinstance(value, dict):
        raise RecordError(f"{what}: found {_short(value)}, expected an object.")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise RecordError(f"{what}: found {_short(value)}, expected a list.")
    return value


def _objects(value: Any, what: str) -> list[Json]:
    return [_object(each, what) for each in _list(value, what)]


def _short(value: Any) -> str:
    """The kind of a value; what it says is the user's, and is in no message."""
    return "nothing" if value is None else type(value).__name__


def _inner(value: Json, name: str) -> Json:
    """An object inside another one; an empty one where there is none."""
    held = value.get(name)
    return held if isinstance(held, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int | None:
    sound = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if sound else None


def _money(value: Any) -> float | None:
    sound = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    return float(value) if sound else None


def _index(event: Json, name: str, otherwise: int = 0) -> int:
    """Which of several parts an event is about."""
    found = _count(event.get(name))
    return otherwise if found is None else found


def arguments_of(given: Any) -> Json | str:
    """The arguments of a call, which APIs send as text or as an object."""
    if isinstance(given, dict):
        return given
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if not isinstance(given, str):
        return json.dumps(given, ensure_ascii=False)
    try:
        read = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return read if isinstance(read, dict) else given


def _parts(content: Any, texts: Sequence[str], what: str) -> tuple[str, tuple[str, ...]]:
    """The text of a content that is one, or a list of parts; and the kinds of those that are none.

    `texts` are the kinds of parts that hold a text under `text`, or under their own name.
    """
    if content is None or isinstance(content, str):
        return content or "", ()
    said: list[str] = []
    other: list[str] = []
    for part in _list(content, what):
        if isinstance(part, str):
            said.append(part)
            continue
        kind = _text(_object(part, what).get("type")) or "text"
        held = part.get("text", part.get(kind))
        if kind in texts and isinstance(held, str):
            said.append(held)
        else:
            other.append(kind)
    return "\n".join(said), tuple(other)


def _tool(name: Any, about: Any, schema: Any) -> ToolSpec:
    declared = json.dumps(schema, sort_keys=True) if isinstance(schema, dict) else ""
    return ToolSpec(_text(name), _text(about).strip(), "json", declared)


def _hosted(tool: Json) -> str:
    """What a tool of the provider's own is called, by its kind, as its calls are told. A server of
    tools has no name: its tools are known when they are called."""
    kind = _text(tool.get("type"))
    others = ("function", "custom", "mcp")
    return "" if kind in others else re.sub(r"_preview(?:_\w+)?\Z|_\d+\Z", "", kind)


def _named(tools: Iterable[ToolSpec]) -> tuple[ToolSpec, ...]:
    """Without those that nobody could call by a name."""
    return tuple(tool for tool in tools if tool.name)


def _led_by_system(
    messages: Sequence[WireMessage], first: str = ""
) -> tuple[str, tuple[WireMessage, ...]]:
    """The system prompt, of all system messages that stand before any other, and the rest."""
    led = 0
    while led < len(messages) and messages[led].role == "system":
        led += 1
    said = [first, *(message.text for message in messages[:led])]
    return "\n\n".join(text for text in said if text), tuple(messages[led:])


def _joined(messages: Sequence[WireMessage]) -> WireMessage:
    """One message of a model of the parts that it was sent in."""
    return WireMessage(
        "assistant",
        "\n".join(each.text for each in messages if each.text),
        "\n".join(each.reasoning for each in messages if each.reasoning),
        tuple(call for each in messages for call in each.calls),
        other=tuple(kind for each in messages for kind in each.other),
    )


def _model(body: Json) -> str:
    return _text(body.get("model"))


# -- chat completions --------------------------------------------------------------------------


class _Chat:
    name, path = "chat", "chat/completions"
    _texts = ("text", "refusal", "input_text", "output_text")
    _spoken = ("content", "reasoning_content", "reasoning", "refusal")

    def request(self, body: Json) -> WireExchange:
        messages = [self._message(each) for each in _objects(body.get("messages"), "messages")]
        system, rest = _led_by_system(messages)
        tools: list[ToolSpec] = []
        for each in _objects(body.get("tools"), "tools"):
            what = _inner(each, "function") or _inner(each, "custom") or each
            kind = "text" if each.get("type") == "custom" else "json"
            name = what.get("name") or _hosted(each)
            made = _tool(name, what.get("description"), what.get("parameters"))
            tools.append(replace(made, body=kind))
        for each in _objects(body.get("functions"), "functions"):
            tools.append(_tool(each.get("name"), each.get("description"), each.get("parameters")))
        return WireExchange(_model(body), system, _named(tools), rest)

    def reply(self, body: Json) -> tuple[WireMessage, WireUsage, str, str]:
        choices = self._choices(body)
        said = self._message(_object(choices[0].get("message"), "message"))
        counted = _inner(body, "usage")
        usage = WireUsage(
            _count(counted.get("prompt_tokens")),
            _count(_inner(counted, "prompt_tokens_details").get("cached_tokens")),
            _count(counted.get("completion_tokens")),
            _money(counted.get("cost")),
        )
        return said, usage, _text(choices[0].get("finish_reason")), _text(body.get("id"))

    def beside(self, body: Json) -> tuple[list[WireMessage], list[ServerUse]]:
        further = self._choices(body)[1:]
        return [self._message(_object(each.get("message"), "message")) for each in further], []

    def _choices(self, body: Json) -> list[Json]:
        choices = _objects(body.get("choices"), "choices")
        if not choices:
            raise RecordError("choices: found none, expected one.")
        return choices

    def assembled(self, events: Iterable[Json]) -> tuple[Json, bool]:
        body: Json = {}
        choices: dict[int, Json] = {}
        for event in events:
            known = ("id", "model", "usage", "error")
            body |= {name: event[name] for name in known if event.get(name)}
            for each in _objects(event.get("choices"), "choices"):
                choice = choices.setdefault(
                    _index(each, "index"),
                    {"message": {"role": "assistant"}, "calls": [], "finish_reason": None},
                )
                self._add(choice["message"], choice["calls"], _inner(each, "delta"))
                choice["finish_reason"] = each.get("finish_reason") or choice["finish_reason"]
        for choice in choices.values():
            if calls := choice.pop("calls"):
                choice["message"]["tool_calls"] = calls
        body["choices"] = [choices[index] for index in sorted(choices)]
        ended = bool(choices) and all(choice["finish_reason"] for choice in choices.values())
        return body, ended

    def _add(self, message: Json, calls: list[Json], delta: Json) -> None:
        """Add what one event says to a message."""
        for name in self._spoken:
            if isinstance(said := delta.get(name), str | list):
                message[name] = _grown(message.get(name, ""), said)
        if old := _inner(delta, "function_call"):  # of the API before tools
            held = message.setdefault("function_call", {"name": "", "arguments": ""})
            for name in held:
                held[name] += _text(old.get(name))
        for at, each in enumerate(_objects(delta.get("tool_calls"), "tool_calls")):
            index = _index(each, "index", at)
            call = next((held for held in reversed(calls) if held["index"] == index), None)
            if call is None or _is_another(call, each):
                call = {"index": index}
                calls.append(call)
            if each.get("id"):
                call["id"] = each["id"]
            for kind, names in _WRITTEN.items():
                if isinstance(each.get(kind), dict):
                    held = call.setdefault(kind, dict.fromkeys(names, ""))
                    for name in names:
                        held[name] += _text(each[kind].get(name))

    def _message(self, given: Json) -> WireMessage:
        role = _ROLES.get(_text(given.get("role")), "user")
        thought, content = _thinking(given.get("content"))
        text, other = _parts(content, self._texts, "content")
        made = _objects(given.get("tool_calls"), "tool_calls")
        if given.get("function_call"):
            made = [*made, {"function": given["function_call"]}]
        called: list[FunctionCall] = []
        for each in made:
            name = _text(each.get("id"))
            if own := _inner(each, "custom"):
                called.append(FunctionCall(name, _text(own.get("name")), _text(own.get("input"))))
            else:
                what = _inner(each, "function")
                arguments = arguments_of(what.get("arguments"))
                called.append(FunctionCall(name, _text(what.get("name")), arguments))
        said = given.get("reasoning_content") or given.get("reasoning")
        reasoning, _ = _parts(said if isinstance(said, list) else _text(said), self._texts, "said")
        return WireMessage(
            role,
            text or _text(given.get("refusal")),
            reasoning or thought,
            tuple(called),
            _text(given.get("tool_call_id")),
            name=_text(given.get("name")),
            other=other,
        )


_WRITTEN = {"function": ("name", "arguments"), "custom": ("name", "input")}
"""What a call is written under, by its kind, and what of it comes piece by piece."""


def _is_another(held: Json, event: Json) -> bool:
    """Whether an event begins a call, though its place has one: there are servers that number every
    call 0, or none, and send each of them whole."""
    function = _inner(held, "function")
    if not (function.get("name") and _inner(event, "function").get("name")):
        return False
    if held.get("id") and event.get("id"):
        return bool(held["id"] != event["id"])
    return bool(function["arguments"]) and isinstance(arguments_of(function["arguments"]), dict)


def _grown(before: Any, said: Any) -> Any:
    """What a stream has said so far, with what it says next: a text, or parts, as Mistral sends
    them, each of which may be a piece of the one before it."""
    if isinstance(before, str) and isinstance(said, str):
        return before + said
    parts: list[Json] = []
    for given in (before, said):
        listed = [given] if isinstance(given, str) else _list(given, "content")
        for each in filter(None, listed):
            part = {"type": "text", "text": each} if isinstance(each, str) else each
            kind = _text(_object(part, "content").get("type"))
            if parts and kind in ("text", "thinking") and parts[-1].get("type") == kind:
                grown = _grown(parts[-1].get(kind) or "", part.get(kind) or "")
                parts[-1] = {**parts[-1], kind: grown}
            else:
                parts.append(part)
    return parts


def _thinking(content: Any) -> tuple[str, Any]:
    """The reasoning among the parts of a content, and the content without it."""
    if not isinstance(content, list):
        return "", content
    thought: list[str] = []
    rest: list[Any] = []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "thinking":
            thought.append(_parts(part.get("thinking"), ("text",), "thinking")[0])
        else:
            rest.append(part)
    return "\n".join(thought), rest


# -- Responses ---------------------------------------------------------------------------------


class _Responses:
    name, path = "responses", "responses"
    _texts = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")

    def request(self, body: Json) -> WireExchange:
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        messages = self._messages(_objects(items, "input"))
        kept, rest = _led_by_system(messages)
        system = "\n\n".join(filter(None, (_text(body.get("instructions")), kept)))
        tools = []
        for each in _objects(body.get("tools"), "tools"):
            name = each.get("name") or _hosted(each)
            made = _tool(name, each.get("description"), each.get("parameters"))
            tools.append(replace(made, body="text") if each.get("type") == "custom" else made)
        follows = _text(body.get("previous_response_id"))
        return WireExchange(_model(body), system, _named(tools), rest, follows=follows, kept=kept)

    def reply(self, body: Json) -> tuple[WireMessage, WireUsage, str, str]:
        status = _text(body.get("status"))
        if status in ("queued", "in_progress"):
            raise RecordError(f"the reply is {status}: it is fetched later.")
        said = self._messages(_objects(body.get("output"), "output"))
        if status == "failed" and not said:
            raise RecordError("the reply failed.")
        replies = [message for message in said if message.role == "assistant"]
        counted = _inner(body, "usage")
        usage = WireUsage(
            _count(counted.get("input_tokens")),
            _count(_inner(counted, "input_tokens_details").get("cached_tokens")),
            _count(counted.get("output_tokens")),
            _money(counted.get("cost")),
        )
        reason = _inner(body, "incomplete_details").get("reason")
        return _joined(replies), usage, _text(reason) or status, _text(body.get("id"))

    def beside(self, body: Json) -> tuple[list[WireMessage], list[ServerUse]]:
        uses = map(self._server_use, _objects(body.get("output"), "output"))
        return [], [use for use in uses if use is not None]

    def assembled(self, events: Iterable[Json]) -> tuple[Json, bool]:
        body: Json = {}
        items: dict[int, Json] = {}
        ended = False
        for event in events:
            kind = _text(event.get("type"))
            item = items.get(_index(event, "output_index"))
            if isinstance(event.get("response"), dict):
                body = dict(event["response"])
                ended = kind in ("response.completed", "response.incomplete", "response.failed")
            elif kind in ("response.output_item.added", "response.output_item.done"):
                items[_index(event, "output_index")] = dict(_object(event.get("item"), "item"))
            elif kind == "error":
                body["error"] = {"type": event.get("code") or "error"}
            elif item is not None and kind.endswith(".delta"):
                self._add(item, kind.split(".")[1], event)
        if items and not (ended and body.get("output")):
            body["output"] = [items[index] for index in sorted(items)]
        if not ended:
            body.pop("status", None)  # that of the beginning
        return body, ended

    def _add(self, item: Json, stem: str, event: Json) -> None:
        """Add what one event says to an item that is not done."""
        delta = _text(event.get("delta"))
        if field_ := _DELTAS_OF_CALLS.get(stem):
            item[field_] = _text(item.get(field_)) + delta
        elif found := _DELTAS_OF_PARTS.get(stem):
            into, kind = found
            parts = item[into] = list(_list(item.get(into), into))
            at = _index(event, "summary_index" if into == "summary" else "content_index")
            if at >= len(parts):
                parts.append({"type": kind, "text": ""})
            at = min(at, len(parts) - 1)
            last = parts[at] = dict(_object(parts[at], into))
            last["text"] = _text(last.get("text")) + delta

    def _messages(self, items: Sequence[Json]) -> list[WireMessage]:
        """The messages that these items are. Calls and reasoning join the message of the model
        that they stand beside, as they were one reply."""
        messages: list[WireMessage] = []
        own: list[WireMessage] = []

        for item in items:
            message = self._item(item)
            if message.role == "assistant":
                own.append(message)
                continue
            messages += [_joined(own)] if own else []
            messages.append(message)
            own = []
        return [*messages, _joined(own)] if own else messages

    def _item(self, item: Json) -> WireMessage:
        kind = _text(item.get("type")) or "message"
        called = _text(item.get("call_id"))
        if kind == "message":
            role = _ROLES.get(_text(item.get("role")), "user")
            text, other = _parts(item.get("content"), self._texts, "content")
            return WireMessage(role, text, other=other)
        if kind == "reasoning":
            thought, _ = _parts(item.get("summary"), self._texts, "summary")
            in_full, _ = _parts(item.get("content"), self._texts, "content")
            said = in_full or thought
            hidden = not said and item.get("encrypted_content")
            return WireMessage("assistant", reasoning=said, other=(HIDDEN,) if hidden else ())
        if kind.endswith("_call_output"):
            given = item.get("output")
            text, other = _parts(
                json.dumps(given) if isinstance(given, dict) else given, self._texts, "output"
            )
            return WireMessage("tool", text, answers=called, other=other)
        if kind.endswith("_call"):  # without an id the server has answered it: `beside` reads it
            calls = (_client_call(kind, called, item),) if called else ()
            return WireMessage("assistant", calls=calls)
        return WireMessage("assistant", other=(kind,))

    def _server_use(self, item: Json) -> ServerUse | None:
        """A call that the server answered itself: no `call_id` asks the program for an answer."""
        kind = _text(item.get("type"))
        if not kind.endswith("_call") or item.get("call_id"):
            return None
        given = item.get("arguments")
        if given is None:
            known = ("action", "queries", "code")
            given = {name: item[name] for name in known if item.get(name) is not None}
            given = given.get("action", given) if isinstance(given.get("action"), dict) else given
        call = FunctionCall(
            _text(item.get("id")), _text(item.get("name")) or kind[:-5], arguments_of(given)
        )
        found = next((item[n] for n in ("output", "outputs", "results") if item.get(n)), "")
        error = item.get("error")
        shown = error or found
        result = shown if isinstance(shown, str) else json.dumps(shown)
        return ServerUse(call, result, bool(error) or item.get("status") == "failed")


_DELTAS_OF_CALLS = {
    "function_call_arguments": "arguments",
    "custom_tool_call_input": "input",
    "mcp_call_arguments": "arguments",
    "code_interpreter_call_code": "code",
}
_DELTAS_OF_PARTS = {
    "output_text": ("content", "output_text"),
    "refusal": ("content", "refusal"),
    "reasoning_text": ("content", "reasoning_text"),
    "reasoning_summary_text": ("summary", "summary_text"),
}
"""What an event adds to, by the middle of its name: a field of a call; parts, and their kind."""


def _client_call(kind: str, called: str, item: Json) -> FunctionCall:
    """A call that the program is to answer: of a function, or of a tool that the API knows (a
    shell, a computer, a patch)."""
    name = _text(item.get("name")) or kind[:-5]
    if kind == "custom_tool_call":
        return FunctionCall(called, name, _text(item.get("input")))
    given = next((item[n] for n in ("arguments", "action", "operation") if n in item), None)
    return FunctionCall(called, name, arguments_of(given))


def with_items(body: Json, known: Mapping[str, Json]) -> Json:
    """A request of Responses in which references to items are those items, where they are known.

    A program may name an item that the server has kept instead of sending it again.
    """
    items = body.get("input")
    if not isinstance(items, list):
        return body
    found = [
        known.get(_text(item.get("id")), item)
        if isinstance(item, dict) and item.get("type") == "item_reference"
        else item
        for item in items
    ]
    return {**body, "input": found}


def items_of(body: Json) -> dict[str, Json]:
    """The items of a reply by their ids, as a later request may refer to them."""
    given = body.get("output")
    found = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    return {each["id"]: each for each in found if isinstance(each.get("id"), str)}


# -- Anthropic's messages ----------------------------------------------------------------------


class _Anthropic:
    name, path = "anthropic", "messages"
    _texts = ("text",)

    def request(self, body: Json) -> WireExchange:
        system, _ = _parts(body.get("system"), self._texts, "system")
        messages: list[WireMessage] = []
        for each in _objects(body.get("messages"), "messages"):
            messages += self._messages(each)
        tools = (
            _tool(t.get("name") or _hosted(t), t.get("description"), t.get("input_schema"))
            for t in _objects(body.get("tools"), "tools")
        )
        led, rest = _led_by_system(messages, system)
        return WireExchange(_model(body), led, _named(tools), rest)

    def reply(self, body: Json) -> tuple[WireMessage, WireUsage, str, str]:
        said = self._assistant(_list(body.get("content"), "content"))
        counted = _inner(body, "usage")
        new = _count(counted.get("input_tokens"))
        read = _count(counted.get("cache_read_input_tokens"))
        made = _count(counted.get("cache_creation_input_tokens"))
        prompt = None if new is None else new + (read or 0) + (made or 0)
        usage = WireUsage(prompt, read, _count(counted.get("output_tokens")))
        return said, usage, _text(body.get("stop_reason")), _text(body.get("id"))

    def beside(self, body: Json) -> tuple[list[WireMessage], list[ServerUse]]:
        called: dict[str, ServerUse] = {}
        for part in _list(body.get("content"), "content"):
            kind = _text(part.get("type")) if isinstance(part, dict) else ""
            if kind in ("server_tool_use", "mcp_tool_use"):
                name = _text(part.get("id"))
                given = arguments_of(part.get("input"))
                called[name] = ServerUse(FunctionCall(name, _text(part.get("name")), given))
            elif kind.endswith("_tool_result") and _text(part.get("tool_use_id")) in called:
                name, held = part["tool_use_id"], part.get("content")
                failed = part.get("is_error") is True
                failed = failed or _text(_inner(part, "content").get("type")).endswith("_error")
                shown = held if isinstance(held, str) else json.dumps(_without_secrets(held))
                called[name] = replace(called[name], result=shown, failed=failed)
        return [], list(called.values())

    def assembled(self, events: Iterable[Json]) -> tuple[Json, bool]:
        body: Json = {}
        blocks: dict[int, Json] = {}
        counted = ended = False
        for event in events:
            kind, index = _text(event.get("type")), _index(event, "index")
            if kind == "message_start":
                body = dict(_object(event.get("message"), "message"))
            elif kind == "content_block_start":
                blocks[index] = dict(_object(event.get("content_block"), "content_block"))
            elif kind == "content_block_delta" and index in blocks:
                self._add(blocks[index], _inner(event, "delta"))
            elif kind == "message_delta":
                body["stop_reason"] = _inner(event, "delta").get("stop_reason")
                if more := _inner(event, "usage"):
                    counted = True
                    told = {name: value for name, value in more.items() if value is not None}
                    body["usage"] = {**_inner(body, "usage"), **told}
            elif kind == "error":
                body["error"] = _inner(event, "error") or {"type": "error"}
            elif kind == "message_stop":
                ended = True
        if not counted and (held := _inner(body, "usage")):
            # What stands at the beginning counts what has been written until then.
            body["usage"] = {n: value for n, value in held.items() if n != "output_tokens"}
        for block in blocks.values():
            if written := block.pop("partial_json", ""):
                block["input"] = written
        if blocks:
            body["content"] = [blocks[index] for index in sorted(blocks)]
        return body, ended

    @staticmethod
    def _add(block: Json, delta: Json) -> None:
        for name in ("text", "thinking", "partial_json"):
            if isinstance(delta.get(name), str):
                block[name] = _text(block.get(name)) + delta[name]

    def _messages(self, given: Json) -> Iterator[WireMessage]:
        """A message; the results of tools that it holds are messages of their own before it."""
        content = given.get("content")
        role = _ROLES.get(_text(given.get("role")), "user")
        if role == "assistant":
            yield self._assistant([content] if isinstance(content, str) else content)
            return
        rest: list[Any] = []
        for part in [content] if isinstance(content, str) else _list(content, "content"):
            if isinstance(part, dict) and part.get("type") == "tool_result":
                text, other = _parts(part.get("content"), self._texts, "tool_result")
                failed = part.get("is_error") is True
                called = _text(part.get("tool_use_id"))
                yield WireMessage("tool", text, answers=called, failed=failed, other=other)
            else:
                rest.append(part)
        if rest:
            text, other = _parts(rest, self._texts, "content")
            yield WireMessage(role, text, other=other)

    def _assistant(self, content: Any) -> WireMessage:
        said: list[Any] = []
        thought: list[str] = []
        calls: list[FunctionCall] = []
        for part in _list(content, "content"):
            kind = part.get("type") if isinstance(part, dict) else "text"
            if kind == "tool_use":
                used = (_text(part.get("id")), _text(part.get("name")))
                calls.append(FunctionCall(*used, arguments_of(part.get("input"))))
            elif kind == "thinking":
                thought.append(_text(part.get("thinking")))
            elif not _text(kind).endswith(_OF_SERVERS):  # `beside` reads those
                said.append(part)
        text, other = _parts(said, self._texts, "content")
        other = tuple(HIDDEN if kind == "redacted_thinking" else kind for kind in other)
        return WireMessage("assistant", text, "\n".join(thought), tuple(calls), other=other)


_OF_SERVERS = ("server_tool_use", "mcp_tool_use", "_tool_result")
"""Ends of the kinds of parts that tell of tools that the server ran."""


def _without_secrets(value: Any) -> Any:
    """A result without the encrypted copies of pages that only the provider can read."""
    if isinstance(value, dict):
        kept = {n: each for n, each in value.items() if not n.startswith("encrypted_")}
        return {name: _without_secrets(each) for name, each in kept.items()}
    return [_without_secrets(each) for each in value] if isinstance(value, list) else value


DIALECTS: tuple[Dialect, ...] = (_Chat(), _Responses(), _Anthropic())


def dialect_of(path: str) -> Dialect | None:
    """The dialect that is spoken at a path such as /v1/chat/completions."""
    end = path.rstrip("/")
    return next((each for each in DIALECTS if end.endswith(f"/{each.path}")), None)


def read_events(text: str) -> Iterator[Json]:
    """The events of a stream (server-sent events).

    One that is no JSON object, such as the [DONE] of chat completions, is passed over. Lines end as
    the standard says: a text may hold other characters that Python takes for the end of a line.
    """
    held: list[str] = []
    for line in [*re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff")), ""]:
        if line.startswith("data:"):
            held.append(line[5:].removeprefix(" "))
        elif not line and held:
            try:
                event = json.loads("\n".join(held))
            except (ValueError, RecursionError):
                event = None
            held = []
            if isinstance(event, dict):
                yield event
