"""The local engine on models that have no fast path and go through transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tiny_model import make_tiny_model

torch = pytest.importorskip("torch")

from coa.engines import Sampling, load_engine  # noqa: E402
from coa.engines.llama import Chunk  # noqa: E402
from coa.engines.plain import PlainForward  # noqa: E402
from coa.train.plain import load_causal  # noqa: E402
from plain_forward import largest_difference, load_plain  # noqa: E402

FORGETFUL = {
    "mistral": {"sliding_window": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


def words(count: int, start: int = 0) -> list[int]:
    return [3 + (7 * i + start) % 380 for i in range(count)]


@pytest.mark.parametrize("kind", FORGETFUL)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cache_that_cannot_be_cut_is_never_cut(
    tmp_path: Path, kind: str, deterministic: bool
) -> None:
    """Prompts that share a beginning, more of them than slots, a group, and everyone's next turn:
    a slot is taken over whole or not at all."""
    folder = make_tiny_model(tmp_path / kind, kind=kind, **FORGETFUL[kind])
    engine: Any = load_engine(
        f"hf:{folder}", dtype="float32", deterministic=deterministic, slots=3, note=lambda _: None
    )

    async def turn(prompts: list[list[int]]) -> list[Any]:
        jobs = (
            engine.generate(prompt, Sampling(temperature=1.0, max_tokens=10, key=key))
            for key, prompt in enumerate(prompts)
        )
        return await asyncio.gather(*jobs)

    async def run() -> tuple[list[list[int]], list[Any]]:
        first = [[*words(30), *words(8 + i, 3 * i + 1)] for i in range(6)]
        first += [words(300)] * 3
        said = await turn(first)
        second = [
            [*prompt, *each.ids, *words(20, 5)] for prompt, each in zip(first, said, strict=True)
        ]
        said += await turn(second)
        await engine.close()
        return first + second, said

    assert largest_difference(load_plain(folder), *asyncio.run(run())) < 1e-4


def test_a_cache_that_cannot_be_cut_is_continued_where_it_ends(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", kind="mistral", **FORGETFUL["mistral"])
    engine: Any = load_engine(f"hf:{folder}", dtype="float32", slots=2, note=lambda _: None)
    computed, step = list[int](), engine._forward.step

    def watched(chunks: Any) -> Any:
        computed.extend(len(chunk.ids) for chunk in chunks)
        return step(chunks)

    engine._forward.step = watched

    async def run() -> None:
        sampling = Sampling(max_tokens=5)
        said = await engine.generate(words(60), sampling)
        computed.clear()
        await engine.generate([*words(60), *said.ids, *words(7, 2)], sampling)
        await engine.close()

    asyncio.run(run())
    assert sum(computed) == 1 + 7 + 4  # the last token said, what is new, what is said now


def test_in_bfloat16_it_computes_what_the_trainer_computes(tmp_path: Path) -> None:
    """Rotary frequencies stay in float32 in both; far from the start a rounded one would show."""
    folder = make_tiny_model(tmp_path / "m", kind="mistral", **FORGETFUL["mistral"])
    ids = words(400)
    with torch.inference_mode():
        sampled = PlainForward(folder, torch.bfloat16, 1).step([Chunk(0, 0, ids, 400)])
        trained = load_causal(folder, torch.bfloat16)(torch.tensor([ids])).logits[0].float()
    assert torch.equal(sampled, trained)
