"""The whole way on a tiny random model: every stage runs, is skipped when done, and continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coa.display import console, print_speedrun
from coa.errors import ConfigError
from coa.speedrun import run_speedrun
from tiny_model import make_tiny_model

pytest.importorskip("torch")


def overrides(model: Path) -> list[str]:
    return [
        f"sft.model=hf:{model}",
        "tasks.n=12",
        "sft.rank=4",
        "sft.batch_size=2",
        "sft.checkpoint_every=1",
        "sft.max_length=512",
        "sft.deterministic=true",
        "eval.n=6",
        "eval.controls=3",
        "eval.turns=2",
        "eval.turn_tokens=8",
        "eval.context=4096",
        "eval.concurrency=2",
    ]


def test_every_stage_runs_and_a_second_call_changes_nothing(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes: list[str] = []
    first = run_speedrun(tmp_path / "run", None, overrides(tiny_model), notes.append)
    names = [row["name"] for row in first["rows"]]
    assert names[:2] == ["team of experts", "base"] and len(names) == 6
    assert [row["n"] for row in first["rows"]] == [6, 6, 6, 6, 3, 3]
    assert first["gain"]["wins"] + first["gain"]["losses"] + first["gain"]["ties"] == 6
    print_speedrun(console(), first)
    shown = capsys.readouterr().out
    assert "sft, invented world" in shown and "question" in shown
    files = ["result.json", "sft/metrics.jsonl", "eval-sft/trajectories.jsonl", "episodes.jsonl"]
    before = {name: (tmp_path / "run" / name).read_bytes() for name in files}
    second = run_speedrun(tmp_path / "run", None, overrides(tiny_model), notes.append)
    assert second == first
    assert any("finished already" in note for note in notes)
    assert before == {name: (tmp_path / "run" / name).read_bytes() for name in files}


def test_killed_in_the_middle_it_ends_with_the_same_result(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run_speedrun(tmp_path / "whole", None, overrides(tiny_model), lambda note: None)
    command = [sys.executable, "-m", "coa", "speedrun", "--out", str(tmp_path / "cut")]
    child = subprocess.Popen(
        [*command, *overrides(tiny_model)],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = tmp_path / "cut" / "sft" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and child.poll() is None:
        if metrics.is_file() and metrics.read_bytes().count(b"\n") >= 2:
            break
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    again = run_speedrun(tmp_path / "cut", None, overrides(tiny_model), lambda note: None)

    def plain(result: dict[str, object]) -> str:
        return json.dumps(result).replace(str(tmp_path / "cut"), str(tmp_path / "whole"))

    assert plain(again) == plain(whole)
    for name in ("sft/metrics.jsonl", "sft/adapter/adapter_model.safetensors"):
        left, right = (tmp_path / run / name for run in ("whole", "cut"))
        assert left.read_bytes() == right.read_bytes(), name


def test_a_misspelt_setting_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sft\.learning_rate is not a setting"):
        run_speedrun(tmp_path, None, ["sft.learning_rate=1"], lambda note: None)


def test_an_adapter_for_another_base_is_one_line(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_speedrun(tmp_path / "run", None, overrides(tiny_model), lambda note: None)
    other = make_tiny_model(tmp_path / "other", seed=1)
    adapter = tmp_path / "run" / "sft" / "adapter"
    tasks = tmp_path / "run" / "tasks-heldout.jsonl"
    model = ["--model", f"hf:{other}+{adapter}"]
    command = ["eval", *model, "--tasks", str(tasks), "--out", str(tmp_path / "eval")]
    done = subprocess.run(
        [sys.executable, "-m", "coa", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert (
        done.stderr.count("\n") == 1
        and "the adapter was trained on a base with hash" in done.stderr
    )
