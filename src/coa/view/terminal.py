"""Chains on a terminal: one colour per agent, observations folded, plain text when piped.

Rich decides about colour (a terminal, NO_COLOR, a pipe); the words are the same in every case.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from coa.grammar import Grammar, Splitter
from coa.grammar.parse import Event
from coa.io.runs import Json
from coa.statistics import interval
from coa.trajectory import Author, Segment, Trajectory

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


def observed(segment: Segment, grammar: Grammar) -> str:
    """What the environment said, without the tags around it."""
    tag = grammar.observation
    return segment.text.strip().removeprefix(f"<{tag}>").removesuffix(f"</{tag}>")


def console(*, quiet: bool = False) -> Console:
    from rich.console import Console

    return Console(quiet=quiet, highlight=False, markup=False, soft_wrap=True)


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
            self.out.print(fold(observed(observation, self.grammar)), style="dim")

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
                role = event.role or self.grammar.free
                style = colour_of(role) if role else "red"
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


def print_chain(out: Console, trajectory: Trajectory) -> None:
    """Print a finished trajectory the way `coa ask` streams one."""
    out.print(f"{'question':>{LABEL}}  {harmless(trajectory.question)}", style="bold")
    printer = ChainPrinter(out, trajectory.protocol)
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


MaskKind = Literal["trained", "mistake", "not trained"]
_MASK_LOOKS: dict[MaskKind, tuple[str, str, str]] = {
    "trained": ("green", "", ""),
    "mistake": ("red", "{{", "}}"),
    "not trained": ("dim", "[[", "]]"),
}
"""Colour, and the marks that stand for it where there is none."""


def mistakes(segment: Segment) -> list[tuple[int, int]]:
    """Return the spans of mistakes in order, inside the text and without overlaps."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted(segment.errs):
        start, end = max(start, spans[-1][1] if spans else 0), min(end, len(segment.text))
        if start < end:
            spans.append((start, end))
    return spans


def mask_spans(trajectory: Trajectory) -> Iterator[tuple[MaskKind, str]]:
    """Yield the text of a trajectory in parts, with what the loss mask says of each."""
    for segment in trajectory.segments:
        if segment.author is not Author.MODEL:
            yield "not trained", segment.text
            continue
        position = 0
        for start, end in mistakes(segment):
            yield "trained", segment.text[position:start]
            yield "mistake", segment.text[start:end]
            position = end
        yield "trained", segment.text[position:]


def print_masked(out: Console, spans: Iterable[tuple[MaskKind, str]]) -> str:
    """Print parts of a text: green is trained, red is a mistake at weight 0, dim is not trained.

    Without colour what is not trained stands in brackets, a mistake in braces; returns a legend,
    which then is needed.
    """
    plain = out.no_color or not out.color_system
    for kind, text in spans:
        style, opening, closing = _MASK_LOOKS[kind]
        shown = f"{opening}{harmless(text)}{closing}" if plain else harmless(text)
        out.print(shown, style=style, end="")
    return "[[not trained]] {{mistake}}" if plain else ""


def print_mask(out: Console, trajectory: Trajectory) -> None:
    """Print the text of a trajectory with its loss mask."""
    out.print(f"{trajectory.task_id}  {trajectory.grammar}", style="bold")
    out.print(harmless(trajectory.question), style="bold")
    spans = list(mask_spans(trajectory))
    legend = print_masked(out, spans)
    out.print()
    counts = (f"{kind} {sum(len(t) for k, t in spans if k == kind)}" for kind in _MASK_LOOKS)
    out.print("; ".join(filter(None, [f"characters: {', '.join(counts)}", legend])), style="dim")


def print_grammar(out: Console, grammar: Grammar) -> None:
    """Blocks of a protocol with their successors."""
    out.print(f"{grammar.name}: begins with {', '.join(grammar.expand(grammar.start))}")
    if grammar.interleave:
        when = "may come" if grammar.sparing else "comes"
        out.print(f"{grammar.interleave} {when} before every other block", style="dim")
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


