"""Fetcher: one page of the web as bytes, or one line that says why not.

A page comes from a stranger. Redirects, time, bytes received and bytes after decompression all
have limits; the time limit covers everything, from looking up the name to the last byte, so that a
server which sends one byte a second gains nothing. Nothing is kept between two pages: no cookies,
no connection. Proxies of the environment are not used, and robots.txt is not read: the model asks
for single pages as a reader would, with an honest User-Agent and few requests at once per host.

Whose fault is it? What would be the same tomorrow (an address that is none, 404, a picture, a
circle of redirects) is a `ToolMistake`: the model should choose another page. What may pass (5xx, a
connection that was cut, a name that cannot be looked up at present) is a `ToolError`.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import weakref
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urljoin

import httpcore
import httpx

from coa.errors import ToolError, ToolMistake, ToolTimeout
from coa.tools.guard import Guard, GuardedBackend, Resolve, parse_address, port_of, system_resolver

AGENT = "chain-of-agents (reads single pages on request)"
_HEADERS = {
    "Accept": "text/html,application/xhtml+xml,text/plain;q=0.9,application/json;q=0.8,"
    "application/pdf;q=0.7,*/*;q=0.1",
    "Accept-Encoding": "gzip, deflate",
    "Accept-Language": "en,*;q=0.5",
}
_REDIRECTS = (301, 302, 303, 307, 308)
_MAY_PASS = (408, 425, 429)
_READABLE = re.compile(
    r"text/.*|application/(pdf|json|xml|xhtml\+xml|javascript|[\w.-]+\+(json|xml)|x-ndjson)|"
)
"""Media types that are read; no type at all is looked at."""
_LOST = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A page as it came."""

    url: str
    """Where it was in the end, after redirects."""
    media_type: str
    """'text/html'; '' when the server did not say."""
    charset: str
    """As the server labelled it; '' when it did not."""
    body: bytes


class Fetcher:
    """Fetches pages within limits; see the module. One can be shared by all rollouts.

    `allow` names hosts that are reached although they are not public. `resolve` and `trust` (a TLS
    context) replace those of the machine.
    """

    def __init__(
        self,
        allow: Iterable[str] = (),
        *,
        seconds: float = 15.0,
        max_bytes: int = 4_000_000,
        redirects: int = 5,
        per_host: int = 4,
        agent: str = AGENT,
        resolve: Resolve = system_resolver,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self.seconds, self.max_bytes, self.redirects = seconds, max_bytes, redirects
        self.allow = tuple(allow)
        self._backend = GuardedBackend(Guard(self.allow, resolve))
        self._headers = {**_HEADERS, "User-Agent": agent}
        self._trust = trust
        self._per_host = per_host
        self._gates: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, defaultdict[str, asyncio.Semaphore]
        ] = weakref.WeakKeyDictionary()

    async def fetch(self, address: str) -> Fetched:
        """The page at an address; waiting for its host's turn counts as time, too."""
        url = parse_address(address)
        try:
            async with asyncio.timeout(self.seconds):
                return await self._follow(url)
        except TimeoutError as error:
            raise ToolTimeout(
                f"{url.host} did not send the page within {self.seconds:g} s."
            ) from error

    async def _follow(self, url: httpx.URL) -> Fetched:
        seen = set[str]()
        while True:
            key = str(url.copy_with(fragment=None))
            if key in seen:
                raise ToolMistake(f"{url.host} redirects in a circle.")
            if len(seen) > self.redirects:
                raise ToolMistake(f"{url.host}: more than {self.redirects} redirects.")
            seen.add(key)
            async with self._gate(url.host):
                found = await self._request(url)
            if isinstance(found, Fetched):
                return found
            url = found

    def _gate(self, host: str) -> asyncio.Semaphore:
        """The turns of a host. They belong to an event loop, of which a program may have many."""
        loop = asyncio.get_running_loop()
        if loop not in self._gates:
            self._gates[loop] = defaultdict(lambda: asyncio.Semaphore(self._per_host))
        return self._gates[loop][host]

    async def _request(self, url: httpx.URL) -> Fetched | httpx.URL:
        """One request: the page, or where it redirects to."""
        if self._trust is None:
            self._trust = httpx.create_ssl_context()
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=port_of(url), target=url.raw_path
        )
        headers = [("Host", url.netloc.decode("ascii")), *self._headers.items()]
        pool = httpcore.AsyncConnectionPool(
            ssl_context=self._trust, network_backend=self._backend, max_keepalive_connections=0
        )
        try:
            async with pool, pool.stream("GET", target, headers=headers) as response:
                return await self._read(url, response)
        except _LOST as error:
            raise ToolError(f"{url.host}: {_why(error)}") from error

    async def _read(self, url: httpx.URL, response: httpcore.Response) -> Fetched | httpx.URL:
        fields = httpx.Headers(response.headers)
        status = response.status
        if status in _REDIRECTS:
            return _redirected(url, fields.get("location", ""))
        if not 200 <= status < 300:
            raise _refusal(url, status)
        media_type, charset = _content_type(fields.get("content-type", ""))
        if not _READABLE.fullmatch(media_type):
            raise ToolMistake(f"{url.host}: the page is of type {media_type!r}, which has no text.")
        declared = fields.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self.max_bytes:
            raise self._too_large(url)
        unpacked = _Unpacking(fields.get("content-encoding", ""))
        body, received = bytearray(), 0
        async for chunk in response.aiter_stream():
            received += len(chunk)
            body += unpacked.feed(chunk, self.max_bytes + 1 - len(body))
            if max(received, len(body)) > self.max_bytes:
                raise self._too_large(url)
        unpacked.finish()
        return Fetched(str(url), media_type, charset, bytes(body))

    def _too_large(self, url: httpx.URL) -> ToolMistake:
        return ToolMistake(f"{url.host}: the page is larger than {self.max_bytes / 1e6:g} MB.")


