"""A real server on a loopback port, in a thread of its own, and engines that can be held."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from coa.engines.base import Completion, Engine, OnText, Sampling
from coa.engines.scripted import ScriptedEngine
from coa.errors import EngineError
from coa.serving.request import ServingLimits
from coa.serving.server import Listening, listening
from coa.serving.session import Serving

PLAN = "<think>I plan.</think><plan>1. look it up</plan>"
TURNS = [
    f"{PLAN}<think>I search.</think><wiki_search>capital of Peru</wiki_search>",
    "<think>It is there.</think><answer>Lima</answer>",
]
WAIT_S = 90.0
"""Nothing here takes long; a busy machine may."""


class Server:
    """Use it as a context manager; leaving it stops the server and waits for its end."""

    def __init__(self, folder: Path, engine: Engine | None = None, **settings: Any) -> None:
        script = folder / "served.jsonl"
        script.write_text(json.dumps({"turns": TURNS}) + "\n")
        self.engine = engine
        chosen = {"model": f"scripted:{script}", "grammars": ("mhqa",), "port": 0, "grace_s": 5.0}
        self.settings = Serving(**{**chosen, **settings})
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening: Listening | None = None

    async def _serve(self) -> None:
        try:
            async with listening(self.settings, self.lines.append, self.engine) as server:
                self._loop, self._listening = asyncio.get_running_loop(), server
                self._ready.set()
        finally:
            self._ready.set()

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        self.url = self.at.url
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread.is_alive():
            self.stop()
        self.join()

    @property
    def at(self) -> Listening:
        assert self._listening is not None, self.lines
        return self._listening

    @property
    def busy(self) -> tuple[int, int]:
        """Rollouts that run and that wait."""
        return self.at.session.admission.running, self.at.session.admission.waiting

    def tasks(self) -> list[str]:
        """What the server's loop is busy with."""

        async def names() -> list[str]:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            return sorted(task.get_coro().__qualname__ for task in others)

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(names(), self._loop).result(WAIT_S)

    def stop(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.at.stop)

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the server did not end"


def limits(**changed: Any) -> ServingLimits:
    return replace(ServingLimits(), **changed)


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


class HeldEngine(ScriptedEngine):
    """Shows the beginning of a turn, and goes on when `let_go` is set."""

    def __init__(self, script: Sequence[str] = TURNS) -> None:
        super().__init__(script)
        self.let_go = threading.Event()
        self.begun = self.cancelled = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        self.begun += 1
        if on_text is not None and self.begun == 1:
            on_text("<think>I plan")
        try:
            while not self.let_go.is_set():
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().generate(prompt_ids, sampling)


class HesitantEngine(ScriptedEngine):
    """Takes a moment for each turn, of differing length."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        for _ in range(len(self.calls) % 7):
            await asyncio.sleep(0.003)
        return await super().generate(prompt_ids, sampling, on_text)


class Watched:
    """An engine, and how many requests it had at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.now, self.most = engine, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await self._engine.generate(prompt_ids, sampling, on_text)
        finally:
            self.now -= 1


class BrokenEngine(ScriptedEngine):
    """Fails in the way that it is told."""

    def __init__(self, error: Exception) -> None:
        super().__init__(TURNS)
        self._error = error

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        raise self._error


def engine_error() -> EngineError:
    return EngineError("10.1.2.3:8000 refused the connection")
