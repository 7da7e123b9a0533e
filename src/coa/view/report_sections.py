"""The sections of a report that need no script: tables with plots in their cells, and figures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from itertools import takewhile
from typing import Any

from coa.distillation.funnel import Funnel, FunnelStage
from coa.evaluation.compare import other_means
from coa.statistics import Estimate, Paired, bootstrap, paired
from coa.trajectory import StopReason
from coa.view.plots import (
    PANELS,
    Child,
    Column,
    Markup,
    Panel,
    Spot,
    bar,
    cost_plot,
    el,
    inner,
    interval,
    ladder,
    panels,
    points,
    strange,
    table,
)
from coa.view.report_parts import EvaluationRun, Parts, Training, model_name
from coa.view.terminal import significance

GROUPS = ("family", "hops", "world", "level", "set", "environment")
"""What tasks are grouped by, in the order of the page; environments declare others."""
HELD_OUT = "_heldout"
"""Ends the name of a group by whether something was held out of training."""
MOST_COLUMNS, MOST_ROWS, MOST_UPDATES = 10, 40, 16
"""Of a table; what is left out is said."""
DASH, MINUS = "\u2013", "\u2212"
SFT_PANELS = (
    Panel("loss", "loss (nats)", ".3g"),
    Panel("grad_norm", "gradient norm", ".2g"),
    Panel("lr", "learning rate", ".2g"),
)


def percent(value: float, sign: str = "") -> str:
    """Return a share in percent; with a sign a difference, in points."""
    return f"{100 * value:{sign}.1f}".replace("-", MINUS) + ("" if sign else "%")


def ends(found: Estimate, sign: str = "") -> str:
    """Return an interval in percent, or in points."""
    low, high = (percent(each, sign).removesuffix("%") for each in found[1:3])
    return f"{low} to {high}" if sign else f"{low}{DASH}{high}"


def spoken(found: Estimate, what: str) -> str:
    """Return an estimate in words, for those who do not see the plot."""
    return f"{what} {percent(found.value)}, 95% interval {ends(found)}, n = {found.n:,}"


def _estimate_columns(
    what: str, of: Callable[[Any], Estimate], reach: float | None = None
) -> list[Column]:
    """Return columns of a value, its interval and their plot; with a `reach` of differences."""
    sign, high = ("+", reach) if reach else ("", 1.0)
    scale = (f"{MINUS}{100 * high:.0f}", "0", f"+{100 * high:.0f}") if reach else ("0", "100%")

    def drawn(row: Any) -> Markup:
        found = of(row)
        gained = f"{percent(found.value, sign)} points, 95% interval {ends(found, sign)}"
        return interval(
            found, gained if reach else spoken(found, what), -high if reach else 0, high
        )

    return [
        Column(f"{what}, 95% interval", lambda row: el("b", percent(of(row).value, sign))),
        Column(None, lambda row: ends(of(row), sign), "ends"),
        Column(el("span", (el("span", each) for each in scale)), drawn, "plot"),
    ]


def score_name(runs: Iterable[EvaluationRun]) -> str:
    """Exact answers make an accuracy; anything else is the mean of its reward."""
    rewards = sorted({run.reward for run in runs if not run.team})
    return "accuracy" if rewards in ([], ["exact"]) else f"mean of {', '.join(rewards)}"


def by_tasks(runs: Iterable[EvaluationRun]) -> list[tuple[str, list[EvaluationRun]]]:
    """Return runs on the same tasks together, with what the tasks are called if they differ."""
    found: dict[str, list[EvaluationRun]] = defaultdict(list)
    for run in runs:
        found[run.on].append(run)
    return [(on if len(found) > 1 else "", own) for on, own in found.items()]


RUN = Column("run", lambda run: strange(run.name), "row")
TASKS = Column("n", lambda run: f"{run.accuracy.n:,}")


# -- the table of runs ----------------------------------------------------------------------


def results(parts: Parts) -> Child:
    """Return all runs, one a row."""
    runs = parts.evaluations

    def tasks(run: EvaluationRun) -> str:
        return f"{run.accuracy.n:,}" + (f" {chr(215)} {run.k}" if run.k > 1 else "")

    columns = [
        Column("run", lambda run: [strange(run.name), el("small", _about(run))], "row"),
        *_estimate_columns(score_name(runs), lambda run: run.accuracy),
        Column("n", tasks),
    ]
    columns += [each for each in _costs(runs) if any(each.cell(run) != DASH for run in runs)]
    return table(runs, columns, class_="runs") if runs else None


def _costs(runs: Sequence[EvaluationRun]) -> list[Column]:
    """Return the columns of what runs cost."""

    def figure(key: str, written: Callable[[float], str]) -> Callable[[EvaluationRun], str]:
        return lambda run: written(run.figures[key]) if key in run.figures else DASH

    def thousand(amount: float) -> str:
        """What one task costs is a very small number."""
        return f"{Decimal(f'{1000 * amount:#.3g}'):,f}"

    currency = next((run.currency for run in runs if run.currency), "money")
    kinds: list[tuple[Child, str, Callable[[float], str]]] = [
        ("tokens / task", "tokens_per_task", "{:,.0f}".format),
        ("uncached / task", "tokens_per_task_uncached", "{:,.0f}".format),
        ("tokens / solved", "tokens_per_solved", "{:,.0f}".format),
        ("tool calls / task", "tool_calls_per_task", "{:,.2f}".format),
        ("seconds, median", "p50", "{:,.1f}".format),
        ("95th percentile", "p95", "{:,.1f}".format),
        ([strange(currency), " / 1,000 tasks"], "money_per_task", thousand),
        ([strange(currency), " / 1,000 solved"], "money_per_solved", thousand),
    ]
    return [Column(name, figure(key, written)) for name, key, written in kinds]


def _about(run: EvaluationRun) -> Child:
    """Return what a reader must know of a run besides its name."""
    if run.team:
        return "multi-agent teacher"
    said: list[Child] = [strange(model_name(run.model))]
    if run.is_control:
        said += [", control: observations ", strange(run.observations)]
    return said


# -- differences ----------------------------------------------------------------------------


def _comparable(one: EvaluationRun, other: EvaluationRun) -> bool:
    """Whether two runs have tasks in common: ids alone may be line numbers of two files."""
    shared = one.means.keys() & other.means.keys()
    asked = ((one.by_task.get(name), other.by_task.get(name)) for name in shared)
    alike = all(a.trajectory.question == b.trajectory.question for a, b in asked if a and b)
    return one.reward == other.reward and bool(shared) and alike


def _partners(run: EvaluationRun, runs: Sequence[EvaluationRun]) -> list[EvaluationRun]:
    """Return what a run is compared with: the first on its tasks, and the one before it (what
    fine-tuning gave, and what RL added to that); a control with the same model when its tools
    answer."""
    real = [each for each in runs if not each.is_control and _comparable(each, run)]
    if run.is_control:
        return [each for each in real if each.model == run.model][:1]
    earlier = list(takewhile(lambda each: each is not run, real))
    return earlier[:1] + earlier[1:][-1:]


Difference = tuple[EvaluationRun, EvaluationRun, Paired]
"""The run that another is compared with, the other, and what is found."""


def differences(parts: Parts) -> Child:
    """Return runs against others on the same tasks."""
    runs = [run for run in parts.evaluations if run.scores]
    found, apart = list[Difference](), list[str]()
    for run in runs:
        partners = _partners(run, runs)
        for first in partners:
            shared = sorted(first.means.keys() & run.means.keys())
            pair = paired(*([each.means[i] for i in shared] for each in (first, run)))
            found.append((first, run, pair))
        if not partners:
            apart.append(run.name)
    if not found:
        return None
    apart = [name for name in apart if all(name != first.name for first, *_ in found)]
    reach = max(abs(side) for *_, pair in found for side in pair.difference[1:3]) or 0.01

    def names(row: Difference) -> Child:
        return [strange(row[1].name), el("small", "against ", strange(row[0].name))]

    columns = [
        Column("run", names, "row"),
        *_estimate_columns("points", lambda row: row[2].difference, reach),
        Column("n", lambda row: f"{row[2].difference.n:,}"),
        Column("wins", lambda row: f"{row[2].wins:,}"),
        Column("losses", lambda row: f"{row[2].losses:,}"),
        Column("ties", lambda row: f"{row[2].ties:,}"),
        Column("p", lambda row: significance(row[2].p_value).lstrip("p=")),
    ]
    listed = [
        "Alone with its tasks or its reward, so not compared: ",
        strange(", ".join(apart)),
        ".",
    ]
    left = el("p", listed, class_="note") if apart else None
    return [table(found, columns, class_="runs"), *_other_means(found), left]


def _other_means(found: Sequence[Difference]) -> Iterator[Markup]:
    """Say where two runs differ in more than the model; of controls everybody knows."""
    for first, run, _ in found:
        means = other_means(first.inputs, run.inputs)
        if means and not run.is_control:
            said = [strange(run.name), " against ", strange(first.name)]
            others = f": not of the models alone, since these are others, too: {', '.join(means)}."
            yield el("p", *said, others, class_="note")


# -- breakdowns -----------------------------------------------------------------------------


def breakdowns(parts: Parts) -> Child:
    """Return one table for each thing that tasks are grouped by: groups down, runs across."""
    keys = dict.fromkeys([*GROUPS, *(key for run in parts.evaluations for key in run.groups)])
    together = by_tasks(parts.evaluations)
    return [made for key in keys for on, runs in together if (made := _breakdown(key, runs, on))]


def _breakdown(key: str, evaluations: Sequence[EvaluationRun], on: str) -> Markup | None:
    runs = [run for run in evaluations if run.groups.get(key)]
    groups = list(dict.fromkeys(name for run in runs for name in run.groups[key]))
    if len(groups) < 2:
        return None

    def cell(run: EvaluationRun, name: str) -> Child:
        if (found := run.groups[key].get(name)) is None:
            return DASH
        label = el("span", el("b", percent(found.value)), el("small", f"n {found.n:,}"))
        return [label, interval(found, spoken(found, run.name))]

    title = key.removesuffix(HELD_OUT).replace("_", " ").capitalize()
    return _across(
        sorted(groups, key=_natural),
        Column("", lambda name: strange(_group_name(key, name)), "row"),
        [(run, strange(run.name)) for run in runs],
        cell,
        title if key in GROUPS else strange(title),
        el("small", strange(on)) if on else None,
    )


def _across(
    rows: Sequence[str],
    first: Column,
    runs: Sequence[tuple[EvaluationRun, Child]],
    cell: Callable[[EvaluationRun, str], Child],
    *title: Child,
) -> Markup:
    """Return a table with runs across, each with its head; what is left out is said."""
    shown, listed = runs[:MOST_COLUMNS], rows[:MOST_ROWS]
    columns = [first, *(Column(head, partial(cell, run), "group") for run, head in shown)]
    left_out = {"groups": len(rows) - len(listed), "runs": len(runs) - len(shown)}
    said = ", ".join(f"{count:,} more {what}" for what, count in left_out.items() if count)
    caption = inner(*title, el("small", f"left out: {said}") if said else None)
    return table(listed, columns, caption=caption, class_="groups")


def _natural(name: str) -> tuple[int, float, str]:
    """Numbers by size, before names."""
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name


def _group_name(key: str, name: str) -> str:
    if key.endswith(HELD_OUT):
        return {"True": "held out", "False": "trained on"}.get(name, name)
    return {"0": "0 (the real one)"}.get(name, name) if key == "world" else name.replace("_", " ")


# -- several samples ------------------------------------------------------------------------


def samples(parts: Parts) -> Child:
    """Return pass@k, and what the samples of a task are worth together."""
    runs = [run for run in parts.evaluations if len(run.pass_at) > 1]

    def column(key: int | str) -> Column:
        def cell(run: EvaluationRun) -> Child:
            found = run.together.get(key) if isinstance(key, str) else dict(run.pass_at).get(key)
            return [percent(found.value), el("small", ends(found))] if found else DASH

        return Column(key if isinstance(key, str) else f"pass@{key}", cell)

    ks = sorted({k for run in runs for k, _ in run.pass_at})
    names = dict.fromkeys(name for run in runs for name in run.together)
    drawn = el("div", (ladder(run.name, run.pass_at) for run in runs), class_="panels")
    columns = [RUN, TASKS, *map(column, ks), *map(column, names)]
    return [drawn, table(runs, columns)] if runs else None


# -- cost -----------------------------------------------------------------------------------


def cost(parts: Parts) -> Child:
    """Return tokens of a task against accuracy, the teacher among the runs, for each task set."""
    known = [run for run in parts.evaluations if not run.is_control]
    runs = [run for run in known if run.figures.get("tokens_per_task", 0) > 0]
    if len(runs) < 2:
        return None
    alone = {run.on for run in runs if sum(each.on == run.on for each in runs) == 1}
    several = by_tasks(run for run in runs if run.on not in alone) or [("", runs)]
    plots = (_cost_plot(own, on) for on, own in several)
    return el("div", plots, class_="beside" if len(several) > 1 else None)


def _cost_plot(runs: Sequence[EvaluationRun], on: str) -> Markup:
    spots: list[Spot] = []
    for run in runs:
        spent = run.figures["tokens_per_task"]
        known = bootstrap(run.tokens) if run.tokens else None
        tokens = known or Estimate(spent, spent, spent, 0)
        spots.append(Spot(run.name, tokens, run.accuracy, "team" if run.team else ""))
    said = "; ".join(
        f"{spot.label}: {spot.cost.value:,.0f} tokens, {percent(spot.accuracy.value)}"
        for spot in spots
    )

    def width(spot: Spot) -> str:
        return f"{spot.cost.low:,.0f}{DASH}{spot.cost.high:,.0f}" if spot.cost.n else "not known"

    columns = [
        Column("run", lambda spot: strange(spot.label), "row"),
        Column("tokens a task", lambda spot: f"{spot.cost.value:,.0f}"),
        Column(None, width, "ends"),
        Column(score_name(runs), lambda spot: percent(spot.accuracy.value)),
        Column(None, lambda spot: ends(spot.accuracy), "ends"),
        Column("n", lambda spot: f"{spot.accuracy.n:,}"),
    ]
    plot = cost_plot(spots, "tokens a task", said)
    behind = el("details", el("summary", "The numbers"), table(spots, columns))
    return el("div", el("h3", strange(on)) if on else None, el("figure", plot), behind)


# -- agents and stops -----------------------------------------------------------------------


def agents(parts: Parts) -> Child:
    """Return calls and blocks of each agent for a rollout; those that have a tool first."""
    together = by_tasks(run for run in parts.evaluations if run.chains or run.calls)
    return [made for on, runs in together if (made := _agents(runs, on))]


def _agents(runs: Sequence[EvaluationRun], on: str) -> Markup | None:
    """Return agents down, runs on the same tasks across."""
    tools, means = set[str](), dict[int, dict[str, float]]()
    for run in runs:
        tools |= {block.role for chain in run.chains for block in chain.of_kind("tool")}
        tools |= run.calls.keys()
        blocks = Counter(block.role for chain in run.chains for block in chain.blocks)
        own = {role: count / len(run.chains) for role, count in blocks.items()}
        means[id(run)] = own | run.calls
    others = {role for each in means.values() for role in each} - tools
    if not tools and not others:
        return None
    most = max(value for each in means.values() for value in each.values()) or 1.0

    def cell(run: EvaluationRun, role: str) -> Child:
        value = means[id(run)].get(role, 0.0)
        label = el("span", el("b", f"{value:.2f}"))
        return [label, bar([(value / most, "amount")], f"{role}: {value:.2f} a rollout")]

    def head(run: EvaluationRun) -> Child:
        return [strange(run.name), el("small", f"n {len(run.chains) or run.accuracy.n:,}")]

    def name(role: str) -> Child:
        return [strange(role), el("small", "tool" if role in tools else "")]

    roles, heads = [*sorted(tools), *sorted(others)], [(run, head(run)) for run in runs]
    title = strange(on) if on else None
    return _across(roles, Column("agent", name, "row"), heads, cell, title)


STOPS = ("answered", "cut", "malformed", "outside")
"""Kinds of endings; each is a class of the style, which the legend of the page explains."""


def stops(parts: Parts) -> Child:
    """Return how rollouts ended."""
    runs = [run for run in parts.evaluations if run.stops]

    def drawn(run: EvaluationRun) -> Markup:
        total = sum(run.stops.values()) or 1
        counts = Counter[str]()
        for stop, count in run.stops.items():
            counts[_stop_kind(stop)] += count
        said = ", ".join(f"{stop} {count:,}" for stop, count in run.stops.items())
        return bar([(counts[kind] / total, kind) for kind in STOPS], said)

    columns = [
        RUN,
        Column("rollouts", lambda run: f"{sum(run.stops.values()):,}"),
        Column("", drawn, "plot"),
        Column("why it ended", lambda run: _listed(run.stops), "said"),
    ]
    return table(runs, columns, class_="runs") if runs else None


def _listed(counts: Mapping[str, int]) -> list[Child]:
    """Return names with their counts; each name is a stranger's."""
    cells = ([strange(name), f" {count:,}"] for name, count in counts.items())
    return [[", " if at else "", *cell] for at, cell in enumerate(cells)]


