"""The larger bases as they are: against transformers, and against a real llama.cpp on their file.

`make test-servers` installs the server and runs this file on those of them that were pulled.
"""

from __future__ import annotations

import asyncio
import gc
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from coa.engines import Completion, Engine, Sampling, load_engine
from coa.models import references as store
from coa.models.bases import BASES, HubBase
from coa.models.weights import base_hash
from test_llama_server import ref  # noqa: F401  # a server, for the file of the fixture below

pytestmark = pytest.mark.slow
HASHES = {"qwen2.5-coder-0.5b": "28f410b5f174", "qwen2.5-coder-1.5b": "2a85373c3e2e"}
"""Of the folders that are made of the files."""
SYSTEM = "You are a helpful assistant. Answer in one short sentence."
QUESTIONS = (
    "What is the capital of Peru?",
    "Write a Python function that adds two numbers.",
    "Which planet is the largest?",
    "Give a JSON object with the keys name and age.",
)
BOUND = 0.3
"""Largest difference of a logprob from llama.cpp, which rounds activations to 8 bits."""


@pytest.fixture(scope="module", params=[*HASHES])
def name(request: pytest.FixtureRequest) -> str:
    if not store.is_pulled(request.param):
        pytest.skip(f"{request.param} is not in the cache: coa model pull {request.param}")
    return str(request.param)


@pytest.fixture(scope="module")
def gguf(name: str) -> Path:
    base = BASES[name]
    assert isinstance(base, HubBase)
    file = store.cache_dir() / "downloads" / base.file
    if not file.is_file():
        pytest.skip(f"{base.file} is no longer in the cache")
    return file


def greedy(engine: Engine, tokens: int = 48) -> list[Completion]:
    async def all_of() -> list[Completion]:
        return [
            await engine.generate(engine.encode_prompt(SYSTEM, q), Sampling(max_tokens=tokens))
            for q in QUESTIONS
        ]

    return asyncio.run(all_of())


def local(name: str, dtype: str, **how: Any) -> Any:
    return load_engine(name, dtype=dtype, slots=4, context=1024, **how)


def test_the_folder_is_the_one_that_was_measured(name: str) -> None:
    assert base_hash(store.base_folder(name)).startswith(HASHES[name])


def test_logprobs_are_those_of_transformers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    engine = local(name, "float32")
    done = greedy(engine)
    asyncio.run(engine.close())
    prompts = [engine.encode_prompt(SYSTEM, question) for question in QUESTIONS]
    del engine
    gc.collect()
    model = AutoModelForCausalLM.from_pretrained(store.base_folder(name), dtype=torch.float32)
    gaps = []
    for prompt, made in zip(prompts, done, strict=True):
        with torch.no_grad():
            logs = model(torch.tensor([prompt + made.ids])).logits[0].log_softmax(-1)
        for at, (token, logprob) in enumerate(zip(made.ids, made.logprobs, strict=True)):
            gaps.append(abs(logs[len(prompt) - 1 + at, token].item() - logprob))
    with capsys.disabled():
        print(f"\n{name}: {len(gaps)} tokens, largest gap from transformers {max(gaps):.2e}")
    assert max(gaps) <= 1e-4


def test_the_server_makes_the_same_tokens(name: str, ref: str) -> None:  # noqa: F811
    ours, served = local(name, "bfloat16"), load_engine(ref)
    for text in (
        *("a <|im_end|> b", "</answer>\n\n<think> x", "  12,345.678 in 1999", "don't WE'LL it's"),
        *("na\u00efve \U0001f642 \u6771\u4eac\t\r\n  end ", "def f(x):\n    return x >= 1\n"),
    ):
        assert served.encode(text) == ours.encode(text)
    assert served.encode_prompt("Be brief.", "Who?") == ours.encode_prompt("Be brief.", "Who?")
    asyncio.run(ours.close())


def test_the_server_computes_the_same_logprobs(
    name: str,
    ref: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = local(name, "float32")
    ours, theirs = greedy(engine), greedy(load_engine(ref))
    asyncio.run(engine.close())
    gaps, short = [], 0
    for mine, other in zip(ours, theirs, strict=True):
        pairs = zip(mine.ids, other.ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        short += same < min(len(mine.ids), len(other.ids))
        gaps += [
            abs(a - b) for a, b in zip(mine.logprobs[:same], other.logprobs[:same], strict=True)
        ]
    with capsys.disabled():
        print(
            f"\n{name}: {len(gaps)} tokens alike, {short} of {len(ours)} answers part, largest "
            f"logprob gap {max(gaps):.3f}, mean {sum(gaps) / len(gaps):.4f}"
        )
    assert len(gaps) >= 16 and max(gaps) < BOUND


@pytest.mark.parametrize("weights", ["full", "int8"])
def test_rounded_arithmetic_stays_near(
    name: str, weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exact, rounded = local(name, "float32"), local(name, "bfloat16", weights=weights)
    gaps = []
    for mine, other in zip(greedy(exact, 32), greedy(rounded, 32), strict=True):
        pairs = zip(mine.ids, other.ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        gaps += [
            abs(a - b) for a, b in zip(mine.logprobs[:same], other.logprobs[:same], strict=True)
        ]
    for engine in (exact, rounded):
        asyncio.run(engine.close())
    with capsys.disabled():
        print(f"\n{name} bfloat16 {weights}: {len(gaps)} tokens alike, largest gap {max(gaps):.3f}")
    assert len(gaps) >= 16 and max(gaps) < BOUND
