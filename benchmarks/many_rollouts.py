"""256 rollouts at once with tools that sleep, fail and hang: nothing stalls, nothing mixes.

    python benchmarks/many_rollouts.py [ROLLOUTS] [MODEL]

Every rollout carries a mark of its own: it is in the question and in all that its tools return.
Each model turn is asked for by a prompt that must hold this mark and no other. Reported are the
ends, the longest time in which the engine gave no token although it had work, and the peak memory
of the process before and after, against what keys and values were allowed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from coa.engines import Completion, Sampling
from coa.engines.base import OnText
from coa.engines.local import LocalEngine
from coa.grammar import load_grammar
from coa.loop import Budget, Decoding, run
from coa.tasks import Task
from coa.tools import Tool, Toolbox
from coa.trajectory import Trajectory

GRAMMAR = "search_r1"  # few blocks before a call, so that the untrained base makes many
BUDGET = Budget(turns=4, turn_tokens=224, context=1024, seconds=600)
MEMORY_GB, TOOL_TIMEOUT_S = 0.5, 5.0


def mark(index: int) -> str:
    """Letters that nobody writes by chance: with running numbers the model itself wrote others'."""
    return hashlib.sha256(str(index).encode()).hexdigest()[:12]


class Watched:
    """The engine, and for every prompt a look at whose marks it holds."""

    def __init__(self, engine: LocalEngine, marks: Sequence[str]) -> None:
        self._engine, self._marks = engine, marks
        self.mixed, self.waiting, self.last, self.longest = 0, 0, time.perf_counter(), 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        text = self._engine.decode(prompt_ids)
        self.mixed += sum(each in text for each in self._marks) != 1
        if not self.waiting:
            self.last = time.perf_counter()
        self.waiting += 1
        try:
            return await self._engine.generate(prompt_ids, sampling, lambda _: self.beat())
        finally:
            self.beat()
            self.waiting -= 1

    def beat(self) -> None:
        now = time.perf_counter()
        self.longest, self.last = max(self.longest, now - self.last), now


def tools(index: int) -> Toolbox:
    """What a call does depends on the rollout and on how many it made, so that all kinds occur."""
    choose = random.Random(index)

    async def answer(query: str) -> str:
        kind = choose.choice(["at once", "sleep", "sleep", "fail", "hang"])
        if kind == "sleep":
            await asyncio.sleep(choose.random() * 3)
        elif kind == "fail":
            raise ConnectionError(f"the index of {mark(index)} is away")
        elif kind == "hang":
            await asyncio.Event().wait()
        return f"{mark(index)}: about {query[:80]}. " + "The river passes the old capital. " * 12

    grammar = load_grammar(GRAMMAR)
    return Toolbox(Tool(name, answer, timeout_s=TOOL_TIMEOUT_S) for name in grammar.tool_roles)


async def measure(model: str, count: int) -> None:
    engine = LocalEngine(model, context=BUDGET.context, memory_gb=MEMORY_GB)
    watched = Watched(engine, [mark(index) for index in range(count)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()

    async def one(index: int) -> Trajectory:
        task = Task(f"{mark(index)}: which river flows through the capital?")
        decoding = Decoding(temperature=1.0, sample=index, constrain=True)
        grammar = load_grammar(GRAMMAR)
        return await run(task, watched, grammar, tools(index), budget=BUDGET, decoding=decoding)

    done = await asyncio.gather(*(one(index) for index in range(count)))
    seconds = time.perf_counter() - started
    mixed = sum(
        other != index and mark(other) in segment.text
        for index, trajectory in enumerate(done)
        for segment in trajectory.segments
        for other in range(count)
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sampled = sum(trajectory.usage.sampled_tokens for trajectory in done)
    result = {
        "rollouts": count,
        "stops": Counter(str(trajectory.stop) for trajectory in done),
        "tool_calls": sum(trajectory.usage.tool_calls for trajectory in done),
        "prompts_with_marks_of_others": watched.mixed,
        "segments_with_marks_of_others": mixed,
        "longest_wait_for_a_token_s": round(watched.longest, 2),
        "slots": engine._forward.slots,
        "memory_gb": {"bound": MEMORY_GB, "process_before": before / 1e6, "peak": peak / 1e6},
        "seconds": round(seconds, 1),
        "tokens_per_s": round(sampled / seconds, 1),
    }
    await engine.close()
    print(json.dumps(result))


if __name__ == "__main__":
    named = sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m"
    asyncio.run(measure(named, int(sys.argv[1]) if len(sys.argv) > 1 else 256))
