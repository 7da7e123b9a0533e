"""collect(): what a growing file holds is continued, and nothing in it is lost without a word."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from coa.errors import RecordError
from coa.io.collect import Line, collect
from coa.io.runs import Json, dumps


def made(name: str, seed: int = 0, failed: bool = False) -> Json:
    return {"key": name, "seed": seed, "failed": failed}


def holding(path: Path, *records: Json) -> bytes:
    path.write_text("".join(dumps(record) + "\n" for record in records))
    return path.read_bytes()


async def collected(path: Path, names: str) -> list[Json]:
    def work(name: str) -> Callable[[], Awaitable[Line]]:
        async def do() -> Line:
            return Line(made(name, seed=9))

        return do

    lines = await collect(
        path,
        {name: work(name) for name in names},
        parse=Line,
        key=lambda line: str(line.record["key"]),
        redo=lambda line: bool(line.record["failed"]),
    )
    assert path.read_text() == "".join(dumps(line.record) + "\n" for line in lines)
    return [line.record for line in lines]


async def test_what_is_there_is_kept_and_the_rest_is_done(tmp_path: Path) -> None:
    holding(tmp_path / "a.jsonl", made("b"), made("a", failed=True))
    assert await collected(tmp_path / "a.jsonl", "abc") == [made("a", 9), made("b"), made("c", 9)]


async def test_two_records_of_one_key_are_named_and_both_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    before = holding(path, *(made(name, seed) for seed in (0, 1) for name in "ab"))
    said = f"{path}: holds two different records of 'a', and only one would be kept. Write some"
    with pytest.raises(RecordError, match=re.escape(said)):
        await collected(path, "abc")
    assert path.read_bytes() == before


async def test_a_record_that_stands_there_twice_is_kept_once(tmp_path: Path) -> None:
    holding(tmp_path / "a.jsonl", made("a"), made("b"), made("a"))
    assert await collected(tmp_path / "a.jsonl", "ab") == [made("a"), made("b")]


async def test_of_records_that_are_made_again_any_number_may_be_there(tmp_path: Path) -> None:
    holding(tmp_path / "a.jsonl", made("a", 1, True), made("a", 2, True), made("a", 3))
    assert await collected(tmp_path / "a.jsonl", "a") == [made("a", 3)]
