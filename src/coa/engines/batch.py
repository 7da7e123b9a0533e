"""The scheduler: which request sits in which KV slot, and what one step computes.

It is plain, single-threaded code; the thread and the coroutines are in `local.py`. Requests join
and leave at every step. A step computes one token of every rollout that decodes, checks guesses of
its next ones, and fills up with pieces of prompts: a long observation is computed
beside the others' decoding, never instead of it.

A finished request's slot keeps its tokens, so that the rollout's next turn, whose prompt begins
with them, continues there and only the observation is computed. A prompt that begins like what
another slot holds gets a copy of that part; one that begins like a prompt still being computed (the
samples of a group) waits for it.

In exact mode a result must not depend on the neighbours: a prompt is computed alone in chunks
aligned to 64 tokens, only whole chunks computed that way are ever reused, decoding always has the
same number of rows, and nothing is guessed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from coa.engines.base import Finish, OnText, Sampling, common_prefix, completes_stop
from coa.engines.llama import Chunk
from coa.engines.sampling import Matcher, allowed_tokens, draw, follow, forced_tokens, possible
from coa.models.codec import Codec

LONG, SHORT = 6, 3
"""Tokens that must be the same before; a longer agreement is tried first."""
MOST = 8
FREE_ROWS = 16
_REMEMBERED = 200_000
_KEEP = 0.7


@dataclass(slots=True)
class Reader:
    """Where one rollout's own tokens followed which, and how its guesses fare."""

    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 0
    success: float = 0.7
    forced: int = 0
    """How many of the last guesses a constraint forced: they tell nothing about the others."""

    def judge(self, made: int, right: int) -> None:
        """Count how many guesses came true."""
        if made > self.forced:
            share = max(right - self.forced, 0) / (made - self.forced)
            self.success = _KEEP * self.success + (1 - _KEEP) * share


class Heard(NamedTuple):
    """What followed some tokens, and how much of it the time before, too."""

    following: list[int]
    sure: int = 0


class Guesses:
    """What followed which tokens, in running requests and in finished ones."""

    def __init__(self) -> None:
        self._followed: OrderedDict[tuple[int, ...], Heard] = OrderedDict()

    def make(self, requests: Sequence[BatchRequest]) -> list[list[int]]:
        """A guess for each, possibly empty."""
        rows = len(requests)
        made = []
        for request in requests:
            matcher = request.matcher
            # What a constraint forces always comes true, so it is worth its rows in any company.
            forced = [] if matcher is None else forced_tokens(matcher)[:MOST]
            free = MOST if request.reader.success > 0.5 else 2
            crowded = rows >= FREE_ROWS
            more = self._sure(request, forced) if crowded else self._any(request, forced)[:free]
            guess = [*forced, *more][: min(request.limit - len(request.ids) - 1, MOST)]
            guess = guess if matcher is None else possible(matcher, guess)
            request.reader.forced = len(forced)
            rows += len(guess)
            made.append(guess)
        return made

    def _sure(self, request: BatchRequest, forced: list[int]) -> list[int]:
        """What followed these tokens the last two times."""
        tail = [*request.ids[-LONG:], *forced][-LONG:]
        if len(tail) < LONG:
            tail = request.prompt[len(tail) - LONG :] + tail
        found = self._followed.get(tuple(tail))
        return found.following[: found.sure] if found else []

    def _any(self, request: BatchRequest, forced: list[int]) -> list[int]:
        """What followed these tokens, or the last few of them, most recently."""
        reader, ids = request.reader, request.prompt + request.ids
        for end in range(max(reader.read, SHORT), len(ids)):
            reader.places[tuple(ids[end - SHORT : end])] = end
        reader.read = len(ids)
        tail = tuple([*ids[-LONG:], *forced][-LONG:])
        if found := self._followed.get(tail):
            return found.following
        if place := reader.places.get(tail[-SHORT:]):
            return ids[place : place + MOST]
        found = self._followed.get(tail[-SHORT:])
        return found.following if found else []

    def learn(self, request: BatchRequest) -> None:
        """Remember what a finished request wrote."""
        ids = request.prompt[-LONG:] + request.ids
        for end in range(LONG, len(ids)):
            following = ids[end : end + MOST]
            for length in (LONG, SHORT):
                tokens = tuple(ids[end - length : end])
                before = self._followed.get(tokens)
                sure = common_prefix(before.following, following) if before else 0
                self._followed[tokens] = Heard(following, sure)
        while len(self._followed) > _REMEMBERED:
            self._followed.popitem(last=False)


