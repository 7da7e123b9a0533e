"""Does RL improve a weak start on the Atlas? The run of docs/results.md, from its beginning.

    python benchmarks/rl_atlas.py runs/rl-atlas

176 chains of the teacher over six families make a weak start; the four families that it solves
between 0.2 and 0.8 of the time are trained on, in the real world and three invented ones; held-out
entities are measured before and after. About an hour on two cores; the same command continues what
was interrupted.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

FAMILIES = "capital_currency,city_currency,city_language,more_populous_country"
LEARNT = "city_currency,capital_currency,city_capital,city_language,country_capital"
LEARNT += ",more_populous_country"
"""What the chains of the start are about."""
WORLDS = range(4)
ROLLOUT = ["--turns", "8", "--turn-tokens", "128", "--context", "1536"]


def coa(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "coa", *map(str, words)], check=True)


def make_tasks(
    path: Path, split: str, n: int, seed: int, world: int = 0, families: str = FAMILIES
) -> list[str]:
    where = ["--split", split, "--n", str(n), "--seed", str(seed), "--world-seed", str(world)]
    coa("tasks", "make", "--set", "atlas-mhqa", *where, "--families", families, "--out", path)
    return path.read_text("utf-8").splitlines(keepends=True)


def make_of_all_worlds(path: Path, n: int, seed: int, families: str) -> None:
    """Training tasks of every world, n of each, in one file."""
    beside = [path.with_name(f"{path.stem}-world-{k}.jsonl") for k in WORLDS]
    made = [make_tasks(beside[k], "train", n, seed, k, families) for k in WORLDS]
    path.write_text("".join(line for lines in made for line in lines), encoding="utf-8")


def question(line: str) -> str:
    return str(json.loads(line)["question"])


def write_tasks(root: Path) -> None:
    """400 to train on, 200 held out to measure with, 60 others held out to choose weights by."""
    make_of_all_worlds(root / "train.jsonl", 100, 31, FAMILIES)
    measured = {
        question(line) for line in make_tasks(root / "test.jsonl", "heldout_entity", 200, 6)
    }
    others = make_tasks(root / "others.jsonl", "heldout_entity", 200, 21)
    unseen = [line for line in others if question(line) not in measured]
    (root / "check.jsonl").write_text("".join(unseen[:60]))


def write_chains(root: Path) -> None:
    """176 of the chains that the teacher's work on 384 tasks becomes."""
    learnt, episodes, distilled = root / "learnt.jsonl", root / "episodes.jsonl", root / "distilled"
    make_of_all_worlds(learnt, 96, 0, LEARNT)
    coa("record", "--tasks", learnt, "--error-rate", "0.1", "--out", episodes)
    coa(
        "distill",
        "--episodes",
        episodes,
        "--tasks",
        learnt,
        "--grammar",
        "mhqa",
        "--out",
        distilled,
    )
    lines = (distilled / "trajectories.jsonl").read_text("utf-8").splitlines(keepends=True)
    random.Random(3).shuffle(lines)
    (root / "chains.jsonl").write_text("".join(lines[:176]), encoding="utf-8")


def main(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    write_chains(root)
    write_tasks(root)
    sft = [f"trajectories={root / 'chains.jsonl'}", f"out={root / 'sft'}"]
    coa("sft", "sft-135m", *sft, "sft.batch_size=4", "sft.rank=16")
    start = f"smollm2-135m+{root / 'sft/adapter'}"
    rl = [f"tasks={root / 'train.jsonl'}", f"check.tasks={root / 'check.jsonl'}"]
    coa("rl", "rl-135m", f"rl.model={start}", f"out={root / 'rl'}", *rl)
    for name, model in (("before", start), ("after", f"smollm2-135m+{root / 'rl/adapter'}")):
        coa(
            "eval", "--tasks", root / "test.jsonl", "--model", model, *ROLLOUT, "--out", root / name
        )
    coa("compare", root / "before", root / "after")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
