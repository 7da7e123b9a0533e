"""Pages are read in processes of their own: what hangs or dies there costs nobody else."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coa.corpus import web_page
from coa.corpus.web_page import WebPage, read_apart, read_page
from coa.errors import ToolError, ToolMistake, ToolTimeout
from coa.io.workers import WorkerLimits, WorkerPool

PAGE = b"<title>Tower</title><p>The tower is white. <a href='/pier'>The pier</a> is not.</p>"


@pytest.fixture
def stuck_readers(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, float], None]:
    """Pages are read by so many processes, which hang or die of some."""

    def readers(count: int, seconds: float) -> None:
        pool = WorkerPool("worker_jobs:stuck_pages", {}, count, limits=WorkerLimits(seconds))
        monkeypatch.setattr(web_page, "_pool", lambda pid: pool)
        monkeypatch.setattr(web_page, "READ_S", seconds)

    return readers


async def read(path: str, body: bytes = PAGE) -> WebPage:
    async with asyncio.timeout(120):
        return await read_apart(f"https://a.example{path}", "text/html", "", body)


async def test_a_page_read_apart_is_the_page() -> None:
    for body in (PAGE, b"plain \xe9", "\u706f\u53f0".encode()):
        page = ("https://a.example/x", "text/html", "", body)
        assert await read_apart(*page) == read_page(*page)
    with pytest.raises(ToolMistake) as mistake:
        await read_apart("https://a.example/x", "text/html", "", b"<p>")
    assert str(mistake.value) == "a.example: the page has no text."


async def test_a_page_that_hangs_or_kills_costs_its_process_alone(
    stuck_readers: Callable[[int, float], None],
) -> None:
    stuck_readers(1, 20.0)
    with pytest.raises(ToolError, match="the page ended the process that read it"):
        await read("/deadly")
    assert (await read("/good")).title == "Tower"
    with pytest.raises(ToolError, match=r"the page cannot be read \(MemoryError\)\."):
        await read("/large")
    stuck_readers(1, 0.5)
    with pytest.raises(ToolTimeout, match=r"the page could not be read within 0\.5 s\."):
        await read("/stuck")
    assert (await read("/good")).title == "Tower"


async def test_a_page_that_nobody_waits_for_leaves_its_place_to_others(
    stuck_readers: Callable[[int, float], None],
) -> None:
    stuck_readers(2, 60.0)
    hanging = [asyncio.create_task(read("/stuck")) for _ in range(40)]
    await asyncio.sleep(0.2)
    async with asyncio.timeout(30):
        assert await asyncio.to_thread(sum, [1, 2]) == 3
    for task in hanging:
        task.cancel()
    ended = await asyncio.gather(*hanging, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended)
    async with asyncio.timeout(30):
        assert (await read("/good")).title == "Tower"


ENDING = """
import asyncio
from coa.corpus import web_page
from coa.io.workers import WorkerLimits, WorkerPool

pool = WorkerPool("worker_jobs:stuck_pages", {}, 2, limits=WorkerLimits(60.0))
web_page._pool = lambda pid: pool

async def main():
    asking = web_page.read_apart("https://a.example/stuck", "text/html", "", b"<p>x")
    try:
        await asyncio.wait_for(asyncio.shield(asking), 0.5)
    except TimeoutError:
        print("given up")

asyncio.run(main())
print("ended")
"""


async def test_a_page_that_hangs_does_not_keep_the_program_from_ending() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENDING, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parent
    )
    out, _ = await asyncio.wait_for(process.communicate(), 50)
    assert out.decode().split("\n") == ["given up", "ended", ""] and process.returncode == 0
