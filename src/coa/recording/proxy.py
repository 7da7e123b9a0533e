"""The recording proxy: between a program and its model provider, on this machine only.

    async with RecordingProxy(Providers.of(os.environ), log, Secrets(os.environ)) as proxy:
        await proxy.begin("run")
        ...                                   # the program talks to proxy.address("run") + "/v1"
        session = await proxy.end("run", code=0)

What the program sends goes on to the provider, and what comes back goes to the program as it
arrives, byte for byte, however it ends: a stream that stalls, a connection that breaks off and a
refusal are the program's to deal with. Beside that, the calls of models (chat completions,
Responses, Anthropic's messages) are read and logged, in a thread of their own, in the order in
which they were answered. Every other route passes through and is only counted.

A session is named, in this order, by the header `x-coa-session`, by `#NAME` behind the key, by the
path prefix `/s/NAME`; a call without a name is of the only session that is open. None of these
reaches the provider. Keys are passed on and written nowhere: one that turns up in a text (a program
that shows its environment to a model) is taken out of it.

Of the requests one thing is changed: of the ways to pack a reply only those are offered to the
provider that can be read here.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import re
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Self, TypeVar
from urllib.parse import quote, unquote, urlsplit

import h11
import httpx

from coa.errors import RecordError, UsageError
from coa.io.runs import Json
from coa.recording.calls import CallLog, LoggedCall, LoggedSession, Redact, unused
from coa.recording.loopback import Loopback, ProgramConnection
from coa.recording.wire import (
    Dialect,
    WireExchange,
    assembled,
    dialect_of,
    exchange_of,
    items_of,
    read_body,
    read_events,
    with_items,
)

T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]

OPENAI = ("OPENAI_BASE_URL", "OPENAI_API_BASE")
ANTHROPIC = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_URL", "ANTHROPIC_API_BASE")
"""Variables that name the address of a provider; the first is the one of its own client."""
_NO_PROXY = "127.0.0.1,localhost"
UNTOLD = "?"
"""The session in the log of calls that no session could be told for."""
CONNECT_S = 60.0
"""For reaching the provider. How long it may be silent then is for the program to decide."""
LINGER_S = 5.0
"""For calls that are in flight when their program has ended."""
_KEPT, _KEPT_BYTES = 64, 1 << 22
"""Replies of a session that are kept for repeated requests, and the largest of them."""
_LARGE = 1 << 20
"""A body from this size on is hashed in a thread."""
_HOP = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
    *(b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
}
"""Headers of one connection, which are not passed on."""
_EVENTS = re.compile(rb"\s*(?:data|event):")
"""How a stream begins; not every server says that it is one."""
_READABLE = {"identity", *re.split(r",\s*", httpx.Client().headers["accept-encoding"])}


# -- providers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Providers:
    """Where calls go on to: addresses as the clients of both APIs take them."""

    openai: str = "https://api.openai.com/v1"
    anthropic: str = "https://api.anthropic.com"

    @classmethod
    def of(cls, environment: Mapping[str, str], upstream: str = "") -> Providers:
        """What the user's own environment names, or one address for everything."""
        if upstream:
            bare = _address(upstream, "--upstream").rstrip("/")
            openai = bare if urlsplit(bare).path else f"{bare}/v1"
            return cls(openai, bare.removesuffix("/v1"))
        given: list[str] = []
        for names in (OPENAI, ANTHROPIC):
            name = next((name for name in names if environment.get(name)), "")
            given.append(_address(environment[name], name).rstrip("/") if name else "")
        return cls(given[0] or cls().openai, given[1] or cls().anthropic)

    def url(self, path: str, anthropic: bool) -> str:
        """Where a request for a path goes, with or without the version at its beginning."""
        rest = path.removeprefix("/v1") if path.startswith("/v1/") else path
        if not anthropic:
            return self.openai + rest
        return self.anthropic.removesuffix("/v1") + "/v1" + rest

    def is_local(self, anthropic: bool) -> bool:
        """Whether it is a server on this machine, which may well want no key."""
        host = urlsplit(self.anthropic if anthropic else self.openai).hostname or ""
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def _address(given: str, where: str) -> str:
    """An address as it was given; it may hold a key, so that no message quotes it."""
    try:
        parts, known = urlsplit(given), httpx.URL(given)
        sound = parts.scheme in ("http", "https") and bool(known.host)
    except (ValueError, httpx.InvalidURL):
        sound = False
    if not sound:
        raise UsageError(
            f"{where}: found no address, expected one such as http://localhost:8000/v1, "
            f"not {len(given)} other characters."
        )
    return given


