"""MCP servers that run: started when they are needed, bounded in what they send, and started again.

What a server can do to us is this: be silent, end, send what is no message, or too much of it, or
requests that nobody asked for. Each costs the calls that wait for it, never a rollout's or this
process's end. A connection lives in a task of its own, since the SDK wants to be left where it was
entered and calls come from many tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shlex
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coa.errors import CoaError, ConfigError, MissingExtra, ToolError, ToolMistake
from coa.io.progress import say
from coa.io.runs import Json
from coa.tools.arguments import plain_words

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.shared.message import SessionMessage

    from coa.tools.mcp import McpTools

    Incoming = MemoryObjectReceiveStream[SessionMessage | Exception]
    Outgoing = MemoryObjectSendStream[SessionMessage]

MAX_BYTES = 8 << 20
"""Of one message; results are cut to `max_chars` after that."""
_PAGES = 20
SERVERS = 32
"""Most servers of rollouts of their own at a time; further rollouts wait."""
PROBE_S = 5.0
"""For a server in doubt, after a call that got no answer for instance, to list its tools."""
ENDING_S = 2.0
"""For a program to end by itself, and again when it is asked to."""
FOLDER = "{folder}"
"""In a command: a fresh folder for the server of each rollout."""
_SHOWN_FOLDER = "/folder"
"""What a model calls it, so that chains do not depend on where it was."""
VARIABLE = re.compile(r"\$\{(\w+)\}")
"""In a command, a URL or a header: an environment variable by its name."""
_INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
"""What every program gets; the SDK's list for POSIX and two more that hold no secret."""
_QUEUE, _WAITING = 64, 256
"""Messages that wait for a server to read them, and tasks that may wait behind these."""


class McpServer:
    """A server that is started when it is needed, and again when it has ended."""

    def __init__(self, source: McpTools, like: McpServer | None = None) -> None:
        """`like`: another one, whose tools it is expected to list."""
        self.source = source
        self._held: McpConnection | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._starting = asyncio.Lock()
        self._listing: dict[str, str] = {} if like is None else like._listing
        """What it listed last, by name."""

    async def call(self, tool: str, arguments: Json) -> str:
        """What a tool returns, as text; whatever goes wrong is one of our errors."""
        from mcp.shared.exceptions import MCPError

        held, label = await self.connection(), self.source.label
        try:
            result = await held.call(tool, self._renamed(arguments, _SHOWN_FOLDER, held.folder))
        except asyncio.CancelledError:  # it took too long, or nobody waits any more
            held.is_doubtful = True
            raise
        except MCPError as error:
            raise self._fault(held, error) from None
        except Exception as error:
            held.is_doubtful = True
            did = "sent what is no result" if held.is_alive else "ended during the call"
            raise ToolError(f"{label} {did} ({type(error).__name__}).") from None
        if not hasattr(result, "content"):
            raise ToolError(f"{label} asks for more before it answers, which is refused.")
        text = held.shown(in_words(result))
        if result.is_error:
            raise (ToolMistake if self.source.errors == "model" else ToolError)(text)
        return text

    def _renamed(self, value: Any, old: str, new: str) -> Any:
        """Arguments with the folder of this server where the model wrote what it knows of it."""
        if not new:
            return value
        if isinstance(value, dict):
            return {key: self._renamed(each, old, new) for key, each in value.items()}
        if isinstance(value, list):
            return [self._renamed(each, old, new) for each in value]
        begins = isinstance(value, str) and (value == old or value.startswith(f"{old}/"))
        return new + value[len(old) :] if begins else value

    def _fault(self, held: McpConnection, error: Any) -> CoaError:
        """Whose fault it is that a call failed."""
        from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS

        label = self.source.label
        if error.code == INVALID_PARAMS:
            return ToolMistake(held.shown(str(error.message)))
        held.is_doubtful = True
        again = "The next call starts it again, and what it remembered is gone."
        if held.why:
            return ToolError(f"{label} {held.why}. {again}")
        if error.code == CONNECTION_CLOSED and not held.is_alive:
            return ToolError(f"{label} ended during the call. {again}")
        return ToolError(f"{label}: {held.shown(str(error.message))}")

    async def connection(self) -> McpConnection:
        """The server, running: started, or started again, or asked whether it still answers."""
        async with self._starting:
            held = self._held
            if held is not None and held.is_alive and (held.is_doubtful or held.has_changed):
                held.is_doubtful = held.has_changed = False
                try:
                    async with asyncio.timeout(PROBE_S):
                        self._compare(await held.listing())
                except Exception:
                    await held.close()
            if held is None or not held.is_alive:
                if held is not None:
                    await held.close()
                held = McpConnection(self.source, await self._own_folder())
                await held.open()
                self._held = held
                self._compare(held.tools)
            return held

    async def _own_folder(self) -> str:
        if self._folder is None and FOLDER in self.source.command:
            self._folder = tempfile.TemporaryDirectory(prefix="coa-mcp-")
            if files := self.source.files:
                where = Path(self.source.folder, files)
                if not where.is_dir():
                    raise ConfigError(
                        f"mcp server {self.source.shown!r}: files: no folder {where}."
                    )
                target = Path(self._folder.name)
                await asyncio.to_thread(shutil.copytree, where, target, dirs_exist_ok=True)
        return self._folder.name if self._folder is not None else ""

    def _compare(self, tools: Sequence[Any]) -> None:
        """Say that a server lists other tools than before."""
        now = {
            each.name: json.dumps([each.description, each.input_schema], sort_keys=True)
            for each in tools
            if not self.source.tools or each.name in self.source.tools
        }
        before, self._listing = self._listing, now
        if not before or now == before:
            return
        changes = [
            *(f"{name} is new" for name in now.keys() - before.keys()),
            *(f"{name} is gone" for name in before.keys() - now.keys()),
            *(f"{name} is another" for name in now if before.get(name, now[name]) != now[name]),
        ]
        say(
            f"coa: mcp server {self.source.shown!r}: its tools changed while it was in use "
            f"({plain_words(', '.join(sorted(changes)), 300)}). Models are still told what it "
            "listed at first."
        )

    async def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await held.close()
        if self._folder is not None:
            with contextlib.suppress(OSError):  # what a server wrote there may not be ours
                self._folder.cleanup()
            self._folder = None


