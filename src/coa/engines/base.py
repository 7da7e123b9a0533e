"""Engine: anything that completes token ids. Token ids in, token ids and logprobs out.

The rollout keeps the ids the engine returned; sampled text is never encoded again. Text that
somebody else wrote (a question, an observation) is encoded by `encode`, which never produces a
special token, so that a page cannot close the model's turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from coa.errors import EngineError

if TYPE_CHECKING:
    from coa.grammar import Grammar
    from coa.io.runs import Json

Finish = Literal["stop", "eos", "length"]
OnText = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one turn."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    """Keeps tokens at least this likely relative to the most likely one; 0 keeps all."""
    max_tokens: int = 512
    """Most tokens to sample in one turn."""
    stop: tuple[str, ...] = ()
    """Generation ends with the token that completes any of these; that token is kept whole."""
    key: int = 0
    """Seeds this turn's randomness; see `sampling_key`."""
    seeded: bool = True
    """Whether a server is sent the key; an engine in this process uses it in any case."""
    constraint: str = ""
    """A Lark grammar (llguidance) that the sampled text must follow; empty: anything.

    An engine that cannot constrain raises an EngineError; only a scripted one ignores it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returned for one turn."""

    ids: list[int]
    """All sampled ids: a stop token and an end-of-sequence token were sampled, so they are here.

    Ending the turn is an action of the model like any other: training needs its id and logprob.
    `decode` leaves special tokens out, so the text does not show it.
    """
    logprobs: list[float]
    """One per id, under the distribution sampled from (after temperature; greedy: untempered; under
    a constraint: over the allowed tokens)."""
    finish: Finish
    allowed_logmass: list[float] | None = None
    """Under a constraint, one per id: log of the probability that the allowed tokens had together
    before it was applied (after temperature; greedy: untempered)."""
    usage: tuple[int, int, int] | None = None
    """Tokens of the prompt, those of them from a cache, and sampled ones, as a server counted them
    that exchanges messages; None: the ids tell."""


def sampling_key(seed: int, task_id: str, sample: int, position: int) -> int:
    """A 63-bit key from what identifies a draw, never from when it happens to be made."""
    text = f"{seed}|{task_id}|{sample}|{position}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class TextCodec(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; never a special token, whatever the text says."""

    def encode_prompt(self, system: str, user: str) -> list[int]:
        """Ids of a chat prompt that ends where the assistant's text begins."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""


@runtime_checkable
class Engine(TextCodec, Protocol):
    """The protocol. Engines are safe to call from many coroutines at once."""

    name: str
    """The model reference, for records."""
    weights: str
    """Version of the weights; changes whenever they do."""
    context: int
    """Most tokens of prompt and completion together."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        """Sample one turn. `on_text` gets text as it appears, in order, for display only."""

    async def close(self) -> None:
        """Free what the engine holds."""


@runtime_checkable
class NativeEngine(Protocol):
    """An engine that has to know the tools of a rollout: each is played on what `bound` gives."""

    def bound(self, grammar: Grammar, declared: Mapping[str, Json]) -> Engine:
        """The engine of one rollout with these tools: a declaration for each tool role."""


def most_tokens(prompt: Sequence[int], sampling: Sampling, context: int, remedy: str) -> int:
    """How many tokens may be sampled after a prompt; what can never fit is refused."""
    room = context - len(prompt)
    if not prompt:
        raise EngineError("The prompt has no tokens.")
    if room <= 0:
        raise EngineError(
            f"The prompt has {len(prompt)} tokens and the context holds {context}. "
            f"Shorten it or {remedy} with a larger context."
        )
    if sampling.max_tokens < 1:
        raise EngineError(f"Found max_tokens {sampling.max_tokens}, expected at least 1.")
    return min(sampling.max_tokens, room)


class CodecEngine:
    """What every engine does with its codec."""

    codec: TextCodec

    def encode(self, text: str) -> list[int]:
        return self.codec.encode(text)

    def encode_prompt(self, system: str, user: str) -> list[int]:
        return self.codec.encode_prompt(system, user)

    def decode(self, ids: Sequence[int]) -> str:
        return self.codec.decode(ids)


def common_prefix(first: list[int], second: list[int]) -> int:
    """Length of the common beginning, by halving: slices compare at C speed."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def completes_stop(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], stops: Sequence[str]
) -> bool:
    """Whether the last id completes a stop string, wherever inside that id's text it ends.

    Stop strings are found in decoded text because they rarely end where a token ends.
    """
    if not stops:
        return False
    last = decode(ids[-1:])
    if not any(stop[-1] in last for stop in stops) and "\ufffd" not in last:
        return False
    reach = max(len(stop.encode()) for stop in stops) + 1
    tail = decode(ids[-reach:])
    return any(stop in tail for stop in stops)
