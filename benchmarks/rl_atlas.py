"""Does RL improve a weak start on the Atlas? The run of docs/results.md, from its beginning.

    python benchmarks/rl_atlas.py runs/rl-atlas

Wants `runs/speedrun/distilled` (`make run` makes it). 176 of its chains make a weak start; the four
families that it solves between 0.2 and 0.8 of the time are trained on, in the real world and three
invented ones; held-out entities are measured before and after. About an hour on two cores; the same
command continues what was interrupted.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

FAMILIES = "capital_currency,city_currency,city_language,more_populous_country"
ROLLOUT = ["--turns", "8", "--turn-tokens", "128", "--context", "1536"]


def coa(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "coa", *map(str, words)], check=True)


def make_tasks(path: Path, split: str, n: int, seed: int, world: int = 0) -> list[str]:
    where = ["--split", split, "--n", str(n), "--seed", str(seed), "--world-seed", str(world)]
    coa("tasks", "make", "--set", "atlas-mhqa", *where, "--families", FAMILIES, "--out", path)
    return path.read_text("utf-8").splitlines(keepends=True)


def question(line: str) -> str:
    return str(json.loads(line)["question"])


def write_tasks(root: Path) -> None:
    """400 to train on, 200 held out to measure with, 60 others held out to choose weights by."""
    worlds = [make_tasks(root / f"world-{k}.jsonl", "train", 100, 31, k) for k in range(4)]
    (root / "train.jsonl").write_text("".join(line for lines in worlds for line in lines))
    measured = {
        question(line) for line in make_tasks(root / "test.jsonl", "heldout_entity", 200, 6)
    }
    others = make_tasks(root / "others.jsonl", "heldout_entity", 200, 21)
    unseen = [line for line in others if question(line) not in measured]
    (root / "check.jsonl").write_text("".join(unseen[:60]))


def main(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    chains = Path("runs/speedrun/distilled/trajectories.jsonl").read_text("utf-8")
    lines = chains.splitlines(keepends=True)
    random.Random(3).shuffle(lines)
    (root / "chains.jsonl").write_text("".join(lines[:176]), encoding="utf-8")
    write_tasks(root)
    sft = [f"trajectories={root / 'chains.jsonl'}", f"out={root / 'sft'}"]
    coa("sft", "recipes/sft-135m.toml", *sft, "sft.batch_size=4", "sft.rank=16")
    start = f"smollm2-135m+{root / 'sft/adapter'}"
    rl = [f"tasks={root / 'train.jsonl'}", f"check.tasks={root / 'check.jsonl'}"]
    coa("rl", "recipes/rl-135m.toml", f"rl.model={start}", f"out={root / 'rl'}", *rl)
    for name, model in (("before", start), ("after", f"smollm2-135m+{root / 'rl/adapter'}")):
        coa(
            "eval", "--tasks", root / "test.jsonl", "--model", model, *ROLLOUT, "--out", root / name
        )
    coa("compare", root / "before", root / "after")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
