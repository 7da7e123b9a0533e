"""What is served, and how a request is answered: one engine, agents, and a rollout for each.

An agent is what clients can name as a model: `NAME` is the first environment, `NAME:GRAMMAR` that
one, and an environment that was asked for has its own name besides. Everything that can be missing
(a corpus, a sandbox) is found out before the first request.

A request has a place while its rollout moves: it gives that back when there is an answer, however
slowly its client reads, and the rollout is cancelled when the client goes away or the server has to
stop. A rollout that calls a tool of its client waits without a place, and goes on in the request
that brings the result (`ServedChain`).
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from coa.engines.base import Engine
from coa.environment import (
    Environment,
    OpenEnvironment,
    ToolSettings,
    open_environments,
    with_blocks,
)
from coa.errors import CoaError, ConfigError, UsageError
from coa.grammar import Block, Grammar, PromptKind
from coa.grammar.constrain import schema_fault
from coa.io.machine import cores
from coa.io.runs import Appender, Json
from coa.io.settings import Option
from coa.loop import Budget, Decoding, Rollout
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
from coa.serving.replies import Narrator, Reply, Told
from coa.serving.request import (
    ChatRequest,
    ClientCall,
    ClientStep,
    Refused,
    ServingLimits,
    shown,
    unavailable,
)
from coa.tasks import Task
from coa.tools.base import Tool, Toolbox
from coa.trajectory import StopReason, Trajectory, Usage
from coa.view.terminal import fold, harmless

ANY = Task("any question")
FIRST_GUESS_S = 2.0
"""What a rollout is taken to last before one has ended."""
LOGGED = 500
"""Most characters of an error that the log repeats: a page or a server may have written it."""
TOKEN_BYTES = 64
"""What a token of a chain that waits takes."""
KEPT, RENDERED = "kept", "rendered again"
"""How the steps of a chain came into a request: as tokens, or from the client's messages."""
Note = Callable[[str], None]
Tell = Callable[[Told], None]


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
    """Of clients: one, or several, a line each. Empty: only this machine is served."""
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
        times = {name: getattr(self.limits, name) for name in ("seconds", "stall_s", "wait_s")}
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


