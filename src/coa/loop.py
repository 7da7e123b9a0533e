"""Rollout: the one loop where model text and tool output interleave.

Distillation checks, training, evaluation and serving all run it. It fills a Trajectory in place and
yields each Step as it is complete, so whoever stops listening (Ctrl-C, a closed connection) keeps a
valid partial trajectory. A failed rollout is a result: it has a StopReason and never raises for
what a model, a tool or an engine did.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from coa.engines.base import (
    Completion,
    Engine,
    NativeEngine,
    OnText,
    Sampling,
    sampling_key,
)
from coa.errors import CoaError, ConfigError, EngineError, boundary
from coa.grammar import (
    Block,
    Fault,
    FaultKind,
    Grammar,
    GrammarState,
    PromptKind,
    parse,
    system_prompt,
)
from coa.grammar.constrain import TextLimits, turn_grammar
from coa.grammar.load import GrammarBook
from coa.tasks import Task
from coa.tools.base import Observation, Toolbox, ToolCall, clean
from coa.trajectory import Author, Segment, Step, StopReason, Trajectory

REPEATED = "You made this call before; the result is the same."


@dataclass(frozen=True)
class Budget:
    """What one rollout may spend. Reaching a limit truncates it; only `malformed` blames it."""

    turns: int = 12
    tokens: int = 2048
    """Sampled tokens over all turns."""
    turn_tokens: int = 512
    """Sampled tokens in one turn."""
    context: int = 0
    """Prompt, sampled and observation tokens together; 0 takes the engine's limit."""
    seconds: float = 600.0
    malformed: int = 2
    """Faulty turns that are explained to the model; one more ends the rollout."""
    tool_failures: int = 3
    """Tool failures in a row that end the rollout."""


