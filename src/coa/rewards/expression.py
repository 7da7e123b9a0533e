"""Expressions: rewards combined by a recipe, such as `tests*format` or `0.9*judge + 0.1*format`.

A name is one of ours or `module:attribute`; a number is a weight. There is no minus: every value
is from 0 to 1, which is checked before anything runs, so that rewards mean the same in every run.

What nobody can judge (None) stays unknown unless the rest decides: a product is 0 as soon as one
factor is 0, whatever the others would say; in a sum the unknown share is missing, and a sum without
it would look like a worse answer, so the sum is None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass

from coa.errors import ConfigError, did_you_mean

_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)|([A-Za-z_][\w.]*(?::[\w.]*)?)|([-+*/()]))")
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Weight:
    value: float


@dataclass(frozen=True, slots=True)
class Name:
    name: str


@dataclass(frozen=True, slots=True)
class Sum:
    terms: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Product:
    factors: tuple[Node, ...]


Node = Weight | Name | Sum | Product
Ask = Callable[[str], Awaitable[float | None]]


def parse_expression(text: str, known: Collection[str]) -> Node:
    """Read an expression; names are those that are known, or have a colon."""
    node = _Reader(text, known).read()
    if not any(names_in(node)):
        raise ConfigError(f"reward {text!r} names no reward. Known: {', '.join(sorted(known))}.")
    if (most := _most(node)) > 1 + _ROUNDING:
        raise ConfigError(
            f"reward {text!r} can reach {most:g}, expected at most 1. "
            "Give the terms weights, as in 0.9*exact + 0.1*format."
        )
    return node


def names_in(node: Node) -> Iterator[str]:
    """The names of an expression, in order, each as often as it stands there."""
    if isinstance(node, Name):
        yield node.name
    elif isinstance(node, (Sum, Product)):
        for inner in node.terms if isinstance(node, Sum) else node.factors:
            yield from names_in(inner)


async def evaluate(node: Node, ask: Ask, cost: Callable[[str], int]) -> float | None:
    """The value, asking for the parts that decide it: in a product the cheapest come first, and
    after a 0 the others are not asked."""
    if isinstance(node, Weight):
        return node.value
    if isinstance(node, Name):
        return await ask(node.name)
    if isinstance(node, Sum):
        terms = [await evaluate(term, ask, cost) for term in node.terms]
        known = [term for term in terms if term is not None]
        return _tidy(math.fsum(known)) if len(known) == len(terms) else None
    found: list[float | None] = []
    for factor in sorted(node.factors, key=lambda each: max(map(cost, names_in(each)), default=0)):
        value = await evaluate(factor, ask, cost)
        if value == 0:
            return 0.0
        found.append(value)
    factors = [value for value in found if value is not None]
    return _tidy(math.prod(factors)) if len(factors) == len(found) else None


def _tidy(value: float) -> float:
    """Without what adding binary fractions leaves: 0.7 + 0.2 + 0.1 is 1."""
    return min(1.0, round(value, 12)) if value <= 1 + _ROUNDING else value


def _most(node: Node) -> float:
    """The largest value that an expression can have."""
    if isinstance(node, Weight):
        return node.value
    if isinstance(node, Sum):
        return math.fsum(map(_most, node.terms))
    return math.prod(map(_most, node.factors)) if isinstance(node, Product) else 1.0


class _Reader:
    """Reads `sum := product ('+' product)*`, `product := factor ('*' factor)*`."""

    def __init__(self, text: str, known: Collection[str]) -> None:
        self._text, self._known, self._at = text, known, 0

    def read(self) -> Node:
        node = self._sum(0)
        if (left := self._text[self._at :].strip()) and node:
            raise self._wrong(f"found {left!r}, expected + or * or the end")
        return node

    def _sum(self, depth: int) -> Node:
        terms = [self._product(depth)]
        while self._take("+"):
            terms.append(self._product(depth))
        return terms[0] if len(terms) == 1 else Sum(tuple(terms))

    def _product(self, depth: int) -> Node:
        factors = [self._factor(depth)]
        while self._take("*"):
            factors.append(self._factor(depth))
        return factors[0] if len(factors) == 1 else Product(tuple(factors))

    def _factor(self, depth: int) -> Node:
        found = _TOKEN.match(self._text, self._at)
        if found is None or (found[3] and found[3] != "("):
            left = self._text[self._at :].strip()
            raise self._wrong(f"found {left!r}, expected a reward or a weight" if left else "ends")
        self._at = found.end()
        if found[1]:
            if not (weight := float(found[1])):
                raise self._wrong("a weight of 0 has no effect; leave that part out")
            return Weight(weight)
        if found[2]:
            return Name(self._checked(found[2]))
        if depth > 20:
            raise self._wrong("has too many brackets")
        node = self._sum(depth + 1)
        if not self._take(")"):
            raise self._wrong("a bracket is not closed")
        return node

    def _checked(self, name: str) -> str:
        if name in self._known or ":" in name:
            return name
        raise ConfigError(
            f"{name!r} is not a reward.{did_you_mean(name, self._known)} "
            "Own ones: module:attribute."
        )

    def _take(self, sign: str) -> bool:
        found = _TOKEN.match(self._text, self._at)
        if found is None or found[3] != sign:
            return False
        self._at = found.end()
        return True

    def _wrong(self, problem: str) -> ConfigError:
        if problem == "ends":
            problem = "ends where a reward or a weight was expected"
        return ConfigError(f"reward {self._text!r}: {problem}. Example: 0.9*exact + 0.1*format.")
