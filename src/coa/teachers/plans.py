"""What the planner and the verifier know: how to break a question into look-ups, and how to
combine what was found. Both work from text: the question, and the values that were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coa.corpus.relations import RELATIONS
from coa.tasks.atlas_catalogues import MHQA
from coa.tasks.atlas_families import (
    Catalogue,
    Chain,
    Comparison,
    Difference,
    Intersection,
    Superlative,
)
from coa.tasks.atlas_understanding import understand
from coa.tasks.reckoning import Side, amount, apart, lettered, weighed
from coa.teachers.wording import WORDINGS

Shape = Chain | Comparison | Difference | Intersection | Superlative
_COUNTS = ("no", "one look-up", "two look-ups", "three look-ups", "four look-ups")


class Find(NamedTuple):
    """One look-up. The subject may be the result of the step before, `#0`, or `#0*` for each."""

    relation: str
    subject: str


class Verdict(NamedTuple):
    answer: str
    thought: str


@dataclass(frozen=True)
class Plan:
    """Look-ups in order, in a form that can be carried out and in words."""

    shape: Shape
    names: tuple[str, ...]
    """The subjects that the question names."""
    steps: tuple[Find, ...]

    @property
    def text(self) -> str:
        """The plan as the planner writes it."""
        lines = [f"{i}. {self._in_words(find)}" for i, find in enumerate(self.steps, start=1)]
        return "\n".join([*lines, *self._combination(len(lines) + 1)])

    @property
    def thought(self) -> str:
        if isinstance(self.shape, Superlative):
            return "I must look at each neighbour."
        count = len(self.steps)
        words = _COUNTS[count] if count < len(_COUNTS) else f"{count} look-ups"
        return f"This takes {words}."

    def _in_words(self, find: Find) -> str:
        subject = find.subject
        if subject.startswith("#"):
            earlier = self.steps[int(subject[1:].rstrip("*"))]
            each = "each" if subject.endswith("*") else "that"
            noun = RELATIONS[earlier.relation].value
            subject = f"{each} {'neighbour' if each == 'each' else noun}"
        return WORDINGS[find.relation].need.format(s=subject).replace("the that", "that")

    def _combination(self, number: int) -> list[str]:
        if isinstance(self.shape, Chain):
            return []
        if isinstance(self.shape, Intersection):
            return [f"{number}. the common name"]
        if isinstance(self.shape, Difference):
            return [f"{number}. the difference"]
        return [f"{number}. the {_extreme(self.shape, len(self.names) == 2)}"]

    @property
    def lanes(self) -> list[list[Find]]:
        """Steps that follow from each other, apart from those that can be done at the same time."""
        lanes: list[list[Find]] = []
        for find in self.steps:
            if find.subject.startswith("#") and not find.subject.endswith("*"):
                lanes[-1].append(find)
            else:
                lanes.append([find])
        return lanes


def plan_for(question: str, catalogue: Catalogue = MHQA) -> Plan | None:
    """The planner's decomposition of a question, from its words alone."""
    understood = understand(question, catalogue)
    if understood is None:
        return None
    shape = understood.meaning.shape
    names = tuple(understood.slots[slot] for slot in shape.slots)
    if isinstance(shape, Chain):
        return Plan(shape, names, _chain(shape.relations, names[0], 0))
    if isinstance(shape, Comparison | Difference | Intersection):
        length = len(shape.relations)
        chains = (_chain(shape.relations, name, i * length) for i, name in enumerate(names))
        return Plan(shape, names, tuple(find for chain in chains for find in chain))
    if isinstance(shape, Superlative):
        return Plan(shape, names, (Find("neighbours", names[0]), Find(shape.by, "#0*")))
    return None


def _chain(relations: Sequence[str], start: str, offset: int) -> tuple[Find, ...]:
    subjects = [start, *(f"#{offset + i}" for i in range(len(relations) - 1))]
    return tuple(map(Find, relations, subjects))


def conclude(plan: Plan, findings: Sequence[Sequence[str]]) -> Verdict | None:
    """The verifier's answer from the reports; None when they do not combine."""
    if not findings or not all(findings):
        return None
    shape = plan.shape
    if isinstance(shape, Chain):
        return Verdict(findings[-1][0], "") if len(findings[-1]) == 1 else None
    if isinstance(shape, Intersection):
        return _shared(findings[0], findings[1], plan.names)
    if isinstance(shape, Superlative):
        return _most(list(findings[0]), findings[1:], shape)
    ends = list(findings[len(shape.relations) - 1 :: len(shape.relations)])
    if isinstance(shape, Comparison):
        return _most(list(plan.names), ends, shape)
    ordered = _sides(plan.names, ends)
    if ordered is None:
        return None
    gap, steps = apart(*ordered)
    return Verdict(str(gap), f"{steps}.")


def _shared(first: Sequence[str], second: Sequence[str], asked: Sequence[str]) -> Verdict | None:
    """Names are gone through up to the one that both lists have, so that it is the last one said:
    after the whole list a small model takes a name that is nearer. Where the two border each other,
    that is said, too: a name that is all over the chain looks like one that both have."""
    common = [name for name in first if name in second]
    if len(common) != 1:
        return None
    others = first[: first.index(common[0])]
    said = [f"{name} {'itself' if name in asked else 'no'}" for name in others]
    return Verdict(common[0], f"{'; '.join([*said, f'{common[0]} yes'])}. Both have {common[0]}.")


def _sides(names: Sequence[str], values: Sequence[Sequence[str]]) -> list[Side] | None:
    """What is compared, when there is a number for each name."""
    sides = lettered(
        (name, value[0], number)
        for name, value in zip(names, values, strict=False)
        if (number := amount(value[0])) is not None
    )
    return sides if sides and len(sides) == len(names) == len(values) else None


def _most(
    names: list[str], values: Sequence[Sequence[str]], shape: Comparison | Superlative
) -> Verdict | None:
    """One is held against the next, and the better of the two against the one after it."""
    rows = _sides(names, values)
    if rows is None:
        return None
    said: list[str] = []
    best, *others = rows
    for other in others:
        best, steps = weighed(best, other, smaller=shape.smaller)
        said.append(f"{steps}.")
    return Verdict(best.name, " ".join(said))


def _extreme(shape: Comparison | Superlative, pair: bool) -> str:
    if shape.smaller:
        return "smaller" if pair else "smallest"
    return "larger" if pair else "largest"
