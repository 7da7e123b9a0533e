"""What a constraint costs: tokens per second with and without one, same work, same engine.

    python benchmarks/constrain_speed.py [MODEL] [ROLLOUTS]

All rollouts sample the same number of tokens: ends of sequence do not end them, and the bodies of
the constraint are long enough that no turn closes within them. The order alternates, and the middle
run of each counts.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time

from coa.engines import Sampling
from coa.engines.local import LocalEngine
from coa.grammar import GrammarState, TextLimits, load_grammar, system_prompt, turn_grammar

TOKENS, ROUNDS = 64, 3
QUESTION = "What is the capital of the country that the river Seine flows through?"


async def measure(model: str, rollouts: int) -> None:
    grammar = load_grammar("mhqa")
    lark = turn_grammar(grammar, GrammarState(), TextLimits(text=4000))
    lark = lark.replace("{0,3999}", "{1500,3999}")  # no thought closes before the tokens are used
    engine = LocalEngine(model, slots=rollouts, context=1024, guess=False)  # the mask alone
    engine._batch._eos = frozenset()
    prompt = engine.encode_prompt(system_prompt(grammar, "full"), QUESTION)

    async def speed(constraint: str) -> float:
        samplings = [
            Sampling(temperature=1.0, max_tokens=TOKENS, key=key, constraint=constraint)
            for key in range(rollouts)
        ]
        started = time.perf_counter()
        done = await asyncio.gather(*(engine.generate(prompt, each) for each in samplings))
        seconds = time.perf_counter() - started
        assert all(len(each.ids) == TOKENS for each in done)
        return rollouts * TOKENS / seconds

    speeds: dict[str, list[float]] = {"": [], lark: []}
    for round_number in range(ROUNDS + 1):
        for constraint, found in speeds.items():
            found.append(await speed(constraint))
            if round_number == 0:
                found.clear()  # compiles, fills the cache with the prompt
    await engine.close()
    free, held = (statistics.median(found) for found in speeds.values())
    print(f"{model}, {rollouts} rollouts, {engine.dtype}: {free:.0f} tokens/s free, ", end="")
    print(f"{held:.0f} constrained, cost {1 - held / free:.1%}")


if __name__ == "__main__":
    named = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    asyncio.run(measure(named, int(sys.argv[2]) if len(sys.argv) > 2 else 32))
