"""What goes back: the pieces of a chain, and the objects of OpenAI's chat API around them.

The chain is sent twice for clients and once for programs: `reasoning_content` (DeepSeek's name, and
vLLM's for long) and `reasoning` (vLLM's present name, and OpenRouter's) hold the same running text,
so that whichever a client reads is there; `coa` has the same pieces with role and kind.

JSON is written in ASCII: a line break, U+2028 or anything else that a model or a page wrote is
escaped within it, so that no text can end an event or begin another.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from coa.grammar import Grammar, Splitter
from coa.grammar.parse import Event
from coa.io.runs import Json
from coa.serving.request import ChatRequest, ClientCall
from coa.trajectory import Step, Trajectory
from coa.view.terminal import observed

STRAY = "stray"
"""Role of what a model wrote outside any block."""
DONE = b"data: [DONE]\n\n"
STILL_HERE = b": still at work\n\n"
"""A comment, which clients skip: it keeps a silent connection open."""


class Piece(NamedTuple):
    """More text of one block."""

    block: int
    """Counts the blocks of a chain; pieces with the same number belong together."""
    role: str
    kind: str
    """The kind of the role in its grammar; or observation, or stray."""
    text: str
    first: bool
    """It opens its block."""
    accepted: bool = False
    """It is the answer, which is sent as content and not as part of the chain."""

    def to_json(self) -> Json:
        return {"block": self.block, "role": self.role, "kind": self.kind, "text": self.text}

    def as_reasoning(self) -> str:
        """The piece as part of one running text, where each block is a labelled paragraph."""
        if not self.first:
            return self.text
        return f"{self.role}: {self.text}" if self.block == 0 else f"\n\n{self.role}: {self.text}"


Told = Piece | ClientCall
"""What a client is told of a chain, as it happens."""


class Narrator:
    """Tells the chain of one rollout piece by piece, as it is written.

    The text of the answer is held back until the rollout has accepted it: an answer that stands
    where the grammar allows none is taken back by the runtime, and content cannot be.
    """

    def __init__(self, grammar: Grammar, tell: Callable[[Piece], None]) -> None:
        self._grammar, self._tell = grammar, tell
        self._answers = grammar.of_kind("answer")
        self._blocks = 0
        self._opened = False
        """The open block has been told of."""
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._splitter = Splitter(self._grammar, events=True)
        self._heard = self._answer = ""

    def model_text(self, text: str) -> None:
        """More text of the present turn."""
        self._heard += text
        self._take(self._splitter.feed(text))

    def catch_up(self, turn: str) -> None:
        """The text of the present turn: an engine may show less than it sampled."""
        if turn.startswith(self._heard):
            self.model_text(turn[len(self._heard) :])

    def go_on(self) -> None:
        """What comes now is for another reply, with blocks of its own."""
        self._close()
        self._blocks = 0

    def end_turn(self, step: Step, accepted: bool) -> None:
        """The turn is complete, and the environment has answered; `accepted` when its answer
        block ended the rollout."""
        self.catch_up(step.model.text)
        self._splitter.finish()
        self._take(self._splitter.take_events())
        if not accepted:
            self._close()
            self._say(self._answers[0], self._answer)
        if step.observation is not None:
            self._close()
            self._say(self._grammar.observation, observed(step.observation, self._grammar))
        self._close()
        self._begin_turn()

    def answer(self, text: str) -> None:
        """Tell the accepted answer, as a block of its own."""
        self._close()  # a budget may have cut a block that is still open
        self._tell(Piece(self._blocks, self._answers[0], "answer", text, True, accepted=True))

    def _take(self, events: Sequence[Event]) -> None:
        """Faults are not told: the observation after the turn explains them."""
        for event in events:
            if event.kind in ("open", "close"):
                self._close()
            elif event.kind == "text" and event.role in self._answers:
                self._answer += event.text
            elif event.kind == "text" and event.role != self._grammar.observation:
                self._say(event.role or self._grammar.free or STRAY, event.text)

    def _say(self, role: str, text: str) -> None:
        text = text if self._opened else text.lstrip()
        if text:
            kind = "observation" if role == self._grammar.observation else STRAY
            if role in self._grammar.tagged:
                kind = self._grammar.tagged[role].kind
            self._tell(Piece(self._blocks, role, kind, text, not self._opened))
            self._opened = True

    def _close(self) -> None:
        self._blocks += self._opened
        self._opened = False


def as_json(record: Json) -> bytes:
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii")


def event(record: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + as_json(record) + b"\n\n"


@dataclass(frozen=True)
class Reply:
    """Makes the objects that answer one request."""

    asked: ChatRequest
    owner: bytes = b""
    """Whose it is."""
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, told: Sequence[Told], trajectory: Trajectory) -> Json:
        """The answer in one object."""
        chain = [each for each in told if isinstance(each, Piece) and not each.accepted]
        calls = [each.to_json() for each in told if isinstance(each, ClientCall)]
        reasoning = "".join(piece.as_reasoning() for piece in chain)
        content = None if calls else trajectory.answer or ""
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        message |= {"tool_calls": calls} if calls else {}
        choice = {"index": 0, "message": message, "finish_reason": finish_reason(trajectory)}
        made = self._object("chat.completion", {**choice, "logprobs": None})
        made["usage"] = usage_of(trajectory)
        made["coa"] = {**self._ending(trajectory), "steps": steps_of(chain)}
        return made

    def opening(self) -> Json:
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, piece: Told) -> Json:
        """More of the chain, the answer, or a call."""
        if isinstance(piece, ClientCall):
            return self._chunk({"tool_calls": [{"index": 0, **piece.to_json()}]})
        text = piece.as_reasoning()
        delta = {"reasoning_content": text, "reasoning": text}
        return self._chunk({"content": piece.text} if piece.accepted else delta, piece.to_json())

    def closing(self, trajectory: Trajectory) -> list[Json]:
        """The last chunks: how it ended, and what it cost if that was asked for."""
        chunks = [self._chunk({}, self._ending(trajectory), finish_reason(trajectory))]
        if self.asked.include_usage:
            chunks.append({**self._chunk({}), "choices": [], "usage": usage_of(trajectory)})
        return chunks

    def _object(self, kind: str, choice: Json) -> Json:
        made = {"id": self.id, "object": kind, "created": self.created, "model": self.asked.model}
        return {**made, "choices": [choice]}

    def _chunk(self, delta: Json, coa: Json | None = None, finish: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        made = self._object("chat.completion.chunk", choice)
        if self.asked.include_usage:
            made["usage"] = None
        return made if coa is None else {**made, "coa": coa}

    def _ending(self, trajectory: Trajectory) -> Json:
        """What no field of the API says: how the rollout ended, and how to repeat it."""
        ending: Json = {
            "stop": trajectory.stop.value if trajectory.stop else finish_reason(trajectory),
            "trajectory": trajectory.meta["request"],
            "task_id": trajectory.task_id,
            "grammar": trajectory.grammar,
            "weights": public_weights(trajectory.weights),
            "seed": trajectory.seed,
            "turns": trajectory.usage.turns,
            "tool_calls": trajectory.usage.tool_calls,
            "ignored": list(self.asked.ignored),
        }
        if self.asked.steps:
            ending["continued"] = trajectory.meta["continued"]
        return {**ending, "error": trajectory.error} if trajectory.error else ending


def finish_reason(trajectory: Trajectory) -> str:
    """`length` whenever a budget ended the work, also when a suggested answer was released;
    `tool_calls` when it has not ended, and waits for its client."""
    if trajectory.stop is None:
        return "tool_calls"
    return "length" if trajectory.truncated else "stop"


def public_weights(weights: str) -> str:
    """The version of weights as strangers see it: of a server's model that is a path, its name."""
    return Path(weights).name


def usage_of(trajectory: Trajectory) -> Json:
    """Tokens as an API counts them: each turn sends the whole of what came before."""
    usage = trajectory.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.sampled_tokens,
        "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def steps_of(pieces: Iterable[Piece]) -> list[Json]:
    """The blocks that pieces make up."""
    steps: dict[int, Json] = {}
    for piece in pieces:
        if piece.first:
            steps[piece.block] = {"role": piece.role, "kind": piece.kind, "text": ""}
        steps[piece.block]["text"] += piece.text
    return list(steps.values())
