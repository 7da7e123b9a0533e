"""Which tools a question is about, by the words that it shares with them.

The weights are those of BM25: a word that few of the tools have counts more, one that is repeated
counts little more, and a long description has no advantage. Nothing is drawn at random, and tools
that are equally near keep their order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from coa.tools.arguments import words_of
from coa.tools.base import Tool

_SATURATION, _LENGTH = 1.2, 0.5
_NAME = 2
"""A word of the name counts so often."""


def overlaps(question: str, texts: Sequence[Sequence[str]]) -> list[float]:
    """How near each text, given as its words, is to a question."""
    if not texts:
        return []
    asked = set(words_of(question))
    counts = [Counter(text) for text in texts]
    holders = Counter(word for each in counts for word in each)
    usual = sum(map(len, texts)) / len(texts) or 1.0
    found = []
    for each, text in zip(counts, texts, strict=True):
        longer = 1 - _LENGTH + _LENGTH * len(text) / usual
        score = 0.0
        for word in sorted(asked & each.keys()):
            rarity = math.log(1 + (len(texts) - holders[word] + 0.5) / (holders[word] + 0.5))
            times = each[word]
            score += rarity * times * (_SATURATION + 1) / (times + _SATURATION * longer)
        found.append(score)
    return found


def told(tool: Tool) -> list[str]:
    """The words that say what a tool is for."""
    return words_of(tool.name) * _NAME + words_of(tool.about)


def nearest(
    question: str, tools: Sequence[Tool], most: int, kept: Mapping[str, object]
) -> list[Tool]:
    """The `most` tools that are nearest to a question, in the order given; those that are `kept`
    are always among them."""
    scores = overlaps(question, [told(each) for each in tools])
    places = range(len(tools))
    ranked = sorted(places, key=lambda at: (tools[at].name not in kept, -scores[at], at))
    most = max(most, sum(each.name in kept for each in tools))
    return [tools[at] for at in sorted(ranked[:most])]
