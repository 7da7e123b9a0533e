"""`coa report DIR... --out FILE.html`: run directories in, one HTML file out.

Everything but the chains is plain markup, so it can be read, searched and printed without a script;
chains are records that the script of the page draws, as on the page of `coa inspect`. The same
input gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from coa.errors import UsageError
from coa.pages.frame import fill, harmless_json, pack
from coa.pages.markup import Child, Markup, ascii_only, el, inner, strange
from coa.pages.report_chains import OUTCOMES, Selection, select
from coa.pages.report_curves import curves
from coa.pages.report_parts import Parts, read_parts
from coa.pages.report_sections import breakdowns, cost, differences, results, samples
from coa.pages.report_work import agents, funnels, stops
from coa.runs import write_atomic

CHAINS = 200
"""Chains on a page unless somebody asks for more or fewer."""
SECTIONS: tuple[Callable[[Parts], Markup | None], ...] = (
    *(results, differences, cost, breakdowns, samples, agents, stops, curves, funnels),
)
_MISSING = {
    "evaluations": "No evaluation was given: no results, cost or chains.",
    "trainings": "No training was given: no learning curves.",
    "distillations": "No distillation was given: no funnel.",
}


class Reported(NamedTuple):
    """What is in a report."""

    evaluations: int
    trainings: int
    distillations: int
    chains: int
    chains_in_all: int
    size: int
    """Bytes of the file."""

    def line(self, out: Path) -> str:
        """What a person is told."""
        runs = self.evaluations + self.trainings + self.distillations
        of_all = f"{self.chains:,} of {self.chains_in_all:,} chains"
        return f"{runs} runs and {of_all} in {out}, {self.size / 1e6:.1f} MB"


def write_report(
    directories: Sequence[Path],
    out: Path,
    *,
    chains: int = CHAINS,
    title: str = "",
) -> Reported:
    """Write the report of these runs, with at most so many chains."""
    if not directories:
        raise UsageError("report needs at least one run directory.")
    if out.suffix not in (".html", ".htm") or out.is_dir():
        raise UsageError(f"{out}: a report is a file whose name ends in .html; name one.")
    if chains < 0:
        raise UsageError(f"chains is {chains}, expected 0 or more.")
    parts = read_parts(directories)
    chosen = select(parts.evaluations, chains)
    page = render_report(parts, chosen, title or _title(directories))
    write_atomic(out, page)
    counts = len(parts.evaluations), len(parts.trainings), len(parts.distillations)
    return Reported(*counts, len(chosen.entries), chosen.total, len(page))


def render_report(parts: Parts, chosen: Selection, title: str) -> str:
    """The whole page."""
    made = [found for each in SECTIONS if (found := each(parts)) is not None]
    page = {
        "runs": [run.name for run in parts.evaluations],
        "accuracy": [run.accuracy.value for run in parts.evaluations],
        "controls": [run.is_control or run.team for run in parts.evaluations],
        "counts": chosen.counts,
        "outcomes": OUTCOMES,
        "looks": chosen.looks,
        "entries": chosen.entries,
    }
    notes = [*(_MISSING[name] for name in _MISSING if not getattr(parts, name)), *parts.notes]
    places = {
        "head": _head(parts, title),
        "sections": inner(made),
        "chains": "" if chosen.entries else " hidden",
        "chosen": _chosen(chosen),
        "notes": el("ul", (el("li", strange(note)) for note in notes)) if notes else "",
    }
    places = {name: ascii_only(markup) for name, markup in places.items()}
    places |= {"page": harmless_json(page), "records": harmless_json(pack(chosen.records))}
    scripts = ("inspect_records.js", "report.js")
    return fill("report.html", title, places, ("paper.css", "report.css"), scripts)


def _title(directories: Sequence[Path]) -> str:
    names = list(dict.fromkeys(each.resolve().name for each in directories))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"Report on {', '.join(names[:3])}{more}"


def _head(parts: Parts, title: str) -> Markup:
    """What was run, and on what."""
    counted = [
        (len(parts.distillations), "distillation"),
        (len(parts.trainings), "training run"),
        (len(parts.evaluations), "evaluation"),
    ]
    what = [f"{count} {noun}{'s' * (count != 1)}" for count, noun in counted if count]
    when = sorted(parts.facts.get("when", []))
    facts = {name: ", ".join(values) for name, values in parts.facts.items() if name != "when"}
    if when:
        same_day = when[0][:10] == when[-1][:10]
        end = when[-1][11:] if same_day else when[-1].replace("T", " ")
        facts["when"] = f"{when[0].replace('T', ' ')} to {end} UTC"
    listed: Child = (
        el("div", el("dt", name), el("dd", strange(text))) for name, text in facts.items() if text
    )
    said = el("p", ", ".join(what), class_="what")
    return inner(el("h1", strange(title)), said, el("dl", listed, class_="facts"))


def _chosen(chosen: Selection) -> Markup:
    shown, total = len(chosen.entries), chosen.total
    if shown == total:
        return inner(f"All {total:,} chains are here.")
    return inner(
        f"{shown:,} of {total:,} chains are here, {total - shown:,} are left out: some of every "
        "outcome, and of the same tasks in all runs. ",
        el("code", "coa inspect"),
        " shows all chains of a run.",
    )
