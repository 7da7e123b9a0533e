"""The recording proxy: bytes pass through untouched; all is recorded, once, in its session."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import threading
from collections import Counter
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from coa.errors import UsageError
from coa.recording.calls import CallLog, LoggedSession, read_sessions
from coa.recording.proxy import UNTOLD, Providers, RecordingProxy, Secrets
from coa.recording.wire import FunctionCall, WireUsage
from proxy_parts import body_for, only, path_of, proxying
from scripted_provider import (
    FAULTS,
    PATHS,
    Asked,
    Reply,
    ScriptedProvider,
    ToolCall,
    streamed,
    whole,
)

KEY = {"Authorization": "Bearer sk-1"}
FULL = Reply(
    "It is in\u2028Lima.", (ToolCall("look", {"q": "Peru \u00fc"}, "c1"),), "I look.", id="r1"
)


def texts(session: LoggedSession) -> list[str]:
    return [call.exchange.reply.text if call.exchange.reply else "" for call in session.calls]


@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
async def test_a_reply_is_the_same_to_the_byte_and_recorded_beside(
    tmp_path: Path, dialect: str, stream: bool, gzipped: bool
) -> None:
    log = tmp_path / "log.jsonl"
    reply = Reply(**{**vars(FULL), "gzipped": gzipped, "headers": (("X-Request-Id", "q7"),)})
    body = body_for(dialect, "Where?", stream=stream)
    with ScriptedProvider(lambda asked: reply) as provider:
        async with httpx.AsyncClient() as direct:
            wanted = await direct.post(provider.url + path_of(dialect), json=body, headers=KEY)
        async with proxying(provider, log) as (_, client):
            found = await client.post(path_of(dialect), json=body, headers=KEY)
            bare = await client.post(path_of(dialect).removeprefix("/v1"), json=body)
        assert found.content == wanted.content == bare.content and found.status_code == 200
        for name in ("content-type", "x-request-id", "content-encoding", "transfer-encoding"):
            assert found.headers.get(name) == wanted.headers.get(name), name
        before, after = provider.seen[0], provider.seen[1]
        assert before[3] == after[3] and before[1] == after[1]  # the request, too
        of_connection = ("host", "connection")
        kept = [
            {n: v for n, v in each[2].items() if n not in of_connection} for each in (before, after)
        ]
        assert kept[0] == kept[1]
    call = only(log).calls[0]
    said = call.exchange.reply
    assert said is not None and (call.cut, call.unread, call.status) == ("", "", 200)
    assert said.text == FULL.text and said.reasoning == "I look."
    assert said.calls == (FunctionCall("c1", "look", {"q": "Peru \u00fc"}),)
    unknown = dialect == "chat" and stream  # the user did not ask for usage, and we do not
    assert call.exchange.usage == (WireUsage() if unknown else WireUsage(11, 0, 7))
    assert call.exchange.messages[-1].text == "Where?" and call.exchange.id == "r1"


async def test_a_stream_arrives_as_it_is_written(tmp_path: Path) -> None:
    goes_on = threading.Event()
    reply = Reply("one two three four", fault="stall", until=goes_on)
    with ScriptedProvider(lambda asked: reply) as provider:
        async with proxying(provider, tmp_path / "log.jsonl") as (_, client):
            body = body_for("chat", "x", stream=True)
            async with client.stream("POST", path_of("chat"), json=body) as answer:
                pieces = answer.aiter_raw()
                first = await anext(pieces)
                assert b"one" in first or b"role" in first
                goes_on.set()  # it waits in the middle until then
                rest = [piece async for piece in pieces]
                assert b"four" in b"".join(rest)


async def test_other_routes_pass_through_whatever_they_are(tmp_path: Path) -> None:
    with ScriptedProvider() as provider:
        async with proxying(provider, tmp_path / "log.jsonl") as (proxy, client):

            async def slowly() -> Any:
                for _ in range(3):
                    yield b"x" * 1000

            for method, path, content in (
                ("GET", "/v1/models?limit=2", None),
                ("POST", "/v1/embeddings", b"{}"),
                ("PUT", "/v1/files/a%2Fb", slowly()),
                ("DELETE", "/v1/files/1", None),
                ("HEAD", "/v1/models", None),
                ("GET", "/v1/responses/r1", None),
                ("POST", "/v1/messages/count_tokens", b"{}"),
            ):
                answer = await client.request(method, path, content=content)
                assert answer.status_code == 200 and answer.headers["x-route"] == "other"
                assert provider.seen[-1][:2] == (method, path)
        assert provider.seen[2][3] == b"x" * 3000
        assert sum(proxy.others.values()) == 7
    assert only(tmp_path / "log.jsonl").calls == []


async def test_a_prompt_of_20_mb_is_no_trouble(tmp_path: Path) -> None:
    log, text = tmp_path / "log.jsonl", "word " * 4_000_000
    with ScriptedProvider(lambda asked: str(len(asked.last))) as provider:
        async with proxying(provider, log) as (_, client):
            for more in ("", " and"):
                messages = [{"role": "system", "content": text}, {"role": "user", "content": more}]
                body = {"model": "m", "messages": messages}
                assert (await client.post(path_of("chat"), json=body)).status_code == 200
    assert [call.exchange.system == text for call in only(log).calls] == [True, True]
    assert log.stat().st_size < 1.1 * len(text)  # once


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_what_goes_wrong_reaches_the_program_as_it_is_and_is_named(
    tmp_path: Path, dialect: str, stream: bool, fault: str
) -> None:
    log = tmp_path / "log.jsonl"
    body = body_for(dialect, "Where?", stream=stream)
    with ScriptedProvider(lambda asked: Reply("one two three four", fault=fault)) as provider:

        async def outcome(base: str) -> tuple[Any, ...]:
            received = b""
            async with httpx.AsyncClient(base_url=base) as client:
                try:
                    async with client.stream("POST", path_of(dialect), json=body) as answer:
                        async for piece in answer.aiter_raw():
                            received += piece
                        return answer.status_code, _numbers_out(received), ""
                except httpx.HTTPError as error:
                    return 0, _numbers_out(received), type(error).__name__

        async with proxying(provider, log) as (proxy, _):
            direct = await outcome(provider.url)
            assert await outcome(proxy.address("run")) == direct
    (call,) = only(log).calls
    refused, no_answer = fault.isdecimal(), fault == "close"
    ends_badly = fault == "cut" or (stream and fault in ("no_end", "error_event"))
    assert call.status == (int(fault) if refused else 0 if no_answer else 200)
    assert (call.exchange.reply is None) == (refused or no_answer or (ends_badly and not stream))
    named = {
        "close": "no answer from the server (RemoteProtocolError)",
        "cut": "the server broke off (RemoteProtocolError)",
        "no_end": "the stream ended without its last event" if stream else "",
    }
    if fault == "error_event":
        assert call.cut.startswith("the server sent an error in the stream (") == stream
    else:
        assert call.cut == named.get(fault, "")


def _numbers_out(sent: bytes) -> bytes:
    """The same for every reply: the provider numbers them."""
    return re.sub(rb"reply-\d+", b"reply", sent)


async def test_a_provider_that_is_not_there_is_named_without_its_key(tmp_path: Path) -> None:
    with CallLog(tmp_path / "log.jsonl") as log:
        providers = Providers("http://user:secret-1@127.0.0.1:9/v1")
        async with (
            RecordingProxy(providers, log, Secrets({})) as proxy,
            httpx.AsyncClient() as client,
        ):
            await proxy.begin("run")
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post(f"{proxy.address('run')}/v1/chat/completions", json={})
            session = await proxy.end("run")
    assert session.calls[0].status == 0
    assert dict(proxy.unreachable) == {"http://127.0.0.1:9 (ConnectError)": 1}


async def test_a_program_that_hangs_up_ends_the_call_at_the_provider(tmp_path: Path) -> None:
    log, gone = tmp_path / "log.jsonl", threading.Event()
    reply = Reply("one two", fault="stall", until=gone)
    with ScriptedProvider(lambda asked: reply) as provider:
        async with proxying(provider, log) as (proxy, client):
            body = body_for("chat", "x", stream=True)
            async with client.stream("POST", path_of("chat"), json=body) as answer:
                await anext(answer.aiter_raw())
            session = await proxy.end("run")
            gone.set()
    assert session.calls[0].cut == "the program hung up"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
async def test_a_reply_is_read_whatever_its_head_says_of_it(
    tmp_path: Path, dialect: str, stream: bool
) -> None:
    log = tmp_path / "log.jsonl"
    reply = Reply("It is Lima.", status=201, kind="text/plain")
    with ScriptedProvider(lambda asked: reply) as provider:
        async with proxying(provider, log) as (_, client):
            body = body_for(dialect, "Where?", stream=stream)
            assert (await client.post(path_of(dialect), json=body)).status_code == 201
    (call,) = only(log).calls
    assert (call.status, call.cut, call.unread) == (201, "", "")
    assert call.exchange.reply is not None and call.exchange.reply.text == "It is Lima."


async def test_keys_are_known_by_their_header_and_by_the_name_of_their_variable(
    tmp_path: Path,
) -> None:
    secrets = Secrets({"OPENAI_KEY": "k-1234567", "PGPASSWORD": "p-1234567", "EDITOR": "vim 12345"})
    with ScriptedProvider() as provider:
        async with proxying(provider, tmp_path / "log.jsonl", secrets=secrets) as (_, client):
            for key in ("bearer b-1234567", "Basic dXNlcjpwYXNzd29yZDEy"):
                await client.get("/v1/models", headers={"authorization": key})
    shown = secrets("k-1234567 p-1234567 vim 12345 b-1234567 dXNlcjpwYXNzd29yZDEy")
    assert shown == "[key] [key] vim 12345 [key] [key]"


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("AWS_ACCESS_KEY_ID", "AKIAIOSFODNNEXAMPLE", "AKIAIOSFODNNEXAMPLE"),
        ("OPENAI_API_KEY_2", "sk-1234567", "sk-1234567"),
        ("GITHUB_PAT", "ghp_abcdefghijkl", "ghp_abcdefghijkl"),
        ("openaiApiKey", "sk-1234567", "sk-1234567"),
        ("DB_PASS", "pa55word", "pa55word"),
        ("SERVICE_CREDENTIALS", "me:some-long-word", "some-long-word"),
        ("VAULT_PASSWORD", "correct-horse-battery", "correct-horse"),
        ("SIGNING_SECRETS", "first-secret-1,other-secret-2", "other-secret-2"),
        ("DATABASE_URL", "postgres://me:pa55word@db.example/shop", "pa55word"),
        ("DEPLOY_KEY", "-----BEGIN\nMIIEvQIBADANBgkq\n-----END", "MIIEvQIBADANBgkq"),
    ],
)
def test_what_a_variable_holds_that_is_named_for_a_secret_is_in_no_text(
    name: str, value: str, key: str
) -> None:
    secrets = Secrets({name: value})
    for shown in (repr({name: value}), json.dumps({name: value}), f"--with {value}"):
        assert key in shown and key not in secrets(shown) and "[key]" in secrets(shown)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "true-for-everybody"),
        ("MAX_TOKENS", "1000000000"),
        ("KEYBOARD_LAYOUT", "german-without-dead-keys"),
        ("HF_TOKEN_PATH", "/srv/cache/huggingface/token"),
        ("SECRET_NAME", "production/database-2"),
        ("TOKEN_ENDPOINT_AUTH_METHOD", "client_secret_post"),
        ("KEY_VAULT_REGION", "northeurope"),
        ("SSH_ASKPASS", "/usr/bin/ksshaskpass"),
        ("PATH", "/usr/local/bin:/usr/bin"),
        ("MODEL_URL", "http://models.example:8000/v1"),
        ("OPENAI_API_KEY", "ollama"),
        ("OPENAI_API_KEY", "none-needed"),
    ],
)
def test_ordinary_words_stay_where_they_are(name: str, value: str) -> None:
    assert Secrets({name: value})(f"it says {value} here") == f"it says {value} here"


def test_a_key_that_comes_while_a_text_is_cleaned_is_taken_out_of_it_the_next_time() -> None:
    def comes(text: str) -> str:
        secrets.add("sk-12345678")
        return text

    secrets = Secrets({}, comes)
    secrets("my sk-12345678")
    assert secrets("my sk-12345678") == "my [key]"


# -- requests that are sent again -----------------------------------------------------------------


async def test_a_repeated_request_counts_once(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    answers = iter(
        [Reply(fault="500"), Reply("one two", fault="cut"), Reply("whole"), Reply("other")]
    )
    with ScriptedProvider(lambda asked: next(answers)) as provider:
        async with proxying(provider, log) as (proxy, client):

            async def ask(retry: int, text: str = "x") -> str:
                headers = {"x-stainless-retry-count": str(retry)}
                body = body_for("chat", text, stream=True)
                try:
                    answer = await client.post(path_of("chat"), json=body, headers=headers)
                except httpx.RemoteProtocolError:
                    return "cut"
                return answer.text

            await ask(0)
            assert await ask(1) == "cut"
            whole = await ask(2)
            assert await ask(3) == whole  # from the record: nobody asks the provider again
            assert len(provider.asked) == 3
            assert "other" in await ask(0)  # the same request may be meant
            session = await proxy.end("run")
    assert session.end == {"repeated": 1}
    for seen in (session, only(log)):
        assert [(call.status, call.retry, call.answered) for call in seen.calls] == [
            (500, 0, False),
            (200, 1, False),
            (200, 2, True),
            (200, 0, True),
        ]
        assert [call.superseded for call in seen.calls] == [True, True, False, False]


async def test_of_two_like_requests_the_one_that_failed_gets_an_answer_of_its_own(
    tmp_path: Path,
) -> None:
    answers = iter([Reply("first"), Reply(fault="429"), Reply("second")])
    with ScriptedProvider(lambda asked: next(answers)) as provider:
        async with proxying(provider, tmp_path / "log.jsonl") as (proxy, client):

            async def ask(retry: int) -> str:
                headers = {"x-stainless-retry-count": str(retry)}
                body = body_for("chat", "a number, please")
                return (await client.post(path_of("chat"), json=body, headers=headers)).text

            assert "first" in await ask(0)
            await ask(0)
            assert "second" in await ask(1)
            session = await proxy.end("run")
    assert [call.answered for call in session.calls] == [True, False, True]


async def test_the_official_client_retries_and_nothing_counts_twice(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    answers = iter([Reply(fault="429"), Reply(fault="close"), Reply("yes")])
    with ScriptedProvider(lambda asked: next(answers)) as provider:
        async with proxying(provider, log) as (proxy, _):
            client = openai.AsyncOpenAI(base_url=f"{proxy.address('run')}/v1", api_key="sk-x")
            made = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}]
            )
            assert made.choices[0].message.content == "yes"
    assert [call.answered for call in only(log).calls] == [False, False, True]


# -- sessions -------------------------------------------------------------------------------------


async def test_sessions_are_told_apart_in_every_way(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with ScriptedProvider(lambda asked: asked.last) as provider:
        async with proxying(provider, log) as (proxy, client):

            async def ask(text: str, url: str = "", **headers: str) -> None:
                names = {name.replace("_", "-"): value for name, value in headers.items()}
                body = body_for("chat", text)
                answer = await client.post(url or path_of("chat"), json=body, headers=names)
                assert answer.status_code == 200

            await ask("by path")
            await ask("by header", x_coa_session="a b/c")
            await ask("by key", authorization="Bearer sk-1#k1")
            await ask("by x-api-key", x_api_key="sk-2#k1")
            await ask("by prefix", f"{proxy.address('a b/c')}/v1/chat/completions")
            await ask("of the only one", f"{proxy.url}/v1/chat/completions")
            await proxy.begin("other")
            await ask("of nobody", f"{proxy.url}/v1/chat/completions")
            await proxy.end("other")
            await ask("late", f"{proxy.address('other')}/v1/chat/completions")
            assert (proxy.untold, proxy.late, proxy.named) == (1, 1, ["a b/c", "k1"])
            await proxy.begin("other")  # once more: a session of its own
            await ask("again", f"{proxy.address('other')}/v1/chat/completions")
            await proxy.end("other")
        keys = {seen[2].get("authorization") or seen[2].get("x-api-key") for seen in provider.seen}
        assert keys == {None, "Bearer sk-1", "sk-2"}
        assert not any("x-coa-session" in seen[2] for seen in provider.seen)
    assert {session.name: texts(session) for session in read_sessions(log)} == {
        "run": ["by path", "of the only one"],
        "a b/c": ["by header", "by prefix"],
        "k1": ["by key", "by x-api-key"],
        "other": [],
        UNTOLD: ["of nobody", "late"],
        "other~2": ["again"],
    }


async def test_conversations_that_the_server_keeps_are_followed(tmp_path: Path) -> None:
    log, ids = tmp_path / "log.jsonl", count(1)
    with ScriptedProvider(lambda asked: Reply("yes", id=f"resp_{next(ids)}")) as provider:
        async with proxying(provider, log) as (_, client):
            for more in (
                {"conversation": "conv_1"},
                {"conversation": {"id": "conv_1"}},
                {"previous_response_id": "resp_1"},
                {"input": [{"type": "item_reference", "id": "msg_resp_1"}]},
            ):
                body = body_for("responses", "x") | more
                assert (await client.post(path_of("responses"), json=body)).status_code == 200
    calls = only(log).calls
    assert [call.exchange.follows for call in calls] == ["", "resp_1", "resp_1", ""]
    assert calls[3].exchange.messages[0].text == "yes"


async def test_what_cannot_be_read_is_passed_on_and_named(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"

    def script(asked: Asked) -> Reply:
        return Reply("fine")

    with ScriptedProvider(script) as provider:
        async with proxying(provider, log) as (proxy, client):
            odd = {"model": "m", "messages": "secret words"}
            assert (await client.post(path_of("chat"), json=odd)).status_code == 200
            packed = {"content-encoding": "zip-9"}
            content = json.dumps(body_for("chat", "x")).encode()
            await client.post(path_of("chat"), content=content, headers=packed)
            strange = {"x-stainless-retry-count": "many", "accept-encoding": "br;q=1, zstd"}
            await client.post(path_of("chat"), json=body_for("chat", "x"), headers=strange)
            assert provider.seen[-1][2]["accept-encoding"] == "identity"
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(proxy.url[-5:].strip(":"))
            )
            writer.write(b"\x16\x03\x01 no HTTP\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()
    first, second, third = only(log).calls
    assert first.unread == "messages: found str, expected a list."
    assert first.exchange.reply is not None and first.exchange.reply.text == "fine"
    assert second.unread.startswith("a body is packed in a way ('zip-9')")
    assert third.unread == ""


# -- many at once ---------------------------------------------------------------------------------


def sent(dialect: Any, reply: Reply, body: dict[str, Any]) -> bytes:
    """All that the provider sends of the body of a reply."""
    if reply.fault == "close":
        return b""
    content = json.dumps(whole(dialect, reply, body)).encode()
    pieces = [content[: len(content) // 2], content[len(content) // 2 :]]
    pieces = streamed(dialect, reply, body) if body["stream"] else pieces
    return b"".join(pieces[: len(pieces) // 2] if reply.fault == "cut" else pieces)


async def test_64_sessions_at_once_lose_nothing_and_mix_nothing(tmp_path: Path) -> None:
    """Every session makes calls in every dialect, most of them streams, each with another fault.
    Two have a prompt of 20 MB, and two send every request again, whatever became of it."""
    log, faults = tmp_path / "log.jsonl", ("", "", *FAULTS)
    large, with_large = "word " * 4_000_000, (6, 9)
    retrying = {3: 2, 4: 5}  # how many calls of theirs fail, so that the provider is asked again
    together = threading.Barrier(64)  # the first call of each waits for those of all others

    def reply_to(text: str, retry: bool) -> Reply:
        at = int(text.split("#")[1])
        fault = "" if retry else faults[at % len(faults)]
        return Reply(text, fault=fault, stall_s=0.2, usage=(5, 0, len(text)), id=f"r{at}")

    def script(asked: Asked) -> Reply:
        retry = "x-stainless-retry-count" in asked.headers
        if asked.last.endswith(" at 0") and not retry:
            together.wait()
        return reply_to(asked.last, retry)

    async def ask(client: httpx.AsyncClient, dialect: str, body: Any, retry: bool) -> None:
        """Ask once: to the byte, what comes is what the provider sends."""
        text = body["input"] if dialect == "responses" else body["messages"][-1]["content"]
        reply = reply_to(text, retry)
        headers = {"x-stainless-retry-count": "1"} if retry else {}
        status, received, broken = 0, b"", False
        try:
            path = path_of(dialect)
            async with client.stream("POST", path, json=body, headers=headers) as answer:
                status = answer.status_code
                async for piece in answer.aiter_raw():
                    received += piece
        except httpx.RemoteProtocolError:
            broken = True
        assert broken == (reply.fault in ("close", "cut"))
        if reply.fault.isdecimal():
            assert status == int(reply.fault) and f"no, {reply.fault}".encode() in received
        else:
            assert status == (0 if reply.fault == "close" else 200)
            assert received == sent(dialect, reply, body)

    async def one(proxy: RecordingProxy, number: int) -> None:
        name = f"session {number}"
        await proxy.begin(name)
        async with httpx.AsyncClient(base_url=proxy.address(name), timeout=None) as client:
            for step in range(5):
                dialect = [*PATHS][(number + step) % 3]
                text = f"s{number} says #{number * 3 + step}# at {step}"
                body = body_for(dialect, text, stream=step % 4 > 0)
                if number in with_large and dialect == "anthropic":
                    body["system"] = large
                await ask(client, dialect, body, retry=False)
                if number in retrying:
                    await ask(client, dialect, body, retry=True)
        ended = await proxy.end(name)
        repeated = 5 - retrying[number] if number in retrying else 0
        assert (ended.end or {}).get("repeated", 0) == repeated

    with ScriptedProvider(script) as provider:
        providers = Providers(f"{provider.url}/v1", provider.url)
        with CallLog(log) as written:
            async with RecordingProxy(providers, written, Secrets({})) as proxy:
                async with asyncio.timeout(900), asyncio.TaskGroup() as group:
                    for number in range(64):
                        group.create_task(one(proxy, number))
                assert not proxy.failed.done()
        assert provider.most_at_once >= 64
        asked = Counter(each.last for each in provider.asked)
    assert len(asked) == 320 and asked.total() == 320 + sum(retrying.values())
    assert log.stat().st_size < 1.1 * len(large)  # once for both
    sessions = read_sessions(log)
    assert len(sessions) == 64 and all(session.end is not None for session in sessions)
    seen = Counter(call.exchange.messages[-1].text for each in sessions for call in each.calls)
    assert seen == asked
    for session in sessions:
        number = int(session.name.split()[1])
        calls = [call for call in session.calls if not call.superseded]
        assert len(session.calls) - len(calls) == retrying.get(number, 0)
        steps = [call.exchange.messages[-1].text for call in calls]
        assert [text.split()[0] for text in steps] == [f"s{number}"] * 5
        assert [int(text.split()[-1]) for text in steps] == [*range(5)]
        for before, after in pairwise(session.calls):  # one by one, and so it looks
            assert before.begun <= before.ended <= after.begun
        prompts = [number in with_large and call.dialect == "anthropic" for call in calls]
        assert [call.exchange.system == large for call in calls] == prompts
        assert number not in retrying or all(call.answered and not call.cut for call in calls)
        for call in session.calls:
            text = call.exchange.messages[-1].text
            fault = reply_to(text, call.retry > 0).fault
            said = call.exchange.reply
            if fault in ("", "stall"):
                assert said is not None and said.text == text and not call.cut
            assert said is None or text.startswith(said.text)
            assert (
                bool(call.cut)
                or call.status != 200
                or fault in ("", "stall", "no_end", "error_event")
            )


# -- Anthropic's own client -----------------------------------------------------------------------

ANTHROPIC_CLIENT = """
import anthropic, os
client = anthropic.Anthropic(api_key="sk-a")
ask = dict(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}])
print(client.messages.create(**ask).content[-1].text)
with client.messages.stream(**ask) as stream:
    print("".join(stream.text_stream), stream.get_final_message().usage.output_tokens)
