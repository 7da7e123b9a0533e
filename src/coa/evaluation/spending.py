"""What an evaluation spent: tool calls by agent, money, and (apart from results) seconds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from coa.engines.base import TextCodec
from coa.errors import ConfigError, RecordError
from coa.grammar import Block, GrammarState, system_prompt
from coa.grammar.load import bound_to, load_grammar
from coa.grammar.prompt import PromptKind
from coa.io.runs import TIMINGS, Json, read_jsonl
from coa.io.settings import find_recipe, load_recipe
from coa.loop import read_turn
from coa.models.references import resolve
from coa.recording.budget import Price, PriceTable, find_price
from coa.recording.episode import AgentSpec, Episode, Message, Tokens
from coa.trajectory import Author, Segment, Trajectory

Caching = Literal["none", "task", "warm"]
CACHINGS: tuple[Caching, ...] = get_args(Caching)
PROMPTS: tuple[PromptKind, ...] = ("compact", "full")
LengthOf = Callable[[AgentSpec], int]
"""How many tokens the system prompt of an agent has."""


EXAMPLE_PRICE = Price(input=1.0, cached=0.1, output=5.0)
"""An example and nobody's offer: a cached token at a tenth, a written one at five times."""


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


def with_caching(tokens: Tokens, caching: Caching, opening: int) -> Tokens:
    """The same calls under another cache; `opening` are the tokens of system prompts, each once."""
    if caching == "none":
        return tokens._replace(cached=0)
    return tokens if caching == "task" else tokens._replace(cached=tokens.cached + opening)


class TokenCounter:
    """Counts texts with one codec; a text that comes again is not encoded again."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._known: dict[str, int] = {}

    def count(self, text: str) -> int:
        found = self._known.get(text)
        if found is None:
            found = self._known[text] = len(self._codec.encode(text))
        return found

    def prompt_of(self, agent: AgentSpec) -> int:
        return self.count(agent.system)

    def team(self, episode: Episode, length_of: LengthOf | None = None) -> Tokens:
        """All model calls of an episode; `length_of` gives system prompts another length.

        What a server counted is not used: it has another tokenizer than the chain.
        """
        systems = {agent.system: length_of(agent) for agent in episode.agents} if length_of else {}
        events = [
            replace(event, call=replace(event.call, sampled_tokens=0))
            if isinstance(event, Message) and event.call
            else event
            for event in episode.events
        ]

        def length(text: str) -> int:
            return systems[text] if text in systems else self.count(text)

        return replace(episode, events=events).count_tokens(length)

    def bare(self, episode: Episode) -> Tokens:
        """The same as if the agents had no system prompts."""
        return self.team(episode, lambda agent: 0)

    def chain(self, trajectory: Trajectory, system: str) -> Tokens:
        """All turns of a chain that opens with this system prompt."""
        length = len(self._codec.encode_prompt(system, trajectory.question))
        prompt = cached = sampled = seen = 0
        for step in trajectory.steps:
            written = self._length(step.model)
            prompt += length
            cached += seen
            sampled += written
            seen = length = length + written
            if step.observation is not None:
                length += self._length(step.observation)
        return Tokens(prompt, cached, sampled)

    def _length(self, segment: Segment) -> int:
        return len(segment.ids) if segment.ids is not None else self.count(segment.text)


def opening_prompts(trajectory: Trajectory, grammar: str = "") -> dict[PromptKind, str]:
    """The prompts that a chain may open with; its own must be among them."""
    prompts = _prompts(grammar or trajectory.grammar, tuple(trajectory.tools))
    first = trajectory.segments[0] if trajectory.segments else None
    found = first.text if first and first.author is Author.PROMPT else None
    if found not in prompts.values():
        raise RecordError(
            f"task {trajectory.task_id!r}: its chain does not open with a prompt of the grammar "
            f"{grammar or trajectory.grammar!r}. Distil the episodes again with this version."
        )
    return prompts


@cache
def _prompts(grammar: str, tools: tuple[str, ...]) -> dict[PromptKind, str]:
    bound = bound_to(load_grammar(grammar), tools)
    return {kind: system_prompt(bound, kind) for kind in PROMPTS}


LATENCY = "latency.json"


class Tariff(NamedTuple):
    """A price, and in which currency it is."""

    price: Price
    currency: str = ""


def find_tariff(prices: str, model: str) -> Tariff | None:
    """What a model costs: from a table of prices (.toml), or three numbers; None without either."""
    if not prices:
        return None
    if not prices.endswith(".toml"):
        return Tariff(parse_price(prices))
    served = resolve(model).model if model.startswith("openai:") else None
    price = find_price(prices, served or model)
    assert price is not None, prices
    return Tariff(price, load_recipe(find_recipe(prices), [], PriceTable).currency)


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
        "mean": mean("total"),
        "p50": _percentile(totals, 0.5),
        "p95": _percentile(totals, 0.95),
        "per_solved": round(sum(totals) / solved, 3) if solved else None,
        "engine": mean("engine"),
        "tools": mean("tools"),
    }


def load_latency(directory: Path) -> Json:
    """What `latency` found, where an evaluation has kept it."""
    path = directory / LATENCY
    found: Json = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _percentile(ordered: Sequence[float], part: float) -> float:
    """The smallest value that so large a part does not exceed."""
    place = max(0, -(-len(ordered) * round(part * 100) // 100) - 1)
    return round(ordered[place], 3)


def _short(value: float) -> float:
    return float(f"{value:.6g}")
