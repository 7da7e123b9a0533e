"""Guesses of the next tokens, checked many at a time in one step.

A chain of agents repeats itself: names come from the question and the observations, turns of phrase
from training. What followed the same few tokens earlier, in the same rollout or in any finished
one, is a good guess of what follows now. A step computes the guesses as further rows of its
products; the draw at each place is the one that would have been made anyway (its random number
belongs to the place), and the first that differs from its guess ends the run. Apart from the last
bits of the products, as with any neighbour, guesses change how fast tokens come, not which.

Rows are nearly free while the products wait for memory; beyond that a guess must mostly come true
to be worth its row. Hence each rollout's recent success decides how many it gets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coa.engines.batch import Request

LONG, SHORT = 6, 3
"""Tokens that must be the same before; a longer agreement is tried first."""
MOST = 8
FREE_ROWS = 16
LIKELY = 0.6
_REMEMBERED = 200_000
_KEEP = 0.7


@dataclass(slots=True)
class Reader:
    """How one rollout's guesses fare, and where its own tokens followed which."""

    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 0
    success: float = 0.7


class Guesses:
    """What followed which tokens, in running requests and in finished ones."""

    def __init__(self) -> None:
        self._followed: OrderedDict[tuple[int, ...], list[int]] = OrderedDict()
        self.made = self.right = 0

    def make(self, requests: Sequence[Request]) -> list[list[int]]:
        """A guess for each, possibly empty."""
        rows = len(requests)
        made = []
        for request in requests:
            guess: list[int] = []
            room = request.limit - len(request.ids) - 1
            reader = request.reader
            crowded = rows >= FREE_ROWS
            if request.matcher is None and room > 0 and (not crowded or reader.success >= LIKELY):
                length = min(room, MOST if reader.success > 0.5 else 2)
                guess = self._continue(request, only_long=crowded)[:length]
                rows += len(guess)
            made.append(guess)
        return made

    def _continue(self, request: Request, only_long: bool) -> list[int]:
        reader, ids = request.reader, request.prompt + request.ids
        for end in range(max(reader.read, SHORT), len(ids)):
            reader.places[tuple(ids[end - SHORT : end])] = end
        reader.read = len(ids)
        if found := self._followed.get(tuple(ids[-LONG:])):
            return found
        if only_long:
            return []
        if place := reader.places.get(tuple(ids[-SHORT:])):
            return ids[place : place + MOST]
        return self._followed.get(tuple(ids[-SHORT:]), [])

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
                self._followed[tuple(ids[end - length : end])] = following
        while len(self._followed) > _REMEMBERED:
            self._followed.popitem(last=False)
