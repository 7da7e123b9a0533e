"""Questions to the office, with answers: train.jsonl and test.jsonl.

    python questions.py [--train 400] [--test 100] [--seed 0] [--out .]

The questions of the two files share no customer, no year, no policy and no price group.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from office import CITIES, CUSTOMERS, GROUPS, POLICIES, RATES, YEARS, Customer

SHARES = {
    "invoice": 20,
    "converted": 18,
    "city": 10,
    "policy": 14,
    "discount": 14,
    "net": 8,
    "both": 8,
    "pair": 4,
    "unknown": 4,
}
"""How many questions in a hundred are of a kind."""
WORDINGS = {
    "invoice": ("What did {c} pay in {y}?", "How much was the invoice of {c} for {y}?"),
    "converted": (
        "What did {c} pay in {y}, in {cur}?",
        "How much was the invoice of {c} for {y}, in {cur}?",
    ),
    "city": ("In which city is {c}?",),
    "policy": (
        "What is the limit in our policy on {topic}?",
        "Which limit does our policy on {topic} set?",
    ),
    "discount": ("What discount does {c} get?", "How many percent of discount does {c} get?"),
    "net": ("What did {c} owe for {y} after its discount?",),
    "both": ("What did {c} pay in {y} and {y2} together?",),
    "pair": ("In which city is {c}, and what did it pay in {y}?",),
}


class Part:
    """What the questions of one file may be about: a part of the office."""

    def __init__(self, test: bool) -> None:
        held_out = set(random.Random("office: held out").sample(sorted(CUSTOMERS), 120))
        first = {name.split()[0] for name in held_out}  # no word of a name is in both, either
        self.customers = [
            each
            for name, each in sorted(CUSTOMERS.items())
            if (name in held_out if test else name.split()[0] not in first)
        ]
        self.years = [year for year in YEARS if (year > 2019) == test]
        topics = [topic for topic in POLICIES if not topic.startswith("discounts")]
        self.topics = topics[2::3] if test else [t for t in topics if t not in topics[2::3]]
        self.groups = set(GROUPS[9:] if test else GROUPS[:9])
        self.customers = [each for each in self.customers if each.group in self.groups]
        self.cities = sorted({each.city for each in self.customers} & set(CITIES))


def discount(customer: Customer) -> int:
    words = POLICIES[f"discounts for {customer.group} customers"].split()
    return int(words[-2])


def make(kind: str, part: Part, chance: random.Random) -> dict[str, Any]:
    """One question of a kind, with its answer."""
    customer = chance.choice(part.customers)
    years = [year for year in part.years if year in customer.invoices]
    first, second = chance.sample(years, 2)
    paid = customer.invoices[first]
    currency = chance.choice(sorted(RATES))
    topic = chance.choice(part.topics)
    name = customer.name
    asked = kind
    if kind == "unknown":  # a name that no customer has, or a year without an invoice
        asked = chance.choice(["invoice", "city", "discount"])
        trades = {each.name.split()[1] for each in part.customers}
        name = f"{name.split()[0]} {chance.choice(sorted(trades))}"
        if name in CUSTOMERS:
            name = f"{name.split()[0]} Bank"
    answer = {
        "invoice": f"{paid} EUR",
        "converted": f"{paid * RATES[currency]:.2f} {currency}",
        "city": customer.city,
        "policy": " ".join(POLICIES[topic].rstrip(".").split()[-2:]),
        "discount": f"{discount(customer)} percent",
        "net": f"{paid * (100 - discount(customer)) / 100:.2f} EUR",
        "both": f"{paid + customer.invoices[second]} EUR",
        "pair": f"{customer.city}, {paid} EUR",
        "unknown": "not found",
    }[kind]
    wording = chance.choice(WORDINGS[asked])
    question = wording.format(c=name, y=first, y2=second, cur=currency, topic=topic)
    return {"question": question, "answers": [answer], "meta": {"kind": kind}}


def questions(count: int, test: bool, seed: int) -> list[dict[str, Any]]:
    """So many different questions, mixed."""
    part = Part(test)
    chance = random.Random(f"office: questions {seed} {test}")
    made: dict[str, dict[str, Any]] = {}
    kinds = list(SHARES)
    while len(made) < count:
        kind = chance.choices(kinds, weights=list(SHARES.values()))[0]
        each = make(kind, part, chance)
        made.setdefault(each["question"], each)
    name = "test" if test else "train"
    return [{"id": f"{name}-{at:03}", **each} for at, each in enumerate(made.values())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, default=400)
    parser.add_argument("--test", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path())
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", given.train), ("test", given.test)):
        lines = map(json.dumps, questions(count, name == "test", given.seed))
        path = given.out / f"{name}.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{count} questions in {path}")


if __name__ == "__main__":
    main()
