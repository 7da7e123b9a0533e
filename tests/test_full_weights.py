"""All weights trained: the gradients of transformers, folders that load everywhere, the engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from plain_forward import chosen, forced, load_plain
from sft_worker import tiny_rows
from tiny_model import make_tiny_model

torch = pytest.importorskip("torch")

from coa.engines import Sampling, load_engine  # noqa: E402
from coa.errors import ModelError  # noqa: E402
from coa.models.references import trained_on  # noqa: E402
from coa.models.weights import Adapter, base_hash, read_adapter, write_adapter  # noqa: E402
from coa.train.policy import Policy  # noqa: E402

KINDS = ("llama", "qwen2", "qwen3", "gpt2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    made = {kind: make_tiny_model(folder / kind, kind=kind) for kind in KINDS}
    return made | {"untied": untie(made["llama"], folder / "untied")}


def untie(model: Path, folder: Path) -> Path:
    """The same model with an output layer of its own."""
    loaded = load_plain(model)
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    loaded.config.tie_word_embeddings = False
    head = loaded.lm_head.weight.detach().clone() * 0.9
    loaded.lm_head.weight = torch.nn.Parameter(head)
    loaded.save_pretrained(folder)
    return folder


def whole(model: Path, **settings: Any) -> Policy:
    return Policy(f"hf:{model}", **({"full": True, "max_length": 64} | settings))


def trained_places(rows: list[list[int]]) -> tuple[list[int], list[int]]:
    """Every second token, as places in the concatenation and what follows there."""
    places, targets, first = [], [], 0
    for row in rows:
        for at in range(0, len(row) - 1, 2):
            places.append(first + at)
            targets.append(row[at + 1])
        first += len(row)
    return places, targets


def likelihood(
    policy: Policy, rows: list[list[int]], places: list[int], targets: list[int], heat: float = 1.0
) -> tuple[Any, Any]:
    """Logprobs of targets after places, and the hidden states there."""
    hidden = policy.hidden(rows)[torch.tensor(places)]
    return policy.logprobs(hidden, torch.tensor(targets), heat), hidden


def nudge(policy: Policy, seed: int = 0, by: float = 0.05) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter += by * torch.randn(parameter.shape, generator=draw)
    policy.refresh()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "untied", "gpt2"])
def test_gradients_are_those_of_transformers(models: dict[str, Path], kind: str) -> None:
    policy = whole(models[kind])
    rows = [row.ids for row in tiny_rows(3)]
    places, targets = trained_places(rows)
    logprobs, _ = likelihood(policy, rows, places, targets, 0.8)
    slope = torch.randn(len(places), generator=torch.Generator().manual_seed(0))
    (logprobs * slope).sum().backward()

    theirs = load_plain(models[kind]).eval()
    logits = torch.cat([theirs(torch.tensor([row]), use_cache=False).logits[0] for row in rows])
    logs = torch.log_softmax(logits[places].float() / 0.8, -1)
    picked = logs.gather(1, torch.tensor(targets)[:, None])[:, 0]
    (picked * slope).sum().backward()

    torch.testing.assert_close(logprobs, picked, atol=1e-5, rtol=1e-5)
    ours, others = dict(policy.model.named_parameters()), dict(theirs.named_parameters())
    assert ours.keys() == others.keys()
    largest = max(float(p.grad.abs().max()) for p in others.values())
    for name, parameter in ours.items():
        assert parameter.grad is not None, name
        gap = float((parameter.grad - others[name].grad).abs().max())
        assert gap <= 1e-5 * max(1.0, largest), (name, gap)


def test_gradients_of_parts_add_up(models: dict[str, Path]) -> None:
    policy = whole(models["qwen2"])
    rows = [row.ids for row in tiny_rows(4)]

    def gradients(parts: list[list[list[int]]]) -> list[Any]:
        for part in parts:
            places, targets = trained_places(part)
            likelihood(policy, part, places, targets)[0].sum().backward()
        found = [p.grad.clone() for p in policy.parameters]
        policy.model.zero_grad(set_to_none=True)
        return found

    for one, other in zip(gradients([rows]), gradients([rows[:1], rows[1:]]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_masters_are_float32_when_bfloat16_computes(models: dict[str, Path]) -> None:
    for kind in ("llama", "gpt2"):
        policy = whole(models[kind], dtype=torch.bfloat16)
        rows = [row.ids for row in tiny_rows(2)]
        places, targets = trained_places(rows)
        logprobs, _ = likelihood(policy, rows, places, targets)
        exact, _ = likelihood(whole(models[kind]), rows, places, targets)
        assert logprobs.dtype == torch.float32
        assert 1e-5 < float((logprobs - exact).detach().abs().max()) < 0.5
        logprobs.sum().backward()
        for parameter in policy.parameters:
            assert parameter.dtype == parameter.grad.dtype == torch.float32
        before = logprobs.detach()
        nudge(policy, by=1e-6)  # far below a bfloat16 step: it must not be lost in the masters
        start = dict(load_plain(models[kind]).named_parameters())
        assert all(
            not torch.equal(parameter, start[name])
            for name, parameter in policy.model.named_parameters()
        )
        again, _ = likelihood(policy, rows, places, targets)
        assert float((again - before).detach().abs().max()) < 0.5


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "untied", "gpt2"])
def test_the_engine_serves_what_the_policy_computes(models: dict[str, Path], kind: str) -> None:
    policy = whole(models[kind])
    nudge(policy)
    engine = load_engine(f"hf:{models[kind]}", dtype="float32", slots=2)
    prompt = tiny_rows()[0].ids[:5]

    async def run() -> Any:
        before = await engine.generate(prompt, Sampling(max_tokens=9))
        await engine.load(policy.adapter(), "update-1")
        assert engine.weights == "update-1"
        after = await engine.generate(prompt, Sampling(max_tokens=9))
        await engine.load(None, "base")
        assert (await engine.generate(prompt, Sampling(max_tokens=9))).ids == before.ids
        await engine.close()
        return before, after

    before, after = asyncio.run(run())
    row = prompt + after.ids
    places = range(len(prompt) - 1, len(row) - 1)
    with torch.no_grad():
        logprobs, _ = likelihood(policy, [row], [*places], after.ids)
    assert logprobs.tolist() == pytest.approx(after.logprobs, abs=1e-4)
    assert before.logprobs != pytest.approx(after.logprobs, abs=1e-2)


def test_what_the_engine_got_does_not_change_with_the_policy(models: dict[str, Path]) -> None:
    policy = whole(models["llama"])
    held = policy.adapter()
    before = {name: tensor.clone() for name, tensor in held.whole.items()}
    nudge(policy)
    assert all(torch.equal(before[name], tensor) for name, tensor in held.whole.items())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "untied", "gpt2"])
def test_a_saved_folder_is_a_model_like_any_other(
    models: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    policy = whole(models[kind])
    nudge(policy)
    policy.save(tmp_path / "trained", stage="sft")
    manifest = json.loads((tmp_path / "trained" / "manifest.json").read_text())
    assert (manifest["full"], manifest["stage"]) == (True, "sft")
    assert manifest["base_sha256"] == base_hash(models[kind]) != base_hash(tmp_path / "trained")
    assert [p.name for p in tmp_path.iterdir()] == ["trained"]
    row = tiny_rows()[0].ids
    places = [*range(4, len(row) - 1)]
    with torch.no_grad():
        ours = likelihood(policy, [row], places, row[5:])[0].tolist()

    theirs = forced(load_plain(tmp_path / "trained"), row[:5], row[5:])
    assert chosen(theirs, row[5:]) == pytest.approx(ours, abs=1e-4)
    again = whole(tmp_path / "trained")
    assert likelihood(again, [row], places, row[5:])[0].tolist() == ours
    assert again.codec.encode("capital of Italy") == policy.codec.encode("capital of Italy")
    engine = load_engine(f"hf:{tmp_path / 'trained'}", dtype="float32", slots=1)

    async def run() -> Any:
        done = await engine.generate(row[:5], Sampling(max_tokens=4))
        await engine.close()
        return done

    done = asyncio.run(run())
    served = chosen(forced(load_plain(tmp_path / "trained"), row[:5], done.ids), done.ids)
    assert done.logprobs == pytest.approx(served, abs=1e-4)


def test_a_checkpoint_is_restored_to_the_bit(models: dict[str, Path], tmp_path: Path) -> None:
    policy, other = whole(models["llama"]), whole(models["llama"])
    nudge(policy)
    policy.write(tmp_path / "part" / "adapter", policy.gathered(), update=3)
    other.restore(tmp_path / "part" / "adapter")
    for one, two in zip(policy.parameters, other.parameters, strict=True):
        assert torch.equal(one, two)
    row = tiny_rows()[0].ids
    assert torch.equal(policy.hidden([row]), other.hidden([row]))
    loaded = read_adapter(tmp_path / "part" / "adapter", policy.base_sha256)
    assert loaded.whole.keys() == policy.adapter().whole.keys()


def test_a_trained_model_is_a_base_like_any_other(models: dict[str, Path], tmp_path: Path) -> None:
    """Also in a folder with a plus sign in its name."""
    trained, adapter = tmp_path / "c++" / "trained", tmp_path / "adapter"
    policy = whole(models["llama"])
    nudge(policy)
    policy.save(trained, grammar="mhqa", prompt="compact")
    assert trained_on(f"hf:{trained}") == {"grammar": "mhqa", "prompt": "compact"}
    upon = Policy(f"hf:{trained}", rank=4, max_length=64)
    assert upon.base_sha256 not in (policy.base_sha256, "")
    row = tiny_rows()[0].ids
    assert torch.allclose(upon.hidden([row]), policy.hidden([row]), atol=1e-5)
    upon.save(adapter)
    manifest = json.loads((adapter / "manifest.json").read_text())
    assert manifest["base"] == f"hf:{trained}" and manifest["base_sha256"] == upon.base_sha256
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(trained)
    with pytest.raises(ModelError, match=r"whole model; use it alone: hf:.*trained"):
        Policy(f"hf:{models['llama']}+{trained}")


def test_an_adapter_with_unreadable_settings_is_one_line(
    models: dict[str, Path], tmp_path: Path
) -> None:
    ref = f"hf:{models['llama']}"
    Policy(ref, rank=4, max_length=64).save(tmp_path / "low")
    path = tmp_path / "low" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rank_pattern": {"q_proj": 2}}))
    with pytest.raises(ModelError, match=r"rank_pattern is set, which is not supported"):
        Policy(f"{ref}+{tmp_path / 'low'}")
    path.write_text(json.dumps(config | {"use_rslora": True}))
    assert Policy(f"{ref}+{tmp_path / 'low'}", max_length=64).alpha == config["lora_alpha"] * 2
    path.write_text("{")
    with pytest.raises(ModelError, match=r"cannot read it \(JSONDecodeError.*r and lora_alpha"):
        Policy(f"{ref}+{tmp_path / 'low'}")


def test_what_does_not_fit_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    policy = whole(models["llama"])
    low = Policy(f"hf:{models['llama']}", rank=4, max_length=64)
    policy.save(tmp_path / "whole")
    low.save(tmp_path / "low")
    with pytest.raises(ModelError, match="holds LoRA factors, and this policy trains all weights"):
        policy.restore(tmp_path / "low")
    with pytest.raises(ModelError, match="holds all weights, and this policy trains rank 4"):
        low.restore(tmp_path / "whole")
    with pytest.raises(ModelError, match=r"trained on a base with hash '\w{12}'"):
        whole(models["qwen2"]).restore(tmp_path / "whole")
    with pytest.raises(ModelError, match=r"running server takes LoRA factors only.*full = false"):
        write_adapter(policy.adapter(), tmp_path)
    (tmp_path / "whole" / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot read the weights"):
        policy.restore(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_engine_refuses_weights_that_the_model_lacks(models: dict[str, Path], kind: str) -> None:
    engine = load_engine(f"hf:{models[kind]}", dtype="float32", slots=1)
    stray = Adapter(1.0, {}, {"model.extra.weight": torch.zeros(2)})

    async def run() -> None:
        with pytest.raises(ModelError, match=r"model\.extra\.weight"):
            await engine.load(stray, "x")
        assert engine.weights != "x"
        await engine.close()

    asyncio.run(run())


def test_all_weights_can_start_from_an_adapter(models: dict[str, Path], tmp_path: Path) -> None:
    low = Policy(f"hf:{models['llama']}", rank=4, max_length=64)
    nudge(low)
    low.save(tmp_path / "low")
    policy = whole(Path(f"{models['llama']}+{tmp_path / 'low'}"))
    row = tiny_rows()[0].ids
    torch.testing.assert_close(policy.hidden([row]), low.hidden([row]), atol=1e-4, rtol=1e-4)
    assert policy.base_sha256 == low.base_sha256
