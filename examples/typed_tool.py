"""A tool with several arguments: its schema, its line in the prompt and its checks are derived."""

import asyncio

from coa import ScriptedEngine, Task, load_grammar, run, tool
from coa.grammar import system_prompt
from coa.tools import Toolbox


@tool
async def convert(amount: float, unit: str, to: str = "km") -> str:
    """Convert a length."""
    metres = {"m": 1, "km": 1000, "mile": 1609.344}
    return f"{amount} {unit} = {round(amount * metres[unit] / metres[to], 3)} {to}"


engine = ScriptedEngine(
    [
        "<think>In miles first.</think>\n<convert>{'amount': 26.2, 'unit': 'mile',}</convert>",
        "<think>That is the distance.</think>\n<answer>42.165 km</answer>",
    ]
)
toolbox = Toolbox([convert])
print(system_prompt(toolbox.bind(load_grammar("react")), "full").split("\n\n")[2])
task = Task("How long is a marathon in km?", answers=("42.165 km",))
trajectory = asyncio.run(run(task, engine, load_grammar("react"), toolbox))
print(trajectory.text)
print(trajectory.stop, toolbox.usage["convert"])
