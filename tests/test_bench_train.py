"""What `coa bench sft` and `coa bench rl` measure and refuse; never the figures themselves."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coa.errors import ConfigError, EngineError, UsageError
from coa.lab import bench_train as train_players
from coa.lab.bench import run_bench
from coa.lab.bench_train import (
    TARGETS,
    UNTRAINED,
    RlSetup,
    SftSetup,
    TrainedBench,
    TrainWork,
    bench_rl,
    bench_sft,
    distilled_rows,
    rl_work,
    sft_work,
    train_lines,
    train_ours,
    train_trl,
)
from coa.models.codec import Codec
from coa.tasks import Task
from coa.trajectory import Author, Segment

ROOT = Path(__file__).resolve().parent.parent
PEERS = Path(os.environ.get("COA_TEST_PEERS") or ROOT / ".cache" / "peers")


@pytest.fixture(scope="module")
def sft_setup(tiny_model: Path) -> SftSetup:
    return SftSetup(
        model=f"hf:{tiny_model}", dtype="float32", threads=1, runs=1, rows=6, batch_size=2
    )


@pytest.fixture(scope="module")
def rl_setup(tiny_model: Path) -> RlSetup:
    return RlSetup(
        model=f"hf:{tiny_model}",
        dtype="float32",
        threads=1,
        runs=1,
        tasks=2,
        group_size=3,
        tokens=12,
    )


@pytest.fixture
def no_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where TRL's Python would be."""
    monkeypatch.setenv("COA_PEERS", str(tmp_path / "python"))
    yield tmp_path / "python"


def write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def done_as_asked(work: TrainWork, **changes: object) -> TrainedBench:
    """What a trainer says that did it all, a second an update."""
    n = len(work.tokens)
    done = TrainedBench([1.0] * n, work.tokens, "one 1", 1.5, [2.0] * n, rollout_s=[0.25] * n)
    return dataclasses.replace(done, **changes)  # type: ignore[arg-type]


def test_the_rows_are_distilled_chains_with_a_label_for_every_trained_token(
    sft_setup: SftSetup, tiny_model: Path
) -> None:
    work = sft_work(sft_setup)
    rows, order = work.asked["rows"], work.asked["order"]
    assert sorted(order) == list(range(6))
    for row, made in zip(rows, distilled_rows(Codec.from_folder(tiny_model), 6), strict=True):
        assert row["input_ids"] == made.ids
        assert sum(label != UNTRAINED for label in row["labels"]) == made.trained > 0
        pairs = zip(row["input_ids"], row["labels"], strict=True)
        assert all(label in (UNTRAINED, token) for token, label in pairs)
    lengths = [len(rows[at]["input_ids"]) for at in order]
    assert work.tokens == [sum(lengths[at : at + 2]) for at in (0, 2, 4)]
    assert sft_work(sft_setup) == work


def test_the_rl_work_holds_the_prompt_that_our_rollouts_begin_with(rl_setup: RlSetup) -> None:
    from coa.engines.scripted import ScriptedEngine
    from coa.environment import load_environment

    work = rl_work(rl_setup)
    task = Task.from_json(work.asked["tasks"][0])

    async def opening() -> Segment:
        async with (
            load_environment("atlas-mhqa", grammar="mhqa").open() as opened,
            opened.rollout(task, ScriptedEngine([])) as rollout,
        ):
            return rollout.trajectory.segments[0]

    begun = asyncio.run(opening())
    assert begun.author is Author.PROMPT
    assert begun.text == work.asked["system"]
    assert rl_setup.sampled == 2 * 3 * 12 < work.tokens[0] == work.tokens[1]


def test_adapters_are_on_the_modules_that_our_policy_trains() -> None:
    from coa.train import forward as plain

    assert list(TARGETS) == plain.TARGETS


def test_ours_trains_on_every_token_of_the_sft_work(sft_setup: SftSetup) -> None:
    work = sft_work(sft_setup)
    done = train_ours(work)
    assert done.tokens == work.tokens
    assert len(done.seconds) == len(done.loss) == 3 and min(done.seconds) > 0
    assert 0 < done.memory_gb < 8 and done.version.startswith("coa ")


@pytest.mark.slow
def test_ours_samples_and_trains_on_every_token_of_the_rl_work(rl_setup: RlSetup) -> None:
    work = rl_work(rl_setup)
    done = train_ours(work)
    assert done.tokens == work.tokens
    assert len(done.seconds) == len(done.reward) == 2
    assert all(0 < r < s for r, s in zip(done.rollout_s, done.seconds, strict=True))


def test_the_result_has_medians_of_runs_that_took_turns(sft_setup: SftSetup) -> None:
    turns: list[str] = []
    paces = {"ours": iter([1.0, 4.0, 2.0]), "slow": iter([6.0, 5.0, 8.0])}

    def trainer(name: str) -> train_players.Trainer:
        def train(work: TrainWork) -> TrainedBench:
            turns.append(name)
            pace = next(paces[name])
            first = 100.0  # it only warms up
            return done_as_asked(work, seconds=[first, pace, pace], memory_gb=pace)

        return train

    said: list[str] = []
    setup = dataclasses.replace(sft_setup, runs=3)
    trainers = {name: trainer(name) for name in paces}
    result = bench_sft(setup, said.append, trainers=trainers)
    measured = sum(result["tokens"][1:])
    assert turns == ["ours", "slow"] * 3
    assert result["ours"] == round(measured / 4, 1) and result["slow"] == round(measured / 12, 1)
    assert result["ratio"] == {"slow": 3.0} and result["memory_ratio"] == {"slow": 0.33}
    assert result["memory_gb"] == {"ours": 2.0, "slow": 6.0}
    assert [len(runs) for runs in result["runs"].values()] == [3, 3] and len(said) == 6
    assert [run["memory_gb"] for run in result["runs"]["slow"]] == [6.0, 5.0, 8.0]
    assert result["runs"]["ours"][1]["seconds"] == [100.0, 4.0, 4.0]
    assert result["unit"] == "tokens/s" and json.dumps(result)
    table = "\n".join(train_lines(result))
    assert "ours / peer 3.00" in table and "ours / peer 0.33" in table