def named_host(url: str) -> str:
    """An address as it may be shown: without a key that it may hold."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


# -- what may not be written ----------------------------------------------------------------------


class Secrets:
    """Takes keys out of texts, and then what the user's own function takes out."""

    _NAMED = re.compile(
        r".*(?:KEY|SECRET|PASSWORD)S?|.*TOKEN|PASS(?:WD|PHRASE)?|PAT|CRED(?:ENTIAL)?S?"
    )
    """Words of a variable's name that say that it holds a secret."""
    _ABOUT = frozenset("PATH FILE DIR NAME URL URI HOST ENDPOINT TYPE".split())
    """Last words of a name that say that it holds something about one, as where it is."""
    _PLAIN = re.compile(r"[a-z]+|[A-Za-z]+(?:[-_. ][A-Za-z]+)+")
    """Words, as settings are: where the name goes on behind the secret, they are no key."""
    HEADERS = ("authorization", "x-api-key", "api-key")
    """Headers that keys are sent in."""

    def __init__(self, environment: Mapping[str, str], redact: Redact | None = None) -> None:
        self._keys: tuple[str, ...] = ()
        self._redact = redact
        self._short = lru_cache(4096)(self._clean)
        """By the keys, too: one may come while a text is cleaned."""
        for name, value in environment.items():
            self._heed(name, value)

    def _heed(self, name: str, value: str) -> None:
        """Add what a variable holds, if its name or an address in it says that this is a secret."""
        with suppress(ValueError):  # it only looks like an address
            self.add(urlsplit(value).password or "")
        words = [word for word in re.split(r"[^A-Z]+", name.upper()) if word]
        last = words[-1] if words else ""
        named = last not in self._ABOUT and any(map(self._NAMED.fullmatch, words))
        if named and (self._NAMED.fullmatch(last) or not self._PLAIN.fullmatch(value)):
            for key in (value, *re.split(r"[\s,;]+", value)):  # it may be a list, or have lines
                self.add(key)

    def add(self, key: str) -> None:
        """A key that was seen. A word such as `ollama`, which servers without keys are given, is no
        secret, and may stand in any text."""
        secret = len(key) >= 16 or (len(key) >= 8 and any(map(str.isdigit, key)))
        if secret and key not in self._keys:
            self._keys = tuple(sorted((*self._keys, key), key=len, reverse=True))

    def add_header(self, name: str, value: str) -> None:
        """A header that was seen: it may hold a key, behind the word for its kind."""
        if name.lower().replace("_", "-") in self.HEADERS:
            self.add(value.strip().rpartition(" ")[2])

    def __call__(self, text: str) -> str:
        keys = self._keys
        return self._short(text, keys) if len(text) < 1 << 16 else self._clean(text, keys)

    def _clean(self, text: str, keys: tuple[str, ...]) -> str:
        for key in keys:
            if key in text:
                text = text.replace(key, "[key]")
        if self._redact is None or not text:
            return text
        try:
            kept: Any = self._redact(text)
        except Exception as wrong:  # its message may quote what it was to take out
            frame = wrong.__traceback__
            while frame is not None and frame.tb_next is not None:
                frame = frame.tb_next
            line = f" in line {frame.tb_lineno}" if frame is not None else ""
            raise UsageError(
                f"--redact: the function failed ({type(wrong).__name__}{line}), so nothing more is "
                "recorded. It is given a text and returns the text to keep."
            ) from None
        if not isinstance(kept, str):
            found = type(kept).__name__
            raise UsageError(f"--redact: the function returned a {found}, expected a text.")
        return kept


# -- the proxy ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Held:
    """A session that is open."""

    session: LoggedSession
    busy: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    replies: dict[str, _ReplySent] = field(default_factory=dict)
    """Whole replies, by the digest of their request."""
    failed: Counter[str] = field(default_factory=Counter)
    """Attempts without such a reply that were not repeated yet, likewise."""
    items: dict[str, Json] = field(default_factory=dict)
    conversations: dict[str, str] = field(default_factory=dict)
    """The last reply in a conversation that the server keeps."""
    repeated: int = 0
    """Requests that were answered from the record."""


