"""Guesses of the next tokens, checked many at a time in one step.

A chain of agents repeats itself: names come from the question and the observations, turns of phrase
from training. What followed the same few tokens earlier, in the same rollout or in any finished
one, is a good guess of what follows now. A step computes the guesses as further rows of its
products; the draw at each place is the one that would have been made anyway (its random number
belongs to the place), and the first that differs from its guess ends the run. Apart from the last
bits of the products, as with any neighbour, guesses change how fast tokens come, not which.

Rows are nearly free while the products wait for memory, and any guess is worth a try. Beyond that
a guess must mostly come true to be worth its row: there only what followed the last two times is
guessed (in an evaluation of 200 tasks nine of ten such guesses are right, of all five of ten).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from coa.engines.base import common_prefix

if TYPE_CHECKING:
    from coa.engines.batch import Request

LONG, SHORT = 6, 3
"""Tokens that must be the same before; a longer agreement is tried first."""
MOST = 8
FREE_ROWS = 16
_REMEMBERED = 200_000
_KEEP = 0.7


@dataclass(slots=True)
class Reader:
    """How one rollout's guesses fare, and where its own tokens followed which."""

    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 0
    success: float = 0.7


class Heard(NamedTuple):
    """What followed some tokens, and how much of it the time before, too."""

    following: list[int]
    sure: int = 0


class Guesses:
    """What followed which tokens, in running requests and in finished ones."""

    def __init__(self) -> None:
        self._followed: OrderedDict[tuple[int, ...], Heard] = OrderedDict()
        self.made = self.right = 0

    def make(self, requests: Sequence[Request]) -> list[list[int]]:
        """A guess for each, possibly empty."""
        rows = len(requests)
        made = []
        for request in requests:
            guess: list[int] = []
            room = request.limit - len(request.ids) - 1
            if request.matcher is None and room > 0:
                free = MOST if request.reader.success > 0.5 else 2
                crowded = rows >= FREE_ROWS
                guess = self._sure(request) if crowded else self._any(request)[:free]
                guess = guess[:room]
                rows += len(guess)
            made.append(guess)
        return made

    def _sure(self, request: Request) -> list[int]:
        """What followed these tokens the last two times."""
        tail = request.ids[-LONG:]
        if len(tail) < LONG:
            tail = request.prompt[len(tail) - LONG :] + tail
        found = self._followed.get(tuple(tail))
        return found.following[: found.sure] if found else []

    def _any(self, request: Request) -> list[int]:
        """What followed these tokens, or the last few of them, most recently."""
        reader, ids = request.reader, request.prompt + request.ids
        for end in range(max(reader.read, SHORT), len(ids)):
            reader.places[tuple(ids[end - SHORT : end])] = end
        reader.read = len(ids)
        if found := self._followed.get(tuple(ids[-LONG:])):
            return found.following
        if place := reader.places.get(tuple(ids[-SHORT:])):
            return ids[place : place + MOST]
        found = self._followed.get(tuple(ids[-SHORT:]))
        return found.following if found else []

    def judge(self, reader: Reader, made: int, right: int) -> None:
        """Count how many guesses came true."""
        self.made, self.right = self.made + made, self.right + right
        reader.success = _KEEP * reader.success + (1 - _KEEP) * right / made

    def learn(self, request: Request) -> None:
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
