"""The scheduler: which request sits in which KV slot, and what one step computes.

It is plain, single-threaded code; the thread and the coroutines are in `local.py`. Requests join at
a step boundary. A finished request's slot keeps its tokens, so that the rollout's next turn, whose
prompt begins with them, continues there and only the observation is computed. A prompt that shares
its beginning with somebody else's slot (the samples of a group) gets a copy of that part.

In exact mode a result must not depend on the neighbours: prefill runs one row at a time in chunks
aligned to 64 tokens, only whole chunks computed that way are ever reused, and decoding always has
the same number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from coa.engines.base import Finish, OnText, Sampling
from coa.engines.codec import Codec
from coa.engines.draw import draw_allowed
from coa.engines.llama import Chunk
from coa.engines.masks import Matcher, allowed_tokens
from coa.engines.stops import completes_stop

PREFILL_TOKENS = 1024
EXACT_CHUNK = 64
WORTH_COPYING = 16


class Forward(Protocol):
    """What the scheduler needs of a model."""

    slots: int
    context: int

    def prefill(self, chunks: list[Chunk]) -> Tensor: ...
    def decode(self, tokens: list[int], lengths: list[int]) -> Tensor: ...
    def swap(self, first: int, second: int, length: int) -> None: ...
    def copy(self, source: int, target: int, length: int) -> None: ...
    def load(self, adapter: Any) -> None: ...


@dataclass(eq=False, slots=True)
class Request:
    """One turn being sampled."""

    prompt: list[int]
    sampling: Sampling
    limit: int
    """Most tokens to sample: the caller's limit, or what the context leaves."""
    on_text: OnText | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    cancelled: bool = False
    shown: int = 0
    """How many ids have been passed to `on_text` as text, and how many before the last time."""
    anchor: int = 0
    matcher: Matcher | None = None
    """Says which tokens a constraint allows next."""
    masses: list[float] = field(default_factory=list)
    failure: str = ""
    """Why it ended without a result."""


@dataclass(slots=True)
class Slot:
    """The tokens whose keys and values a slot holds."""

    ids: list[int] = field(default_factory=list)
    exact: int = 0
    """How many of them were computed in aligned chunks."""
    used: int = 0


