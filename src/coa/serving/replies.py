"""What goes back: objects of OpenAI's chat API, and server-sent events around them.

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
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from coa.io.runs import Json
from coa.serving.stream import Piece
from coa.trajectory import StopReason, Trajectory, Usage

DONE = b"data: [DONE]\n\n"


STILL_HERE = b": still at work\n\n"
"""A comment, which clients skip: it keeps a silent connection open."""


def as_json(record: Json) -> bytes:
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii")


def event(record: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + as_json(record) + b"\n\n"


@dataclass(frozen=True)
class Reply:
    """Makes the objects that answer one request."""

    model: str
    include_usage: bool = False
    ignored: tuple[str, ...] = ()
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, pieces: Iterable[Piece], trajectory: Trajectory) -> Json:
        """The answer in one object."""
        chain = list(pieces)
        reasoning = "".join(piece.as_reasoning() for piece in chain)
        message = {"role": "assistant", "content": trajectory.answer or "", "refusal": None}
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        choice = {"index": 0, "message": message, "finish_reason": finish_reason(trajectory)}
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [{**choice, "logprobs": None}],
            "usage": usage_of(trajectory.usage),
            "coa": {**self._ending(trajectory), "steps": steps_of(chain)},
        }

    def opening(self) -> Json:
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, piece: Piece) -> Json:
        """More of the chain."""
        text = piece.as_reasoning()
        return self._chunk({"reasoning_content": text, "reasoning": text}, coa=piece.to_json())

    def answer(self, piece: Piece) -> Json:
        return self._chunk({"content": piece.text}, coa=piece.to_json())

    def closing(self, trajectory: Trajectory) -> list[Json]:
        """The last chunks: how it ended, and what it cost if that was asked for."""
        ending, finish = self._ending(trajectory), finish_reason(trajectory)
        chunks = [self._chunk({}, finish=finish, coa=ending)]
        if self.include_usage:
            usage = usage_of(trajectory.usage)
            chunks.append({**self._chunk({}), "choices": [], "usage": usage})
        return chunks

    def _chunk(self, delta: Json, finish: str | None = None, coa: Json | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        made: Json = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }
        if self.include_usage:
            made["usage"] = None
        if coa is not None:
            made["coa"] = coa
        return made

    def _ending(self, trajectory: Trajectory) -> Json:
        """What no field of the API says: how the rollout ended, and how to repeat it."""
        assert trajectory.stop is not None, trajectory.task_id
        ending: Json = {
            "stop": trajectory.stop.value,
            "trajectory": self.id,
            "task_id": trajectory.task_id,
            "grammar": trajectory.grammar,
            "weights": public_weights(trajectory.weights),
            "seed": trajectory.seed,
            "turns": trajectory.usage.turns,
            "tool_calls": trajectory.usage.tool_calls,
            "ignored": list(self.ignored),
        }
        if trajectory.error:
            ending["error"] = trajectory.error
        return ending


def finish_reason(trajectory: Trajectory) -> str:
    """`length` whenever a budget ended the work, also when a suggested answer was released."""
    return "length" if trajectory.truncated else "stop"


def public_weights(weights: str) -> str:
    """The version of weights as strangers see it: of a server's model that is a path, its name."""
    return Path(weights).name


def usage_of(usage: Usage) -> Json:
    """Tokens as an API counts them: each turn sends the whole of what came before."""
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


def failure(trajectory: Trajectory) -> tuple[str, str] | None:
    """(message, code) when the world ended a rollout; details are for the log alone."""
    if not trajectory.failed_outside:
        return None
    if trajectory.stop is StopReason.ENGINE_FAILED:
        return "the engine of this model failed; try again.", "engine_failed"
    return "a tool that the agent needs failed again and again; try later.", "tool_failed"