PROMPT_TOKENS = 256
"""Most tokens of prompts in one step: enough for the products to be at full speed."""
EXACT_CHUNK = 64
WORTH_COPYING = 16
Sampled = tuple[int, float, float]
"""A token, its logprob, and the log of what the allowed tokens had together."""


class Forward(Protocol):
    """What the scheduler needs of a model."""

    slots: int
    vocabulary: int
    """How many logits there are for each token."""
    can_rewind: bool
    """Whether a slot can give up its last tokens; not where its state mixes all it has seen."""

    def step(self, chunks: list[Chunk]) -> Tensor: ...
    def copy(self, source: int, target: int, length: int) -> None: ...
    def load(self, adapter: Any) -> None: ...


@dataclass(eq=False, slots=True)
class BatchRequest:
    """One turn being sampled."""

    prompt: list[int]
    sampling: Sampling
    limit: int
    """Most tokens to sample: the caller's limit, or what the context leaves."""
    on_text: OnText | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    answer: Future[Any] = field(default_factory=Future)
    """Where the result goes; a request whose caller cancelled it is dropped."""
    shown: int = 0
    """How many ids have been passed to `on_text` as text, and how many before the last time."""
    anchor: int = 0
    matcher: Matcher | None = None
    """Says which tokens a constraint allows next."""
    masses: list[float] = field(default_factory=list)
    failure: str = ""
    """Why it ended without a result."""
    slot: int = -1
    reader: Reader = field(default_factory=Reader)


@dataclass(slots=True)
class BatchSlot:
    """The tokens whose keys and values a slot holds."""

    ids: list[int] = field(default_factory=list)
    exact: int = 0
    """How many of them were computed in aligned chunks."""
    used: int = 0


