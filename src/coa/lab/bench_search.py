"""`coa bench search`: queries per second and recall, ours beside SQLite FTS5 and bm25s.

The passages are those of the Atlas of several worlds, so nothing is downloaded. A query is made
from one passage and should find it again: its rarest words, or half of all its words. Every engine
gets the same passages and queries, one query at a time, ten hits wanted, stop words left out, words
stemmed; one engine works at a time. A peer that cannot run is reported with its reason.
"""

from __future__ import annotations

import random
import re
import sqlite3
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from itertools import count
from pathlib import Path

from coa.corpus.index import STOP_WORDS, SearchIndex
from coa.corpus.page import Passage
from coa.environments.atlas.pages import atlas_passages
from coa.io.runs import Json
from coa.lab import peer_bm25s as bm25s_search
from coa.lab.bench import Note, Peers, beside, missing_lines, over, peer_python, run_script

PASSAGES, QUERIES, HITS = 50_000, 600, 10
BM25S_PYTHON = ".cache/search/bin/python"
_WARM_UP = 20
_RARE_WORDS, _KEPT = 4, 0.5
_TITLE_WEIGHT = 2.0


@dataclass(frozen=True, slots=True)
class SearchWork:
    """What every engine is asked to do."""

    passages: Sequence[Passage]
    queries: Sequence[str]
    wanted: Sequence[int]
    """For each query the number of the passage it was made from."""
    kinds: Sequence[str]


@dataclass(frozen=True, slots=True)
class Searched:
    """What an engine did: hits are numbers of passages, best first."""

    build_s: float
    seconds: list[float]
    hits: list[list[int]]
    version: str


Searcher = Callable[[SearchWork], Searched]


def bench_search(
    note: Note = lambda line: None,
    *,
    passages: int = PASSAGES,
    queries: int = QUERIES,
    peers: Mapping[str, Searcher] | None = None,
) -> Json:
    """Queries per second of every engine, ours over each peer, with delays and recall."""
    work = make_work(passages, queries)
    found: dict[str, Searched] = {}
    measured = Peers(note)
    for name, searcher in {"ours": search_ours, **(PEERS if peers is None else peers)}.items():
        if searched := measured.attempt(name, partial(searcher, work)):
            found[name] = searched
            note(f"{name}: {_speed(searched):.0f} queries/s")
    speeds = {name: _speed(each) for name, each in found.items()}
    return {
        **{name: round(speed, 1) for name, speed in speeds.items()},
        "unit": "queries/s",
        "ratio": over(speeds),
        "p95_ms": {name: round(1e3 * _p95(each.seconds), 2) for name, each in found.items()},
        "recall": {name: _recall(work, each) for name, each in found.items()},
        "build_s": {name: round(each.build_s, 1) for name, each in found.items()},
        "passages": len(work.passages),
        "queries": len(work.queries),
        "missing": measured.missing,
        "versions": {name: each.version for name, each in found.items()},
    }


def _speed(searched: Searched) -> float:
    return len(searched.seconds) / sum(searched.seconds)


def _p95(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=20)[-1]


def _recall(work: SearchWork, searched: Searched) -> dict[str, float]:
    """Share of the queries that find their passage, or one with the same text, among the first."""
    shares = {}
    for kind in dict.fromkeys(work.kinds):
        rows = [n for n, each in enumerate(work.kinds) if each == kind]
        for k in (1, HITS):
            texts = [[work.passages[hit].text for hit in searched.hits[n][:k]] for n in rows]
            right = sum(
                work.passages[work.wanted[n]].text in held
                for n, held in zip(rows, texts, strict=True)
            )
            shares[f"{kind} @{k}"] = round(right / len(rows), 4)
    return shares


