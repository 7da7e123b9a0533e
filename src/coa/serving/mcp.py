"""`coa mcp serve`: an environment's agent, or its tools, for any MCP client.

The agent is one tool: a question goes in, an answer comes out, and the chain behind it is
structured content. Over stdio a client starts this program and speaks with it alone; over HTTP it
is served as `coa serve` serves. Whatever else this process or its tools print goes to stderr, so
that it cannot stand between two messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import Any

from coa.environment import open_environments
from coa.errors import EngineError, ToolError, UsageError
from coa.io.machine import cores
from coa.io.runs import Json
from coa.rollouts import default_environments
from coa.serving.replies import Piece, Reply
from coa.serving.request import ChatRequest, Refused, refuse_stranger, shown
from coa.serving.server import bound, session_of
from coa.serving.session import ANY, Note, Serving, ServingSession
from coa.tools.base import Tool, Toolbox, ToolCall
from coa.tools.servers import MAX_BYTES, message_streams, sdk

AGENT = "ask"
PATH = "/mcp"
Answer = Callable[[str, Json], Awaitable[Any]]
"""The result of a call, by the tool's name and the arguments."""
_QUESTION: Json = {
    "type": "object",
    "properties": {"question": {"type": "string", "description": "What you want to know."}},
    "required": ["question"],
    "additionalProperties": False,
}
_ANSWERED: Json = {
    "type": "object",
    "properties": {
        "answer": {"type": ["string", "null"]},
        "stop": {"type": "string", "description": "Why the chain ended; `answered` or a limit."},
        "chain": {"type": "array", "items": {"type": "object"}},
        "turns": {"type": "integer"},
        "tool_calls": {"type": "integer"},
        "sampled_tokens": {"type": "integer"},
    },
    "required": ["answer", "stop", "chain"],
}


def serve_mcp(
    serving: Serving, note: Note, *, tools_only: bool = False, http: bool = False
) -> None:
    """Serve until the client leaves, or a signal comes."""
    if not http and sys.stdin.isatty():
        raise UsageError(
            "coa mcp serve speaks with the program that starts it, and this is a terminal. Name "
            "the command in an MCP client, or serve with --http."
        )
    sdk()

    async def main() -> None:
        work = asyncio.current_task()
        assert work is not None
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, work.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            async with offered(serving, note, tools_only) as server:
                await (_over_http(server, serving, note) if http else _over_stdio(server, note))

    asyncio.run(main())


@contextlib.asynccontextmanager
async def offered(serving: Serving, note: Note, tools_only: bool) -> AsyncIterator[Any]:
    """The SDK's server with what is offered, opened."""
    async with contextlib.AsyncExitStack() as stack:
        if tools_only:
            (env, *others) = default_environments(
                serving.env,
                tools=serving.tools,
                settings=serving.settings,
                grammar=serving.grammars[0] if serving.grammars else "auto",
                note=note,
            )
            if others:
                raise UsageError("--tools-only offers the tools of one environment; name one.")
            opening = open_environments((env,), [ANY], serving.tools, rollouts=cores())
            opened = await stack.enter_async_context(opening)
            tools = (await stack.enter_async_context(opened.session(ANY))).tools
            listed, answer, name = (
                [_described(each) for each in tools.values()],
                _runs(tools),
                env.name,
            )
        else:
            session = await stack.enter_async_context(session_of(serving, note))
            listed, answer, name = [_agent(session)], _asks(session), next(iter(session.agents))
        note(f"offering {', '.join(each['name'] for each in listed)} of {name} over MCP")
        yield _server(name, listed, answer)


