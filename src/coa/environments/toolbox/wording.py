"""How people put things: values in natural forms, and questions in many wordings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import date
from typing import Any

from coa.environments.toolbox.catalogue import Field, Thing, listing, plural
from coa.environments.toolbox.services import UNITS

MONTHS = (
    "January February March April May June July August September October November December"
).split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
).split()
UNIT_WORDS = {
    **{"kg": ("kg", "kilograms", "kilos"), "km": ("km", "kilometres", "kilometers")},
    **{"m": ("m", "metres", "meters"), "euros": ("euros", "EUR"), "litres": ("litres", "liters")},
    **{"celsius": ("degrees", "degrees Celsius"), "percent": ("%", "percent")},
    **{"sqm": ("square metres", "sqm"), "minutes": ("minutes", "min"), "gb": ("GB", "gigabytes")},
    **{"mg": ("mg", "milligrams"), "m3": ("cubic metres", "m3"), "cm": ("cm", "centimetres")},
    **{"mm": ("mm", "millimetres"), "tons": ("tons",), "hectares": ("hectares", "ha")},
    **{"kwh": ("kWh", "kilowatt hours"), "mb": ("MB", "megabytes"), "ms": ("ms", "milliseconds")},
}
QUESTIONS: dict[str, tuple[str, ...]] = {
    "read": (
        "What is the {field} of {one}?",
        "Tell me the {field} of {one}.",
        "I need the {field} of {one}.",
        "Which {field} does {one} have?",
        "{One}: what is the {field}?",
        "Could you check the {field} of {one} for me?",
        "Please look up {one} and give me the {field}.",
        "Find out the {field} of {one}.",
        "What {field} is on record for {one}?",
        "Somebody asks for the {field} of {one}.",
    ),
    "count": (
        "How many {nouns} are there with {pairs}?",
        "Count the {nouns} with {pairs}.",
        "What is the number of {nouns} with {pairs}?",
        "Tell me how many {nouns} have {pairs}.",
        "{Nouns} with {pairs}: how many do we have?",
    ),
    "sum": (
        "What is the {sum} for {pairs}?",
        "Calculate the {sum} with {pairs}.",
        "How much is the {sum}, given {pairs}?",
        "I have {pairs}. What {sum} does that make?",
        "Please work out the {sum}: {pairs}.",
        "Give me an estimate of the {sum} for {pairs}.",
    ),
    "create": (
        "Register a new {noun} with {pairs}. Which {key} does it get?",
        "Please create a {noun}: {pairs}. I need its {key}.",
        "Add a {noun} with {pairs} and tell me the new {key}.",
        "We have a new {noun}, {pairs}. Enter it and give me the {key}.",
        "Open a {noun} for me ({pairs}). What is its {key}?",
    ),
    "update": (
        "Set the {field} of {one} to {value} and give me the receipt.",
        "Change the {field} of {one} to {value}. What is the receipt?",
        "{One} should have the {field} {value} from now on. Tell me the receipt.",
        "Please correct {one}: the {field} is {value}. I need the receipt.",
    ),
    "remove": (
        "Cancel {one} and give me the receipt.",
        "Please delete {one}. What is the receipt?",
        "Remove {one} from the records and tell me the receipt.",
        "We no longer need {one}. Take it out; I want the receipt.",
    ),
    "compare": (
        "Which {noun} has the {more} {field}, {a} or {b}?",
        "{a} or {b}: which of these {nouns} has the {more} {field}?",
        "Compare the {nouns} {a} and {b}. Which one has the {more} {field}?",
        "Of {nouns} {a} and {b}, which has the {more} {field}?",
    ),
    "change": (
        "Set the {field} of {one} to {value}. How many {nouns} have {pairs} then?",
        "First change the {field} of {one} to {value}, then count the {nouns} with {pairs}.",
        "{One} now has the {field} {value}. Update it and say how many {nouns} with {pairs} there "
        "are.",
    ),
}
_BEFORE = ("", "", "", "", "", "", "Hi, a quick one. ", "Hello! ", "For my report: ", "One more. ")
_AFTER = ("", "", "", "", "", "", " Thanks!", " It is urgent.", " Please be exact.", " Thank you.")


def say(kind: str, value: Any, rng: random.Random) -> str:
    """A value as people write it."""
    kind = kind.rstrip("!?")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return listing([str(each) for each in value])
    if kind == "date":
        return _date(date.fromisoformat(str(value)), rng)
    if isinstance(value, int | float):
        text = _number(value, rng, words=kind not in UNITS)
        unit = rng.choice(UNIT_WORDS.get(kind, ("",)))
        return f"{text}{unit}" if unit == "%" else f"{text} {unit}".strip()
    text = str(value)
    if "|" in kind:
        return text.replace("_", " ")
    return f'"{text}"' if rng.random() < 0.08 else text


def _date(day: date, rng: random.Random) -> str:
    month = MONTHS[day.month - 1]
    form = rng.randrange(6)
    if form == 0:
        return day.isoformat()
    if form == 1:
        return f"{month} {day.day}, {day.year}"
    if form == 2:
        return f"the {day.day}{_nth(day.day)} of {month} {day.year}"
    if form == 3:
        return f"{day.day} {month[:3]} {day.year}"
    return f"{day.day} {month} {day.year}"


def _nth(day: int) -> str:
    return "th" if 10 < day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")


def _number(value: float, rng: random.Random, words: bool) -> str:
    if words and isinstance(value, int) and 1 < value < len(NUMBERS) and rng.random() < 0.25:
        return NUMBERS[value]
    if value >= 1000 and rng.random() < 0.4:
        return f"{value:,}"
    return str(value)


def pairs(fields: Sequence[tuple[Field, Any]], rng: random.Random) -> str:
    """Fields with their values, as part of a sentence."""
    style = rng.randrange(3)
    said = []
    for field, value in fields:
        name, text = rng.choice(field.said), say(field.kind, value, rng)
        if style == 0 and isinstance(value, int | float) and not isinstance(value, bool):
            said.append(f"a {name} of {text}" if name[0] not in "aeiou" else f"an {name} of {text}")
        elif style == 1:
            said.append(f"{name} = {text}")
        else:
            said.append(f"{name} {text}")
    return ", ".join(said) if style == 1 else listing(said)


def the_one(thing: Thing, key: str, rng: random.Random) -> str:
    """A record by its key."""
    noun = thing.noun
    if rng.random() < 0.05:
        return key
    return rng.choice((f"{noun} {key}", f"the {noun} {key}", f"{noun} number {key}"))


def my_own(thing: Thing, rng: random.Random) -> str:
    """A record that is not told."""
    return rng.choice((f"my {thing.noun}", f"that {thing.noun}", f"the {thing.noun}"))


def the_one_with(thing: Thing, field: Field, value: Any, rng: random.Random) -> str:
    """A record by another of its fields."""
    text, name = say(field.kind, value, rng), rng.choice(field.said)
    return rng.choice(
        (
            f"the {thing.noun} with the {name} {text}",
            f"the {thing.noun} whose {name} is {text}",
            f"the {thing.noun} of {text}" if field.kind == "person!" else f"{thing.noun} {text}",
        )
    )


def ask(family: str, rng: random.Random, **parts: str) -> str:
    """A question of a family."""
    pattern = rng.choice(QUESTIONS[family])
    grown = {name.capitalize(): text[:1].upper() + text[1:] for name, text in parts.items()}
    return f"{rng.choice(_BEFORE)}{pattern.format(**parts, **grown)}{rng.choice(_AFTER)}"


def nouns(thing: Thing) -> str:
    return plural(thing.noun)