print(client.messages.count_tokens(model="m", messages=ask["messages"]).input_tokens)
"""


@pytest.mark.slow
async def test_anthropics_own_client_notices_nothing(tmp_path: Path) -> None:
    if not (environments := os.environ.get("COA_TEST_FRAMEWORKS")):
        pytest.skip("COA_TEST_FRAMEWORKS names no environments")
    python = Path(environments).resolve() / "teams" / "bin" / "python"
    log = tmp_path / "log.jsonl"
    with ScriptedProvider(lambda asked: Reply("It is Lima.", reasoning="Well.")) as provider:
        async with proxying(provider, log) as (proxy, _):
            done = await asyncio.to_thread(
                subprocess.run,
                [str(python), "-c", ANTHROPIC_CLIENT],
                env={**os.environ, "ANTHROPIC_BASE_URL": proxy.address("run")},
                capture_output=True,
                text=True,
                timeout=300,
            )
    assert done.stdout == "It is Lima.\nIt is Lima. 7\n42\n", done.stderr
    assert texts(only(log)) == ["It is Lima.", "It is Lima."]
    assert proxy.others == {"POST /v1/messages/count_tokens": 1}


def test_addresses_are_those_that_the_clients_would_use() -> None:
    of = Providers.of
    assert of({}) == Providers("https://api.openai.com/v1", "https://api.anthropic.com")
    given = {"OPENAI_API_BASE": "http://a:1/v1/", "ANTHROPIC_BASE_URL": "http://b"}
    assert of(given) == Providers("http://a:1/v1", "http://b")
    assert of({**given, "OPENAI_BASE_URL": "http://c/api"}).openai == "http://c/api"
    for upstream in ("http://x:1", "http://x:1/v1"):
        made = of(given, upstream)
        assert made == Providers("http://x:1/v1", "http://x:1")
        assert made.url("/v1/chat/completions", False) == "http://x:1/v1/chat/completions"
        assert made.url("/chat/completions", False) == "http://x:1/v1/chat/completions"
        assert (
            made.url("/v1/messages", True)
            == made.url("/messages", True)
            == "http://x:1/v1/messages"
        )
    for variable in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
        for odd in ("localhost:8000/v1", "http://", "http://a:b:c/v1", "secret"):
            with pytest.raises(UsageError, match=f"{variable}: found no address") as wrong:
                of({variable: odd})
            assert "secret" not in str(wrong.value)
    assert of({}, "https://h/api/v3").url("/v1/responses", False) == "https://h/api/v3/responses"
    assert of({}, "http://localhost:9").is_local(False) and not of({}).is_local(True)
