"""The receiver of `coa record --otel`: what programs send, how sessions are told apart, and what is
kept. Real programs with real exporters are in test_span_teams.py."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import socket
import stat
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from coa.errors import UsageError
from coa.recording.calls import KILLED, CallLog, read_sessions
from coa.recording.graph import episode_of
from coa.recording.importers import spans
from coa.recording.importers.reading import Notes
from coa.recording.proxy import Secrets
from coa.recording.receiver import CAPTURE, CONTENT, Receiver, after_kill
from otlp_messages import attributes, protobuf, request
from test_span_files import ASKED, team

JSON, PROTOBUF = "application/json", "application/x-protobuf"

PROGRAM = """
import gzip, json, os, sys, urllib.request
sent = json.loads(sys.stdin.read())
headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
asked = urllib.request.Request(
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] + "/v1/traces",
    gzip.compress(json.dumps(sent).encode()), headers)
assert urllib.request.urlopen(asked).read() == b"{}"
print("done")
"""
"""What exporters do, with nothing but the standard library."""


class Recorded:
    """A receiver with its files."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.spans, self.sessions = folder / "e.spans.jsonl", folder / "e.sessions.jsonl"
        self.log = CallLog(self.sessions, more.get("secrets"))
        self.receiver = Receiver(self.spans, self.log, **more)

    def run(self, name: str, sent: Any, **more: str) -> str:
        """A command, run directly, with the variables that the receiver has for its session."""
        environ = {**os.environ, **self.receiver.variables(os.environ, name), **more}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=json.dumps(sent),
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout


