"""What a reader without a model finds in a question: values, and which argument each is for.

Values are found by their patterns (codes, dates, numbers, addresses, names, the options of an
argument). An argument gets the value that stands behind its own words: those of its name, of its
description, and what else people say for it. Nothing here knows how questions are made.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from typing import Any

from coa.environments.toolbox.services import UNITS, words
from coa.environments.toolbox.wording import MONTHS, NUMBERS, UNIT_WORDS
from coa.io.runs import Json
from coa.tools.arguments import words_of

LONGEST_QUESTION = 4000
"""Characters that are read."""
_MONTH = "|".join(f"{name}|{name[:3]}" for name in MONTHS)
_PATTERNS: dict[str, str] = {
    "quoted": r"[\"\u201c]([^\"\u201c\u201d\n]{1,200})[\"\u201d]|(?<![\w'])'([^'\n]{1,200})'(?!\w)",
    "email": r"[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64}){1,4}",
    "date": (
        rf"\d{{4}}-\d\d-\d\d|(?:the )?\d{{1,2}}(?:st|nd|rd|th)?(?: of)? (?:{_MONTH})\.?,? \d{{4}}"
        rf"|(?:{_MONTH})\.? \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}|\d\d\.\d\d\.\d{{4}}"
    ),
    "host": r"(?:https?://)?[a-z0-9-]{1,40}(?:\.[a-z0-9-]{1,40}){1,3}\.?(?:com|org|net|io|dev)\b\S{0,80}",
    "phone": r"\b\d{4}-\d{6}\b",
    "version": r"\b\d{1,3}\.\d{1,3}\.\d{1,3}\b",
    "street": r"\b\d{1,4} [A-Z][a-z]+ [A-Z][a-z]+\b",
    "code": r"\b[A-Z]{1,5}-\d{2,6}(?:-[A-Z]{1,3})?\b|\b[A-Z]{1,3}\d{2,6}\b",
    "route": r"\b[A-Z][a-z]+ - [A-Z][a-z]+\b",
    "list": r"\b\d+(?:\.\d+)?(?:, \d+(?:\.\d+)?)*,? and \d+(?:\.\d+)?\b",
    "number": r"(?<![\w.])-?\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?<![\w.])-?\d+(?:\.\d+)?",
    "name": r"\b[A-Z][a-z'][\w']*(?:[ -](?:(?:de|of|the|la|van) )?[A-Z][a-z'][\w']*){0,4}",
    "word_number": rf"\b(?:{'|'.join(NUMBERS)})\b",
    "flag": r"\b(?:yes|no|true|false)\b",
}
_PATTERN = re.compile("|".join(f"(?P<{name}>{form})" for name, form in _PATTERNS.items()))
_TEXTS = ("quoted", "name", "email", "host", "phone", "version", "street", "code", "route")
_EMPTY = frozenset(
    "a an the of for with in by to its it is are and or at on as from this that given one written "
    "format number value string id yyyy mm dd new be e g used which".split()
)
_END = re.compile(r"[,;.?!()](?:\s|$)|\s(?:and|then|from now|as|as well)\b")


@dataclass(frozen=True)
class Found:
    """A value in a question."""

    kind: str
    value: Any
    start: int
    end: int


@dataclass(frozen=True)
class Argument:
    """An argument of a tool, one inside of an object by its path."""

    path: str
    schema: Json
    required: bool
    words: frozenset[str]
    phrases: tuple[str, ...]
    """What may be said for it, the longest first."""

    @property
    def options(self) -> list[Any]:
        return list(self.schema.get("enum") or ())

    @property
    def type(self) -> str:
        return str(self.schema.get("type", "string"))

    @property
    def about(self) -> str:
        return str(self.schema.get("description") or "")

    @property
    def is_key(self) -> bool:
        """Whether it is told which record is meant."""
        named = {*words_of(self.path), *words_of(self.about)}
        return self.type == "string" and bool(named & _KEYS)

    @property
    def is_date(self) -> bool:
        return "date" in words_of(self.about) + words_of(self.path) or "YYYY" in self.about


_KEYS = frozenset("id code number reference identifier key".split())


@dataclass
class ReadArguments:
    """Values for the arguments of one tool."""

    values: dict[str, Any] = field(default_factory=dict)
    missing: list[Argument] = field(default_factory=list)
    used: list[Found] = field(default_factory=list)

    def arguments(self) -> Json:
        """As an object; those inside of another have its name and a dot before them."""
        made: Json = {}
        for path, value in self.values.items():
            *outer, last = path.split(".")
            place = made
            for part in outer:
                place = place.setdefault(part, {})
            place[last] = value
        return made


def values_in(question: str, nouns: Collection[str] = ()) -> list[Found]:
    """All values of a question, in their order; none within another. A name does not begin with one
    of the nouns."""
    found = []
    for match in _PATTERN.finditer(question[:LONGEST_QUESTION]):
        kind, text = str(match.lastgroup), match[0]
        value: Any = text
        if kind == "quoted":
            value = text[1:-1]
        elif kind == "date":
            value = _date(text)
        elif kind == "list":
            value = [_number(each) for each in re.findall(r"\d+(?:\.\d+)?", text)]
        elif kind in ("number", "word_number"):
            value = NUMBERS.index(text) if kind == "word_number" else _number(text)
        elif kind == "flag":
            value = text in ("yes", "true")
        elif kind == "host":
            value = text.rstrip(".,:;?!)")
        elif kind == "name" and _opens(question, match.start()) and not re.search("[ -]", text):
            value = None  # a sentence begins with it
        start = match.start()
        while kind == "name" and value is not None:
            first, blank, rest = value.partition(" ")
            if not blank or not {*words_of(first)} & {*nouns}:
                break
            value, start = rest, start + len(first) + 1
        if value is not None:
            found.append(Found(kind, value, start, match.end()))
    return found


def _opens(question: str, at: int) -> bool:
    return bool(re.search(r"(?:^|[.!?:]\s+|^\W+)$", question[:at]))


def _number(text: str) -> float:
    plain = text.replace(",", "")
    return float(plain) if "." in plain else int(plain[:300])


def _date(text: str) -> str | None:
    digits = [int(each) for each in re.findall(r"\d+", text)]
    named = re.search(_MONTH, text)
    if named is None:
        year, month, day = digits if len(text.split("-")) == 3 else reversed(digits)
    else:
        starts = [name[:3] for name in MONTHS]
        (day, year), month = digits, starts.index(named[0][:3]) + 1
    try:
        return date(year, month, day).isoformat()
    except ValueError:
        return None


# -- arguments -------------------------------------------------------------------------------


def slots_of(declaration: Json) -> list[Argument]:
    """The arguments of a declared tool."""
    return list(_slots(declaration["parameters"], "", True, 0))


def _slots(schema: Json, before: str, needed: bool, depth: int) -> Iterator[Argument]:
    for name, part in schema.get("properties", {}).items():
        wanted = needed and name in schema.get("required", ())
        if part.get("properties") and depth < 3:
            yield from _slots(part, f"{before}{name}.", wanted, depth + 1)
        else:
            told = _phrases(name, str(part.get("description") or ""))
            held = frozenset(w for each in told for w in words_of(each)) - _EMPTY
            yield Argument(f"{before}{name}", part, wanted, held, told)


def _phrases(name: str, about: str) -> tuple[str, ...]:
    """What may be said for an argument: its name, how its description begins, and synonyms."""
    listed = [each for each in words_of(name) if each not in UNITS and each not in ("id",)]
    first = re.split(r"[.,;(]| in [a-z0-9]+$| of (?:the|a|an) | for ", about.lower())[0].strip()
    if first.rpartition(" ")[2] in _KEYS:
        first = re.split(r"[.,;(]", about.lower())[0].strip()
    first = re.sub(r"^(?:the|a|an) ", "", first)
    told = {" ".join(listed), first} - {""}
    for phrase in list(told):
        told.update(synonyms(phrase))
    return tuple(sorted(told, key=lambda each: (-len(each), each)))


@cache
def synonyms(phrase: str) -> tuple[str, ...]:
    """What else people say for a name."""
    plain = "_".join(phrase.split())
    for base, said in words("phrases").items():
        if plain == base or phrase in said:
            return (base.replace("_", " "), *said)
    return ()


def read(
    question: str,
    slots: Sequence[Argument],
    known: Mapping[str, Any] | None = None,
    spent: Collection[str] = (),
    nouns: Collection[str] = (),
) -> ReadArguments:
    """The arguments that a question gives, beside those that are known already; `spent` are values
    that were told for something else."""
    question = question[:LONGEST_QUESTION]
    found, reading = values_in(question, nouns), ReadArguments(dict(known or {}))
    rest = [slot for slot in slots if slot.path not in reading.values]
    told = {*spent, *(str(value) for value in reading.values.values())}
    found = [each for each in found if str(each.value) not in told]
    scored = sorted(
        (
            (-score, place, at, slot, each)
            for place, slot in enumerate(rest)
            for at, each in enumerate([*found, *_options(question, slot)])
            if (score := _evidence(question, found, slot, each)) > 0
        ),
        key=lambda each: each[:3],
    )
    for _, _, _, slot, each in scored:
        if slot.path not in reading.values and not _overlaps(each, reading.used):
            _take(reading, slot, each)
    for slot in rest:  # what is said behind its own words, whatever it is
        if slot.path not in reading.values and slot.type == "string" and not slot.options:
            behind = _behind(question, slot)
            if behind and behind.value not in told and not _overlaps(behind, reading.used):
                _take(reading, slot, behind)
    for slot in [each for each in rest if each.required and each.path not in reading.values]:
        left = [f for f in found if _suits(slot, f) and not _overlaps(f, reading.used)]
        left = [f for f in left if f.kind not in ("word_number", "flag")]
        left = [f for f in left if f.kind != "date" or slot.is_date]
        alike = [s for s in rest if s.required and s.path not in reading.values and s is not slot]
        alike = [s for s in alike if any(_suits(s, each) for each in left)]
        if len(left) == 1 and not alike:
            _take(reading, slot, left[0])
        else:
            reading.missing.append(slot)
    return reading


def _take(reading: ReadArguments, slot: Argument, each: Found) -> None:
    reading.values[slot.path] = shaped(slot, each.value)
    reading.used.append(each)


def shaped(slot: Argument, value: Any) -> Any:
    """A value in the type and the form that an argument asks for."""
    if slot.is_date and re.fullmatch(r"\d{4}-\d\d-\d\d", str(value)):
        year, month, day = str(value).split("-")
        if "DD.MM.YYYY" in slot.about:
            return f"{day}.{month}.{year}"
        return f"{month}/{day}/{year}" if "MM/DD/YYYY" in slot.about else value
    if slot.type == "number" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if slot.type == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    return str(value) if slot.type == "string" and not isinstance(value, str) else value


def _suits(slot: Argument, each: Found) -> bool:
    """Whether a value has the type of an argument."""
    if slot.options:
        return each.kind == "option" and each.value in slot.options
    if slot.type in ("integer", "number"):
        is_number = each.kind in ("number", "word_number")
        return is_number and (slot.type == "number" or float(each.value).is_integer())
    if slot.type == "boolean":
        return each.kind == "flag"
    if slot.type == "array":
        return each.kind == "list"
    if slot.type != "string":
        return False
    if slot.is_date:
        return each.kind == "date"
    if each.kind == "option":
        return False
    for kind in ("email", "phone", "version", "host", "route", "street"):
        if kind in slot.words:
            return each.kind == kind
    return each.kind in (("code",) if slot.is_key else (*_TEXTS, "date"))


def _options(question: str, slot: Argument) -> Iterator[Found]:
    """Options of an argument that stand in the question."""
    for option in slot.options:
        if isinstance(option, str) and option:
            said = re.escape(option.replace("_", " "))
            pattern = rf"(?<!\w)(?:{said}|{re.escape(option)})(?!\w)"
            for match in re.finditer(pattern, question, re.I):
                yield Found("option", option, match.start(), match.end())


def _evidence(question: str, found: Sequence[Found], slot: Argument, each: Found) -> float:
    """How much speaks for a value of an argument: its words before the value, and a unit behind."""
    if not _suits(slot, each):
        return 0.0
    before = max((f.end for f in found if f.end <= each.start), default=0)
    lead = question[max(before, each.start - 70) : each.start]
    tail = question[each.end : each.end + 24]
    said = words_of(lead)
    score = 0.0
    for distance, word in enumerate(reversed(said)):
        if word in slot.words:
            score += 1.0 / (1 + 0.15 * distance)
    lowered = lead.lower()
    if any(
        re.search(rf"\b{re.escape(phrase)}\W+(?:\w+\W+){{0,2}}$", lowered)
        for phrase in slot.phrases
    ):
        score += 2.0
    score += 0.4 * any(_is_unit(word, slot) for word in words_of(tail)[:2])
    if score and slot.type in ("integer", "number"):
        score += 0.3 * any(word in slot.words for word in words_of(tail)[:1])
    if slot.options and not score:
        return 0.1 if slot.required else 0.0
    if slot.is_key and each.kind == "code" and not score:
        return 0.05
    return score


def _is_unit(word: str, slot: Argument) -> bool:
    named = {*words_of(slot.path), *words_of(slot.about)}
    return any(
        word in words_of(" ".join(said)) for unit, said in UNIT_WORDS.items() if unit in named
    )


def _behind(question: str, slot: Argument) -> Found | None:
    """The text behind the words of an argument, up to the next mark or `and`."""
    for phrase in slot.phrases:
        between = r"\s*(?:of\s+[^,;]{1,80}?\s(?:to|is)\s|=|:|is|to|of|as|named|called)?\s*"
        form = rf"\b{re.escape(phrase)}\b{between}(?P<value>\S.*)"
        match = re.search(form, question, re.I | re.S)
        if match:
            text = _END.split(match["value"], maxsplit=1)[0].strip(" \"'")
            start = match.start("value")
            if text and len(text) <= 200 and not (slot.is_key and not re.search(r"\d", text)):
                return Found("text", text, start, start + len(text))
    return None


def _overlaps(each: Found, used: Sequence[Found]) -> bool:
    return any(each.start < other.end and other.start < each.end for other in used)


def value_for(question: str, result: Mapping[str, Any]) -> str | None:
    """The field of a result that a question asks for, by its words; None: none is. What it tells
    itself it does not ask for."""
    told = {
        n
        for n, v in result.items()
        if re.search(rf"(?<![\w.-]){re.escape(str(v))}(?![\w-])", question)
    }
    asks = {name: value for name, value in result.items() if name not in told}
    return _named_in(question, asks) or _named_in(question, result)


def _named_in(question: str, result: Mapping[str, Any]) -> str | None:
    asked = words_of(question)
    lowered = " ".join(asked)
    best: tuple[float, str] = (0.0, "")
    for name in result:
        told = [each for each in words_of(name) if each not in UNITS]
        phrases = [" ".join(told), *synonyms(" ".join(told))]
        whole = [
            p for p in phrases if re.search(rf"\b{re.escape(' '.join(words_of(p)))}\b", lowered)
        ]
        score = max((len(words_of(p)) + 1.0 for p in whole), default=0.0)
        score = score or 0.5 * len({*told} & {*asked} - _EMPTY)
        if score:
            place = min((lowered.find(" ".join(words_of(p))) for p in whole), default=len(lowered))
            score -= place / 10_000
        if score > best[0]:
            best = (score, name)
    return best[1] or None
