"""View: what an inspection page shows, before it is a page. Only text and numbers, no markup.

Chains and episodes differ in what one record looks like and in their figures; lists, filters,
charts and the table of what was dropped are the same, so the script of the page knows only these.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coa.io.runs import Json, read_object

BINS = 12
"""At most so many bars in a histogram."""


@dataclass
class View:
    """Everything on a page: what the list needs of each record, and the records beside it."""

    kind: str
    """chains or episodes: how one record is drawn."""
    noun: tuple[str, str]
    """What a record is called, one and several."""
    numbers: dict[str, str]
    """Numbers of an entry to sort by -> how they are called."""
    shown: tuple[str, ...]
    """Which of the numbers stand in the list."""
    flags: dict[str, str]
    """Properties of an entry to filter by -> what they mean."""
    entries: list[Json] = field(default_factory=list)
    """One per record, for the list: id, question, answer, set, family, numbers, flags."""
    records: list[Json] = field(default_factory=list)
    """In the order of the entries; loaded only when one is looked at."""
    looks: dict[str, Json] = field(default_factory=dict)
    """Name of an agent -> its colour and its kind."""
    figures: list[tuple[str, str]] = field(default_factory=list)
    charts: list[Json] = field(default_factory=list)
    dropped: list[tuple[str, ...]] = field(default_factory=list)
    """Task, what happened to it (dropped, repeated), stage, reason and detail."""
    notes: list[str] = field(default_factory=list)

    def limited(self, n: int | None) -> View:
        """The first `n` records, with a note of what was left out; figures stay those of all."""
        total = len(self.entries)
        if n is None or n >= total:
            return self
        self.entries, self.records = self.entries[:n], self.records[:n]
        self.notes.append(
            f"The list has the first {n:,} of {total:,} {self.noun[1]}; the figures are of all."
        )
        return self


def require_text(record: object, *names: str) -> None:
    """Raise unless these fields hold text: what a stranger wrote must not surprise the page."""
    for name in names:
        value = getattr(record, name)
        if not isinstance(value, str):
            raise TypeError(f"{name} is {shown(value)[:60]}, expected text")


def object_of(path: Path) -> Json:
    """The JSON object in a small file; an empty one where there is no such file."""
    return read_object(path) if path.is_file() else {}


def shown(value: Any) -> str:
    """A value of a record as a person reads it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def origin(meta: Mapping[str, Any]) -> tuple[str, str]:
    """(set, family) of a task: what records are grouped by."""
    return shown(meta.get("set", "")), shown(meta.get("family", meta.get("kind", "")))


def facts_of(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What else a record says about its task; set and family have places of their own."""
    return [(name, shown(value)) for name, value in meta.items() if name not in ("set", "family")]


def unique(name: str, taken: set[str]) -> str:
    """A name for a link: several records may be of the same task."""
    made, number = name, 2
    while made in taken:
        made, number = f"{name}~{number}", number + 1
    taken.add(made)
    return made


def bars(
    title: str,
    counts: Iterable[tuple[str, float] | tuple[str, float, str]],
    *,
    unit: str = "",
    filters: str = "",
    note: str = "",
) -> Json:
    """A chart of bars: label, value and perhaps a remark.

    `filters`: a click on a label lists what has this set, family or flag.
    """
    rows = [(label, round(value, 2), *remark) for label, value, *remark in counts]
    return {"title": title, "unit": unit, "filters": filters, "note": note, "rows": rows}


def grouped(key: str, counts: Counter[str], unit: str) -> list[Json]:
    """A chart of what records are grouped by, where there is more than one group."""
    title = {"set": "Sets", "family": "Families"}[key]
    return [bars(title, counts.most_common(), unit=unit, filters=key)] if len(counts) > 1 else []


def histogram(values: Sequence[int]) -> list[tuple[str, int]]:
    """Counts in at most `BINS` equal steps of a round width (1, 2 or 5 times a power of ten)."""
    if not values:
        return []
    low, high = min(values), max(values)
    widths = (digit * 10**power for power in range(19) for digit in (1, 2, 5))
    width = next((w for w in widths if high // w - low // w < BINS), high)
    counts = [0] * (high // width - low // width + 1)
    for value in values:
        counts[value // width - low // width] += 1
    first = low // width
    return [(_step(first + at, width), count) for at, count in enumerate(counts)]


def _step(number: int, width: int) -> str:
    start = number * width
    return f"{start:,}" if width == 1 else f"{start:,} to {start + width - 1:,}"


def share_of(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "none"
