"""`coa serve`: a socket, an engine, the agents, and an end without a lost answer.

The port is taken before the model is loaded, so that one which is in use is found out at once. The
first signal closes the door and lets rollouts finish for a while; what is left then, or at the
second signal, is cut with an error that its client can read. Either way the process ends with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import math
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from uvicorn.protocols.http.h11_impl import H11Protocol

from coa.engines import Engine, load_engine, rollouts_at_once, slots_for
from coa.environment import ToolSettings
from coa.errors import ConfigError, MissingExtra, UsageError
from coa.io.runs import Appender, Json
from coa.loop import Decoding
from coa.models.references import pull_missing, resolve_default
from coa.rollouts import References
from coa.serving.agents import open_agents
from coa.serving.errors import Refused
from coa.serving.request import ServingLimits
from coa.serving.session import Desk

if TYPE_CHECKING:
    import uvicorn


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


# ------------------------------------------------------------------------------------------------
# Who may ask: everybody who has the key, or, without one, this machine alone.
# ------------------------------------------------------------------------------------------------


KEY_VARIABLE = "COA_SERVE_KEY"


def read_key(path: Path | None) -> str:
    """The key from a file, or else from the environment; empty when there is none."""
    if path is None:
        return _sendable(os.environ.get(KEY_VARIABLE, "").strip(), KEY_VARIABLE)
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--key-file {path}: cannot be read ({type(error).__name__}).") from None
    if not key or len(key.splitlines()) > 1:
        raise UsageError(f"--key-file {path}: expected one line that is the key.")
    return _sendable(key, f"--key-file {path}")


def _sendable(key: str, where: str) -> str:
    """A key that clients can put into a header; others would lock everybody out."""
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"{where}: expected printable ASCII, as headers hold nothing else.")
    return key


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Lock:
    """Opens for a request that may come in.

    Without a key the names by which this machine calls itself are the only ones accepted, so that
    a page in a browser cannot reach the server under a name of its own.
    """

    def __init__(self, key: str) -> None:
        self._digest = _digest(key) if key else None

    def refuses(self, headers: Mapping[str, str]) -> Refused | None:
        """Why a request with these headers may not come in, if so."""
        if self._digest is None:
            if is_loopback(_without_port(headers.get("host", ""))):
                return None
            message = "this server has no key and is for this machine alone; use 127.0.0.1."
            return Refused(message, 403, code="host_not_allowed")
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(_digest(given.strip()), self._digest):
            return None
        message = "the key is missing or wrong; send it as Authorization: Bearer KEY."
        return Refused(message, 401, code="invalid_api_key")


def _digest(key: str) -> bytes:
    """Digests have one length, so that comparing them does not tell that of the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _without_port(host: str) -> str:
    name, colon, _ = host.rpartition(":")
    return name if colon and not host.endswith("]") else host


FAREWELL_S = 2.0
"""For telling clients that what they asked for was ended."""
KEEP_ALIVE_S = 75
"""Longer than clients and proxies keep an idle connection: when both end one at the same moment, a
request that was just sent on it is lost."""
Note = Callable[[str], None]


