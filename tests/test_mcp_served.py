"""MCP over HTTP, in commands and stages, and our own server as the official client sees it."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("mcp")
pytest.importorskip("uvicorn")

import httpx
import uvicorn
from mcp import Client, StdioServerParameters
from mcp.server.lowlevel import Server
from mcp_types import CallToolResult, ListToolsResult, TextContent
from mcp_types import Tool as Listed

from coa import Environment, ScriptedEngine, Task, mcp
from coa.cli import app
from coa.environment import ToolSettings
from coa.errors import UsageError
from coa.serving.mcp import serve_mcp
from coa.serving.server import bind
from coa.serving.session import Serving
from coa.tools import ToolCall, servers
from serving import Server as Chat

HERE = Path(__file__).parent
SERVER = shlex.join([sys.executable, str(HERE / "mcp_server.py")])
ADD = '<think>I add.</think><add>{"a": 1, "b": 2}</add>'
END = "<think>So.</think><answer>3</answer>"
OBJECT = {"type": "object", "properties": {}}
REACT = ("--grammar", "react")
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PROBE_S", 2.0)
    monkeypatch.setattr(servers, "ENDING_S", 0.3)


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A model that adds with a tool and answers."""
    path = tmp_path / "script.jsonl"
    path.write_text(json.dumps({"turns": [ADD, END]}) + "\n")
    return f"scripted:{path}"


def coa(*arguments: object) -> str:
    found = CliRunner().invoke(app, [str(each) for each in arguments])
    assert found.exit_code == 0, f"{found.output}{found.exception!r}"
    return found.stdout


# -- a server over HTTP -----------------------------------------------------------------------


