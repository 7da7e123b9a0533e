"""Chain: a trajectory read once under its grammar, for whoever filters or counts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from coa.protocol import Block, Fault, Grammar, check, parse, parse_score
from coa.protocol.grammar import Kind
from coa.trajectory import Author, Trajectory

CHAT_MARKER = re.compile(r"<[|\uff5c][^<>\s]*[|\uff5c]>|<(?:start|end)_of_\w+>|</?s>|\[/?INST\]")
"""What chat formats mark turns with: a tokenizer may take it for the end of the model's turn."""


@dataclass(frozen=True)
class Chain:
    """The blocks that the model wrote, and what they amount to."""

    trajectory: Trajectory
    grammar: Grammar
    blocks: list[Block]
    """Observations are not among them. Positions are those in `trajectory.text`."""
    fault: Fault | None
    """The first thing about it that is illegal."""

    @classmethod
    def read(cls, trajectory: Trajectory) -> Chain:
        grammar = trajectory.protocol
        parsed = parse(grammar, trajectory.text, env=True)
        own = [block for block in parsed.blocks if block.role != grammar.observation]
        return cls(trajectory, grammar, own, check(grammar, parsed))

    def kind(self, block: Block) -> Kind:
        return self.grammar.by_name[block.role].kind

    def of_kind(self, kind: Kind) -> list[Block]:
        return [block for block in self.blocks if self.kind(block) == kind]

    @cached_property
    def interactions(self) -> list[Block]:
        """Blocks other than thoughts: each is an agent that was called."""
        return [block for block in self.blocks if self.kind(block) != "think"]

    @cached_property
    def check_scores(self) -> list[int]:
        """What the checks gave, in order."""
        return [score for block in self.of_kind("check") if (score := parse_score(block.body))]

    def is_marked(self, block: Block) -> bool:
        """Whether a mistake is marked in a block."""
        return any(block.start < end and begin < block.end for begin, end in self._marks)

    @cached_property
    def _marks(self) -> list[tuple[int, int]]:
        """Spans of marked mistakes in the text of the whole trajectory."""
        start, marks = 0, []
        for segment in self.trajectory.segments:
            if segment.author is not Author.PROMPT:
                marks += [(start + begin, start + end) for begin, end in segment.errs]
                start += len(segment.text)
        return marks

    def turning_point(self, low_check: int) -> str:
        """Where the work was found wrong and went on: in words, or nothing.

        Checks say so by their score, all but the last: after that nothing was put right. Where the
        grammar has none, a marked mistake that a reflection answered does, or a reflection that led
        to a new plan, unless that was a false alarm.
        """
        if self.grammar.of_kind("check"):
            low = any(score <= low_check for score in self.check_scores[:-1])
            return "a low check was put right" if low else ""
        if self._mistake_was_answered():
            return "a marked mistake was put right"
        for block, following in pairwise(self.interactions):
            kinds = self.kind(block), self.kind(following)
            if kinds == ("reflection", "plan") and not self.is_marked(block):
                return "an objection led to a new plan"
        return ""

    def _mistake_was_answered(self) -> bool:
        """A critic's own mistake (a false alarm, a miss) is no mistake of the work."""
        critics = ("reflection", "check")
        marked = [b for b in self.blocks if self.kind(b) not in critics and self.is_marked(b)]
        # Without critics in the grammar it is enough that the work went on.
        answer = "reflection" if self.grammar.of_kind("reflection") else "tool"
        return bool(marked) and any(
            block.start >= marked[0].end
            and self.kind(block) == answer
            and not self.is_marked(block)
            for block in self.interactions
        )
