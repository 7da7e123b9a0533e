"""coa serve under load and at its end: queues, clients that leave or stall, signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from coa.io.runs import Json
from serving import (
    PLAN,
    TURNS,
    WAIT_S,
    HeldEngine,
    HesitantEngine,
    Server,
    Watched,
    eventually,
    limits,
)

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

ASKED: list[Any] = [{"role": "user", "content": "What is the capital of Peru?"}]
BODY: Json = {"model": "scripted", "messages": ASKED, "stream": True}


def client_of(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def stream_of(server: Server) -> Any:
    return client_of(server).chat.completions.create(**BODY)


class Asking(threading.Thread):
    """A client that reads a whole answer, in a thread."""

    def __init__(self, server: Server, stream: bool = True) -> None:
        super().__init__()
        self._server, self._stream = server, stream
        self.answer, self.error = "", None
        self.start()

    def run(self) -> None:
        try:
            if self._stream:
                for chunk in stream_of(self._server):
                    self.answer += chunk.choices[0].delta.content or ""
            else:
                asked = {**BODY, "stream": False}
                done = client_of(self._server).chat.completions.create(**asked)
                self.answer = done.choices[0].message.content
        except openai.APIError as error:
            self.error = error

    def end(self) -> Asking:
        self.join(WAIT_S)
        assert not self.is_alive()
        return self


# -- the queue -------------------------------------------------------------------------------


def test_beyond_the_queue_clients_are_sent_away_and_the_others_are_answered(tmp_path: Path) -> None:
    engine = HeldEngine()
    with Server(tmp_path, engine, limits=limits(rollouts=2, queue=1)) as server:
        asking = [Asking(server) for _ in range(3)]
        eventually(lambda: server.busy == (2, 1), "two run and one waits")
        with pytest.raises(openai.RateLimitError, match="2 requests are being answered") as told:
            stream_of(server)
        assert told.value.code == "queue_full"
        assert int(told.value.response.headers["retry-after"]) >= 1
        engine.let_go.set()
        assert [each.end().answer for each in asking] == ["Lima"] * 3
        assert server.busy == (0, 0)
        assert Asking(server, stream=False).end().answer == "Lima"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_rollout_and_frees_its_place(
    tmp_path: Path, stream: bool
) -> None:
    engine = HeldEngine()
    with Server(tmp_path, engine, limits=limits(rollouts=1, queue=4)) as server:
        leaving = raw_request(server, {**BODY, "stream": stream})
        eventually(lambda: engine.begun == 1, "the rollout runs")
        if stream:
            assert b"I plan" in read_until(leaving, b"I plan")
        staying = Asking(server)
        waiting = raw_request(server, {**BODY, "stream": stream})
        eventually(lambda: server.busy == (1, 2), "two wait")
        waiting.close()
        eventually(lambda: server.busy == (1, 1), "the one that left waits no more")
        leaving.close()
        eventually(lambda: engine.cancelled == 1, "the engine was told")
        eventually(lambda: engine.begun == 2, "the next one has its place")
        engine.let_go.set()
        assert staying.end().answer == "Lima"
        assert server.busy == (0, 0)
    assert sum("499 client gone" in line for line in server.lines) == 2


@pytest.mark.parametrize("extra", [b"\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
@pytest.mark.parametrize("stream", [True, False])
def test_bytes_after_a_request_do_not_hide_that_its_client_has_left(
    tmp_path: Path, stream: bool, extra: bytes
) -> None:
    engine = HeldEngine()
    with Server(tmp_path, engine) as server:
        leaving = raw_request(server, {**BODY, "stream": stream})
        eventually(lambda: engine.begun == 1, "the rollout runs")
        leaving.sendall(extra)
        leaving.close()
        eventually(lambda: engine.cancelled == 1, "the engine was told")
        eventually(lambda: server.busy == (0, 0), "its place is free")


def test_bytes_after_a_request_cost_a_client_its_connection_and_not_its_answer(
    tmp_path: Path,
) -> None:
    engine = HeldEngine()
    with Server(tmp_path, engine) as server, raw_request(server, BODY) as client:
        eventually(lambda: engine.begun == 1, "the rollout runs")
        client.sendall(b"\r\n")
        engine.let_go.set()
        assert b"Lima" in read_until(client, b"[DONE]")
        while client.recv(4096):
            pass


def test_a_body_in_pieces_is_put_together_and_its_connection_is_used_again(tmp_path: Path) -> None:
    with Server(tmp_path) as server, raw_request(server, BODY, pieces=5) as client:
        assert b"Lima" in read_until(client, b"[DONE]\n\n\r\n0\r\n\r\n")
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in read_until(client, b'{"status":"ok"}')


def test_a_rollout_that_takes_too_long_ends_as_one_of_length(tmp_path: Path) -> None:
    with Server(tmp_path, HeldEngine(), limits=limits(seconds=0.05)) as server:
        *_, last = stream_of(server)
    assert (last.choices[0].finish_reason, last.coa["stop"]) == ("length", "time")


def test_a_client_that_leaves_before_it_has_asked_is_no_event(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        half = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
        half.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
        )
        assert httpx.get(f"{server.url}/health").status_code == 200
        half.close()
        assert Asking(server).end().answer == "Lima"
        assert server.busy == (0, 0)
    assert not any("Traceback" in line for line in server.lines)


def test_clients_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    engine = Watched(HesitantEngine(TURNS))

    def leave(after: int) -> None:
        with raw_request(server, {**BODY, "stream": after % 3 > 0}) as client:
            client.settimeout(after / 50)
            with contextlib.suppress(OSError):
                while after > 0 and (part := client.recv(256)):
                    after -= len(part) // 100

    with Server(tmp_path, engine, limits=limits(rollouts=4, queue=100)) as server:
        before = server.tasks()
        leaving = [threading.Thread(target=leave, args=(n,)) for n in range(40)]
        for each in leaving:
            each.start()
        staying = [Asking(server, stream=n % 2 == 0) for n in range(10)]
        assert [each.end().answer for each in staying] == ["Lima"] * 10
        for each in leaving:
            each.join()
        eventually(lambda: server.busy == (0, 0), "all places are free")
        eventually(lambda: server.tasks() == before, "no task is left")
        assert engine.now == 0 and engine.most <= 4


def raw_request(server: Server, body: Json, pieces: int = 1) -> socket.socket:
    content = json.dumps(body).encode()
    made = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    request = f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + content
    size = -(-len(request) // pieces)
    for start in range(0, len(request), size):
        made.sendall(request[start : start + size])
        if pieces > 1:
            time.sleep(0.05)  # else they would arrive as one
    return made


def read_until(stream: socket.socket, mark: bytes) -> bytes:
    seen = b""
    stream.settimeout(WAIT_S)
    while mark not in seen:
        part = stream.recv(4096)
        assert part, seen
        seen += part
    return seen


# -- slow clients ----------------------------------------------------------------------------


def test_a_slow_client_gets_everything_and_holds_no_place(tmp_path: Path) -> None:
    long_thought = "thinking " * 30
    script = [f"{PLAN}<think>{long_thought}</think><answer>Lima</answer>"]
    engine = HeldEngine(script)
    engine.let_go.set()
    with Server(tmp_path, engine, limits=limits(rollouts=1, queue=0)) as server:
        slow = raw_request(server, BODY)
        eventually(lambda: engine.begun == 1 and server.busy == (0, 0), "it gave its place back")
        assert Asking(server).end().answer == "Lima"
        seen = b""
        while b"[DONE]" not in seen:
            part = slow.recv(256)
            assert part
            seen += part
        slow.close()
    assert seen.count(b'"finish_reason":"stop"') == 1
    assert seen.count(b"thinking thinking") >= 1


@pytest.mark.parametrize("stuck", ["http.response.start", "http.response.body"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_takes_nothing_any_more_is_given_up(
    tmp_path: Path, stream: bool, stuck: str
) -> None:
    from coa.serving.app import make_app

    with Server(tmp_path, limits=limits(stall_s=0.05)) as server:
        session = server.at.session
    session.stopping = False
    app, sent = make_app(session), []
    body = json.dumps({**BODY, "stream": stream}).encode()
    arriving = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if arriving:
            return arriving.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == stuck:
            await asyncio.Event().wait()

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    await app({**scope, "query_string": b"", "root_path": ""}, receive, send)
    assert sent == ["http.response.start", "http.response.body"][: len(sent)]
    assert sent[-1] == stuck and server.busy == (0, 0)
    assert sum("client stalled" in line for line in server.lines) == stream


def test_a_silent_stream_is_kept_open_by_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coa.serving.app.QUIET_S", 0.01)
    engine = HeldEngine()
    with Server(tmp_path, engine) as server:
        quiet = raw_request(server, BODY)
        read_until(quiet, b": still at work\n\n")
        asking = Asking(server)
        engine.let_go.set()
        assert asking.end().answer == "Lima", "the official client skips comments"
        read_until(quiet, b"[DONE]")
        quiet.close()


# -- the end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_stopped_server_lets_rollouts_finish(tmp_path: Path, stream: bool) -> None:
    engine = HeldEngine()
    with Server(tmp_path, engine) as server:
        asking = Asking(server, stream)
        eventually(lambda: engine.begun == 1, "the rollout runs")
        server.stop()
        eventually(lambda: not answers(server), "the door is closed")
        engine.let_go.set()
        assert asking.end().answer == "Lima"
        server.join()
    assert server.lines[-1] == "stopped"


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_left_after_the_grace_period_is_cut_with_an_error(
    tmp_path: Path, stream: bool
) -> None:
    engine = HeldEngine()
    limited = limits(rollouts=1, queue=1)
    with Server(tmp_path, engine, grace_s=0.1, limits=limited) as server:
        running, waiting = Asking(server, stream), Asking(server, stream)
        eventually(lambda: server.busy == (1, 1), "one runs and one waits")
        server.stop()
        for each in (running, waiting):
            assert each.end().answer == ""
            assert each.error.code == "stopping", each.error
        server.join()
    assert server.busy == (0, 0) and engine.cancelled == 1


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    engine = HeldEngine()
    with Server(tmp_path, engine, grace_s=600.0) as server:
        asking = Asking(server)
        eventually(lambda: engine.begun == 1, "the rollout runs")
        server.stop()
        server.stop()
        assert asking.end().error.code == "stopping"
        server.join()


def test_a_second_signal_does_not_wait_for_a_body_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info < (3, 12):  # later ones wait for open connections by themselves

        async def wait_closed(self: Any) -> None:
            while self._active_count:
                await asyncio.sleep(0.01)

        monkeypatch.setattr(asyncio.Server, "wait_closed", wait_closed)
    with Server(tmp_path, HeldEngine(), grace_s=600.0) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
            )
            eventually(lambda: answers(server), "the server is up")
            server.stop()
            server.stop()
            server.join()


def test_too_many_requests_at_once_are_told_so_and_liveness_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coa.serving.app.SPARE_REQUESTS", -1)
    with Server(tmp_path, HeldEngine(), limits=limits(rollouts=1, queue=0)) as server:
        listed = httpx.get(f"{server.url}/v1/models")
        assert (listed.status_code, listed.json()["error"]["code"]) == (503, "busy")
        assert int(listed.headers["retry-after"]) >= 1 and answers(server)


def answers(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    "sign", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_the_command_serves_until_a_signal_and_ends_with_0(
    tmp_path: Path, sign: signal.Signals
) -> None:
    script = tmp_path / "s.jsonl"
    script.write_text(json.dumps({"turns": TURNS}) + "\n")
    command = ["-m", "coa", "serve", "--model", f"scripted:{script}", "--grammar", "mhqa"]
    with subprocess.Popen(
        [sys.executable, *command, "--port", "0"], stderr=subprocess.PIPE, text=True
    ) as served:
        assert served.stderr is not None
        line = served.stderr.readline()
        assert line.startswith("serving scripted, scripted:mhqa on http://127.0.0.1:"), line
        url = line.split()[-1]
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        done = client.chat.completions.create(model="scripted", messages=ASKED)
        assert done.choices[0].message.content == "Lima"
        served.send_signal(sign)
        rest = served.stderr.read()
        assert (served.wait(WAIT_S), rest.splitlines()[-1]) == (0, "stopped"), rest
