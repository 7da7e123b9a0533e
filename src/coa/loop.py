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
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from coa.engines.base import Completion, Engine, OnText, Sampling, sampling_key
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
from coa.grammar.constrain import Schemas, TextLimits, turn_grammar
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
    constrain: bool = False
    """Sample only what the grammar allows; the engine must be able to."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature!r}, expected 0 or more.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p!r}, expected more than 0 and at most 1.")
        if not 0 <= self.min_p < 1:
            raise ConfigError(f"min_p is {self.min_p!r}, expected 0 or more and less than 1.")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k!r}, expected 0 (all tokens) or more.")


@dataclass
class _Work:
    """What the loop remembers between turns."""

    grammar: Grammar
    deadline: float
    context: int
    ids: list[int]
    schemas: Schemas = ()
    state: GrammarState = field(default_factory=GrammarState)
    memory: dict[ToolCall, Observation] = field(default_factory=dict)
    seen: int = 0
    """Length of the ids that the engine has processed already."""
    failures: int = 0

    def remaining_s(self) -> float:
        return self.deadline - time.monotonic()


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
    ) -> None:
        self.engine, self.toolbox, self.on_text = engine, toolbox, on_text
        self.budget, self.decoding = budget or Budget(), decoding or Decoding()
        self.grammar = toolbox.bind(grammar)
        self.trajectory = _opening(task.public(), self.grammar, engine, self.decoding)
        self.trajectory.book = book or GrammarBook([grammar])

    def fail(self, error: CoaError) -> Trajectory:
        """End it before it began: what it needs could not be had."""
        self.trajectory.stop = StopReason.TOOL_FAILED
        self.trajectory.error = clean(str(error))
        return self.trajectory

    async def finish(self) -> Trajectory:
        """Play to the end."""
        async for _ in self:
            pass
        return self.trajectory

    def __aiter__(self) -> AsyncGenerator[Step, None]:
        return self.steps()

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Each model turn with its observation, as soon as both are there."""
        trajectory, budget, engine = self.trajectory, self.budget, self.engine
        if trajectory.stop is not None:  # it failed before it began
            return
        limit = min(budget.context or engine.context, engine.context)
        started = time.monotonic()
        trajectory.seconds.update(total=0.0, engine=0.0, tools=0.0)
        schemas = self.toolbox.schemas(self.grammar) if self.decoding.constrain else ()
        work = _Work(self.grammar, started + budget.seconds, limit, trajectory.ids, schemas)
        try:
            async with AsyncExitStack() as sessions:
                try:
                    tools = await sessions.enter_async_context(self.toolbox.opened())
                except CoaError as error:
                    self.fail(error)
                while trajectory.stop is None:
                    trajectory.stop = _spent(trajectory, work, budget)
                    if trajectory.stop is not None:
                        break
                    segment = await _turn(
                        trajectory, work, engine, budget, self.decoding, self.on_text
                    )
                    if segment is None:
                        break
                    step = Step(segment, await _respond(trajectory, work, engine, tools, budget))
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            trajectory.stop = trajectory.stop or StopReason.CANCELLED
            raise
        finally:
            trajectory.seconds["total"] = time.monotonic() - started
            _release(trajectory, work.state)


def _opening(task: Task, grammar: Grammar, engine: Engine, decoding: Decoding) -> Trajectory:
    """A trajectory that holds only its prompt."""
    system = system_prompt(grammar, decoding.prompt)
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
        # Text mode of a server: ids are re-encoded, logprobs unknown, so no one may train on them.
        meta={} if getattr(engine, "exact", True) else {"exact": False},
    )


async def run(
    task: Task, engine: Engine, grammar: Grammar, toolbox: Toolbox, **how: Any
) -> Trajectory:
    """Roll out one task to its end; `how` is what a Rollout takes."""
    return await Rollout(task, engine, grammar, toolbox, **how).finish()


def _spent(trajectory: Trajectory, work: _Work, budget: Budget) -> StopReason | None:
    """The budget that is used up, if any."""
    usage = trajectory.usage
    if usage.turns >= budget.turns:
        return StopReason.TURNS
    if usage.sampled_tokens >= budget.tokens:
        return StopReason.TOKENS
    if len(work.ids) >= work.context:
        if not usage.turns:
            found = f"{len(work.ids)} tokens, and the context holds {work.context}"
            trajectory.error = f"the question and its prompt alone have {found}"
        return StopReason.CONTEXT
    return StopReason.TIME if work.remaining_s() <= 0 else None


