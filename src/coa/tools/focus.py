"""The parts of a long text that bear on a question, in their order: an extractive summary.

A text is cut into sentences. A sentence counts by the words that it shares with the question, each
by how rare it is in the text, and by those that the lines just before it share: 'New in version
3.8.' belongs to the function named above it. The best sentences are taken one by one, and a word
that is covered counts less from then on, so that the parts answer more than one half of a question.
The same text, question and length always give the same summary.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

GAP = "[...]"
"""Stands where something was left out."""
LONGEST = 400
"""Letters of a sentence; a longer one is cut, or a text without full stops would be all or none."""
REACH = 8
"""For how many lines their subject is remembered."""
_FADE = 0.8
_CANDIDATES = 300
"""Of how many sentences the best are chosen: a page may have tens of thousands."""
_ENOUGH = 0.6
"""Which part of the room sentences about the question may take before their context is added."""
_WIDE_ENOUGH = 0.9
"""... and these with their context; the rest shows how the page begins."""
_CONTEXT = (1, -1, 2, 3)
"""Which neighbours of a sentence are added, in this order."""
_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+|(?<=[\u3002\uff01\uff1f])")
_WORD = re.compile(r"[^\W_]+")
_WIDE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_SUFFIXES = ("ingly", "edly", "ing", "ed", "es", "ly", "s")
_COMMON = frozenset(
    "a about an and any are as at be been between by can did do does for from had has have how in "
    "into is it its many much of on one or should than that the their them then there these they "
    "this those to was were what when where which while who whom whose why will with would "
    "you".split()
)


def terms(text: str) -> list[str]:
    """Words, folded and without their endings; of scripts without spaces, pairs of letters."""
    if not text.isascii():
        folded = unicodedata.normalize("NFKD", text)
        text = "".join(letter for letter in folded if not unicodedata.combining(letter))
        text = unicodedata.normalize("NFC", text)
    found = []
    for word in _WORD.findall(text.lower()):
        if _WIDE.search(word):
            found += [word[i : i + 2] for i in range(max(1, len(word) - 1))]
        elif word not in _COMMON:
            found.append(_stem(word))
    return found


def _stem(word: str) -> str:
    """Roughly: 'cities' and 'city' are one word, and so are 'priced', 'prices' and 'price'."""
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            word = word[: -len(suffix)]
            break
    if len(word) > 3:
        word = word.removesuffix("e")
        word = f"{word[:-1]}i" if word.endswith("y") else word
    return word


def sentences(text: str) -> list[tuple[str, int]]:
    """The sentences of a text, each with the number of its line."""
    found = []
    for number, line in enumerate(text.splitlines()):
        for sentence in _END.split(line):
            rest = sentence.strip()
            while rest:
                cut = len(rest)
                if cut > LONGEST:
                    cut = rest.rfind(" ", LONGEST // 2, LONGEST)
                    cut = cut if cut > 0 else LONGEST
                found.append((rest[:cut].rstrip(), number))
                rest = rest[cut:].lstrip()
    return found


def summarise(text: str, focus: str, max_chars: int) -> str:
    """At most `max_chars` letters of the text: all of it, or what bears on the focus.

    Without a focus, or where nothing bears on it, it is the beginning.
    """
    if len(text) <= max_chars:
        return text
    parts = sentences(text)
    lengths = [len(part) + 1 for part, _ in parts]
    room = max_chars - len(GAP) - 2
    chosen = _choose(_weights(parts, terms(focus)), lengths, room)
    place = 0
    while place < len(parts):  # what is left of the room shows how the page begins
        if place not in chosen and not _fits(chosen | {place}, lengths, room):
            break
        chosen.add(place)
        place += 1
    return _joined(parts, sorted(chosen))[:max_chars]


def _weights(parts: Sequence[tuple[str, int]], wanted: Iterable[str]) -> list[dict[str, float]]:
    """How much each part says about each wanted term; the lines before it count, fading."""
    held = [set(terms(part)) for part, _ in parts]
    spread = Counter(term for each in held for term in each)
    rarity = {
        term: math.log(1 + len(parts) / spread[term])
        for term in dict.fromkeys(wanted)
        if spread[term]
    }
    weights: list[dict[str, float]] = []
    last: dict[str, int] = {}  # the line in which a term stood last
    for (_, line), each in zip(parts, held, strict=True):
        own = [term for term in rarity if term in each]
        last |= dict.fromkeys(own, line)
        near = {term: max(1, line - last[term]) for term in last if term not in own} if own else {}
        weights.append(
            {term: rarity[term] for term in own}
            | {term: rarity[term] * _FADE**far for term, far in near.items() if far <= REACH}
        )
    return weights


def _choose(weights: Sequence[Mapping[str, float]], lengths: Sequence[int], room: int) -> set[int]:
    """Greedily the part that adds most; a term that was covered counts half from then on."""
    left = {term: 1.0 for weight in weights for term in weight}
    chosen: dict[int, None] = {}  # in the order of their worth
    total = [sum(weight.values()) for weight in weights]
    candidates = [place for place, weight in enumerate(weights) if weight]
    candidates = sorted(candidates, key=lambda place: (-total[place], place))[:_CANDIDATES]
    while candidates:
        gain = {
            place: sum(value * left[term] for term, value in weights[place].items())
            / (1 + lengths[place] / LONGEST)
            for place in candidates
        }
        best = max(candidates, key=lambda place: (gain[place], -place))
        candidates.remove(best)
        if not _fits({*chosen, best}, lengths, room * _ENOUGH if chosen else room):
            break
        chosen[best] = None
        for term in weights[best]:
            left[term] *= 0.5
    return _with_context(list(chosen), lengths, room)


def _with_context(chosen: Sequence[int], lengths: Sequence[int], room: int) -> set[int]:
    """What was chosen and what stands around it: what follows a name is about it."""
    shown = set(chosen)
    for step in _CONTEXT:
        for place in chosen:
            near = place + step
            if 0 <= near < len(lengths) and _fits(shown | {near}, lengths, room * _WIDE_ENOUGH):
                shown.add(near)
    return shown


def _fits(chosen: set[int], lengths: Sequence[int], room: float) -> bool:
    gaps = sum(1 for place in chosen if place - 1 not in chosen)
    return sum(lengths[place] for place in chosen) + gaps * (len(GAP) + 1) <= room


def _joined(parts: Sequence[tuple[str, int]], places: Sequence[int]) -> str:
    pieces: list[str] = []
    last = -1
    for place in places:
        part, line = parts[place]
        if place != last + 1:
            pieces.append(f"\n{GAP}\n" if pieces else f"{GAP}\n")
        elif pieces:
            pieces.append("\n" if line != parts[last][1] else " ")
        pieces.append(part)
        last = place
    if places and last != len(parts) - 1:
        pieces.append(f"\n{GAP}")
    return "".join(pieces)