def print_summary(out: Console, summary: Json, where: str, latency: Json | None = None) -> None:
    """Print an evaluation in a few lines."""
    accuracy = percent(summary["accuracy"], summary["ci95"])
    reward = summary.get("reward", "exact")
    figure = "accuracy" if reward == "exact" else f"mean of {reward}"
    out.print(f"{figure} {accuracy}  n={summary['n']} k={summary['k']}", style="bold")
    for name, line in _summary_lines(summary, latency or {}):
        out.print(f"{name:>20}  {line}", style="red" if name == "!!" else None)
    groups: list[tuple[str, Json]] = list(summary.get("by_family", {}).items())
    for key, found in summary.items():
        if key.startswith("by_") and key != "by_family" and len(found) > 1:
            groups += [(f"{key.removeprefix('by_')} {name}", each) for name, each in found.items()]
    wide = max([20, *(len(name) for name, _ in groups)])
    for name, group in groups:
        accuracy = percent(group["accuracy"], group["ci95"])
        out.print(f"{name:>{wide}}  {accuracy}  n={group['n']}", style="dim")
    out.print(f"trajectories, scores and summary in {where}", style="dim")


def _summary_lines(summary: Json, latency: Json) -> Iterator[tuple[str, Any]]:
    """Yield what a summary holds besides its accuracy."""
    if summary["k"] > 1 and "pass_at" in summary:  # with one sample they say nothing new
        together = {f"pass@{k}": found for k, found in summary["pass_at"].items()}
        together |= {f"avg@{summary['k']}": summary["avg_at_k"], "majority": summary["majority"]}
        together |= {f"best by {summary['best_of']['by']}": summary["best_of"]}
        for name, found in together.items():
            yield name, percent(found["value"], found["ci95"])
    yield "model", summary.get("model", "")
    for key in ("tokens_per_task", "tokens_per_solved", "tool_calls_per_task", "f1"):
        if key in summary:
            yield key, _figure(key, summary)
    if called := summary.get("tool_calls_by_agent"):
        yield "calls by tool", ", ".join(f"{role} {mean:g}" for role, mean in called.items())
    if cost := summary.get("money"):
        solved = "" if cost["per_solved"] is None else f", {cost['per_solved']:g} per solved task"
        yield "money", f"{cost['per_task']:g} per task{solved} {cost['currency']}".rstrip()
    if latency.get("n"):
        figures = ", ".join(f"{name} {latency[name]:g}" for name in ("mean", "p50", "p95"))
        most = min(latency["concurrency"], latency["n"])
        yield "seconds per task", f"{figures}, up to {most} at once"
    stops = summary["stop_reasons"].items()
    yield "stop reasons", ", ".join(f"{name} {count}" for name, count in stops)
    if ended := summary["environment"]:
        yield "!!", f"{ended} rollouts were ended by the environment and count as 0"


def _figure(key: str, summary: Json) -> Any:
    """A value as it is told: of tokens also whether a cache keeps what earlier turns have read."""
    value = summary[key]
    if not key.startswith("tokens_") or value is None:
        return value
    whole = summary.get("tokens_per_task_uncached") if key == "tokens_per_task" else None
    return f"{value} with a cache" + ("" if whole is None else f", {whole} without")


def significance(p_value: float) -> str:
    return f"p={p_value:.2g}" if p_value >= 0.0001 else "p<0.0001"


def print_comparison(out: Console, result: Json) -> None:
    """Print runs below each other, each against the first."""
    wide = max(len(row["run"]) for row in result["runs"])
    for row in result["runs"]:
        tokens = ""
        if "tokens_per_task" in row:
            tokens = f"  {row['tokens_per_task']:.0f} tokens per task"
            if row["tokens_per_solved"] is not None:
                tokens += f", {row['tokens_per_solved']:.0f} per solved task"
        out.print(f"{row['run']:<{wide}}  {percent(row['accuracy'], row['ci95'])}{tokens}")
        for line in _against_lines(row) if "difference" in row else ():
            out.print(f"    {line}")
    out.print(f"n={result['n']}, each against {result['baseline']}", style="dim")


def _against_lines(row: Json) -> Iterator[str]:
    if "other" in row:
        yield f"not of the models alone, since these are others, too: {', '.join(row['other'])}"
    low, high = row["difference_ci95"]
    yield (
        f"{100 * row['difference']:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]  "
        f"wins {row['wins']} losses {row['losses']} {significance(row['p_value'])}"
    )
    if "tokens_difference" in row:
        bounds = interval(row["tokens_difference_ci95"], "+.0f")
        yield f"{row['tokens_difference']:+.0f} tokens per task {bounds}"
    if ratio := row.get("tokens_per_solved_ratio"):
        bounds = interval(ratio["ci95"], ".2f")
        yield f"{ratio['value']:.2f} times the tokens per solved task {bounds}"
    for name, found in row.get("by_family", {}).items():
        if found["wins"] or found["losses"]:
            yield (
                f"{name:<28} n={found['n']:<4} wins {found['wins']:<3} losses {found['losses']:<3} "
                f"{100 * found['difference']:+.1f} points"
            )
