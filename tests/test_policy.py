"""The policy's computation: packing without mixing rows, checkpointing, reference, value head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft_worker import tiny_rows
from test_full_weights import likelihood, nudge, trained_places
from tiny_model import make_tiny_model, make_tokenizer

torch = pytest.importorskip("torch")

from coa.errors import ModelError, TrainingError  # noqa: E402
from coa.train.forward import PlainModel, causal_of  # noqa: E402
from coa.train.policy import (  # noqa: E402
    Policy,
    ValueHead,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {k: make_tiny_model(folder / k, kind=k) for k in ("llama", "qwen3", "gpt2")}


def make_model(folder: Path, kind: str, **shape: Any) -> Path:
    """A model of an architecture that tiny_model does not know, with its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make_tiny_model(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    size = make_tokenizer().get_vocab_size()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=size, pad_token_id=0, **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    return folder


def plain(model: Path, **settings: Any) -> Policy:
    """A policy on the transformers path, which checkpointing takes also for Llama on a CPU."""
    return Policy(f"hf:{model}", **({"rank": 4, "checkpointing": True} | settings))


def one_by_one(policy: Policy, rows: list[list[int]]) -> Any:
    causal = causal_of(policy.model)
    return torch.cat([causal.base_model(torch.tensor([r]), use_cache=False)[0][0] for r in rows])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_packed_rows_are_computed_as_if_alone(models: dict[str, Path], kind: str) -> None:
    policy = plain(models[kind], full=kind == "gpt2")
    assert policy._plain.packs
    rows = [row.ids for row in tiny_rows(4)]
    nudge(policy)
    with torch.no_grad():
        packed, apart = policy.hidden(rows), one_by_one(policy, rows)
        naive = one_by_one(policy, [[i for row in rows for i in row]])
    torch.testing.assert_close(packed, apart, atol=1e-4, rtol=1e-4)
    assert float((naive - apart).abs().max()) > 0.1  # what forgetting the positions would give


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(st.lists(st.integers(3, 250), min_size=1, max_size=20), min_size=1, max_size=5)
)
def test_any_rows_are_packed_without_mixing(rows: list[list[int]], tiny_policies: Any) -> None:
    for policy in tiny_policies:
        with torch.no_grad():
            torch.testing.assert_close(
                policy.hidden(rows), one_by_one(policy, rows), atol=1e-4, rtol=1e-4
            )


@pytest.fixture(scope="module")
def tiny_policies(models: dict[str, Path]) -> list[Policy]:
    return [plain(models["llama"]), plain(models["gpt2"], full=True)]


def test_gradients_of_packed_rows_are_the_sum_of_their_own(models: dict[str, Path]) -> None:
    policy = plain(models["qwen3"], full=True)
    rows = [row.ids for row in tiny_rows(3)]

    def gradients(parts: list[list[list[int]]]) -> list[Any]:
        for part in parts:
            likelihood(policy, part, *trained_places(part))[0].sum().backward()
        found = [p.grad.clone() for p in policy.parameters]
        policy.model.zero_grad(set_to_none=True)
        return found

    for one, other in zip(gradients([rows]), gradients([[row] for row in rows]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 2, "num_attention_heads": 2}),
        (
            "opt",
            {
                "hidden_size": 32,
                "ffn_dim": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "max_position_embeddings": 64,
                "word_embed_proj_dim": 32,
            },
        ),
    ],
)
def test_what_would_mix_rows_is_computed_row_by_row(
    tmp_path: Path, kind: str, shape: dict[str, Any]
) -> None:
    notes: list[str] = []
    folder = make_model(tmp_path / kind, kind, **shape)
    policy = Policy(f"hf:{folder}", full=True, note=notes.append)
    assert notes == [
        f"hf:{folder}: rows cannot be packed for this architecture; computing them one by one"
    ]
    rows = [row.ids for row in tiny_rows(3)]
    with torch.no_grad():
        found, apart = policy.hidden(rows), one_by_one(policy, rows)
        policy._plain.packs = True  # what it would have been
        mixed = policy.hidden(rows)
    torch.testing.assert_close(found, apart)
    assert float((mixed - apart).abs().max()) > 1e-2


def test_a_model_that_caps_its_logits_is_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    folder = make_model(tmp_path / "gemma2", "gemma2", **shape)
    with pytest.raises(ModelError, match=r"logits are not one product with the output layer"):
        Policy(f"hf:{folder}", full=True)


def test_lora_factors_without_a_place_are_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match=r"no modules named 'q_proj'.*full = true"):
        Policy(f"hf:{models['gpt2']}", rank=4)


