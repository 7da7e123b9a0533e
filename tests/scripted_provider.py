"""A scripted model provider on loopback: chat completions, Responses and Anthropic's messages.

    with ScriptedProvider(lambda asked: Reply("Lima")) as provider:
        openai.OpenAI(base_url=f"{provider.url}/v1", api_key="sk-test")

A function of what was asked says what comes back: a text, or a `Reply` with tool calls, reasoning,
usage, and with what goes wrong on the way (`fault`). `whole` and `events` make the body and the
stream of each dialect after the public documentation of the APIs, independently of what reads them
in `coa.recording.wire`. Other routes answer with what they were sent.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, Literal

Json = dict[str, Any]
Dialect = Literal["chat", "responses", "anthropic"]
PATHS: dict[Dialect, str] = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "anthropic": "/v1/messages",
}
FAULTS = ("429", "500", "529", "close", "cut", "no_end", "error_event", "stall")
"""What can go wrong: a status; no answer at all; a body or stream that breaks off; a stream that
ends without saying so, or with an error; one that stops for `stall_s` in the middle."""
_numbers = count(1)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Json | str = field(default_factory=dict)
    """A text is sent as it stands (what is no JSON, or what a custom tool takes)."""
    id: str = ""
    """Made up where it is empty."""
    custom: bool = False


@dataclass(frozen=True)
class Reply:
    """What comes back for one request."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    usage: tuple[int, int, int] | None = (11, 0, 7)
    """Tokens of the prompt, those of them from a cache, and of the reply; None: nobody counts. A
    chat stream has them only where the request asks for them, as everywhere."""
    fault: str = ""
    stall_s: float = 0.3
    until: threading.Event | None = None
    """What a stall waits for instead."""
    delay_s: float = 0.0
    gzipped: bool = False
    headers: tuple[tuple[str, str], ...] = ()
    id: str = ""
    status: int = 200
    kind: str = ""
    """Its content type, where that is not what it should be."""
    captured: tuple[Json, Sequence[tuple[str, Json]]] | None = None
    """The body, and the events, that a server really sent: they go out instead of what is made."""

    def stall(self) -> None:
        if self.fault == "stall":
            time.sleep(self.stall_s) if self.until is None else self.until.wait()

    def numbered(self) -> Reply:
        """The same with every id that it lacks."""
        calls = tuple(
            ToolCall(c.name, c.arguments, c.id or f"call_{next(_numbers)}", c.custom)
            for c in self.calls
        )
        return Reply(**{**vars(self), "calls": calls, "id": self.id or f"reply-{next(_numbers)}"})


@dataclass(frozen=True)
class Asked:
    """One request for a model's reply, in whichever dialect."""

    dialect: Dialect
    body: Json
    headers: dict[str, str]
    """Their names in lower case."""

    @property
    def messages(self) -> list[Json]:
        given = self.body.get("messages", self.body.get("input", []))
        return [{"role": "user", "content": given}] if isinstance(given, str) else given

    @property
    def system(self) -> str:
        """The system prompt."""
        own = self.body.get("system") or self.body.get("instructions") or ""
        led = [m for m in self.messages if m.get("role") in ("system", "developer")]
        return _said(own) + "".join(_said(message.get("content")) for message in led)

    @property
    def tools(self) -> list[str]:
        """Names of the tools on offer."""
        return [(t.get("function") or t).get("name", "") for t in self.body.get("tools") or ()]

    @property
    def last(self) -> str:
        """The text of the last message."""
        message = self.messages[-1] if self.messages else {}
        return _said(message.get("content", message.get("output")))

    @property
    def results(self) -> list[str]:
        """The results of tools among the messages, in order."""
        found = []
        for message in self.messages:
            content = message.get("content")
            if message.get("role") == "tool":
                found.append(_said(content))
            elif message.get("type") in ("function_call_output", "custom_tool_call_output"):
                found.append(_said(message.get("output")))
            elif isinstance(content, list):
                parts = (p for p in content if p.get("type") == "tool_result")
                found += [_said(part.get("content")) for part in parts]
        return found


