"""Sandbox: programs in, outcomes out, many at once over a few warm slots; and sessions.

`run` gives every program a fresh state. A session keeps its state from one program to the next, in
a process of its own that is frozen in between. Sessions have places of their own, so that those
which are open for long never keep single programs waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Self

from coa.io.progress import say
from coa.sandbox.slot import Ending, Exchange, Outcome, PlainSlot, Slot
from coa.sandbox.tiers import Tier, reach, refusal
from coa.sandbox.walls import Limits, SandboxError, Walls, find_layout

PACKAGES = ("numpy", "sympy")
_LAST_WORDS_S = 0.5
NOT_OPEN = "the sandbox is not open; use it inside `async with`."


class Sandbox:
    """Open it with `async with`; then `await box.run(program)`, as many at once as you like."""

    def __init__(
        self,
        limits: Limits | None = None,
        slots: int = 2,
        packages: tuple[str, ...] = PACKAGES,
        require: Tier = Tier.FULL,
        unsafe: bool = False,
        *,
        sessions: int = 8,
        at_most: Tier = Tier.FULL,
    ) -> None:
        """`require`: below this tier, refuse. `unsafe`: run programs without any protection.

        `sessions`: how many are open at once. `at_most`: do not use a higher tier than this one.
        """
        if slots < 1 or sessions < 1:
            raise SandboxError(f"slots={slots!r}, sessions={sessions!r}: expected 1 or more.")
        self.limits = limits or Limits()
        self.packages = self.asked = tuple(packages)
        """Those that can be imported, once it is open; and those that were asked for."""
        self.slots, self.sessions = slots, sessions
        self._require, self._at_most, self.unsafe = require, at_most, unsafe
        self._walls: Walls | None = None
        self._idle: asyncio.Queue[Slot | None] | None = None
        """Slots that wait for a program; None in it says that the sandbox was closed."""
        self._all: list[Slot] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.session_places = asyncio.Semaphore(sessions)
        self._open_sessions: set[SandboxSession] = set()

    async def __aenter__(self) -> Self:
        if self._idle is not None:
            raise SandboxError("this sandbox is open already; make one for each use.")
        if self.unsafe:
            if not hasattr(socket, "send_fds"):
                raise SandboxError(f"programs cannot be run on {sys.platform}; use Linux.")
            text = "programs run WITHOUT a sandbox (unsafe): they can do whatever you can do here."
            say(f"coa: warning: {text}")
        else:
            reached = await asyncio.to_thread(reach, self._at_most)
            if reached.tier < self._require or reached.walls is None:
                raise SandboxError(refusal(reached, self._require))
            layout = await asyncio.to_thread(find_layout, self.packages)
            self._walls = replace(reached.walls, layout=layout)
            self.packages = layout.preload
            for name, reason in layout.missing:
                say(f"coa: programs run without {name}: {reason}")
        self._idle = asyncio.Queue()
        self._all = [self.new_slot() for _ in range(self.slots)]
        try:
            await asyncio.gather(*(slot.start() for slot in self._all))
        except BaseException:
            await self.close()
            raise
        for slot in self._all:
            self._idle.put_nowait(slot)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def new_slot(self, preload: bool = True) -> Slot:
        """A slot that is not started yet."""
        if self.unsafe:
            return PlainSlot(self.limits)
        assert self._walls is not None
        return Slot(self._walls, self.limits, preload)

    async def run(
        self, program: str, stdin: str = "", *, echo: bool = False, ask: str = ""
    ) -> Outcome:
        """Run a program in a fresh state. `echo`: show the value of a last expression. `ask`: a
        request of `inside.calls`, which the program answers when it has run: `Outcome.reply`.

        A program's failure is an outcome; `SandboxError` is raised when the sandbox itself failed.
        """
        async with self._place() as slot:
            return await slot.run(b"A" if ask else b"E" if echo else b"J", program, stdin, ask)

    async def check(self, check: str, program: str, box: Sandbox) -> tuple[Outcome, Outcome]:
        """Run a check here, which calls the functions of a program that runs in another box: how
        each of them ended.

        They are linked by two pipes and share nothing else. The check has the last word: when it
        has ended, the program is ended.
        """
        async with box._place() as answers, self._place() as asks:
            (asked, asking), (replied, replying) = os.pipe(), os.pipe()
            with (
                Exchange(program, "", answers, [asked, replying]) as theirs,
                Exchange(check, "", asks, [asking, replied]) as ours,
            ):
                answers.launch(b"A", theirs.passed)
                theirs.handed_over()
                ended = asyncio.ensure_future(answers.ended(answers.limits.seconds))
                try:
                    asks.launch(b"T", ours.passed)
                    ours.handed_over()
                    checked = ours.outcome(await asks.ended(asks.limits.seconds))
                    # It ends by itself when nobody asks any more, if it is honest.
                    await asyncio.wait({ended}, timeout=_LAST_WORDS_S)
                    answers.tell(b"K")
                    return checked, theirs.outcome(await ended)
                finally:
                    ended.cancel()
                    await asyncio.gather(ended, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[Slot]:
        """A warm slot for one job, made ready for the next one afterwards."""
        idle = self._idle
        if idle is None:
            raise SandboxError(NOT_OPEN)
        slot = await idle.get()
        if slot is None:
            idle.put_nowait(None)  # for the next one that waits
            raise SandboxError("the sandbox was closed before the program could run.")
        clean = False
        try:
            if not slot.warm:
                await slot.start()
            yield slot
            clean = True
        finally:
            task = asyncio.ensure_future(self._give_back(slot, clean))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[SandboxSession]:
        """Programs that share their state; see `SandboxSession`."""
        if self._idle is None:
            raise SandboxError(NOT_OPEN)
        session = SandboxSession(self)
        self._open_sessions.add(session)
        try:
            yield session
        finally:
            self._open_sessions.discard(session)
            await session.close()

    async def _give_back(self, slot: Slot, clean: bool) -> None:
        """Make a slot ready for the next program: as it is when it is clean, else anew."""
        if self._idle is None:  # closed meanwhile
            await slot.close()
            return
        try:
            if not clean or not await slot.settled():
                await slot.close()
                with contextlib.suppress(SandboxError):  # whoever takes it tries again, and hears
                    await slot.start()
        finally:
            if self._idle is not None:
                self._idle.put_nowait(slot)

    async def close(self) -> None:
        """End everything; nothing is left behind."""
        if self._idle is not None:
            self._idle.put_nowait(None)
            self._idle = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(session.close() for session in self._open_sessions))
        await asyncio.gather(*(slot.close() for slot in self._all))
        self._all = []


class SandboxSession:
    """Programs that share their state, in a process of their own; see `Sandbox.session`.

    The process starts with the first program, and again after one that had to be ended: `lost` says
    that the last program took the state with it.
    """

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        self._slot: Slot | None = None
        self._channel: socket.socket | None = None
        self._ended: asyncio.Task[Ending] | None = None
        self._placed, self._closed = False, False
        self._turn = asyncio.Lock()
        self.lost = False

    async def run(self, program: str, stdin: str = "", *, echo: bool = False) -> Outcome:
        """Run a program with what the earlier ones left."""
        async with self._turn:
            if self._closed:
                raise SandboxError("this session is closed.")
            whole = False
            try:
                slot, channel, ended = await self._open()
                with Exchange(program, stdin, slot) as exchange:
                    slot.tell(b"C")
                    socket.send_fds(channel, [b"E" if echo else b"J"], exchange.passed)
                    exchange.handed_over()
                    status = await self._reply(slot, channel, ended)
                    ending = Ending("x", status) if status is not None else ended.result()
                    outcome = exchange.outcome(ending)
                # After a flood the end of the process is on its way, whatever it replied.
                whole = status is not None and not exchange.overflow
                if whole:
                    slot.tell(b"F")
                self.lost = not whole
                return outcome
            except OSError as error:
                raise SandboxError(f"the session failed: {error}") from error
            finally:
                if not whole:
                    await self._stop()

    async def _open(self) -> tuple[Slot, socket.socket, asyncio.Task[Ending]]:
        if self._slot is None or self._channel is None or self._ended is None:
            if not self._placed:
                await self._box.session_places.acquire()
                self._placed = True
            self._slot = self._box.new_slot(preload=False)
            await self._slot.start()
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._channel.setblocking(False)
            with theirs:
                self._slot.launch(b"S", [theirs.fileno()])
            self._ended = asyncio.ensure_future(self._slot.ended(None))
        return self._slot, self._channel, self._ended

    async def _reply(
        self, slot: Slot, channel: socket.socket, ended: asyncio.Task[Ending]
    ) -> int | None:
        """The status of the program; None when its process ended instead."""
        reply = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(channel, 16))
        try:
            await asyncio.wait({reply, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() or not reply.done():
                return None
            said = reply.result()
            if len(said) != 4:  # the process is about to end, or a program wrote to our socket
                slot.tell(b"K")
                await ended
                return None
            return int(struct.unpack("!i", said)[0]) & 0xFF
        finally:
            if not reply.done():  # the loop must have let go of the socket before it is closed
                reply.cancel()
                await asyncio.wait({reply})

    async def _stop(self) -> None:
        if self._slot is not None:
            await self._slot.close()
        if self._ended is not None:
            self._ended.cancel()
            await asyncio.gather(self._ended, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()
        self._slot = self._channel = self._ended = None

    async def close(self) -> None:
        """End the process; the session cannot be used again."""
        self._closed = True
        await self._stop()
        if self._placed:
            self._placed = False
            self._box.session_places.release()