@pytest.mark.parametrize("full", [False, True])
def test_checkpointing_and_the_fast_path_have_the_same_gradients(
    models: dict[str, Path], full: bool
) -> None:
    rows = [row.ids for row in tiny_rows(3)]
    places, targets = trained_places(rows)
    found = []
    for checkpointing in (True, False):
        policy = plain(models["qwen3"], full=full, checkpointing=checkpointing)
        assert (policy._fast is None) == checkpointing
        nudge(policy)
        logprobs, hidden = likelihood(policy, rows, places, targets, 0.7)
        assert hidden.shape == (len(places), policy.hidden_size)
        logprobs.sum().backward()
        found.append([logprobs.detach(), *(p.grad for p in policy.parameters)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_checkpointing_computes_layers_again_and_leaves_dropout_off(
    models: dict[str, Path],
) -> None:
    policy = plain(models["gpt2"], full=True)
    calls = []
    layer = causal_of(policy.model).transformer.h[0]
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    rows = [row.ids for row in tiny_rows(2)]
    first, _ = likelihood(policy, rows, *trained_places(rows))
    assert len(calls) == 1
    first.sum().backward()
    assert len(calls) == 2
    again, _ = likelihood(policy, rows, *trained_places(rows))
    assert torch.equal(first, again)  # gpt2's own setting is a dropout of 0.1
    policy._plain.train()
    assert torch.equal(first, likelihood(policy, rows, *trained_places(rows))[0])


def test_logprobs_are_those_of_the_logits_at_a_temperature(models: dict[str, Path]) -> None:
    for policy in (plain(models["llama"]), plain(models["llama"], checkpointing=False)):
        rows = [row.ids for row in tiny_rows(3)]
        places, targets = trained_places(rows)
        logprobs, hidden = likelihood(policy, rows, places, targets, 0.9)
        states = policy.hidden(rows)[torch.tensor(places)]
        torch.testing.assert_close(hidden, states)
        logs = torch.log_softmax(policy.logits(states).float() / 0.9, -1)
        picked = logs.gather(1, torch.tensor(targets)[:, None])[:, 0]
        torch.testing.assert_close(logprobs, picked, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_reference_is_the_start_and_what_was_trained_comes_back(
    models: dict[str, Path], full: bool, checkpointing: bool
) -> None:
    policy = plain(models["llama"], full=full, checkpointing=checkpointing, keep_reference=True)
    rows = [row.ids for row in tiny_rows(2)]
    start = policy.hidden(rows).detach()
    nudge(policy)
    trained, held = policy.hidden(rows).detach(), [p.clone() for p in policy.parameters]
    assert not torch.equal(start, trained)
    for _ in range(2):
        with policy.reference():
            found = policy.hidden(rows)
            assert torch.equal(found, start) and not found.requires_grad
        with pytest.raises(RuntimeError, match="stop"), policy.reference():
            raise RuntimeError("stop")
        assert torch.equal(policy.hidden(rows), trained)
        assert all(map(torch.equal, held, policy.parameters))


def test_the_reference_is_not_what_a_checkpoint_brings(
    models: dict[str, Path], tmp_path: Path
) -> None:
    first = plain(models["llama"], checkpointing=False)
    nudge(first)
    first.save(tmp_path / "adapter")
    policy = plain(models["llama"], checkpointing=False, keep_reference=True)
    rows = [row.ids for row in tiny_rows(2)]
    start = policy.hidden(rows).detach()
    policy.restore(tmp_path / "adapter")
    assert torch.equal(policy.hidden(rows), first.hidden(rows))
    with policy.reference():
        assert torch.equal(policy.hidden(rows), start)


def test_a_reference_that_was_not_kept_is_an_error(models: dict[str, Path]) -> None:
    policy = plain(models["llama"])
    with pytest.raises(TrainingError, match="keep_reference=True"), policy.reference():
        pass


def test_what_cannot_be_checkpointed_says_so() -> None:
    class Bare(torch.nn.Module):
        config: Any = None

    with pytest.raises(ModelError, match="checkpointing: Bare does not support it"):
        PlainModel(Bare(), cast=None, checkpointing=True)


def test_a_value_head_starts_at_zero_and_learns() -> None:
    head = ValueHead(8)
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    assert head.values(hidden).tolist() == [0.0] * 5
    optimizer = torch.optim.SGD(head.parameters(), lr=0.05)
    for _ in range(800):
        optimizer.zero_grad()
        (head.values(hidden) - hidden[:, 0] - 2.0).square().sum().backward()
        optimizer.step()
    assert head.values(hidden).tolist() == pytest.approx((hidden[:, 0] + 2.0).tolist(), abs=0.05)
    assert head.values(hidden.bfloat16()).dtype == torch.float32
