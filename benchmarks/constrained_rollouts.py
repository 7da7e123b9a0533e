"""The untrained base at temperature 1 over all presets, constrained and free: how much is legal.

    python benchmarks/constrained_rollouts.py [ROLLOUTS] [FREE_ROLLOUTS] [MODEL]

A rollout is malformed when the runtime found a fault in a turn; illegal when the whole text,
read again by the parser alone, has any; truncated when a budget ended it before its answer. Tools
answer with a passage at once: the subject is what the model writes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter

from coa.engines import Engine, load_engine
from coa.environments import make_tasks
from coa.grammar import PRESETS, FaultKind, check, load_grammar, parse
from coa.loop import Budget, Decoding, run
from coa.tasks import Task
from coa.tools import Tool, Toolbox
from coa.trajectory import StopReason, Trajectory

BUDGET = Budget(turns=4, turn_tokens=256, context=2048)
KINDS = ("rollouts", "malformed", "illegal", "truncated", "answered", "tokens")
PASSAGE = "The Loire is the longest river of France; it rises in the Ardeche and flows 1,006 km."


async def answer(_: str) -> str:
    return PASSAGE


async def play(engine: Engine, task: Task, preset: str, sample: int, constrain: bool) -> Trajectory:
    grammar = load_grammar(preset)
    tools = Toolbox(Tool(name, answer) for name in grammar.tool_roles)
    decoding = Decoding(temperature=1.0, sample=sample, prompt="full", constrain=constrain)
    return await run(task, engine, grammar, tools, budget=BUDGET, decoding=decoding)


def judge(preset: str, trajectory: Trajectory) -> Counter[str]:
    assert trajectory.stop not in (None, StopReason.ENGINE_FAILED), trajectory.error
    assert trajectory.stop is not None
    found = Counter(rollouts=1, tokens=trajectory.usage.sampled_tokens)
    found["malformed"] = int(trajectory.usage.malformed > 0)
    found["answered"] = int(trajectory.stop is StopReason.ANSWERED)
    found["truncated"] = int(trajectory.stop.truncated)
    grammar = load_grammar(preset)
    fault = check(grammar, parse(grammar, trajectory.text, env=True))
    cut = fault is not None and fault.kind is FaultKind.UNCLOSED and trajectory.stop.truncated
    found["illegal"] = int(fault is not None and not cut)
    return found


async def measure(model: str, count: int, constrain: bool) -> None:
    engine = load_engine(model, slots=64, context=BUDGET.context)
    tasks = make_tasks("atlas-mhqa", "heldout_entity", 100, seed=3).tasks
    at_once, done = asyncio.Semaphore(96), Counter[str]()
    totals = {preset: Counter[str]() for preset in PRESETS}
    started = time.perf_counter()

    async def one(index: int) -> None:
        preset = PRESETS[index % len(PRESETS)]
        async with at_once:
            task = tasks[index % len(tasks)]
            totals[preset] += judge(preset, await play(engine, task, preset, index, constrain))
        done["rollouts"] += 1
        if done["rollouts"] % 50 == 0:
            rate = done["rollouts"] / (time.perf_counter() - started)
            print(f"{done['rollouts']} of {count}, {rate:.2f} a second", file=sys.stderr)

    await asyncio.gather(*(one(index) for index in range(count)))
    await engine.close()
    seconds = time.perf_counter() - started
    every: Counter[str] = sum(totals.values(), Counter())
    for name, found in {**totals, "all": every}.items():
        counts = {kind: found[kind] for kind in KINDS}
        print(json.dumps({"preset": name, "constrained": constrain, **counts}))
    print(f"{seconds:.0f} s, {every['tokens'] / seconds:.0f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    named = sys.argv[3] if len(sys.argv) > 3 else "smollm2-135m"
    given = [int(number) for number in sys.argv[1:3]]
    for number, held in zip(given + [1000, 200][len(given) :], (True, False), strict=True):
        asyncio.run(measure(named, number, held))
