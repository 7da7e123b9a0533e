"""The shape of what `coa bench` measures; never the figures themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from coa.errors import EngineError, UsageError
from coa.lab.bench import bench_parse, run_bench
from coa.lab.bench_busy import BESIDE, BusyJob, bench_busy, busy_lines
from coa.lab.bench_rollout import (
    Lengths,
    PlayedRollout,
    RolloutWork,
    Texts,
    bench_rollout,
    cost,
    play_generate,
    play_ours,
    play_vllm,
    rollout_lines,
)
from coa.models.codec import Codec

SHORT = Lengths(prompt=120, sampled=5, observation=20, turns=3)


def test_the_parse_bench_has_one_number_per_peer_and_its_ratio() -> None:
    result = bench_parse(megabytes=0.05)
    peers = set(result) - {"ours", "unit", "ratio"}
    assert {"regex", "html.parser"} <= peers == set(result["ratio"])
    assert result["unit"] == "MB/s"
    assert all(result[name] > 0 for name in ("ours", *peers))


def test_an_unknown_measurement_is_named() -> None:
    with pytest.raises(UsageError, match=r"'parser' is not a measurement\. Did you mean 'parse'"):
        run_bench("parser")


@pytest.mark.parametrize("counts", ["", "many", "32,", "0,8"])
def test_numbers_of_rollouts_are_numbers(counts: str) -> None:
    with pytest.raises(UsageError, match=r"expected numbers joined by commas, as 32,64\."):
        run_bench("rollout", counts)


def test_the_work_has_the_same_lengths_and_different_texts_for_all(tiny_model: Path) -> None:
    texts = Texts(Codec.from_folder(tiny_model))
    works = [texts.work(4, SHORT), texts.work(4, SHORT)]
    prompts = [ids for work in works for ids in work.prompts]
    seen = [ids for work in works for rollout in work.observations for ids in rollout]
    assert {len(ids) for ids in prompts} == {120} and {len(ids) for ids in seen} == {20}
    assert len({tuple(ids) for ids in prompts}) == 8 and len({tuple(ids) for ids in seen}) == 16
    assert works[0].tokens == 4 * 3 * 5 and SHORT.total == 120 + 3 * 5 + 2 * 20
    assert Texts(Codec.from_folder(tiny_model)).work(4, SHORT) == works[0]


def test_ours_and_generate_sample_every_token_of_the_work(tiny_model: Path) -> None:
    texts = Texts(Codec.from_folder(tiny_model))
    works = [texts.work(3, SHORT), texts.work(2, SHORT)]
    for play in (play_ours, play_generate):
        done = list(play(f"hf:{tiny_model}", "float32", works))
        assert [each.tokens for each in done] == [45, 30]
        assert all(each.seconds > 0 and each.version for each in done)


def test_the_rollout_bench_has_a_speed_for_each_engine_and_a_reason_for_each_that_failed(
    tiny_model: Path,
) -> None:
    def broken(model: str, dtype: str, works: Sequence[RolloutWork]) -> Iterator[PlayedRollout]:
        raise RuntimeError("no such instruction")

    def lazy(model: str, dtype: str, works: Sequence[RolloutWork]) -> Iterator[PlayedRollout]:
        yield PlayedRollout(1.0, 1, "9")

    said: list[str] = []
    result = bench_rollout(
        (2, 3),
        said.append,
        model=f"hf:{tiny_model}",
        lengths=SHORT,
        peers={"broken": broken, "generate": play_generate, "lazy": lazy},
        runs=1,
    )
    assert result["speed"].keys() == result["ratio"].keys() == {"2", "3"}
    for n, speeds in result["speed"].items():
        assert speeds.keys() == {"ours", "generate"} and min(speeds.values()) > 0
        assert result["ratio"][n].keys() == {"generate"}
        assert 0 <= result["peak"]["rollouts"][n]["of_peak_flops"] < 1
    assert result["missing"] == {
        "broken": "no such instruction",
        "lazy": "sampled 1 tokens, expected 32.",
    }
    table = "\n".join(rollout_lines(result))
    assert "generate, 3 rollouts" in table and "broken is not measured: no such" in table
    assert said.count("broken is not measured: no such instruction") == 1


def test_a_missing_or_failing_vllm_says_why(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [Texts(Codec.from_folder(tiny_model)).work(1, SHORT)]
    monkeypatch.setenv("COA_VLLM", str(tmp_path / "python"))
    with pytest.raises(ConnectionError, match="set COA_VLLM to a Python that has vLLM"):
        list(play_vllm(f"hf:{tiny_model}", "float32", works))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncat > /dev/null\necho 'no vllm here' >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match="ended with code 3: no vllm here"):
        list(play_vllm(f"hf:{tiny_model}", "float32", works))


def test_the_least_cost_counts_every_computed_token_once() -> None:
    config = {
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 10,
    }
    layer, output = 2 * 4 * 8 + 3 * 4 * 8, 40
    work = RolloutWork([[1, 2, 3]], [[]], Lengths(prompt=3, sampled=2, turns=1))
    least = cost(work, config, bytes_each=2)
    assert least.prefill_flops == 3 * 2 * layer + 4 * 4 * (1 + 2 + 3) + 2 * output
    assert least.decode_flops == 2 * (layer + output) + 4 * 4 * 4
    assert least.decode_bytes == 2 * (layer + output + 2 * 4 * 4)
    assert least.seconds(flops=1.0, bandwidth=1e9) == least.prefill_flops + least.decode_flops


@pytest.mark.parametrize("job", ["ask", pytest.param("sft", marks=pytest.mark.slow)])
def test_the_busy_bench_has_a_speed_beside_each_and_its_share(tiny_model: Path, job: str) -> None:
    result = bench_busy(jobs=[job], model=f"hf:{tiny_model}", seconds=1.0, rounds=1)
    found = result["jobs"][job]
    assert tuple(found) == BESIDE and found["alone"]["share"] == 1.0
    assert all(each["speed"] > 0 and len(each["runs"]) == 1 for each in found.values())
    assert len(list(busy_lines(result))) == 3


def test_a_job_of_the_busy_bench_that_ends_says_why() -> None:
    with pytest.raises(EngineError, match=r"a job of the bench ended: .*no-such-model"):
        BusyJob("ask", "no-such-model").__enter__()
