"""An environment that lives outside the package, as somebody's own: three typed tools of which one
works on a state, 20 tasks, a reward that reads the state, and a team. Written to a folder by tests.
"""

from __future__ import annotations

import json
from pathlib import Path

TOOLS = '''
"""A shop with a basket."""

import os
import time
from dataclasses import dataclass, field
from typing import Literal

from coa import State

PRICES = {"apple": 2, "bread": 3, "cheese": 7, "honey": 5}


@dataclass
class Basket:
    items: dict = field(default_factory=dict)
    closed: bool = False

    def close(self):
        self.closed = True


def setup(task, coupon: str = "none"):
    """A basket for each rollout."""
    assert not task.answers and not task.gold, "gold leaked into setup"
    return Basket()


def price(item: Literal["apple", "bread", "cheese", "honey"]) -> int:
    """Say what a piece costs."""
    time.sleep(float(os.environ.get("SHOP_DELAY", "0")))
    return PRICES[item]


async def add(item: str, state: State, quantity: int = 1) -> str:
    """Put pieces of an item into the basket.

    Args:
        item: what to put into it
        quantity: how many pieces
    """
    if item not in PRICES:
        raise KeyError(item)
    state.items[item] = state.items.get(item, 0) + quantity
    return f"{state.items[item]} {item} in the basket"


def total(numbers: list[int], discount: float | None = None) -> float:
    """Add up amounts."""
    return sum(numbers) * (1 - (discount or 0))


def bought(task, trajectory, state):
    """Half for the basket, half for the answer, and a little for words, so that groups differ."""
    assert not state.closed, "the state is gone"
    wanted = task.gold["basket"]
    found = [state.items == wanted, trajectory.answer == task.answers[0]]
    return 0.45 * sum(found) + 0.1 * (all(found) or min(1.0, trajectory.text.count("e") / 40))
'''

TEAM = r'''
"""A clerk and a cashier."""

import json
import re

from coa import AgentSpec, Episode, Message, ToolCall, ToolUse


class Team:
    name = "shop"

    def __init__(self, polite: bool = True):
        self.polite = polite

    async def record(self, task, toolbox, seed=0):
        assert not task.answers and not task.gold, "gold leaked to the teacher"
        agents = [AgentSpec("clerk", "searcher", "Fetch."), AgentSpec("cashier", "", "Add up.")]
        episode = Episode(task.id, task.question, self.name, agents, seed=seed)

        async def use(agent, tool, **arguments):
            argument = json.dumps(arguments)
            episode.events.append(Message(agent, "cashier", tool, f"I {tool}.", {"part": "query"}))
            seen = await toolbox.call(ToolCall(tool, argument))
            assert seen.failure is None, seen
            episode.events.append(ToolUse(agent, tool, argument, seen.text))
            return seen.text

        quantity, item = re.search(r"(\d+) (\w+)", task.question).groups()
        await use("clerk", "add", item=item, quantity=int(quantity))
        each = int(await use("clerk", "price", item=item))
        answer = await use("cashier", "total", numbers=[each] * int(quantity))
        episode.events.append(Message("cashier", "user", answer, "Done.", {"part": "verdict"}))
        episode.answer = answer
        return episode
'''

TOML = """
name = "basket"
grammar = "react"
tools = ["tools:price", "tools:add", "tools:total"]
tasks = "tasks.jsonl"
reward = "tools:bought"
teacher = "team:Team"
setup = "tools:setup"
groups = ["item"]

[settings]
coupon = "spring"
"""

PRICES = {"apple": 2, "bread": 3, "cheese": 7, "honey": 5}


def write_shop(folder: Path) -> Path:
    """The environment's own files, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tools.py").write_text(TOOLS, encoding="utf-8")
    (folder / "team.py").write_text(TEAM, encoding="utf-8")
    (folder / "environment.toml").write_text(TOML, encoding="utf-8")
    lines = []
    for number in range(20):
        item, quantity = list(PRICES)[number % 4], 1 + number // 4
        lines.append(
            {
                "question": f"What do {quantity} {item} cost?",
                "answers": [str(PRICES[item] * quantity)],
                "meta": {"item": item},
                "gold": {"basket": {item: quantity}},
            }
        )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "tasks.jsonl").write_text(text, encoding="utf-8")
    return folder
