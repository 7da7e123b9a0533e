"""`coa report DIR... --out FILE.html`: run directories in, one HTML file out.

Everything but the chains is plain markup, so it can be read, searched and printed without a script;
chains are records that the script of the page draws, as on the page of `coa view`. The same
input gives the same bytes.

A report with every chain of every run would be too large to send, and nobody would read it. It has
some of every outcome, and of the same tasks in all runs: each turn takes, of every run and outcome,
the next task that is not chosen yet, with the chains that all runs have of it, so that two of them
can be read side by side. The page says how many there are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from coa.errors import UsageError
from coa.evaluation.compare import in_turn
from coa.io.runs import Json, write_atomic
from coa.statistics import RIGHT
from coa.trajectory import Author, Chain, StopReason
from coa.view.browse import check_out, render, shown
from coa.view.chains import chain_record, looks_of
from coa.view.plots import Markup, ascii_only, el, inner, strange
from coa.view.report_parts import EvaluationRun, Parts, read_parts
from coa.view.report_sections import SECTIONS

OUTCOMES = {
    "right at once": "scored 1, without going back",
    "recovered": "scored 1 after a reflection, a low check or a malformed turn led to another try",
    "partly right": "scored more than 0 and less than 1",
    "wrong": "answered, and scored 0",
    "cut": "a budget ended it, and it scored 0",
    "malformed": "broke the grammar too often, and scored 0",
    "failed outside": "a tool or the engine ended it, not the model",
    "not scored": "answered, and no score of it is here",
}
"""How a chain can end -> what that means."""
LONGEST, _END = 6_000, 200
"""Characters of an observation that are shown, and how many of them are its last ones."""
MOST_TEXT = 6_000_000
"""Characters of all chains together: about a tenth of it is left in the file."""
_LOW_CHECK = 2


@dataclass
class Selection:
    """The chains of a page, and of how many they were chosen."""

    entries: list[Json] = field(default_factory=list)
    """One for each chain, for the list: task, run, question, answers, outcome."""
    records: list[Json] = field(default_factory=list)
    looks: dict[str, Json] = field(default_factory=dict)
    counts: list[dict[str, int]] = field(default_factory=list)
    """For each run: outcome -> how many rollouts ended so, shown or not."""

    @property
    def total(self) -> int:
        return sum(sum(each.values()) for each in self.counts)


def outcome_of(chain: Chain, score: float | None) -> str:
    """Return how a chain ended, in one of `OUTCOMES`; without a score only what its stop says."""
    trajectory = chain.trajectory
    if trajectory.failed_outside:
        return "failed outside"
    if score is not None and score >= RIGHT:
        went_back = chain.turning_point(_LOW_CHECK) or trajectory.usage.malformed
        return "recovered" if went_back else "right at once"
    if score:
        return "partly right"
    if trajectory.stop is StopReason.MALFORMED:
        return "malformed"
    if trajectory.truncated:
        return "cut"
    return "wrong" if score is not None else "not scored"


def select(runs: Sequence[EvaluationRun], most: int) -> Selection:
    """Choose at most `most` chains."""
    made, written, order = Selection(), 0, list(OUTCOMES)
    queues: dict[tuple[int, int], list[str]] = defaultdict(list)
    for at, run in enumerate(runs):
        count = Counter(_outcome(run, chain) for chain in run.chains)
        made.counts.append({name: count[name] for name in OUTCOMES if count[name]})
        for task_id, chain in run.by_task.items():
            queues[order.index(_outcome(run, chain)), -at].append(task_id)
    for task_id in in_turn(queues[key] for key in sorted(queues)):
        chosen = [(at, run) for at, run in enumerate(runs) if task_id in run.by_task]
        written += sum(_length(run.by_task[task_id]) for _, run in chosen)
        if len(made.entries) + len(chosen) > most or (made.entries and written > MOST_TEXT):
            break
        for at, run in chosen:
            _add(made, run, at, run.by_task[task_id])
    return made


def _score(run: EvaluationRun, chain: Chain) -> float | None:
    return run.scores.get((chain.trajectory.task_id, chain.trajectory.sample))


def _outcome(run: EvaluationRun, chain: Chain) -> str:
    return outcome_of(chain, _score(run, chain))


def _shortened(text: str) -> str:
    """Leave out the middle of a very long text: beginning and end have the tags."""
    if (more := len(text) - LONGEST) <= _END:
        return text
    return f"{text[: LONGEST - _END]} ... ({more:,} characters left out) ... {text[-_END:]}"


def _length(chain: Chain) -> int:
    segments = chain.trajectory.segments
    return sum(
        min(len(s.text), LONGEST if s.author is Author.ENV else len(s.text)) for s in segments
    )


def _add(made: Selection, run: EvaluationRun, at: int, chain: Chain) -> None:
    trajectory, score = chain.trajectory, _score(run, chain)
    for segment in trajectory.segments:
        if segment.author is Author.ENV:
            segment.text = _shortened(segment.text)
    task = run.tasks.get(trajectory.task_id)
    meta = {**(task.meta if task else {}), **trajectory.meta}
    made.looks |= looks_of(trajectory.protocol)
    made.records.append(chain_record(trajectory, score))
    made.entries.append(
        {
            "task": trajectory.task_id,
            "run": at,
            "question": trajectory.question,
            "answer": trajectory.answer,
            "gold": list(task.answers) if task else None,
            "score": score,
            "outcome": outcome_of(chain, score),
            "family": shown(meta.get("family", meta.get("kind", ""))),
            "tokens": trajectory.usage.total_tokens,
            "calls": trajectory.usage.tool_calls,
        }
    )


CHAINS = 200
"""Chains on a page unless somebody asks for more or fewer."""
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
    check_out(out, "report")
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
    bodies = {name: inner(build(parts)) for name, build in SECTIONS.items()}
    here, total = len(chosen.entries), chosen.total
    more = f"{here:,} of {total:,} chains are here, {total - here:,} are left out: some of every "
    some = f"{more}outcome, and of the same tasks in all runs."
    said = f"All {total:,} chains are here." if here == total else some
    bodies["chains"] = inner(said if here else None)
    places = {
        "head": _head(parts, title),
        "notes": el("ul", (el("li", strange(note)) for note in notes)) if notes else "",
        **bodies,
        **{f"{name}_hidden": "" if body else " hidden" for name, body in bodies.items()},
    }
    ascii_places = {name: ascii_only(markup) for name, markup in places.items()}
    return render("report", title, page, chosen.records, **ascii_places)


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
    listed = (
        el("div", el("dt", name), el("dd", strange(text))) for name, text in facts.items() if text
    )
    said = el("p", ", ".join(what), class_="what")
    return inner(el("h1", strange(title)), said, el("dl", listed, class_="facts"))