async def post(url: str, body: bytes, kind: str = PROTOBUF, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        given = {"Content-Type": kind, **headers}
        return await client.post(url, content=body, headers=given)


def texts(session: Any) -> list[str]:
    return [call.exchange.reply.text for call in session.calls]


async def test_each_task_has_its_session(tmp_path: Path) -> None:
    made = Recorded(tmp_path)
    async with made.receiver as receiver:
        for name in ("task 1/a", "task-2"):
            await receiver.begin(name, task_id=name, question="Q?")
        for name in ("task-2", "task 1/a"):
            assert await asyncio.to_thread(made.run, name, request(*team())) == "done\n"
        one = await receiver.end("task 1/a", exit_code=0)
        two = await receiver.end("task-2", exit_code=0, answer="stated")
        assert not receiver.named
        assert receiver.lines() == []
    for session in (one, two):
        assert texts(session) == ["", "It is found."]
        assert [call.agent for call in session.calls] == ["finder", "finder"]
        assert session.results["c1"].text == "found"
    about = {"task_id": "task 1/a", "question": "Q?", "source": "otel"}
    assert one.about == {**about, "spans_before": 0}
    assert two.end == {"exit_code": 0, "answer": "stated"}
    assert read_sessions(made.sessions) == [one, two], "all of it is in the log"
    again = list(spans.read([made.spans], Notes()))
    assert [each.name for each in again] == ["task-2", "task 1/a"]  # type: ignore[union-attr]
    for path in (made.spans, made.sessions):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_program_without_tasks_has_a_session_for_each_trace(tmp_path: Path) -> None:
    made = Recorded(tmp_path)
    async with made.receiver as receiver:
        await receiver.begin("run")
        sent = request(*team(traceId="a" * 32), *team(traceId="b" * 32)[1:])
        await asyncio.to_thread(made.run, "run", sent)
        whole = await receiver.end("run", exit_code=0)
        named = receiver.named
        ended = [await receiver.end(name) for name in named]
    assert not whole.calls
    assert named == ["a" * 32, "b" * 32]
    assert [len(each.calls) for each in ended] == [2, 2]
    assert [each.cut for each in ended] == ["", "a span around its work never ended"]
    assert read_sessions(made.sessions)[1:] == ended


async def test_names_that_were_used_before_have_a_number(tmp_path: Path) -> None:
    made = Recorded(tmp_path, taken=["a"])
    async with made.receiver as receiver:
        session = await receiver.begin("a", task_id="a")
        await asyncio.to_thread(made.run, "a", request(*team()))
        assert (await receiver.end("a")) is session
    assert (session.name, {call.session for call in session.calls}) == ("a~2", {"a~2"})


@pytest.mark.parametrize(
    ("body", "kind", "encoding"),
    [
        (protobuf(request(*team())), PROTOBUF, ""),
        (gzip.compress(protobuf(request(*team()))), PROTOBUF, "gzip"),
        (zlib.compress(protobuf(request(*team()))), PROTOBUF, "deflate"),
        (json.dumps(request(*team())).encode(), f"{JSON}; charset=utf-8", ""),
        (gzip.compress(json.dumps(request(*team())).encode()), JSON, "gzip"),
    ],
)
async def test_every_form_of_a_request_is_taken(
    tmp_path: Path, body: bytes, kind: str, encoding: str
) -> None:
    made = Recorded(tmp_path)
    more = {"Content-Encoding": encoding} if encoding else {}
    async with made.receiver as receiver:
        await receiver.begin("t", task_id="t")
        answer = await post(f"{receiver.url}/session/t/v1/traces", body, kind, **more)
        session = await receiver.end("t")
    assert answer.status_code == 200
    assert answer.content == (b"{}" if JSON in kind else b"")
    assert texts(session) == ["", "It is found."]


async def test_a_request_in_chunks_is_taken(tmp_path: Path) -> None:
    made = Recorded(tmp_path)

    async def chunks() -> Any:
        whole = protobuf(request(*team()))
        for at in range(0, len(whole), 100):
            yield whole[at : at + 100]

    async with made.receiver as receiver, httpx.AsyncClient(trust_env=False) as client:
        await receiver.begin("t", task_id="t")
        url = f"{receiver.url}/session/t/v1/traces"
        answer = await client.post(url, content=chunks(), headers={"Content-Type": PROTOBUF})
        assert answer.status_code == 200
        assert len((await receiver.end("t")).calls) == 2


@pytest.mark.parametrize(
    ("body", "kind", "encoding", "status"),
    [
        (b"\xff\xff", PROTOBUF, "", 400),
        (b"{", JSON, "", 400),
        (b"[]", JSON, "", 400),
        (b'{"resourceSpans": 3}', JSON, "", 400),
        (b"not packed", PROTOBUF, "gzip", 400),
        (gzip.compress(b"\n\x00", mtime=0)[:-9], PROTOBUF, "gzip", 400),
        (b"", PROTOBUF, "br", 400),
        (b"", "text/plain", "", 415),
    ],
)
async def test_what_is_no_request_is_refused_and_counted(
    tmp_path: Path, body: bytes, kind: str, encoding: str, status: int
) -> None:
    made = Recorded(tmp_path)
    more = {"Content-Encoding": encoding} if encoding else {}
    async with made.receiver as receiver:
        answer = await post(f"{receiver.url}/v1/traces", body, kind, **more)
        assert answer.status_code == status
        assert "1 requests were no OTLP and were refused" in receiver.lines()
    assert made.spans.read_bytes() == b""


async def test_metrics_are_forgotten_and_other_routes_refused(tmp_path: Path) -> None:
    made = Recorded(tmp_path)
    async with made.receiver as receiver:
        assert (await post(f"{receiver.url}/v1/metrics", b"anything")).status_code == 200
        assert (await post(f"{receiver.url}/v1/traces", b"")).status_code == 200, "nothing to say"
        assert (await post(f"{receiver.url}/v1/profiles", b"")).status_code == 404
    assert made.spans.read_bytes() == b""


async def test_a_program_that_sends_nothing_is_told_why(tmp_path: Path) -> None:
    made = Recorded(tmp_path)
    async with made.receiver as receiver:
        line = receiver.why_silent()
        assert line.startswith("no span arrived. The program has to export spans by OTLP over HTTP")
        with socket.create_connection(("127.0.0.1", int(receiver.url.rpartition(":")[2]))) as peer:
            peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            await asyncio.to_thread(peer.recv, 100)
        assert any(each.startswith("an exporter spoke gRPC") for each in receiver.lines())


async def test_content_capture_that_is_off_in_the_program_is_one_line(tmp_path: Path) -> None:
    held = team()
    for each in held:
        each["attributes"] = [a for a in each["attributes"] if "messages" not in a["key"]]
    made = Recorded(tmp_path)
    async with made.receiver as receiver:
        await receiver.begin("t", task_id="t")
        await asyncio.to_thread(made.run, "t", request(*held))
        session = await receiver.end("t")
        (line,) = receiver.lines()
    assert line.startswith("2 of 2 model calls hold no text. Content capture was off.")
    assert (session.end or {})["gaps"] == {"text_not_captured": 2}


async def test_secrets_are_cut_out_of_all_that_is_written(tmp_path: Path) -> None:
    secret = "sk-very-secret"
    held = team()
    told = json.dumps([*ASKED, {"role": "user", "parts": [{"type": "text", "content": secret}]}])
    for each in held[1]["attributes"]:
        if each["key"] == "gen_ai.input.messages":
            each["value"] = {"stringValue": told}
    held[2]["attributes"].append({"key": "url", "value": {"stringValue": f"http://{secret}@x"}})
    made = Recorded(tmp_path, secrets=Secrets({}, lambda text: text.replace(secret, "[cut]")))
    async with made.receiver as receiver:
        await receiver.begin("t", task_id="t")
        await asyncio.to_thread(made.run, "t", request(*held), OPENAI_API_KEY=secret)
        session = await receiver.end("t")
    assert session.calls[0].exchange.messages[-1].text == "[cut]"
    for path in tmp_path.rglob("*"):
        assert secret not in path.read_text()


async def test_keys_are_known_by_the_headers_that_a_program_sends_or_tells_of(
    tmp_path: Path,
) -> None:
    """A program may have its keys from a file, so that no variable shows them."""
    own, sent, listed = "own-key-1234", "sent-key-1234", "listed-key-1234"
    held = team()
    held[0]["name"] = f"GET {own} {listed}"
    held[1]["attributes"] += attributes(
        {
            "http.request.header.authorization": [f"Bearer {sent}"],
            "request.headers": {"x_api_key": listed},
            "url": f"http://x/?{sent}&{listed}&{own}",
        }
    )
    made = Recorded(tmp_path)
    async with made.receiver as receiver:
        await receiver.begin("t", task_id="t")
        url, body = f"{receiver.url}/session/t/v1/traces", json.dumps(request(*held)).encode()
        answer = await post(url, body, JSON, Authorization=f"Bearer {own}")
        assert answer.status_code == 200
        assert len((await receiver.end("t")).calls) == 2
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert "http://x/?[key]&[key]&[key]" in written["e.spans.jsonl"]
    for key in (own, sent, listed):
        assert not any(key in text for text in written.values())


async def test_an_error_of_the_outermost_span_is_the_error_of_its_session(tmp_path: Path) -> None:
    """A program may well end by itself after that, with nothing in its exit code."""
    failed = {"status": {"code": 2, "message": "out of steps"}}
    made = Recorded(tmp_path)
    async with made.receiver as receiver:
        await receiver.begin("t", task_id="t")
        held = team()
        await asyncio.to_thread(made.run, "t", request(held[0] | failed, *held[1:]))
        session = await receiver.end("t", exit_code=0)
    assert session.end == {"exit_code": 0, "error": "the run ended with an error"}
    assert episode_of(session).error == "the run ended with an error"


async def test_a_function_of_redact_that_fails_ends_the_recording(tmp_path: Path) -> None:
    def fails(text: str) -> str:
        raise UsageError("--redact: the function failed")

    made = Recorded(tmp_path, secrets=Secrets({}, fails))
    async with made.receiver as receiver:
        answer = await post(f"{receiver.url}/v1/traces", protobuf(request(*team())))
        assert answer.status_code == 400
        assert "the function failed" in str(await receiver.failed)
    assert made.spans.read_bytes() == b""


@pytest.mark.parametrize(
    "more",
    [
        b"Transfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nwhat\r\n",
        b"Content-Length: 999999999999\r\n\r\n",
    ],
)
async def test_bodies_of_no_size_are_refused(tmp_path: Path, more: bytes) -> None:
    made = Recorded(tmp_path)
    async with made.receiver as receiver:
        port = int(receiver.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"
        writer.write(head + more)
        answer = await reader.read()  # to the end: nothing more is read on this connection
        assert answer.startswith(b"HTTP/1.1 400 ")
        writer.close()
        assert receiver.counts["refused"] == 1


async def test_a_kind_that_no_header_may_say_again_is_refused_and_ends_nothing(
    tmp_path: Path,
) -> None:
    made = Recorded(tmp_path)
    async with made.receiver as receiver, httpx.AsyncClient() as client:
        headers = {"content-type": "text/pl\xe4in".encode("latin-1")}
        answer = await client.post(f"{receiver.url}/v1/traces", content=b"x", headers=headers)
        assert answer.status_code == 415 and not receiver.failed.done()


async def test_what_is_nested_too_deeply_is_refused_and_ends_nothing(tmp_path: Path) -> None:
    made = Recorded(tmp_path, secrets=Secrets({}, str.upper))
    inner = '{"arrayValue":{"values":[' * 240 + "]}}" * 240
    deep = json.dumps(request(*team())).replace('"stringValue": "finder"', f'"arrayValue": {inner}')
    async with made.receiver as receiver:
        answer = await post(f"{receiver.url}/v1/traces", deep.encode(), JSON)
        assert answer.status_code in (200, 400), "as deep as this Python goes"
        assert not receiver.failed.done()
        await receiver.begin("t", task_id="t")
        await asyncio.to_thread(made.run, "t", request(*team()))
        assert len((await receiver.end("t")).calls) == 2


async def test_variables_switch_content_capture_on_and_keep_what_a_user_set(tmp_path: Path) -> None:
    made = Recorded(tmp_path)
    async with made.receiver as receiver:
        await receiver.begin("run")
        await receiver.begin("a task", task_id="a task")
        alone = receiver.variables({"OTEL_RESOURCE_ATTRIBUTES": "service.name=x"}, "run")
        own = receiver.variables({"OTEL_RESOURCE_ATTRIBUTES": "service.name=x"}, "a task")
        old = receiver.variables({CONTENT: "true"}, "run")
        off = receiver.variables({CONTENT: "False"}, "run")
        assert alone["OTEL_EXPORTER_OTLP_ENDPOINT"] == receiver.url
        assert own["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"{receiver.url}/session/a%20task"
        assert own["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"].endswith("/session/a%20task/v1/traces")
    assert own["OTEL_RESOURCE_ATTRIBUTES"] == "service.name=x,coa.session=a%20task"
    assert alone["OTEL_RESOURCE_ATTRIBUTES"] == "service.name=x"
    assert (old[CONTENT], off[CONTENT]) == ("true", "SPAN_ONLY")
    assert CAPTURE["OTEL_SEMCONV_STABILITY_OPT_IN"] == "gen_ai_latest_experimental"
    assert all(each == "false" for name, each in CAPTURE.items() if name.startswith("OPENINF"))


async def test_a_port_that_is_taken_is_a_line(tmp_path: Path) -> None:
    made, other = Recorded(tmp_path), tmp_path / "other"
    async with made.receiver as receiver:
        port = int(receiver.url.rpartition(":")[2])
        with pytest.raises(UsageError, match=rf"port {port}: .*in use\. Choose another\."):
            async with Recorded(other, port=port).receiver:
                pass


async def test_what_was_acknowledged_is_on_the_disk(tmp_path: Path) -> None:
    """A receiver that is killed loses nothing that an exporter was told had arrived."""
    made = Recorded(tmp_path)
    async with made.receiver as receiver:
        await receiver.begin("t", task_id="t")
        await asyncio.to_thread(made.run, "t", request(*team()[1:]))
        (session,) = list(spans.read([made.spans], Notes()))
        (known,) = read_sessions(made.sessions)
    assert len(session.calls) == 2
    assert known.cut, "its session never ended"


async def test_what_was_sent_before_a_kill_is_in_the_log_at_the_next_start(tmp_path: Path) -> None:
    """As far as it belongs to sessions that never ended; no trace becomes two sessions."""
    made = Recorded(tmp_path)
    async with made.receiver as receiver:
        await receiver.begin("old")
        await asyncio.to_thread(made.run, "old", request(*team(traceId="a" * 32)))
        await receiver.end("old")
        assert receiver.named == ["a" * 32]
        await receiver.end("a" * 32)
        for name in ("done", "killed"):
            await receiver.begin(name, task_id=name)
            await asyncio.to_thread(made.run, name, request(*team(traceId="b" * 32)[1:]))
        await receiver.end("done")
        await receiver.begin("run")
        await asyncio.to_thread(made.run, "run", request(*team(traceId="c" * 32)[1:]))
    with made.spans.open("ab") as torn:
        torn.write('{"resourceSpans": "\u00fc'.encode()[:-1])
    made.log.close()
    for _ in range(2):  # the second time nothing is left to do
        known = read_sessions(made.sessions)
        with CallLog(made.sessions) as log:
            new = after_kill(made.spans, log, known)
            for each in known:
                each.end = log.end(each.name, cut=KILLED) if each.end is None else each.end
    assert not new
    found = {each.name: each for each in read_sessions(made.sessions)}
    assert [*found] == ["old", "a" * 32, "done", "killed", "run", "c" * 32]
    assert [len(each.calls) for each in found.values()] == [0, 2, 2, 2, 0, 2]
    assert [bool(each.cut) for each in found.values()] == [False, False, False, True, True, True]
    assert found["c" * 32].about["named"] == "c" * 32
    assert found["killed"].results["c1"].text == "found"


async def test_many_programs_at_once_do_not_mix(tmp_path: Path) -> None:
    made = Recorded(tmp_path)
    names = [f"t{number}" for number in range(32)]
    async with made.receiver as receiver, httpx.AsyncClient(trust_env=False) as client:
        for name in names:
            await receiver.begin(name, task_id=name)

        async def send(name: str) -> None:
            for each in team():  # as exporters that send each span alone do
                each["name"] = name
                body = protobuf(request(each))
                url = f"{receiver.url}/session/{name}/v1/traces"
                answer = await client.post(url, content=body, headers={"Content-Type": PROTOBUF})
                assert answer.status_code == 200

        await asyncio.gather(*map(send, names))
        ended = [await receiver.end(name) for name in names]
    assert [texts(each) for each in ended] == [["", "It is found."]] * 32
