"""What the mask is for: a model that was trained on observations invents them, another does not.

Two models see the same chains. For one, observation tokens have weight 0, as `build_row` makes it;
for the other they count like its own words. Then both answer new questions with nobody to stop them
at the end of a call, as on a server that was not told to. (In our loop the closing tag of a call
ends the turn, which hides the damage from a glance at results; it is there all the same.) A forged
observation is one that the parser finds in what the model wrote before its answer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from coa.engines import Sampling, load_engine
from coa.engines.base import sampling_key
from coa.grammar import FaultKind, parse, system_prompt
from coa.train.rows import Row
from toy_tools import GRAMMAR, imitate, make_toy_model, toy_tasks

pytestmark = pytest.mark.slow
TASKS = 200


def unmasked(row: Row) -> Row:
    """Every token after the prompt counts, whoever wrote it."""
    begins = next(at for at, weight in enumerate(row.weights) if weight > 0)
    return replace(row, weights=[0.0] * begins + [1.0] * (len(row.ids) - begins))


@dataclass(frozen=True)
class Unstopped:
    """What a model does when nobody stops it at its calls."""

    called: float
    """Share of texts that begin with a whole call."""
    forged: float
    """Share of texts with an observation in them."""
    right: float
    """Share of texts whose answer is right."""


def unstopped(model: str) -> Unstopped:
    tasks = toy_tasks(TASKS, "test")
    engine = load_engine(model, dtype="float32", slots=64, threads=1)

    async def write(number: int) -> str:
        task = tasks[number]
        prompt = engine.encode_prompt(system_prompt(GRAMMAR), task.question)
        key = sampling_key(0, task.id, 0, 0)
        sampling = Sampling(temperature=1.0, max_tokens=40, stop=("</answer>",), key=key)
        return engine.decode((await engine.generate(prompt, sampling)).ids)

    async def write_all() -> list[str]:
        texts = await asyncio.gather(*map(write, range(TASKS)))
        await engine.close()
        return texts

    texts = asyncio.run(write_all())
    parsed = [parse(GRAMMAR, text) for text in texts]
    called = [each.blocks and each.blocks[0].role in GRAMMAR.tool_roles for each in parsed]
    forged = [any(f.kind is FaultKind.FORGED for f in each.faults) for each in parsed]
    right = [
        any(b.role == "answer" and b.body in task.answers for b in each.blocks)
        for each, task in zip(parsed, tasks, strict=True)
    ]
    return Unstopped(*(sum(map(bool, each)) / TASKS for each in (called, forged, right)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_only_a_model_trained_on_observations_invents_them(seed: int, tmp_path: Path) -> None:
    model = make_toy_model(tmp_path / "model", seed)
    masked = imitate(model, tmp_path / "masked", count=4000, seed=seed)
    trained = imitate(model, tmp_path / "unmasked", count=4000, seed=seed, change=unmasked)
    honest = unstopped(f"hf:{model}+{masked}")
    forger = unstopped(f"hf:{model}+{trained}")
    assert honest.called > 0.9 and forger.called > 0.9, (honest, forger)
    assert honest.forged < 0.02, honest
    assert forger.forged > 0.9, forger
    assert forger.right < 0.2, forger  # a guess: ten digits
