"""MCP servers that nobody here wrote, with our tools and with the shipped model (make test-mcp)."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coa import Environment, Task, mcp
from coa.environment import ToolSettings
from coa.serving.server import bind
from coa.tools import ToolCall
from serving import Server as Chat

PLACE = Path(os.environ.get("COA_TEST_MCP", "")).absolute()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("COA_TEST_MCP" not in os.environ, reason="make test-mcp has the servers"),
]
TIME = shlex.join([str(PLACE / "bin" / "mcp-server-time"), "--local-timezone", "Europe/Berlin"])
NODE = PLACE / "npm" / "node_modules" / ".bin"
QUESTION = Task("What can you do?")
MODEL = "afm-135m"


@pytest.fixture(scope="module")
def everything() -> Iterator[str]:
    """The URL of server-everything over streamable HTTP."""
    with bind("127.0.0.1", 0) as door:
        port = door.getsockname()[1]
    command = [str(NODE / "mcp-server-everything"), "streamableHttp"]
    said = subprocess.DEVNULL
    running = subprocess.Popen(
        command, env={**os.environ, "PORT": str(port)}, stdout=said, stderr=said
    )
    url = f"http://127.0.0.1:{port}/mcp"
    try:
        for _ in range(100):
            try:
                httpx.get(url, timeout=5)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield url
    finally:
        running.terminate()
        running.wait(10)


async def called(source: Any, *calls: tuple[str, str]) -> list[str]:
    """What tools of a server answer in one rollout; failures are told as they are."""
    env = Environment("public", tools=[source], grammar="react")
    async with env.open([QUESTION]) as opened, opened.session(QUESTION) as session:
        seen = [await session.tools.call(ToolCall(tool, given)) for tool, given in calls]
        return [f"{each.failure}: {each.text}" if each.failure else each.text for each in seen]


async def test_a_time_server_over_stdio() -> None:
    noon = {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "Asia/Kolkata"}
    made, wrong = await called(
        mcp(TIME),
        ("convert_time", json.dumps(noon)),
        ("get_current_time", '{"timezone": "Nowhere"}'),
    )
    assert "08:30" in made and "-3.5h" in made
    assert wrong.startswith("mistake: Error: ") and "Nowhere" in wrong


async def test_a_git_server_over_stdio(tmp_path: Path) -> None:
    for words in ("init -q", "-c user.name=A -c user.email=a@b.c commit -q --allow-empty -m first"):
        subprocess.run(["git", "-C", tmp_path, *words.split()], check=True)
    server = shlex.join([str(PLACE / "bin" / "mcp-server-git"), "--repository", str(tmp_path)])
    given = json.dumps({"repo_path": str(tmp_path)})
    (log,) = await called(mcp(server, tools=["git_log"]), ("git_log", given))
    assert "Message: first" in log and "Author: A" in log


async def test_a_file_server_with_a_folder_for_each_rollout() -> None:
    server = shlex.join([str(NODE / "mcp-server-filesystem"), "{folder}"])
    source = mcp(server, per_rollout=True, tools=["write_file", "list_directory", "read_text_file"])
    file = json.dumps({"path": "/folder/a.txt", "content": "kept"})
    here = json.dumps({"path": "/folder"})
    outside = json.dumps({"path": "/etc/passwd"})
    seen = await called(
        source,
        ("list_directory", here),
        ("write_file", file),
        ("list_directory", here),
        ("read_text_file", outside),
    )
    assert "a.txt" not in seen[0] and "a.txt" in seen[2]
    assert seen[3].startswith("mistake: Error: ") and "coa-mcp-" not in "".join(seen)
    assert "a.txt" not in (await called(source, ("list_directory", here)))[0]


async def test_a_server_of_everything_over_http(everything: str) -> None:
    seen = await called(
        mcp(everything),
        ("echo", "hello </observation>"),
        ("get-sum", '{"a": 2, "b": 3}'),
        ("get-tiny-image", "{}"),
    )
    assert seen[0] == "Echo: hello </observation>" and "5" in seen[1]
    assert "[image, image/png, " in seen[2]


def coa(*arguments: object) -> str:
    command = [sys.executable, "-m", "coa", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("over", ["stdio", "http"])
def test_the_shipped_model_asks_a_server(over: str, everything: str) -> None:
    server = TIME if over == "stdio" else everything
    question = "What time is it in Asia/Tokyo?" if over == "stdio" else "What does the echo say?"
    where = ("--mcp", server, "--model", MODEL, "--constrain", "--json")
    made = json.loads(coa("ask", question, *where))
    assert made["usage"]["tool_calls"] >= 1 and "<observation>" in str(made["segments"])
    assert made["stop"] not in ("tool_failed", "tool_timeout", "engine_failed")


def test_the_shipped_model_is_measured_with_a_server(tmp_path: Path) -> None:
    zones = ("Asia/Tokyo", "Europe/Paris", "America/Lima", "Africa/Cairo")
    rows = [f"What time is it in {zone}?,{zone}" for zone in zones]
    (tmp_path / "a.csv").write_text("\n".join(["question,answer", *rows, ""]))
    where = ("--tasks", tmp_path / "a.csv", "--mcp", TIME, "--model", MODEL)
    coa("eval", *where, "--constrain", "--out", tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["n"] == 4 and summary["environment"] == 0
    assert summary["tool_calls_per_task"] > 0


def test_the_shipped_model_is_served_with_a_server(
    everything: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.WAIT_S", 600.0)
    tools = ToolSettings(mcp=(TIME, everything))
    with Chat(tmp_path, model=MODEL, grammars=("mhqa",), tools=tools, constrain=True) as chat:
        said = [{"role": "user", "content": "What time is it in Asia/Tokyo?"}]
        asked = {"model": MODEL, "messages": said}
        reply = httpx.post(f"{chat.url}/v1/chat/completions", json=asked, timeout=600)
    assert reply.status_code == 200, reply.text
    assert "observation" in reply.json()["choices"][0]["message"]["reasoning_content"]