@dataclass(frozen=True)
class Decoding:
    """How the model is sampled; the seed is mixed with task, sample and position."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    sample: int = 0
    prompt: PromptKind = "compact"
    seeded: bool = True
    """Whether a server is told the seed; without it the same rollout is another one next time."""
    constrain: bool = False
    """Sample only what the grammar allows; the engine must be able to."""

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("temperature", 0 <= self.temperature < math.inf, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "0 or more and less than 1"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
        ):
            if not fits:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected {expected}.")


class Rollout:
    """One task, played to its end. Iterating gives each Step as it is complete; `trajectory` holds
    what there is at any time, so whoever stops listening keeps a valid partial one."""

    def __init__(
        self,
        task: Task,
        engine: Engine,
        grammar: Grammar,
        toolbox: Toolbox,
        *,
        budget: Budget | None = None,
        decoding: Decoding | None = None,
        on_text: OnText | None = None,
        book: GrammarBook | None = None,
        client: Toolbox | None = None,
    ) -> None:
        """`client`: tools that whoever asked runs; the clock stands still while they do."""
        self.toolbox, self.on_text = toolbox, on_text
        self.budget, self.decoding = budget or Budget(), decoding or Decoding()
        self.client = client or Toolbox()
        offered = Toolbox([*toolbox.values(), *self.client.values()]) if client else toolbox
        self.grammar = offered.bind(grammar)
        if isinstance(engine, NativeEngine):
            engine = engine.bound(self.grammar, offered.declarations(self.grammar))
        self.engine = engine
        self.trajectory = _opening(task.public(), self.grammar, self.engine, self.decoding)
        self.trajectory.book = book or GrammarBook([grammar])
        self._context = min(self.budget.context or engine.context, engine.context)
        self._deadline = math.inf
        self._ids = self.trajectory.ids
        self._seen = 0
        """How many of the ids the engine has processed already."""
        self.ends: tuple[str, ...] = ()
        """Roles that may end a turn for now; empty: all that the grammar allows."""
        self._schemas = offered.schemas(self.grammar)
        self._state = GrammarState()
        self._memory: dict[ToolCall, Observation] = {}
        self._failures = 0
        self._waited = 0.0
        self.calls: list[tuple[ToolCall, Observation]] = []
        """What was called and what came back, for whoever records it."""

    def fail(self, error: CoaError) -> Trajectory:
        """End it before it began: what it needs could not be had."""
        self.trajectory.stop = StopReason.TOOL_FAILED
        self.trajectory.error = clean(str(error))
        return self.trajectory

    def recall(self, blocks: Iterable[Block]) -> None:
        """Go on after blocks that were not sampled here: thoughts, calls and what came back. They
        are shown like an observation, so nobody trains on them, and nothing in them is a tag."""
        for block in blocks:
            body = self.grammar.escape(block.body)
            text = self.grammar.render([replace(block, body=body)]) + "\n"
            if block.role == self.grammar.observation:
                self._state = replace(self._state, awaiting=False)
            elif self.grammar.by_name[block.role].kind == "tool":
                self._state = GrammarState(last=block.role, awaiting=True)
            ids = self.engine.encode(text)
            self.trajectory.segments.append(Segment(Author.ENV, text, ids))
            self._ids += ids

    async def finish(self) -> Trajectory:
        """Play to the end."""
        async for _ in self:
            pass
        return self.trajectory

    def __aiter__(self) -> AsyncGenerator[Step, None]:
        return self.steps()

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Each model turn with its observation, as soon as both are there."""
        trajectory = self.trajectory
        if trajectory.stop is not None:  # it failed before it began
            return
        started = time.monotonic()
        self._deadline = started + self.budget.seconds
        trajectory.seconds.update(total=0.0, engine=0.0, tools=0.0)
        try:
            async with AsyncExitStack() as sessions:
                try:
                    tools = await sessions.enter_async_context(self.toolbox.opened())
                except CoaError as error:
                    self.fail(error)
                while trajectory.stop is None:
                    trajectory.stop = self._spent()
                    if trajectory.stop is not None:
                        break
                    segment = await self._turn()
                    if segment is None:
                        break
                    yield Step(segment, await self._respond(tools))
        except (asyncio.CancelledError, GeneratorExit):
            trajectory.stop = trajectory.stop or StopReason.CANCELLED
            raise
        finally:
            trajectory.seconds["total"] = time.monotonic() - started - self._waited
            self._release()

    def _remaining_s(self) -> float:
        return self._deadline - time.monotonic()

    def _spent(self) -> StopReason | None:
        """The budget that is used up, if any."""
        usage = self.trajectory.usage
        if usage.turns >= self.budget.turns:
            return StopReason.TURNS
        if usage.sampled_tokens >= self.budget.tokens:
            return StopReason.TOKENS
        if len(self._ids) >= self._context:
            if not usage.turns:
                found = f"{len(self._ids)} tokens, and the context holds {self._context}"
                self.trajectory.error = f"the question and its prompt alone have {found}"
            return StopReason.CONTEXT
        return StopReason.TIME if self._remaining_s() <= 0 else None

    def _release(self) -> None:
        """When a budget ended the work, the last suggested answer is better than none."""
        trajectory, suggestion = self.trajectory, self._state.suggestion
        if trajectory.stop is not None and trajectory.stop.truncated and suggestion:
            trajectory.meta["cut_by"] = trajectory.stop.value
            trajectory.stop, trajectory.answer = StopReason.RELEASED, suggestion

    # -- the model's turn -------------------------------------------------------------------

    async def _turn(self) -> Segment | None:
        """Sample one model turn into the trajectory; None when the engine or the clock ended it.

        A stop string inside a program (a string that holds a closing tag) does not end the turn:
        sampling goes on until the block is really closed.
        """
        trajectory, budget, usage = self.trajectory, self.budget, self.trajectory.usage
        ids, logprobs = list[int](), list[float]()
        segment = Segment(Author.MODEL, "", ids, logprobs)
        while True:
            room = min(
                budget.turn_tokens - len(ids),
                budget.tokens - usage.sampled_tokens,
                self._context - len(self._ids),
            )
            completion = await self._generate(room) if room > 0 else None
            if completion is not None:
                counted = completion.usage or (len(self._ids), self._seen, len(completion.ids))
                usage.prompt_tokens += counted[0]
                usage.cached_tokens += counted[1]
                usage.sampled_tokens += counted[2]
                ids += completion.ids
                logprobs += completion.logprobs
                if completion.allowed_logmass is not None:
                    segment.allowed = (segment.allowed or []) + completion.allowed_logmass
                self._ids += completion.ids
                self._seen = len(self._ids)
                segment.text = self.engine.decode(ids)
            if room <= 0 or (completion is not None and completion.finish == "length"):
                full = len(self._ids) >= self._context and usage.sampled_tokens < budget.tokens
                trajectory.stop = StopReason.CONTEXT if full else StopReason.TOKENS
                break
            if completion is None or completion.finish == "eos" or not completion.ids:
                break
            if not _inside_code(self.grammar, segment.text):
                break
        if not ids and trajectory.stop is not None:
            return None
        trajectory.segments.append(segment)  # an empty one: the model ended its turn without a word
        usage.turns += 1
        return segment

    async def _generate(self, room: int) -> Completion | None:
        """Sample at most `room` tokens from where the work stands; None when that failed."""
        trajectory, started = self.trajectory, time.monotonic()
        sampling = self._sampling(room)
        try:
            with boundary(EngineError, "the engine"):
                async with asyncio.timeout(max(0.0, self._remaining_s())):
                    return await self.engine.generate(self._ids, sampling, self.on_text)
        except CoaError as error:
            if isinstance(error.__cause__, TimeoutError) and self._remaining_s() <= 0:
                trajectory.stop = StopReason.TIME
            else:
                trajectory.stop, trajectory.error = StopReason.ENGINE_FAILED, clean(str(error))
            return None
        finally:
            trajectory.seconds["engine"] += time.monotonic() - started

    def _sampling(self, room: int) -> Sampling:
        decoding, constraint = self.decoding, ""
        if decoding.constrain:
            limits = TextLimits.within(self.budget.turn_tokens)
            state, schemas = self._state, self._schemas
            constraint = turn_grammar(self.grammar, state, limits, schemas, self.ends)
        task, place = self.trajectory.task_id, len(self._ids)
        return Sampling(
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k,
            min_p=decoding.min_p,
            max_tokens=room,
            stop=self.grammar.stop_strings,
            key=sampling_key(decoding.seed, task, decoding.sample, place),
            seeded=decoding.seeded,
            constraint=constraint,
        )

    # -- what follows it --------------------------------------------------------------------

    async def _respond(self, tools: Toolbox) -> Segment | None:
        """Act on the turn just sampled: finish, call a tool, or explain what was wrong."""
        trajectory, budget = self.trajectory, self.budget
        text = trajectory.segments[-1].text
        self._state, block, fault = read_turn(self.grammar, self._state, text, self.ends)
        if trajectory.stop is not None:  # cut by a budget: it was read for a suggestion to release
            return None
        if fault is not None:
            trajectory.usage.malformed += 1
            if trajectory.usage.malformed > budget.malformed:
                trajectory.stop, trajectory.error = StopReason.MALFORMED, fault.message
                return None
            return self._observe(f"Error: {fault.message}")
        assert block is not None
        role = self.grammar.by_name[block.role]
        if role.kind == "answer":
            trajectory.stop, trajectory.answer = StopReason.ANSWERED, block.body.strip()
            return None
        call = ToolCall(role.tool or role.name, block.body.strip())
        observation = await self._call(tools, call)
        if observation is None:
            return None
        self.calls.append((call, observation))
        segment = self._observe(observation.text)
        failed = observation.failure in ("failed", "timeout")
        self._failures = self._failures + 1 if failed else 0
        if self._failures >= budget.tool_failures and failed and trajectory.stop is None:
            timed_out = observation.failure == "timeout"
            trajectory.stop = StopReason.TOOL_TIMEOUT if timed_out else StopReason.TOOL_FAILED
            trajectory.error = observation.text
        return segment

    async def _call(self, tools: Toolbox, call: ToolCall) -> Observation | None:
        """Run a tool, or answer a repeated call from memory; None when the clock ran out."""
        trajectory = self.trajectory
        trajectory.usage.tool_calls += 1
        if call.tool in self.client:
            return await self._ask(call)
        chosen = tools.get(call.tool)
        pure = chosen is None or chosen.pure
        known = self._memory.get(call) if pure else None  # another's answer may have changed
        if known is not None:
            return Observation(f"{REPEATED}\n{known.text}")
        started = time.monotonic()
        try:
            observation = await tools.call(call, limit_s=max(0.0, self._remaining_s()))
        finally:
            trajectory.seconds["tools"] += time.monotonic() - started
        if observation.failure == "timeout" and self._remaining_s() <= 0:
            trajectory.stop = StopReason.TIME
            return None
        if observation.failure in (None, "mistake"):
            self._memory[call] = observation
        return observation

    async def _ask(self, call: ToolCall) -> Observation:
        """Let whoever asked run a tool of theirs: how long that takes is not up to this side."""
        started = time.monotonic()
        try:
            return await self.client.call(call)
        finally:
            waited = time.monotonic() - started
            self._deadline += waited
            self._waited += waited

    def _observe(self, text: str) -> Segment | None:
        """Append an observation; one that does not fit ends the rollout with its history whole."""
        trajectory = self.trajectory
        rendered = self.grammar.render_observation(text, trajectory.segments[-1].text)
        ids = self.engine.encode(rendered)
        if len(self._ids) + len(ids) >= self._context:
            trajectory.stop = StopReason.CONTEXT
            return None
        segment = Segment(Author.ENV, rendered, ids)
        trajectory.segments.append(segment)
        trajectory.usage.observation_tokens += len(ids)
        self._ids += ids
        moved = self.grammar.advance(self._state, Block(self.grammar.observation, text))
        assert isinstance(moved, GrammarState)
        self._state = moved
        return segment


