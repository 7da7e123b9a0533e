"""Chains on a terminal: one colour per agent, observations folded, plain text when piped.

Rich decides about colour (a terminal, NO_COLOR, a pipe); the words are the same in every case.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coa.protocol import Grammar, Splitter
from coa.protocol.bound import load_bound
from coa.protocol.parse import Event
from coa.runs import Json
from coa.trajectory import Author, Segment, Trajectory, load_trajectories

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = {
    "think": "bright_black",
    "plan": "blue",
    "reflection": "yellow",
    "suggested_answer": "green",
    "double_check": "magenta",
    "answer": "bold green",
}
_TOOL_COLOURS = ("cyan", "bright_cyan", "bright_blue", "bright_magenta")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
FOLD = 240
LABEL = 16
"""Width of the column of agents' names."""
_NEXT_LINE = "\n" + " " * (LABEL + 2)


def colour_of(role: str) -> str:
    """One colour per agent; tools get theirs from their name."""
    digest = hashlib.sha256(role.encode()).digest()[0]
    return _COLOURS.get(role, _TOOL_COLOURS[digest % len(_TOOL_COLOURS)])


def harmless(text: str) -> str:
    """Without control characters: a page must not drive the reader's terminal."""
    return _CONTROL.sub("", text)


def fold(text: str, limit: int = FOLD) -> str:
    """One paragraph of an observation, with what was left out."""
    flat = " ".join(harmless(text).split())
    return flat if len(flat) <= limit else f"{flat[:limit].rstrip()} ... (+{len(flat) - limit})"


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