def make_work(passages: int, queries: int) -> SearchWork:
    """The first so many passages of the worlds 0, 1, 2 ..., and queries about some of them."""
    held: list[Passage] = []
    for world in count():
        held += atlas_passages(world)
        if len(held) >= passages:
            break
    held = [replace(each, url=f"{each.url}#{n}") for n, each in enumerate(held[:passages])]
    words = [_words(f"{each.title} {each.text}") for each in held]
    frequency = Counter(word for each in words for word in set(each))
    chance = random.Random(f"search {passages} {queries}")
    wanted = chance.sample(range(len(held)), queries)
    made, kinds = [], []
    for n, number in enumerate(wanted):
        telling = [word for word in dict.fromkeys(words[number]) if word not in STOP_WORDS]
        if n % 2:
            kept = [word for word in telling if chance.random() < _KEPT] or telling
            kinds.append("half the words")
        else:
            rarest = sorted(telling, key=lambda word: (frequency[word], word))[:_RARE_WORDS]
            kept = [word for word in telling if word in rarest]
            kinds.append("rare words")
        made.append(" ".join(kept))
    return SearchWork(held, made, wanted, kinds)


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _timed(
    queries: Sequence[str], search: Callable[[str], list[int]]
) -> tuple[list[float], list[list[int]]]:
    for query in queries[:_WARM_UP]:
        search(query)
    seconds, hits = [], []
    for query in queries:
        started = time.perf_counter()
        hits.append(search(query))
        seconds.append(time.perf_counter() - started)
    return seconds, hits


def search_ours(work: SearchWork) -> Searched:
    """tantivy, from a directory as a corpus has it."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        index = SearchIndex.build(
            work.passages, Path(folder), len(work.passages), titles_are_names=True
        )
        build_s = time.perf_counter() - started

        def search(query: str) -> list[int]:
            return [int(hit.url.rpartition("#")[2]) for hit in index.search(query, HITS)]

        seconds, hits = _timed(work.queries, search)
    return Searched(build_s, seconds, hits, f"tantivy {metadata.version('tantivy')}")


def search_fts5(work: SearchWork) -> Searched:
    """SQLite's own index in memory, its segments merged, any of the words, ranked by BM25."""
    connection = sqlite3.connect(":memory:")
    started = time.perf_counter()
    connection.execute(
        "CREATE VIRTUAL TABLE passage USING fts5"
        "(title, text, tokenize = 'porter unicode61 remove_diacritics 2')"
    )
    rows = ((n, each.title, each.text) for n, each in enumerate(work.passages))
    connection.executemany("INSERT INTO passage (rowid, title, text) VALUES (?, ?, ?)", rows)
    connection.execute("INSERT INTO passage (passage) VALUES ('optimize')")
    rank = f"bm25({_TITLE_WEIGHT}, 1.0)"
    connection.execute("INSERT INTO passage (passage, rank) VALUES ('rank', ?)", (rank,))
    connection.commit()
    build_s = time.perf_counter() - started
    query = (
        f"SELECT rowid, title, text FROM passage WHERE passage MATCH ? ORDER BY rank LIMIT {HITS}"
    )

    def search(text: str) -> list[int]:
        any_word = " OR ".join(f'"{word}"' for word in text.split() if word not in STOP_WORDS)
        return [row[0] for row in connection.execute(query, (any_word,))]

    seconds, hits = _timed(work.queries, search)
    connection.close()
    return Searched(build_s, seconds, hits, f"SQLite {sqlite3.sqlite_version}")


def search_bm25s(work: SearchWork) -> Searched:
    """bm25s in a process of its own, from an environment of its own (COA_BM25S is its Python)."""
    python = peer_python("COA_BM25S", BM25S_PYTHON, "bm25s")
    asked = {
        "texts": [f"{each.title} {each.text}" for each in work.passages],
        "queries": list(work.queries),
        "hits": HITS,
        "warm_up": _WARM_UP,
    }
    done, _ = run_script([python, "-I", bm25s_search.__file__], asked)
    return Searched(**done)


PEERS: Mapping[str, Searcher] = {"fts5": search_fts5, "bm25s": search_bm25s}


def search_lines(result: Json) -> Iterator[str]:
    """The result as a small table."""
    for name in result["recall"]:
        ratio, delay = beside(result["ratio"].get(name)), f"p95 {result['p95_ms'][name]:.2f} ms"
        yield f"{name:<28} {result[name]:>10.1f} {result['unit']}   {delay}{ratio}"
    for name, shares in result["recall"].items():
        yield f"{name} finds " + ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items())
    yield from missing_lines(result)
    built = ", ".join(f"{name} {seconds} s" for name, seconds in result["build_s"].items())
    yield f"{result['passages']} passages, {result['queries']} queries; built in {built}"
    yield "; ".join(result["versions"].values())
