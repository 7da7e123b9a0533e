"""Fine-tuning: it learns, it resumes to the bit, and its adapters know their base."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sft_worker import WORKER, surroundings, tiny_rows, tiny_settings
from tiny_model import make_tiny_model

torch = pytest.importorskip("torch")

from coa.engines import Sampling, load_engine  # noqa: E402
from coa.errors import ConfigError, ModelError, TrainingError  # noqa: E402
from coa.models.references import identity  # noqa: E402
from coa.models.weights import adapter_hash  # noqa: E402
from coa.train import sft  # noqa: E402
from coa.train.policy import Policy  # noqa: E402
from coa.train.rows import Row  # noqa: E402
from coa.train.sft import run_sft, sft_loss  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run, shared by the tests."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    run_sft(tiny_settings(model), tiny_rows(), run_dir)
    return run_dir


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def artefacts(run_dir: Path) -> dict[str, bytes]:
    files = [run_dir / "metrics.jsonl", *sorted((run_dir / "adapter").iterdir())]
    return {path.name: path.read_bytes() for path in files}


def test_it_memorises_eight_rows(model: Path, tmp_path: Path) -> None:
    settings = tiny_settings(model, epochs=80, batch_size=8, rank=16, checkpoint_every=1000)
    result = run_sft(settings, tiny_rows(), tmp_path)
    losses = [line["loss"] for line in metrics(tmp_path)]
    assert losses[0] > 4 and result.loss < 0.2
    row = tiny_rows()[3]
    engine = load_engine(f"hf:{model}+{result.adapter}", dtype="float32", slots=2)

    async def run() -> list[int]:
        done = await engine.generate(row.ids[:4], Sampling(max_tokens=len(row.ids) - 4))
        await engine.close()
        return done.ids

    assert asyncio.run(run()) == row.ids[4:]
    hashes = identity(f"hf:{model}+{result.adapter}")
    assert engine.weights == f"{hashes['base'][:8]}+{hashes['adapter'][:8]}"
    assert hashes["adapter"] == adapter_hash(result.adapter)


def test_gradients_and_hidden_states_are_those_of_peft(model: Path) -> None:
    for kind in ("llama", "qwen2", "qwen3"):
        folder = make_tiny_model(model.parent / kind, kind=kind)
        policy = Policy(f"hf:{folder}", rank=4, dtype=torch.float32, max_length=64)
        with torch.no_grad():  # B starts at zero, which would hide half of the gradients
            for parameter in policy.parameters:
                parameter.add_(torch.randn_like(parameter) * 0.05)
        policy.refresh()
        rows, gradients = tiny_rows(3), []
        for fast in (policy._fast, None):
            policy._fast = fast
            loss = sft_loss(policy, rows, 10.0)
            loss.backward()
            gradients.append([p.grad.clone() for p in policy.parameters])
            policy.model.zero_grad()
        for ours, theirs in zip(*gradients, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-3)


def test_a_killed_run_continues_to_the_same_bits(
    model: Path, finished: Path, tmp_path: Path
) -> None:
    target = random.randint(5, 30)
    process = subprocess.Popen(
        [sys.executable, WORKER, str(model), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=surroundings(),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == target:
            os.kill(process.pid, signal.SIGKILL)
            break
    process.wait()
    assert not (tmp_path / "adapter").exists()
    (tmp_path / "checkpoints" / ".part-0000099").mkdir()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 99, "lo')
    run_sft(tiny_settings(model), tiny_rows(), tmp_path)
    assert artefacts(tmp_path) == artefacts(finished), f"killed at update {target}"
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_ctrl_c_saves_a_checkpoint(model: Path, finished: Path, tmp_path: Path) -> None:
    def interrupt(at: sft.UpdateReport) -> None:
        if at.update == 6:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_sft(tiny_settings(model), tiny_rows(), tmp_path, on_update=interrupt)
    assert (tmp_path / "checkpoints" / "update-0000006").is_dir()
    run_sft(tiny_settings(model), tiny_rows(), tmp_path)
    assert artefacts(tmp_path) == artefacts(finished)


def test_a_split_batch_gives_the_same_update(model: Path, finished: Path, tmp_path: Path) -> None:
    run_sft(tiny_settings(model, micro_tokens=20), tiny_rows(), tmp_path)
    for one, other in zip(metrics(tmp_path)[:4], metrics(finished)[:4], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-3)


def test_the_learning_rate_follows_the_schedule(model: Path, tmp_path: Path) -> None:
    for schedule, last in (("constant", 1.0), ("linear", 0.25), ("cosine", 0.1464466)):
        settings = tiny_settings(model, epochs=2, batch_size=4, warmup=0.0, schedule=schedule)
        run_sft(settings, tiny_rows(), tmp_path / schedule)
        rates = [line["lr"] / settings.lr for line in metrics(tmp_path / schedule)]
        assert rates[0] == 1.0 and rates[-1] == pytest.approx(last)


def test_packs_learn_and_count_as_units_of_a_batch(model: Path, tmp_path: Path) -> None:
    changes: dict[str, object] = {"layout": "pack", "pack_tokens": 128, "batch_size": 1}
    result = run_sft(tiny_settings(model, epochs=30, **changes), tiny_rows(), tmp_path)
    lines = metrics(tmp_path)
    assert result.updates == 30 * 2  # 132 tokens are two packs
    assert max(line["tokens"] for line in lines) <= 128
    assert sum(line["tokens"] for line in lines[:2]) == 132
    assert lines[0]["loss"] > 4 and result.loss < 1


def test_all_weights_can_be_trained(model: Path, tmp_path: Path) -> None:
    settings = tiny_settings(model, full=True, lr=3e-3, epochs=15, checkpoint_every=1000)
    result = run_sft(settings, tiny_rows(), tmp_path)
    assert metrics(tmp_path)[0]["loss"] > 4 and result.loss < 1
    again = Policy(f"hf:{result.adapter}", full=True, max_length=128)
    rows = tiny_rows()
    total = sum(sum(row.weights[1:]) for row in rows)
    assert float(sft_loss(again, rows, total).detach()) < 1.5


def test_another_run_in_the_same_folder_is_refused(model: Path, finished: Path) -> None:
    with pytest.raises(ConfigError, match=r"started with lr 0.02, and it is 0.001 here"):
        run_sft(tiny_settings(model, lr=1e-3), tiny_rows(), finished)
    with pytest.raises(ConfigError, match="started with input rows"):
        run_sft(tiny_settings(model), tiny_rows(9), finished)


def test_a_run_that_ran_out_of_memory_goes_on_with_less_at_once(
    model: Path, tmp_path: Path
) -> None:
    """Only where the last bits are promised, what is computed at once has to stay as it was."""

    def interrupt(report: sft.UpdateReport) -> None:
        if report.update == 5:
            raise MemoryError

    less = {"micro_tokens": 40, "checkpointing": True, "threads": 2, "checkpoint_every": 3}
    for exact in (False, True):
        settings, out = tiny_settings(model, deterministic=exact), tmp_path / str(exact)
        with pytest.raises(MemoryError):
            run_sft(settings, tiny_rows(), out, on_update=interrupt)
        if exact:
            with pytest.raises(ConfigError, match=r"started with micro_tokens 4096, and it is 40"):
                run_sft(replace(settings, **less), tiny_rows(), out)
            less = {"checkpoint_every": 3}
        assert run_sft(replace(settings, **less), tiny_rows(), out).updates == 36


def test_a_finished_run_is_found_not_trained_again(model: Path, finished: Path) -> None:
    before = artefacts(finished)
    again = run_sft(tiny_settings(model), tiny_rows(), finished)
    assert (again.trained, again.updates, again.loss) == (False, 36, metrics(finished)[-1]["loss"])
    assert artefacts(finished) == before
    timings = [json.loads(line) for line in (finished / "timings.jsonl").open()]
    assert [t["update"] for t in timings if "update" in t] == list(range(1, 37))


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, seen = sft.sft_loss, []

    def poisoned(policy: Policy, rows: list[Row], total: float) -> object:
        seen.append(1)
        return inner(policy, rows, total) * (float("nan") if len(seen) == 7 else 1.0)

    monkeypatch.setattr(sft, "sft_loss", poisoned)
    with pytest.raises(TrainingError, match=r"Update 7: loss nan.*lower sft.lr"):
        run_sft(tiny_settings(model), tiny_rows(), tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["update-0000004"]


def test_what_another_process_did_is_not_blamed_on_the_rate(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*given: object) -> object:
        raise TrainingError("Another process of this run has ended.")

    monkeypatch.setattr(sft, "sft_loss", ended)
    with pytest.raises(TrainingError, match=r"^Another process of this run has ended\.$"):
        run_sft(tiny_settings(model), tiny_rows(), tmp_path)


def test_an_adapter_of_another_base_is_refused(finished: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    ref = f"hf:{other}+{finished / 'adapter'}"
    for load in (load_engine, Policy):
        with pytest.raises(ModelError, match=r"trained on a base with hash '\w{12}'.*has '\w{12}'"):
            load(ref)


def test_peft_itself_loads_the_adapter(model: Path, finished: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, finished / "adapter")
    ids = tiny_rows()[0].ids
    policy = Policy(f"hf:{model}+{finished / 'adapter'}", dtype=torch.float32, max_length=64)
    with torch.no_grad():
        theirs = loaded(torch.tensor([ids])).logits[0]
        ours = policy.logits(policy.hidden([ids]))
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_the_engine_takes_over_a_policy(model: Path, finished: Path) -> None:
    policy = Policy(f"hf:{model}+{finished / 'adapter'}", dtype=torch.float32, max_length=64)
    engine = load_engine(f"hf:{model}", dtype="float32", slots=2)
    merged = load_engine(f"hf:{model}+{finished / 'adapter'}", dtype="float32", slots=2)

    async def run() -> None:
        prompt, sampling = tiny_rows()[0].ids[:5], Sampling(max_tokens=9)
        before = await engine.generate(prompt, sampling)
        await engine.load(policy.adapter(), "update-1")
        assert engine.weights == "update-1"
        after, expected = (
            await engine.generate(prompt, sampling),
            await merged.generate(prompt, sampling),
        )
        assert after.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        await engine.load(None, "base")
        assert (await engine.generate(prompt, sampling)).ids == before.ids
        await engine.close()
        await merged.close()

    asyncio.run(run())


def test_settings_and_rows_are_checked(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sft\.rank: found 0"):
        tiny_settings(model, rank=0)
    for name, value in (("warmup", 1.5), ("err_weight", -0.1), ("micro_tokens", 0)):
        with pytest.raises(ConfigError, match=rf"sft\.{name}: found {value}, expected"):
            tiny_settings(model, **{name: value})
    for name in ("lr", "grad_clip", "alpha", "threads"):  # 0 would train nothing, silently
        with pytest.raises(ConfigError, match=rf"sft\.{name}: found 0, expected more than 0"):
            tiny_settings(model, **{name: 0})
    with pytest.raises(ConfigError, match=r"sft\.weight_decay: found -1, expected 0 or more"):
        tiny_settings(model, weight_decay=-1)
    with pytest.raises(TrainingError, match="no rows"):
        run_sft(tiny_settings(model), [], tmp_path)
    with pytest.raises(TrainingError, match="'t0': its row has no trainable token"):
        mute = replace(tiny_rows(1)[0], weights=[1.0] + [0.0] * 12)
        run_sft(tiny_settings(model), [mute], tmp_path)
    with pytest.raises(TrainingError, match="max_length is 8"):
        run_sft(tiny_settings(model, max_length=8), tiny_rows(), tmp_path)
    long = Row("long", [5] * 513, [1.0] * 513)  # the model has 512 positions
    with pytest.raises(TrainingError, match=r"^Task 'long': .* 513 .* Set sft.max_length = 512\.$"):
        run_sft(tiny_settings(model, max_length=600), [*tiny_rows(), long], tmp_path)
