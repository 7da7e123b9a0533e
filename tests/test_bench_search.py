"""The shape of what `coa bench search` measures; never the figures themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coa.lab.bench_search import (
    Searched,
    SearchWork,
    bench_search,
    make_work,
    search_bm25s,
    search_fts5,
    search_lines,
    search_ours,
)


def test_the_work_is_the_same_every_time_and_asks_for_its_own_passages() -> None:
    work = make_work(16_000, 40)
    again = make_work(16_000, 40)
    assert (work.queries, work.wanted, work.kinds) == (again.queries, again.wanted, again.kinds)
    assert len(work.passages) == 16_000 and len({each.url for each in work.passages}) == 16_000
    assert {*work.kinds} == {"rare words", "half the words"}
    for query, number in zip(work.queries, work.wanted, strict=True):
        passage = work.passages[number]
        assert query and all(
            word in f"{passage.title} {passage.text}".lower() for word in query.split()
        )


def test_ours_and_fts5_find_what_they_are_asked_for() -> None:
    work = make_work(2_000, 40)
    for search in (search_ours, search_fts5):
        done = search(work)
        assert len(done.seconds) == len(done.hits) == 40 and done.version
        right = [number in hits for number, hits in zip(work.wanted, done.hits, strict=True)]
        assert sum(right) > 30 and all(len(hits) <= 10 for hits in done.hits)


def test_the_search_bench_has_one_number_per_peer_and_a_reason_for_each_that_failed() -> None:
    def broken(work: SearchWork) -> Searched:
        raise RuntimeError("no such instruction")

    said: list[str] = []
    peers = {"fts5": search_fts5, "broken": broken}
    result = bench_search(said.append, passages=1_000, queries=40, peers=peers)
    assert result["unit"] == "queries/s" and result["ratio"].keys() == {"fts5"}
    assert min(result["ours"], result["fts5"]) > 0
    assert result["missing"] == {"broken": "no such instruction"}
    for figures in ("p95_ms", "recall", "build_s", "versions"):
        assert result[figures].keys() == {"ours", "fts5"}
    assert result["recall"]["ours"].keys() == {
        *("rare words @1", "rare words @10", "half the words @1", "half the words @10"),
    }
    assert json.loads(json.dumps(result)) == result
    table = "\n".join(search_lines(result))
    assert "ours / peer" in table and "broken is not measured: no such instruction" in table
    assert "broken is not measured: no such instruction" in said


def test_a_missing_or_failing_bm25s_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = make_work(100, 4)
    python = tmp_path / "python"
    monkeypatch.setenv("COA_BM25S", str(python))
    with pytest.raises(ConnectionError, match="set COA_BM25S to a Python that has bm25s"):
        search_bm25s(work)
    python.write_text("#!/bin/sh\ncat > /dev/null\necho 'no bm25s here' >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match="ended with code 3: no bm25s here"):
        search_bm25s(work)
