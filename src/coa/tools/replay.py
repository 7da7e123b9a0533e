"""Record and replay: the tools of a toolbox, answering through a ToolCache.

The key of an answer is a hash of everything that decides it: the tool's name, its fingerprint (a
corpus, a question, settings) and the argument. Three modes:

* `live`: every call goes to the tool; nothing is read or stored.
* `record`: an answer that is stored and has not expired is given; otherwise the tool is called and
  its answer stored. Calls with the same key that come at the same time are made once.
* `replay`: only what is stored, whatever its age, and the tool is never called, so that a run can
  be repeated without its tools. What is not stored is a `ToolError` that says so.

Answers and the mistakes of the model are stored. Failures of the world are not answers: they are
remembered for `replay` only, so that it repeats the run as it was, and `record` calls again; so is
a text of which a part failed (`Provisional`). When the same call first failed and then worked, what
worked is what remains. A call that was stopped by a time limit of the caller leaves nothing.

A tool that remembers (`session`) is recorded, too: its key holds the calls before in its session.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from coa.errors import (
    CoaError,
    ConfigError,
    ToolError,
    ToolMistake,
    ToolTimeout,
    boundary,
    did_you_mean,
)
from coa.tools.base import RunTool, Tool, Toolbox
from coa.tools.cache import Answer, Kind, Provisional, ToolCache

Mode = Literal["live", "record", "replay"]
MODES: tuple[str, ...] = get_args(Mode)
_KEY_VERSION = 1


def key_of(tool: Tool, argument: str, earlier: Sequence[str] | None = None) -> bytes:
    """The hash of everything that decides what a call answers.

    `earlier` are the arguments of the calls before in the same session: what a tool that remembers
    answers depends on these, too.
    """
    settings = [_KEY_VERSION, tool.name, tool.fingerprint, argument, earlier]
    return hashlib.sha256(json.dumps(settings).encode()).digest()


def check_mode(mode: str) -> Mode:
    """A mode by its name."""
    if mode not in MODES:
        raise ConfigError(f"cache mode {mode!r} is not a choice.{did_you_mean(mode, MODES)}")
    return cast(Mode, mode)


def cached(toolbox: Toolbox, cache: ToolCache, mode: Mode) -> Toolbox:
    """The same tools, answering through the cache in a mode; see the module."""
    if check_mode(mode) == "live":
        return toolbox
    if mode == "record" and cache.read_only:
        raise ConfigError(f"{cache.path}: was opened for reading only; nothing can be recorded.")
    if own := next((each.name for each in toolbox.values() if each.with_state is not None), ""):
        raise ConfigError(
            f"tool cache: {own} works on the state of its rollout, so its answers cannot be "
            "recorded. Leave the cache out."
        )
    tools = [_Through(each, cache, mode).tool() for each in toolbox.values()]
    return Toolbox(tools, beside=toolbox)


@dataclass(frozen=True)
class _Through:
    """One tool behind the cache."""

    real: Tool
    cache: ToolCache
    mode: Mode

    def tool(self) -> Tool:
        session = None if self.real.session is None else self._session
        return replace(self.real, run=self._run, session=session)

    async def _run(self, argument: str) -> str:
        key = key_of(self.real, argument)
        if self.mode == "replay":
            return await self._stored(key)
        async with self.cache.flight(key):
            answer = await asyncio.to_thread(self.cache.get, key)
            if answer is None:
                return await self._called(self.real.run, key, argument)
            self.cache.tally["stored"] += 1
            return answer.give()

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[RunTool]:
        """A session in which every call is keyed by those before it.

        Recording, each call is made even when its answer is stored: the next one may need what it
        left behind. Replaying, no session is opened at all.
        """
        earlier: list[str] = []
        async with AsyncExitStack() as stack:
            real = None
            if self.mode == "record" and self.real.session is not None:
                real = await stack.enter_async_context(self.real.session())

            async def run(argument: str) -> str:
                key = key_of(self.real, argument, earlier)
                earlier.append(argument)
                if real is None:
                    return await self._stored(key)
                return await self._called(real, key, argument)

            yield run

    async def _stored(self, key: bytes) -> str:
        answer = await asyncio.to_thread(lambda: self.cache.get(key, any_age=True))
        self.cache.tally["missing" if answer is None else "stored"] += 1
        if answer is None:
            name = self.real.name
            raise ToolError(f"no answer of {name} to this is recorded, and it is not called.")
        return answer.give()

    async def _called(self, run: RunTool, key: bytes, argument: str) -> str:
        self.cache.tally["called"] += 1
        try:
            with boundary(ToolError, self.real.name):
                text = await run(argument)
        except CoaError as error:
            await self._store(key, argument, self._failure(error))
            raise
        if isinstance(text, str):  # what is not is the caller's to complain about
            kind: Kind = "provisional" if isinstance(text, Provisional) else "text"
            await self._store(key, argument, Answer(kind, text))
        return text

    async def _store(self, key: bytes, argument: str, answer: Answer) -> None:
        await asyncio.to_thread(self.cache.put, key, self.real.name, argument, answer)

    def _failure(self, error: CoaError) -> Answer:
        """An error as an answer that raises one which looks the same to the model."""
        if isinstance(error, ToolMistake):
            return Answer("mistake", str(error))
        if isinstance(error, ToolTimeout):
            return Answer("timeout", str(error))
        if isinstance(error.__cause__, TimeoutError):
            return Answer("timeout", f"{self.real.name} gave no answer in time.")
        return Answer("failed", str(error))
