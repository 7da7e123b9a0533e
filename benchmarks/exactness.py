"""How far the engine's logprobs are from a plain forward pass of the same tokens in float32.

    python benchmarks/exactness.py [ROLLOUTS] [MODEL]

Rollouts of two turns share the batch; every sampled token's logprob is compared with transformers'
own forward over the whole text, float32, eager. bfloat16 is compared with the same, so its row is
the gap between what such an engine records and what exact arithmetic would say.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from typing import Any

import torch

from coa.engines import Sampling
from coa.engines.local import LocalEngine
from coa.environments import make_tasks
from coa.models.references import model_folder, resolve

TOKENS = 48
OBSERVATION = "<observation>The Loire rises in the Ardeche and flows 1,006 km.</observation>"


async def sample(engine: LocalEngine, count: int) -> list[tuple[list[int], dict[int, float]]]:
    """Whole texts as ids, and the logprobs that the engine gave, by position."""

    async def one(index: int, question: str) -> tuple[list[int], dict[int, float]]:
        ids, given = engine.encode_prompt("You answer questions.", question), dict[int, float]()
        for turn in range(2):
            sampling = Sampling(temperature=1.0, max_tokens=TOKENS, key=2 * index + turn)
            done = await engine.generate(ids, sampling)
            given.update(enumerate(done.logprobs, start=len(ids)))
            ids = [*ids, *done.ids, *engine.encode(OBSERVATION)]
        return ids, given

    tasks = make_tasks("atlas-mhqa", "heldout_entity", count, seed=4)
    return await asyncio.gather(*(one(i, task.question) for i, task in enumerate(tasks)))


def plain_gaps(network: Any, ids: list[int], given: dict[int, float]) -> list[float]:
    with torch.inference_mode():
        logs = network(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return [abs(logs[place - 1, ids[place]].item() - found) for place, found in given.items()]


def main(count: int, model: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = model_folder(resolve(model))
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for dtype in ("float32", "bfloat16"):
        engine = LocalEngine(model, dtype=dtype, slots=count, context=512)
        sampled = asyncio.run(sample(engine, count))
        asyncio.run(engine.close())
        gaps = [gap for ids, given in sampled for gap in plain_gaps(network, ids, given)]
        ordered = sorted(gaps)
        print(
            json.dumps(
                {
                    "dtype": dtype,
                    "rollouts": count,
                    "tokens": len(gaps),
                    "largest": max(gaps),
                    "mean": statistics.fmean(gaps),
                    "p99": ordered[int(0.99 * len(ordered))],
                }
            )
        )


if __name__ == "__main__":
    named = sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m"
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 24, named)
