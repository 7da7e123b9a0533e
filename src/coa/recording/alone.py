"""One chat model at work alone, in its native tool-calling format, recorded as an episode.

The loop plays it on the engine that any rollout with `--dialect tools` has. Its requests go through
the journal and the budgets of the team of language models, so that a run that was stopped pays for
nothing twice. The episode has one agent, whose calls and answer the converter reads.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

from coa.engines.chat import ChatReply
from coa.engines.tool_calls import ToolCallEngine
from coa.errors import CoaError
from coa.grammar import ChatMessage, load_grammar, parse
from coa.grammar.grammar import NO_THOUGHT
from coa.io.runs import Json
from coa.loop import Budget, Decoding, Rollout
from coa.recording.budget import Purse
from coa.recording.chat import ALONE, EpisodeOver, LLMSettings, Paid, Request
from coa.recording.episode import (
    SYSTEM,
    USER,
    AgentSpec,
    Episode,
    EpisodeEvent,
    Message,
    ModelCall,
    ToolUse,
)
from coa.tasks import Task
from coa.tools.base import Observation, Toolbox, ToolCall
from coa.trajectory import Step, StopReason

GRAMMAR = "react"
Answer = Callable[[Request, Purse], Awaitable[Paid]]
Use = tuple[ToolCall, Observation]


async def record_alone(
    task: Task, toolbox: Toolbox, answer: Answer, settings: LLMSettings, seed: int, name: str
) -> Episode:
    """Work on one public task until there is an answer, or a budget ends."""
    asked = _Requests(task, answer, settings, seed)
    engine = ToolCallEngine(settings.model, ask=asked)
    episode = Episode(task.id, task.question, name, [AgentSpec(ALONE, ALONE, "")], seed=seed)
    episode.meta.update(task.meta)
    episode.events.append(Message(USER, ALONE, task.question))
    turns, longest = Budget.turns, settings.longest
    budget = Budget(turns=turns, tokens=turns * longest, turn_tokens=longest)
    how = Decoding(temperature=settings.temperature, seed=seed)
    try:
        rollout = Rollout(task, engine, load_grammar(GRAMMAR), toolbox, budget=budget, decoding=how)
        async for step in rollout:
            used = rollout.calls[len(asked.uses) :]
            asked.uses += used
            episode.events += _events(step, rollout, asked.take(), used)
    finally:
        await engine.close()
    if asked.trouble is not None:  # it concerns all tasks, not this one
        raise asked.trouble
    trajectory = rollout.trajectory
    episode.agents = [AgentSpec(ALONE, ALONE, asked.system)]
    seconds = trajectory.seconds
    episode.seconds = {"total": seconds["total"], "model": seconds["engine"]}
    episode.seconds["tools"] = seconds["tools"]
    episode.answer = trajectory.answer
    if trajectory.answer is None:
        episode.error = asked.over or trajectory.error or f"no answer: {trajectory.stop}"
    return episode


class _Requests:
    """Sends the engine's requests through the journal, and keeps what came of the last one."""

    def __init__(self, task: Task, answer: Answer, settings: LLMSettings, seed: int) -> None:
        self._task, self._answer, self._seed = task, answer, seed
        self._purse = Purse(settings.task_tokens, settings.task_money)
        self._call: ModelCall | None = None
        self.system = self.over = ""
        self.trouble: CoaError | None = None
        """What ends the run for all."""
        self.uses: list[Use] = []
        """Calls that are in the episode already."""

    async def __call__(self, body: Json) -> ChatReply:
        said = [(each["role"], _as_text(each)) for each in body["messages"]]
        self.system = said[0][1]
        messages = [ChatMessage("user", text) for _, text in said]  # for an estimate of tokens
        request = Request(self._task.id, ALONE, messages, self._seed, body=body)
        try:
            paid = await self._answer(request, self._purse)
        except CoaError as trouble:
            self.trouble = trouble
            raise
        except EpisodeOver as over:
            self.over = str(over)
            raise
        reply = ChatReply.read(paid.response)
        self._call = replace(paid.call, text=_as_text(reply.message))
        sampled, prompt = paid.call.sampled_tokens or 0, paid.call.prompt_tokens or 0
        return reply._replace(prompt_tokens=prompt, sampled_tokens=sampled)

    def take(self) -> ModelCall | None:
        """The model call of the turn just played; a further call of one reply has none."""
        call, self._call = self._call, None
        return call


def _events(
    step: Step, rollout: Rollout, call: ModelCall | None, used: Sequence[Use]
) -> Iterator[EpisodeEvent]:
    """What a turn was: calls of tools, the answer, or nothing that could be read."""
    grammar, text = rollout.grammar, step.model.text
    blocks = parse(grammar, text).blocks
    thought = " ".join(b.body.strip() for b in blocks if b.role == grammar.interleave)
    thought = "" if thought == NO_THOUGHT else thought
    for made, seen in used:
        if call is not None:
            facts = {"part": "query"}
            yield Message(ALONE, SYSTEM, made.argument, thought, facts, call=call)
        yield ToolUse(ALONE, made.tool, made.argument, seen.text, seen.failure)
    if rollout.trajectory.stop is StopReason.ANSWERED:
        answer, facts = rollout.trajectory.answer or "", {"part": "verdict"}
        yield Message(ALONE, USER, answer, thought, facts, call=call)
    elif not used and call is not None:
        told = parse(grammar, step.observation.text, env=True).blocks if step.observation else []
        complaint = "\n".join(block.body for block in told) or "The reply was cut."
        facts = {"part": "malformed", "complaint": complaint}
        yield Message(ALONE, SYSTEM, call.text, "", facts, True, call=call)
        yield Message(SYSTEM, ALONE, complaint)


def _as_text(message: Json) -> str:
    """A message of the API as one text, its calls behind what it says."""
    said = [message["content"]] if isinstance(message.get("content"), str) else []
    calls = message.get("tool_calls")
    called = (each.get("function") for each in calls if isinstance(each, dict)) if calls else ()
    return "\n".join([*said, *(json.dumps(each, ensure_ascii=False) for each in called)])
