"""Near-duplicates among texts: Jaccard similarity of word shingles, exact, in input order.

A text becomes the bag of its runs of `shingle` words; two texts are near-duplicates when their bags
share at least `similarity` of their union. A bag counts what is repeated: as sets, two grids of
noughts and ones are the same. The first in input order stays, and a later text is compared only
with those that stayed, so that a long row of small changes never removes its far end.

Comparing all pairs would take minutes for some thousand texts. Two bags that share enough must
share one of their rarest shingles: with the shingles of each text sorted from rare to common, a
prefix of n - ceil(similarity * n) + 1 of them is enough to meet. So only prefixes are indexed, and
the few pairs that meet there are compared in full: nothing is estimated, nothing is missed.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from coa.trajectory import Author, Trajectory

Shingle = tuple[str, ...]

_TAG = re.compile(r"</?[a-z]\w*>")
_SLACK = 1e-9
"""0.7 * 10 is a little more than 7 in floating point, and a prefix must not lose a place to it."""


class Twin(NamedTuple):
    """Which earlier text a near-duplicate repeats, and how much of it."""

    first: int
    similarity: float


def told_text(trajectory: Trajectory) -> str:
    """What makes a chain the chain it is: its question and what the model wrote, without tags."""
    written = [s.text for s in trajectory.segments if s.author is Author.MODEL]
    return _TAG.sub(" ", "\n".join([trajectory.question, *written]))


def near_duplicates(texts: Iterable[str], similarity: float, shingle: int = 3) -> dict[int, Twin]:
    """Index of each near-duplicate -> the earlier text that stays in its place."""
    assert 0 < similarity <= 1 and shingle > 0, (similarity, shingle)
    holders: defaultdict[int, list[int]] = defaultdict(list)
    bags: dict[int, frozenset[int]] = {}
    twins: dict[int, Twin] = {}
    for index, ranks in enumerate(_ranked([shingles(text, shingle) for text in texts])):
        prefix = ranks[: len(ranks) - math.ceil(similarity * len(ranks) - _SLACK) + 1]
        own = frozenset(ranks)
        met = sorted({other for rank in prefix for other in holders.get(rank, ())})
        twin = _first_twin(own, met, bags, similarity)
        if twin is not None:
            twins[index] = twin
            continue
        bags[index] = own
        for rank in prefix:
            holders[rank].append(index)
    return twins


def shingles(text: str, size: int) -> list[Shingle]:
    """Runs of `size` words, a repeated one with the number of its repetition.

    A text of fewer words is one run, so that it can be compared, too.
    """
    words = text.lower().split()
    runs = Counter(zip(*(words[at:] for at in range(size)), strict=False)) or {tuple(words): 1}
    repeated = ((*run, str(k)) for run, times in runs.items() for k in range(1, times))
    return [*runs, *repeated]


def _first_twin(
    own: frozenset[int], met: Iterable[int], bags: Mapping[int, frozenset[int]], similarity: float
) -> Twin | None:
    for other in met:
        theirs = bags[other]
        if min(len(own), len(theirs)) < similarity * max(len(own), len(theirs)) - _SLACK:
            continue  # the smaller bag could not fill the share
        common = len(own & theirs)
        found = common / (len(own) + len(theirs) - common)
        if found >= similarity:
            return Twin(other, found)
    return None


def _ranked(bags: Sequence[list[Shingle]]) -> list[list[int]]:
    """Each bag as sorted numbers, where a smaller number is a rarer shingle."""
    counts: Counter[Shingle] = Counter()
    for bag in bags:
        counts.update(bag)
    rank = {run: number for number, run in enumerate(sorted(counts, key=counts.__getitem__))}
    return [sorted(map(rank.__getitem__, bag)) for bag in bags]