class Pool:
    """Servers that serve one rollout each: none has seen another's work."""

    def __init__(self, source: McpTools, first: McpServer, most: int) -> None:
        self._source, self._first, self._fresh = source, first, [first]
        self._places = asyncio.Semaphore(most)

    @asynccontextmanager
    async def server(self) -> AsyncIterator[McpServer]:
        async with self._places:
            server = self._fresh.pop() if self._fresh else McpServer(self._source, self._first)
            try:
                await server.connection()
                yield server
            finally:
                await server.close()


class Lease:
    """The server of one rollout, which its tools share: the first that is opened takes it, and the
    last that is closed gives it back."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._stack, self._users = pool, AsyncExitStack(), 0
        self._server: McpServer | None = None

    @asynccontextmanager
    async def server(self) -> AsyncIterator[McpServer]:
        if self._server is None:
            self._server = await self._stack.enter_async_context(self._pool.server())
        self._users += 1
        try:
            yield self._server
        finally:
            self._users -= 1
            if not self._users:
                self._server = None
                await self._stack.aclose()


class McpConnection:
    """One running server. What the SDK opens is entered and left by one task, which lives as long
    as the connection does; calls come from any task."""

    def __init__(self, source: McpTools, folder: str) -> None:
        self.source, self.folder = source, folder
        self.tools: list[Any] = []
        self.about = ""
        """What it calls itself, and its version."""
        self.why = ""
        """What it did that nobody has to bear."""
        self.is_doubtful = self.has_changed = False
        self._values = source.variables()
        self._client: Any = None
        self._is_open = self._has_ended = False
        self._over = asyncio.Event()
        self._last_words = b""

    @property
    def is_alive(self) -> bool:
        return self._client is not None and not self._has_ended

    def shown(self, text: str) -> str:
        """Text of the server without the values of variables and the place of its folder."""
        for name, value in self._values.items():
            if len(value) >= 4:
                text = text.replace(value, f"${{{name}}}")
        if self.folder:
            text = text.replace(os.path.realpath(self.folder), _SHOWN_FOLDER)
            text = text.replace(self.folder, _SHOWN_FOLDER)
        return text

    def _filled(self, text: str) -> str:
        text = VARIABLE.sub(lambda match: self._values[match[1]], text)
        return text.replace(FOLDER, self.folder)

    async def open(self) -> None:
        """Start it; a server that does not start, or lists no tools, is an error."""
        sdk()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(ready))
        try:
            await asyncio.wait([ready], timeout=self.source.start_s)
        except BaseException:
            await self.close()
            raise
        error = ready.exception() if ready.done() else TimeoutError()
        if error is not None:
            ready.cancel()
            await self.close()
            raise self._not_started(error)

    def _not_started(self, error: BaseException) -> CoaError:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, CoaError):
            return error
        why = self.why or f"{type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error, TimeoutError):
            why = f"it listed no tools within {self.source.start_s:g} s"
        said = self._last_words.decode("utf-8", "replace").strip().splitlines()
        last = f" Its last words: {plain_words(self.shown(said[-1]), 200)}" if said else ""
        start = f"mcp server {self.source.shown!r}: did not start: "
        return ToolError(f"{start}{plain_words(self.shown(why), 300).rstrip('.')}.{last}")

    async def close(self) -> None:
        """End it; what fails meanwhile costs nobody anything."""
        self._over.set()
        if not self._is_open:
            self._life.cancel()
        done, _ = await asyncio.wait([self._life], timeout=3 * ENDING_S + 2)
        if not done:
            self._life.cancel()
            await asyncio.wait([self._life], timeout=ENDING_S)

    async def _live(self, ready: asyncio.Future[None]) -> None:
        from mcp import Client
        from mcp_types import Implementation

        transport = self._program() if self.source.command else self._address()
        itself = Implementation(name="coa", version=version("chain-of-agents"))
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(
                    Client(transport, message_handler=self._heard, client_info=itself, cache=None)
                )
                self._client = client
                self.tools = await self.listing()
                if (named := client.server_info) is not None:
                    self.about = f"{named.name} {named.version}"
                await self._listen(client, stack)
                if not ready.done():
                    self._is_open = True
                    ready.set_result(None)
                await self._over.wait()
        except (Exception, BaseExceptionGroup, asyncio.CancelledError) as error:
            if not ready.done():
                ready.set_exception(error)
                ready.exception()  # it is looked at, also when nobody waits any more
        finally:
            self._client = None

    async def _listen(self, client: Any, stack: AsyncExitStack) -> None:
        """Hear of changed tools; servers before 2026-07-28 tell without being asked."""
        from mcp_types.version import MODERN_PROTOCOL_VERSIONS

        offered = client.server_capabilities.tools
        if client.protocol_version in MODERN_PROTOCOL_VERSIONS and offered and offered.list_changed:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(PROBE_S):
                    await stack.enter_async_context(client.listen(tools_list_changed=True))

    async def _heard(self, message: Any) -> None:
        if getattr(message, "method", "") == "notifications/tools/list_changed":
            self.has_changed = True

    async def listing(self) -> list[Any]:
        """All tools that it lists now, a page after the other."""
        from mcp_types import PaginatedRequestParams

        found: list[Any] = []
        cursor = None
        for _ in range(_PAGES):
            params = PaginatedRequestParams(cursor=cursor) if cursor else None
            page = await self._client.session.list_tools(params=params)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                return found
        raise ToolError(f"mcp server {self.source.shown!r}: its list of tools has no end.")

    async def call(self, tool: str, arguments: Json) -> Any:
        """The result of a call. The SDK's own `call_tool` would check it against the server's
        schema, and a stranger's pattern can hold up this process for ever."""
        from mcp_types import CallToolRequest, CallToolRequestParams

        params = CallToolRequestParams(name=tool, arguments=arguments)
        return await self._client.session.send_request(CallToolRequest(params=params), _results())

    # -- transports: pairs of streams, as the SDK wants them ------------------------------------

    @asynccontextmanager
    async def _address(self) -> AsyncIterator[Any]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        async def bound(response: Any) -> None:
            if response.headers.get("content-encoding", "identity") != "identity":
                self.why = "compresses what it sends, although it is asked not to"
                raise httpx2.StreamError(self.why)
            has_events = "event-stream" in response.headers.get("content-type", "")
            response.stream = _bounded()(response.stream, has_events)

        headers = {"Accept-Encoding": "identity"}
        for header in self.source.headers:
            name, _, value = self._filled(header).partition(":")
            headers[name] = value.strip()
        client = httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(self.source.start_s, read=None),  # a call has its own limit
            event_hooks={"response": [bound]},
        )
        url = self._filled(self.source.url)
        async with (
            client,
            streamable_http_client(
                url, http_client=client, max_sse_event_size=MAX_BYTES
            ) as streams,
        ):
            yield streams

    @asynccontextmanager
    async def _program(self) -> AsyncIterator[Any]:
        words = [self._filled(word) for word in shlex.split(self.source.command)]
        given = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        given |= {name: self._values[name] for name in self.source.env}
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=given,
                cwd=self.source.folder or None,
                limit=MAX_BYTES,
                start_new_session=True,  # Ctrl-C is for us, and what it started ends with it
            )
        except (OSError, ValueError) as wrong:
            why = wrong.strerror if isinstance(wrong, OSError) else str(wrong)
            raise ConfigError(
                f"mcp server {self.source.shown!r}: {words[0]!r} cannot be started: {why}. Install "
                "it, or give its path."
            ) from None
        assert process.stdin and process.stdout and process.stderr
        listener = asyncio.create_task(self._keep_last_words(process.stderr))
        try:
            async with message_streams(process.stdout, process.stdin, self._ended) as streams:
                yield streams
        finally:
            listener.cancel()
            await _end(process)

    def _ended(self, why: str) -> None:
        self._has_ended, self.why = True, self.why or why

    async def _keep_last_words(self, stderr: asyncio.StreamReader) -> None:
        while part := await stderr.read(1 << 16):
            self._last_words = (self._last_words + part)[-2000:]


