"""Whole studies on a tiny random model: every arm runs, is kept, and continues after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from coa.errors import UsageError
from coa.lab.studies import run_study, study_lines

pytestmark = pytest.mark.slow
SEEDS = (0, 1)


def settings(name: str, model: Path) -> list[str]:
    shared = [
        f"seeds={list(SEEDS)}",
        f"sft.model=hf:{model}",
        "sft.rank=4",
        "sft.batch_size=2",
        "sft.max_length=512",
        "sft.checkpoint_every=1",
        "sft.deterministic=true",
        "sft.threads=1",
        "chains.rows=6",
        "chains.worlds=[0]",
        "eval.n=4",
        "eval.turns=2",
        "eval.turn_tokens=8",
        "eval.context=4096",
        "eval.concurrency=4",
        "eval.deterministic=true",
    ]
    return (
        shared
        + {
            "mask": ["unstopped_tokens=8"],
            "react": ["budgets=[120, 4096]"],
            "rl": [
                "more=8",
                "rl.passes=24",  # more tokens than all chains have: the control begins again
                "reward.expression=rl_worker:vowels",
                "rl.updates=2",
                "rl.tasks_per_update=1",
                "rl.minibatches=1",
                "rl.group_size=3",
                "rl.deterministic=true",
                "rl.threads=1",
                "rollout.temperature=1",
                "rollout.turns=1",
                "rollout.turn_tokens=8",
                "rollout.tokens=8",
                "rollout.context=4096",
                "rollout.concurrency=4",
            ],
        }[name]
    )


def study(name: str, model: Path, out: Path) -> Any:
    return run_study(name, out, settings(name, model), lambda line: None)


@pytest.mark.parametrize("name", ["mask", "react", "rl"])
def test_every_arm_runs_and_a_second_call_trains_nothing(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    first = study(name, tiny_model, tmp_path / name)
    held = first["measures"]["held out"]
    assert held["seeds"] == list(SEEDS) and all(arm["n"] == 4 for arm in held["arms"].values())
    for arm in held["arms"].values():
        assert len(arm["by_seed"]) == len(SEEDS)
    assert next(iter(study_lines(first))).startswith(f"{name}: ")
    assert json.loads((tmp_path / name / f"{name}.json").read_text()) == first
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert len(before) >= 2 * len(SEEDS)
    assert study(name, tiny_model, tmp_path / name) == first
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    # Seeds that were run elsewhere are files to copy.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for seed in SEEDS:
        shutil.copy(tmp_path / name / f"seed-{seed}.json", elsewhere)
    assert study(name, tiny_model, elsewhere) == first
    assert not [*elsewhere.rglob("*.safetensors")]
    for asked, renamed, said in (
        ([*settings(name, tiny_model), "sft.lr=0.5"], 0, r"seed-0\.json: it has another settings"),
        (settings(name, tiny_model), 1, r"seed-0\.json: it has another seed than this study"),
    ):
        foreign = tmp_path / f"foreign-{renamed}"
        foreign.mkdir()
        shutil.copy(tmp_path / name / f"seed-{renamed}.json", foreign / "seed-0.json")
        with pytest.raises(UsageError, match=said):
            run_study(name, foreign, asked, lambda line: None)


def test_arms_have_in_common_what_the_study_says(tiny_model: Path, tmp_path: Path) -> None:
    mask = study("mask", tiny_model, tmp_path / "mask")["equal"]
    for masked, unmasked in zip(mask["masked"], mask["trained on"], strict=True):
        same = ("rows", "tokens", "updates")
        assert [masked[key] for key in same] == [unmasked[key] for key in same]
        assert masked["trained_tokens"] < unmasked["trained_tokens"]
    rl = study("rl", tiny_model, tmp_path / "rl")
    for start, more in zip(rl["equal"]["SFT + RL"], rl["equal"]["SFT + SFT"], strict=True):
        assert start["updates"] == 2 and start["tokens"] > 0
        assert more["rows"] > 8  # all further chains, and some of them again
        assert abs(more["tokens"] - start["tokens"]) <= 512  # a whole chain is the least
    assert list(rl["against_control"]["held out"]["differences"]) == ["SFT + RL"]


def test_right_attempts_are_sampled_from_as_many_tokens_as_rl_had(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that knows no grammar makes no attempt that could be imitated: the arm is the start.
    Where its noise may be imitated the arm is trained, within the tokens that RL sampled."""
    import coa.train.improve as stage

    spoken = study("rl", tiny_model, tmp_path / "strict")
    held = spoken["measures"]["held out"]
    assert held["arms"]["SFT + improve"] == held["arms"]["SFT"]
    assert [each["rows"] for each in spoken["equal"]["SFT + improve"]] == [0, 0]
    monkeypatch.setattr(stage, "not_to_imitate", lambda trajectory, settings: "")
    more = ["improve.right=0.01", "improve.rounds=2", "improve.min_tool_calls=0"]
    asked = [*settings("rl", tiny_model), *more, "rl.group_size=4", "rl.tasks_per_update=4"]
    loose = run_study("rl", tmp_path / "loose", asked, lambda line: None)
    for rl, improve in zip(
        loose["equal"]["SFT + RL"], loose["equal"]["SFT + improve"], strict=True
    ):
        assert 0 < improve["sampled_tokens"] <= rl["sampled_tokens"]
        assert rl["sampled_tokens"] - improve["sampled_tokens"] <= 2 * 4 * 8  # a task of a round
        assert improve["rows"] > 0 and improve["updates"] > 0
    assert list(loose["against_improve"]["held out"]["differences"]) == ["SFT + RL"]
    told = "\n".join(study_lines(loose))
    assert "SFT + RL vs SFT + improve" in told and " sampled" in told


def test_killed_again_and_again_it_ends_with_the_same_result(
    tiny_model: Path, tmp_path: Path
) -> None:
    whole = study("mask", tiny_model, tmp_path / "whole" / "mask")
    command = [sys.executable, "-m", "coa", "study", "mask", "--out", str(tmp_path / "cut")]
    marks = ("chains-0/distilled-mhqa/README.md", "seed-0/masked/eval-held-out/trajectories.jsonl")
    for mark in (*marks, "seed-0/trained-on/sft/metrics.jsonl"):
        child = subprocess.Popen(
            [*command, *settings("mask", tiny_model)],
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 600
        while not (tmp_path / "cut" / "mask" / mark).is_file():
            assert child.poll() is None and time.monotonic() < deadline, mark
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert study("mask", tiny_model, tmp_path / "cut" / "mask") == whole
