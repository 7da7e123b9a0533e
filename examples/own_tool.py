"""A tool of your own: any function from text to text becomes an agent of the chain."""

import asyncio

from coa import ScriptedEngine, Task, ToolMistake, load_grammar, run, tool
from coa.tools import Toolbox


@tool
def calculator(expression: str) -> str:
    """Evaluate a sum or a product of whole numbers."""
    left, sign, right = expression.split()
    if sign not in "+*":
        raise ToolMistake(f"{sign!r} is not supported; write A + B or A * B.")
    return str(int(left) + int(right) if sign == "+" else int(left) * int(right))


# A scripted engine stands in for a model here; `load_engine("smollm2-135m")` would be a real one.
engine = ScriptedEngine(
    [
        "<think>I should multiply.</think>\n<calculator>6 * 7</calculator>",
        "<think>The product is 42.</think>\n<answer>42</answer>",
    ]
)
task = Task("What is six times seven?", answers=("42",))
trajectory = asyncio.run(run(task, engine, load_grammar("react"), Toolbox([calculator])))
print(trajectory.text)
print(trajectory.stop, trajectory.answer)
