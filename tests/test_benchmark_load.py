"""`coa tasks load`: a task file that `coa eval` takes as it is, or one line and exit 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark_rows import LIVE, ROWS, packed, write
from coa.environments.published import BENCHMARKS, load_benchmark
from coa.tasks import TaskSet
from test_benchmark_calls import bfcl
from test_cli import Coa, coa

__all__ = ["coa"]


def test_a_good_file_becomes_a_task_file(coa: Coa, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", ROWS["hotpotqa"])
    done = coa("tasks", "load", "hotpotqa", str(rows), "--out", "tasks.jsonl")
    assert (done.code, done.out) == (0, "")
    said = "1 tasks (7405 are usually reported) in tasks.jsonl: grammar mhqa, reward squad\n"
    assert done.err == said
    assert TaskSet.load(tmp_path / "tasks.jsonl").tasks == load_benchmark("hotpotqa", rows).tasks[:]


def test_the_published_file_is_not_written_over(coa: Coa, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", ROWS["hotpotqa"])
    before = rows.read_bytes()
    done = coa("tasks", "load", "hotpotqa", "rows.jsonl", "--out", "./rows.jsonl")
    assert done.code == 2 and "rows.jsonl: is the file to read." in done.err
    assert rows.read_bytes() == before


def test_what_is_left_out_or_shortened_is_said_apart(coa: Coa, tmp_path: Path) -> None:
    with_file = ROWS["gaia"][0] | {"task_id": "d", "file_name": "table.xlsx"}
    write(tmp_path / "gaia.jsonl", [*ROWS["gaia"], with_file])
    done = coa("tasks", "load", "gaia", "gaia.jsonl", "--out", "t.jsonl", "--json")
    assert done.err == "left out 1: comes with a file\n"
    left = {"comes with a file": 1}
    assert done.record == {"tasks": 1, "left_out": left, "shortened": 0, "out": "t.jsonl"}
    long = [{"input": "1" * (5 << 20), "output": "1", "testtype": "stdin"}]
    write(tmp_path / "live.jsonl", [LIVE | {"private_test_cases": packed(long)}])
    done = coa("tasks", "load", "livecodebench-v5", "live.jsonl", "--out", "t.jsonl", "--json")
    assert done.err == "1 problems are judged without their longest tests\n"
    assert (done.record["tasks"], done.record["shortened"]) == (1, 1)


def test_families_and_n_choose(coa: Coa, tmp_path: Path) -> None:
    bfcl(tmp_path / "files"), bfcl(tmp_path / "files", "parallel")
    chosen = ("--families", "parallel, simple_python", "--n", "1")
    done = coa("tasks", "load", "bfcl", "files", "--out", "t.jsonl", *chosen)
    assert done.err == "1 tasks in t.jsonl: grammar react, reward calls\n"
    done = coa("tasks", "load", "bfcl", "files", "--out", "t.jsonl", "--families", "parallel")
    assert [task.meta["family"] for task in TaskSet.load(tmp_path / "t.jsonl")] == ["parallel"]


def test_a_benchmark_in_a_wheel_is_taken_from_the_cache(
    coa: Coa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COA_CACHE", str(tmp_path / "cache"))
    wheel = BENCHMARKS["humaneval"].wheel
    assert wheel is not None
    rows = tmp_path / "cache" / "wheels" / wheel.file.removesuffix(".whl") / wheel.member
    rows.parent.mkdir(parents=True)
    write(rows, ROWS["humaneval"])
    done = coa("tasks", "load", "humaneval", "--out", "t.jsonl")
    said = "1 tasks (164 are usually reported) in t.jsonl: grammar code, reward tests\n"
    assert (done.code, done.err) == (0, said)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("hotpot", "rows.jsonl"), "'hotpot' is not a benchmark. Did you mean 'hotpotqa'?"),
        (("xyz",), "'xyz' is not a benchmark. Known: 2wiki, aime24"),
        (("nq",), "nq: give its file; docs/benchmarks.md says where to get it."),
        (("nq", "none.jsonl"), "none.jsonl: no such file."),
        (("nq", "."), ".: is a folder, expected a file."),
        (("nq", "rows.xlsx"), "rows.xlsx: expected one of .jsonl, .json, .csv, .tsv, .parquet"),
        (("nq", "rows.jsonl"), "rows.jsonl: row 1: found the columns 'text', expected 'question'"),
        (("bfcl", "none"), "none: no file BFCL_v4_CATEGORY.json there."),
        (("bamboogle", "good.jsonl", "--n", "2"), "good.jsonl: n is 2, expected 1 to 1"),
        (("bamboogle", "good.jsonl", "--families", "x"), "good.jsonl: no task of family 'x'."),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    coa: Coa, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    (tmp_path / "rows.xlsx").write_text("")
    write(tmp_path / "good.jsonl", ROWS["bamboogle"])
    done = coa("tasks", "load", *arguments, "--out", "tasks.jsonl")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"coa: {says}") and done.err.count("\n") == 1
    assert not (tmp_path / "tasks.jsonl").exists()
