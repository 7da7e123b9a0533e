"""Contamination: questions to train on that an evaluation set also asks.

Three rules, from strict to loose; words are compared without case, accents, punctuation and markup.

* The same question: word by word or, for short ones, the same words that carry meaning, and the
  same figures in the same order. "Tell me the capital of Japan" is "What is the capital of Japan?".
* A short evaluation question stands within another one: all its words that carry meaning lie close
  together there. A question of one template about another name lacks that name, so it is not found.
* A long one shares word n-grams and has the same figures. The text of a template says nothing about
  which of its questions it is, so n-grams that several other questions hold are left out. One that
  has no others is looked for as if it were short.

A question that brings tools along also repeats an evaluation question when one of them is declared
there: the same name with the same arguments, whatever is asked.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from coa.io.runs import Json
from coa.tasks import Task

Words = tuple[str, ...]

_WORD = re.compile(r"[^\W_]+|(?<![\w])_(?!\w)|(?<![^\W\d_])-|-(?![^\W\d_])|[^\w\s.,;:?!'\"`-]")
"""Signs other than punctuation and hyphens count: 3 + 5 is another question than 3 * 5. So does one
`_`, which may be an empty cell."""
_ACCENTS = re.compile(r"(?<=[^\W\d_])[\u0300-\u036f]+")
"""Of letters only: not equal is the sign of equality with a stroke."""
_TAGS = re.compile(
    r"(?<![\w)])<(?:a|b|br|code|div|em|font|i|li|mark|p|pre|q|s|small|span|strong|tt|u)"
    r"(?:\s+[\w-]+=[^<>]{0,200})?\s*/?>|</[a-z]{1,6}>"
)
_STARS = re.compile(
    r"(?<![\w*)\]])(?<![\d+*/^=-]\s)(\*{1,3})(?=\S)([^*\n]{1,200})(?<=\S)\1(?![\w*(\[])"
)
_BULLETS = re.compile(r"^[ \t]*(?:\*|#{1,6})[ \t]+(?=[^\W\d_]{2})", re.M)
_SIGN = r"+*/^=<>|%-"
_ASIDE = re.compile(
    rf"(?<![\w)\]}}{_SIGN}])(?<![{_SIGN}]\s)"
    rf"[(\[{{](\d{{4}}|(?=[^()\[\]{{}}]*[^\W\d_]{{2}})"
    rf"(?:[^()\[\]{{}}{_SIGN}]|(?<=\w)-(?=\w)){{1,300}})[)\]}}]"
    rf"(?![\w(\[{{]|\s*[{_SIGN}])"
)
"""A remark or a year in brackets. Brackets of formulas, lists and puzzles count as signs do."""
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
_EMPTY = frozenset(
    "a an the and or but if then than that this these those there here it its they their them he "
    "she his her we our you your i me my one ones which what who whom whose when where why how is "
    "are was were be been being am do does did has have had can could may might must shall should "
    "will would of in on at to for from by with as about into within also just please answer "
    "question find give name tell say state look up let us s".split()
)
"""English words that carry no meaning in a question; what is asked does not depend on them."""
_FEWEST = 2
"""A question of fewer words lies within too many others: only the same question counts then."""


SAME, WITHIN, GRAMS, OFFERS = (
    "is an evaluation question",
    "holds an evaluation question",
    "shares long passages with an evaluation question",
    "offers a tool of an evaluation question",
)


class Leak(NamedTuple):
    """The evaluation question that a question to train on repeats."""

    rule: str
    evaluation: str
    """The name of its file."""
    task_id: str


class _Asked(NamedTuple):
    """One question of an evaluation set."""

    evaluation: str
    task_id: str
    words: Words


def find_leaks(
    questions: Sequence[str],
    against: Mapping[str, Sequence[Task]],
    ngram: int = 8,
    overlap: float = 0.5,
    template: int = 3,
) -> dict[int, Leak]:
    """Index of each contaminated question -> where it comes from. `against` has names of files.

    An n-gram that more than `template` other questions hold belongs to a template.
    """
    asked = [
        _Asked(name, task.id, words)
        for name, tasks in against.items()
        for task in tasks
        if (words := words_of(task.question))
    ]
    if not asked:
        return {}
    given = [words_of(question) for question in questions]
    short = [each for each in asked if len(_meaning(each.words)) < 2 * ngram]
    long = [each for each in asked if len(_meaning(each.words)) >= 2 * ngram]
    same: dict[object, _Asked] = {}
    for each in asked:
        same.setdefault(each.words, each)
    for each in short:
        same.setdefault(_gist(each.words), each)
    passages = _Passages(long, given, ngram, template)
    within = _Short([*short, *passages.untold()])
    found: dict[int, Leak] = {}
    for index, words in enumerate(given):
        for rule, leak in (
            (SAME, same.get(words) or same.get(_gist(words))),
            (WITHIN, within.find(words)),
            (GRAMS, passages.find(words, overlap)),
        ):
            if leak is not None:
                found.setdefault(index, Leak(rule, leak.evaluation, leak.task_id))
    return found


Schema = tuple[str, frozenset[str]]


def schema_of(tool: Json) -> Schema:
    """A declared tool as it is compared: its name and those of its arguments, without case, marks
    and their order."""
    properties = tool.get("parameters", {}).get("properties", {})
    return _bare(tool.get("name", "")), frozenset(map(_bare, properties))


def _bare(name: object) -> str:
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def find_known_tools(
    offered: Sequence[Sequence[Json]], against: Mapping[str, Sequence[Task]]
) -> dict[int, Leak]:
    """Index of each list of declared tools that has one of an evaluation set -> whose it is."""
    known: dict[Schema, Leak] = {}
    for name, tasks in against.items():
        for task in tasks:
            for tool in task.meta.get("tools") or ():
                known.setdefault(schema_of(tool), Leak(OFFERS, name, task.id))
    found = {}
    for index, tools in enumerate(offered if known else ()):
        leaks = (known.get(schema_of(tool)) for tool in tools)
        if (leak := next(filter(None, leaks), None)) is not None:
            found[index] = leak
    return found


def words_of(question: str) -> Words:
    """Words and signs in order, without case, accents, punctuation and markup."""
    text = _plain(html.unescape(question))
    for each in (_unmarked(text), text):
        if words := _WORD.findall(_THOUSANDS.sub("", each)):
            return tuple(words)
    return ()


def _unmarked(text: str) -> str:
    """Without what marks words up: tags, emphasis, bullets, brackets around a remark."""
    text = _BULLETS.sub(" ", _TAGS.sub(" ", text)).replace("&", " and ")
    text = _STARS.sub(r" \2 ", text)
    for _ in range(2):  # a remark within a remark
        text = _ASIDE.sub(r" \1 ", text)
    return text


def _plain(text: str) -> str:
    """Without case, and without what only the typesetting of a text makes different."""
    if not text.isascii():
        text = _ACCENTS.sub("", unicodedata.normalize("NFKD", text))
        text = unicodedata.normalize("NFKC", text)
    text = text.casefold()
    return text if text.isascii() else "".join(map(_plain_character, text))


def _plain_character(character: str) -> str:
    kind = unicodedata.category(character)
    if kind == "Cf":  # a soft hyphen, a blank of no width
        return ""
    if kind == "Pd":
        return "-"
    if "\u3040" <= character <= "\u9fff":  # Japanese and Chinese put no blanks between words
        return f" {character} "
    return " " if kind[0] == "P" and not character.isascii() else character


def _meaning(words: Words) -> list[str]:
    return [word for word in words if word not in _EMPTY]


def _figures(words: Words) -> str:
    """Numbers and signs: unlike words they mean something else in another order."""
    return "".join(f" {word} " for word in words if not word.isalpha())


def _gist(words: Words) -> tuple[Words, str]:
    """What a short question asks, however it is worded."""
    return tuple(sorted(_meaning(words) or words)), _figures(words)


class _Short:
    """Evaluation questions that are found by their words, each filed under its rarest one."""

    def __init__(self, asked: Sequence[_Asked]) -> None:
        counts = Counter(word for each in asked for word in set(each.words))
        self.by_word: defaultdict[str, list[tuple[_Asked, Counter[str]]]] = defaultdict(list)
        for each in asked:
            wanted = Counter(_meaning(each.words))
            if wanted.total() >= _FEWEST:
                rarest = min(wanted, key=lambda word: (counts[word], word))
                self.by_word[rarest].append((each, wanted))

    def find(self, words: Words) -> _Asked | None:
        """The first question all of whose words lie close together in `words`."""
        have, figures = _meaning(words), _figures(words)
        known = Counter(have)
        for word in known:
            for each, wanted in self.by_word.get(word, ()):
                if wanted <= known and _figures(each.words) in figures:
                    width = 2 * wanted.total()  # the longest stretch that holds all of them
                    starts = range(max(1, len(have) - width + 1))
                    if any(wanted <= Counter(have[at : at + width]) for at in starts):
                        return each
        return None


class _Passages:
    """N-grams of long evaluation questions that tell which question it is."""

    def __init__(
        self, asked: Sequence[_Asked], given: Iterable[Words], size: int, template: int
    ) -> None:
        self.asked, self.size = asked, size
        self.telling: list[int] = []
        self.by_gram: defaultdict[Words, list[int]] = defaultdict(list)
        counts: Counter[Words] = Counter()
        # Copies make no template. Where no question is long, nothing has to be counted.
        for words in {*given, *(each.words for each in asked)} if asked else ():
            counts.update(self._grams(words))
        for number, each in enumerate(asked):
            telling = [gram for gram in self._grams(each.words) if counts[gram] - 1 <= template]
            self.telling.append(len(telling))
            for gram in telling:
                self.by_gram[gram].append(number)

    def untold(self) -> list[_Asked]:
        """Long questions without a passage of their own: formulas, templates but for figures."""
        return [each for each, telling in zip(self.asked, self.telling, strict=True) if not telling]

    def find(self, words: Words, overlap: float) -> _Asked | None:
        """The question that shares most of what tells it, if that is enough, and its figures."""
        met: Counter[int] = Counter()
        for gram in self._grams(words) if self.asked else ():
            met.update(self.by_gram.get(gram, ()))
        shares = {number: times / self.telling[number] for number, times in met.items()}
        figures = _figures(words)
        for number in sorted(shares, key=lambda number: (-shares[number], number)):
            if shares[number] >= overlap and _figures(self.asked[number].words) in figures:
                return self.asked[number]
        return None

    def _grams(self, words: Words) -> set[Words]:
        """Runs of words; figures that stand together are one word, so that two grids of noughts and
        ones have nothing in common unless they are the same."""
        joined = tuple(
            word
            for letters, run in groupby(words, str.isalpha)
            for word in (run if letters else ("".join(run),))
        )
        return {joined[at : at + self.size] for at in range(len(joined) - self.size + 1)}
