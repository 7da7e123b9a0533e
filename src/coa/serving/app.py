"""The HTTP side: who may ask, which path means what, and how a chain is streamed.

    GET  /health                liveness, without a key
    GET  /v1/models[/NAME]      the agents
    POST /v1/chat/completions   one rollout, whole or as server-sent events

Every error has the shape of OpenAI's. A request that asks for a rollout is a plain ASGI function
and no `Response`, because it has to watch for its client's leaving while it works.
"""

from __future__ import annotations

import asyncio
import textwrap
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Literal

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coa.errors import EngineError, ToolError
from coa.io.runs import Json
from coa.serving.agents import Agent
from coa.serving.errors import Refused, our_fault, unavailable
from coa.serving.replies import DONE, STILL_HERE, Reply, as_json, event, public_weights
from coa.serving.request import Asked, read_request
from coa.serving.server import Lock
from coa.serving.session import Desk, Played, Say, Ticket
from coa.serving.stream import Piece
from coa.view.terminal import fold, harmless

# ------------------------------------------------------------------------------------------------
# Refused: why a request gets no answer, in the words and the shape that OpenAI's clients expect.
#
#     {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
#
# Whose fault it is decides the status: 4xx is the client's, 503 the world's, 500 ours. What a
# client reads never holds a path, a traceback or an address of this side; the log does.
# ------------------------------------------------------------------------------------------------


JSON = {"content-type": "application/json"}
EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # or a proxy keeps the steps until the end
}
QUIET_S = 15.0
"""A stream that is silent for so long gets a comment."""
BODY_S = 30.0
"""Most for sending a body."""
SPARE_REQUESTS = 256
"""Answered at once beside rollouts and those that wait: lists of models, bodies that arrive."""
PATIENCE = 8
"""A body that is too large is read on for so many times the limit, and dropped: a client that is
cut off while it still writes would not read why."""


class ClientStalled(Exception):
    """The client takes nothing any more."""


def make_app(desk: Desk, key: str, started: int) -> ASGIApp:
    """The ASGI application; without a key only this machine may ask."""

    async def health(request: Request) -> Response:
        state = "stopping" if desk.stopping else "ok"
        return Response(as_json({"status": state}), headers=JSON)

    async def models(request: Request) -> Response:
        listed = [_model(desk, name, started) for name in desk.agents]
        return Response(as_json({"object": "list", "data": listed}), headers=JSON)

    async def model(request: Request) -> Response:
        name = desk.agent(request.path_params["name"]).name
        return Response(as_json(_model(desk, name, started)), headers=JSON)

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused), error
        log_refusal(desk.log, request.scope, error)
        return refusal(error)

    async def no_such_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), error
        found = f"{request.method} {request.url.path[:100]}"
        message = f"{found}: {error.detail}. There are POST /v1/chat/completions, GET /v1/models."
        refused = Refused(message, error.status_code, code="unknown_url")
        log_refusal(desk.log, request.scope, refused)
        made = refusal(refused)
        made.headers.update(error.headers or {})
        return made

    async def bug(request: Request, error: Exception) -> Response:
        return refusal(our_fault())  # uvicorn logs the traceback

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", Chat(desk), methods=["POST"]),
        ],
        middleware=[Middleware(RequestGuard, lock=Lock(key), most=_most(desk), log=desk.log)],
        exception_handlers={Refused: refuse, HTTPException: no_such_path, Exception: bug},
    )


def _most(desk: Desk) -> int:
    return desk.limits.rollouts + desk.limits.queue + SPARE_REQUESTS


def _model(desk: Desk, name: str, started: int) -> Json:
    agent = desk.agents[name]
    about = {"grammar": agent.grammar.name, "tools": list(agent.grammar.tool_roles)}
    about["weights"] = public_weights(desk.engine.weights)
    made = {"id": name, "object": "model", "created": started, "owned_by": "coa", "coa": about}
    return made


