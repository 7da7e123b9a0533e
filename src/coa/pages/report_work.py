"""The sections of a report on what was done: by agents, until the end, and in a distillation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coa.pages.markup import Child, Markup, el, inner, number, number_head, strange, table
from coa.pages.plots import bar
from coa.pages.report_evaluation import Evaluation, by_tasks
from coa.pages.report_parts import Distillation, Parts
from coa.pages.report_sections import DASH, MINUS, MOST_COLUMNS, section
from coa.trajectory import StopReason

# -- agents and stops -----------------------------------------------------------------------


def agents(parts: Parts) -> Markup | None:
    """Calls and blocks of each agent for a rollout; those that have a tool first."""
    together = by_tasks(run for run in parts.evaluations if run.chains or run.calls)
    named = len(together) > 1
    tables = [made for on, runs in together.items() if (made := _agents(runs, on if named else ""))]
    if not tables:
        return None
    note = (
        "What each agent did in a rollout, the mean over the n rollouts of a run: calls of those "
        "that have a tool, blocks that the others wrote."
    )
    return section("agents", "Agents at work", note, tables)


def _agents(every: Sequence[Evaluation], on: str) -> Markup | None:
    """Agents down, runs on the same tasks across."""
    runs = every[:MOST_COLUMNS]
    means, tools = [], dict[str, None]()
    for run in runs:
        count: dict[str, float] = {}
        for chain in run.chains:
            tools |= dict.fromkeys(b.role for b in chain.of_kind("tool"))
            for block in chain.blocks:
                count[block.role] = count.get(block.role, 0.0) + 1 / len(run.chains)
        tools |= dict.fromkeys(run.calls)
        means.append(count | run.calls)
    roles = [*sorted(tools), *sorted({role for each in means for role in each} - tools.keys())]
    if not roles:
        return None
    most = max(value for each in means for value in each.values()) or 1.0
    rows = [
        [el("th", strange(role), el("small", "tool" if role in tools else ""), scope="row")]
        + [_amount(each.get(role, 0.0), most, role) for each in means]
        for role in roles
    ]
    left_out = len(every) - len(runs)
    caption = inner(
        strange(on) if on else None,
        el("small", f"left out: {left_out:,} more runs") if left_out else None,
    )
    head = ["agent", *(_run_head(run, len(run.chains) or run.accuracy.n) for run in runs)]
    return table(head, rows, caption=caption, class_="groups")


def _run_head(run: Evaluation, n: int) -> Markup:
    return el("th", strange(run.name), el("small", f"n {n:,}"))


def _amount(value: float, most: float, role: str) -> Markup:
    label = el("span", el("b", f"{value:.2f}"))
    drawn = bar([(value / most, "amount")], f"{role}: {value:.2f} a rollout")
    return el("td", label, drawn, class_="group")


STOPS = {
    "answered": "answered",
    "cut": "cut by a budget",
    "malformed": "malformed",
    "outside": "failed outside",
}
"""Kinds of endings; each is a class of the style."""


def stops(parts: Parts) -> Markup | None:
    """How rollouts ended."""
    runs = [run for run in parts.evaluations if run.stops]
    if not runs:
        return None
    rows = []
    for run in runs:
        total = sum(run.stops.values()) or 1
        shares = dict.fromkeys(STOPS, 0)
        for stop, count in run.stops.items():
            shares[_stop_kind(stop)] += count
        said = ", ".join(f"{stop} {count:,}" for stop, count in run.stops.items())
        drawn = bar([(count / total, kind) for kind, count in shares.items()], said)
        rows.append(
            [
                el("th", strange(run.name), scope="row"),
                number(f"{total:,}"),
                el("td", drawn, class_="plot"),
                el("td", _listed(run.stops), class_="said"),
            ]
        )
    legend = el(
        "p",
        (el("span", el("i", class_=kind), name) for kind, name in STOPS.items()),
        class_="keys",
    )
    head: list[Child] = [
        "run",
        number_head("rollouts"),
        el("th", "", class_="plot"),
        "why it ended",
    ]
    note = "Why each rollout ended; a budget that cuts and a model that errs are different things."
    return section("stops", "How rollouts ended", note, legend, table(head, rows, class_="runs"))


def _listed(counts: Mapping[str, int]) -> list[Child]:
    """Names with their counts; each name is a stranger's."""
    cells = ([strange(name), f" {count:,}"] for name, count in counts.items())
    return [[", " if at else "", *cell] for at, cell in enumerate(cells)]


def _stop_kind(stop: str) -> str:
    try:
        reason = StopReason(stop)
    except ValueError:
        return "outside"
    if reason.truncated:
        return "cut"
    if reason.environment:
        return "outside"
    return "malformed" if reason is StopReason.MALFORMED else "answered"


# -- the funnel -----------------------------------------------------------------------------


def funnels(parts: Parts) -> Markup | None:
    """From episodes of the teacher to chains for training."""
    if not parts.distillations:
        return None
    note = (
        "How many chains each filter let through. Bars: left after the stage; pale: dropped there; "
        "violet: repeated there. All on one scale, which ends at the most there were."
    )
    return section("funnel", "Distillation", note, map(_funnel, parts.distillations))


def _funnel(found: Distillation) -> Markup:
    most = max([found.episodes, *(left + dropped for _, left, dropped, _, _ in found.stages)]) or 1
    stages = [("episodes", found.episodes, 0, 0, {}), *found.stages]
    if not found.stages:
        stages.append(("kept", found.kept, found.episodes - found.kept, 0, {}))
    rows = []
    for stage, left, dropped, repeated, reasons in stages:
        shares = [((left - repeated) / most, "left"), (repeated / most, "repeated")]
        drawn = bar([*shares, (dropped / most, "dropped")], f"{stage}: {left:,} left")
        rows.append(
            [
                el("th", strange(stage), scope="row"),
                el("td", drawn, class_="plot"),
                number(f"{left:,}"),
                number(f"{MINUS}{dropped:,}" if dropped else DASH),
                number(f"+{repeated:,}" if repeated else DASH),
                el("td", _listed(reasons), class_="said"),
            ]
        )
    head: list[Child] = ["stage", el("th", "", class_="plot"), number_head("left")]
    head += [number_head("dropped"), number_head("repeated"), "why"]
    kept = f"{found.kept:,} chains of {found.episodes:,} episodes"
    caption = inner(strange(found.name), el("small", kept))
    return table(head, rows, caption=caption, class_="runs")