class _Unpacking:
    """Undoes Content-Encoding, never making more bytes than there is room for."""

    def __init__(self, encoding: str) -> None:
        self._kind = encoding.strip().lower()
        if self._kind not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise ToolMistake(f"the page is compressed as {self._kind[:40]!r}, which is not read.")
        self._packed = self._kind not in ("", "identity")
        self._stream = zlib.decompressobj(wbits=47)  # gzip or zlib, whichever it turns out to be
        self._begun = False

    def feed(self, chunk: bytes, room: int) -> bytes:
        if not self._packed:
            return chunk
        try:
            return self._inflate(chunk, room)
        except zlib.error:
            if self._kind == "deflate" and not self._begun:  # some servers leave out zlib's header
                self._stream, self._begun = zlib.decompressobj(wbits=-15), True
                return self.feed(chunk, room)
            raise ToolError("the compressed page is damaged.") from None

    def _inflate(self, chunk: bytes, room: int) -> bytes:
        parts = bytearray()
        while chunk and len(parts) < room:
            parts += self._stream.decompress(chunk, room - len(parts))
            self._begun = True
            if not self._stream.eof:
                break
            chunk = self._stream.unused_data  # a file may be made of several
            if chunk:
                self._stream = zlib.decompressobj(wbits=47)
        return bytes(parts)

    def finish(self) -> None:
        if self._packed and self._begun and not self._stream.eof:
            raise ToolError("the compressed page was cut before its end.")


def _redirected(url: httpx.URL, location: str) -> httpx.URL:
    if not location:
        raise ToolMistake(f"{url.host} redirects to nowhere.")
    try:
        return parse_address(urljoin(str(url), location.strip()))
    except ValueError as error:
        said = f" ({error})" if isinstance(error, ToolMistake) else ""
        raise ToolMistake(f"{url.host} redirects to what is not an address{said}.") from None


def _refusal(url: httpx.URL, status: int) -> ToolError | ToolMistake:
    known = {each.value: f" ({each.phrase})" for each in HTTPStatus}
    said = f"{url.host} answered {status}{known.get(status, '')}"
    if status >= 500 or status in _MAY_PASS:
        return ToolError(f"{said}.")
    return ToolMistake(f"{said}; choose another address.")


def _content_type(value: str) -> tuple[str, str]:
    """'text/html; charset=UTF-8' -> ('text/html', 'utf-8')."""
    media_type = value.partition(";")[0].strip().lower()
    label = re.search(r"charset\s*=\s*[\"']?([\w.:-]+)", value, re.IGNORECASE)
    return media_type[:80], label[1].lower() if label else ""


def _why(error: Exception) -> str:
    """One line without addresses and numbers of the machine."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not valid ({cause.verify_message})."
    if isinstance(cause, ssl.SSLError):
        return "no secure connection could be made."
    if isinstance(error, httpcore.ConnectError):
        return "no connection could be made."
    if isinstance(error, httpcore.NetworkError):
        return "the connection was cut."
    said = str(error)
    if "complete message body" in said or "incomplete chunked read" in said:
        return "the connection was cut before the page was complete."
    return "the answer is not valid HTTP, or there was none."
