"""Which hosts a page may be fetched from: the public web, and what the recipe allows by name.

A model, or a page it reads, can name any address. The check therefore sits where the connection is
made, not where the address is read: a name is resolved once, every address it leads to is checked,
and the socket is opened to exactly one of those. Redirects, odd spellings of a number and names
whose answer changes between two questions all pass the same gate. TLS still checks the name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

import httpcore
import httpx

from coa.errors import ConfigError, ToolError, ToolMistake

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
    parts = host.removesuffix(".").lower().split(".")
    if not _NUMBER.fullmatch(parts[-1]):
        return None
    try:
        numbers = [_number(part) for part in parts]
        *front, last = numbers
        fits = len(parts) <= 4 and all(n < 256 for n in front) and last < 256 ** (5 - len(parts))
    except ValueError:
        fits = False
    if not fits:
        raise ToolMistake(f"{host[:100]!r} is neither a name nor an IPv4 address.")
    high = sum(n << (24 - 8 * place) for place, n in enumerate(front))
    return ipaddress.IPv4Address(high + last)


def _number(part: str) -> int:
    if len(part) > 20:
        raise ValueError(part)
    if part.startswith("0x"):
        return int(part[2:] or "0", 16)
    return int(part, 8 if part.startswith("0") else 10)


def not_public(ip: Ip) -> str:
    """What kind of address this is, when it is not one of the public internet; else ''."""
    if isinstance(ip, ipaddress.IPv6Address):
        for network, shift in _HOLDS_V4:
            if ip in network:
                return not_public(ipaddress.IPv4Address(int(ip) >> shift & 0xFFFFFFFF))
    for kind, found in (
        ("unspecified", ip.is_unspecified),
        ("loopback", ip.is_loopback),
        ("link-local", ip.is_link_local),
        ("multicast", ip.is_multicast),
        ("private", ip.is_private),
        ("reserved", ip.is_reserved or not ip.is_global),
    ):
        if found:
            return kind
    special = any(ip.version == network.version and ip in network for network in _SPECIAL)
    outside = isinstance(ip, ipaddress.IPv6Address) and ip not in _PUBLIC_V6
    return "reserved" if special or outside else ""


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

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise ToolError(f"{path}: pages are not read from sockets of this machine.")
