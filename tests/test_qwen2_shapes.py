"""Qwen2 in the shapes of the larger bases, small and random: the engine and the learner compute it.

Those of 0.5B have seven queries to a key, those of 1.5B heads of 128 numbers; both have biases, a
tied head, and a table that is longer than the vocabulary.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rl_worker import settings
from sft_worker import tiny_rows, tiny_settings
from tiny_model import make_tiny_model, make_tokenizer

torch = pytest.importorskip("torch")

from coa.engines import Sampling, load_engine  # noqa: E402
from coa.engines.llama import Chunk, LlamaForward  # noqa: E402
from coa.io.runs import read_jsonl  # noqa: E402
from coa.models.weights import read_manifest  # noqa: E402
from coa.train.policy import Policy  # noqa: E402
from coa.train.rl_stage import read_rl_recipe, run_rl  # noqa: E402
from coa.train.sft import run_sft, sft_loss  # noqa: E402

SHAPES = {
    "0.5b": {"hidden_size": 224, "num_attention_heads": 14, "head_dim": 16},
    "1.5b": {"hidden_size": 256, "num_attention_heads": 6, "head_dim": 128},
}


@pytest.fixture(scope="module", params=[*SHAPES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = SHAPES[request.param] | {"intermediate_size": 304, "num_key_value_heads": 2}
    shape["vocab_size"] = make_tokenizer().get_vocab_size() + 13
    folder = tmp_path_factory.mktemp("qwen2") / request.param
    return make_tiny_model(folder, kind="qwen2", rope_theta=1e6, **shape)


def plain_logprobs(folder: Path, prompt: list[int], ids: list[int]) -> list[float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logs = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    return [logs[len(prompt) - 1 + at, token].item() for at, token in enumerate(ids)]


@pytest.mark.parametrize("kernels", ["", "off"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_computes_what_transformers_does(
    model: Path, dtype: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels:
        reason = "switched off"
        monkeypatch.setattr("coa.engines.llama.load_kernels", lambda: reason)
    engine = load_engine(f"hf:{model}", dtype=dtype, slots=2, note=lambda line: None)
    prompt = engine.encode_prompt("Be brief.", "What is the capital of Italy?")
    sampling = Sampling(max_tokens=24, temperature=1.0, key=3)

    async def run() -> Any:
        done = await engine.generate(prompt, sampling)
        again = await engine.generate([*prompt, *done.ids], sampling)  # on kept keys and values
        await engine.close()
        return done, again

    done, again = asyncio.run(run())
    for start, found in ((prompt, done), ([*prompt, *done.ids], again)):
        bound = 1e-4 if dtype == "float32" else 0.5
        assert found.logprobs == pytest.approx(plain_logprobs(model, start, found.ids), abs=bound)


def test_weights_of_8_bits_stay_near(model: Path) -> None:
    full = LlamaForward(model, torch.float32, 2, 100, exact=False)
    if full.slow:
        pytest.skip(f"no kernels: {full.slow}")
    rounded = LlamaForward(model, torch.float32, 2, 100, exact=False, int8=True)
    ids = [5, 9, 30, 44, 71, 8, 9, 10]
    with torch.inference_mode():
        whole, near = (each.step([Chunk(0, 0, ids, 8)]) for each in (full, rounded))
    assert 0 < ((near - whole).norm() / whole.norm()).item() < 0.03


def test_the_learner_has_the_gradients_of_transformers(model: Path) -> None:
    policy = Policy(f"hf:{model}", rank=4, dtype=torch.float32, max_length=64)
    assert policy.shares_prefixes
    with torch.no_grad():  # B starts at zero, which would hide half of the gradients
        torch.manual_seed(0)
        for parameter in policy.parameters:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    policy.refresh()
    gradients = []
    for fast in (policy._fast, None):
        policy._fast = fast
        sft_loss(policy, tiny_rows(3), 10.0).backward()
        gradients.append([p.grad.clone() for p in policy.parameters if p.grad is not None])
        policy.model.zero_grad()
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-3)


def test_both_stages_train_it_and_the_sampler_agrees_with_the_learner(
    model: Path, tmp_path: Path
) -> None:
    made = run_sft(tiny_settings(model, epochs=10), tiny_rows(), tmp_path / "sft")
    losses = [record["loss"] for _, record in read_jsonl(tmp_path / "sft" / "metrics.jsonl")]
    assert losses[-1] < losses[0] / 2
    start = Path(f"{model}+{made.adapter}")
    recipe = read_rl_recipe(None, settings(start, tmp_path / "rl", "rl.updates=2"))
    assert run_rl(recipe, quiet=True).trained
    records = [record for _, record in read_jsonl(tmp_path / "rl" / "metrics.jsonl")]
    assert all(record["sampler_gap_max"] < 1e-4 for record in records)
    assert read_manifest(tmp_path / "rl" / "adapter")["stage"] == "rl"
