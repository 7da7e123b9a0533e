"""Which trajectories an export takes. What it leaves out is counted, with one line a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from coa.distill.chain import CHAT_MARKER
from coa.distill.exports.pieces import pieces
from coa.errors import RecordError
from coa.protocol import load_grammar
from coa.trajectory import Author, StopReason, Trajectory

Note = Callable[[str], None]


class LeftOut:
    """Reasons and how often each was met."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, reason: str, count: int = 1) -> None:
        if count:
            self.counts[reason] += count

    def tell(self, note: Note, kept: int) -> None:
        """One line a reason; an error when nothing is left."""
        lines = [f"left out {count}: {reason}" for reason, count in self.counts.most_common()]
        if not kept:
            raise RecordError(f"there is nothing to export: {'; '.join(lines)}.")
        for line in lines:
            note(f"{line}.")


def choose_grammar(trajectories: Sequence[Trajectory], asked: str) -> str:
    """The name of the grammar to export: the asked one, or the most frequent."""
    if asked:
        return load_grammar(asked).name if asked.endswith(".toml") else asked
    counts = Counter(trajectory.grammar for trajectory in trajectories)
    return min(counts, key=lambda name: (-counts[name], name))


def sift(
    trajectories: Sequence[Trajectory], grammar: str, left: LeftOut, *, plain: bool
) -> list[Trajectory]:
    """Those of the grammar that a model can learn from.

    `plain`: a trainer will encode the text, so that nothing in it may read as a chat marker.
    """
    kept = []
    for trajectory in trajectories:
        reason = _objection(trajectory, grammar) or _oddity(trajectory, plain)
        if reason:
            left.add(reason)
        else:
            kept.append(trajectory)
    return kept


def _objection(trajectory: Trajectory, grammar: str) -> str:
    if trajectory.grammar != grammar:
        other = trajectory.grammar
        return f"of grammar {other!r}, not {grammar!r}; export them apart with --grammar {other}"
    if not trajectory.segments or trajectory.segments[0].author is not Author.PROMPT:
        return "without a prompt segment at the beginning"
    if trajectory.stop is not StopReason.ANSWERED:
        how = f"it stopped with {trajectory.stop.value!r}" if trajectory.stop else "no stop reason"
        return f"unfinished ({how}); only chains that end with an answer are exported"
    if not any(piece.trained and piece.text.strip() for piece in pieces(trajectory)):
        return "without any text to train on"
    return ""


def _oddity(trajectory: Trajectory, plain: bool) -> str:
    """What its text holds that a tokenizer could not read, or would read as its own."""
    texts = (trajectory.question, *(segment.text for segment in trajectory.segments))
    if plain and any(CHAT_MARKER.search(text) for text in texts):
        return (
            "with a chat marker such as <|im_end|> in their text, which a trainer's tokenizer "
            "would take for its own; only trl-tokens can hold them"
        )
    if not all(_is_utf8(text) for text in texts):
        return "with text that UTF-8 cannot write (half of a surrogate pair)"
    return ""


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