def _stop_kind(stop: str) -> str:
    if stop not in StopReason._value2member_map_:
        return "outside"
    reason = StopReason(stop)
    if reason.truncated:
        return "cut"
    if reason.outside:
        return "outside"
    return "malformed" if reason is StopReason.MALFORMED else "answered"


# -- training and distillation --------------------------------------------------------------


def _training(found: Training) -> Markup:
    every = SFT_PANELS if found.stage == "sft" else PANELS
    known = [each for each in every if points(found.records, each.key)]
    figures = {each.key: dict(points(found.records, each.key)) for each in known}
    updates = sorted({update for each in figures.values() for update in each})
    said = f"{found.stage}, {int(max(updates, default=0)):,} updates"
    return el(
        "article",
        el(
            "h3", strange(found.name), el("small", said, "" if found.finished else ", not finished")
        ),
        el("p", strange(found.about), class_="note") if found.about else None,
        el("div", (each.framed() for each in panels(found.records, known)), class_="panels"),
        _numbers(updates, known, figures),
    )


def _numbers(
    updates: Sequence[float], known: Sequence[Panel], figures: Mapping[str, Mapping[float, float]]
) -> Markup:
    """Return the table behind the plots: a few updates, each figure as it was written."""

    def cell(panel: Panel) -> Callable[[float], str]:
        own = figures[panel.key]
        return lambda update: format(own[update], panel.spec) if update in own else ""

    step = -(-len(updates) // MOST_UPDATES) or 1
    some = sorted({*updates[::step], *updates[-1:], *figures.get("eval_accuracy", {})})
    columns = [Column("update", lambda update: f"{update:,.0f}")]
    columns += [Column(panel.name, cell(panel)) for panel in known]
    left = len(updates) - len(some)
    note = f"The numbers of {len(some):,} updates" + (f" ({left:,} left out)" if left > 0 else "")
    return el("details", el("summary", note), table(some, columns))


def _funnel(name: str, found: Funnel) -> Markup:
    most = max([found.episodes, *(each.left + each.dropped for each in found.stages)]) or 1

    def drawn(stage: FunnelStage) -> Markup:
        counts = (stage.left - stage.repeated, stage.repeated, stage.dropped)
        looks = ("left", "repeated", "dropped")
        shares = [(count / most, look) for count, look in zip(counts, looks, strict=True)]
        return bar(shares, f"{stage.name}: {stage.left:,} left")

    columns = [
        Column("stage", lambda stage: strange(stage.name), "row"),
        Column("", drawn, "plot"),
        Column("left", lambda stage: f"{stage.left:,}"),
        Column("dropped", lambda stage: f"{MINUS}{stage.dropped:,}" if stage.dropped else DASH),
        Column("repeated", lambda stage: f"+{stage.repeated:,}" if stage.repeated else DASH),
        Column("why", lambda stage: _listed(stage.reasons), "said"),
    ]
    begun = FunnelStage("episodes", found.episodes, found.episodes, 0, 0, {})
    kept = f"{found.kept:,} chains of {found.episodes:,} episodes"
    caption = [strange(name), el("small", kept)]
    return table([begun, *found.stages], columns, caption=caption, class_="runs")


SECTIONS: dict[str, Callable[[Parts], Child]] = {
    "results": results,
    "differences": differences,
    "cost": cost,
    "breakdown": breakdowns,
    "samples": samples,
    "agents": agents,
    "stops": stops,
    "training": lambda parts: [_training(each) for each in parts.trainings],
    "funnel": lambda parts: [_funnel(*each) for each in parts.distillations],
}
"""Section of the page, where its title and note are -> its body; nothing where it is to be left
out."""