def _said(content: Any) -> str:
    if isinstance(content, list):
        return "".join(_said(part.get("text", part.get("content"))) for part in content)
    return content if isinstance(content, str) else ""


Script = Callable[[Asked], "Reply | str"]


# -- bodies and streams --------------------------------------------------------------------------


def whole(dialect: Dialect, reply: Reply, body: Json) -> Json:
    """The body of a reply that comes at once."""
    if reply.captured is not None:
        return reply.captured[0]
    return {"chat": _chat, "responses": _responses, "anthropic": _anthropic}[dialect](reply, body)


def events(dialect: Dialect, reply: Reply, body: Json) -> list[tuple[str, Json]]:
    """The events of a reply that comes as a stream, with their names (chat events have none)."""
    if reply.captured is not None:
        return list(reply.captured[1])
    made = {"chat": _chat_events, "responses": _response_events, "anthropic": _message_events}
    return list(made[dialect](reply, body))


def _written(call: ToolCall) -> str:
    return call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)


def _pieces(text: str) -> list[str]:
    """A text in pieces, as models write it."""
    return re.findall(r"\s*\S+\s*$|\s*\S+|\s+", text)


def _chat_call(call: ToolCall) -> Json:
    if call.custom:
        told = {"name": call.name, "input": _written(call)}
        return {"id": call.id, "type": "custom", "custom": told}
    told = {"name": call.name, "arguments": _written(call)}
    return {"id": call.id, "type": "function", "function": told}