@dataclass(slots=True)
class _ReplySent:
    """What the provider answered, as it was sent."""

    status: int = 0
    reason: bytes = b""
    headers: Headers = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    last: float = 0.0
    """When the last of it came, which is before the program can act on it."""


@dataclass(slots=True)
class _Seen:
    """One request for a model's reply, and all that came of it."""

    held: _Held
    dialect: Dialect
    digest: str
    body: bytes
    packed: str
    retry: int
    begun: float
    reply: _ReplySent = field(default_factory=_ReplySent)
    broken: str = ""
    """How the connection ended, where it did not end well."""


class RecordingProxy(Loopback):
    """Listens on 127.0.0.1 until its block ends."""

    def __init__(
        self,
        providers: Providers,
        log: CallLog,
        secrets: Secrets,
        taken: Iterable[str] = (),
        port: int = 0,
    ) -> None:
        super().__init__(port)
        self.providers, self.log, self.secrets = providers, log, secrets
        self.others: Counter[str] = Counter()
        """Requests by routes that are only passed on."""
        self.untold = self.late = 0
        """Calls without a session, because several were open, or after its end."""
        self.unreachable: Counter[str] = Counter()
        """Providers that no connection could be made to."""
        self.named: list[str] = []
        """Sessions that began because the program named them, in that order."""
        self._clock = time.time() - time.monotonic()
        self._taken = set(taken)
        self._held: dict[str, _Held] = {}
        self._ended: set[str] = set()
        self._scribe = ThreadPoolExecutor(1, "coa-scribe")
        self._stack: AsyncExitStack
        self._client: httpx.AsyncClient

    async def __aenter__(self) -> Self:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        try:
            self._client = httpx.AsyncClient(limits=limits, timeout=timeout)
        except (ValueError, OSError, ssl.SSLError) as wrong:  # variables of a proxy, certificates
            raise UsageError(
                f"no client can be made with this environment ({type(wrong).__name__}): check "
                "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE."
            ) from None
        async with AsyncExitStack() as stack:
            stack.callback(self._scribe.shutdown)
            await stack.enter_async_context(self._client)
            await stack.enter_async_context(self._listening())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def _now(self) -> float:
        """Seconds since the epoch, by a clock that nobody sets while calls are in flight."""
        return self._clock + time.monotonic()

    # -- sessions -----------------------------------------------------------------------------

    def address(self, name: str) -> str:
        """Where a program finds this session: what it appends begins with /v1."""
        return f"{self.url}/s/{quote(name, safe='')}"

    def variables(self, environ: Mapping[str, str], name: str) -> dict[str, str]:
        """What the program of a session runs with, beside `environ`: this proxy in place of the
        providers."""
        made: dict[str, str] = {}
        base = self.address(name)
        for names, address in ((OPENAI, f"{base}/v1"), (ANTHROPIC, base)):
            for place, variable in enumerate(names):
                if place == 0 or variable in OPENAI or variable in environ:
                    made[variable] = address
        for anthropic, variable in ((False, "OPENAI_API_KEY"), (True, "ANTHROPIC_API_KEY")):
            if self.providers.is_local(anthropic) and variable not in environ:
                made[variable] = "none-needed"
        for variable in ("NO_PROXY", "no_proxy"):  # else a company's proxy would get the calls
            held = environ.get(variable)
            made[variable] = f"{held},{_NO_PROXY}" if held else _NO_PROXY
        return made

    def lines(self) -> list[str]:
        """What a person should know besides the counts."""
        lines = [f"no connection to {host}, {n} times" for host, n in self.unreachable.items()]
        if self.untold:
            lines.append(
                f"{self.untold} model calls name no session while several were open; they are in "
                "no episode. Keep the path of OPENAI_BASE_URL, or send x-coa-session."
            )
        if left := sum(name in self._held for name in self.named):
            lines.append(
                f"{left} sessions that programs named are in no episode: with tasks, what a "
                "program calls is of its task. Leave the names out, or use --one-process."
            )
        if self.late:
            lines.append(
                f"{self.late} model calls came after the end of their session; they are in no "
                "episode. Does the program leave something running?"
            )
        return lines

    def why_silent(self) -> str:
        """Why no model call was seen, as far as one can tell here."""
        if self.named:
            return "no model call was seen but those of sessions that the program named."
        if others := sum(self.others.values()):
            most = self.others.most_common(1)[0][0]
            return (
                f"no model call was seen, only {others} requests such as {most!r}, which are "
                "passed on and not recorded. Chat completions, Responses and Anthropic's messages "
                "are."
            )
        return (
            "no model call was seen. The program probably has its provider's address in its code "
            "or in a file: leave out base_url (api_base), or set it to "
            'os.environ["OPENAI_BASE_URL"], for Anthropic to os.environ["ANTHROPIC_BASE_URL"].'
        )

    async def begin(self, name: str, **about: Any) -> LoggedSession:
        """Calls for a session may come. In the log a name that was used before has a number."""
        held = self._open(name)
        held.session.about = await self._write(partial(self.log.begin, held.session.name, **about))
        return held.session

    def _open(self, name: str) -> _Held:
        self._ended.discard(name)
        held = self._held[name] = _Held(LoggedSession(unused(name, self._taken)))
        held.idle.set()
        return held

    async def end(self, name: str, **end: Any) -> LoggedSession:
        """No more calls come; returns when all of them are in the log."""
        held = self._held[name]
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await held.idle.wait()
        del self._held[name]
        self._ended.add(name)
        if held.repeated:
            end["repeated"] = held.repeated
        held.session.end = await self._write(partial(self.log.end, held.session.name, **end))
        return held.session

    def _session_of(self, name: str) -> _Held | None:
        """The open session of a call; None: it cannot be told."""
        if name in self._held:
            return self._held[name]
        if name in self._ended:
            self.late += 1
            return None
        if name:
            held = self._open(name)
            self.named.append(name)
            held.session.about = {"source": "proxy", "named": name}
            self._later(partial(self.log.begin, held.session.name, **held.session.about))
            return held
        known = [held for each, held in self._held.items() if each not in self.named]
        if len(known) == 1:
            return known[0]
        self.untold += 1
        return None

    # -- what is done in the scribe's thread ----------------------------------------------------

    async def _write(self, work: Callable[[], T]) -> T:
        """Done after all that was seen before."""
        return await asyncio.get_running_loop().run_in_executor(self._scribe, work)

    def _later(self, work: Callable[[], Any]) -> None:
        done = asyncio.get_running_loop().run_in_executor(self._scribe, work)
        done.add_done_callback(self._heed)

    def _heed(self, done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self._fail(error)

    def _record(self, seen: _Seen) -> None:
        call = self._call(seen)
        held, exchange = seen.held, call.exchange
        if exchange.reply is not None and not call.cut and not seen.broken:
            if sum(map(len, seen.reply.pieces)) <= _KEPT_BYTES:
                held.replies[seen.digest] = seen.reply
            for old in list(held.replies)[:-_KEPT]:
                del held.replies[old]
        else:
            held.failed[seen.digest] += 1
        held.session.add(self.log.write(call))

    @staticmethod
    def _answered_before(held: _Held, digest: str) -> _ReplySent | None:
        """The reply to a request that is sent again. Where an attempt at it failed it is that one:
        one request may be meant twice, for two answers."""
        if held.failed[digest]:
            held.failed[digest] -= 1
            return None
        return held.replies.get(digest)

    def _call(self, seen: _Seen) -> LoggedCall:
        """What was seen, read."""
        held, cut, unread = seen.held, "", ""
        request: Json = {}
        exchange = WireExchange("", "", (), ())
        try:
            request = read_body(_unpacked(seen.body, seen.packed), "the request")
            request = with_items(request, held.items)
            exchange = exchange_of(seen.dialect, request)
        except RecordError as wrong:
            unread = str(wrong)
        if 200 <= seen.reply.status < 300:
            try:
                body, cut = _read_reply(seen)
                if body:
                    exchange = self._answered(seen, request, exchange, body, unread)
            except RecordError as wrong:
                unread = unread or str(wrong)
                cut = seen.broken
        else:
            cut = seen.broken
        return LoggedCall(
            held.session.name,
            seen.dialect.name,
            exchange,
            round(seen.begun, 4),
            round(seen.reply.last, 4),
            seen.reply.status,
            cut,
            unread,
            seen.retry,
            request=seen.digest,
        )

    @staticmethod
    def _answered(
        seen: _Seen, request: Json, asked: WireExchange, body: Json, unread: str
    ) -> WireExchange:
        """The exchange with its reply; a reply to what could not be read is kept, too."""
        held = seen.held
        exchange = exchange_of(seen.dialect, {} if unread else request, body)
        if unread:
            exchange = replace(asked, reply=exchange.reply, usage=exchange.usage, id=exchange.id)
        held.items |= items_of(body)
        given = request.get("conversation")
        name = given.get("id") if isinstance(given, dict) else given
        if isinstance(name, str) and name:
            before = held.conversations.get(name, "")
            held.conversations[name] = exchange.id
            exchange = replace(exchange, follows=exchange.follows or before)
        return exchange

    # -- requests -----------------------------------------------------------------------------

    async def _answer(self, connection: ProgramConnection, head: h11.Request) -> None:
        target = head.target.decode("latin-1")
        headers: Headers = [(bytes(n), bytes(v)) for n, v in head.headers.raw_items()]
        name, path, headers = self._told(target, headers)
        method = head.method.decode()
        bare, mark, query = path.partition("?")
        dialect = dialect_of(bare) if method == "POST" else None
        anthropic = _is_anthropic(dialect, headers)
        url = self.providers.url(bare, anthropic) + mark + query
        if dialect is None:
            self.others[f"{method} {bare}"] += 1
            has_body = _one(headers, "transfer-encoding") or _one(headers, "content-length")
            content = connection.body() if has_body else None
            if content is None:
                await anext(connection.body(), b"")
            request = _request(method, url, headers, content)
            await self._pass_on(connection, request, _ReplySent())
            return
        parts = [piece async for piece in connection.body()]
        body = b"".join(parts)
        whole = hashlib.sha256(dialect.name.encode() + b"\0")
        if len(body) > _LARGE:
            await asyncio.to_thread(whole.update, body)
        else:
            whole.update(body)
        digest = whole.hexdigest()[:32]
        counted = _one(headers, "x-stainless-retry-count")
        retry = int(counted) if counted.isdecimal() and counted.isascii() else 0
        held = self._session_of(name) or _Held(LoggedSession(UNTOLD))
        if retry and await self._repeat(connection, held, digest):
            return
        packed = _one(headers, "content-encoding")
        seen = _Seen(held, dialect, digest, body, packed, retry, self._now())
        request = _request(method, url, _readable(headers), body)
        held.busy += 1
        held.idle.clear()
        seen.reply.last = seen.begun
        try:
            seen.broken = "the recording ended"
            seen.broken = await self._pass_on(connection, request, seen.reply)
        finally:
            self._later(partial(self._record, seen))
            held.busy -= 1
            if not held.busy:
                held.idle.set()

    def _told(self, target: str, headers: Headers) -> tuple[str, str, Headers]:
        """The session that a request names, its path, and its headers, both without the name."""
        name = ""
        if found := re.match(r"/s/([^/?]+)(?=[/?]|$)", target):
            name, target = unquote(found[1]), target[found.end() :] or "/"
        kept: Headers = []
        told = ""
        for header, value in headers:
            field_ = header.lower()
            if field_ == b"x-coa-session":
                told = value.decode("utf-8", "replace").strip()
                continue
            if field_.decode("latin-1") in Secrets.HEADERS:
                key, mark, suffix = value.partition(b"#")
                if mark:
                    name, value = suffix.decode("utf-8", "replace").strip() or name, key
                self.secrets.add_header(field_.decode("latin-1"), value.decode("latin-1"))
            kept.append((header, value))
        return told or name, target, kept

    async def _repeat(self, connection: ProgramConnection, held: _Held, digest: str) -> bool:
        """Answer a request that the program sends again with what was answered before."""
        known = await self._write(partial(self._answered_before, held, digest))
        if known is None:
            return False
        held.repeated += 1
        await connection.send(
            h11.Response(status_code=known.status, headers=known.headers, reason=known.reason)
        )
        for piece in known.pieces:
            await connection.send(h11.Data(data=piece))
        await connection.send(h11.EndOfMessage())
        return True

    async def _pass_on(
        self, connection: ProgramConnection, request: httpx.Request, reply: _ReplySent
    ) -> str:
        """Send a request on, and what comes back to the program; how that ended, if not well."""
        work = asyncio.ensure_future(self._carry(connection, request, reply))
        gone = asyncio.ensure_future(connection.gone())
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            return "the program hung up"
        finally:
            for each in (work, gone):
                each.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _carry(
        self, connection: ProgramConnection, request: httpx.Request, reply: _ReplySent
    ) -> str:
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as wrong:
            # As it would be without us: the program's connection ends without an answer.
            kind, reply.last = type(wrong).__name__, self._now()
            if not isinstance(wrong, httpx.RemoteProtocolError | httpx.ReadError):
                self.unreachable[f"{named_host(str(request.url))} ({kind})"] += 1
            return f"no answer from the server ({kind})"
        recorded = dialect_of(request.url.path) is not None and request.method == "POST"
        try:
            reply.status = response.status_code
            reply.reason = response.extensions.get("reason_phrase", b"")
            reply.headers = [each for each in response.headers.raw if each[0].lower() not in _HOP]
            await connection.send(
                h11.Response(status_code=reply.status, headers=reply.headers, reason=reply.reason)
            )
            async for piece in response.aiter_raw():
                if recorded:
                    reply.pieces.append(piece)
                    reply.last = self._now()
                await connection.send(h11.Data(data=piece))
            await connection.send(h11.EndOfMessage())
        except httpx.HTTPError as wrong:
            return f"the server broke off ({type(wrong).__name__})"
        except OSError:
            return "the program hung up"
        finally:
            with suppress(Exception):
                await response.aclose()
        return ""


def _request(method: str, url: str, headers: Headers, content: Any) -> httpx.Request:
    dropped = {b"host", *_HOP, *((b"content-length",) if isinstance(content, bytes) else ())}
    kept = [each for each in headers if each[0].lower() not in dropped]
    return httpx.Request(method, url, headers=kept, content=content)


def _one(headers: Headers, name: str) -> str:
    """The value of a header; empty: there is none."""
    found = (value for each, value in headers if each.lower() == name.encode())
    return next(found, b"").decode("latin-1").strip()


def _is_anthropic(dialect: Dialect | None, headers: Headers) -> bool:
    """Whether a request is for Anthropic's API; of other routes the headers tell."""
    if dialect is not None:
        return dialect.name == "anthropic"
    return bool(_one(headers, "anthropic-version"))


def _readable(headers: Headers) -> Headers:
    """The headers, with those ways to pack a reply that can be read here."""
    made: Headers = []
    for name, value in headers:
        if name.lower() == b"accept-encoding":
            offered = [each.strip() for each in value.decode("latin-1").split(",")]
            kept = [each for each in offered if each.partition(";")[0].strip() in _READABLE]
            value = ", ".join(kept or ["identity"]).encode("latin-1")
        made.append((name, value))
    return made


def _unpacked(raw: bytes, encoding: str) -> bytes:
    """A body as it was before it was packed for the way, as much of it as arrived."""
    if not encoding or not raw:
        return raw
    if not {each.strip().lower() for each in encoding.split(",")} <= _READABLE:
        raise RecordError(
            f"a body is packed in a way ({encoding[:20]!r}) that cannot be read here."
        )
    try:
        return httpx.Response(200, headers={"content-encoding": encoding}, content=raw).content
    except httpx.DecodingError:
        raise RecordError(f"a body is not packed as it says ({encoding[:20]!r}).") from None


def _read_reply(seen: _Seen) -> tuple[Json, str]:
    """The body of a reply, also of one that came as a stream, and why it is not whole."""
    raw = _unpacked(b"".join(seen.reply.pieces), _one(seen.reply.headers, "content-encoding"))
    kind = _one(seen.reply.headers, "content-type").lower()
    if not (kind.startswith("text/event-stream") or _EVENTS.match(raw)):
        if seen.broken:  # half of an object says nothing that could be relied on
            with suppress(RecordError):
                return read_body(raw, "the reply"), ""
            return {}, seen.broken
        return read_body(raw, "the reply"), ""
    body, ended = assembled(seen.dialect, read_events(raw.decode("utf-8", "replace")))
    if not _says_something(body):
        body = {}
    if ended:
        return body, ""
    error = body.get("error")
    if isinstance(error, dict):
        kind = error.get("type") or error.get("code") or "error"
        return body, f"the server sent an error in the stream ({str(kind)[:40]})"
    return body, seen.broken or "the stream ended without its last event"


def _says_something(body: Json) -> bool:
    return any(body.get(name) for name in ("choices", "output", "content"))