def _server(name: str, listed: Sequence[Json], answer: Answer) -> Any:
    from mcp.server.lowlevel import Server
    from mcp_types import CallToolResult, ListToolsResult, TextContent
    from mcp_types import Tool as ListedTool

    tools = [ListedTool.model_validate(each) for each in listed]
    known = [tool.name for tool in tools]

    async def list_tools(context: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(tools=tools)

    async def call_tool(context: Any, params: Any) -> CallToolResult:
        try:
            if params.name not in known:
                raise Refused(f"there is no tool {shown(params.name)}; there is {known}.")
            text, structured, failed = await answer(params.name, params.arguments or {})
        except Refused as refused:
            text, structured, failed = str(refused), None, True
        return CallToolResult(
            content=[TextContent(type="text", text=text)],
            structured_content=structured,
            is_error=failed,
        )

    itself = version("chain-of-agents")
    return Server(name, version=itself, on_list_tools=list_tools, on_call_tool=call_tool)


# -- what is offered --------------------------------------------------------------------------


def _agent(session: ServingSession) -> Json:
    """The agent as a tool."""
    agent = next(iter(session.agents.values()))
    tools = ", ".join(agent.grammar.tool_roles)
    about = f"Answer a question with a chain of agents{f' that use {tools}' if tools else ''}."
    return {
        "name": AGENT,
        "description": about,
        "inputSchema": _QUESTION,
        "outputSchema": _ANSWERED,
    }


def _asks(session: ServingSession) -> Answer:
    """Answers questions, each with a rollout."""
    name, most = next(iter(session.agents)), session.limits.characters

    async def answer(tool: str, arguments: Json) -> tuple[str, Json | None, bool]:
        question = arguments.get("question")
        if not isinstance(question, str) or not question.strip():
            raise Refused(f"question is {shown(question)}, expected a text.")
        if len(question) > most:
            raise Refused(f"the question has {len(question)} characters; {most} are allowed.")
        reply, told = Reply(ChatRequest(name, question.strip())), list[Piece]()
        work = session.start(reply, told.append)
        try:
            trajectory = await work
        except (EngineError, ToolError, OSError) as error:
            session.log_error(reply.id, str(error))
            raise Refused("what the agent works with failed; try again.") from None
        finally:
            work.cancel()
        session.log_request(reply, "mcp", trajectory)
        usage = trajectory.usage
        made: Json = {"answer": trajectory.answer, "stop": str(trajectory.stop)}
        made |= {"chain": chain_of(told), "turns": usage.turns, "tool_calls": usage.tool_calls}
        made["sampled_tokens"] = usage.sampled_tokens
        if trajectory.answer is None:
            return f"There is no answer: the chain ended with {trajectory.stop}.", made, True
        return trajectory.answer, made, False

    return answer


def chain_of(pieces: Sequence[Piece]) -> list[Json]:
    """The blocks of a chain, whole, the accepted answer aside."""
    blocks: dict[int, Json] = {}
    for piece in pieces:
        if not piece.accepted:
            empty = {"role": piece.role, "kind": piece.kind, "text": ""}
            blocks.setdefault(piece.block, empty)["text"] += piece.text
    return list(blocks.values())


def _described(tool: Tool) -> Json:
    """A tool of ours as a client sees it."""
    schema: Json = json.loads(tool.schema) if tool.body == "json" and tool.schema else {}
    if not schema and tool.body != "json":
        only = _only(tool)
        schema = {"properties": {only: {"type": "string"}}, "required": [only]}
    return {
        "name": tool.name,
        "description": tool.about,
        "inputSchema": {"type": "object", **schema},
    }


def _only(tool: Tool) -> str:
    """What the only argument of a tool that takes text is called."""
    return tool.parameter or ("program" if tool.body == "code" else "text")


def _runs(tools: Toolbox) -> Answer:
    """Runs the tools themselves, in one session that all clients share."""

    async def answer(name: str, arguments: Json) -> tuple[str, None, bool]:
        tool = tools[name]
        argument = json.dumps(arguments, ensure_ascii=False)
        if tool.body != "json":
            given = arguments.get(_only(tool))
            if not isinstance(given, str):
                raise Refused(f"{_only(tool)} is {shown(given)}, expected a text.")
            argument = given
        seen = await tools.call(ToolCall(name, argument))
        return seen.text, None, seen.failure is not None

    return answer


# -- transports -------------------------------------------------------------------------------


async def _over_stdio(server: Any, note: Note) -> None:
    """Serve the one client on stdin and stdout, which from now on are nobody else's."""
    loop = asyncio.get_running_loop()
    wires = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    reader = asyncio.StreamReader(limit=MAX_BYTES)
    try:
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(wires[0], "rb")
        )
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(wires[1], "wb")
        )
    except ValueError:
        raise UsageError(
            "coa mcp serve speaks through pipes, and stdin or stdout is none. Let an MCP client "
            "start it, or serve with --http."
        ) from None
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    async with message_streams(reader, writer, lambda why: note(why) if why else None) as streams:
        await server.run(*streams, server.create_initialization_options())


async def _over_http(server: Any, serving: Serving, note: Note) -> None:
    """Serve whoever may come in until a signal comes."""
    import uvicorn
    from mcp.server.transport_security import TransportSecuritySettings
    from starlette.datastructures import Headers

    from coa.serving.app import UnsignalledServer, refusal

    # NOTE: the SDK's own check knows no key; a page in a browser has a name that ours refuses.
    unchecked = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(streamable_http_path=PATH, transport_security=unchecked)

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        strange = scope["type"] == "http" and refuse_stranger(serving.key, Headers(scope=scope))
        await (refusal(strange) if strange else app)(scope, receive, send)

    with bound(serving) as (door, url):
        note(f"serving on {url}{PATH}")
        config = uvicorn.Config(guarded, ws="none", access_log=False, log_config=None)
        running = UnsignalledServer(config)
        work = asyncio.create_task(running.serve(sockets=[door]))
        try:
            await asyncio.shield(work)
        finally:
            running.should_exit = running.force_exit = True
            await asyncio.wait([work])