@dataclass(frozen=True)
class Serving:
    """How a model is served."""

    model: str = "auto"
    name: str = ""
    """What clients call it; empty: the reference without paths."""
    env: References = ()
    """Environments; none: the shipped one for any question."""
    grammars: tuple[str, ...] = ()
    """The first is the default; none: those that the model was trained on."""
    tools: ToolSettings = field(default_factory=ToolSettings)
    settings: Json = field(default_factory=dict)
    """Of the environments."""
    prompt: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any that is free."""
    key: str = field(default="", repr=False)
    limits: ServingLimits = field(default_factory=ServingLimits)
    temperature: float = 0.0
    constrain: bool = False
    context: int = 3072
    memory_gb: float | None = None
    grace_s: float = 20.0
    out: Path | None = None
    log_questions: bool = False

    def __post_init__(self) -> None:
        Decoding(temperature=self.temperature)  # says what cannot be sampled with
        limits = {"seconds": self.limits.seconds, "stall_s": self.limits.stall_s}
        for name, value in (
            limits | {"grace_s": self.grace_s, "memory_gb": self.memory_gb}
        ).items():
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value!r}, expected a finite number, 0 or more.")


class Listening:
    """A server that answers: where it is, and how to end it."""

    def __init__(self, url: str, desk: Desk, server: uvicorn.Server, grace_s: float) -> None:
        self.url, self.desk = url, desk
        self._server, self._grace_s = server, grace_s

    def stop(self) -> None:
        """Close the door; called again, end what is left at once."""
        if self.desk.stopping:
            self.desk.cut()
            # Rollouts that are cut still tell their clients; nobody else is waited for.
            asyncio.get_running_loop().call_later(FAREWELL_S, self._leave)
            return
        self.desk.stopping = True
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(self._grace_s, self.desk.cut)

    def _leave(self) -> None:
        self._server.force_exit = True
        # Since Python 3.12 a server that was closed is waited for as long as a connection is open.
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


def serve(settings: Serving, note: Note) -> None:
    """Serve until a signal comes."""

    async def main() -> None:
        async with listening(settings, note) as server:
            for each in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(each, server.stop)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def listening(
    settings: Serving, note: Note, engine: Engine | None = None
) -> AsyncIterator[Listening]:
    """A server that answers from now on. Leaving the block waits until it was stopped."""
    _check_packages()
    if not settings.key and not is_loopback(settings.host):
        raise UsageError(
            f"host {settings.host!r} can be reached by others, and there is no key. "
            f"Set {KEY_VARIABLE} or --key-file, or serve 127.0.0.1 only."
        )
    async with contextlib.AsyncExitStack() as stack:
        door = stack.enter_context(_bind(settings.host, settings.port))
        _give_up_on_stalled(door, settings.limits.stall_s)
        out = stack.enter_context(Appender(settings.out)) if settings.out is not None else None
        model = resolve_default(settings.model)
        pull_missing(model, note)
        agents = await stack.enter_async_context(
            open_agents(
                model,
                name=settings.name,
                env=settings.env,
                grammars=settings.grammars,
                prompt=settings.prompt,
                tools=settings.tools,
                settings=settings.settings,
                note=note,
            )
        )
        if settings.out is not None:
            for agent in agents.values():
                agent.environment.grammars.save(settings.out.parent)
        engine = engine or _load(model, settings)
        stack.push_async_callback(engine.close)
        at_once = rollouts_at_once(engine, settings.limits.rollouts)
        if at_once < settings.limits.rollouts:
            note(f"the engine keeps {at_once} rollouts at a time; further ones wait")
        desk = Desk(
            engine,
            agents,
            replace(settings.limits, rollouts=at_once),
            temperature=settings.temperature,
            constrain=settings.constrain,
            out=out,
            log=note,
            log_questions=settings.log_questions,
        )
        server = _make_server(desk, settings)
        url = f"http://{_address(door)}"
        running = asyncio.create_task(server.serve(sockets=[door]))
        note(f"serving {', '.join(agents)} on {url}/v1")
        if not settings.key:
            note(f"no key: only this machine is served; set {KEY_VARIABLE} or --key-file for more")
        try:
            yield Listening(url, desk, server, settings.grace_s)
        except BaseException:
            server.should_exit = True
            raise
        finally:
            await running
        note("stopped")


def _load(model: str, settings: Serving) -> Engine:
    slots = slots_for(settings.limits.rollouts)
    return load_engine(model, slots=slots, context=settings.context, memory_gb=settings.memory_gb)


def _check_packages() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtra("coa serve", "serve") from error


def _make_server(desk: Desk, settings: Serving) -> uvicorn.Server:
    import uvicorn

    from coa.serving.app import make_app

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals are ours: uvicorn would raise them again at the end and not exit with 0."""
            yield

    config = uvicorn.Config(
        make_app(desk, settings.key, int(time.time())),
        http=Connection,
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        # Cut rollouts still tell their clients; whoever does not listen is left after that.
        timeout_graceful_shutdown=math.ceil(settings.grace_s) + 5,
    )
    return Server(config)


def _bind(host: str, port: int) -> socket.socket:
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


def _address(door: socket.socket) -> str:
    host, port = door.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