def test_the_rl_result_says_how_long_sampling_and_training_took(rl_setup: RlSetup) -> None:
    result = bench_rl(rl_setup, trainers={"ours": done_as_asked, "peer": done_as_asked})
    assert result["unit"] == "updates/hour" and result["ours"] == 3600.0
    assert result["phases"]["peer"] == {"rollout_s": 0.25, "train_s": 0.75}
    assert result["sampled"] == rl_setup.sampled
    assert "peer: 0.25 s of an update sample, 0.75 s train" in list(train_lines(result))


def test_a_peer_that_does_other_work_or_fails_is_named_with_its_reason(
    sft_setup: SftSetup,
) -> None:
    def lazy(work: TrainWork) -> TrainedBench:
        return done_as_asked(work, tokens=[1, 1, 1])

    def other(work: TrainWork) -> TrainedBench:
        return done_as_asked(work, loss=[2.1, 2.0, 2.0])

    def broken(work: TrainWork) -> TrainedBench:
        raise RuntimeError("no such instruction")

    said: list[str] = []
    trainers = {"ours": done_as_asked, "lazy": lazy, "other": other, "broken": broken}
    setup = dataclasses.replace(sft_setup, runs=2)
    result = bench_sft(setup, said.append, trainers=trainers)
    assert result["runs"].keys() == {"ours"} and result["ratio"] == {}
    assert result["missing"]["lazy"].startswith("trained on [1, 1, 1] tokens, expected [")
    assert "its first loss is 2.1000 and ours 2.0000" in result["missing"]["other"]
    assert result["missing"]["broken"] == "no such instruction"
    assert said.count("broken is not measured: no such instruction") == 1
    assert "broken is not measured: no such instruction" in list(train_lines(result))


def test_our_own_failure_is_not_hidden(sft_setup: SftSetup) -> None:
    def lazy(work: TrainWork) -> TrainedBench:
        return done_as_asked(work, tokens=[0])

    with pytest.raises(EngineError, match=r"trained on \[0\] tokens, expected \["):
        bench_sft(sft_setup, trainers={"ours": lazy})


def test_a_missing_trl_says_how_to_get_it(no_peers: Path, sft_setup: SftSetup) -> None:
    with pytest.raises(ConnectionError, match=r"sh dev/peers\.sh .*set COA_PEERS to a Python"):
        train_trl(sft_work(sft_setup))


@pytest.mark.parametrize("first", ["cat > /dev/null", "exec 0<&-"])
def test_a_trl_that_fails_says_why(no_peers: Path, sft_setup: SftSetup, first: str) -> None:
    write_script(no_peers, f"{first}\necho 'no trl here' >&2\nexit 3")
    with pytest.raises(RuntimeError, match="ended with code 3: no trl here"):
        train_trl(sft_work(sft_setup))


def test_the_peak_of_memory_is_that_of_the_process(no_peers: Path, sft_setup: SftSetup) -> None:
    said = json.dumps({"seconds": [1.0], "tokens": [1], "version": "x"})
    size = 1 << 30
    program = no_peers.with_name("held.py")
    program.write_text(f"held = b'x' * {size}\nprint({said!r})\n")
    write_script(no_peers, f'cat > /dev/null\nexec {sys.executable} "{program}"')
    assert train_trl(sft_work(sft_setup)).memory_gb > size / 1e9


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rows=9"], "rows: found 9, expected a multiple of batch_size 8, at least twice"),
        (["rows=8"], "rows: found 8, expected a multiple of batch_size 8, at least twice"),
        (["threads=0"], "threads: found 0, expected at least 1"),
        (["dtype=int4"], "dtype: found 'int4', expected auto, bfloat16 or float32"),
        (["peers=['tlr']"], "peers: 'tlr' is none. Did you mean 'trl'?"),
        (["row=8"], "row is not a setting. Did you mean 'rows'?"),
    ],
)
def test_settings_that_make_no_sense_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        run_bench("sft", overrides=overrides)
    assert message in str(wrong.value)


@pytest.mark.parametrize("override", ["tasks=0", "group_size=1", "tokens=0", "updates=1"])
def test_rl_settings_have_least_values(override: str) -> None:
    with pytest.raises(ConfigError, match="expected at least"):
        run_bench("rl", overrides=[override])


def test_other_measurements_have_no_settings() -> None:
    with pytest.raises(UsageError, match="bench parse has no settings, found 'rows=8'"):
        run_bench("parse", overrides=["rows=8"])


@pytest.mark.slow
def test_trl_does_the_same_work_and_has_the_same_first_loss(
    sft_setup: SftSetup, rl_setup: RlSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = PEERS / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"no trainers in {PEERS}: make test-peers")
    monkeypatch.setenv("COA_PEERS", str(python))
    fine_tuned = bench_sft(sft_setup)
    assert fine_tuned["missing"] == {} and fine_tuned["versions"]["trl"].startswith("TRL ")
    ours, trl = (fine_tuned["runs"][name][0]["loss"][0] for name in ("ours", "trl"))
    assert trl == pytest.approx(ours, abs=2e-4)
    improved = bench_rl(rl_setup)
    assert improved["missing"] == {} and improved["ratio"].keys() == {"trl"}
