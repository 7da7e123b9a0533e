"""The local engine on models that have no fast path and go through transformers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tiny_model import make_tiny_model

torch = pytest.importorskip("torch")

from coa.engines import Sampling, load_engine  # noqa: E402
from coa.engines.llama import Chunk  # noqa: E402
from coa.engines.local import PlainForward  # noqa: E402
from coa.train.forward import load_causal  # noqa: E402
from coa.train.policy import Policy  # noqa: E402
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


def test_a_model_whose_configuration_is_nested_is_sampled_from_and_trained(tmp_path: Path) -> None:
    """As the larger Gemma 3: what the language model is like stands in `text_config`."""
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 400}
    text |= {"max_position_embeddings": 256, "sliding_window": 32}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    folder = make_tiny_model(
        tmp_path / "m", kind="gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    path = folder / "config.json"
    held = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({k: v for k, v in held.items() if k not in text}), encoding="utf-8")
    engine: Any = load_engine(f"hf:{folder}", dtype="float32", slots=2, note=lambda _: None)
    policy = Policy(f"hf:{folder}", rank=4, note=lambda _: None)
    assert engine.context == policy.positions == 256

    async def run() -> Any:
        await engine.load(policy.adapter(), "update-0")
        bound = Sampling(max_tokens=6, constraint='start: "Paris"')
        assert engine.codec.decode((await engine.generate(words(20), bound)).ids) == "Paris"
        found = await engine.generate(words(60), Sampling(temperature=1.0, max_tokens=10, key=1))
        await engine.close()
        return found

    assert largest_difference(load_plain(folder), [words(60)], [asyncio.run(run())]) < 1e-4
