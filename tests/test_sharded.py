"""Weights spread over two real processes (gloo, CPU) train as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_worker import tiny_rows
from tiny_model import make_tiny_model

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

import coa  # noqa: E402
from coa.errors import ConfigError, TrainingError  # noqa: E402
from coa.train.optimizer import PolicyOptimizer  # noqa: E402
from coa.train.policy import Policy  # noqa: E402
from coa.train.processes import Processes, sharding_wanted  # noqa: E402
from coa.train.settings import SftSettings  # noqa: E402

WORKER = Path(__file__).with_name("spread_worker.py")
SETTINGS = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
use_cpu: true
num_machines: 1
num_processes: 2
main_process_port: 0
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
"""


CASES, MORE = ["llama:full", "llama:low"], ["gpt2:full", "llama:bf16"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    for kind in ("llama", "gpt2"):
        make_tiny_model(folder / kind, kind=kind)
    return folder


def run(launch: list[str], models: Path, out: Path, cases: list[str]) -> str:
    """Run the worker on cases into a folder; what it said."""
    path = os.pathsep.join([str(Path(coa.__file__).parents[1]), str(WORKER.parent)])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    kept |= {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch, str(WORKER), str(models), str(out), *cases],
        env=kept,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    return done.stdout + done.stderr


def record(out: Path, case: str, said: str) -> dict[str, Any]:
    path = out / case.replace(":", "-") / "record.json"
    assert path.is_file(), said
    held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return held


@pytest.fixture(scope="module")
def alone(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("alone")
    return out, run([], models, out, CASES)


@pytest.fixture(scope="module")
def sharded(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("sharded")
    return out, run(fsdp(out), models, out, CASES)


def fsdp(out: Path) -> list[str]:
    (out / "fsdp.yaml").write_text(SETTINGS, encoding="utf-8")
    return ["-m", "accelerate.commands.launch", "--config_file", str(out / "fsdp.yaml")]


def largest_gap(one: list[list[float]], other: list[list[float]]) -> float:
    return float((torch.tensor(one) - torch.tensor(other)).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_fsdp_trains_as_one_process_does(
    models: Path, alone: tuple[Path, str], sharded: tuple[Path, str], case: str
) -> None:
    one, two = record(alone[0], case, alone[1]), record(sharded[0], case, sharded[1])
    assert (one["processes"], two["processes"]) == (1, 2)
    model, _, kind = case.partition(":")
    near = 5e-2 if kind == "bf16" else 1e-4
    assert two["losses"] == pytest.approx(one["losses"], rel=near)
    assert two["norms"] == pytest.approx(one["norms"], rel=near)
    assert one["losses"][-1] < 0.9 * one["losses"][0]
    assert two["tensors"] == one["tensors"]
    assert two["reference_is_start"] is True
    assert two["again"] == pytest.approx(two["losses"][1], rel=near)  # from the checkpoint
    if kind == "bf16":
        return
    assert largest_gap(one["hidden"], two["hidden"]) < 1e-3
    kept: dict[str, Any] = {"full": True} if kind == "full" else {"rank": 4}
    policy = Policy(f"hf:{models / model}", max_length=64, **kept)
    policy.restore(sharded[0] / case.replace(":", "-") / "trained")  # two wrote it, one reads it
    with torch.no_grad():
        assert largest_gap(policy.hidden([tiny_rows()[0].ids]).tolist(), two["hidden"]) < 1e-3


@pytest.mark.slow
def test_fsdp_trains_other_models_and_types_as_one_process_does(
    models: Path, tmp_path: Path
) -> None:
    folders = []
    for launch in ([], fsdp(tmp_path)):
        out = tmp_path / str(len(launch))
        folders.append((out, run(launch, models, out, MORE)))
    for case in MORE:
        test_fsdp_trains_as_one_process_does(models, folders[0], folders[1], case)


def test_fsdp_of_version_one_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.delenv("FSDP_VERSION", raising=False)
    policy = Policy(f"hf:{models / 'llama'}", rank=4, max_length=64)
    with pytest.raises(ConfigError, match="found fsdp_version 1, expected 2"):
        PolicyOptimizer(policy, SftSettings(), 1)


def test_weights_are_spread_only_where_that_was_asked_for(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.setenv(name, "false")
        assert not sharding_wanted()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert sharding_wanted()
    policy = Policy(f"hf:{models / 'llama'}", rank=4, max_length=64)
    value = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(TrainingError, match="A value head cannot be trained beside weights that"):
        PolicyOptimizer(policy, SftSettings(), 1, extra=[value], extra_lr=1e-3)


def test_deepspeed_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")  # as accelerate launch sets it
    for ask in (Processes.open, sharding_wanted):
        with pytest.raises(ConfigError, match="does not train under DeepSpeed") as error:
            ask()
        assert "\n" not in str(error.value)
