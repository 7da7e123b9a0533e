"""Fixed random inputs of the parity cases, and the form of the files of expected values.

Read by our tests and, as a plain module, by the scripts that run in the environment of TRL and
verl; so it needs nothing but Python, and random numbers do not depend on a version of torch.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Table = list[list[float]]
SEQUENCES, LENGTH, VOCABULARY = 6, 14, 9
GROUPS = ["oslo", "lima", "oslo", "rome", "lima", "oslo"]
"""Not in blocks, and not of one size: three, two, and one alone."""
PAIRED = [0, 1, 2, 4, 5]
"""The sequences whose group has more than one member."""


def masks(seed: int, empty: tuple[int, ...] = ()) -> Table:
    """1 where the model wrote: a turn, an observation, a turn, then padding of any length."""
    draw = random.Random(f"masks {seed}")
    rows = []
    for at in range(SEQUENCES):
        first, seen, second = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 5)
        row = [1.0] * first + [0.0] * seen + [1.0] * second
        row += [0.0] * (LENGTH - len(row))
        rows.append([0.0] * LENGTH if at in empty else row)
    return rows


def table(name: str, seed: int, low: float, high: float) -> Table:
    """[sequences, length] uniform numbers; four digits, so that float32 has them as they are."""
    draw = random.Random(f"{name} {seed}")
    return [[round(draw.uniform(low, high), 4) for _ in range(LENGTH)] for _ in range(SEQUENCES)]


def near(other: Table, name: str, seed: int, spread: float) -> Table:
    """Another table, moved by noise; where it would be above 0, by the noise downwards."""
    draw = random.Random(f"{name} {seed}")
    moved = []
    for row in other:
        noise = [round(draw.gauss(0, spread), 4) for _ in row]
        moved.append(
            [round(v + n if v + n < 0 else v - abs(n), 4) for v, n in zip(row, noise, strict=True)]
        )
    return moved


def per_sequence(name: str, seed: int, low: float, high: float) -> list[float]:
    draw = random.Random(f"{name} {seed}")
    return [round(draw.uniform(low, high), 4) for _ in range(SEQUENCES)]


def inputs(seed: int, spread: float = 0.3) -> dict[str, Any]:
    """Everything that a loss may ask for. Ratios are about exp(spread), so that clips do happen."""
    new = table("new", seed, -3.0, -0.3)
    old = near(new, "old", seed, spread)
    values = table("values", seed, -1.0, 1.0)
    return {
        "mask": masks(seed),
        "new": new,
        "old": old,
        "sampled": near(old, "sampled", seed, spread / 2),
        "reference": near(new, "reference", seed, 0.5),
        "advantages": per_sequence("advantages", seed, -1.5, 1.5),
        "token_advantages": table("token advantages", seed, -1.5, 1.5),
        "entropy": table("entropy", seed, 0.1, 2.0),
        "rewards": per_sequence("rewards", seed, 0.0, 1.0),
        "values": values,
        "old_values": near(values, "old values", seed, 0.4),
        "returns": table("returns", seed, -1.0, 1.0),
        "logits": [table(f"logits {at}", seed, -3.0, 3.0) for at in range(VOCABULARY)],
    }


def rounded(value: Any) -> Any:
    """Numbers with nine digits: more than float32 has, and short enough to read."""
    if isinstance(value, float):
        return float(f"{value:.9g}") + 0.0  # without the sign of zero
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def write_expected(versions: dict[str, str], cases: dict[str, Callable[[], Any]]) -> None:
    """Run the cases and write what they return to the path that the script was given."""
    found: dict[str, Any] = {"versions": versions, "cases": {}}
    for name, run in cases.items():
        found["cases"][name] = rounded(run())
    text = json.dumps(found, separators=(",", ":")).replace('},"', '},\n"')
    Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")
