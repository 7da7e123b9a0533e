"""The funnel: what entered each stage, what left it and why, as a table and as a plot.

A stage is a plain record in funnel.json: `stage`, `entered`, `left`, `reasons` (reason -> how many
were dropped or added for it), and, where chains were also repeated, `dropped` and `repeated`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coa.errors import RecordError
from coa.io.runs import Json
from coa.io.tables import markdown_table
from coa.view.plots import Bar, bars_plot, finite

Stages = Iterable[Mapping[str, Any]]


class FunnelStage(NamedTuple):
    """A record of a stage, with what it need not say."""

    name: str
    entered: int
    left: int
    dropped: int
    repeated: int
    reasons: dict[str, int]

    @classmethod
    def read(cls, record: Mapping[str, Any], before: int = 0) -> FunnelStage:
        """Read a record; `before` left the stage before it."""
        left, repeated = _count(record.get("left", 0)), _count(record.get("repeated", 0))
        entered = _count(record.get("entered", before))
        dropped = _count(record.get("dropped", entered + repeated - left))
        reasons = {str(why): _count(count) for why, count in record["reasons"].items()}
        return cls(str(record["stage"]), entered, left, dropped, repeated, reasons)


def _count(value: object) -> int:
    return int(finite(value))


class Funnel(NamedTuple):
    """What a funnel.json says."""

    episodes: int
    kept: int
    stages: list[FunnelStage]


def read_funnel(path: Path, record: Json) -> Funnel:
    """Check a funnel.json; one of an older version has no stages, only reasons."""
    try:
        episodes, kept = _count(record["episodes"]), _count(record["kept"])
        stages: list[FunnelStage] = []
        for each in record.get("stages", ()):
            stages.append(FunnelStage.read(each, stages[-1].left if stages else episodes))
        if not stages:
            whole = {"stage": "kept", "left": kept, "reasons": record.get("rejected", {})}
            stages.append(FunnelStage.read(whole, episodes))
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise RecordError(f"{path}: not a funnel of coa distill ({exc!r}).") from None
    return Funnel(episodes, kept, stages)


def stage_record(stage: str, entered: int, notes: Sequence[Json]) -> Json:
    """Return the record of a stage, from its notes: those with `copies` repeat, others drop."""
    repeated = sum(note.get("copies", 0) for note in notes)
    dropped = sum(not note.get("copies") for note in notes)
    reasons: Counter[str] = Counter()
    for note in notes:
        reasons[str(note["reason"])] += note.get("copies", 1)
    return {
        "stage": stage,
        "entered": entered,
        "left": entered - dropped + repeated,
        "dropped": dropped,
        "repeated": repeated,
        "reasons": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
    }


def table(stages: Stages) -> list[str]:
    """Return the funnel as lines of plain text, reasons beneath their stage."""
    rows = list(_rows(stages))
    first = max(len(label) for label, _, _ in rows) + 2  # reasons are indented
    return [
        f"{'' if is_stage else '  '}{label}".ljust(first)
        + "".join(f"{cell:>10}" for cell in cells).rstrip()
        for label, cells, is_stage in rows
    ]


def markdown(stages: Stages) -> list[str]:
    """Return the funnel as a table of a document."""
    (label, cells, _), *rows = _rows(stages)
    named = [(label.replace("|", "/"), cells, is_stage) for label, cells, is_stage in rows]
    shown = [(f"**{name}**" if is_stage else name, *cells) for name, cells, is_stage in named]
    return markdown_table((label, *cells), shown)


def _rows(stages: Stages) -> Iterator[tuple[str, list[str], bool]]:
    """Yield a label, four cells, and whether it is a stage and not one of its reasons."""
    yield "stage", ["entered", "dropped", "repeated", "left"], True
    for each in map(FunnelStage.read, stages):
        figures = (each.entered, each.dropped, each.repeated, each.left)
        yield each.name, [f"{figure:,}" for figure in figures], True
        for reason, count in each.reasons.items():
            cells = ["", "", f"{count:,}", ""] if each.repeated else ["", f"{count:,}", "", ""]
            yield reason, cells, False


def plot(stages: Stages, title: str = "From episodes to training chains") -> str:
    """Return the funnel as an SVG; every number is also a text in it."""
    read = [FunnelStage.read(each) for each in stages]
    bars = [
        Bar(
            each.name,
            {"left": each.left - each.repeated, "repeated": each.repeated, "dropped": each.dropped},
            f"{each.left:,}",
            [f"{count:,} {reason}" for reason, count in each.reasons.items()],
        )
        for each in read
    ]
    said = "; ".join(f"{each.name}: {each.entered:,} entered, {each.left:,} left" for each in read)
    note = "bar: left after the stage; grey: dropped there; violet: repeated there"
    return bars_plot(bars, title, note, said)
