"""`coa inspect FILE --html OUT`: trajectories or episodes in, one HTML page out.

What the file holds is read off its records, not off its name. Beside a `trajectories.jsonl`, what
`coa distill` (rejected.jsonl, funnel.json) or `coa eval` (scores.jsonl, summary.json) wrote goes on
the page, too.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from coa.display import percent
from coa.errors import RecordError, UsageError
from coa.pages.chains import Scores, chains_view
from coa.pages.frame import render
from coa.pages.teams import episodes_view
from coa.pages.view import View, bars, object_of, shown
from coa.runs import Json, read_jsonl, read_records, write_atomic

CHAINS, EPISODES = "trajectories.jsonl", "episodes.jsonl"


class Written(NamedTuple):
    """What is on a page."""

    kind: str
    """chains or episodes."""
    shown: int
    total: int
    """How many there are; `shown` of them are in the list."""
    dropped: int
    size: int
    """Bytes of the page."""


def write_page(file: Path, out: Path, *, n: int | None = None, title: str = "") -> Written:
    """Write the page of a file, or of a directory that holds one; `n`: only the first so many."""
    if out.suffix not in (".html", ".htm") or out.is_dir():
        raise UsageError(f"{out}: a page is a file whose name ends in .html; name one.")
    source = _source(file)
    view = read_view(source)
    total = len(view.entries)
    if not total and not view.dropped:
        raise UsageError(f"{source}: is empty, so there is nothing to show.")
    page = render(view.limited(n), title or _title(file, source))
    write_atomic(out, page)
    return Written(view.kind, len(view.entries), total, _count_dropped(view), len(page))


def read_view(source: Path) -> View:
    """What is in a file of trajectories or episodes."""
    if _holds_episodes(source):
        return episodes_view(source)
    if source.name != CHAINS:
        return chains_view(source)
    beside = source.parent
    view = chains_view(source, _scores(beside / "scores.jsonl"))
    _add_dropped(view, beside / "rejected.jsonl")
    _add_funnel(view, beside / "funnel.json")
    _add_accuracy(view, beside / "summary.json")
    return view


def _source(file: Path) -> Path:
    if not file.is_dir():
        return file
    found = [file / name for name in (CHAINS, EPISODES) if (file / name).is_file()]
    if not found:
        raise UsageError(
            f"{file}: holds neither {CHAINS} nor {EPISODES}. "
            "Give a directory that coa distill or coa eval wrote, or such a file."
        )
    return found[0]


def _holds_episodes(source: Path) -> bool:
    for number, record in read_jsonl(source):
        if "segments" in record:
            return False
        if "events" in record and "agents" in record:
            return True
        keys = ", ".join(list(record)[:6]) or "none"
        raise RecordError(
            f"{source}:{number}: neither a trajectory nor an episode (its fields: {keys[:120]}). "
            "Give what coa record, coa distill or coa eval wrote."
        )
    return source.name == EPISODES  # an empty file is told apart by its name alone


def _title(file: Path, source: Path) -> str:
    """The directory's name where the file's says nothing."""
    named = file if file.is_dir() else source
    plain = named.is_dir() or named.name not in (CHAINS, EPISODES)
    return named.resolve().name if plain else f"{named.resolve().parent.name}/{named.name}"


def _scores(path: Path) -> Scores:
    """(task, sample) -> score, where the chains are of an evaluation."""
    if not path.is_file():
        return {}

    def score(record: Json) -> tuple[tuple[str, int], float]:
        value = float(record["score"])
        if not math.isfinite(value):
            raise ValueError(f"the score is {value!r}, expected a number.")
        return (record["task_id"], record["sample"]), value

    return dict(read_records(path, score))


def _add_dropped(view: View, path: Path) -> None:
    if not path.is_file():
        return

    def note(record: Json) -> tuple[str, ...]:
        copies = record.get("copies")
        return (
            shown(record["task_id"]),
            f"repeated, +{shown(copies)}" if copies else "dropped",
            shown(record.get("stage", "")),
            shown(record["reason"]),
            shown(record.get("detail", "")),
        )

    view.dropped = read_records(path, note)
    view.figures.append(("dropped", f"{_count_dropped(view):,}"))


def _count_dropped(view: View) -> int:
    return sum(what == "dropped" for _, what, *_ in view.dropped)


def _add_funnel(view: View, path: Path) -> None:
    funnel = object_of(path)
    if not funnel:
        return
    try:
        rows: list[tuple[str, float, str]] = [("episodes", int(funnel["episodes"]), "")]
        for each in funnel.get("stages", ()):
            about = "repeated: " if each.get("repeated") else ""
            rows.append(
                (shown(each["stage"]), int(each["left"]), about + _reasons(each["reasons"]))
            )
        about = "" if "stages" in funnel else _reasons(funnel["rejected"])
        rows.append(("kept", int(funnel["kept"]), about))
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise RecordError(f"{path}: not a funnel of coa distill ({exc!r}).") from None
    view.charts.insert(0, bars("From episodes to chains", rows, unit="left after each stage"))


def _reasons(counts: Json) -> str:
    return ", ".join(f"{reason} ({shown(count)})" for reason, count in counts.items())


def _add_accuracy(view: View, path: Path) -> None:
    summary = object_of(path)
    if not summary:
        return
    try:
        accuracy = percent(summary["accuracy"], summary["ci95"]).strip()
    except (IndexError, KeyError, TypeError, ValueError) as exc:
        raise RecordError(f"{path}: not a summary of coa eval ({exc!r}).") from None
    view.figures.insert(1, ("accuracy, 95% interval", accuracy))
