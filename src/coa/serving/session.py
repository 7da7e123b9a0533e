"""The desk: takes what a client asked, plays one rollout, and says how it went.

A rollout is a task of its own: it gives its place back when it ends, however slowly its client
reads, and is cancelled when the client goes away or the server has to stop.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType

from coa.engines.base import Engine
from coa.io.runs import Appender
from coa.loop import Budget, Decoding
from coa.serving.agents import Agent
from coa.serving.errors import Refused, shown, unavailable
from coa.serving.replies import Reply, failure
from coa.serving.request import Asked, ServingLimits
from coa.serving.stream import Narrator, Piece
from coa.tasks import Task
from coa.trajectory import StopReason, Trajectory
from coa.view.terminal import fold, harmless

FIRST_GUESS_S = 2.0
"""What a rollout is taken to last before one has ended."""


class Places:
    """Room for `rollouts` at a time and `queue` more in line."""

    def __init__(self, rollouts: int, queue: int) -> None:
        self.rollouts, self.queue = rollouts, queue
        self.running = self.waiting = 0
        self._free = asyncio.Semaphore(rollouts)
        self._lasted_s = FIRST_GUESS_S

    def take(self) -> Ticket:
        """A ticket, or `Refused` when the line is full."""
        if self.running + self.waiting >= self.rollouts + self.queue:
            raise Refused(
                f"{self.running} requests are being answered and {self.waiting} wait; try later.",
                429,
                "rate_limit_error",
                "queue_full",
                retry_after_s=self.retry_after_s(),
            )
        return Ticket(self)

    def retry_after_s(self) -> int:
        """When a place in line should be free, as far as rollouts last what they lasted so far."""
        return max(1, math.ceil(self._lasted_s * (1 + self.waiting / self.rollouts)))

    def note_seconds(self, seconds: float) -> None:
        self._lasted_s += 0.1 * (seconds - self._lasted_s)


class Ticket:
    """One request's claim to a place."""

    def __init__(self, places: Places) -> None:
        self._places, self._started = places, 0.0
        self._holds = self._done = False
        places.waiting += 1

    async def wait(self, seconds: float) -> None:
        """Until a place is free."""
        try:
            async with asyncio.timeout(seconds):
                await self._places._free.acquire()
        except TimeoutError:
            message = f"no place became free within {seconds:g} s; try later."
            raise unavailable(message, "busy", self._places.retry_after_s()) from None
        if self._done:  # given back meanwhile
            self._places._free.release()
            return
        self._holds, self._started = True, time.monotonic()
        self._places.waiting -= 1
        self._places.running += 1

    def give_back(self) -> None:
        if self._done:
            return
        self._done = True
        if not self._holds:
            self._places.waiting -= 1
            return
        self._places.running -= 1
        self._places.note_seconds(time.monotonic() - self._started)
        self._places._free.release()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.give_back()


# ------------------------------------------------------------------------------------------------
# From what the model writes to what a client is shown: pieces of blocks, in order.
#
# The text of the answer is held back until the rollout has accepted it: an answer that stands
# where the grammar allows none is taken back by the runtime, and what a client was told as
# content cannot be. Everything else is told as it is written.
# ------------------------------------------------------------------------------------------------


LOGGED = 500
"""Most characters of an error that the log repeats: a page or a server may have written it."""
Say = Callable[[str], None]


@dataclass
class Played:
    """What a rollout came to."""

    trajectory: Trajectory
    answer: Piece | None