class Batch:
    """Requests in slots. `guesses` is None where each step has to give one token."""

    def __init__(
        self,
        forward: Forward,
        codec: Codec,
        eos: frozenset[int],
        exact: bool,
        guesses: Guesses | None = None,
    ) -> None:
        self._forward, self._codec, self._eos, self._exact = forward, codec, eos, exact
        self._slots = [BatchSlot() for _ in range(forward.slots)]
        self._guesses = guesses
        self.running: list[BatchRequest] = []
        self._clock = 0

    def forget(self) -> None:
        """Drop all requests and all cached tokens (new weights, or a failure)."""
        self._slots = [BatchSlot() for _ in self._slots]
        self.running = []

    def join(self, request: BatchRequest) -> None:
        """Give a request the idle slot that saves most work: its own of the last turn, if it is
        still there, else the one that was not used for longest."""
        taken = {other.slot for other in self.running}
        idle = [index for index in range(len(self._slots)) if index not in taken]
        assert idle, "no slot is idle"
        shared = {index: self._usable(request.prompt, self._slots[index]) for index in idle}
        spare = EXACT_CHUNK if self._exact else 0  # only whole chunks are used there
        own = max(
            (i for i in idle if shared[i] and shared[i] >= len(self._slots[i].ids) - spare),
            key=lambda i: shared[i],
            default=None,
        )
        oldest = min(idle, key=lambda i: (bool(self._slots[i].ids), self._slots[i].used))
        request.slot = oldest if own is None else own
        slot, kept = self._slots[request.slot], shared[request.slot]
        del slot.ids[kept:]
        slot.exact = min(slot.exact, kept)
        self._touch(slot)
        self.running.append(request)

    def _touch(self, slot: BatchSlot) -> None:
        self._clock += 1
        slot.used = self._clock

    def _usable(self, prompt: list[int], slot: BatchSlot) -> int:
        """How many leading tokens of the prompt need not be computed; the last always is."""
        same = min(common_prefix(prompt, slot.ids), len(prompt) - 1)
        if self._exact:
            same = min(same, slot.exact) // EXACT_CHUNK * EXACT_CHUNK
        if same < len(slot.ids) and not self._forward.can_rewind:
            return 0  # all of a slot, or nothing
        return same

    def step(self) -> list[BatchRequest]:
        """Compute what is due, draw the tokens, and return who finished."""
        self.running = [each for each in self.running if not each.answer.cancelled()]
        if not self.running:
            return []
        due = self._due()
        drawn = iter(self._draw(self._forward.step([chunk for _, chunk in due]), due))
        for request, chunk in due:
            self._advance(request, chunk, [next(drawn) for _ in range(chunk.tail)])
        done = [request for request in self.running if request.finish is not None]
        self.running = [request for request in self.running if request.finish is None]
        for request in done:
            self._touch(self._slots[request.slot])
            if self._guesses is not None:
                self._guesses.learn(request)
        return done

    def _advance(self, request: BatchRequest, chunk: Chunk, drawn: list[Sampled]) -> None:
        """Store what was computed, and take the draws up to the first that was guessed wrong."""
        slot, known = self._slots[request.slot], len(chunk.ids) - chunk.tail + 1
        if slot.exact == chunk.start and len(chunk.ids) == EXACT_CHUNK:
            slot.exact += EXACT_CHUNK
        slot.ids += chunk.ids[:known]
        guessed, right = chunk.ids[known:], 0
        for token, logprob, mass in drawn:
            self._take(request, token, logprob, mass)
            if request.finish or right == len(guessed) or token != guessed[right]:
                break
            slot.ids.append(token)
            right += 1
        request.reader.judge(len(guessed), right)

    def _due(self) -> list[tuple[BatchRequest, Chunk]]:
        """One token and its guesses of each that decodes, and pieces of prompts."""
        decoding = [r for r in self.running if len(self._slots[r.slot].ids) >= len(r.prompt)]
        due = list[tuple[BatchRequest, Chunk]]()
        waiting = [r for r in self.running if len(self._slots[r.slot].ids) < len(r.prompt)]
        if not self._exact or not waiting:
            guesses = self._guesses.make(decoding) if self._guesses else [[]] * len(decoding)
            for request, guess in zip(decoding, guesses, strict=True):
                start = len(self._slots[request.slot].ids)
                ids = [request.ids[-1], *guess]
                due.append((request, Chunk(request.slot, start, ids, len(ids))))
        budget, ahead = EXACT_CHUNK if self._exact else PROMPT_TOKENS, list[BatchRequest]()
        for request in waiting:
            if budget <= 0 or (self._exact and ahead):
                break
            if not self._borrow(request, ahead):
                continue
            ahead.append(request)
            start = len(self._slots[request.slot].ids)
            ids = request.prompt[start : start + budget]
            ends = start + len(ids) == len(request.prompt)
            due.append((request, Chunk(request.slot, start, ids, int(ends))))
            budget -= len(ids)
        return due

    def _borrow(self, request: BatchRequest, ahead: list[BatchRequest]) -> bool:
        """Copy what another slot holds of the prompt; False: one ahead is computing more of it."""
        slot = self._slots[request.slot]
        least = len(slot.ids) + WORTH_COPYING
        opening = request.prompt[:least]
        shared, best = max(
            (
                (self._usable(request.prompt, other), index)
                for index, other in enumerate(self._slots)
                if other.ids[:least] == opening  # most differ there, which is soon seen
            ),
            default=(0, request.slot),
        )
        enough = max(len(slot.ids), shared) + WORTH_COPYING
        promised = (BatchSlot(other.prompt, exact=len(other.prompt)) for other in ahead)
        if any(self._usable(request.prompt, each) >= enough for each in promised):
            return False
        if shared >= least:
            self._forward.copy(best, request.slot, shared)
            slot.ids = self._slots[best].ids[:shared]
            slot.exact = min(self._slots[best].exact, shared)
        return True

    def _draw(self, logits: Tensor, due: list[tuple[BatchRequest, Chunk]]) -> list[Sampled]:
        rows = [(request, offset) for request, chunk in due for offset in range(chunk.tail)]
        if not rows:
            return []
        turns = [
            (r.matcher, chunk.ids[len(chunk.ids) - chunk.tail + 1 :])
            for r, chunk in due
            if chunk.tail
        ]
        allowed = allowed_tokens(turns, logits.shape[-1])
        positions = [len(request.ids) + offset for request, offset in rows]
        samplings = [request.sampling for request, _ in rows]
        return list(zip(*draw(logits, samplings, positions, allowed), strict=True))

    def _take(self, request: BatchRequest, token: int, logprob: float, mass: float) -> None:
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
            request.failure = follow(request.matcher, token)
            request.finish = "stop" if request.failure else request.finish
