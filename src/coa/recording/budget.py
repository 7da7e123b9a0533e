"""Prices and budgets of model calls.

A call reserves the most that it can cost before it is made (an estimate of its prompt, and the
longest reply that it may sample), and pays what it did cost afterwards. So calls that are made at
the same time cannot together spend what is left more than once; what is spent exceeds a budget by
no more than the error of the estimates of the calls in flight.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from coa.errors import CoaError, ConfigError, did_you_mean
from coa.io.settings import find_recipe, load_recipe

MILLION = 1_000_000


class BudgetSpent(CoaError, RuntimeError):
    """The budget of the run does not suffice for another call."""

    def beside(self, out: Path) -> BudgetSpent:
        """The same, with how far the recording into a file has come."""
        done = out.read_bytes().count(b"\n") if out.is_file() else 0
        return BudgetSpent(f"{out}: {done} tasks are done; {self}")


class Amount(NamedTuple):
    """What calls cost."""

    tokens: int
    money: float = 0.0

    def plus(self, other: Amount) -> Amount:
        return Amount(self.tokens + other.tokens, self.money + other.money)

    def minus(self, other: Amount) -> Amount:
        return Amount(self.tokens - other.tokens, self.money - other.money)


NOTHING = Amount(0)


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


@dataclass(frozen=True)
class Limit:
    """The most that may be spent; None: any amount."""

    tokens: int | None = None
    money: float | None = None

    def __post_init__(self) -> None:
        for most in (self.tokens, self.money):
            if most is not None and most <= 0:
                raise ConfigError(f"a budget is {most!r}, expected more than 0.")

    def __str__(self) -> str:
        tokens = "" if self.tokens is None else f"{self.tokens} tokens"
        money = "" if self.money is None else f"{self.money:g} in money"
        return " and ".join(filter(None, (tokens, money))) or "any amount"

    def lacks(self, amount: Amount) -> str:
        """Which part of the limit does not suffice for an amount, in words; empty: none."""
        if self.tokens is not None and amount.tokens > self.tokens:
            return str(Limit(self.tokens))
        if self.money is not None and amount.money > self.money:
            return str(Limit(money=self.money))
        return ""


@dataclass
class Purse:
    """The budget of a run, from which many episodes pay at the same time."""

    limit: Limit
    spent: Amount = NOTHING
    reserved: Amount = NOTHING
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    async def reserve(self, most: Amount) -> None:
        """Set aside what a call may cost; waits while others may turn out to need less."""
        while True:
            if lacking := self.limit.lacks(self.spent.plus(most)):
                option = "budget_tokens" if "tokens" in lacking else "budget_money"
                raise BudgetSpent(
                    f"the budget of {lacking} does not suffice for another call; "
                    f"{described(self.spent)} were spent. Raise {option} and continue."
                )
            if not self.limit.lacks(self.spent.plus(self.reserved).plus(most)):
                break
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        self.reserved = self.reserved.plus(most)

    def settle(self, most: Amount, paid: Amount) -> None:
        """A call has ended: what it cost instead of what was set aside for it."""
        self.reserved, self.spent = self.reserved.minus(most), self.spent.plus(paid)
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)


@dataclass
class Allowance:
    """What one task may spend. Agents at work at the same time get equal shares of what is left.

    So whether a task can go on depends on what was said in it and never on who was faster.
    """

    limit: Limit
    spent: Amount = NOTHING

    def lacks(self, most: Amount) -> str:
        return self.limit.lacks(self.spent.plus(most))

    def shares(self, count: int) -> list[Allowance]:
        tokens, money = self.limit.tokens, self.limit.money
        left = Limit(
            None if tokens is None else max(1, (tokens - self.spent.tokens) // count),
            None if money is None else max(1e-12, (money - self.spent.money) / count),
        )
        return [Allowance(left) for _ in range(count)]


def described(amount: Amount) -> str:
    """'1200 tokens', and the money when a price is known."""
    money = f" and {amount.money:.4g} in money" if amount.money else ""
    return f"{amount.tokens} tokens{money}"
