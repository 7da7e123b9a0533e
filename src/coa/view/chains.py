"""Chains as a view: trajectories, what was dropped on the way to them, and their scores.

Blocks are found here, with the grammar of the trajectory, and the page gets their places. Places
count UTF-16 units, as browsers do, not characters: the two differ after the first emoji.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from coa.grammar import Grammar
from coa.grammar.load import GrammarBook
from coa.grammar.parse import Parsed, parse
from coa.io.runs import Json, read_records
from coa.trajectory import Author, Segment, StopReason, Trajectory
from coa.view.browse import (
    View,
    bars,
    facts_of,
    grouped,
    histogram,
    origin,
    require_text,
    share_of,
    shown,
    unique,
)
from coa.view.terminal import colour_of

FLAGS = {
    "reflection": "has a reflection",
    "mistake": "has a marked mistake, which is not trained",
    "re-planned": "plans more than once",
    "copies": "is in the file more than once",
    "malformed": "has text that breaks the grammar",
    "unanswered": "did not end with an answer of the model",
    "wrong": "scored less than 1",
}
NUMBERS = {
    "turns": "turns",
    "calls": "tool calls",
    "length": "characters",
    "mistaken": "characters of mistakes",
    "copies": "copies",
    "score": "score",
}
Scores = dict[tuple[str, int], float]


@dataclass
class _Tally:
    """What is counted over all chains."""

    blocks: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    sets: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    marks: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class DrawnChain:
    """A trajectory with the blocks of its segments."""

    trajectory: Trajectory
    grammar: Grammar
    parsed: list[Parsed | None]
    """One for each segment; None where the model did not write."""

    @property
    def roles(self) -> list[str]:
        """The roles of the model's blocks, in order."""
        return [block.role for each in self.parsed if each for block in each.blocks]

    def count(self, kind: str) -> int:
        kinds = {role.name for role in self.grammar.roles if role.kind == kind}
        return sum(role in kinds for role in self.roles)

    @property
    def marks(self) -> Counter[str]:
        """Characters that are trained, that are mistakes, and that are not trained."""
        marks: Counter[str] = Counter()
        for segment in self.trajectory.segments:
            trained = segment.author is Author.MODEL
            wrong = sum(end - start for start, end in _merged(segment)) if trained else 0
            marks["mistake"] += wrong
            marks["trained" if trained else "not trained"] += len(segment.text) - wrong
        return marks


def chains_view(path: Path, scores: Scores | None = None) -> View:
    """Read a trajectories file."""
    view = View("chains", ("chain", "chains"), NUMBERS, ("turns", "calls"), FLAGS)
    tally, taken = _Tally(), set[str]()
    seen: dict[tuple[str, int, str, str], Json] = {}

    book = GrammarBook.beside(path)

    def add(record: Json) -> None:
        trajectory = Trajectory.from_json(record, book)
        chain = draw_chain(trajectory)
        same = (trajectory.task_id, trajectory.sample, trajectory.question, trajectory.text)
        if (entry := seen.get(same)) is not None:
            _add_copy(entry)
            return
        score = (scores or {}).get((trajectory.task_id, trajectory.sample))
        seen[same] = entry = _entry(chain, unique(trajectory.task_id, taken), score)
        view.entries.append(entry)
        view.records.append(record_of(chain, score))
        view.looks |= looks_of(chain.grammar)
        _count(tally, chain, entry)

    lines = len(read_records(path, add))  # whatever is wrong with a record is told with its line
    tally.flags["copies"] = sum("copies" in entry["flags"] for entry in view.entries)
    _summarise(view, tally, lines)
    return view


def draw_chain(trajectory: Trajectory) -> DrawnChain:
    """Find the blocks of a trajectory."""
    check_texts(trajectory)
    bound = trajectory.protocol
    parsed = [
        parse(bound, segment.text) if segment.author is Author.MODEL else None
        for segment in trajectory.segments
    ]
    return DrawnChain(trajectory, bound, parsed)


def check_texts(trajectory: Trajectory) -> None:
    """Raise unless what a page shows as text is text."""
    require_text(trajectory, "task_id", "question", "grammar", "prompt", "weights")
    for name in ("answer", "error"):
        if getattr(trajectory, name) is not None:
            require_text(trajectory, name)
    for segment in trajectory.segments:
        require_text(segment, "text")


def _add_copy(entry: Json) -> None:
    entry["numbers"]["copies"] += 1
    if "copies" not in entry["flags"]:
        entry["flags"].append("copies")


