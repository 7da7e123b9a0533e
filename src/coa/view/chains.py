"""Chains as a view: trajectories, what was dropped on the way to them, and their scores.

Blocks are found here, with the grammar of the trajectory, and the page gets their places. Places
count UTF-16 units, as browsers do, not characters: the two differ after the first emoji.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from coa.grammar import Grammar
from coa.grammar.load import GrammarBook
from coa.grammar.parse import parse
from coa.io.runs import Json, read_records
from coa.statistics import RIGHT
from coa.trajectory import Author, Segment, StopReason, Trajectory
from coa.view.browse import View, bars, each_of, facts_of, histogram, require_text, share_of, shown
from coa.view.plots import finite
from coa.view.terminal import colour_of, mask_spans, mistakes

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
Scores = Mapping[tuple[str, int], float]


def read_scores(path: Path) -> dict[tuple[str, int], float]:
    """Read (task, sample) -> score of an evaluation."""

    def score(record: Json) -> tuple[tuple[str, int], float]:
        return (str(record["task_id"]), int(finite(record["sample"]))), finite(record["score"])

    return dict(read_records(path, score))


def chains_view(path: Path, scores: Scores | None = None) -> View:
    """Read a trajectories file."""
    view = View("chains", ("chain", "chains"), NUMBERS, ("turns", "calls"), FLAGS)
    blocks, marks = Counter[str](), Counter[str]()
    seen: dict[tuple[str, int, str, str], Json] = {}
    book = GrammarBook.beside(path)

    def add(record: Json) -> None:
        trajectory = Trajectory.from_json(record, book)
        check_texts(trajectory)
        same = (trajectory.task_id, trajectory.sample, trajectory.question, trajectory.text)
        if (entry := seen.get(same)) is not None:
            entry["numbers"]["copies"] += 1
            entry["flags"] += [] if "copies" in entry["flags"] else ["copies"]
            return
        score = (scores or {}).get((trajectory.task_id, trajectory.sample))
        drawn = chain_record(trajectory, score)
        roles = _roles(drawn)
        view.looks |= looks_of(trajectory.protocol)
        blocks.update(roles)
        marks.update(drawn["marks"])
        seen[same] = _add(view, trajectory, drawn, roles, score)

    lines = len(read_records(path, add))  # whatever is wrong with a record is told with its line
    count = len(view.entries)
    view.figures = [
        ("chains", f"{count:,}"),
        *([("with copies", f"{lines:,}")] if lines != count else []),
        ("turns each", view.mean("turns")),
        ("tool calls each", view.mean("calls")),
        ("with a reflection", view.share("reflection")),
        ("with a mistake", view.share("mistake")),
        ("of the text is trained", share_of(marks["trained"], marks.total())),
    ]
    length_note = "Characters of blocks and observations, without the prompt."
    lengths = histogram(view.values("length"))
    view.add_charts(
        bars("Length of a chain", lengths, unit="chains", note=length_note),
        bars("Blocks of each agent", each_of(blocks, count), unit="per chain"),
    )
    return view


def check_texts(trajectory: Trajectory) -> None:
    """Raise unless what a page shows as text is text."""
    require_text(trajectory, "task_id", "question", "grammar", "prompt", "weights")
    for name in ("answer", "error"):
        if getattr(trajectory, name) is not None:
            require_text(trajectory, name)
    for segment in trajectory.segments:
        require_text(segment, "text")


def _roles(record: Json) -> list[str]:
    """Return the roles of the model's blocks, in order."""
    return [block[0] for segment in record["segments"] for block in segment.get("blocks", ())]


def _add(
    view: View, trajectory: Trajectory, record: Json, roles: list[str], score: float | None
) -> Json:
    kinds = Counter(trajectory.protocol.by_name[role].kind for role in roles)
    mistaken = record["marks"]["mistake"]
    numbers: dict[str, float] = {
        "turns": len(trajectory.steps),
        "calls": kinds["tool"],
        "length": len(trajectory.text),
        "mistaken": mistaken,
        "copies": 1,
    }
    flags = {
        "reflection": kinds["reflection"] > 0,
        "mistake": mistaken > 0,
        "re-planned": kinds["plan"] > 1,
        "malformed": any(segment.get("faults") for segment in record["segments"]),
        "unanswered": trajectory.stop is not StopReason.ANSWERED,
        "wrong": score is not None and score < RIGHT,
    }
    scored = {} if score is None else {"score": score}
    return view.add(trajectory, record, numbers | scored, flags)


def chain_record(trajectory: Trajectory, score: float | None) -> Json:
    """Return what the page draws a chain from."""
    known = {
        "task": trajectory.task_id,
        "grammar": f"{trajectory.grammar}, {trajectory.prompt} prompt",
        "ended": str(trajectory.stop or "not yet"),
        "score": None if score is None else shown(score),
        "error": trajectory.error,
        "written by": trajectory.weights,
        "sample": trajectory.sample and shown(trajectory.sample),
        "tokens sampled": trajectory.usage.sampled_tokens
        and shown(trajectory.usage.sampled_tokens),
    }
    marks = {"mistake": 0, "trained": 0, "not trained": 0}
    for kind, text in mask_spans(trajectory):
        marks[kind] += len(text)
    return {
        "facts": [(n, value) for n, value in known.items() if value] + facts_of(trajectory.meta),
        "marks": marks,
        "segments": [_segment(segment, trajectory.protocol) for segment in trajectory.segments],
    }


def _segment(segment: Segment, grammar: Grammar) -> Json:
    text, author = segment.text, segment.author
    if author is not Author.MODEL:
        role = grammar.observation if author is Author.ENV else ""
        return {"author": author.value, "text": text, "role": role}
    parsed = parse(grammar, text)

    def units(place: int) -> int:
        """A place in characters as a place in UTF-16 units."""
        if text.isascii():
            return place
        return len(text[:place].encode("utf-16-le", "surrogatepass")) // 2

    return {
        "author": author.value,
        "text": text,
        "blocks": [(block.role, units(block.start), units(block.end)) for block in parsed.blocks],
        "errs": [(units(start), units(end)) for start, end in mistakes(segment)],
        "faults": [fault.message for fault in parsed.faults],
    }


def looks_of(grammar: Grammar) -> dict[str, Json]:
    """Return role -> its colour and its kind."""
    looks = {
        role.name: {"colour": colour_of(role.name).split()[-1], "kind": role.kind}
        for role in grammar.roles
    }
    return looks | {grammar.observation: {"colour": "", "kind": "observation"}}
