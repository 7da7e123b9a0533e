"""A speedrun on the terminal: the table, what each stage gained, and chains to read."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from coa.display import percent, print_chain, significance
from coa.runs import Json
from coa.trajectory import load_trajectories

if TYPE_CHECKING:
    from rich.console import Console

NAMES = {
    "team": "team of experts",
    "base": "untrained",
    "sft": "fine-tuned",
    "rl": "fine-tuned, then RL",
}
CHAINS = 3


def print_speedrun(out: Console, result: Json) -> None:
    """Accuracy and cost by tasks and by model, paired differences, and chains of the last model."""
    columns = f"{'n':>5}{'calls':>7}{'tokens/task':>13}{'uncached':>10}"
    out.print(f"{'':<24}{'accuracy, 95% interval':<24}{columns}")
    for name, rows in groupby(result["rows"], key=lambda row: row["on"]):
        out.print(name, style="bold")
        for row in rows:
            _print_row(out, row)
        for gain in result["gains"]:
            if gain["on"] == name:
                out.print(_gain_line(gain), style="dim")
    out.print()
    _print_chains(out, result)
    if report := result.get("report"):
        out.print(f"report: {report}")
    question = "What is the capital of the country where Osaka is located?"
    out.print(f'now try: {Path(sys.argv[0])} ask --model {result["model"]} "{question}"')


def _print_row(out: Console, row: Json) -> None:
    accuracy = percent(row["accuracy"], row["ci95"])
    out.print(
        f"  {NAMES[row['who']]:<22}{accuracy:<24}{row['n']:>5}{row['tool_calls_per_task']:>7}"
        f"{row['tokens_per_task']:>13.0f}{row['tokens_per_task_uncached']:>10.0f}"
    )
    phrasings = row.get("by_phrasing_heldout", {})
    if len(phrasings) > 1 and row["who"] not in ("team", "base"):
        new = phrasings["True"]
        figure = percent(new["accuracy"], new["ci95"])
        out.print(f"  {'  in new phrasings':<22}{figure:<24}{new['n']:>5}", style="dim")


def _gain_line(gain: Json) -> str:
    low, high = gain["difference_ci95"]
    return (
        f"  {NAMES[gain['who']]} against {NAMES[gain['against']]}: {100 * gain['difference']:+.1f} "
        f"points [{100 * low:+.1f}, {100 * high:+.1f}], wins {gain['wins']}, losses "
        f"{gain['losses']}, {significance(gain['p_value'])}"
    )


def _print_chains(out: Console, result: Json) -> None:
    """The first tasks of the first measurement, by the last model: not chosen."""
    rows = [row for row in result["rows"] if row["who"] in ("sft", "rl")]
    measured = [row for row in rows if row["on"] == rows[0]["on"]]
    for trajectory in load_trajectories(Path(measured[-1]["run"]))[:CHAINS] if measured else ():
        print_chain(out, trajectory)
        out.print()