def refusal(refused: Refused) -> Response:
    headers = {**JSON, **refused.headers()}
    return Response(as_json(refused.to_json()), refused.status, headers)


class RequestGuard:
    """Lets nobody through who may not ask, nor too many at once; liveness is for everybody."""

    def __init__(self, app: ASGIApp, lock: Lock, most: int, log: Say) -> None:
        self._app, self._lock, self._most, self._log = app, lock, most, log
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        refused = self._lock.refuses(Headers(scope=scope))
        if refused is None and self._inside >= self._most:
            refused = unavailable("too many requests at once; try again.", "busy")
        if refused is not None:
            log_refusal(self._log, scope, refused)
            await refusal(refused)(scope, receive, send)
            return
        self._inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= 1


def log_refusal(log: Say, scope: Scope, refused: Refused) -> None:
    """One line, also when a path has line breaks in it."""
    what = fold(f"{scope['method'][:10]} {scope['path']}", 70)
    log(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {what} {refused.status} {refused.code}")


class Chat:
    """POST /v1/chat/completions."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        desk = self._desk
        try:
            asked = read_request(await self._body(Request(scope, receive)), desk.limits)
            agent = desk.agent(asked.model)
            reply = Reply(agent.name, asked.include_usage, asked.ignored)
            with desk.take() as ticket:
                exchange = HttpExchange(desk, asked, reply, receive, send)
                await (exchange.stream if asked.stream else exchange.whole)(agent, ticket)
        except Refused as refused:
            log_refusal(desk.log, scope, refused)
            await refusal(refused)(scope, receive, send)
        except ClientDisconnect:
            pass  # it left before it had asked
        except ClientStalled:
            pass  # uvicorn closes what has no end

    async def _body(self, request: Request) -> bytes:
        limit = self._desk.limits.body_bytes
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # no page can send it to us without asking the browser
            message = f"content-type is {kind[:60]!r}, expected 'application/json'."
            raise Refused(message, 415, code="unsupported_media_type")
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    size += len(part)
                    body += part if size <= limit else b""
                    if size > PATIENCE * limit:
                        break
        except TimeoutError:
            message = f"the body did not arrive within {BODY_S:g} s."
            raise Refused(message, 408, code="timeout") from None
        if size > limit:
            message = f"the body has more than {limit} bytes; ask a shorter question."
            raise Refused(message, 413, code="body_too_large")
        return bytes(body)


class HttpExchange:
    """One request that was understood, and its client."""

    def __init__(
        self, desk: Desk, asked: Asked, reply: Reply, receive: Receive, send: Send
    ) -> None:
        self._desk, self._asked, self._reply = desk, asked, reply
        self._receive, self._send = receive, send

    async def whole(self, agent: Agent, ticket: Ticket) -> None:
        pieces: list[Piece] = []
        async with self._working(agent, ticket, pieces.append) as work:
            await asyncio.wait({work})
            outcome = self._outcome(work)
        if isinstance(outcome, Refused):
            await self._refuse(outcome)
        elif outcome is None:
            self._note("499 client gone")
        else:
            record = self._reply.whole(pieces, outcome.trajectory)
            self._note("200", outcome)
            headers = {**JSON, "x-request-id": self._reply.id}
            await self._answer(Response(as_json(record), headers=headers))

    async def stream(self, agent: Agent, ticket: Ticket) -> None:
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        async with self._working(agent, ticket, pieces.put_nowait) as work:
            work.add_done_callback(lambda done: pieces.put_nowait(None))
            try:
                first = await self._next(pieces)
                if first is None and isinstance(refused := self._outcome(work), Refused):
                    # Nothing was sent yet, so it has its status: clients act on that.
                    await self._refuse(refused)
                    return
                headers = Response(headers={**EVENTS, "x-request-id": self._reply.id})
                del headers.headers["content-length"]
                await self._start(200, headers.raw_headers)
                await self._write(event(self._reply.opening()))
                await self._tell(pieces, first)
                outcome = self._outcome(work)
                await self._write(self._ending(outcome), last=True)
            except ClientStalled:
                self._note("499 client stalled")

    async def _next(self, pieces: asyncio.Queue[Piece | None]) -> Piece | Literal["quiet"] | None:
        """What comes next: a piece, None at the end; or that nothing came for a while."""
        try:
            async with asyncio.timeout(QUIET_S):
                return await pieces.get()
        except TimeoutError:
            return "quiet"

    async def _tell(
        self, pieces: asyncio.Queue[Piece | None], piece: Piece | Literal["quiet"] | None
    ) -> None:
        """Send pieces as they come, those that came together in one go."""
        while piece is not None:
            if piece == "quiet":
                await self._write(STILL_HERE)
                piece = await self._next(pieces)
                continue
            events = [event(self._reply.piece(piece))]
            while not pieces.empty() and (piece := pieces.get_nowait()) is not None:
                events.append(event(self._reply.piece(piece)))
            await self._write(b"".join(events))
            if piece is not None:
                piece = await self._next(pieces)

    def _ending(self, outcome: Played | Refused | None) -> bytes:
        """The last events. A stream has begun with 200, so that a failure is an event, too."""
        if outcome is None:
            self._note("499 client gone")
            return DONE
        if isinstance(outcome, Refused):
            self._note(f"{outcome.status} {outcome.code}")
            return event(outcome.to_json()) + DONE
        self._note("200", outcome)
        chunks = [self._reply.answer(outcome.answer)] if outcome.answer is not None else []
        chunks += self._reply.closing(outcome.trajectory)
        return b"".join(map(event, chunks)) + DONE

    @asynccontextmanager
    async def _working(
        self, agent: Agent, ticket: Ticket, tell: Callable[[Piece], None]
    ) -> AsyncIterator[asyncio.Task[Played]]:
        """The rollout, which ends when its client goes away, and when this does."""
        work = self._desk.start(self._asked, agent, ticket, self._reply, tell)
        gone = asyncio.create_task(self._until_gone())
        gone.add_done_callback(lambda done: work.cancel())
        try:
            yield work
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait({work, gone})

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _outcome(self, work: asyncio.Task[Played]) -> Played | Refused | None:
        """How a rollout ended; None when its client went away."""
        if work.cancelled():
            return self._desk.stopped() if self._desk.stopping else None
        error = work.exception()
        if error is None:
            return work.result()
        if isinstance(error, Refused):
            return error
        if isinstance(error, EngineError | ToolError | OSError):
            self._desk.log_error(self._reply.id, str(error))
            return unavailable("what the agent works with failed; try again.", "unavailable")
        told = harmless("".join(traceback.format_exception(error)))
        # Indented: no line of it can pass for one of the log's own.
        self._desk.log(f"{self._reply.id} a bug:\n{textwrap.indent(told, '    ')}")
        return our_fault()

    def _note(self, how: str, played: Played | None = None) -> None:
        trajectory = played.trajectory if played is not None else None
        if trajectory is not None:
            how = f"{how} {trajectory.stop}"
        self._desk.note(self._reply, self._asked, how, trajectory)

    async def _refuse(self, refused: Refused) -> None:
        self._note(f"{refused.status} {refused.code}")
        await self._answer(refusal(refused))

    async def _answer(self, response: Response) -> None:
        await self._start(response.status_code, response.raw_headers)
        await self._write(bytes(response.body), last=True)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._pass({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, body: bytes, last: bool = False) -> None:
        await self._pass({"type": "http.response.body", "body": body, "more_body": not last})

    async def _pass(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._desk.limits.stall_s):
                with suppress(OSError):  # it went away meanwhile, which `_until_gone` notices
                    await self._send(message)
        except TimeoutError:
            raise ClientStalled from None
