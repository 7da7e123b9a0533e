"""Three dialects say the same; what strangers send is read, or refused without being quoted."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.errors import RecordError
from coa.recording.wire import (
    DIALECTS,
    Dialect,
    FunctionCall,
    WireMessage,
    WireUsage,
    assembled,
    dialect_of,
    exchange_of,
    items_of,
    read_body,
    read_events,
    with_items,
)
from scripted_provider import PATHS, Reply, ToolCall, as_sent, events, streamed, whole
from scripted_provider import Dialect as Name

NAMES: tuple[Name, ...] = get_args(Name)
BY_NAME = dict(zip(NAMES, DIALECTS, strict=True))
ASKED = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}

words = st.text(st.characters(codec="utf-8"), max_size=40)
arguments = st.dictionaries(st.text(max_size=8), st.integers() | words, max_size=3)
tool_calls = st.builds(
    ToolCall, st.sampled_from(["look", "add"]), arguments, words.map(hash).map(str)
)
replies = st.builds(
    Reply,
    words,
    st.lists(tool_calls, max_size=3).map(tuple),
    words,
    st.none() | st.tuples(st.integers(5, 99), st.integers(0, 5), st.integers(0, 99)),
)


def read(name: Name, body: Any) -> Any:
    return exchange_of(BY_NAME[name], ASKED, body)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(reply=replies)
def test_a_stream_amounts_to_the_reply_that_would_have_come_at_once(
    name: Name, reply: Reply
) -> None:
    reply = reply.numbered()
    sent = b"".join(as_sent(name, events(name, reply, ASKED))).decode()
    body, ended = assembled(BY_NAME[name], read_events(sent))
    if name == "chat" and not reply.usage:
        body.pop("usage", None)
    assert ended
    at_once = read(name, whole(name, reply, ASKED))
    assert read(name, body) == at_once
    assert at_once.reply.text == reply.text and at_once.reply.reasoning == reply.reasoning
    assert [(c.name, c.arguments) for c in at_once.reply.calls] == [
        (c.name, c.arguments) for c in reply.calls
    ]
    prompt, cached, sampled = reply.usage or (None, None, None)
    assert at_once.usage == WireUsage(prompt, cached, sampled)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(reply=replies, at=st.integers(0, 10_000))
def test_a_stream_that_is_cut_anywhere_is_read_and_not_taken_for_whole(
    name: Name, reply: Reply, at: int
) -> None:
    sent = b"".join(streamed(name, Reply(reply.text + "x", reply.calls).numbered(), ASKED))
    last = {"chat": b'"finish_reason": "', "responses": b"response.completed"}
    end = sent.rindex(last.get(name, b"event: message_stop"))
    body, ended = assembled(BY_NAME[name], read_events(sent[: at % end].decode("utf-8", "replace")))
    assert not ended
    with suppress(RecordError):
        said = read(name, body).reply
        assert reply.text.startswith(said.text) or said.text == reply.text + "x"


KNOWN = (
    *("type", "role", "content", "text", "messages", "input", "output", "tools", "tool_calls"),
    *("function", "name", "arguments", "custom", "choices", "message", "delta", "index", "usage"),
    *("item", "response", "output_index", "summary", "call_id", "tool_use_id", "content_block"),
    *("id", "error", "finish_reason", "system", "thinking", "action", "conversation"),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6), inner, max_size=4)
        | st.dictionaries(st.sampled_from(KNOWN), inner, max_size=6)
    ),
    max_leaves=25,
)
KINDS = (
    *("message", "tool_use", "tool_result", "thinking", "text", "function_call", "reasoning"),
    *("server_tool_use", "web_search_tool_result", "web_search_call", "mcp_call", "custom"),
    *("function_call_output", "local_shell_call", "message_start", "message_delta", "error"),
    *("content_block_start", "content_block_delta", "response.output_item.added"),
    *("response.output_text.delta", "response.completed", "response.function_call_arguments.delta"),
    *("response.reasoning_summary_text.delta", "response.created", "assistant", "user", "system"),
)


def typed(value: Any, draw: Any) -> Any:
    """The same with types and roles that mean something, here and there."""
    if isinstance(value, dict):
        made = {name: typed(each, draw) for name, each in value.items()}
        return made | {n: draw(st.sampled_from(KINDS)) for n in ("type", "role") if n in made}
    return [typed(each, draw) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("dialect", DIALECTS, ids=NAMES)
@settings(max_examples=60, deadline=None)
@given(draw=st.data())
def test_whatever_strangers_send_is_read_or_refused(dialect: Dialect, draw: Any) -> None:
    known = st.dictionaries(st.sampled_from(KNOWN), json_values, max_size=8)
    request, reply = (typed(draw.draw(known), draw.draw) for _ in range(2))
    stream = typed(draw.draw(st.lists(known, max_size=6)), draw.draw)
    for attempt in (
        lambda: exchange_of(dialect, request),
        lambda: exchange_of(dialect, {}, reply),
        lambda: exchange_of(dialect, {}, assembled(dialect, stream)[0]),
        lambda: exchange_of(dialect, with_items(request, items_of(reply))),
    ):
        try:
            made = attempt()
        except RecordError as wrong:
            assert "\n" not in str(wrong)
            continue
        for message in (*made.messages, *([made.reply] if made.reply else [])):
            again = json.loads(json.dumps(message.to_json()))
            assert WireMessage.from_json(again) == message


@settings(max_examples=50, deadline=None)
@given(
    raw=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: f"data: {text}\n\n".encode())
)
def test_bytes_are_a_body_or_refused_and_a_stream_of_nothing_is_empty(raw: bytes) -> None:
    with suppress(RecordError):
        assert isinstance(read_body(raw, "a body"), dict)
    assert all(isinstance(each, dict) for each in read_events(raw.decode("utf-8", "replace")))


def test_what_is_wrong_is_said_without_a_word_of_the_user() -> None:
    for body in (b"my secret", b'["my secret"]', b"[" * 100_000, b'{"a":' * 100_000):
        with pytest.raises(RecordError) as wrong:
            read_body(body, "the request")
        assert "secret" not in str(wrong.value) and str(wrong.value).startswith("the request")
    with pytest.raises(RecordError, match="messages: found str, expected a list"):
        exchange_of(BY_NAME["chat"], {"messages": "my secret"})


def test_events_end_where_the_standard_says_and_not_at_other_line_ends() -> None:
    text = "a\u2028b\u0085c"
    event = json.dumps({"text": text}, ensure_ascii=False)
    sent = (
        f"\ufeffevent: x\r\ndata: {event}\r\n\r\n: ping\n\ndata: [DONE]\n\ndata: {{\ndata: }}\n\n"
    )
    assert [*read_events(sent)] == [{"text": text}, {}]


def test_calls_of_every_kind_are_read() -> None:
    chat = BY_NAME["chat"]
    custom = ToolCall("shell", '{"not": "parsed"}', "c1", custom=True)
    body = whole("chat", Reply("", (custom, ToolCall("f", "no json", "c2"))), {})
    said = exchange_of(chat, {}, body).reply
    assert said is not None
    assert said.calls == (
        FunctionCall("c1", "shell", '{"not": "parsed"}'),
        FunctionCall("c2", "f", "no json"),
    )
    old = {"choices": [{"message": {"function_call": {"name": "f", "arguments": '{"a": 1}'}}}]}
    assert exchange_of(chat, {}, old).reply == WireMessage(
        "user", calls=(FunctionCall("", "f", {"a": 1}),)
    )
    items = [
        {"type": "local_shell_call", "call_id": "l", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "l", "output": "a.txt"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x" * 99},
        {"type": "custom_tool_call", "call_id": "p", "name": "patch", "input": "*** Begin"},
    ]
    asked = exchange_of(BY_NAME["responses"], {"input": items})
    assert [message.role for message in asked.messages] == ["assistant", "tool", "assistant"]
    assert asked.messages[0].calls[0] == FunctionCall("l", "local_shell", {"command": ["ls"]})
    assert asked.messages[1] == WireMessage("tool", "a.txt", answers="l")
    assert asked.messages[2].other == ("encrypted_reasoning",)
    assert asked.messages[2].calls[0].arguments == "*** Begin"


def of_stream(name: Name, *sent: Any) -> Any:
    return read(name, assembled(BY_NAME[name], sent)[0])


def test_parts_of_a_stream_are_joined_as_one_text() -> None:
    def chunk(content: Any) -> Any:
        return {"choices": [{"index": 0, "delta": {"content": content}}]}

    def thought(text: str) -> Any:
        return [{"type": "thinking", "thinking": [{"type": "text", "text": text}]}]

    sent = [
        "",
        thought("Who "),
        thought("knows?"),
        "It is",
        " Li",
        [{"type": "text", "text": "ma"}],
    ]
    said = of_stream("chat", *map(chunk, sent)).reply
    assert (said.reasoning, said.text) == ("Who knows?", "It is Lima")
    said = of_stream("chat", *map(chunk, ["It", *sent])).reply
    assert (said.reasoning, said.text) == ("Who knows?", "It\nIt is Lima")


@pytest.mark.parametrize("ids", [("a", "b"), ("", "")])
@pytest.mark.parametrize("place", [{"index": 0}, {}])
def test_calls_that_all_have_the_number_0_are_told_apart(ids: Any, place: Any) -> None:
    def chunk(**call: Any) -> Any:
        return {"choices": [{"index": 0, "delta": {"tool_calls": [{**place, **call}]}}]}

    whole_ones = [
        chunk(id=each, function={"name": "look", "arguments": f'{{"q": {at}}}'})
        for at, each in enumerate(ids)
    ]
    wanted = tuple(FunctionCall(each, "look", {"q": at}) for at, each in enumerate(ids))
    assert of_stream("chat", *whole_ones).reply.calls == wanted
    pieces = [chunk(id="a", function={"name": "look", "arguments": ""})]
    pieces += [chunk(id=f"new{at}", function={"arguments": each}) for at, each in enumerate("{}")]
    (one,) = of_stream("chat", *pieces).reply.calls
    assert (one.name, one.arguments) == ("look", {})


def test_what_a_later_event_does_not_count_stays_counted() -> None:
    begun = {"usage": {"input_tokens": 11, "cache_read_input_tokens": 2, "output_tokens": 1}}
    later = {"input_tokens": None, "cache_read_input_tokens": None, "output_tokens": 7}
    sent = (
        {"type": "message_start", "message": begun},
        {"type": "message_delta", "delta": {}, "usage": later},
    )
    assert of_stream("anthropic", *sent).usage == WireUsage(13, 2, 7)


def test_arguments_that_are_nested_too_deeply_are_their_text() -> None:
    deep = "[" * 100_000
    body = whole("chat", Reply("", (ToolCall("f", deep, "c"),)), {})
    assert read("chat", body).reply.calls == (FunctionCall("c", "f", deep),)


def test_what_a_server_keeps_of_the_system_prompt_is_told() -> None:
    led = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "x"}]
    made = exchange_of(BY_NAME["responses"], {"input": led, "instructions": "You are the boss."})
    assert (made.system, made.kept) == ("You are the boss.\n\nBe short.", "Be short.")
    assert [message.text for message in made.messages] == ["x"]
    assert exchange_of(BY_NAME["chat"], {"messages": led}).kept == ""


def test_a_providers_own_tools_are_called_as_their_calls_are_told() -> None:
    search, server = {"type": "web_search_preview_2025_03_11"}, {"type": "mcp", "server_label": "x"}
    tools = [search, server, {"type": "function"}, {"googleSearch": {}}]
    for dialect in BY_NAME.values():
        made = exchange_of(dialect, {"tools": tools, "messages": [], "input": []})
        assert [tool.name for tool in made.tools] == ["web_search"]
    dated = {"tools": [{"type": "bash_20250124", "name": "bash"}, {"type": "computer_20250124"}]}
    made = exchange_of(BY_NAME["anthropic"], dated)
    assert [tool.name for tool in made.tools] == ["bash", "computer"]


def test_tools_that_the_server_ran_are_beside_the_reply_which_stays_final() -> None:
    output = [
        {
            "id": "ws1",
            "type": "web_search_call",
            "status": "completed",
            "action": {"query": "Lima"},
        },
        {"id": "m1", "type": "mcp_call", "name": "look", "arguments": '{"a":1}', "output": "found"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Lima"}],
        },
    ]
    made = exchange_of(
        BY_NAME["responses"], {}, {"id": "r", "status": "completed", "output": output}
    )
    assert made.reply is not None
    assert made.reply.text == "Lima" and not made.reply.calls
    assert made.reply.other == ()
    assert [(use.call.name, use.call.arguments, use.result) for use in made.ran] == [
        ("web_search", {"query": "Lima"}, ""),
        ("look", {"a": 1}, "found"),
    ]
    content = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "Lima"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": [{"title": "Lima", "encrypted_content": "zzz"}],
        },
        {"type": "text", "text": "It is Lima."},
    ]
    made = exchange_of(BY_NAME["anthropic"], {}, {"content": content})
    assert made.reply is not None and made.reply.text == "It is Lima." and not made.reply.calls
    assert made.ran[0].result == '[{"title": "Lima"}]'


def test_several_choices_are_kept_and_the_first_is_the_reply() -> None:
    message = {"role": "assistant", "content": "a"}
    choices = [{"message": message}, {"message": {**message, "content": "b"}}]
    made = exchange_of(BY_NAME["chat"], {}, {"choices": choices})
    assert made.reply is not None and made.reply.text == "a"
    assert [draft.text for draft in made.drafts] == ["b"]


def test_what_nobody_counted_is_unknown_and_not_zero() -> None:
    for name in NAMES:
        made = read(name, whole(name, Reply("x", usage=None).numbered(), {}))
        assert made.usage == WireUsage()
    half = streamed("anthropic", Reply("a b c", fault="no_end").numbered(), {})
    body, ended = assembled(BY_NAME["anthropic"], read_events(b"".join(half[:6]).decode()))
    assert not ended and read("anthropic", body).usage == WireUsage(11, 0, None)


def test_references_to_items_are_followed() -> None:
    body = whole("responses", Reply("", (ToolCall("f", {"a": 1}, "c"),)).numbered(), {})
    known = items_of(body)
    asked = {"input": [{"type": "item_reference", "id": "fc_c"}, {"role": "user", "content": "go"}]}
    made = exchange_of(BY_NAME["responses"], with_items(asked, known))
    assert made.messages[0].calls == (FunctionCall("c", "f", {"a": 1}),)
    unknown = exchange_of(BY_NAME["responses"], asked)
    assert unknown.messages[0].other == ("item_reference",)


def test_a_dialect_is_known_by_its_path() -> None:
    for name, path in PATHS.items():
        found = dialect_of(path)
        assert found is not None and found.name == name
        assert dialect_of(path.removeprefix("/v1")) is found
    for path in (
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/responses/r_1",
        "/v1/completions",
    ):
        assert dialect_of(path) is None
