"""Which rows an update trains on, and which of them are computed together.

Two layouts. `bucket`: a batch is a number of rows of similar length. `pack`: a batch is a number of
packs, each filled with rows up to `pack_tokens`, so that every update costs about the same and none
is small. The rows of a pack never see each other: the policy is given where each of them ends.

Everything here depends on the rows, the seed and the epoch, never on what was trained before, so a
resumed run finds its place by counting updates.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence

from coa.train.rows import Row, batches, total_tokens
from coa.train.settings import SftSettings

POOL = 1024
"""Rows that are packed together; the next ones begin new packs, so every epoch has other packs."""


def packs(rows: Sequence[Row], limit: int, seed: int, epoch: int) -> list[list[Row]]:
    """Rows in packs of at most `limit` tokens, best fit first, packs in random order.

    The longest rows are placed first, each where the least space is left over. A row longer than
    the limit is a pack by itself.
    """
    rng = random.Random(f"{seed}|{epoch}|pack")
    order = list(range(len(rows)))
    rng.shuffle(order)
    made: list[list[Row]] = []
    for start in range(0, len(order), POOL):
        pool = sorted(order[start : start + POOL], key=lambda i: -len(rows[i].ids))
        made += _best_fit([rows[i] for i in pool], limit)
    rng.shuffle(made)
    return made


def _best_fit(rows: Sequence[Row], limit: int) -> list[list[Row]]:
    made: list[list[Row]] = []
    spaces: list[tuple[int, int]] = []  # (tokens left, pack), the fullest first
    for row in rows:
        at = bisect_left(spaces, (len(row.ids), -1))
        if at < len(spaces):
            left, pack = spaces.pop(at)
        else:
            left, pack = limit, len(made)
            made.append([])
        made[pack].append(row)
        insort(spaces, (left - len(row.ids), pack))
    return made


class Order:
    """The batches of a whole run: `batch(update)` for 0 <= update < `updates`.

    A batch is a list of units: single rows, or packs. Units are what processes share out, and a
    pack is always computed as one.
    """

    def __init__(self, rows: Sequence[Row], settings: SftSettings) -> None:
        self._rows, self._settings = rows, settings
        self._starts = [0]
        """The first update of every epoch, then the end: packs may be more in one than another."""
        for epoch in range(settings.epochs):
            self._epoch, self._batches = epoch, self._lay_out(epoch)
            self._starts.append(self._starts[-1] + len(self._batches))

    @property
    def updates(self) -> int:
        return self._starts[-1]

    def epoch_of(self, update: int) -> int:
        return bisect_left(self._starts, update + 1) - 1

    def batch(self, update: int) -> list[list[Row]]:
        epoch = self.epoch_of(update)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._lay_out(epoch)
        return self._batches[update - self._starts[epoch]]

    def fill(self) -> float:
        """Share of the places that hold a token: of packs, or of rows padded to their batch's."""
        held = total_tokens(self._rows)
        if self._settings.layout == "pack":
            filled = sum(len(batch) for batch in self._batches) * self._settings.pack_limit
        else:
            longest = (max(len(row.ids) for unit in b for row in unit) for b in self._batches)
            filled = sum(len(b) * n for b, n in zip(self._batches, longest, strict=True))
        return held / filled

    def _lay_out(self, epoch: int) -> list[list[list[Row]]]:
        size, seed = self._settings.batch_size, self._settings.seed
        if self._settings.layout == "bucket":
            return [[[row] for row in batch] for batch in batches(self._rows, size, seed, epoch)]
        made = packs(self._rows, self._settings.pack_limit, seed, epoch)
        return [made[at : at + size] for at in range(0, len(made), size)]
