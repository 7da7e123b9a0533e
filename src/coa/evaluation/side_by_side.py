"""Chains of two evaluations beside each other on a terminal: where one won, and where it lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coa.errors import CoaError
from coa.evaluation.compare import Measured, spread
from coa.evaluation.run import load_measured
from coa.grammar import Grammar, parse
from coa.io.runs import Json
from coa.trajectory import Step, Trajectory, load_trajectories
from coa.view.terminal import FOLD, closing_line, colour_of, fold, harmless, observed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


Styled = tuple[str, str]
"""A text and its style."""


def print_sides(out: Console, directories: Sequence[Path], result: Json, n: int) -> None:
    """For each run after the first, n tasks that it won and n that it lost, both chains of each."""
    first = _Side(directories[0])
    for directory, row in zip(directories[1:], result["runs"][1:], strict=True):
        other = _Side(directory)
        for word, task_ids in (("won", row["won"]), ("lost", row["lost"])):
            chosen = spread(task_ids, first.measured, n)
            out.print()
            out.print(f"{directory} {word} {len(task_ids)}, {len(chosen)} shown", style="bold")
            for task_id in chosen:
                won = word == "won"
                left = first.sample(task_id, best=not won)
                _print_pair(out, left, other.sample(task_id, best=won), (first.name, other.name))


class _Side:
    """A run with its chains."""

    def __init__(self, directory: Path) -> None:
        self.measured: Measured = load_measured(directory)
        self.name = str(directory)
        self._chains: dict[str, list[Trajectory]] = {}
        for trajectory in load_trajectories(directory):
            self._chains.setdefault(trajectory.task_id, []).append(trajectory)

    def sample(self, task_id: str, *, best: bool) -> Trajectory:
        """Of several samples the first that shows why the task was won, or lost."""
        scores = self.measured.scores[task_id]
        wanted = max(scores) if best else min(scores)
        return self._chains[task_id][list(scores).index(wanted)]


def _print_pair(out: Console, left: Trajectory, right: Trajectory, names: tuple[str, str]) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for _ in names:
        table.add_column(ratio=1, overflow="fold")
    table.add_row(*(_text([(name, "underline")]) for name in names))
    table.add_row(*(_text(_lines(chain)) for chain in (left, right)))
    out.print()
    out.print(fold(left.question, 600), style="bold")
    out.print(table, soft_wrap=False)


def _text(lines: Sequence[Styled] | Iterator[Styled]) -> Text:
    from rich.text import Text

    return Text("\n").join(Text(text, style=style) for text, style in lines)


def _lines(chain: Trajectory) -> Iterator[Styled]:
    """A chain block by block; what cannot be read under its grammar stands as it was written."""
    try:
        grammar = chain.protocol
    except CoaError:  # a grammar of one's own, whose file is not known here
        yield fold(chain.text, 8 * FOLD), ""
    else:
        for step in chain.steps:
            yield from _step_lines(step, grammar)
    yield closing_line(chain).strip(), "bold" if chain.answer else "red"


def _step_lines(step: Step, grammar: Grammar) -> Iterator[Styled]:
    parsed = parse(grammar, step.model.text)
    for block in parsed.blocks:
        yield f"{block.role}: {fold(block.body)}", colour_of(block.role)
    if parsed.faults:
        yield f"malformed: {harmless(parsed.faults[0].message)}", "red"
    if step.observation is not None:
        yield f"{grammar.observation}: {fold(observed(step.observation, grammar))}", "dim"