@cache
def _bounded() -> Any:
    """The class of a response's body, of which a message has a most in size; of events, which may
    go on for ever, each line."""
    import httpx2

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, stream: Any, has_events: bool) -> None:
            self._stream, self._has_events = stream, has_events

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for part in self._stream:
                size += len(part)
                if self._has_events and b"\n" in part:
                    size = len(part) - part.rfind(b"\n")
                if size > MAX_BYTES:
                    raise httpx2.StreamError(f"the answer has more than {MAX_BYTES >> 20} MB")
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    return Bounded


@asynccontextmanager
async def message_streams(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ended: Callable[[str], None]
) -> AsyncIterator[tuple[Incoming, Outgoing]]:
    """Messages, one on a line, as the streams that the SDK works on. `ended` is told when no more
    will come, and why, where that is somebody's fault. Lines that are no messages are skipped: some
    programs print a greeting."""
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    arriving, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, leaving = anyio.create_memory_object_stream[SessionMessage](_QUEUE)

    async def read() -> None:
        why = ""
        try:
            while line := await reader.readline():
                if leaving.statistics().tasks_waiting_send > _WAITING:
                    why = "sends requests and does not read what it is sent"
                    return
                with contextlib.suppress(ValueError):
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    await arriving.send(SessionMessage(message))
        except ValueError:  # of readline
            why = f"sent a message of more than {MAX_BYTES >> 20} MB"
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
            pass
        finally:
            ended(why)
            arriving.close()

    async def write() -> None:
        with contextlib.suppress(OSError):
            async for message in leaving:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                writer.write(text.encode() + b"\n")
                await writer.drain()

    works = [asyncio.create_task(read()), asyncio.create_task(write())]
    try:
        yield incoming, outgoing
    finally:
        for stream in (incoming, outgoing):
            stream.close()
        await asyncio.wait(works[1:], timeout=0.2)  # what was said is still written
        for work in works:
            work.cancel()
        await asyncio.wait(works)
        for stream in (arriving, leaving):
            stream.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let a program end, ask it to, and end it with all that it started."""
    assert process.stdin is not None
    try:
        process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ENDING_S):
                    await process.wait()
                    break
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # what it did not read is dropped


@cache
def sdk() -> None:
    """Have the SDK, silent: what it logs of a stranger's mistakes is in our messages."""
    try:
        import httpx2  # noqa: F401
        from mcp import Client  # noqa: F401
    except ImportError as exc:
        raise MissingExtra("An MCP server", "mcp") from exc
    for name in ("mcp", "client", "httpx2"):
        logging.getLogger(name).addHandler(logging.NullHandler())


