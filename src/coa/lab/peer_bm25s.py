"""The work of `coa bench search` done by bm25s. Runs as a script inside an environment of its own.

On stdin one JSON object: texts, queries, hits (how many), warm_up (queries). On stdout one JSON
object: build_s, seconds and hits of each query, version. It imports nothing of ours, because that
environment does not have it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from typing import Any


def main() -> None:
    # Libraries may write to stdout as well; the result gets a copy of it to itself.
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    bm25s, stemming = import_module("bm25s"), import_module("Stemmer")
    stemmer = stemming.Stemmer("english")

    def tokens(texts: list[str], **more: Any) -> Any:
        return bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, show_progress=False, **more)

    started = time.perf_counter()
    index = bm25s.BM25(backend="numba")
    index.index(tokens(asked["texts"]), show_progress=False)
    build_s = time.perf_counter() - started

    def search(query: str) -> list[int]:
        # Words that no text holds would be unknown to the index.
        words = tokens([query], return_ids=False)
        if not words[0]:
            return []
        found = index.retrieve(words, k=asked["hits"], show_progress=False, n_threads=1)
        return [int(number) for number in found.documents[0]]

    for query in asked["queries"][: asked["warm_up"]]:
        search(query)
    seconds, hits = [], []
    for query in asked["queries"]:
        started = time.perf_counter()
        hits.append(search(query))
        seconds.append(time.perf_counter() - started)
    done = {"build_s": build_s, "seconds": seconds, "hits": hits}
    version = f"bm25s {bm25s.__version__}"
    print(json.dumps(done | {"version": version}), file=result, flush=True)


if __name__ == "__main__":
    main()
