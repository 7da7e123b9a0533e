"""Addresses: how they are read, which are public, and which hosts a connection may go to."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.errors import ConfigError
from coa.tools import ToolMistake
from coa.tools.fetch import Guard, literal_ip, not_public, parse_address

ONLY_PUBLIC = "only the public web can be read"


async def resolve(host: str) -> Sequence[str]:
    return ["127.0.0.1"]


LOOPBACK = """127.0.0.1 127.1 127.0.1 2130706433 0x7f000001 0x7f.1 0177.0.0.1 017700000001
127.0.0.1. 0x7F.0.0.0x1"""


@pytest.mark.parametrize("host", LOOPBACK.split())
def test_every_spelling_of_an_ipv4_address_is_the_address(host: str) -> None:
    assert str(literal_ip(host)) == "127.0.0.1"
    if host != "0177.0.0.1":  # httpx takes this one for a mistyped number, and so for no address
        assert parse_address(f"http://{host}/x").host == "127.0.0.1"


NOT_PUBLIC = """0.0.0.0 0.1.2.3 10.1.2.3 100.64.0.1 100.100.100.200 127.8.8.8 169.254.169.254
172.16.0.1 172.31.255.255 192.0.0.192 192.0.2.1 192.88.99.1 192.168.1.1 198.18.0.1 198.51.100.1
203.0.113.9 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 168.63.129.16 :: ::1 ::7f00:1
::ffff:10.0.0.1 ::ffff:127.0.0.1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1 100::1 2001::1
2001:db8::1 2002:7f00:1:: 2002:a00:1:: 3fff::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%eth0 fec0::1
ff02::1 5f00::1"""
PUBLIC = """8.8.8.8 1.1.1.1 93.184.216.34 172.32.0.1 100.128.0.1 2606:4700:4700::1111
64:ff9b::808:808 ::ffff:8.8.8.8 2002:808:808::1"""


@pytest.mark.parametrize("text", NOT_PUBLIC.split())
async def test_addresses_that_are_not_public_are_refused(text: str) -> None:
    ip = literal_ip(text)
    assert ip is not None and not_public(ip)
    with pytest.raises(ToolMistake, match=ONLY_PUBLIC):
        await Guard().admit(text, 443)


@pytest.mark.parametrize("text", PUBLIC.split())
async def test_public_addresses_are_admitted_on_the_ports_of_the_web_only(text: str) -> None:
    assert await Guard().admit(text, 443) == [str(literal_ip(text))]
    with pytest.raises(ToolMistake, match="no public page is served on that port"):
        await Guard().admit(text, 22)


MISTAKES = {
    "file:///etc/passwd": "only http and https",
    "ftp://example.com/x": "only http and https",
    "javascript:alert(1)": "only http and https",
    "data:text/html,hello": "only http and https",
    "http://user:word@example.com/": "user name",
    "http://example.com@127.0.0.1/": "user name",
    "http://example.com\\@127.0.0.1/": "is not an address",
    "http://127%2e0.0.1/": "neither a name nor an IPv4 address",
    "http://\u2460\u2461\u2466.0.0.1/": "is not an address",
    "http://[::1": "is not an address",
    "http:///path": "is not an address",
    "http://exa mple.com/": "is not an address",
    "http://1.2.3.4.5/": "neither a name nor an IPv4 address",
    "http://999.1/": "neither a name nor an IPv4 address",
    "http://4294967296/": "neither a name nor an IPv4 address",
    "http://example.com:99999/": "is not an address",
    "http://" + "a" * 64 + ".com/": "is not an address",
    "": "is not an address",
    "not an address": "is not an address",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_what_is_not_an_address_of_the_web_is_a_mistake_in_one_line(text: str) -> None:
    with pytest.raises(ToolMistake, match=MISTAKES[text]) as caught:
        parse_address(text)
    assert "\n" not in str(caught.value)


def test_addresses_are_read_as_people_write_them() -> None:
    assert str(parse_address("example.com/page")) == "https://example.com/page"
    assert str(parse_address("example.com:8080/page")) == "https://example.com:8080/page"
    assert parse_address("https://b\u00fccher.example/").raw_host == b"xn--bcher-kva.example"
    assert parse_address("HTTP://EXAMPLE.com").host == "example.com"


@given(st.text())
def test_any_text_is_an_address_or_a_mistake(text: str) -> None:
    for each in (text, f"http://{text}", f"http://{text}/path", f"https://a.example/{text}"):
        try:
            assert parse_address(each).scheme in ("http", "https")
        except ToolMistake as mistake:
            assert len(str(mistake)) < 400


@given(st.integers(0, 2**32 - 1), st.sampled_from(["dec", "hex", "octal", "two", "three"]))
def test_numbers_are_read_as_the_c_library_reads_them(number: int, form: str) -> None:
    a, b, c, d = number.to_bytes(4, "big")
    text = {
        "dec": str(number),
        "hex": hex(number),
        "octal": f"0{number:o}",
        "two": f"{a}.{number & 0xFFFFFF}",
        "three": f"0x{a:x}.{b}.0{c << 8 | d:o}",
    }[form]
    assert str(literal_ip(text)) == socket.inet_ntoa(socket.inet_aton(text))


@pytest.mark.parametrize("entry", ["", "http://x/", "user@host", "host:port", "a b", "host/path"])
def test_an_allowed_host_that_is_none_is_a_config_error(entry: str) -> None:
    with pytest.raises(ConfigError, match="expected 'host' or 'host:port'"):
        Guard([entry])


async def test_an_allowed_host_is_allowed_on_its_port_only() -> None:
    guard = Guard(["site.test:8000", "inside.example", "[::1]:80"], resolve)
    assert await guard.admit("site.test", 8000) == ["127.0.0.1"]
    assert await guard.admit("SITE.test.", 8000) == ["127.0.0.1"]
    assert await guard.admit("inside.example", 443) == ["127.0.0.1"]
    assert await guard.admit("::1", 80) == ["::1"]
    for host, port in (("site.test", 80), ("inside.example", 8080), ("::1", 443)):
        with pytest.raises(ToolMistake):
            await guard.admit(host, port)


async def test_the_resolver_of_the_machine_is_asked() -> None:
    with pytest.raises(ToolMistake, match="localhost leads to a loopback address"):
        await Guard().admit("localhost", 80)