@cache
def _results() -> Any:
    from mcp_types import CallToolResult, InputRequiredResult
    from pydantic import TypeAdapter

    return TypeAdapter(CallToolResult | InputRequiredResult)


# -- what a server returns --------------------------------------------------------------------


def in_words(result: Any) -> str:
    """The text of a result; what is no text is named, and structured content is not said twice."""
    parts = [_shown(each) for each in result.content]
    value = result.structured_content
    if value is not None:
        texts = [_read(each.text) for each in result.content if each.type == "text"]
        alone = isinstance(value, dict) and len(value) == 1
        inner = value.get("result", value) if alone else value
        if not (value in texts or inner in texts or texts == inner):
            parts.append(json.dumps(value, ensure_ascii=False))
    return "\n".join(part for part in parts if part) or "The tool returned nothing."


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _shown(content: Any) -> str:
    if content.type == "text":
        return str(content.text)
    if content.type in ("image", "audio"):
        size = f"{len(content.data) * 3 // 4} bytes"
        return f"[{content.type}, {plain_words(content.mime_type, 60)}, {size}: not shown]"
    if content.type == "resource_link":
        return f"[resource {plain_words(content.name, 60)} at {plain_words(str(content.uri), 200)}]"
    held = content.resource
    named = f"[resource {plain_words(str(held.uri), 200)}"
    if hasattr(held, "text"):
        return f"{named}]\n{held.text}"
    kind = plain_words(held.mime_type or "bytes", 60)
    return f"{named}, {kind}, {len(held.blob) * 3 // 4} bytes: not shown]"