def _release(trajectory: Trajectory, state: GrammarState) -> None:
    """When a budget ended the work, the last suggested answer is better than none."""
    stop = trajectory.stop
    if stop is not None and stop.truncated and state.suggestion:
        trajectory.meta["cut_by"] = stop.value
        trajectory.stop, trajectory.answer = StopReason.RELEASED, state.suggestion


async def _turn(
    trajectory: Trajectory,
    work: _Work,
    engine: Engine,
    budget: Budget,
    decoding: Decoding,
    on_text: OnText | None,
) -> Segment | None:
    """Sample one model turn into the trajectory; None when the engine or the clock ended it.

    A stop string inside a program (a string that holds a closing tag) does not end the turn:
    sampling goes on until the block is really closed.
    """
    segment = Segment(Author.MODEL, "", [], [])
    usage = trajectory.usage
    while True:
        room = min(
            budget.turn_tokens - len(segment.ids or ()),
            budget.tokens - usage.sampled_tokens,
            work.context - len(work.ids),
        )
        if room <= 0:
            trajectory.stop = _which_limit(usage.sampled_tokens, work, budget)
            break
        sampling = _sampling(trajectory, work, budget, decoding, room)
        completion = await _generate(trajectory, work, engine, sampling, on_text)
        if completion is None:
            break
        usage.prompt_tokens += len(work.ids)
        usage.cached_tokens += work.seen
        usage.sampled_tokens += len(completion.ids)
        assert segment.ids is not None and segment.logprobs is not None
        segment.ids += completion.ids
        segment.logprobs += completion.logprobs
        if completion.allowed_logmass is not None:
            segment.allowed = (segment.allowed or []) + completion.allowed_logmass
        work.ids += completion.ids
        work.seen = len(work.ids)
        segment.text = engine.decode(segment.ids)
        if completion.finish == "length":
            trajectory.stop = _which_limit(usage.sampled_tokens, work, budget)
            break
        if completion.finish == "eos" or not completion.ids:
            break
        if not _inside_code(work.grammar, segment.text):
            break
    if segment.ids:
        trajectory.segments.append(segment)
        usage.turns += 1
    elif trajectory.stop is None:  # the model ended its turn without a word
        usage.turns += 1
        trajectory.segments.append(segment)
    return segment if trajectory.stop is None or segment.ids else None


def _sampling(
    trajectory: Trajectory, work: _Work, budget: Budget, decoding: Decoding, room: int
) -> Sampling:
    """How to sample from where the work stands, at most `room` tokens."""
    constraint = ""
    if decoding.constrain:
        limits = TextLimits.within(budget.turn_tokens)
        constraint = turn_grammar(work.grammar, work.state, limits, work.schemas)
    return Sampling(
        temperature=decoding.temperature,
        top_p=decoding.top_p,
        top_k=decoding.top_k,
        min_p=decoding.min_p,
        max_tokens=room,
        stop=work.grammar.stop_strings,
        key=sampling_key(decoding.seed, trajectory.task_id, decoding.sample, len(work.ids)),
        constraint=constraint,
    )


def _which_limit(sampled: int, work: _Work, budget: Budget) -> StopReason:
    full = len(work.ids) >= work.context and sampled < budget.tokens
    return StopReason.CONTEXT if full else StopReason.TOKENS


def _inside_code(grammar: Grammar, text: str) -> bool:
    """The text ends within a program, at a closing tag that its fences say is a string."""
    name = parse(grammar, text).open_role
    return name in grammar.by_name and grammar.by_name[name].body == "code"


async def _generate(
    trajectory: Trajectory,
    work: _Work,
    engine: Engine,
    sampling: Sampling,
    on_text: OnText | None,
) -> Completion | None:
    started = time.monotonic()
    try:
        with boundary(EngineError, "the engine"):
            async with asyncio.timeout(max(0.0, work.remaining_s())):
                return await engine.generate(work.ids, sampling, on_text)
    except CoaError as error:
        if isinstance(error.__cause__, TimeoutError) and work.remaining_s() <= 0:
            trajectory.stop = StopReason.TIME
        else:
            trajectory.stop, trajectory.error = StopReason.ENGINE_FAILED, clean(str(error))
        return None
    finally:
        trajectory.seconds["engine"] += time.monotonic() - started