def _chat_usage(usage: tuple[int, int, int]) -> Json:
    prompt, cached, sampled = usage
    made = {"prompt_tokens": prompt, "completion_tokens": sampled}
    return made | {
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _chat(reply: Reply, body: Json) -> Json:
    message: Json = {"role": "assistant", "content": reply.text or None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [_chat_call(call) for call in reply.calls]
    finish = "tool_calls" if reply.calls else "stop"
    made: Json = {"id": reply.id, "object": "chat.completion", "created": 1}
    made["model"] = body.get("model", "")
    made["choices"] = [{"index": 0, "message": message, "finish_reason": finish}]
    return made | ({"usage": _chat_usage(reply.usage)} if reply.usage else {})


def _chat_events(reply: Reply, body: Json) -> Iterator[tuple[str, Json]]:
    head: Json = {"id": reply.id, "object": "chat.completion.chunk", "created": 1}
    head["model"] = body.get("model", "")

    def chunk(delta: Json, finish: str | None = None) -> tuple[str, Json]:
        return "", {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    yield chunk({"role": "assistant", "content": ""})
    for piece in _pieces(reply.reasoning):
        yield chunk({"reasoning_content": piece})
    for piece in _pieces(reply.text):
        yield chunk({"content": piece})
    for index, call in enumerate(reply.calls):
        kind, into = ("custom", "input") if call.custom else ("function", "arguments")
        first = {"index": index, "id": call.id, "type": kind, kind: {"name": call.name, into: ""}}
        yield chunk({"tool_calls": [first]})
        for piece in _pieces(_written(call)):
            yield chunk({"tool_calls": [{"index": index, kind: {into: piece}}]})
    yield chunk({}, "tool_calls" if reply.calls else "stop")
    if reply.usage and (body.get("stream_options") or {}).get("include_usage"):
        yield "", {**head, "choices": [], "usage": _chat_usage(reply.usage)}


def _response_items(reply: Reply) -> list[Json]:
    items: list[Json] = []
    if reply.reasoning:
        summary = [{"type": "summary_text", "text": reply.reasoning}]
        items.append({"id": f"rs_{reply.id}", "type": "reasoning", "summary": summary})
    if reply.text:
        part = {"type": "output_text", "text": reply.text, "annotations": []}
        message: Json = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant"}
        items.append(message | {"status": "completed", "content": [part]})
    for call in reply.calls:
        kind, into = (
            ("custom_tool_call", "input") if call.custom else ("function_call", "arguments")
        )
        made: Json = {"id": f"fc_{call.id}", "type": kind, "status": "completed"}
        items.append(made | {"call_id": call.id, "name": call.name, into: _written(call)})
    return items


def _response_head(reply: Reply, body: Json, status: str) -> Json:
    made: Json = {"id": reply.id, "object": "response", "created_at": 1, "status": status}
    made |= {"model": body.get("model", ""), "output": [], "error": None}
    made |= {"incomplete_details": None, "instructions": body.get("instructions"), "metadata": {}}
    made |= {"parallel_tool_calls": True, "temperature": 1.0, "tool_choice": "auto", "top_p": 1.0}
    return made | {"tools": body.get("tools") or [], "usage": None}


def _responses(reply: Reply, body: Json) -> Json:
    made = _response_head(reply, body, "completed") | {"output": _response_items(reply)}
    if reply.usage:
        prompt, cached, sampled = reply.usage
        made["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }
    return made


def _response_events(reply: Reply, body: Json) -> Iterator[tuple[str, Json]]:
    numbers = count()

    def event(kind: str, **more: Any) -> tuple[str, Json]:
        return kind, {"type": kind, "sequence_number": next(numbers), **more}

    begun = _response_head(reply, body, "in_progress")
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(_response_items(reply)):
        at = {"item_id": item["id"], "output_index": index}
        kind = item["type"]
        if kind == "message":
            bare = {**item, "status": "in_progress", "content": []}
            yield event("response.output_item.added", output_index=index, item=bare)
            part, inside = item["content"][0], at | {"content_index": 0}
            yield event("response.content_part.added", **inside, part={**part, "text": ""})
            for piece in _pieces(part["text"]):
                yield event("response.output_text.delta", **inside, delta=piece, logprobs=[])
            done = inside | {"text": part["text"], "logprobs": []}
            yield event("response.output_text.done", **done)
            yield event("response.content_part.done", **inside, part=part)
        elif kind == "reasoning":
            text, inside = item["summary"][0]["text"], at | {"summary_index": 0}
            yield event(
                "response.output_item.added", output_index=index, item=item | {"summary": []}
            )
            for piece in _pieces(text):
                yield event("response.reasoning_summary_text.delta", **inside, delta=piece)
            yield event("response.reasoning_summary_text.done", **inside, text=text)
        else:
            into = "input" if kind == "custom_tool_call" else "arguments"
            stem = "custom_tool_call_input" if into == "input" else "function_call_arguments"
            bare = {**item, "status": "in_progress", into: ""}
            yield event("response.output_item.added", output_index=index, item=bare)
            for piece in _pieces(item[into]):
                yield event(f"response.{stem}.delta", **at, delta=piece)
            yield event(f"response.{stem}.done", **at, **{into: item[into]})
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.completed", response=_responses(reply, body))


def _message_blocks(reply: Reply) -> list[Json]:
    blocks: list[Json] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": "c2ln"})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        given = call.arguments if isinstance(call.arguments, dict) else json.loads(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


def _message_usage(reply: Reply) -> Json:
    prompt, cached, sampled = reply.usage or (0, 0, 0)
    made = {"input_tokens": prompt - cached, "cache_read_input_tokens": cached}
    return made | {"cache_creation_input_tokens": 0, "output_tokens": sampled}


def _anthropic(reply: Reply, body: Json) -> Json:
    made: Json = {"id": reply.id, "type": "message", "role": "assistant"}
    made |= {"model": body.get("model", ""), "content": _message_blocks(reply)}
    made |= {"stop_reason": "tool_use" if reply.calls else "end_turn", "stop_sequence": None}
    return made | ({"usage": _message_usage(reply)} if reply.usage else {})


def _message_events(reply: Reply, body: Json) -> Iterator[tuple[str, Json]]:
    made = _anthropic(reply, body)
    begun = {**made, "content": [], "stop_reason": None}
    if reply.usage:
        begun["usage"] = {**made["usage"], "output_tokens": 1}
    yield "message_start", {"type": "message_start", "message": begun}
    yield "ping", {"type": "ping"}
    for index, block in enumerate(made["content"]):
        kind = block["type"]
        bare = {"tool_use": {"input": {}}, "text": {"text": ""}}.get(kind, {"thinking": ""})
        start = {"type": "content_block_start", "index": index, "content_block": block | bare}
        start["content_block"].pop("signature", None)
        yield "content_block_start", start
        name, field_, text = {
            "tool_use": ("input_json_delta", "partial_json", json.dumps(block.get("input"))),
            "text": ("text_delta", "text", block.get("text", "")),
        }.get(kind, ("thinking_delta", "thinking", block.get("thinking", "")))
        for piece in _pieces(text):
            delta = {"type": name, field_: piece}
            yield (
                "content_block_delta",
                {"type": "content_block_delta", "index": index, "delta": delta},
            )
        if kind == "thinking":
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield (
                "content_block_delta",
                {"type": "content_block_delta", "index": index, "delta": delta},
            )
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    delta = {"stop_reason": made["stop_reason"], "stop_sequence": None}
    last: Json = {"type": "message_delta", "delta": delta}
    if reply.usage:
        last["usage"] = {"output_tokens": reply.usage[2]}
    yield "message_delta", last
    yield "message_stop", {"type": "message_stop"}


_ERRORS: dict[Dialect, tuple[str, Json]] = {
    "chat": ("", {"error": {"message": "overloaded", "type": "server_error", "code": 503}}),
    "responses": ("error", {"type": "error", "code": "server_error", "message": "overloaded"}),
    "anthropic": (
        "error",
        {"type": "error", "error": {"type": "overloaded_error", "message": "overloaded"}},
    ),
}


def as_sent(dialect: Dialect, made: Sequence[tuple[str, Json]], end: bool = True) -> list[bytes]:
    """Events as they are sent; `end`: with what chat completions send after the last one."""
    sent = [
        (f"event: {name}\n" if name else "").encode() + f"data: {json.dumps(event)}\n\n".encode()
        for name, event in made
    ]
    return [*sent, b"data: [DONE]\n\n"] if dialect == "chat" and end else sent


def streamed(dialect: Dialect, reply: Reply, body: Json) -> list[bytes]:
    """The pieces of a stream, with the fault of the reply where it has one of them."""
    made = events(dialect, reply, body)
    if reply.fault == "no_end":  # what comes last says that it is the end
        left = {"chat": lambda name, event: not _finished(event)}.get(
            dialect, lambda name, event: name not in ("response.completed", "message_stop")
        )
        return as_sent(dialect, [each for each in made if left(*each)], end=False)
    if reply.fault == "error_event":
        return as_sent(dialect, [*made[: len(made) // 2], _ERRORS[dialect]], end=False)
    return as_sent(dialect, made)


def _finished(event: Json) -> bool:
    return any(choice.get("finish_reason") for choice in event["choices"])


# -- the server ----------------------------------------------------------------------------------


class ScriptedProvider:
    """Answers on 127.0.0.1 until its block ends; several requests at once, each in a thread."""

    def __init__(self, script: Script = lambda asked: "yes") -> None:
        self.script = script
        self.asked: list[Asked] = []
        """Requests for a model's reply, in order."""
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        """Every request: method, path, headers (names in lower case), body."""
        self.sent: list[bytes] = []
        """The bodies of replies, as they went out, before they were packed."""
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        outer = self

        class Answering(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # a body in two pieces would wait 40 ms for the second

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:  # the client is gone
                    self.close_connection = True

            def _any(self) -> None:
                outer._answer(self)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _any

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        class Listening(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Quiet: a caller that gave up is part of the tests."""

        self._server = Listening(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> ScriptedProvider:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        headers = {name.lower(): value for name, value in request.headers.items()}
        raw = _read(request, headers)
        with self._lock:
            self.seen.append((request.command, request.path, headers, raw))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            path = request.path.partition("?")[0]
            dialect = next((d for d, each in PATHS.items() if path == each), None)
            if dialect is None or request.command != "POST":
                self._other(request, raw)
            else:
                packed = headers.get("content-encoding") == "gzip"
                body = json.loads(gzip.decompress(raw) if packed else raw)
                asked = Asked(dialect, body, headers)
                with self._lock:
                    self.asked.append(asked)
                said = self.script(asked)
                reply = Reply(said) if isinstance(said, str) else said
                self._send(request, asked, reply.numbered())
        finally:
            with self._lock:
                self.at_once -= 1

    def _other(self, request: BaseHTTPRequestHandler, raw: bytes) -> None:
        made = {"method": request.command, "path": request.path, "bytes": len(raw)}
        if request.path.partition("?")[0] == "/v1/messages/count_tokens":
            made = {"input_tokens": 42}
        content = json.dumps(made).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("X-Route", "other")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)

    def _send(self, request: BaseHTTPRequestHandler, asked: Asked, reply: Reply) -> None:
        time.sleep(reply.delay_s)
        if reply.fault == "close":
            request.close_connection = True
            return
        if reply.fault.isdecimal():
            error = {"message": f"no, {reply.fault}", "type": "refused"}
            headers = (("Content-Type", "application/json"), ("Retry-After", "0"))
            content = json.dumps({"error": error}).encode()
            self._write(request, int(reply.fault), [content], headers + reply.headers)
            return
        packed = reply.gzipped and "gzip" in asked.headers.get("accept-encoding", "")
        if asked.body.get("stream"):
            self._stream(request, asked, reply, packed)
            return
        content = json.dumps(whole(asked.dialect, reply, asked.body)).encode()
        headers = (("Content-Type", reply.kind or "application/json"),)
        self.sent.append(content)
        headers += (("Content-Encoding", "gzip"),) if packed else ()
        content = gzip.compress(content) if packed else content
        pieces = [content[: len(content) // 2], content[len(content) // 2 :]]
        self._write(request, reply.status, pieces, headers + reply.headers, reply)

    def _write(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        pieces: Sequence[bytes],
        headers: tuple[tuple[str, str], ...],
        reply: Reply | None = None,
    ) -> None:
        """A body of a length that is said at its head."""
        request.send_response(status)
        for name, value in headers:
            request.send_header(name, value)
        request.send_header("Content-Length", str(sum(map(len, pieces))))
        request.end_headers()
        for at, piece in enumerate(pieces):
            if at and reply:
                reply.stall()
            if at and reply and reply.fault == "cut":
                request.close_connection = True
                return
            request.wfile.write(piece)

    def _stream(
        self, request: BaseHTTPRequestHandler, asked: Asked, reply: Reply, packed: bool
    ) -> None:
        request.send_response(reply.status)
        request.send_header("Content-Type", reply.kind or "text/event-stream; charset=utf-8")
        request.send_header("Transfer-Encoding", "chunked")
        for name, value in reply.headers:
            request.send_header(name, value)
        if packed:
            request.send_header("Content-Encoding", "gzip")
        request.end_headers()
        pieces = streamed(asked.dialect, reply, asked.body)
        self.sent.append(b"".join(pieces))
        if packed:
            pieces = [gzip.compress(b"".join(pieces))]
            half = len(pieces[0]) // 2
            pieces = [pieces[0][:half], pieces[0][half:]]
        for at, piece in enumerate(pieces):
            if at == len(pieces) // 2:
                reply.stall()
                if reply.fault == "cut":
                    request.close_connection = True
                    return
            request.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        request.wfile.write(b"0\r\n\r\n")


def _read(request: BaseHTTPRequestHandler, headers: dict[str, str]) -> bytes:
    """The body of a request, also one that comes in chunks."""
    if "chunked" not in headers.get("transfer-encoding", ""):
        return request.rfile.read(int(headers.get("content-length") or 0))
    parts = []
    while size := int(request.rfile.readline().strip() or b"0", 16):
        parts.append(request.rfile.read(size))
        request.rfile.readline()
    request.rfile.readline()
    return b"".join(parts)
