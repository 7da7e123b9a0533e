"""Rows that begin alike, laid out so that what they share is computed once.

Goes in: token ids of rows. Comes out: a `PrefixTree`, in which every shared beginning stands once
and is followed by the ways in which it goes on. Rollouts of one task share its prompt and often
their first turns, and all rows of one grammar share the system prompt, so half of the tokens of an
update, or more, stand there already.

A hidden state depends on the tokens before it and on nothing else, so one state serves all rows
that have them, and its gradient is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

LEAST = 16
"""Fewer tokens than this are computed again: each span costs attention a call of its own."""


@dataclass(frozen=True, slots=True)
class PrefixSpan:
    """Tokens that stand once and see all of `before`, and what of themselves came earlier."""

    own: slice
    before: tuple[slice, ...] = ()
    """The beginnings that it goes on from, the first of all first."""

    @property
    def length(self) -> int:
        length: int = self.own.stop - self.own.start
        return length

    @property
    def seen(self) -> tuple[slice, ...]:
        """All that its last token sees; neighbours are one slice."""
        joined: list[slice] = []
        for each in (*self.before, self.own):
            if joined and joined[-1].stop == each.start:
                each = slice(joined.pop().start, each.stop)
            joined.append(each)
        return tuple(joined)


@dataclass(slots=True)
class PrefixTree:
    """Tokens of several rows, each shared beginning once."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Of each token in its row."""
    spans: list[PrefixSpan] = field(default_factory=list)
    """In the order of their tokens."""
    places: list[int] = field(default_factory=list)
    """Where each token of the rows, one row after the other, stands in `ids`."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], least: int = LEAST) -> PrefixTree:
        tree = cls()
        where: list[list[int]] = [[] for _ in rows]
        tree._grow(rows, alphabetical(rows), 0, (), where, least)
        tree.places = [place for found in where for place in found]
        return tree

    def _grow(
        self,
        rows: Sequence[Sequence[int]],
        order: Sequence[int],
        done: int,
        before: tuple[slice, ...],
        where: list[list[int]],
        least: int,
    ) -> None:
        """Add what follows the first `done` tokens, in which the rows of `order` are the same."""
        first, last = rows[order[0]], rows[order[-1]]
        end = common(first, last)  # of sorted rows: of all between them as well
        same = end == len(first) == len(last)
        if same or end - done >= least:
            own = slice(len(self.ids), len(self.ids) + end - done)
            self.ids += first[done:end]
            self.positions += range(done, end)
            for at in order:
                where[at] += range(own.start, own.stop)
            if own.start < own.stop:
                self.spans.append(PrefixSpan(own, before))
                before = (*before, own)
            done = end
        if not same:
            for _, ways in groupby(order, key=lambda at: rows[at][end : end + 1]):
                self._grow(rows, list(ways), done, before, where, least)


def alphabetical(rows: Sequence[Sequence[int]]) -> list[int]:
    """Places of the rows in an order in which those that begin alike are neighbours."""
    return sorted(range(len(rows)), key=lambda at: list(rows[at]))


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # slices are compared faster than tokens one by one
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