async def _respond(
    trajectory: Trajectory, work: _Work, engine: Engine, toolbox: Toolbox, budget: Budget
) -> Segment | None:
    """Act on the turn just sampled: finish, call a tool, or explain what was wrong."""
    if trajectory.stop is not None:
        _note_suggestion(work, trajectory.segments[-1].text)
        return None
    text = trajectory.segments[-1].text
    work.state, block, fault = read_turn(work.grammar, work.state, text)
    if fault is not None:
        trajectory.usage.malformed += 1
        if trajectory.usage.malformed > budget.malformed:
            trajectory.stop, trajectory.error = StopReason.MALFORMED, fault.message
            return None
        return _observe(trajectory, work, engine, f"Error: {fault.message}")
    assert block is not None
    role = work.grammar.by_name[block.role]
    if role.kind == "answer":
        trajectory.stop, trajectory.answer = StopReason.ANSWERED, block.body.strip()
        return None
    call = ToolCall(role.tool or role.name, block.body.strip())
    observation = await _call(trajectory, work, toolbox, call)
    if observation is None:
        return None
    segment = _observe(trajectory, work, engine, observation.text)
    if observation.failure in ("failed", "timeout"):
        work.failures += 1
        if work.failures >= budget.tool_failures and trajectory.stop is None:
            timed_out = observation.failure == "timeout"
            trajectory.stop = StopReason.TOOL_TIMEOUT if timed_out else StopReason.TOOL_FAILED
            trajectory.error = observation.text
    else:
        work.failures = 0
    return segment


def read_turn(
    grammar: Grammar, state: GrammarState, text: str
) -> tuple[GrammarState, Block | None, Fault | None]:
    """Move a state over the blocks of a turn: where it stands then, and the block to act on or the
    first fault.

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
        state = moved
        if state.awaiting or state.done:
            return state, block, None
    if first_fault is None:
        want = " or ".join(f"<{name}>" for name in grammar.allowed(state))
        message = f"The turn ended without a call or an answer; write {want}."
        first_fault = Fault(FaultKind.UNCLOSED, len(text), message)
    return state, None, first_fault


def _note_suggestion(work: _Work, text: str) -> None:
    """A turn cut by a budget may still hold a suggestion worth releasing."""
    work.state, _, _ = read_turn(work.grammar, work.state, text)


async def _call(
    trajectory: Trajectory, work: _Work, toolbox: Toolbox, call: ToolCall
) -> Observation | None:
    """Run a tool, or answer a repeated call from memory; None when the clock ran out."""
    trajectory.usage.tool_calls += 1
    chosen = toolbox.get(call.tool)
    pure = chosen is None or chosen.pure
    known = work.memory.get(call) if pure else None  # another's answer may have changed
    if known is not None:
        return Observation(f"{REPEATED}\n{known.text}")
    started = time.monotonic()
    try:
        observation = await toolbox.call(call, limit_s=max(0.0, work.remaining_s()))
    finally:
        trajectory.seconds["tools"] += time.monotonic() - started
    if observation.failure == "timeout" and work.remaining_s() <= 0:
        trajectory.stop = StopReason.TIME
        return None
    if observation.failure in (None, "mistake"):
        work.memory[call] = observation
    return observation


def _observe(trajectory: Trajectory, work: _Work, engine: Engine, text: str) -> Segment | None:
    """Append an observation; one that does not fit ends the rollout with its history whole."""
    after = trajectory.segments[-1].text
    rendered = work.grammar.render_observation(text, after)
    ids = engine.encode(rendered)
    if len(work.ids) + len(ids) >= work.context:
        trajectory.stop = StopReason.CONTEXT
        return None
    segment = Segment(Author.ENV, rendered, ids)
    trajectory.segments.append(segment)
    trajectory.usage.observation_tokens += len(ids)
    work.ids += ids
    moved = work.grammar.advance(work.state, Block(work.grammar.observation, text))
    assert isinstance(moved, GrammarState)
    work.state = moved
    return segment
