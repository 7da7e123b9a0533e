"""What is in the rows of a training run: figures, and a preview that shows the mask.

Both read the rows themselves, after truncation and with their weights, so they tell what will be
trained and not what was meant to be. Tokens are told apart by author, and those of the model by the
agent whose block they stand in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from coa.errors import GrammarError
from coa.grammar import parse
from coa.io.collect import spread_out
from coa.io.runs import Json
from coa.models.codec import Codec
from coa.train.rows import Row, token_spans
from coa.train.settings import SftSettings
from coa.train.sft import Order
from coa.trajectory import Author, Segment, Trajectory
from coa.view.terminal import fold, harmless

if TYPE_CHECKING:
    from rich.console import Console


OUTSIDE = "outside any block"
UNKNOWN = "of a grammar not found here"
Kind = Literal["trained", "mistake", "not trained"]
_LOOKS: dict[Kind, tuple[str, str, str]] = {
    "trained": ("green", "", ""),
    "mistake": ("red", "{{", "}}"),
    "not trained": ("dim", "[[", "]]"),
}
"""Colour, and the marks that stand for it where there is none."""


class RowTally(NamedTuple):
    """Tokens, and how many of them have a weight."""

    tokens: int = 0
    trained: int = 0

    def plus(self, weights: Sequence[float]) -> RowTally:
        return RowTally(self.tokens + len(weights), self.trained + sum(w > 0 for w in weights))


@dataclass
class RowReport:
    """Figures of the rows of a run."""

    rows: int
    tokens: int
    trained: int
    cut: int
    """Rows that lost their end to `max_length`."""
    lengths: dict[str, int]
    """Tokens of a row: min, median, p90, max."""
    layout: str
    updates: int
    fill: float
    """Of the places of packs, or of rows padded to the longest of their batch."""
    authors: dict[str, RowTally] = field(default_factory=dict)
    agents: dict[str, RowTally] = field(default_factory=dict)
    """Tokens that the model wrote, by the role of their block."""

    def to_json(self) -> Json:
        record: Json = {**vars(self), "fill": round(self.fill, 4)}
        for name in ("authors", "agents"):
            record[name] = {who: tally._asdict() for who, tally in getattr(self, name).items()}
        return record

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.rows} rows, {self.tokens} tokens, {self.trained} trained "
            f"({_share(self.trained, self.tokens)})"
        )
        figures = ", ".join(f"{name} {value}" for name, value in self.lengths.items())
        yield f"tokens of a row: {figures}; {self.cut} lost their end"
        room = "of packs filled" if self.layout == "pack" else "filled if batches were padded"
        yield f"layout {self.layout}: {self.updates} updates, {self.fill:.1%} {room}"
        for title, tallies in (("author", self.authors), ("agent", self.agents)):
            whole = sum(tally.tokens for tally in tallies.values())
            yield f"{title:<28}{'tokens':>10}{'share':>9}{'trained':>10}"
            for who, tally in tallies.items():
                share = _share(tally.tokens, whole)
                yield f"  {who:<26}{tally.tokens:>10}{share:>9}{tally.trained:>10}"


def _share(part: int, whole: int) -> str:
    return f"{part / max(1, whole):.1%}"


def row_report(
    trajectories: Sequence[Trajectory], rows: Sequence[Row], settings: SftSettings, codec: Codec
) -> RowReport:
    """The figures of rows that were made of these trajectories, in the same order."""
    order = Order(rows, settings)
    report = RowReport(
        rows=len(rows),
        tokens=sum(len(row.ids) for row in rows),
        trained=sum(row.trained for row in rows),
        cut=sum(row.cut for row in rows),
        lengths=_lengths([len(row.ids) for row in rows]),
        layout=settings.layout,
        updates=order.updates,
        fill=order.fill(),
    )
    for trajectory, row in zip(trajectories, rows, strict=True):
        for segment, weights in _kept(trajectory, row):
            author = segment.author.value
            report.authors[author] = report.authors.get(author, RowTally()).plus(weights)
            if segment.author is Author.MODEL:
                agents = agents_of(trajectory, segment, codec)
                for agent, mine in groupby(zip(agents, weights, strict=True), lambda one: one[0]):
                    held = report.agents.get(agent, RowTally())
                    report.agents[agent] = held.plus([weight for _, weight in mine])
    report.agents = dict(sorted(report.agents.items(), key=lambda one: -one[1].tokens))
    return report


def agent_tokens(trajectory: Trajectory, codec: Codec) -> Counter[str]:
    """Tokens that the model wrote in a trajectory, by the role of their block."""
    found: Counter[str] = Counter()
    for segment in trajectory.segments:
        if segment.author is Author.MODEL:
            found.update(agents_of(trajectory, segment, codec))
    return found


def agents_of(trajectory: Trajectory, segment: Segment, codec: Codec) -> list[str]:
    """The role of the block that each token of a segment stands in, by where the token begins."""
    if segment.ids is not None:
        spans = token_spans(segment.ids, codec.decode)
    else:
        spans = codec.encode_with_offsets(segment.text)[1]
    try:
        blocks = parse(trajectory.protocol, segment.text).blocks
    except GrammarError:  # somebody else's file: what is trained does not depend on it
        return [UNKNOWN] * len(spans)
    roles = [OUTSIDE] * (len(segment.text) + 1)
    for block in blocks:
        end = block.end  # with the line break after it
        while end < len(segment.text) and segment.text[end].isspace():
            end += 1
        roles[block.start : end] = [block.role] * (end - block.start)
    return [roles[min(max(start, 0), len(segment.text))] for start, _ in spans]


def _kept(trajectory: Trajectory, row: Row) -> Iterator[tuple[Segment, list[float]]]:
    """The segments that a row holds, with the weights of their tokens."""
    later = [s for s in trajectory.segments if s.author is not Author.PROMPT]
    borders = pairwise(accumulate(row.segments, initial=0))
    for segment, (start, end) in zip([trajectory.segments[0], *later], borders, strict=False):
        yield segment, row.weights[start:end]


def _lengths(lengths: Sequence[int]) -> dict[str, int]:
    held = sorted(lengths)
    places = {"min": 0.0, "median": 0.5, "p90": 0.9, "max": 1.0}
    return {name: held[round(place * (len(held) - 1))] for name, place in places.items()}


def print_preview(
    out: Console,
    trajectories: Sequence[Trajectory],
    rows: Sequence[Row],
    codec: Codec,
    count: int = 3,
) -> None:
    """A few rows as they will be trained: green counts, red is a mistake, dim is only read.

    Without colour what is not trained stands in brackets, a mistake in braces. Long texts that are
    not trained are folded.
    """
    plain = out.no_color or not out.color_system
    for trajectory, row in spread_out(list(zip(trajectories, rows, strict=True)), count):
        ending = ", lost its end" if row.cut else ""
        title = f"{harmless(row.task_id)}: {len(row.ids)} tokens, {row.trained} trained{ending}"
        out.print(title, style="bold")
        for kind, text in _stretches(trajectory, row, codec):
            style, opening, closing = _LOOKS[kind]
            shown = fold(text) if kind == "not trained" else harmless(text)
            out.print(f"{opening}{shown}{closing}" if plain else shown, style=style, end="")
        out.print("\n")
    if plain:
        out.print("[[not trained]] {{mistake}}")


def _stretches(trajectory: Trajectory, row: Row, codec: Codec) -> Iterator[tuple[Kind, str]]:
    """The row's text, decoded from its ids, in runs of the same kind; special tokens show."""
    kinds: list[Kind] = []
    for segment, weights in _kept(trajectory, row):
        if segment.author is Author.MODEL:
            kinds += ["trained" if weight >= 1 else "mistake" for weight in weights]
        else:
            kinds += ["not trained"] * len(weights)
    for kind, run in groupby(zip(kinds, row.ids, strict=True), lambda one: one[0]):
        ids = [each for _, each in run]
        yield kind, codec.tokenizer.decode(ids, skip_special_tokens=False)
