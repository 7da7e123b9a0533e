"""The sections of a report that need no script: tables with plots in their cells, and figures.

Each takes what was found and gives its markup, or None where there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import takewhile

from coa.statistics import Estimate, Paired, bootstrap, paired
from coa.trajectory import StopReason
from coa.view.evaluations import GROUPS, HELD_OUT, EvaluationRun, by_tasks, model_name
from coa.view.plots import (
    Child,
    Markup,
    Spot,
    bar,
    cost_plot,
    el,
    inner,
    interval,
    ladder,
    number,
    number_head,
    strange,
    table,
)
from coa.view.report_parts import Distillation, Parts
from coa.view.terminal import significance

MOST_COLUMNS, MOST_ROWS = 10, 40
"""Of a breakdown; what is left out is said."""
DASH = "\u2013"
MINUS = "\u2212"


def section(name: str, title: str, note: Child, *body: Child) -> Markup:
    """A part of the page with a heading that can be linked to."""
    said = el("p", note, class_="note") if note else None
    return el("section", el("h2", title), said, body, id=name)


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}%"


def ends(found: Estimate, sign: str = "") -> str:
    """An interval in percent."""
    low, high = (f"{100 * each:{sign}.1f}".replace("-", MINUS) for each in found[1:3])
    return f"{low} to {high}" if sign else f"{low}{DASH}{high}"


def spoken(found: Estimate, what: str) -> str:
    """An estimate in words, for those who do not see the plot."""
    return f"{what} {percent(found.value)}, 95% interval {ends(found)}, n = {found.n:,}"


def score_name(runs: Iterable[EvaluationRun]) -> str:
    """Exact answers make an accuracy; anything else is the mean of its reward."""
    rewards = sorted({run.reward for run in runs if not run.team})
    return "accuracy" if rewards in ([], ["exact"]) else f"mean of {', '.join(rewards)}"


# -- the table of runs ----------------------------------------------------------------------


def results(parts: Parts) -> Markup | None:
    """All runs, one a row."""
    runs = parts.evaluations
    if not runs:
        return None
    what = score_name(runs)
    columns = [column for column in _columns(runs) if column[1]]
    head: list[Child] = ["run", el("th", f"{what}, 95% interval", colspan=2), _axis("0", "100%")]
    head += [number_head(name) for name in ("n", *(name for name, _ in columns))]
    rows = []
    for at, run in enumerate(runs):
        cells = [
            el("th", strange(run.name), el("small", _about(run)), scope="row"),
            number(el("b", percent(run.accuracy.value))),
            el("td", ends(run.accuracy), class_="ends"),
            el("td", interval(run.accuracy, spoken(run.accuracy, what)), class_="plot"),
            number(f"{run.accuracy.n:,}" + (f" {chr(215)} {run.k}" if run.k > 1 else "")),
        ]
        rows.append(cells + [number(figures[at]) for _, figures in columns])
    note = (
        f"Every task counts, answered or not; {what} is over n tasks, with its 95% interval on a "
        "scale from 0 to 100%. Tokens count each prompt, sampled and observed token once, as with "
        "a perfect cache; uncached: what an interface without a cache would bill."
    )
    return section("results", "Results", note, table(head, rows, class_="runs"))


def _axis(*labels: str) -> Markup:
    """The head of a column of intervals: where its scale begins and ends."""
    return el("th", el("span", (el("span", label) for label in labels)), class_="plot axis")


def _columns(runs: Sequence[EvaluationRun]) -> list[tuple[Child, list[str]]]:
    """Name of a column and its cells; no cells where no run has the figure."""

    def column(name: Child, cells: list[str]) -> tuple[Child, list[str]]:
        return name, cells if any(cell not in ("", DASH) for cell in cells) else []

    def figures(key: str, digits: int) -> list[str]:
        found = (run.figures.get(key) for run in runs)
        return [DASH if each is None else f"{each:,.{digits}f}" for each in found]

    def seconds(key: str) -> list[str]:
        return [f"{run.latency[key]:,.1f}" if key in run.latency else DASH for run in runs]

    currency = next((run.money[2] for run in runs if run.money and run.money[2]), "") or "money"
    costs, solved = ([_thousand(run.money, at) for run in runs] for at in (0, 1))
    return [
        column("tokens / task", figures("tokens_per_task", 0)),
        column("uncached / task", figures("tokens_per_task_uncached", 0)),
        column("tokens / solved", figures("tokens_per_solved", 0)),
        column("tool calls / task", figures("tool_calls_per_task", 2)),
        column("seconds, median", seconds("p50")),
        column("95th percentile", seconds("p95")),
        column([strange(currency), " / 1,000 tasks"], costs),
        column([strange(currency), " / 1,000 solved"], solved),
    ]


def _thousand(money: tuple[float, float | None, str] | None, at: int) -> str:
    """What a thousand tasks cost, or a thousand solved ones: of one it is a very small number."""
    amount = money[at] if money else None
    return f"{Decimal(f'{1000 * amount:#.3g}'):,f}" if isinstance(amount, float) else DASH


def _about(run: EvaluationRun) -> Child:
    """What a reader must know of a run besides its name."""
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
    """What a run is compared with: the first on its tasks, and the one before it (what fine-tuning
    gave, and what RL added to that); a control with the same model when its tools answer."""
    real = [each for each in runs if not each.is_control and _comparable(each, run)]
    if run.is_control:
        return [each for each in real if each.model == run.model][:1]
    earlier = list(takewhile(lambda each: each is not run, real))
    return earlier[:1] + earlier[1:][-1:]


def differences(parts: Parts) -> Markup | None:
    """Runs against others on the same tasks."""
    runs = [run for run in parts.evaluations if run.scores]
    found, apart = list[tuple[EvaluationRun, EvaluationRun, Paired]](), list[str]()
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
    apart = [name for name in apart if all(name != first.name for first, _, _ in found)]
    reach = (
        max(max(abs(pair.difference.low), abs(pair.difference.high)) for *_, pair in found) or 0.01
    )
    rows = []
    for first, run, pair in found:
        gain = pair.difference
        points = f"{100 * gain.value:+.1f}".replace("-", MINUS)
        said = f"{points} points, 95% interval {ends(gain, '+')}"
        rows.append(
            [
                el(
                    "th",
                    strange(run.name),
                    el("small", "against ", strange(first.name)),
                    scope="row",
                ),
                number(el("b", points)),
                el("td", ends(gain, "+"), class_="ends"),
                el("td", interval(gain, said, -reach, reach), class_="plot"),
                *(number(f"{count:,}") for count in (gain.n, pair.wins, pair.losses, pair.ties)),
                number(significance(pair.p_value).removeprefix("p=").removeprefix("p")),
            ]
        )
    scale = (f"{MINUS}{100 * reach:.0f}", "0", f"+{100 * reach:.0f}")
    head: list[Child] = ["run", el("th", "points, 95% interval", colspan=2), _axis(*scale)]
    head += [number_head(name) for name in ("n", "wins", "losses", "ties", "p")]
    note: list[Child] = [
        "Paired by task: percentage points above another run on the same tasks, with 95% bootstrap "
        "intervals over the n tasks that both have: above the first, and above the one before; a "
        "control against the same model with its tools. p is a two-sided exact sign test over the "
        "tasks that differ."
    ]
    if apart:
        note += [
            " Alone with its tasks or its reward, so not compared: ",
            strange(", ".join(apart)),
            ".",
        ]
    return section("differences", "Differences", note, table(head, rows, class_="runs"))


# -- breakdowns -----------------------------------------------------------------------------


def breakdowns(parts: Parts) -> Markup | None:
    """One table for each thing that tasks are grouped by: groups down, runs on them across."""
    together = by_tasks(parts.evaluations)
    keys = dict.fromkeys([*GROUPS, *(key for run in parts.evaluations for key in run.groups)])
    tables = [
        made
        for key in keys
        for on, runs in together.items()
        if (made := _breakdown(key, runs, on if len(together) > 1 else ""))
    ]
    if not tables:
        return None
    note = "Mean score of each group of tasks, with 95% intervals from 0 to 100% and n."
    return section("breakdown", "Where it is right", note, tables)


def _breakdown(key: str, evaluations: Sequence[EvaluationRun], on: str) -> Markup | None:
    runs = [run for run in evaluations if run.groups.get(key)]
    groups = list(dict.fromkeys(name for run in runs for name in run.groups[key]))
    if len(groups) < 2:
        return None
    shown, listed = runs[:MOST_COLUMNS], sorted(groups, key=_natural)[:MOST_ROWS]
    rows = [
        [el("th", strange(_group_name(key, name)), scope="row")]
        + [_group_cell(run.groups[key].get(name), run.name) for run in shown]
        for name in listed
    ]
    left_out = [
        f"{len(every) - len(some):,} more {what}"
        for every, some, what in ((groups, listed, "groups"), (runs, shown, "runs"))
        if len(every) > len(some)
    ]
    caption = inner(
        GROUPS.get(key) or strange(key.removesuffix(HELD_OUT).replace("_", " ").capitalize()),
        el("small", strange(on)) if on else None,
        el("small", f"left out: {', '.join(left_out)}") if left_out else None,
    )
    return table(
        ["", *(el("th", strange(run.name)) for run in shown)],
        rows,
        caption=caption,
        class_="groups",
    )


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


def _group_cell(found: Estimate | None, run: str) -> Markup:
    if found is None:
        return el("td", DASH, class_="group")
    label = el("span", el("b", percent(found.value)), el("small", f"n {found.n:,}"))
    return el("td", label, interval(found, spoken(found, run)), class_="group")


# -- several samples ------------------------------------------------------------------------


def samples(parts: Parts) -> Markup | None:
    """pass@k, and what the samples of a task are worth together."""
    runs = [run for run in parts.evaluations if len(run.pass_at) > 1]
    if not runs:
        return None
    ks = sorted({k for run in runs for k, _ in run.pass_at})
    names = list(dict.fromkeys(name for run in runs for name, _ in run.together))
    head: list[Child] = [
        "run",
        number_head("n"),
        *(number_head(f"pass@{k}") for k in ks),
        *map(number_head, names),
    ]
    rows = []
    for run in runs:
        known: dict[str, Estimate] = {f"pass@{k}": found for k, found in run.pass_at}
        known |= dict(run.together)
        cells = [number(f"{run.accuracy.n:,}")]
        for name in [*(f"pass@{k}" for k in ks), *names]:
            found = known.get(name)
            text = [percent(found.value), el("small", ends(found))] if found else [DASH]
            cells.append(number(text))
        rows.append([el("th", strange(run.name), scope="row"), *cells])
    note = (
        "pass@k: the chance that k samples of a task hold a right one, without bias, over n tasks; "
        "dots over k from 0 to the number of samples, lines are 95% intervals. Mean, vote and best "
        "are of one sample or of all of them: whoever votes or chooses sees no right answer."
    )
    panels = el("div", (ladder(run.name, run.pass_at) for run in runs), class_="panels")
    return section("samples", "With several samples", note, panels, table(head, rows))


# -- cost -----------------------------------------------------------------------------------


def cost(parts: Parts) -> Markup | None:
    """Tokens of a task against accuracy, the teacher among the runs; a plot for each task set."""
    known = [run for run in parts.evaluations if not run.is_control]
    runs = [run for run in known if (run.figures.get("tokens_per_task") or 0) > 0]
    if len(runs) < 2:
        return None
    several = {on: own for on, own in by_tasks(runs).items() if len(own) > 1} or {"": runs}
    note = (
        "Better is up and to the left. Crosses are 95% intervals over the n tasks of a run; of a "
        "run without trajectories here (a teacher) that of its tokens is not known. Controls are "
        "left out, and so are runs that are alone with their tasks while others are not."
    )
    named = len(several) > 1
    plots = (_cost_plot(own, on if named else "") for on, own in several.items())
    beside = el("div", plots, class_="beside" if named else None)
    return section("cost", "Cost against accuracy", note, beside)


def _cost_plot(runs: Sequence[EvaluationRun], on: str) -> Markup:
    spots, rows = [], []
    for run in runs:
        spent = run.figures["tokens_per_task"]
        assert spent is not None, run.name
        tokens = bootstrap(run.tokens) if run.tokens else None
        tokens = tokens or Estimate(spent, spent, spent, run.accuracy.n)
        spots.append(Spot(run.name, tokens, run.accuracy, "team" if run.team else ""))
        width = f"{tokens.low:,.0f}{DASH}{tokens.high:,.0f}" if run.tokens else "not known"
        rows.append(
            [
                el("th", strange(run.name), scope="row"),
                number(f"{tokens.value:,.0f}"),
                el("td", width, class_="ends"),
                number(percent(run.accuracy.value)),
                el("td", ends(run.accuracy), class_="ends"),
                number(f"{run.accuracy.n:,}"),
            ]
        )
    said = "; ".join(
        f"{spot.label}: {spot.cost.value:,.0f} tokens, {percent(spot.accuracy.value)}"
        for spot in spots
    )
    head: list[Child] = ["run", el("th", "tokens a task", colspan=2)]
    head += [el("th", score_name(runs), colspan=2), number_head("n")]
    plot = cost_plot(spots, "tokens a task", said)
    behind = el("details", el("summary", "The numbers"), table(head, rows))
    return el("div", el("h3", strange(on)) if on else None, el("figure", plot), behind)


# ------------------------------------------------------------------------------------------------
# The sections of a report on what was done: by agents, until the end, and in a distillation.
# ------------------------------------------------------------------------------------------------


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


def _agents(every: Sequence[EvaluationRun], on: str) -> Markup | None:
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


def _run_head(run: EvaluationRun, n: int) -> Markup:
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
    if reason.outside:
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