class ChainPrinter:
    """Prints a chain as it is written: text of the model in pieces, observations whole."""

    def __init__(self, out: Console, grammar: Grammar) -> None:
        self.out, self.grammar = out, grammar
        self._splitter = Splitter(grammar, events=True)
        self._line_open = False
        self._fresh = False

    def model_text(self, text: str) -> None:
        """More text of the present model turn."""
        self._print(self._splitter.feed(text))

    def end_turn(self, observation: Segment | None) -> None:
        """The turn is complete; show what the environment answered."""
        self._splitter.finish()
        self._print(self._splitter.take_events())
        self._splitter = Splitter(self.grammar, events=True)
        self._break_line()
        if observation is not None:
            self._label(self.grammar.observation, "dim")
            body = observation.text.strip()
            tag = self.grammar.observation
            body = body.removeprefix(f"<{tag}>").removesuffix(f"</{tag}>")
            self.out.print(fold(body), style="dim")

    def _print(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.kind == "open" and event.role != self.grammar.observation:
                self._break_line()
                self._label(event.role or "", colour_of(event.role or ""))
                self._line_open = self._fresh = True
            elif event.kind == "text" and event.role == self.grammar.observation:
                continue
            elif event.kind == "text":
                text = harmless(event.text.lstrip() if self._fresh else event.text)
                if event.role is None and not text.strip():
                    continue
                style = colour_of(event.role) if event.role else "red"
                self.out.print(text.replace("\n", _NEXT_LINE), style=style, end="")
                self._line_open, self._fresh = True, self._fresh and not text
            elif event.kind == "close":
                self._break_line()
            elif event.kind == "fault":
                self._break_line()
                self._label("malformed", "red")
                self.out.print(harmless(event.text), style="red")

    def _label(self, role: str, colour: str) -> None:
        self.out.print(f"{role:>{LABEL}}  ", style=colour, end="")

    def _break_line(self) -> None:
        if self._line_open:
            self.out.print()
            self._line_open = False


def print_chain(out: Console, trajectory: Trajectory, grammar: str = "") -> None:
    """Print a finished trajectory the way `coa ask` streams one; `grammar` names one's own file."""
    bound = load_bound(grammar or trajectory.grammar, tuple(trajectory.tools))
    out.print(f"{'question':>{LABEL}}  {harmless(trajectory.question)}", style="bold")
    printer = ChainPrinter(out, bound)
    for step in trajectory.steps:
        printer.model_text(step.model.text)
        printer.end_turn(step.observation)
    out.print(closing_line(trajectory), style="dim")


def closing_line(trajectory: Trajectory) -> str:
    """Answer, cost and ending in one line."""
    usage = trajectory.usage
    parts = [f"answer: {trajectory.answer}" if trajectory.answer else "no answer"]
    if usage.sampled_tokens:
        parts.append(f"{usage.sampled_tokens} tokens sampled, {usage.total_tokens} in all")
    parts.append(f"{usage.tool_calls} tool call{'s' * (usage.tool_calls != 1)}")
    if "total" in trajectory.seconds:
        parts.append(f"{trajectory.seconds['total']:.1f} s")
    if trajectory.stop is not None and trajectory.stop != "answered":
        parts.append(f"ended: {trajectory.stop}")
    if trajectory.error:
        parts.append(trajectory.error)
    return harmless(f"{'=':>{LABEL}}  {' | '.join(parts)}")


def print_mask(out: Console, trajectory: Trajectory) -> None:
    """The text with its loss mask: green is trained, red is a mistake at weight 0, dim is not.

    Without colour what is not trained stands in brackets, a mistake in braces.
    """
    plain = out.no_color or not out.color_system
    out.print(f"{trajectory.task_id}  {trajectory.grammar}", style="bold")
    out.print(harmless(trajectory.question), style="bold")
    counts = {"trained": 0, "mistake": 0, "not trained": 0}
    looks = {"trained": ("green", "", ""), "mistake": ("red", "{{", "}}")}
    for kind, text in _mask_spans(trajectory):
        counts[kind] += len(text)
        style, opening, closing = looks.get(kind, ("dim", "[[", "]]"))
        shown = f"{opening}{harmless(text)}{closing}" if plain else harmless(text)
        out.print(shown, style=style, end="")
    out.print()
    figures = ", ".join(f"{kind} {count}" for kind, count in counts.items())
    legend = "; [[not trained]] {{mistake}}" if plain else ""
    out.print(f"characters: {figures}{legend}", style="dim")


def _mask_spans(trajectory: Trajectory) -> Iterator[tuple[str, str]]:
    for segment in trajectory.segments:
        if segment.author is not Author.MODEL:
            yield "not trained", segment.text
            continue
        position = 0
        for start, end in sorted(segment.errs):
            yield "trained", segment.text[position:start]
            yield "mistake", segment.text[start:end]
            position = end
        yield "trained", segment.text[position:]


def print_grammar(out: Console, grammar: Grammar) -> None:
    """Blocks of a protocol with their successors."""
    out.print(f"{grammar.name}: begins with {', '.join(grammar.expand(grammar.start))}")
    if grammar.interleave:
        out.print(f"{grammar.interleave} comes before every other block", style="dim")
    for role in grammar.roles:
        out.print(f"{role.name:>18}  ", style=colour_of(role.name), end="")
        followers = ", ".join(grammar.expand(role.next)) or (
            "any block" if role.name == grammar.interleave else "end"
        )
        out.print(f"{role.kind:<11} -> {followers}")
    out.print(f"stops at {' '.join(grammar.stop_strings)}", style="dim")


def percent(value: float, interval: Sequence[float]) -> str:
    """A proportion with its interval, in percent."""
    return f"{100 * value:5.1f}% [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def print_summary(out: Console, summary: Json, where: str) -> None:
    """An evaluation in a few lines."""
    accuracy = percent(summary["accuracy"], summary["ci95"])
    reward = summary.get("reward", "exact")
    figure = "accuracy" if reward == "exact" else f"mean of {reward}"
    out.print(f"{figure} {accuracy}  n={summary['n']} k={summary['k']}", style="bold")
    out.print(f"{'model':>20}  {summary.get('model', '')}")
    for key in ("tokens_per_task", "tokens_per_solved", "tool_calls_per_task", "f1"):
        out.print(f"{key:>20}  {summary[key]}")
    stops = ", ".join(f"{name} {count}" for name, count in summary["stop_reasons"].items())
    out.print(f"{'stop reasons':>20}  {stops}")
    if summary["environment"]:
        ended = f"{summary['environment']} rollouts were ended by the environment and count as 0"
        out.print(f"{'!!':>20}  {ended}", style="red")
    for name, group in summary.get("by_family", {}).items():
        accuracy = percent(group["accuracy"], group["ci95"])
        out.print(f"{name:>20}  {accuracy}  n={group['n']}", style="dim")
    out.print(f"trajectories, scores and summary in {where}", style="dim")


def significance(p_value: float) -> str:
    return f"p={p_value:.2g}" if p_value >= 0.0001 else "p<0.0001"


def print_comparison(out: Console, result: Json) -> None:
    """Runs side by side, each against the first."""
    for row in result["runs"]:
        line = f"{row['run']:<32} {percent(row['accuracy'], row['ci95'])}"
        if "difference" in row:
            low, high = row["difference_ci95"]
            line += f"  {100 * row['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
            line += f"  wins {row['wins']} losses {row['losses']} {significance(row['p_value'])}"
        out.print(line)


def print_speedrun(out: Console, result: Json) -> None:
    """The table of a speedrun and three chains of the trained model."""
    columns = f"{'n':>5}{'calls':>7}{'tokens/task':>13}{'uncached':>10}"
    out.print(f"{'':<22}{'accuracy, 95% interval':<24}{columns}")
    for row in result["rows"]:
        accuracy = percent(row["accuracy"], row["ci95"])
        out.print(
            f"{row['name']:<22}{accuracy:<24}{row['n']:>5}{row['tool_calls_per_task']:>7}"
            f"{row['tokens_per_task']:>13.0f}{row['tokens_per_task_uncached']:>10.0f}"
        )
    gain = result["gain"]
    low, high = gain["difference_ci95"]
    out.print(
        f"sft against base: {100 * gain['difference']:+.1f} points [{100 * low:+.1f}, "
        f"{100 * high:+.1f}], wins {gain['wins']}, losses {gain['losses']}"
    )
    out.print()
    for trajectory in load_trajectories(Path(result["out"]) / "eval-sft")[:3]:
        print_chain(out, trajectory)
        out.print()
    question = "What is the capital of the country where Osaka is located?"
    out.print(f'now try: {Path(sys.argv[0])} ask "{question}"')
