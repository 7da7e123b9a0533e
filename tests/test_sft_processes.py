"""Fine-tuning in two real processes (gloo) takes the same steps as in one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sft_worker import WORKER, surroundings, tiny_rows, tiny_settings

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from safetensors.torch import load_file  # noqa: E402

from coa.errors import ConfigError  # noqa: E402
from coa.train.processes import Processes  # noqa: E402
from coa.train.sft import UpdateReport, run_sft  # noqa: E402

# `--cpu --num_processes 2` starts one process only, without a word.
COPIES = ["--config_file", str(Path(__file__).parents[1] / "recipes/accelerate/ddp-cpu.yaml")]
SPREAD = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
use_cpu: true
num_machines: 1
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
"""


def launch(
    model: Path, directory: Path, changes: dict[str, object], how: Sequence[str] = COPIES
) -> str:
    """Train in two processes; what they wrote to stderr when they failed."""
    words = [sys.executable, "-m", "accelerate.commands.launch", *how, "--num_processes", "2"]
    words += ["--main_process_port", "0", "--num_cpu_threads_per_process", "1"]
    words += [WORKER, str(model), str(directory), json.dumps(changes)]
    done = subprocess.run(words, env=surroundings(), capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) == (directory / "adapter").is_dir(), done.stderr
    assert "process 0 of 2" in done.stderr and "process 1 of 2" in done.stderr, done.stderr
    return done.stderr if done.returncode else ""


def metrics(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def same(one: Path, two: Path, weights: str) -> None:
    """Both directories hold the same run, up to rounding."""
    for ours, theirs in zip(metrics(one), metrics(two), strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-5)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
        for name in ("update", "epoch", "tokens", "trained_tokens", "lr"):
            assert theirs[name] == ours[name]
    held, found = (load_file(at / "adapter" / weights) for at in (one, two))
    assert held.keys() == found.keys()
    for key, tensor in held.items():
        # AdamW divides by a gradient that may be next to nothing: there rounding moves one number
        # of 1,024 by a thousandth of a step of 0.02, all others by less than a ten-thousandth.
        gap = (tensor - found[key]).abs()
        assert int((gap > 2e-6).sum()) <= 1 and float(gap.max()) < 5e-5, key


def test_two_processes_take_the_steps_of_one(tiny_model: Path, tmp_path: Path) -> None:
    run_sft(tiny_settings(tiny_model, epochs=4), tiny_rows(), tmp_path / "one")
    assert launch(tiny_model, tmp_path / "two", {"epochs": 4}) == ""
    same(tmp_path / "one", tmp_path / "two", "adapter_model.safetensors")
    assert "in use" not in (tmp_path / "two" / "timings.jsonl").read_text()


def begun_by_one(model: Path, directory: Path, changes: dict[str, object]) -> None:
    """A whole run in `one`, and in `two` the first six updates of the same."""
    settings = tiny_settings(model, **changes)
    run_sft(settings, tiny_rows(), directory / "one")

    def interrupt(at: UpdateReport) -> None:
        if at.update == 6:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_sft(settings, tiny_rows(), directory / "two", on_update=interrupt)


@pytest.mark.slow
def test_two_processes_continue_what_one_began_with_packs_and_all_weights(
    tiny_model: Path, tmp_path: Path
) -> None:
    changes: dict[str, object] = {"layout": "pack", "batch_size": 2, "full": True, "lr": 1e-4}
    begun_by_one(tiny_model, tmp_path, changes)
    assert launch(tiny_model, tmp_path / "two", changes) == ""
    same(tmp_path / "one", tmp_path / "two", "model.safetensors")


@pytest.mark.slow
def test_weights_spread_over_processes_continue_what_one_began(
    tiny_model: Path, tmp_path: Path
) -> None:
    changes: dict[str, object] = {"full": True, "lr": 1e-4, "epochs": 4}
    begun_by_one(tiny_model, tmp_path, changes)
    (tmp_path / "fsdp.yaml").write_text(SPREAD)
    how = ["--config_file", str(tmp_path / "fsdp.yaml")]
    assert launch(tiny_model, tmp_path / "two", changes, how) == ""
    same(tmp_path / "one", tmp_path / "two", "model.safetensors")
    held = sorted(path.name for path in (tmp_path / "two" / "checkpoints").iterdir())
    assert held == ["update-0000008", "update-0000012"]


@pytest.mark.slow
def test_what_the_main_process_refuses_ends_all_with_one_line(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "notes.txt").write_text("mine")
    said = launch(tiny_model, tmp_path / "two", {})
    assert "notes.txt' but no manifest.json, so it is not a run directory." in said
    assert "Connection closed" not in said


def test_a_batch_smaller_than_the_processes_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    settings = tiny_settings(tiny_model, batch_size=3)
    with pytest.raises(ConfigError, match=r"sft\.batch_size: found 3 with 4 processes"):
        run_sft(settings, tiny_rows(), tmp_path, processes=Processes(1, 4))