class Web:
    """An MCP server over streamable HTTP on a loopback port, made with the SDK."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        """Headers of authorization that came."""
        self.port = 0
        listed = [
            Listed(name="add", description="Add.", input_schema={**OBJECT, "properties": NUMBERS}),
            Listed(name="huge", input_schema=OBJECT),
            Listed(name="hang", input_schema=OBJECT),
        ]

        async def list_tools(context: Any, params: Any) -> ListToolsResult:
            return ListToolsResult(tools=listed)

        async def call_tool(context: Any, params: Any) -> CallToolResult:
            given = params.arguments or {}
            if params.name == "hang":
                await asyncio.sleep(600)
            text = "x" * 50_000_000 if params.name == "huge" else str(given["a"] + given["b"])
            return CallToolResult(content=[TextContent(type="text", text=text)])

        self._server = Server("web", on_list_tools=list_tools, on_call_tool=call_tool)

    @contextmanager
    def running(self, **how: Any) -> Iterator[str]:
        inner = self._server.streamable_http_app(**how)

        async def application(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                headers = dict(scope["headers"])
                self.seen.append(headers.get(b"authorization", b"").decode())
            await inner(scope, receive, send)

        with bind("127.0.0.1", self.port) as door:
            self.port = door.getsockname()[1]
            config = uvicorn.Config(application, log_config=None, timeout_graceful_shutdown=0)
            running = uvicorn.Server(config)
            thread = threading.Thread(target=running.run, kwargs={"sockets": [door]})
            thread.start()
            try:
                yield f"http://127.0.0.1:{self.port}/mcp"
            finally:
                running.should_exit = running.force_exit = True
                thread.join()


@pytest.mark.parametrize("json_response", [False, True])
async def test_tools_of_a_url_answer_and_are_bounded(
    json_response: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEB_TOKEN", "s3cr3t-word")
    web = Web()
    with web.running(json_response=json_response) as url:
        source = mcp(url, headers=["Authorization: Bearer ${WEB_TOKEN}"])
        env = Environment("web", tools=[source], grammar="react")
        async with env.open([Task("?")]) as opened, opened.session(Task("?")) as session:
            call = session.tools.call
            add = ToolCall("add", '{"a": 1, "b": 2}')
            assert (await call(add)).text == "3"
            huge = await call(ToolCall("huge", "{}"))
            assert huge.failure == "failed" and len(huge.text) < 400
            late = await call(ToolCall("hang", "{}"), limit_s=0.5)
            assert late.failure == "timeout"
            assert (await call(add)).text == "3"
    assert {*web.seen} == {"Bearer s3cr3t-word"}


async def test_a_url_that_goes_away_and_comes_back_is_asked_again() -> None:
    web = Web()
    add = ToolCall("add", '{"a": 1, "b": 2}')
    with web.running() as url:
        context = Environment("web", tools=[mcp(url, timeout_s=8.0)], grammar="react").open()
        opened = await context.__aenter__()
        session = opened.session(Task("?"))
        tools = (await session.__aenter__()).tools
        assert (await tools.call(add)).text == "3"
    assert (await tools.call(add)).failure == "failed"
    with web.running():
        assert (await tools.call(add)).text == "3"
        await session.__aexit__(None, None, None)
        await context.__aexit__(None, None, None)


# -- commands ---------------------------------------------------------------------------------


def test_ask_takes_a_server(script: str) -> None:
    made = json.loads(coa("ask", "1 + 2?", "--mcp", SERVER, *REACT, "--model", script, "--json"))
    assert made["answer"] == "3" and "<observation>3</observation>" in str(made["segments"])
    assert "wiki_search" not in made["tools"] and "add" in made["tools"]


def test_ask_takes_servers_beside_an_environment(script: str, tmp_path: Path) -> None:
    coa("init", tmp_path / "shop")
    words = ("--env", tmp_path / "shop", "--mcp", SERVER, "--mcp", f"{SERVER} x", "--model", script)
    found = CliRunner().invoke(app, ["ask", "What is 1 + 2?", *map(str, words)])
    assert "two tools are named 'server_add'" in str(found.exception)
    made = json.loads(coa("ask", "What is 1 + 2?", *words[:4], "--model", script, "--json"))
    assert made["answer"] == "3" and {"add", "convert"} <= {*made["tools"]}


def write_env(folder: Path) -> Path:
    folder.mkdir()
    command = SERVER.replace('"', '\\"')
    (folder / "environment.toml").write_text(
        f'grammar = "react"\ntasks = {{train = "a.csv", test = "a.csv"}}\nteacher = "team:Team"\n'
        f'[tools]\nmcp = [{{command = "{command}", tools = ["add"], per_rollout = true}}]\n'
    )
    (folder / "a.csv").write_text("question,answer\nWhat is 1 + 2?,3\nWhat is 2 + 1?,3\n")
    (folder / "team.py").write_text(TEAM)
    return folder


TEAM = '''
"""One who adds."""

from coa import AgentSpec, Episode, Message, ToolCall, ToolUse


class Team:
    name = "adder"

    async def record(self, task, toolbox, seed=0):
        agents = [AgentSpec("adder", "", "Add.")]
        episode = Episode(task.id, task.question, self.name, agents, seed=seed)
        argument = '{"a": 1, "b": 2}'
        episode.events.append(Message("adder", "adder", "add", "I add.", {"part": "query"}))
        seen = await toolbox.call(ToolCall("add", argument))
        episode.events.append(ToolUse("adder", "add", argument, seen.text))
        episode.events.append(Message("adder", "user", seen.text, "So.", {"part": "verdict"}))
        episode.answer = seen.text
        return episode
'''


def test_every_stage_takes_the_tools_of_a_server(script: str, tmp_path: Path) -> None:
    env, out = write_env(tmp_path / "till"), tmp_path / "out"
    assert "tool         add: Add two numbers." in coa("check", env)
    coa("record", "--env", env, "--out", tmp_path / "episodes.jsonl", "--workers", 1)
    where = ("--episodes", tmp_path / "episodes.jsonl", "--env", env)
    coa("distill", *where, "--out", tmp_path / "dataset")
    chains = [json.loads(line) for line in (tmp_path / "dataset/trajectories.jsonl").open()]
    assert len(chains) == 2 and all(chain["tools"] == ["add"] for chain in chains)
    coa("eval", "--env", env, "--model", script, "--out", out)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["accuracy"] == 1.0 and summary["tool_calls_per_task"] == 1.0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["inputs"]["binding"] and manifest["inputs"]["answers"]


def test_eval_takes_a_server_for_questions_of_a_file(script: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer\nWhat is 1 + 2?,3\n")
    where = ("--tasks", tmp_path / "a.csv", "--mcp", SERVER, *REACT, "--model", script)
    coa("eval", *where, "--out", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["accuracy"] == 1.0


def test_serve_answers_with_the_tools_of_a_server(script: str, tmp_path: Path) -> None:
    tools = ToolSettings(mcp=(SERVER,))
    with Chat(tmp_path, model=script, grammars=("react",), tools=tools) as chat:
        asked = {"model": "scripted", "messages": [{"role": "user", "content": "1 + 2?"}]}
        reply = httpx.post(f"{chat.url}/v1/chat/completions", json=asked, timeout=60).json()
    assert reply["choices"][0]["message"]["content"] == "3"
    assert "observation: 3" in reply["choices"][0]["message"]["reasoning_content"]


# -- our own server ---------------------------------------------------------------------------


def ours(*words: object) -> StdioServerParameters:
    """`coa mcp serve` as a client starts it."""
    paths = os.pathsep.join(path for path in sys.path if path)
    given = ["-m", "coa", "mcp", "serve", *map(str, words)]
    return StdioServerParameters(command=sys.executable, args=given, env={"PYTHONPATH": paths})


TOOLS = '''
def add(a: int, b: int) -> int:
    """Add."""
    print("noise")
    return a + b


def shout(word: str) -> str:
    """Say it loudly."""
    return word.upper()


def fail() -> str:
    """Fail."""
    raise ValueError("no such city")
'''


@pytest.fixture
def env(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "tools.py").write_text(TOOLS)
    (folder / "environment.toml").write_text(
        'grammar = "react"\ntools = ["tools:add", "tools:shout", "tools:fail"]\n'
    )
    return folder


async def test_the_official_client_asks_our_agent(env: Path, script: str) -> None:
    async with Client(ours("--env", env, "--model", script)) as client:
        (tool,) = (await client.list_tools()).tools
        assert tool.name == "ask" and "add, shout, fail" in str(tool.description)
        made = await client.call_tool("ask", {"question": "What is 1 + 2?"})
        assert not made.is_error and [each.text for each in made.content] == ["3"]
        held = made.structured_content
        assert held["answer"] == "3" and held["stop"] == "answered" and held["tool_calls"] == 1
        assert [block["role"] for block in held["chain"]] == [
            "think",
            "add",
            "observation",
            "think",
        ]
        assert held["chain"][2]["text"] == "3"
        for given in ({}, {"question": 3}, {"question": "x" * 20_000}):
            refused = await client.call_tool("ask", given)
            assert refused.is_error and "question" in refused.content[0].text
        assert (await client.call_tool("add", {"a": 1, "b": 2})).is_error


async def test_a_client_of_before_calls_our_tools(env: Path) -> None:
    async with Client(ours("--env", env, "--tools-only"), mode="legacy") as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert [*listed] == ["add", "shout", "fail"]
        assert listed["add"].input_schema["required"] == ["a", "b"]
        assert listed["shout"].input_schema["required"] == ["word"]
        made = [
            await client.call_tool("add", {"a": 1, "b": 2}),
            await client.call_tool("shout", {"word": "yes"}),
            await client.call_tool("add", {"a": "x", "b": 2}),
            await client.call_tool("fail", {}),
        ]
        assert [each.content[0].text for each in made[:2]] == ["3", "YES"]
        assert [each.is_error for each in made] == [False, False, True, True]
        assert 'a is "x", expected an integer' in made[2].content[0].text
        assert "no such city" in made[3].content[0].text


async def test_our_server_is_a_server_for_us(env: Path) -> None:
    given = ours("--env", env, "--tools-only")
    paths = shlex.quote(str(given.env["PYTHONPATH"])) if given.env else ""
    server = shlex.join(["env", f"PYTHONPATH={paths}", given.command, *given.args])
    again = Environment("again", tools=[mcp(server)], grammar="react")
    async with again.open([Task("?")]) as opened:
        made = await opened.play(Task("?"), ScriptedEngine([ADD, END]))
    assert made.answer == "3" and "<observation>3</observation>" in made.text


async def test_our_server_over_http(env: Path, script: str) -> None:
    given = ours("--env", env, "--model", script, "--http", "--port", 0)
    started = subprocess.Popen(
        [given.command, *given.args],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(given.env or {})},
    )
    try:
        assert started.stderr is not None
        lines = iter(started.stderr.readline, "")
        url = next(line for line in lines if "serving on" in line).split()[-1]
        async with Client(url) as client:
            made = await client.call_tool("ask", {"question": "What is 1 + 2?"})
            assert made.structured_content["answer"] == "3"
        strange = httpx.post(url, json={}, headers={"Host": "evil.example"})
        assert strange.status_code in (403, 421), "a name of a stranger's is refused"
        started.send_signal(signal.SIGTERM)
        assert started.wait(20) == 0
    finally:
        started.kill()
        started.wait()


def test_our_server_refuses_other_hosts_without_a_key(env: Path) -> None:
    with pytest.raises(UsageError, match=r"host '0\.0\.0\.0' can be reached by others"):
        serve_mcp(Serving(env=str(env), host="0.0.0.0"), print, tools_only=True, http=True)


def test_our_server_ends_when_its_client_leaves(env: Path) -> None:
    given = ours("--env", env, "--tools-only")
    done = subprocess.run(
        [given.command, *given.args],
        input="no json\n",
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(given.env or {})},
    )
    assert done.returncode == 0 and done.stdout == "", done.stderr
    assert "offering add, shout, fail of shop over MCP" in done.stderr
