"""Scores in free wording: what a reflection rates and what a double check scores.

Models write "Score: 3", "Score (1-4): 3", "I would give it 3/4", "rated three out of four" or
forget the number. A score that cannot be told is None, never a guess: a number that counts other
things ("2 sources agree", "he scored 2 goals"), a range ("2-3") or another scale ("3/5") is not a
score.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORDS = {"one": 1, "two": 2, "three": 3, "four": 4}
_WORD = "one|two|three|four"
_MEANING = r"\s*\([^()\n]{1,60}\)"
_TO = r"\s*(?:-|\u2013|\u2014|to|through|and|\.\.\.?)\s*(?:4|four)\b(?!\.\d)"
_SCALE = re.compile(
    r"(?:\b(?:on|from|between|in|of)\s+)?(?:\ba\s+scale\s+(?:of|from)\s+)?"
    rf"(?<![\d.])\b(?:1|one)(?:{_TO}|{_MEANING}{_TO}(?:{_MEANING})?)(?:\s+scale\b)?",
    re.I,
)
"""The scale itself: 'on a scale of 1 to 4', '(1-4)', 'from 1 (wrong) to 4 (right)'. Taken out
before a score is looked for."""
_DENIED = re.compile(
    rf"\b(?:not|never|isn't|no)\s+(?:an?\s+)?(?:[1-4](?:\s*/\s*4)?|{_WORD}|good|average|fair|poor)\b"
    r"(?![.,/]?\d)[\s,]*(?:but\b)?",
    re.I,
)
"""What is said not to be: 'not 4 but 2', 'not poor'. Taken out before a score is looked for."""
_REASON = (
    r"a|an|and|as|because|but|given|here|if|of\s+(?:4|four)\b(?!\s+[a-z])|or|out\s+of|overall|since|"
    r"so|though|although|while"
)
_COUNTED = re.compile(
    rf"\b(?:(?:scored|scoring)\s+(?:[a-z']+\s+){{0,3}}?(?:\d+|{_WORD})\s+(?!(?:{_REASON})\b)"
    rf"|scores?\s+(?:(?!is\b|was\b)[a-z']+\s+){{0,3}}?(?:\d+|{_WORD})\s+"
    rf"(?!(?:{_REASON}|at|for|from|in|is|on|to|was|with)\b)"
    r"|(?:gives?|deserves)\s+(?:[a-z']+\s+){0,3}?\d+\s+"
    rf"(?!(?:{_REASON}|at|for|from|in|on|to|with|points?|stars?|marks?)\b))(?-i:[a-z]+)",
    re.I,
)
"""What counts other things or is only supposed: 'scored 2 goals', 'a score of 1 would mean',
'gives 3 dates'. Taken out before a score is looked for."""
_DIGIT = r"(?<![\d.,/\w])(?P<{0}>[1-4])(?:\.0)?(?:\s*/\s*4)?(?![\d/\w]|[.,]\d)"
_RANGE = r"(?!\s*(?:-|\u2013|or|to)\s*(?:[0-9]|one|two|three|four)\b)"
_KEY = (
    r"\b(?:scores?|scored|scoring|ratings?|rate|rated|grade|graded|verdict|"
    r"(?:give|gives|deserves|assign)(?:\s+(?:it|this|that|the\s+\w+))?)\b"
)
_LABELLED = re.compile(
    r"\b(?:scores?|ratings?|grade|verdict)\b[^\n.;:=0-9]{0,40}?(?:[:=]|\bis\b|\s[-\u2013\u2014]\s)"
    rf"(?:[\s*_(]|\b(?:an?|now|only|still)\b){{0,12}}(?:{_DIGIT.format('n')}|(?P<w>{_WORD})\b){_RANGE}",
    re.I,
)
"""'Score: 3', 'the score is 3': surer than any number after a verb."""
_KEYED = re.compile(
    rf"{_KEY}(?:[^\n.;0-9]{{0,40}}?{_DIGIT.format('n')}|"
    rf"(?:[\s:=*_-]|\b(?:is|of|as|at|a|an|it)\b){{1,12}}(?P<w>{_WORD})\b){_RANGE}",
    re.I,
)
_OUT_OF = re.compile(
    rf"(?<![\d.,/\w-])(?:(?P<n>[1-4])(?:\.0)?|(?P<w>\b(?:{_WORD})))\s*(?:/|\(?out\s+of)\s*"
    r"(?:4|four)\b(?!\.\d)",
    re.I,
)
_ALONE = re.compile(
    r"(?:^|(?<=[.!?:;\n]))[ \t*_(]*([1-4])(?:\.0)?(?=[ \t*_)]*(?:$|[.!?:;,\n]|[-]\s))"
)
"""A number that is a sentence, a line or an opening of its own."""
_OFF_SCALE = re.compile(rf"{_KEY}[^\n.;0-9]{{0,40}}?\d", re.I)
_RATING = r"(?P<r>good|average|fair|poor)"


def parse_score(text: str) -> int | None:
    """The score from 1 to 4 in `text`; of labels, or else of verbs, the last one wins."""
    text = _COUNTED.sub(" ", _SCALE.sub(" ", _DENIED.sub(" ", text)))
    for pattern in (_LABELLED, _KEYED, _OUT_OF):
        found = [m.group("n") or m.group("w").lower() for m in pattern.finditer(text)]
        if found:
            return _WORDS.get(found[-1]) or int(found[-1])
    if _OFF_SCALE.search(text):
        return None
    alone = set(_ALONE.findall(text.strip()))
    return int(alone.pop()) if len(alone) == 1 else None


def parse_ratings(text: str, criteria: Sequence[str]) -> dict[str, str] | None:
    """The rating of each criterion, or None if one is missing. 'fair' reads as 'average'."""
    text = _DENIED.sub(" ", text)
    names = {c: r"[\s_-]+".join(map(re.escape, c.split())) for c in criteria}
    ratings: dict[str, str] = {}
    for criterion, name in names.items():
        others = "|".join(other for c, other in names.items() if c != criterion)
        gap = rf"(?:(?!\b(?:{others})\b)[\s\S]){{0,80}}?" if others else r"[\s\S]{0,80}?"
        pattern = rf"\b{name}\b{gap}(?<![/|])\b{_RATING}\b(?![/|])"
        found = [m.group("r").lower() for m in re.finditer(pattern, text, re.I)]
        if not found:
            return None
        word = found[-1]
        ratings[criterion] = "average" if word == "fair" else word
    return ratings