def _entry(chain: DrawnChain, name: str, score: float | None) -> Json:
    trajectory = chain.trajectory
    group, family = origin(trajectory.meta)
    marks = chain.marks
    held = {
        "reflection": chain.count("reflection") > 0,
        "mistake": marks["mistake"] > 0,
        "re-planned": chain.count("plan") > 1,
        "malformed": any(each.faults for each in chain.parsed if each),
        "unanswered": trajectory.stop is not StopReason.ANSWERED,
        "wrong": score is not None and score < 1,
    }
    numbers: dict[str, float] = {
        "turns": len(trajectory.steps),
        "calls": chain.count("tool"),
        "length": len(trajectory.text),
        "mistaken": marks["mistake"],
        "copies": 1,
    }
    if score is not None:
        numbers["score"] = score
    return {
        "id": name,
        "question": trajectory.question,
        "answer": trajectory.answer,
        "set": group,
        "family": family,
        "numbers": numbers,
        "flags": [flag for flag, holds in held.items() if holds],
    }


def record_of(chain: DrawnChain, score: float | None) -> Json:
    """What the page draws a chain from."""
    trajectory = chain.trajectory
    facts = [
        ("task", trajectory.task_id),
        ("grammar", f"{trajectory.grammar}, {trajectory.prompt} prompt"),
        ("ended", str(trajectory.stop or "not yet")),
    ]
    if score is not None:
        facts.append(("score", shown(score)))
    if trajectory.error:
        facts.append(("error", trajectory.error))
    if trajectory.weights:
        facts.append(("written by", trajectory.weights))
    if trajectory.sample:
        facts.append(("sample", shown(trajectory.sample)))
    if trajectory.usage.sampled_tokens:
        facts.append(("tokens sampled", shown(trajectory.usage.sampled_tokens)))
    pairs = zip(trajectory.segments, chain.parsed, strict=True)
    return {
        "facts": facts + facts_of(trajectory.meta),
        "marks": chain.marks,
        "segments": [_segment(segment, parsed, chain.grammar) for segment, parsed in pairs],
    }


def _segment(segment: Segment, parsed: Parsed | None, grammar: Grammar) -> Json:
    if parsed is None:
        role = grammar.observation if segment.author is Author.ENV else ""
        return {"author": segment.author.value, "text": segment.text, "role": role}
    text = segment.text
    return {
        "author": segment.author.value,
        "text": text,
        "blocks": [
            (block.role, _units(text, block.start), _units(text, block.end))
            for block in parsed.blocks
        ],
        "errs": [(_units(text, start), _units(text, end)) for start, end in _merged(segment)],
        "faults": [fault.message for fault in parsed.faults],
    }


def _units(text: str, place: int) -> int:
    """A place in characters as a place in UTF-16 units."""
    if text.isascii():
        return place
    return len(text[:place].encode("utf-16-le", "surrogatepass")) // 2


def _merged(segment: Segment) -> list[tuple[int, int]]:
    """Spans of mistakes in order, inside the text and without overlaps."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted(segment.errs):
        start, end = max(start, spans[-1][1] if spans else 0), min(end, len(segment.text))
        if start < end:
            spans.append((start, end))
    return spans


def looks_of(grammar: Grammar) -> dict[str, Json]:
    """Role -> its colour and its kind."""
    looks = {
        role.name: {"colour": colour_of(role.name).split()[-1], "kind": role.kind}
        for role in grammar.roles
    }
    return looks | {grammar.observation: {"colour": "", "kind": "observation"}}


def _count(tally: _Tally, chain: DrawnChain, entry: Json) -> None:
    tally.blocks.update(chain.roles)
    tally.sets[entry["set"]] += 1
    tally.families[entry["family"]] += 1
    tally.flags.update(entry["flags"])
    tally.marks += chain.marks


def _summarise(view: View, tally: _Tally, lines: int) -> None:
    count = len(view.entries)
    numbers = [entry["numbers"] for entry in view.entries]
    per_chain = max(count, 1)
    view.figures = [("chains", f"{count:,}")]
    if lines != count:
        view.figures.append(("with copies", f"{lines:,}"))
    view.figures += [
        ("turns each", f"{sum(each['turns'] for each in numbers) / per_chain:.1f}"),
        ("tool calls each", f"{sum(each['calls'] for each in numbers) / per_chain:.1f}"),
        ("with a reflection", share_of(tally.flags["reflection"], count)),
        ("with a mistake", share_of(tally.flags["mistake"], count)),
        ("of the text is trained", share_of(tally.marks["trained"], tally.marks.total())),
    ]
    view.charts = [
        bars(
            "Length of a chain",
            histogram([each["length"] for each in numbers]),
            unit="chains",
            note="Characters of blocks and observations, without the prompt.",
        ),
        bars("Blocks of each agent", _each(tally.blocks, per_chain), unit="per chain"),
        bars("Properties", _known(tally.flags, FLAGS), unit="chains", filters="flag"),
        *grouped("set", tally.sets, "chains"),
        *grouped("family", tally.families, "chains"),
    ]


def _each(counts: Counter[str], whole: int) -> Iterable[tuple[str, float]]:
    return ((name, count / whole) for name, count in counts.most_common())


def _known(counts: Counter[str], names: Iterable[str]) -> list[tuple[str, float]]:
    return [(name, counts[name]) for name in names if counts[name]]
