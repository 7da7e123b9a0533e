"""HTTP/1.1 on loopback, as the proxy and the receiver of a recording speak it with a program.

`Loopback` listens and `ProgramConnection` is one connection of a program; what is answered is up to
those who inherit. A program that says no HTTP, hangs up or never goes on costs only itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import h11

from coa.errors import UsageError

_CHUNK = 1 << 18
_BUFFER = 1 << 20
_HEAD = 1 << 20
"""Most for the head of a request."""


class HungUp(Exception):
    """The program closed the connection before it had its answer."""


class ProgramConnection:
    """HTTP/1.1 with a program: one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD)
        self._asked = asyncio.Event()
        """Set when the whole request is here."""
        self._unsent, self._body = bytearray(), bytearray()

    async def request(self) -> h11.Request | None:
        """The head of the next request; None: there is none."""
        self._asked.clear()
        event = await self._event()
        return event if isinstance(event, h11.Request) else None

    async def body(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._event(), h11.Data):
            yield bytes(event.data)
        if isinstance(event, h11.ConnectionClosed):
            raise HungUp
        self._asked.set()

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[]))
            self._http.receive_data(await self._reader.read(_CHUNK))
        return event

    async def gone(self) -> None:
        """Returns when the program closed the connection."""
        await self._asked.wait()
        with suppress(OSError):
            while piece := await self._reader.read(_CHUNK):
                self._http.receive_data(piece)  # of the next request, which some send at once

    async def send(self, event: Any) -> None:
        """What is sent before the event loop turns goes out in one piece: the head with the body,
        and those events of a stream that came together."""
        if not (self._unsent or self._body):
            asyncio.get_running_loop().call_soon(self._flush)
        if isinstance(event, h11.Data):
            self._body += event.data
        else:
            self._unsent += self._framed() + (self._http.send(event) or b"")
        if len(self._body) > _CHUNK or isinstance(event, h11.EndOfMessage):
            self._flush()
        await self._writer.drain()  # it waits only where the program does not read

    def _framed(self) -> bytes:
        """The part of a body that waits, as HTTP sends it."""
        piece, self._body = bytes(self._body), bytearray()
        return (self._http.send(h11.Data(data=piece)) or b"") if piece else b""

    def _flush(self) -> None:
        piece, self._unsent = bytes(self._unsent) + self._framed(), bytearray()
        if piece:
            self._writer.write(piece)

    async def answer(self, status: int, content: bytes, *headers: tuple[str, str]) -> None:
        """Send a whole response."""
        length = ("Content-Length", str(len(content)))
        await self.send(h11.Response(status_code=status, headers=[length, *headers]))
        await self.send(h11.Data(data=content))
        await self.send(h11.EndOfMessage())

    async def refuse(self, status: int, words: str) -> None:
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self.answer(status, words.encode(), ("Connection", "close"))

    def goes_on(self) -> bool:
        """Whether another request may come; then everything is ready for it."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def close(self) -> None:
        """What was sent still arrives; a body that was not sent to its end is seen to be cut."""
        self._flush()
        self._writer.close()


class Loopback:
    """Listens on 127.0.0.1 while it is open."""

    def __init__(self, port: int) -> None:
        self.url = ""
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """Done when nothing more can be recorded, with the reason."""
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()

    async def _answer(self, connection: ProgramConnection, head: h11.Request) -> None:
        """Answer one request."""
        raise NotImplementedError

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        try:
            server = await asyncio.start_server(
                self._connected, "127.0.0.1", self._port, limit=_BUFFER, backlog=1024
            )
        except OSError as wrong:
            raise UsageError(f"port {self._port}: {wrong.strerror}. Choose another.") from None
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = ProgramConnection(reader, writer)
        try:
            while (request := await connection.request()) is not None:
                await self._answer(connection, request)
                if not connection.goes_on():
                    break
        except h11.RemoteProtocolError as wrong:
            with suppress(OSError, h11.LocalProtocolError):
                await connection.refuse(wrong.error_status_hint, "not HTTP")
        except (OSError, HungUp):
            pass  # the program is gone
        except asyncio.CancelledError:
            pass  # the recording is over
        except Exception as ours:
            self._fail(ours)
        finally:
            self._tasks.discard(task)
            connection.close()

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(error)
