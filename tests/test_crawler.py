"""The crawler against servers that misbehave: each way is one clear observation, in time.

Time limits here are guards (a hanging test fails), never measurements.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coa.errors import ToolError
from coa.tools import Observation, Toolbox, ToolCall, ToolMistake
from coa.tools.cache import ToolCache, cached
from coa.tools.fetch import Fetcher, _Unpacking
from coa.tools.live import LiveWeb
from coa.tools.web import crawl_page
from misbehaving_server import ANSWERS, SENTENCE, bomb, certificate, misbehaving

GUARD_S = 60.0
SLOW_S = 0.4
"""The limit of those that never end; the others have all the time that a busy machine needs."""
NAMES = {
    "inside.example": ["127.0.0.1"],
    "site.test": ["127.0.0.1"],
    "both.example": ["8.8.8.8", "10.0.0.1"],
}


async def resolve(host: str) -> Sequence[str]:
    if host not in NAMES:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")
    return NAMES[host]


def fetcher(*allow: str, **limits: Any) -> Fetcher:
    options: dict[str, Any] = {"seconds": 30, "max_bytes": 1_000_000, "resolve": resolve}
    return Fetcher(allow, **{**options, **limits})


async def crawl(address: str, web: Fetcher, focus: str = "") -> Observation:
    toolbox = Toolbox([crawl_page(LiveWeb(web), focus)])
    async with asyncio.timeout(GUARD_S):
        return await toolbox.call(ToolCall("crawl_page", address))


NOT_IN_TIME = (
    r"(crawl_page gave no answer in time|127\.0\.0\.1 did not send the page within 0\.4 s)\."
)
TOO_LARGE = r"127\.0\.0\.1: the page is larger than 1 MB\."
ONLY_PUBLIC = "only the public web can be read"
NOT_VALID = r"127\.0\.0\.1: the answer is not valid HTTP, or there was none\."
CUT = r"127\.0\.0\.1: the connection was cut"

REFUSED: dict[str, tuple[str, str]] = {
    "silent": ("timeout", NOT_IN_TIME),
    "slow_head": ("timeout", NOT_IN_TIME),
    "slow_drip": ("timeout", NOT_IN_TIME),
    "slow_length": ("timeout", NOT_IN_TIME),
    "continue_for_ever": ("timeout", NOT_IN_TIME),
    "endless_body": ("mistake", TOO_LARGE),
    "endless_chunks": ("mistake", TOO_LARGE),
    "claims_a_terabyte": ("mistake", TOO_LARGE),
    "gzip_bomb": ("mistake", TOO_LARGE),
    "endless_headers": ("failed", NOT_VALID),
    "long_header": ("failed", NOT_VALID),
    "circle": ("mistake", r"127\.0\.0\.1 redirects in a circle\."),
    "itself": ("mistake", r"127\.0\.0\.1 redirects in a circle\."),
    "ever_on": ("mistake", r"127\.0\.0\.1: more than 5 redirects\."),
    "nowhere": ("mistake", r"127\.0\.0\.1 redirects to nowhere\."),
    "to_metadata": ("mistake", rf"169\.254\.169\.254 is a link-local address; {ONLY_PUBLIC}"),
    "to_other_port": ("mistake", r"127\.0\.0\.1:1 is not read: no public page"),
    "to_decimal": ("mistake", rf"127\.0\.0\.1 is a loopback address; {ONLY_PUBLIC}"),
    "to_ipv6": ("mistake", r"::1:\d+ is not read: no public page"),
    "to_mapped": ("mistake", rf"::ffff:7f00:1 is a loopback address; {ONLY_PUBLIC}"),
    "to_name": ("mistake", rf"inside\.example leads to a loopback address; {ONLY_PUBLIC}"),
    "to_user": ("mistake", r"redirects to what is not an address .*user name"),
    "to_file": ("mistake", r"redirects to what is not an address .*only http and https"),
    "to_gopher": ("mistake", r"redirects to what is not an address .*only http and https"),
    "to_garbage": ("mistake", r"redirects to what is not an address"),
    "gzip_cut": ("failed", r"the compressed page was cut before its end\."),
    "gzip_damaged": ("failed", r"the compressed page is damaged\."),
    "gzip_twice": ("mistake", r"compressed as 'gzip, gzip', which is not read\."),
    "brotli": ("mistake", r"compressed as 'br', which is not read\."),
    "binary": ("mistake", r"127\.0\.0\.1: the page is binary, not text\."),
    "untyped_binary": ("mistake", r"127\.0\.0\.1: the page is binary, not text\."),
    "picture": ("mistake", r"the page is of type 'image/png', which has no text\."),
    "empty": ("mistake", r"127\.0\.0\.1: the page has no text\."),
    "nothing_visible": ("mistake", r"127\.0\.0\.1: the page has no text\."),
    "unclosed": ("mistake", r"127\.0\.0\.1: the page has no text\."),
    "no_content": ("mistake", r"127\.0\.0\.1: the page has no text\."),
    "broken_pdf": ("mistake", r"127\.0\.0\.1: not a PDF that can be read\."),
    "reset": ("failed", rf"({CUT}|{NOT_VALID})"),
    "reset_later": ("failed", CUT),
    "cut": ("failed", rf"{CUT} before the page was complete\."),
    "cut_chunks": ("failed", rf"{CUT} before the page was complete\."),
    "closed": ("failed", NOT_VALID),
    "not_http": ("failed", NOT_VALID),
    "broken_chunks": ("failed", NOT_VALID),
    "two_lengths": ("failed", NOT_VALID),
    "forbidden": ("mistake", r"127\.0\.0\.1 answered 403 \(Forbidden\); choose another address\."),
    "gone": ("mistake", r"127\.0\.0\.1 answered 410 \(Gone\); choose another address\."),
    "nosuch": ("mistake", r"127\.0\.0\.1 answered 404 \(Not Found\); choose another address\."),
    "too_many": ("failed", r"127\.0\.0\.1 answered 429 \(Too Many Requests\)\."),
    "down": ("failed", r"127\.0\.0\.1 answered 503 \(Service Unavailable\)\."),
    "odd_status": ("failed", r"127\.0\.0\.1 answered 799\."),
}


@pytest.mark.parametrize("way", REFUSED)
async def test_a_server_that_misbehaves_is_one_clear_line_in_time(way: str) -> None:
    kind, pattern = REFUSED[way]
    async with misbehaving() as server:
        seconds = SLOW_S if kind == "timeout" else 30
        seen = await crawl(f"{server.url}/{way}", fetcher(server.host, seconds=seconds))
    assert seen.failure == kind, seen.text
    assert re.fullmatch(f"Error: .*{pattern}.*", seen.text), seen.text
    assert len(seen.text) < 300


READ = {
    "good": SENTENCE,
    "to_good": SENTENCE,
    "gzip": SENTENCE,
    "raw_deflate": SENTENCE,
    "untyped": SENTENCE,
    "deep": SENTENCE,
    "unknown_charset": SENTENCE,
    "dangerous_charset": SENTENCE,
    "byte_order_mark": SENTENCE,
    "plain": SENTENCE,
    "wrong_charset": SENTENCE.replace("Quill", "Qu\u00efll"),
    "latin_charset": SENTENCE.replace("Quill", "Qu\u00efll"),
    "utf8_called_latin": SENTENCE.replace("Quill", "Qu\u00efll"),
    "json": '"built": 1887',
}


@pytest.mark.parametrize("way", READ)
async def test_what_can_be_read_in_spite_of_its_server_is_read(way: str) -> None:
    async with misbehaving() as server:
        seen = await crawl(f"{server.url}/{way}", fetcher(server.host))
    assert seen.failure is None, seen.text
    assert READ[way] in seen.text


def test_every_way_is_tested() -> None:
    tested = {*REFUSED, *READ, "keeper", "circle_back", "cookie", "big", "nosuch"}
    assert set(ANSWERS) | {"nosuch"} == tested
    assert len(REFUSED) >= 20


def test_decompression_makes_no_more_than_there_is_room_for() -> None:
    unpacking = _Unpacking("gzip")
    assert len(unpacking.feed(bomb(40), 1000)) == 1000


async def test_a_run_is_repeated_without_the_web(tmp_path: Path) -> None:
    ways = ["good", "nosuch", "down", "binary", "good | {0}/down", "wrong_charset", "to_metadata"]
    cache = ToolCache(tmp_path / "tools.sqlite")
    async with misbehaving() as server:
        tools = Toolbox([crawl_page(LiveWeb(fetcher(server.host)), "Who built it?")])
        calls = [ToolCall("crawl_page", f"{server.url}/{way}".format(server.url)) for way in ways]
        recorded = [await cached(tools, cache, "record").call(call) for call in calls]
        requests = len(server.seen)
        again = [await cached(tools, cache, "record").call(call) for call in calls]
        assert again == recorded
        assert len(server.seen) == requests + 3, "what failed, alone or in part, is tried again"
    replayed = [await cached(tools, cache, "replay").call(call) for call in calls]
    assert replayed == recorded
    assert [each.failure for each in recorded] == [
        *(None, "mistake", "failed", "mistake", None, None, "mistake")
    ]


async def test_one_bad_address_among_several_is_one_line_and_the_rest_come() -> None:
    async with misbehaving() as server:
        block = (
            f"{server.url}/good | {server.url}/nosuch | {server.url}/slow_drip|file:///etc/passwd"
        )
        seen = await crawl(block, fetcher(server.host, seconds=1.5))
        other = await crawl(f"{server.url}/reset_later | {server.url}/nosuch", fetcher(server.host))
    assert seen.failure is None
    lines = seen.text.splitlines()
    assert lines[0] == f"[1] Aldermoor - {server.url}/good"
    assert SENTENCE in lines
    assert lines[-3].startswith(f"[2] {server.url}/nosuch - not read: 127.0.0.1 answered 404")
    assert lines[-2].startswith(f"[3] {server.url}/slow_drip - not read: 127.0.0.1 did not send")
    assert lines[-1].endswith("only http and https addresses are read.")
    assert other.failure == "failed", "the world failed at least once"
    assert other.text.startswith("Error: none of the pages could be read.\n[1] ")


async def test_pages_show_title_text_and_links_that_lead_on() -> None:
    async with misbehaving() as server:
        seen = await crawl(f"{server.url}/good", fetcher(server.host))
        assert seen.text.endswith(f"Links:\nits first keeper - {server.url}/keeper")
        further = seen.text.split(" - ")[-1]
        assert "Tom Reed" in (await crawl(further, fetcher(server.host))).text


async def test_without_permission_loopback_is_not_read_and_not_even_reached() -> None:
    async with misbehaving() as server:
        seen = await crawl(f"{server.url}/good", fetcher())
        assert seen.failure == "mistake" and "is not read" in seen.text
        named = await crawl("http://inside.example/good", fetcher())
        assert f"leads to a loopback address; {ONLY_PUBLIC}" in named.text
        assert server.seen == []


async def test_a_name_is_resolved_once_and_the_socket_goes_to_what_was_checked() -> None:
    asked, answers = [], iter([["93.184.216.34"], ["127.0.0.1"]])

    async def changing(host: str) -> Sequence[str]:
        asked.append(host)
        return next(answers)

    web = fetcher(resolve=changing)
    with pytest.raises(ToolError, match="no connection could be made") as caught:
        await web.fetch("http://rebind.example/")
    reached: BaseException = caught.value
    while (cause := reached.__cause__ or reached.__context__) is not None:
        reached = cause
    assert "93.184.216.34" in str(reached), "the switch in conftest names what was tried"
    assert asked == ["rebind.example"]


async def test_a_name_with_one_private_address_is_refused_whatever_its_others_are() -> None:
    with pytest.raises(ToolMistake, match=r"both\.example leads to a private address"):
        await fetcher().fetch("https://both.example/")


async def test_an_unknown_name_is_the_models_mistake_and_a_failing_resolver_is_not() -> None:
    seen = await crawl("https://nobody.example/", fetcher())
    assert (seen.failure, seen.text) == (
        "mistake",
        "Error: there is no host 'nobody.example'; take addresses from search results.",
    )

    async def failing(host: str) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    seen = await crawl("https://nobody.example/", fetcher(resolve=failing))
    assert (seen.failure, seen.text) == (
        "failed",
        "Error: nobody.example: the name cannot be looked up at present.",
    )


async def test_a_resolver_that_hangs_ends_with_the_time_limit() -> None:
    async def hanging(host: str) -> Sequence[str]:
        await asyncio.sleep(3600)
        return []

    web = fetcher(resolve=hanging, seconds=SLOW_S)
    assert (await crawl("https://nobody.example/", web)).failure == "timeout"


async def test_tls_checks_the_name_although_the_socket_goes_to_an_address(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    serving, trusting = certificate(tmp_path, "site.test")
    async with misbehaving(serving) as server:
        named, other = f"site.test:{server.port}", f"inside.example:{server.port}"
        web = fetcher(named, other, trust=trusting)
        assert SENTENCE in (await crawl(f"https://{named}/good", web)).text
        assert f"Host: {named}\r\n" in server.seen[0]
        wrong = await crawl(f"https://{other}/good", web)
        assert wrong.failure == "failed"
        assert "inside.example: its certificate is not valid (Hostname mismatch" in wrong.text
        stranger = await crawl(f"https://{named}/good", fetcher(named))
        assert "site.test: its certificate is not valid (self" in stranger.text
        assert len(server.seen) == 1


async def test_https_from_a_server_that_speaks_http_is_one_line() -> None:
    async with misbehaving() as server:
        seen = await crawl(f"https://{server.host}/good", fetcher(server.host))
    assert seen == Observation("Error: 127.0.0.1: no secure connection could be made.", "failed")


async def test_nothing_listening_is_one_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
        seen = await crawl(f"http://{host}/", fetcher(host))
    assert seen == Observation("Error: 127.0.0.1: no connection could be made.", "failed")


async def test_cookies_are_not_kept_and_proxies_of_the_environment_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    async with misbehaving() as server:
        web = fetcher(server.host)
        for _ in range(2):
            assert SENTENCE in (await crawl(f"{server.url}/cookie", web)).text
    assert len(server.seen) == 2
    assert not any("cookie:" in head.lower() for head in server.seen)
    assert all("User-Agent: chain-of-agents" in head for head in server.seen)


async def test_a_host_is_asked_for_few_pages_at_once() -> None:
    async with misbehaving() as server:
        web = fetcher(server.host, per_host=2, seconds=30)
        pages = [web.fetch(f"{server.url}/good?{n}") for n in range(12)]
        async with asyncio.timeout(GUARD_S):
            await asyncio.gather(*pages)
        assert len(server.seen) == 12
        assert server.most_at_once <= 3, "two, and one whose socket is being closed"


async def test_a_page_that_is_long_is_shown_by_what_bears_on_the_question() -> None:
    async with misbehaving() as server:
        seen = await crawl(f"{server.url}/big", fetcher(server.host), "Which word?")
    assert seen.failure is None and len(seen.text) <= 3000
