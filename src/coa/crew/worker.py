"""The life of a worker process: open the work, answer until told to end, close the work.

The first message names the work and its settings; then come items with numbers, which are answered
in whatever order they are done; then `end`, or the end of the pipe when the starter was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import IO

from coa.config import load_object
from coa.crew.channel import Channel, encoded, fault_of
from coa.runs import Json

Work = Callable[[Json], Awaitable[Json]]
GRACE_S = 5.0
"""For closing what a worker holds. Work that hangs then ends with the process."""
OPENED, ENDED = -1, -2
"""Numbers of the replies that belong to no item."""


def serve() -> None:
    # The channel has descriptors to itself: work may read stdin and print, and disturbs nothing.
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    asyncio.run(_live(inbox, outbox))


async def _live(inbox: IO[bytes], outbox: IO[bytes]) -> None:
    loop = asyncio.get_running_loop()
    messages: asyncio.Queue[Json] = asyncio.Queue()

    def heard(message: Json | None) -> None:
        if message is None:  # the starter is gone, and with it whoever reads what is printed here
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            message = {"end": True}
        if "end" in message:
            last = threading.Timer(GRACE_S, os._exit, (1,))
            last.daemon = True
            last.start()
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends already
            loop.call_soon_threadsafe(messages.put_nowait, message)

    channel = Channel(inbox, outbox, heard)
    number = OPENED
    try:
        if "end" not in (opening := await messages.get()):
            async with open_work(opening) as work:
                channel.send(encoded({"number": number}))
                number = ENDED
                await _answer_all(work, messages, channel)
        channel.send(encoded({"number": ENDED}))
    except Exception as error:
        channel.send(encoded({"number": number, "fault": fault_of(error)}))
    channel.finish(GRACE_S)


async def _answer_all(work: Work, messages: asyncio.Queue[Json], channel: Channel) -> None:
    running: set[asyncio.Task[None]] = set()

    async def reply(message: Json) -> None:
        try:
            answer = await answered(work, message)
        except asyncio.CancelledError as error:  # work may do that to itself, and somebody waits
            answer = encoded({"number": message["number"], "fault": fault_of(error)})
        channel.send(answer)

    while "end" not in (message := await messages.get()):
        task = asyncio.create_task(reply(message))
        running.add(task)
        task.add_done_callback(running.discard)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def open_work(opening: Json) -> AbstractAsyncContextManager[Work]:
    work: AbstractAsyncContextManager[Work] = load_object(opening["reference"])(opening["settings"])
    return work


async def answered(work: Work, message: Json) -> bytes:
    number = message["number"]
    try:
        return encoded({"number": number, "value": await work(message["item"])})
    except (Exception, SystemExit) as error:
        return encoded({"number": number, "fault": fault_of(error)})
