"""What an evaluation spent: tool calls by agent, money, and (apart from results) seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from coa.errors import ConfigError
from coa.grammar import Block, GrammarState
from coa.io.machine import in_words
from coa.io.runs import TIMINGS, Json, read_jsonl, read_object
from coa.io.settings import find_recipe, load_recipe
from coa.loop import read_turn
from coa.models.references import resolve
from coa.recording.budget import Price, PriceTable, find_price
from coa.trajectory import Trajectory

LATENCY = "latency.json"


def parse_price(text: str) -> Price:
    """Three numbers joined by commas, as an option has them."""
    try:
        fresh, cached, written = map(float, text.split(","))
    except ValueError:
        raise ConfigError(
            f"prices {text!r}: expected three numbers joined by commas, for a million tokens "
            "read, read from a cache and written, as 1,0.1,5."
        ) from None
    return Price(input=fresh, cached=cached, output=written)


class ModelPrices:
    """What models cost, as `--prices` gives it: a table (.toml), or three numbers for all."""

    def __init__(self, given: str) -> None:
        self._table = given if given.endswith(".toml") else ""
        self._known: dict[str, Price] = {}
        self._all = None if self._table or not given else parse_price(given)
        self.currency = ""
        if self._table:
            self.currency = load_recipe(find_recipe(given), [], PriceTable).currency

    def __bool__(self) -> bool:
        return bool(self._table) or self._all is not None

    def of(self, model: str) -> Price | None:
        """The price of a model by the name that its server knows; one that a table does not have
        is refused. None: no price, or a record that does not name the model."""
        if self._all is not None or not (self._table and model):
            return self._all
        if model not in self._known:
            price = find_price(self._table, model)
            assert price is not None, self._table
            self._known[model] = price
        return self._known[model]


def name_in_prices(model: str) -> str:
    """The name by which a table of prices has a model: that of its server, else the reference
    without an adapter, which makes a model neither cheaper nor dearer."""
    served = resolve(model).model if model.startswith("openai:") else None
    return served or model.partition("+")[0]


class Tariff(NamedTuple):
    """A price, and in which currency it is."""

    price: Price
    currency: str = ""


def find_tariff(prices: str, model: str) -> Tariff | None:
    """What a model costs: from a table of prices (.toml), or three numbers; None without either."""
    table = ModelPrices(prices)
    price = table.of(name_in_prices(model))
    return Tariff(price, table.currency) if price else None


def money(trajectories: Sequence[Trajectory], solved: float, tariff: Tariff) -> Json:
    """What the tokens cost, for a rollout and for a solved one."""
    spent = sum(
        tariff.price.of(t.usage.prompt_tokens, t.usage.cached_tokens, t.usage.sampled_tokens)
        for t in trajectories
    )
    return {
        "per_task": _short(spent / max(1, len(trajectories))),
        "per_solved": _short(spent / solved) if solved else None,
        "currency": tariff.currency,
    }


def calls_of(trajectory: Trajectory) -> list[Block]:
    """The calls that were made, in order, as the loop read them from the turns."""
    called, state, grammar = list[Block](), GrammarState(), trajectory.protocol
    for step in trajectory.steps:
        state, block, _ = read_turn(grammar, state, step.model.text)
        if block is not None and state.awaiting:
            called.append(block)
        if step.observation is not None:
            seen = grammar.advance(state, Block(grammar.observation, ""))
            assert isinstance(seen, GrammarState), seen
            state = seen
    return called[: trajectory.usage.tool_calls]  # a turn that a budget cut calls nothing


def calls_by_agent(trajectories: Sequence[Trajectory]) -> Json:
    """Mean calls of each tool role for a rollout."""
    calls = Counter(call.role for each in trajectories for call in calls_of(each))
    return {role: round(count / len(trajectories), 3) for role, count in sorted(calls.items())}


def latency(directory: Path, solved: float, concurrency: int) -> Json:
    """Seconds of a rollout from its start to its end, while up to `concurrency` run together.

    From timings.jsonl, so not a result. A rollout that was done again counts with its last time; of
    one that a kill left without a line nobody knows.
    """
    seconds = {
        (record["task_id"], record["sample"]): record
        for _, record in read_jsonl(directory / TIMINGS, growing=True)
        if "total" in record
    }
    totals = sorted(float(record["total"]) for record in seconds.values())
    if not totals:
        return {"n": 0}

    def mean(name: str) -> float:
        found = [float(record.get(name, 0.0)) for record in seconds.values()]
        return round(sum(found) / len(found), 3)

    return {
        "n": len(totals),
        "concurrency": concurrency,
        "machine": in_words(),
        "mean": mean("total"),
        "p50": _percentile(totals, 0.5),
        "p95": _percentile(totals, 0.95),
        "per_solved": round(sum(totals) / solved, 3) if solved else None,
        "engine": mean("engine"),
        "tools": mean("tools"),
    }


def at_once(latency: Json) -> int:
    """Rollouts that ran together, at most: no more than there were. 0: nobody noted it."""
    asked = int(latency.get("concurrency") or 0)
    return min(asked, int(latency.get("n") or asked))


def load_latency(directory: Path) -> Json:
    """Read what `latency` found, where an evaluation has kept it."""
    path = directory / LATENCY
    return read_object(path) if path.is_file() else {}


def _percentile(ordered: Sequence[float], part: float) -> float:
    """The smallest value that so large a part does not exceed."""
    place = max(0, -(-len(ordered) * round(part * 100) // 100) - 1)
    return round(ordered[place], 3)


def _short(value: float) -> float:
    return float(f"{value:.6g}")