class Batch:
    """Running requests occupy slots 0..n-1, in order; idle slots come after."""

    def __init__(self, forward: Forward, codec: Codec, eos: frozenset[int], exact: bool) -> None:
        self._forward, self._codec, self._eos, self._exact = forward, codec, eos, exact
        self._slots = [Slot() for _ in range(forward.slots)]
        self.running: list[Request] = []
        self._clock = 0

    @property
    def full(self) -> bool:
        return len(self.running) == len(self._slots)

    def forget(self) -> None:
        """Drop all requests and all cached tokens (new weights, or a failure)."""
        self._slots = [Slot() for _ in self._slots]
        self.running = []

    def join(self, request: Request) -> None:
        """Give a request the slot that saves most work, and move it next to the running ones."""
        assert not self.full
        place = self._choose(request.prompt)
        first_idle = len(self.running)
        if place != first_idle:
            self._swap(place, first_idle)
        self._clock += 1
        self._slots[first_idle].used = self._clock
        self.running.append(request)

    def _choose(self, prompt: list[int]) -> int:
        """Pick an idle slot and cut it to the part that the prompt shares with it."""
        idle = range(len(self.running), len(self._slots))
        shared = [self._usable(prompt, slot) for slot in self._slots]
        own = max(
            (i for i in idle if shared[i] and shared[i] >= len(self._slots[i].ids) - EXACT_CHUNK),
            key=lambda i: shared[i],
            default=None,
        )
        best = max(range(len(self._slots)), key=lambda i: shared[i])
        if own is not None and shared[own] + WORTH_COPYING > shared[best]:
            self._cut(own, shared[own])
            return own
        oldest = min(idle, key=lambda i: (bool(self._slots[i].ids), self._slots[i].used))
        if oldest != best and shared[best] >= WORTH_COPYING:
            self._forward.copy(best, oldest, shared[best])
            self._slots[oldest].ids = self._slots[best].ids[: shared[best]]
            self._slots[oldest].exact = min(self._slots[best].exact, shared[best])
        else:
            self._cut(oldest, shared[oldest])
        return oldest

    def _usable(self, prompt: list[int], slot: Slot) -> int:
        """How many leading tokens of the prompt need not be computed; the last always is."""
        same = min(common_prefix(prompt, slot.ids), len(prompt) - 1)
        if self._exact:
            same = min(same, slot.exact) // EXACT_CHUNK * EXACT_CHUNK
        return same

    def _cut(self, index: int, length: int) -> None:
        slot = self._slots[index]
        slot.ids = slot.ids[:length]
        slot.exact = min(slot.exact, length)

    def _swap(self, first: int, second: int) -> None:
        slots = self._slots
        length = max(len(slots[first].ids), len(slots[second].ids))
        self._forward.swap(first, second, length)
        slots[first], slots[second] = slots[second], slots[first]

    def step(self) -> list[Request]:
        """Compute what is due, draw one token per row, and return who finished."""
        self._leave([r for r in self.running if r.cancelled])
        if not self.running:
            return []
        fresh = [i for i, r in enumerate(self.running) if not r.ids]
        if fresh:
            self._prefill(fresh)
        else:
            tokens = [r.ids[-1] for r in self.running]
            lengths = [len(slot.ids) for slot in self._slots[: len(tokens)]]
            logits = self._forward.decode(tokens, lengths)
            for slot, token in zip(self._slots, tokens, strict=False):
                slot.ids.append(token)
            self._draw(logits, self.running)
        done = [r for r in self.running if r.finish is not None]
        self._leave(done)
        return done

    def _prefill(self, rows: list[int]) -> None:
        """Compute the missing prompt tokens of these rows, ragged and in bounded passes."""
        pending = [(row, self._slots[row]) for row in rows]
        while pending:
            chunks, budget = [], EXACT_CHUNK if self._exact else PREFILL_TOKENS
            for row, slot in pending[: 1 if self._exact else None]:
                ids = self.running[row].prompt[len(slot.ids) :][:budget]
                if ids:
                    chunks.append(Chunk(row, len(slot.ids), ids))
                    budget -= len(ids)
            logits = self._forward.prefill(chunks)
            ended = []
            for index, chunk in enumerate(chunks):
                slot, request = self._slots[chunk.slot], self.running[chunk.slot]
                slot.ids.extend(chunk.ids)
                if slot.exact == chunk.start and len(chunk.ids) == EXACT_CHUNK:
                    slot.exact += EXACT_CHUNK
                if len(slot.ids) == len(request.prompt):
                    ended.append((index, request))
            if ended:
                self._draw(logits[[index for index, _ in ended]], [r for _, r in ended])
            pending = [
                (row, slot)
                for row, slot in pending
                if len(slot.ids) < len(self.running[row].prompt)
            ]

    def _draw(self, logits: Tensor, requests: list[Request]) -> None:
        samplings = [r.sampling for r in requests]
        allowed = allowed_tokens([r.matcher for r in requests], logits.shape[-1])
        drawn = draw_allowed(logits, samplings, [len(r.ids) for r in requests], allowed)
        for request, token, logprob, mass in zip(requests, *drawn, strict=True):
            request.ids.append(token)
            request.logprobs.append(logprob)
            if token in self._eos:
                request.finish = "eos"
            elif completes_stop(self._codec.decode, request.ids, request.sampling.stop):
                request.finish = "stop"
            elif len(request.ids) >= request.limit:
                request.finish = "length"
            if request.matcher is not None:
                request.masses.append(mass)
                request.failure = request.matcher.take(token)
                request.finish = "stop" if request.failure else request.finish

    def _leave(self, requests: list[Request]) -> None:
        """Take requests out; the last running slot moves into the gap."""
        for request in requests:
            index, last = self.running.index(request), len(self.running) - 1
            if index != last:
                self._swap(index, last)
                self.running[index] = self.running[last]
            self.running.pop()


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