class ServedChain:
    """One rollout, over as many requests as it takes: it waits wherever it calls a tool of its
    client, and the request that brings the result goes on with it."""

    def __init__(self, reply: Reply, tell: Tell) -> None:
        self.reply, self._tell = reply, tell
        self.work: asyncio.Task[Trajectory]
        """The rollout from its beginning to its end."""
        self.rollout: Rollout
        self.narrator: Narrator
        self.call: ClientCall | None = None
        """What it waits for."""
        self.expiry: asyncio.TimerHandle | None = None
        self._continued = RENDERED
        """How the steps of the present request came here, where it has any."""
        self._result: asyncio.Future[str]
        self._waits = asyncio.Event()
        self._told = Usage()
        """What earlier replies counted."""

    def begin(self, rollout: Rollout) -> None:
        self.rollout = rollout
        # The tools of a rollout may be the question's own.
        self.narrator = Narrator(rollout.grammar, lambda piece: self._tell(piece))

    async def ask(self, name: str, arguments: str) -> str:
        """Let the client run a tool: what it returns, whenever that comes."""
        self.narrator.catch_up(self.rollout.trajectory.segments[-1].text)
        self._result = asyncio.get_running_loop().create_future()
        self.call = ClientCall(f"call_{secrets.token_hex(16)}", name, arguments)
        self._waits.set()
        return await self._result

    def is_asked_by(self, reply: Reply) -> bool:
        """Whether a request holds what this chain was told and has done, and the result."""
        asked, known = reply.asked, self.reply.asked
        *before, last = asked.steps
        return (
            reply.owner == self.reply.owner
            and _premises(asked) == _premises(known)
            and tuple(before) == known.steps
            and not last.text
            and self.call is not None
            and last.calls[0].is_same(self.call)
        )

    def answer(self, reply: Reply, tell: Tell) -> None:
        """Go on with the result that a request brings."""
        self.reply, self._tell, self.call = reply, tell, None
        self._continued = KEPT
        self._waits.clear()
        self.narrator.go_on()
        self._result.set_result(reply.asked.steps[-1].results[0])

    async def played(self) -> Trajectory:
        """The trajectory as it stands when the chain waits or has ended. Usage and time are those
        of this request; whoever stops listening ends the chain."""
        started = time.monotonic()
        waits = asyncio.create_task(self._waits.wait())
        try:
            await asyncio.wait({self.work, waits}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.work.cancel()
            await asyncio.gather(self.work, return_exceptions=True)
            raise
        finally:
            waits.cancel()
        made = self.work.result() if self.work.done() else self.rollout.trajectory
        usage, self._told = made.usage.since(self._told), replace(made.usage)
        seconds = {**made.seconds, "total": time.monotonic() - started}
        meta = {**made.meta, "continued": self._continued}
        return replace(made, usage=usage, seconds=seconds, meta=meta)

    @property
    def size(self) -> int:
        """About how many bytes it takes while it waits."""
        return self.reply.asked.size + TOKEN_BYTES * len(self.rollout.trajectory.ids)


def _premises(asked: ChatRequest) -> tuple[Any, ...]:
    """What a chain rests on, from its first request to its last."""
    return asked.model, asked.history, asked.question, asked.tools


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
        self._waiting: dict[str, ServedChain] = {}
        """Chains that wait for tools of their clients, by the id of the call, the oldest first."""
        self._ending: set[asyncio.Task[Trajectory]] = set()

    def agent(self, name: str) -> Agent:
        if name not in self.agents:
            known = ", ".join(self.agents)
            message = f"the model {shown(name)} does not exist here; there are {known}."
            raise Refused(message, 404, code="model_not_found", param="model")
        return self.agents[name]

    def start(self, reply: Reply, tell: Tell) -> asyncio.Task[Trajectory]:
        """Begin to answer, which waits for its place; `Refused` when the line is full. A trajectory
        without a stop reason waits for its client."""
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
        work = asyncio.create_task(self._answer(reply, tell))
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

    async def close(self) -> None:
        """End the chains that wait."""
        for call in list(self._waiting):
            self._drop(call)
        if self._ending:
            await asyncio.wait(self._ending)

    async def _answer(self, reply: Reply, tell: Tell) -> Trajectory:
        await self._check_decoding(reply.asked)
        async with self.admission.place(self.limits.seconds):
            chain = self._waiting_for(reply)
            if chain is None:
                chain = ServedChain(reply, tell)
                chain.work = asyncio.create_task(self._play(chain))
            else:
                self._direct(chain.rollout, reply.asked)
                chain.answer(reply, tell)
            trajectory = await chain.played()
        if trajectory.stop is None:
            assert chain.call is not None, trajectory.meta
            self._keep(chain, chain.call)
            tell(chain.call)  # its result may come from now on
        return trajectory

    async def _play(self, chain: ServedChain) -> Trajectory:
        """A rollout from its beginning to its end."""
        asked, limits = chain.reply.asked, self.limits
        agent, task = self.agent(asked.model), Task(asked.question, history=asked.history)
        # Without a seed every request draws anew; the response says which it was.
        usual = {"temperature": self.serving.temperature, "seed": secrets.randbits(31)}
        client = Toolbox()
        if asked.tools:
            client = _client_tools(asked, await agent.environment.bound(task), chain.ask, limits)
        async with agent.environment.rollout(
            task,
            self.engine,
            budget=Budget(turns=limits.turns, seconds=limits.seconds),
            decoding=Decoding(**{**usual, **asked.sampling}, prompt=agent.prompt),
            client=client,
            on_text=lambda text: chain.narrator.model_text(text),
        ) as rollout:
            chain.begin(rollout)
            self._direct(rollout, asked)
            trajectory = rollout.trajectory
            trajectory.meta["request"] = chain.reply.id
            if asked.steps:
                rollout.recall(_blocks(asked.steps, rollout))
                trajectory.meta["steps"] = RENDERED
            try:
                async with aclosing(rollout.steps()) as steps:
                    async for step in steps:
                        chain.narrator.end_turn(step, trajectory.stop is StopReason.ANSWERED)
            finally:
                if self._out is not None:
                    self._out.write(trajectory.to_json())
        self._check(trajectory)
        if trajectory.answer is not None:
            chain.narrator.answer(trajectory.answer)
        return trajectory

    def _direct(self, rollout: Rollout, asked: ChatRequest) -> None:
        """What a request decides about the turns that follow it."""
        most, used = self.limits.tokens, rollout.trajectory.usage.sampled_tokens
        rollout.budget = replace(
            rollout.budget, tokens=min(most, used + (asked.max_tokens or most))
        )
        constrain = self.serving.constrain or asked.must_call
        rollout.decoding = replace(rollout.decoding, **asked.sampling, constrain=constrain)
        blocks = _blocks_of(rollout)
        if asked.must_call:
            rollout.ends = tuple(blocks[name] for name in asked.callable)
        elif len(asked.callable) < len(asked.tools):
            others = {block for name, block in blocks.items() if name not in asked.callable}
            ending = (*rollout.grammar.tool_roles, *rollout.grammar.of_kind("answer"))
            rollout.ends = tuple(name for name in ending if name not in others)
        else:
            rollout.ends = ()

    async def _check_decoding(self, asked: ChatRequest) -> None:
        """Refuse what would have to be sampled under a grammar and cannot be."""
        if not asked.must_call and not (self.serving.constrain and asked.tools):
            return
        for place, each in enumerate(asked.tools):
            if fault := schema_fault(each.schema):
                where = f"tools[{place}].function.parameters"
                message = fold(f"{where}: no call could be sampled under it: {fault}", 300)
                raise Refused(message, code="invalid_value", param=where)
        constrains = getattr(self.engine, "constrains", None)
        if asked.must_call and constrains and not await asyncio.to_thread(constrains):
            message = "tool_choice: the engine of this model cannot be made to call a tool; send "
            message += "'auto' or 'none'."
            raise Refused(message, code="unsupported_parameter", param="tool_choice")

    # -- chains that wait ---------------------------------------------------------------------

    def _keep(self, chain: ServedChain, call: ClientCall) -> None:
        """Let a chain wait for its client, for a while and as far as there is room."""
        loop, limits, waiting = asyncio.get_running_loop(), self.limits, self._waiting
        waiting[call.id] = chain
        chain.expiry = loop.call_later(limits.wait_s, self._drop, call.id)
        while waiting and (
            len(waiting) > limits.waiting
            or sum(each.size for each in waiting.values()) > limits.waiting_bytes
        ):
            self._drop(next(iter(waiting)))

    def _waiting_for(self, reply: Reply) -> ServedChain | None:
        """The chain that waits for what a request brings, which waits no more."""
        last = reply.asked.steps[-1] if reply.asked.steps else ClientStep("")
        chain = self._waiting.get(last.calls[0].id) if len(last.calls) == 1 else None
        if chain is None or not chain.is_asked_by(reply):
            return None
        assert chain.expiry is not None
        chain.expiry.cancel()
        return self._waiting.pop(last.calls[0].id)

    def _drop(self, call: str) -> None:
        """End a chain that waits."""
        chain = self._waiting.pop(call)
        assert chain.expiry is not None
        chain.expiry.cancel()
        self.log(f"{chain.reply.id} waits no more for a tool of its client")
        self._ending.add(chain.work)
        chain.work.add_done_callback(self._ended)
        chain.work.cancel()

    def _ended(self, work: asyncio.Task[Trajectory]) -> None:
        self._ending.discard(work)
        if not work.cancelled() and (error := work.exception()) is not None:
            self.log(fold(f"a chain that waited no more ended with an error: {error}", LOGGED))

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
            if reply.asked.steps:
                parts.append(f"steps {trajectory.meta['continued']}")
        if self.serving.log_questions:
            parts.append(shown(reply.asked.question))
        self.log(harmless(" | ".join(parts)))


def _client_tools(
    asked: ChatRequest,
    grammar: Grammar,
    ask: Callable[[str, str], Awaitable[str]],
    limits: ServingLimits,
) -> Toolbox:
    """The tools of a client beside those that a grammar is bound to."""
    own = {*grammar.tags, *(role.tool for role in grammar.roles)}
    for place, each in enumerate(asked.tools):
        if each.name in own:
            message = f"tools[{place}].function.name is {each.name!r}, which is a block of this "
            message += f"agent ({', '.join(grammar.tags)}); give the tool another name."
            param = f"tools[{place}].function.name"
            raise Refused(fold(message, 350), code="invalid_value", param=param)
    tools = [
        Tool(
            each.name,
            partial(ask, each.name),
            each.about,
            body="json",
            schema=each.schema,
            timeout_s=math.inf,  # how long it may take is decided where its chain waits
            max_chars=limits.characters,
        )
        for each in asked.tools
    ]
    return Toolbox(with_blocks(grammar, tools))


def _blocks_of(rollout: Rollout) -> dict[str, str]:
    """The block of each tool of the client."""
    roles = (rollout.grammar.by_name[name] for name in rollout.grammar.tool_roles)
    blocks = {role.tool or role.name: role.name for role in roles}
    return {name: blocks[name] for name in rollout.client}


def _blocks(steps: Sequence[ClientStep], rollout: Rollout) -> Iterator[Block]:
    """What a client's messages say of a chain, as blocks; each opens with a space, as those that
    models are trained on do."""
    grammar, blocks = rollout.grammar, _blocks_of(rollout)
    thinker = next(iter(grammar.of_kind("think")), "")
    for step in steps:
        if step.text and thinker:
            yield Block(thinker, f" {step.text}")
        for call, result in zip(step.calls, step.results, strict=True):
            yield Block(blocks[call.name], f" {call.arguments}")
            yield Block(grammar.observation, rollout.client[call.name].show(result).text)


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
