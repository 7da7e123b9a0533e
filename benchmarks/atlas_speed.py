"""Seconds for what the Atlas is asked to do: python benchmarks/atlas_speed.py"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from coa.corpus.index import SearchIndex
from coa.environments import make_tasks
from coa.environments.atlas.pages import atlas_index, atlas_passages


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return round(time.perf_counter() - begun, 2)


def recall(world: int, k: int) -> float:
    """Share of hops whose reference query finds the passage with the fact among the first k."""
    index = atlas_index(world)
    hops = [
        hop
        for task in make_tasks("atlas-mhqa", "train", 3000, 5, world_seed=world)
        for hop in task.gold["hops"]
    ]
    found = sum(
        any(hit.text == hop["passage"] for hit in index.search(hop["query"], k)) for hop in hops
    )
    return round(found / len(hops), 4)


if __name__ == "__main__":
    figures: dict[str, float] = {
        "pages_s": seconds(lambda: atlas_passages(0)),
        "index_s": seconds(lambda: SearchIndex.build(atlas_passages(0))),
        "ten_thousand_tasks_s": seconds(lambda: make_tasks("atlas-mhqa", "train", 10_000, 11)),
    }
    for world in (0, 7, 11):
        figures |= {f"recall_at_{k}_world_{world}": recall(world, k) for k in (1, 2, 3)}
    print(json.dumps(figures, indent=2))
