"""`coa view FILE --html OUT`: trajectories or episodes in, one HTML page out.

What the file holds is read off its records, not off its name. Beside a `trajectories.jsonl`, what
`coa distill` (rejected.jsonl, funnel.json) or `coa eval` (scores.jsonl, summary.json) wrote goes on
the page, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from coa.distillation.funnel import read_funnel
from coa.errors import RecordError, UsageError
from coa.evaluation.compare import count_outcomes
from coa.io.runs import Json, read_jsonl, read_records, write_atomic
from coa.view.browse import Dropped, View, bars, check_out, object_of, shown
from coa.view.chains import chains_view, read_scores
from coa.view.teams import episodes_view
from coa.view.terminal import percent

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
    check_out(out, "page")
    source = _source(file)
    view = _read_view(source)
    total = len(view.entries)
    if not total and not view.dropped:
        raise UsageError(f"{source}: is empty, so there is nothing to show.")
    page = view.render(title or _title(file, source), n)
    write_atomic(out, page)
    return Written(view.kind, len(view.entries[:n]), total, view.dropped_count, len(page))


def _read_view(source: Path) -> View:
    """Read a file of trajectories or episodes, and what stands beside it."""
    if _holds_episodes(source):
        return episodes_view(source)
    if source.name != CHAINS:
        return chains_view(source)
    beside = source.parent
    scores = beside / "scores.jsonl"
    view = chains_view(source, read_scores(scores) if scores.is_file() else {})
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
    """Return the name of the file, with that of the directory where the file's says nothing."""
    if file.is_dir() or source.name not in (CHAINS, EPISODES):
        return file.resolve().name
    return f"{source.resolve().parent.name}/{source.name}"


def _add_dropped(view: View, path: Path) -> None:
    if not path.is_file():
        return

    def note(record: Json) -> Dropped:
        copies = record.get("copies")
        return Dropped(
            shown(record["task_id"]),
            f"repeated, +{shown(copies)}" if copies else "dropped",
            shown(record.get("stage", "")),
            shown(record["reason"]),
            shown(record.get("detail", "")),
        )

    view.dropped = read_records(path, note)
    view.figures.append(("dropped", f"{view.dropped_count:,}"))


def _add_funnel(view: View, path: Path) -> None:
    if not (record := object_of(path)):
        return
    funnel = read_funnel(path, record)
    rows: list[tuple[str, float, str]] = [("episodes", funnel.episodes, "")]
    for each in funnel.stages:
        listed = ", ".join(f"{reason} ({count})" for reason, count in each.reasons.items())
        rows.append((each.name, each.left, f"repeated: {listed}" if each.repeated else listed))
    if rows[-1][0] != "kept":
        rows.append(("kept", funnel.kept, ""))
    view.charts.insert(0, bars("From episodes to chains", rows, unit="left after each stage"))


def _add_accuracy(view: View, path: Path) -> None:
    if not (summary := object_of(path)):
        return
    try:
        accuracy = percent(summary["accuracy"], summary["ci95"]).strip()
    except (IndexError, KeyError, TypeError, ValueError) as exc:
        raise RecordError(f"{path}: not a summary of coa eval ({exc!r}).") from None
    scored = [each for each in view.entries if "score" in each["numbers"]]
    outcomes = count_outcomes((each["numbers"]["score"], each["answer"]) for each in scored)
    counts = [(name, f"{count:,}") for name, count in outcomes.items() if scored]
    view.figures[1:1] = [("accuracy, 95% interval", accuracy), *counts]