async def run(
    task: Task, engine: Engine, grammar: Grammar, toolbox: Toolbox, **how: Any
) -> Trajectory:
    """Roll out one task to its end; `how` is what a Rollout takes."""
    return await Rollout(task, engine, grammar, toolbox, **how).finish()


def _opening(task: Task, grammar: Grammar, engine: Engine, decoding: Decoding) -> Trajectory:
    """A trajectory that holds only its prompt."""
    system = system_prompt(grammar, decoding.prompt, task.history)
    ids = engine.encode_prompt(system, task.question)
    return Trajectory(
        task_id=task.id,
        question=task.question,
        grammar=grammar.name,
        grammar_id=grammar.unbound_id,
        prompt=decoding.prompt,
        tools=list(grammar.tool_roles),
        segments=[Segment(Author.PROMPT, system, ids)],
        weights=engine.weights,
        seed=decoding.seed,
        sample=decoding.sample,
        meta=_marks(engine),
    )


def _marks(engine: Engine) -> dict[str, Any]:
    """What a trajectory says of how its engine is asked, where that is not by token ids."""
    # Text mode of a server: ids are re-encoded, logprobs unknown, so no one may train on them.
    exact, dialect = getattr(engine, "exact", True), getattr(engine, "dialect", "")
    return ({} if exact else {"exact": False}) | ({"dialect": dialect} if dialect else {})


