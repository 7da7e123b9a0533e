"""Pages are read in processes of their own: what hangs or dies there costs nobody else."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from coa.errors import ToolError, ToolMistake, ToolTimeout
from coa.tools.extract import WebPage, read_page
from coa.tools.live import PageReader, read_apart

PAGE = b"<title>Tower</title><p>The tower is white. <a href='/pier'>The pier</a> is not.</p>"
STUCK = """
import os, re
from coa.tools import live as reader

read = reader.read_page

def read_page(url, *rest):
    if url.endswith("/stuck"):
        re.match(r"(a+)+$", "a" * 64 + "b")  # for ever, and nothing interrupts it
    if url.endswith("/deadly"):
        os._exit(3)
    if url.endswith("/large"):
        raise MemoryError
    return read(url, *rest)

reader.read_page = read_page
reader.work()
"""


async def read(reader: PageReader, path: str, body: bytes = PAGE) -> WebPage:
    async with asyncio.timeout(120):
        return await reader.read(f"https://a.example{path}", "text/html", "", body)


def stuck_reader(at_once: int, seconds: float) -> PageReader:
    return PageReader(at_once, seconds, (sys.executable, "-c", STUCK))


async def test_a_page_read_apart_is_the_page() -> None:
    for body in (PAGE, b"plain \xe9", "\u706f\u53f0".encode()):
        page = ("https://a.example/x", "text/html", "", body)
        assert await read_apart(*page) == read_page(*page)
    with pytest.raises(ToolMistake, match=r"^a\.example: the page has no text\.$"):
        await read_apart("https://a.example/x", "text/html", "", b"<p>")


async def test_a_page_that_hangs_or_kills_costs_its_process_alone() -> None:
    reader = stuck_reader(1, 20.0)
    with pytest.raises(ToolError, match="the page ended the process that read it"):
        await read(reader, "/deadly")
    assert (await read(reader, "/good")).title == "Tower"
    with pytest.raises(ToolError, match=r"the page cannot be read \(MemoryError\)\."):
        await read(reader, "/large")
    reader = stuck_reader(1, 0.5)
    with pytest.raises(ToolTimeout, match=r"the page could not be read within 0\.5 s\."):
        await read(reader, "/stuck")


async def test_pages_that_hang_leave_the_threads_of_others_alone() -> None:
    reader = stuck_reader(2, 60.0)
    hanging = [asyncio.create_task(read(reader, "/stuck")) for _ in range(40)]
    await asyncio.sleep(0.2)
    async with asyncio.timeout(30):
        assert await asyncio.to_thread(sum, [1, 2]) == 3
    for task in hanging:
        task.cancel()
    ended = await asyncio.gather(*hanging, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended)


ENDING = """
import asyncio, sys
from coa.tools.live import PageReader

async def main():
    reader = PageReader(2, 60.0, (sys.executable, "-c", sys.argv[1]))
    asking = reader.read("https://a.example/stuck", "text/html", "", b"<p>x")
    try:
        await asyncio.wait_for(asking, 0.5)
    except TimeoutError:
        print("given up")

asyncio.run(main())
print("ended")
"""


async def test_a_page_that_hangs_does_not_keep_the_program_from_ending(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENDING, STUCK, stdout=asyncio.subprocess.PIPE, cwd=tmp_path
    )
    out, _ = await asyncio.wait_for(process.communicate(), 50)
    assert out.decode().split("\n") == ["given up", "ended", ""] and process.returncode == 0
