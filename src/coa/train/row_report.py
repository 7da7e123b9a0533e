"""What is in the rows of a training run: figures, and a preview that shows the mask.

Both read the rows themselves, after truncation and with their weights, so they tell what will be
trained and not what was meant to be. Tokens are told apart by author, and those of the model by the
agent whose block they stand in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from coa.errors import GrammarError
from coa.grammar import parse
from coa.io.collect import spread_out
from coa.io.runs import Json
from coa.models.codec import Codec
from coa.train.rows import Row, token_spans
from coa.train.settings import SftSettings
from coa.train.sft import Order
from coa.trajectory import Author, Segment, Trajectory
from coa.view.terminal import MaskKind, fold, harmless, print_masked

if TYPE_CHECKING:
    from rich.console import Console


OUTSIDE = "outside any block"
UNKNOWN = "of a grammar not found here"


class RowTally(NamedTuple):
    """Tokens, and how many of them have a weight."""

    tokens: int
    trained: int


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
    authors: dict[str, RowTally]
    agents: dict[str, RowTally]
    """Tokens that the model wrote, by the role of their block."""

    def to_json(self) -> Json:
        record = asdict(self) | {"fill": round(self.fill, 4)}
        for name in ("authors", "agents"):
            record[name] = {who: tally._asdict() for who, tally in record[name].items()}
        return record

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.rows} rows, {self.tokens} tokens, {self.trained} trained "
            f"({self.trained / max(1, self.tokens):.1%})"
        )
        figures = ", ".join(f"{name} {value}" for name, value in self.lengths.items())
        yield f"tokens of a row: {figures}; {self.cut} lost their end"
        room = "of packs filled" if self.layout == "pack" else "filled if batches were padded"
        yield f"layout {self.layout}: {self.updates} updates, {self.fill:.1%} {room}"
        for title, tallies in (("author", self.authors), ("agent", self.agents)):
            whole = max(1, sum(tally.tokens for tally in tallies.values()))
            yield f"{title:<28}{'tokens':>10}{'share':>9}{'trained':>10}"
            for who, (tokens, trained) in tallies.items():
                yield f"  {who:<26}{tokens:>10}{tokens / whole:>9.1%}{trained:>10}"


def row_report(
    trajectories: Sequence[Trajectory], rows: Sequence[Row], settings: SftSettings, codec: Codec
) -> RowReport:
    """Return the figures of rows that were made of these trajectories, in the same order."""
    order = Order(rows, settings)
    lengths = sorted(len(row.ids) for row in rows)
    places = {"min": 0.0, "median": 0.5, "p90": 0.9, "max": 1.0}
    kept = [
        (trajectory, segment, weights)
        for trajectory, row in zip(trajectories, rows, strict=True)
        for segment, weights in _kept(trajectory, row)
    ]
    agents = _tally(
        pair
        for trajectory, segment, weights in kept
        if segment.author is Author.MODEL
        for pair in zip(agents_of(trajectory, segment, codec), weights, strict=True)
    )
    return RowReport(
        rows=len(rows),
        tokens=sum(lengths),
        trained=sum(row.trained for row in rows),
        cut=sum(row.cut for row in rows),
        lengths={name: lengths[round(at * (len(lengths) - 1))] for name, at in places.items()},
        layout=settings.layout,
        updates=order.updates,
        fill=order.fill(),
        authors=_tally((segment.author.value, w) for _, segment, ws in kept for w in ws),
        agents=dict(sorted(agents.items(), key=lambda one: -one[1].tokens)),
    )


def _tally(weighed: Iterable[tuple[str, float]]) -> dict[str, RowTally]:
    """Count tokens by who wrote them, given who and what weight for each."""
    tokens, trained = Counter[str](), Counter[str]()
    for who, weight in weighed:
        tokens[who] += 1
        trained[who] += weight > 0
    return {who: RowTally(count, trained[who]) for who, count in tokens.items()}


def agents_of(trajectory: Trajectory, segment: Segment, codec: Codec) -> list[str]:
    """Return the role of the block that each token stands in, by where the token begins."""
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
    """Yield the segments that a row holds, with the weights of their tokens."""
    later = [s for s in trajectory.segments if s.author is not Author.PROMPT]
    borders = pairwise(accumulate(row.segments, initial=0))
    for segment, (start, end) in zip([trajectory.segments[0], *later], borders, strict=False):
        yield segment, row.weights[start:end]


def print_preview(
    out: Console,
    trajectories: Sequence[Trajectory],
    rows: Sequence[Row],
    codec: Codec,
    count: int = 3,
) -> None:
    """Print a few rows as they will be trained; long texts that are not trained are folded."""
    legend = ""
    for trajectory, row in spread_out(list(zip(trajectories, rows, strict=True)), count):
        ending = ", lost its end" if row.cut else ""
        title = f"{harmless(row.task_id)}: {len(row.ids)} tokens, {row.trained} trained{ending}"
        out.print(title, style="bold")
        legend = print_masked(out, _stretches(trajectory, row, codec))
        out.print("\n")
    if legend:
        out.print(legend)


def _stretches(trajectory: Trajectory, row: Row, codec: Codec) -> Iterator[tuple[MaskKind, str]]:
    """Yield the row's text, decoded from its ids, in runs of a kind; special tokens show."""
    kinds: list[MaskKind] = []
    for segment, weights in _kept(trajectory, row):
        if segment.author is Author.MODEL:
            kinds += ["trained" if weight >= 1 else "mistake" for weight in weights]
        else:
            kinds += ["not trained"] * len(weights)
    for kind, run in groupby(zip(kinds, row.ids, strict=True), lambda one: one[0]):
        text = codec.tokenizer.decode([each for _, each in run], skip_special_tokens=False)
        yield kind, fold(text) if kind == "not trained" else text
