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
import ipaddress
import re
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeAlias
from urllib.parse import urljoin

import httpcore
import httpx

from coa.errors import ConfigError, ToolError, ToolMistake, ToolTimeout
from coa.tools.base import Turns

Ip: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""A host name -> the IP addresses it has now."""

PORTS = (80, 443, 8080, 8443)
"""Where the public web is served; another port is some other service until a recipe names it."""
_DEFAULT_PORT = {"http": 80, "https": 443}
_HOST = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?")
_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):(?![0-9])", re.IGNORECASE)
_SPECIAL = tuple(
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",  # protocol assignments; a cloud's metadata service lives here
        "192.88.99.0/24",  # relays of 6to4
        "168.63.129.16/32",  # a cloud's host agent at an address that looks public
        "64:ff9b:1::/48",  # NAT64 for local use
        "2001::/23",  # protocol assignments, among them Teredo
        "3fff::/20",  # documentation
    )
)
"""What some versions of `ipaddress` take for public."""
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_HOLDS_V4 = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),  # mapped
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4
)
"""IPv6 networks whose addresses lead to an IPv4 address, and how many bits follow it."""


def parse_address(text: str) -> httpx.URL:
    """The address of a page; `ToolMistake` for everything that is not one on the web."""
    text = text.strip()
    shown = text if len(text) <= 100 else f"{text[:100]}..."
    scheme = _SCHEME.match(text)
    if scheme and scheme[1].lower() not in _DEFAULT_PORT:
        raise ToolMistake(f"{shown!r}: only http and https addresses are read.")
    if "\\" in text or any(letter.isspace() for letter in text):
        raise ToolMistake(f"{shown!r} is not an address: expected https://host/path.")
    try:
        url = httpx.URL(text if scheme else f"https://{text}")
    except (httpx.InvalidURL, ValueError, TypeError):
        raise ToolMistake(f"{shown!r} is not an address: expected https://host/path.") from None
    if url.userinfo:
        raise ToolMistake(f"{shown!r}: an address with a user name in it is not read.")
    host = url.raw_host.decode("ascii")
    if (ip := literal_ip(host)) is not None:
        return url if str(ip) == host else url.copy_with(host=str(ip))
    if not _HOST.fullmatch(host) or len(host) > 253 or not 0 < port_of(url) < 65536:
        raise ToolMistake(f"{shown!r} is not an address: expected https://host/path.")
    return url


def port_of(url: httpx.URL) -> int:
    return _DEFAULT_PORT.get(url.scheme, 0) if url.port is None else url.port


def literal_ip(host: str) -> Ip | None:
    """The IP address that a host spells out, also in the forms that browsers and C read.

    `0x7f.1`, `017700000001` and `2130706433` are all 127.0.0.1. A host that ends in a number but is
    none of them is a `ToolMistake`: nobody may guess what a resolver makes of it.
    """
    if ":" in host:
        try:
            return ipaddress.IPv6Address(host)
        except ValueError:
            raise ToolMistake(f"{host!r} is not an IPv6 address.") from None
    host = host.removesuffix(".").lower()
    if not _NUMBER.fullmatch(host.rpartition(".")[2]):
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        raise ToolMistake(f"{host[:100]!r} is neither a name nor an IPv4 address.") from None


def not_public(ip: Ip) -> str:
    """What kind of address this is, when it is not one of the public internet; else ''."""
    if isinstance(ip, ipaddress.IPv6Address):
        for network, shift in _HOLDS_V4:
            if ip in network:
                return not_public(ipaddress.IPv4Address(int(ip) >> shift & 0xFFFFFFFF))
    for kind in ("unspecified", "loopback", "link_local", "multicast", "private"):
        if getattr(ip, f"is_{kind}"):
            return kind.replace("_", "-")
    special = any(ip.version == network.version and ip in network for network in _SPECIAL)
    outside = isinstance(ip, ipaddress.IPv6Address) and ip not in _PUBLIC_V6
    reserved = ip.is_reserved or not ip.is_global or special or outside
    return "reserved" if reserved else ""


async def system_resolver(host: str) -> list[str]:
    """What the operating system's resolver says, in its order."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Guard:
    """Decides to which IP addresses a connection to (host, port) may go.

    `allow` holds `host:port`, or `host` for its ports 80 and 443: these are reached wherever they
    lead. Everything else has to be public, with every address that its name has.
    """

    def __init__(self, allow: Iterable[str] = (), resolve: Resolve = system_resolver) -> None:
        self._allowed = {pair for entry in allow for pair in _allowed(entry)}
        self._resolve = resolve

    async def admit(self, host: str, port: int) -> list[str]:
        """The checked addresses of the host; `ToolMistake` when it is none of the public web."""
        host = host.lower().removesuffix(".")
        literal = literal_ip(host)
        allowed = (host if literal is None else str(literal), port) in self._allowed
        if not allowed and port not in PORTS:
            raise ToolMistake(f"{host}:{port} is not read: no public page is served on that port.")
        found = [literal] if literal is not None else await self._look_up(host)
        if not allowed:
            for kind in filter(None, map(not_public, found)):
                where = "is" if literal is not None else "leads to"
                raise ToolMistake(
                    f"{host} {where} a {kind} address; only the public web can be read."
                )
        return [str(ip) for ip in found]

    async def _look_up(self, host: str) -> list[Ip]:
        try:
            found = [ipaddress.ip_address(text) for text in await self._resolve(host)]
        except socket.gaierror as error:
            if error.errno == socket.EAI_AGAIN:
                raise ToolError(f"{host}: the name cannot be looked up at present.") from error
            found = []
        except UnicodeError:  # a label that no name may have
            found = []
        except (OSError, ValueError) as error:
            raise ToolError(f"{host}: the name cannot be looked up ({error}).") from error
        if not found:
            raise ToolMistake(f"there is no host {host!r}; take addresses from search results.")
        return found


def _allowed(entry: str) -> list[tuple[str, int]]:
    try:
        url = httpx.URL(f"http://{entry}")
        host, port = url.raw_host.decode("ascii"), url.port
        literal = literal_ip(host)
    except (httpx.InvalidURL, ValueError, TypeError):
        host, port, literal = "", None, None
    named = literal is not None or _HOST.fullmatch(host)
    if not named or url.path not in ("", "/") or url.userinfo:
        raise ConfigError(f"allow: found {entry!r}, expected 'host' or 'host:port'.")
    host = host.removesuffix(".") if literal is None else str(literal)
    if port is None and entry.endswith(":80"):
        port = 80  # httpx leaves out the port that its scheme has anyway
    return [(host, each) for each in ((80, 443) if port is None else (port,))]


class GuardedBackend(httpcore.AnyIOBackend):
    """Opens sockets only to addresses that the guard admitted."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        failure: Exception | None = None
        for address in await self._guard.admit(host, port):
            try:
                return await super().connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = failure or error
        assert failure is not None, f"the guard admitted no address of {host}"
        raise failure


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
        self._turns = Turns()

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
            async with self._turns.of(url.host, self._per_host):
                found = await self._request(url)
            if isinstance(found, Fetched):
                return found
            url = found

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
