"""`coa serve`: a socket, an engine, the agents, and an end without a lost answer.

The port is taken before the model is loaded, so that one which is in use is found out at once. The
first signal closes the door and lets rollouts finish for a while; what is left then, or at the
second signal, is cut with an error that its client can read. Either way the process ends with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shlex
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from coa.engines import Engine, load_engine, rollouts_at_once, slots_for
from coa.errors import MissingExtra, UsageError
from coa.io.runs import Appender
from coa.models.references import pull_missing, resolve_default
from coa.serving.request import is_loopback
from coa.serving.session import Note, Serving, ServingSession, open_agents

if TYPE_CHECKING:
    from coa.serving.app import Server

KEY_VARIABLE = "COA_SERVE_KEY"
FAREWELL_S = 2.0
"""For telling clients that what they asked for was ended."""


def read_key(path: Path | None) -> str:
    """The key of clients, from a file or else from the environment; empty when there is none."""
    where = KEY_VARIABLE if path is None else f"--key-file {path}"
    if path is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
    else:
        try:
            key = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{where}: cannot be read ({type(error).__name__}).") from None
        if len(key.splitlines()) != 1:
            raise UsageError(f"{where}: expected one line that is the key.")
    if not (key.isascii() and key.isprintable()):  # no client could send it
        raise UsageError(f"{where}: expected printable ASCII, as headers hold nothing else.")
    return key


@dataclass
class Listening:
    """A server that answers: where it is, and how to end it."""

    url: str
    session: ServingSession
    server: Server

    def stop(self) -> None:
        """Close the door; called again, end what is left at once."""
        loop = asyncio.get_running_loop()
        if self.session.stopping:
            self.session.cut()
            # Rollouts that are cut still tell their clients; nobody else is waited for.
            loop.call_later(FAREWELL_S, self._leave)
            return
        self.session.stopping = True
        self.server.should_exit = True
        loop.call_later(self.session.serving.grace_s, self.session.cut)

    def _leave(self) -> None:
        self.server.force_exit = True
        # Since Python 3.12 a server that was closed is waited for as long as a connection is open.
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()


def serve(serving: Serving, note: Note) -> None:
    """Serve until a signal comes."""

    async def main() -> None:
        async with listening(serving, note) as server:
            for each in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(each, server.stop)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def listening(
    serving: Serving, note: Note, engine: Engine | None = None
) -> AsyncIterator[Listening]:
    """A server that answers from now on. Leaving the block waits until it was stopped."""
    if not all(map(find_spec, ("starlette", "uvicorn"))):
        raise MissingExtra("coa serve", "serve")
    from coa.serving.app import Server

    async with contextlib.AsyncExitStack() as stack:
        door, url = stack.enter_context(bound(serving))
        session = await stack.enter_async_context(session_of(serving, note, engine))
        server = Server(session)
        running = asyncio.create_task(server.serve(sockets=[door]))
        note(f"serving {', '.join(session.agents)} on {url}/v1")
        if not serving.key:
            note(f"no key: only this machine is served; set {KEY_VARIABLE} or --key-file for more")
        note(f"to ask it: {_request(url, next(iter(session.agents)), serving.key)}")
        try:
            yield Listening(url, session, server)
        except BaseException:
            server.should_exit = True
            raise
        finally:
            await running
        note("stopped")


@contextlib.asynccontextmanager
async def session_of(
    serving: Serving, note: Note, engine: Engine | None = None
) -> AsyncIterator[ServingSession]:
    """An engine, the agents and whatever answers requests with them."""
    async with contextlib.AsyncExitStack() as stack:
        out = stack.enter_context(Appender(serving.out)) if serving.out is not None else None
        serving = replace(serving, model=resolve_default(serving.model))
        pull_missing(serving.model, note)
        agents = await stack.enter_async_context(open_agents(serving, note))
        if serving.out is not None:
            for agent in agents.values():
                agent.environment.grammars.save(serving.out.parent)
        asked = serving.limits.rollouts
        engine = engine or load_engine(
            serving.model,
            slots=slots_for(asked),
            context=serving.context,
            weights=serving.weights,
            threads=serving.threads,
        )
        stack.push_async_callback(engine.close)
        at_once = rollouts_at_once(engine, asked)
        if at_once < asked:
            note(f"the engine keeps {at_once} rollouts at a time; further ones wait")
        serving = replace(serving, limits=replace(serving.limits, rollouts=at_once))
        yield ServingSession(engine, agents, serving, note, out)


def _request(url: str, name: str, key: str) -> str:
    """A request as one pastes it into a shell; the key itself is written nowhere."""
    asked = {"model": name, "messages": [{"role": "user", "content": "a question"}]}
    sends = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if key else ""
    sends += " -H 'Content-Type: application/json'"
    return f"curl {shlex.quote(url)}/v1/chat/completions{sends} -d {shlex.quote(json.dumps(asked))}"


@contextlib.contextmanager
def bound(serving: Serving) -> Iterator[tuple[socket.socket, str]]:
    """The door of a server with its URL. Without a key only this machine may come in."""
    if not serving.key and not is_loopback(serving.host):
        raise UsageError(
            f"host {serving.host!r} can be reached by others, and there is no key. "
            f"Set {KEY_VARIABLE} or --key-file, or serve 127.0.0.1 only."
        )
    with bind(serving.host, serving.port) as door:
        _give_up_on_stalled(door, serving.limits.stall_s)
        host, port = door.getsockname()[:2]
        yield door, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; one that cannot be had is an error."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family)
    except (OSError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number and number > 0 else str(error)
        raise UsageError(
            f"cannot serve on {host} port {port}: {reason}. Choose another with --host or --port."
        ) from None


def _give_up_on_stalled(door: socket.socket, seconds: float) -> None:
    """The kernel ends a connection that takes nothing: closing it would wait for what is left."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted sockets inherit it
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1000 * seconds))
