"""The HTTP side: which path means what, and how a chain is streamed.

    GET  /health                liveness, without a key
    GET  /v1/models[/NAME]      the agents
    POST /v1/chat/completions   one rollout, whole or as server-sent events

Every error has the shape of OpenAI's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import textwrap
import time
import traceback
from collections.abc import Iterator
from typing import Literal

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from coa.errors import EngineError, ToolError
from coa.io.runs import Json
from coa.serving.replies import DONE, STILL_HERE, Piece, Reply, as_json, event, public_weights
from coa.serving.request import Refused, read_request, refuse_stranger, unavailable
from coa.serving.session import ServingSession
from coa.trajectory import Trajectory
from coa.view.terminal import harmless

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
KEEP_ALIVE_S = 75
"""Longer than clients and proxies keep an idle connection: when both end one at the same moment, a
request that was just sent on it is lost."""
BUG = Refused("the server made a mistake; its log says which.", 500, "server_error", "bug")


class ClientStalled(Exception):
    """The client takes nothing any more."""


class Connection(H11Protocol):
    """Drops what a client sends while its request is answered, and closes after the answer.

    A client that pipelines sends again what got no answer; h11 also bounds the headers of a
    request, which uvicorn's other protocols do not.
    """

    def data_received(self, received: bytes) -> None:
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            super().data_received(received)
        else:
            # What follows could be the rest of what was dropped, so nothing more is read as HTTP.
            cycle.keep_alive = False


class UnsignalledServer(uvicorn.Server):
    """uvicorn, leaving the signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: uvicorn would raise signals again at the end and not exit with 0."""
        yield


class Server(UnsignalledServer):
    """A server of our application."""

    def __init__(self, session: ServingSession) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(session),
                http=Connection,
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                # Cut rollouts still tell their clients; whoever does not listen is left after that.
                timeout_graceful_shutdown=math.ceil(session.serving.grace_s) + 5,
            )
        )


def make_app(session: ServingSession) -> ASGIApp:
    """The ASGI application; without a key only this machine may ask."""
    started = int(time.time())

    def described(name: str) -> Json:
        grammar = session.agents[name].grammar
        about = {"grammar": grammar.name, "tools": list(grammar.tool_roles)}
        about["weights"] = public_weights(session.engine.weights)
        return {"id": name, "object": "model", "created": started, "owned_by": "coa", "coa": about}

    async def health(request: Request) -> Response:
        return answer({"status": "stopping" if session.stopping else "ok"})

    async def models(request: Request) -> Response:
        return answer({"object": "list", "data": [described(name) for name in session.agents]})

    async def model(request: Request) -> Response:
        session.agent(request.path_params["name"])  # refuses one that is not there
        return answer(described(request.path_params["name"]))

    async def chat(request: Request) -> ChatExchange:
        body = await read_body(request, session.limits.body_bytes)
        asked = read_request(body, session.limits)
        session.agent(asked.model)  # refuses one that is not there
        return ChatExchange(session, Reply(asked))

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused), error
        session.log_refusal(request.method, request.url.path, error)
        return refusal(error)

    async def no_such_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), error
        found = f"{request.method} {request.url.path[:100]}"
        message = f"{found}: {error.detail}. There are POST /v1/chat/completions, GET /v1/models."
        refused = Refused(message, error.status_code, code="unknown_url")
        refused.headers.update(error.headers or {})
        return await refuse(request, refused)

    async def bug(request: Request, error: Exception) -> Response:
        return refusal(BUG)  # uvicorn logs the traceback

    async def left(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # before it had asked; nobody reads this

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ],
        exception_handlers={
            Refused: refuse,
            HTTPException: no_such_path,
            ClientDisconnect: left,
            Exception: bug,
        },
    )
    return _guarded(app, session)


def _guarded(app: ASGIApp, session: ServingSession) -> ASGIApp:
    """Lets nobody through who may not ask, nor too many at once; liveness is for everybody."""
    inside = 0

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal inside
        if scope["type"] != "http" or scope["path"] == "/health":
            await app(scope, receive, send)
            return
        limits = session.limits
        refused = refuse_stranger(session.serving.key, Headers(scope=scope))
        if refused is None and inside >= limits.rollouts + limits.queue + SPARE_REQUESTS:
            refused = unavailable("too many requests at once; try again.", "busy")
        if refused is not None:
            session.log_refusal(scope["method"], scope["path"], refused)
            await refusal(refused)(scope, receive, send)
            return
        inside += 1
        try:
            await app(scope, receive, send)
        finally:
            inside -= 1

    return guarded


def answer(record: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(as_json(record), status, {**JSON, **(headers or {})})


def refusal(refused: Refused) -> Response:
    return answer(refused.to_json(), refused.status, refused.headers)


async def read_body(request: Request, limit: int) -> bytes:
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
        raise Refused(
            f"the body did not arrive within {BODY_S:g} s.", 408, code="timeout"
        ) from None
    if size > limit:
        message = f"the body has more than {limit} bytes; ask a shorter question."
        raise Refused(message, 413, code="body_too_large")
    return bytes(body)


class ChatExchange:
    """A request that was understood, as the ASGI application that answers it.

    It is no `Response`, because it has to watch for its client's leaving while it works.
    """

    def __init__(self, session: ServingSession, reply: Reply) -> None:
        self._session, self._reply = session, reply
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        """What the rollout tells, and None when it is over."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tell = self._pieces.put_nowait
        work = self._session.start(self._reply, tell)
        work.add_done_callback(lambda done: tell(None))
        gone = asyncio.create_task(_until_gone(receive))
        gone.add_done_callback(lambda done: work.cancel())

        async def patient(message: Message) -> None:
            try:
                async with asyncio.timeout(self._session.limits.stall_s):
                    with contextlib.suppress(OSError):  # it left, which `_until_gone` notices
                        await send(message)
            except TimeoutError:
                raise ClientStalled from None

        try:
            stream = self._reply.asked.stream
            response = await (self._stream(work, patient) if stream else self._whole(work))
            if response is not None:
                await response(scope, receive, patient)
        except ClientStalled:
            pass  # uvicorn closes what has no end
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait({work, gone})

    async def _whole(self, work: asyncio.Task[Trajectory]) -> Response | None:
        told = list[Piece]()
        while (piece := await self._pieces.get()) is not None:
            told.append(piece)
        outcome = self._outcome(work)
        self._log(outcome)
        if isinstance(outcome, Trajectory):
            headers = {"x-request-id": self._reply.id}
            return answer(self._reply.whole(told, outcome), headers=headers)
        return None if outcome is None else refusal(outcome)

    async def _stream(self, work: asyncio.Task[Trajectory], send: Send) -> Response | None:
        """Send pieces as they come, those that came together in one go."""

        async def write(body: bytes, last: bool = False) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": not last})

        piece = await self._next()
        if piece is None and isinstance(refused := self._outcome(work), Refused):
            # Nothing was sent yet, so it has its status: clients act on that.
            self._log(refused)
            return refusal(refused)
        try:
            headers = {**EVENTS, "x-request-id": self._reply.id}
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            await write(event(self._reply.opening()))
            while piece is not None:
                if piece == "quiet":
                    await write(STILL_HERE)
                else:
                    events = [event(self._reply.piece(piece))]
                    while not self._pieces.empty() and (piece := self._pieces.get_nowait()):
                        events.append(event(self._reply.piece(piece)))
                    await write(b"".join(events))
                piece = piece and await self._next()
            # The stream has begun with 200, so that a failure is an event, too.
            outcome = self._outcome(work)
            self._log(outcome)
            records = list[Json]()
            if isinstance(outcome, Trajectory):
                records = self._reply.closing(outcome)
            elif outcome is not None:
                records = [outcome.to_json()]
            await write(b"".join(map(event, records)) + DONE, last=True)
        except ClientStalled:
            self._session.log_request(self._reply, "499 client stalled")
        return None

    async def _next(self) -> Piece | Literal["quiet"] | None:
        """What comes next: a piece, None at the end; or that nothing came for a while."""
        try:
            async with asyncio.timeout(QUIET_S):
                return await self._pieces.get()
        except TimeoutError:
            return "quiet"

    def _outcome(self, work: asyncio.Task[Trajectory]) -> Trajectory | Refused | None:
        """How a rollout ended; None when its client went away."""
        if work.cancelled():
            return self._session.stopped() if self._session.stopping else None
        error = work.exception()
        if error is None:
            return work.result()
        if isinstance(error, Refused):
            return error
        if isinstance(error, EngineError | ToolError | OSError):
            self._session.log_error(self._reply.id, str(error))
            return unavailable("what the agent works with failed; try again.", "unavailable")
        told = harmless("".join(traceback.format_exception(error)))
        # Indented: no line of it can pass for one of the log's own.
        self._session.log(f"{self._reply.id} a bug:\n{textwrap.indent(told, '    ')}")
        return BUG

    def _log(self, outcome: Trajectory | Refused | None) -> None:
        how, trajectory = "499 client gone", None
        if isinstance(outcome, Refused):
            how = f"{outcome.status} {outcome.code}"
        elif outcome is not None:
            how, trajectory = f"200 {outcome.stop}", outcome
        self._session.log_request(self._reply, how, trajectory)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