def _inside_code(grammar: Grammar, text: str) -> bool:
    """The text ends within a program, at a closing tag that its fences say is a string."""
    name = parse(grammar, text).open_role
    return name in grammar.by_name and grammar.by_name[name].body == "code"


def read_turn(
    grammar: Grammar, state: GrammarState, text: str, ends: Collection[str] = ()
) -> tuple[GrammarState, Block | None, Fault | None]:
    """Move a state over the blocks of a turn: where it stands then, and the block to act on or the
    first fault. `ends` are the roles that may end it, where not all may.

    What follows a call or an answer within the last token is not read: the turn ended there.
    """
    parsed = parse(grammar, text)
    first_fault = parsed.faults[0] if parsed.faults else None
    for block in parsed.blocks:
        if first_fault is not None and first_fault.at < block.end:
            break
        moved = grammar.advance(state, block)
        if isinstance(moved, Fault):
            return state, None, moved
        if moved.ended and ends and block.role not in ends:
            want = " or ".join(f"<{name}>" for name in ends)
            message = f"<{block.role}> may not be written now; write {want}."
            return state, None, Fault(FaultKind.ILLEGAL, block.start, message)
        state = moved
        if state.ended:
            return state, block, None
    if first_fault is None:
        want = grammar.choice(grammar.allowed(state))
        message = f"The turn ended without a call or an answer; write {want}."
        first_fault = Fault(FaultKind.UNCLOSED, len(text), message)
    return state, None, first_fault
