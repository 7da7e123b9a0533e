"""Kinds of work for the tests of workers; workers import this module by its name."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from coa.corpus import web_page
from coa.corpus.source import reader
from coa.errors import ConfigError, MissingExtra, ToolTimeout
from coa.io.runs import Json
from coa.io.workers import Work

HERE = "worker_jobs"


class OwnError(ConfigError):
    """An error of a user's own."""


class Fancy(ConfigError):
    """One that pickle cannot make again: its arguments are not its message."""

    def __init__(self, what: str, where: int) -> None:
        super().__init__(f"{what} at {where}.")
        self.what, self.where = what, where


class Mute(Exception):
    """One that fails even when it is told."""

    def __str__(self) -> str:
        raise MemoryError


def _raise(kind: str) -> None:
    class Local(OwnError):
        pass

    errors: dict[str, BaseException] = {
        "config": ConfigError("recipe.toml: epochs is 'x', expected an integer."),
        "timeout": ToolTimeout("no answer within 3 s."),
        "extra": MissingExtra("crawling", "tools"),
        "own": OwnError("of one's own."),
        "fancy": Fancy("a fault", 7),
        "local": Local("of a class that nobody else knows."),
        "bug": KeyError("no such\nthing"),
        "mute": Mute(),
        "exit": SystemExit(3),
        "cancel": asyncio.CancelledError(),
    }
    raise errors[kind]


@asynccontextmanager
async def odd_jobs(settings: Json) -> AsyncIterator[Work]:
    """What a test may want of a worker; the file `log` tells what was opened, begun and closed."""
    log = Path(settings["log"]) if "log" in settings else None

    def note(text: str) -> None:
        if log is not None:
            with log.open("a") as file:
                file.write(f"{text} {os.getpid()}\n")

    if "refuse" in settings:
        _raise(settings["refuse"])
    if "die" in settings:
        os._exit(settings["die"])
    print("coa: said by every worker", file=sys.stderr)
    note("opened")
    in_hand = 0

    async def work(item: Json) -> Json:
        nonlocal in_hand
        in_hand += 1
        try:
            return {"got": item, "by": os.getpid(), "in_hand": in_hand} | await _job(item)
        finally:
            in_hand -= 1

    async def _job(item: Json) -> Json:
        if "noted" in item:
            note("began")
        if "print" in item:
            print(item["print"])
            os.write(1, b"raw\n")
            return {"read": sys.stdin.read()}
        if "raise" in item:
            _raise(item["raise"])
        if "unfit" in item:
            return {"path": Path()}
        if "die_once" in item and not Path(item["die_once"]).exists():
            Path(item["die_once"]).touch()
            os._exit(9)
        if "die" in item:
            os.kill(os.getpid(), 9)
        if "hang" in item:
            time.sleep(3600)
        if "grow" in item:
            return {"text": "\u706f" * item["grow"]}
        await asyncio.sleep(item.get("sleep", 0))
        return {}

    try:
        yield work
    finally:
        note("closed")
        if "fail_closing" in settings:
            _raise(settings["fail_closing"])


@asynccontextmanager
async def squares(settings: Json) -> AsyncIterator[Work]:
    async def work(item: Json) -> Json:
        return {"square": item["n"] ** 2 + settings["plus"]}

    yield work


@asynccontextmanager
async def echo(settings: Json) -> AsyncIterator[Work]:
    async def work(item: Json) -> Json:
        return item

    yield work


@asynccontextmanager
async def deadly_reader(settings: Json) -> AsyncIterator[Work]:
    """Reads files of a corpus, and dies of one of them."""
    async with reader(settings) as read:

        async def work(item: Json) -> Json:
            if item["key"] == "deadly.html":
                os._exit(3)
            return await read(item)

        yield work


@asynccontextmanager
async def stuck_pages(settings: Json) -> AsyncIterator[Work]:
    """Reads pages of the web, and hangs or dies of some of them."""
    whole = web_page.read_page

    def read_page(url: str, *rest: Any) -> web_page.WebPage:
        if url.endswith("/stuck"):
            re.match(r"(a+)+$", "a" * 64 + "b")  # for ever, and nothing interrupts it
        if url.endswith("/deadly"):
            os._exit(3)
        if url.endswith("/large"):
            raise MemoryError
        return whole(url, *rest)

    web_page.read_page = read_page
    async with web_page.page_reader(settings) as read:
        yield read
