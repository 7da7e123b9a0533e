"""Prices and budgets of model calls.

A call reserves the most that it can cost before it is made (an estimate of its prompt, and the
longest reply that it may sample), and pays what it did cost afterwards. So calls that are made at
the same time cannot together spend what is left more than once; what is spent exceeds a budget by
no more than the error of the estimates of the calls in flight.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from coa.errors import CoaError, ConfigError, did_you_mean
from coa.io.settings import find_recipe, load_recipe

MILLION = 1_000_000


class BudgetSpent(CoaError, RuntimeError):
    """The budget of the run does not suffice for another call."""


@dataclass(frozen=True)
class Amount:
    """What calls cost."""

    tokens: int = 0
    money: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.tokens + other.tokens, self.money + other.money)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.tokens - other.tokens, self.money - other.money)

    def __str__(self) -> str:
        money = f" and {self.money:.4g} in money" if self.money else ""
        return f"{self.tokens} tokens{money}"


@dataclass(frozen=True)
class Price:
    """Of one model, for a million tokens."""

    input: float
    output: float
    cached: float | None = None
    """For tokens of the prompt that the server had in its cache; None: as any other."""

    def __post_init__(self) -> None:
        for price in (self.input, self.output, self.cached or 0.0):
            if not 0 <= price < float("inf"):
                raise ConfigError(f"a price is {price!r}, expected 0 or more.")

    def of(self, prompt: int, cached: int, sampled: int) -> float:
        """What a call with so many tokens costs; `cached` are those of the prompt."""
        again = self.input if self.cached is None else self.cached
        spent = (prompt - cached) * self.input + cached * again + sampled * self.output
        return spent / MILLION


@dataclass(frozen=True)
class PriceTable:
    """Prices by the name that a model has on its server."""

    models: dict[str, Price]
    currency: str = ""


def find_price(table: str, model: str) -> Price | None:
    """The price of a model in a TOML file; None without a file."""
    if not table:
        return None
    path = find_recipe(table)
    prices = load_recipe(path, [], PriceTable)
    if model not in prices.models:
        near = did_you_mean(model, prices.models)
        raise ConfigError(f"{path}: has no price of the model {model!r}.{near}")
    return prices.models[model]


@dataclass
class Purse:
    """What a run or a task may spend, in tokens and in money (None: any amount), and has spent."""

    tokens: int | None = None
    money: float | None = None
    spent: Amount = Amount()
    reserved: Amount = Amount()
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        for most in (self.tokens, self.money):
            if most is not None and most <= 0:
                raise ConfigError(f"a budget is {most!r}, expected more than 0.")

    def lacks(self, most: Amount) -> str:
        """Which budget does not suffice for another call that costs `most`; empty: both do."""
        after = self.spent + most
        if self.tokens is not None and after.tokens > self.tokens:
            return f"{self.tokens} tokens"
        return "" if self.money is None or after.money <= self.money else f"{self.money:g} in money"

    async def reserve(self, most: Amount) -> None:
        """Set aside what a call may cost; waits while others may turn out to need less."""
        while self.lacks(self.reserved + most):
            if lacking := self.lacks(most):
                option = "budget_tokens" if "tokens" in lacking else "budget_money"
                raise BudgetSpent(
                    f"the budget of {lacking} does not suffice for another call; "
                    f"{self.spent} were spent. Raise {option} and continue."
                )
            self._settled.clear()
            await self._settled.wait()
        self.reserved += most

    def settle(self, most: Amount, paid: Amount) -> None:
        """A call has ended: what it cost instead of what was set aside for it."""
        self.reserved, self.spent = self.reserved - most, self.spent + paid
        self._settled.set()

    def shares(self, count: int) -> list[Purse]:
        """Equal parts of what is left, for agents at work at the same time: whether a task can go
        on depends on what was said in it and never on who was faster."""
        tokens = self.tokens and max(1, (self.tokens - self.spent.tokens) // count)
        money = self.money and max(1e-12, (self.money - self.spent.money) / count)
        return [Purse(tokens, money) for _ in range(count)]
