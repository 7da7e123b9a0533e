"""What is served, and how a request is answered: one engine, agents, and a rollout for each.

An agent is what clients can name as a model: `NAME` is the first environment, `NAME:GRAMMAR` that
one, and an environment that was asked for has its own name besides. Everything that can be missing
(a corpus, a sandbox) is found out before the first request.

A rollout is a task of its own: it gives its place back when it ends, however slowly its client
reads, and is cancelled when the client goes away or the server has to stop.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from coa.engines.base import Engine
from coa.environment import Environment, OpenEnvironment, ToolSettings, open_environments
from coa.errors import CoaError, ConfigError, UsageError
from coa.grammar import Grammar, PromptKind
from coa.io.machine import cores
from coa.io.runs import Appender, Json
from coa.io.settings import Option
from coa.loop import Budget, Decoding
from coa.models.references import OURS, resolve
from coa.rollouts import (
    CONSTRAIN,
    ENV,
    MODEL,
    PROMPT,
    SETTINGS,
    TEMPERATURE,
    THREADS,
    WEIGHTS,
    References,
    choose_prompt,
    default_environments,
    remembered,
    trained_grammar,
)
from coa.serving.replies import Narrator, Piece, Reply
from coa.serving.request import Refused, ServingLimits, shown, unavailable
from coa.tasks import Task
from coa.trajectory import StopReason, Trajectory
from coa.view.terminal import fold, harmless

ANY = Task("any question")
FIRST_GUESS_S = 2.0
"""What a rollout is taken to last before one has ended."""
LOGGED = 500
"""Most characters of an error that the log repeats: a page or a server may have written it."""
Note = Callable[[str], None]


@dataclass(frozen=True)
class Serving:
    """How a model is served."""

    model: Annotated[str, MODEL] = "auto"
    name: Annotated[str, Option("What clients call the model.")] = ""
    """Empty: the reference without paths."""
    env: Annotated[References, ENV] = ()
    """None: the shipped one for any question."""
    settings: Annotated[Json, SETTINGS] = field(default_factory=dict)
    grammars: Annotated[
        tuple[str, ...], Option("The first is the default.", "--grammar", many=True)
    ] = ()
    """None: those that the model was trained on."""
    tools: ToolSettings = field(default_factory=ToolSettings)
    prompt: Annotated[str, PROMPT] = "auto"
    host: Annotated[str, Option("Others than this machine need a key.")] = "127.0.0.1"
    port: Annotated[int, Option("0 takes any that is free.")] = 8000
    key: str = field(default="", repr=False)
    limits: ServingLimits = field(default_factory=ServingLimits)
    temperature: Annotated[float, TEMPERATURE] = 0.0
    constrain: Annotated[bool, CONSTRAIN] = False
    weights: Annotated[str, WEIGHTS] = "auto"
    context: Annotated[int, Option("Most tokens of a whole rollout.", least=1)] = 3072
    threads: Annotated[int | None, THREADS] = None
    grace_s: Annotated[float, Option("Seconds to finish when stopped.", "--grace", 0)] = 20.0
    out: Annotated[Path | None, Option("Append trajectories to this file.")] = None
    log_questions: Annotated[bool, Option("Show what was asked in the log.")] = False

    def __post_init__(self) -> None:
        Decoding(temperature=self.temperature)  # says what cannot be sampled with
        times = {"seconds": self.limits.seconds, "stall_s": self.limits.stall_s}
        for name, value in {**times, "grace_s": self.grace_s}.items():
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value!r}, expected a finite number, 0 or more.")


@dataclass(frozen=True)
class Agent:
    """One entry of /v1/models."""

    grammar: Grammar
    """Bound to the tools of any question."""
    prompt: PromptKind
    environment: OpenEnvironment


def public_name(model: str) -> str:
    """A model reference as strangers see it: no path and no address."""
    source = resolve(model)
    if source.kind == "scripted":
        return "scripted"
    if source.kind == "local" and not model.startswith("hf:"):
        return OURS if model == OURS else source.base
    where = source.model or source.base.removeprefix("hf:")
    return Path(where).resolve().name or "model"


@asynccontextmanager
async def open_agents(
    serving: Serving, note: Note = lambda line: None
) -> AsyncIterator[dict[str, Agent]]:
    """The agents of a model by the names that clients use; the first is the default, under the name
    of its environment where one was asked for and the model was given no other.

    Without an environment they are the shipped one in the grammars that were asked for, or in
    those that the model was trained on, first the one that `coa ask` takes; of these, one whose
    tools this machine cannot open is left out with a line. One that was asked for has to work.
    """
    name = serving.name or public_name(serving.model)
    prompt = choose_prompt(serving.prompt, serving.model)
    agents: dict[str, Agent] = {}
    why = ""
    async with AsyncExitStack() as stack:
        for wanted in _environments(serving, note):
            grammar = wanted.value()
            full = f"{name}:{grammar.name}"
            try:
                opened = await stack.enter_async_context(
                    open_environments((wanted,), [ANY], serving.tools, rollouts=cores())
                )
                bound = (await opened.toolbox(ANY)).bind(grammar)
            except CoaError as error:
                if serving.env or serving.grammars:
                    raise
                why = f"{full} is not served: {error}"
                note(why)
                continue
            if full in agents:
                raise UsageError(f"two grammars are named {grammar.name!r}; rename one.")
            agent = Agent(bound, prompt, opened)
            names = [name]
            if serving.env:
                names.insert(1 if serving.name else 0, wanted.name)
            for each in names:
                agents.setdefault(each, agent)
            agents[full] = agent
        if not agents:
            raise UsageError(f"{serving.model}: no grammar can be served. {why}")
        yield agents


def _environments(serving: Serving, note: Note) -> list[Environment]:
    grammars: list[str | Grammar] = [*serving.grammars]
    if not grammars and serving.env:
        grammars = ["auto"]
    elif not grammars:
        shipped: Any = import_module("coa.environments")
        usual = next(iter(shipped.BY_GRAMMAR))
        known = remembered("grammar", serving.model) or [*shipped.BY_GRAMMAR][:3]
        known = sorted(known, key=lambda each: each != usual)
        grammars = [trained_grammar(serving.model, each) for each in known]
    return [
        made
        for grammar in grammars
        for made in default_environments(
            serving.env,
            tools=serving.tools,
            settings=serving.settings,
            grammar=grammar,
            model=serving.model,
            note=note,
        )
    ]


@dataclass
class Admission:
    """Room for `rollouts` at a time; the others wait in line."""

    rollouts: int
    running: int = 0
    waiting: int = 0
    _lasted_s: float = FIRST_GUESS_S

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.rollouts)

    def retry_after_s(self) -> int:
        """When a place in line should be free, as far as rollouts last what they lasted so far."""
        return max(1, math.ceil(self._lasted_s * (1 + self.waiting / self.rollouts)))

    @asynccontextmanager
    async def place(self, seconds: float) -> AsyncIterator[None]:
        """A place, once one is free; `Refused` when that takes too long."""
        self.waiting += 1
        try:
            async with asyncio.timeout(seconds):
                await self._free.acquire()
        except TimeoutError:
            message = f"no place became free within {seconds:g} s; try later."
            raise unavailable(message, "busy", self.retry_after_s()) from None
        finally:
            self.waiting -= 1
        self.running += 1
        started = time.monotonic()
        try:
            yield
        finally:
            self.running -= 1
            self._lasted_s += 0.1 * (time.monotonic() - started - self._lasted_s)
            self._free.release()


class ServingSession:
    """All requests of one server."""

    def __init__(
        self,
        engine: Engine,
        agents: Mapping[str, Agent],
        serving: Serving,
        log: Note = print,
        out: Appender | None = None,
    ) -> None:
        self.engine, self.agents, self.serving, self.log = engine, agents, serving, log
        self.limits, self._out = serving.limits, out
        self.admission = Admission(serving.limits.rollouts)
        self.stopping = False
        self._at_work: set[asyncio.Task[Trajectory]] = set()

    def agent(self, name: str) -> Agent:
        if name not in self.agents:
            known = ", ".join(self.agents)
            message = f"the model {shown(name)} does not exist here; there are {known}."
            raise Refused(message, 404, code="model_not_found", param="model")
        return self.agents[name]

    def start(self, reply: Reply, tell: Callable[[Piece], None]) -> asyncio.Task[Trajectory]:
        """Begin a rollout, which waits for its place; `Refused` when the line is full."""
        if self.stopping:
            raise self.stopped()
        if len(self._at_work) >= self.limits.rollouts + self.limits.queue:
            running = self.admission.running
            raise Refused(
                f"{running} requests are being answered and {len(self._at_work) - running} wait; "
                "try later.",
                429,
                "rate_limit_error",
                "queue_full",
                retry_after_s=self.admission.retry_after_s(),
            )
        work = asyncio.create_task(self._play(reply, tell))
        self._at_work.add(work)
        work.add_done_callback(self._at_work.discard)
        return work

    def stopped(self) -> Refused:
        return unavailable("the server is stopping; try again later.", "stopping")

    def cut(self) -> None:
        """End all rollouts now."""
        self.stopping = True
        for work in list(self._at_work):
            work.cancel()

    async def _play(self, reply: Reply, tell: Callable[[Piece], None]) -> Trajectory:
        narrator: Narrator
        asked, limits = reply.asked, self.limits
        agent = self.agent(asked.model)
        # Without a seed every request draws anew; the response says which it was.
        usual = {"temperature": self.serving.temperature, "seed": secrets.randbits(31)}
        decoding = Decoding(
            **{**usual, **asked.sampling}, prompt=agent.prompt, constrain=self.serving.constrain
        )
        async with (
            self.admission.place(limits.seconds),
            agent.environment.rollout(
                Task(asked.question),
                self.engine,
                budget=Budget(
                    turns=limits.turns,
                    tokens=asked.max_tokens or limits.tokens,
                    seconds=limits.seconds,
                ),
                decoding=decoding,
                on_text=lambda text: narrator.model_text(text),
            ) as rollout,
        ):
            narrator = Narrator(rollout.grammar, tell)  # its tools may be the question's own
            trajectory = rollout.trajectory
            trajectory.meta["request"] = reply.id
            try:
                async with aclosing(rollout.steps()) as steps:
                    async for step in steps:
                        narrator.end_turn(step, trajectory.stop is StopReason.ANSWERED)
            finally:
                if self._out is not None:
                    self._out.write(trajectory.to_json())
        self._check(trajectory)
        if trajectory.answer is not None:
            narrator.answer(trajectory.answer)
        return trajectory

    def _check(self, trajectory: Trajectory) -> None:
        """Refuse what is no answer of the model, good or bad; details are for the log alone."""
        if trajectory.failed_outside:
            self.log_error(trajectory.meta["request"], f"{trajectory.stop}: {trajectory.error}")
            if trajectory.stop is StopReason.ENGINE_FAILED:
                raise unavailable("the engine of this model failed; try again.", "engine_failed")
            message = "a tool that the agent needs failed again and again; try later."
            raise unavailable(message, "tool_failed")
        if trajectory.stop is StopReason.CONTEXT and not trajectory.usage.turns:
            message = f"{trajectory.error}. Shorten the question."
            raise Refused(message, code="context_length_exceeded", param="messages")

    def log_error(self, request: str, said: str) -> None:
        """What broke, on one line of the log, whatever it says."""
        self.log(f"{request} {fold(said, LOGGED)}")

    def log_refusal(self, method: str, path: str, refused: Refused) -> None:
        """A request that was not understood or not let in; one line, whatever its path holds."""
        self.log(f"{_now()} {fold(f'{method[:10]} {path}', 70)} {refused.status} {refused.code}")

    def log_request(self, reply: Reply, how: str, trajectory: Trajectory | None = None) -> None:
        """One line for each request; the question only where that was asked for."""
        parts = [f"{_now()} {reply.id} {reply.asked.model} {how}"]
        if trajectory is not None:
            usage = trajectory.usage
            parts.append(f"{usage.turns} turns, {usage.tool_calls} tool calls")
            parts.append(f"{usage.sampled_tokens} tokens, {trajectory.seconds['total']:.1f} s")
        if self.serving.log_questions:
            parts.append(shown(reply.asked.question))
        self.log(harmless(" | ".join(parts)))


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