@dataclass
class Desk:
    """All requests of one server."""

    engine: Engine
    agents: Mapping[str, Agent]
    limits: ServingLimits
    temperature: float = 0.0
    constrain: bool = False
    out: Appender | None = None
    """Gets every trajectory."""
    log: Say = print
    log_questions: bool = False
    stopping: bool = False
    places: Places = field(init=False)
    _at_work: set[asyncio.Task[Played]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.places = Places(self.limits.rollouts, self.limits.queue)

    def agent(self, name: str) -> Agent:
        if name not in self.agents:
            known = ", ".join(self.agents)
            message = f"the model {shown(name)} does not exist here; there are {known}."
            raise Refused(message, 404, code="model_not_found", param="model")
        return self.agents[name]

    def take(self) -> Ticket:
        """A ticket for a rollout."""
        if self.stopping:
            raise self.stopped()
        return self.places.take()

    def stopped(self) -> Refused:
        return unavailable("the server is stopping; try again later.", "stopping")

    def start(
        self,
        asked: Asked,
        agent: Agent,
        ticket: Ticket,
        reply: Reply,
        tell: Callable[[Piece], None],
    ) -> asyncio.Task[Played]:
        """Begin a rollout as soon as its ticket has a place."""
        work = asyncio.create_task(self._play(asked, agent, ticket, reply, tell))
        self._at_work.add(work)
        work.add_done_callback(self._at_work.discard)
        return work

    def cut(self) -> None:
        """End all rollouts now."""
        self.stopping = True
        for work in list(self._at_work):
            work.cancel()

    async def _play(
        self,
        asked: Asked,
        agent: Agent,
        ticket: Ticket,
        reply: Reply,
        tell: Callable[[Piece], None],
    ) -> Played:
        await ticket.wait(self.limits.seconds)
        narrator: Narrator
        try:
            async with agent.environment.rollout(
                Task(asked.question),
                self.engine,
                budget=self._budget(asked),
                decoding=self._decoding(asked, agent),
                on_text=lambda text: narrator.model_text(text),
            ) as rollout:
                narrator = Narrator(rollout.grammar, tell)  # its tools may be the question's own
                trajectory = rollout.trajectory
                trajectory.meta["request"] = reply.id
                try:
                    async with aclosing(rollout.steps()) as steps:
                        async for step in steps:
                            narrator.end_turn(step, trajectory.stop is StopReason.ANSWERED)
                finally:
                    if self.out is not None:
                        self.out.write(trajectory.to_json())
        finally:
            ticket.give_back()
        self._check(trajectory)
        answer = trajectory.answer
        return Played(trajectory, narrator.answer(answer) if answer is not None else None)

    def _decoding(self, asked: Asked, agent: Agent) -> Decoding:
        """Without a seed every request draws anew; the response says which it was."""
        return Decoding(
            temperature=self.temperature if asked.temperature is None else asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            seed=secrets.randbits(31) if asked.seed is None else asked.seed,
            prompt=agent.prompt,
            constrain=self.constrain,
        )

    def _budget(self, asked: Asked) -> Budget:
        return Budget(
            turns=self.limits.turns,
            tokens=asked.max_tokens or self.limits.tokens,
            seconds=self.limits.seconds,
        )

    def _check(self, trajectory: Trajectory) -> None:
        """Refuse what is no answer of the model, good or bad."""
        failed = failure(trajectory)
        if failed is not None:
            self.log_error(trajectory.meta["request"], f"{trajectory.stop}: {trajectory.error}")
            raise unavailable(*failed)
        if trajectory.stop is StopReason.CONTEXT and not trajectory.usage.turns:
            message = f"{trajectory.error}. Shorten the question."
            raise Refused(message, code="context_length_exceeded", param="messages")

    def log_error(self, request: str, said: str) -> None:
        """What broke, on one line of the log, whatever it says."""
        self.log(f"{request} {fold(said, LOGGED)}")

    def note(self, reply: Reply, asked: Asked, how: str, trajectory: Trajectory | None) -> None:
        """One line of the log for each request; the question only where that was asked for."""
        parts = [f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {reply.id} {reply.model} {how}"]
        if trajectory is not None:
            usage = trajectory.usage
            parts.append(f"{usage.turns} turns, {usage.tool_calls} tool calls")
            parts.append(f"{usage.sampled_tokens} tokens, {trajectory.seconds['total']:.1f} s")
        if self.log_questions:
            parts.append(shown(asked.question))
        self.log(harmless(" | ".join(parts)))
