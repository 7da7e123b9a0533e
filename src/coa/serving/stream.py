"""From what the model writes to what a client is shown: pieces of blocks, in order.

The text of the answer is held back until the rollout has accepted it: an answer that stands where
the grammar allows none is taken back by the runtime, and what a client was told as content cannot
be. Everything else is told as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from coa.grammar import Grammar, Splitter
from coa.grammar.parse import Event
from coa.io.runs import Json
from coa.trajectory import Step
from coa.view.terminal import observed

STRAY = "stray"
"""Role of what a model wrote outside any block."""


class Piece(NamedTuple):
    """More text of one block."""

    block: int
    """Counts the blocks of a chain; pieces with the same number belong together."""
    role: str
    kind: str
    """The kind of the role in its grammar; or observation, or stray."""
    text: str
    first: bool
    """It opens its block."""

    def to_json(self) -> Json:
        return {"block": self.block, "role": self.role, "kind": self.kind, "text": self.text}

    def as_reasoning(self) -> str:
        """The piece as part of one running text, where each block is a labelled paragraph."""
        if not self.first:
            return self.text
        return f"{self.role}: {self.text}" if self.block == 0 else f"\n\n{self.role}: {self.text}"


class Narrator:
    """Tells the chain of one rollout piece by piece."""

    def __init__(self, grammar: Grammar, tell: Callable[[Piece], None]) -> None:
        self._grammar, self._tell = grammar, tell
        self._splitter, self._heard = Splitter(grammar, events=True), ""
        self._blocks = 0
        self._opened = False
        """The open block has been told of."""
        self._answer = ""

    def model_text(self, text: str) -> None:
        """More text of the present turn."""
        self._heard += text
        self._take(self._splitter.feed(text))

    def end_turn(self, step: Step, accepted: bool) -> None:
        """The turn is complete, and the environment has answered; `accepted` when its answer
        block ended the rollout."""
        whole = step.model.text
        if whole.startswith(self._heard):  # an engine may show less than it sampled
            self.model_text(whole[len(self._heard) :])
        self._splitter.finish()
        self._take(self._splitter.take_events())
        self._close()
        if not accepted:
            self._say(self._grammar.of_kind("answer")[0], self._answer)
            self._close()
        if step.observation is not None:
            self._say(self._grammar.observation, observed(step.observation, self._grammar))
            self._close()
        self._splitter, self._heard, self._answer = Splitter(self._grammar, events=True), "", ""

    def answer(self, text: str) -> Piece:
        """The accepted answer as a block of its own, for whoever sends it as content."""
        self._close()  # a budget may have cut a block that is still open
        role = self._grammar.of_kind("answer")[0]
        return Piece(self._blocks, role, "answer", text, True)

    def _take(self, events: Sequence[Event]) -> None:
        """Faults are not told: the observation after the turn explains them."""
        for event in events:
            if event.kind in ("open", "close"):
                self._close()
            elif event.kind == "text" and event.role != self._grammar.observation:
                self._more(event.role, event.text)

    def _more(self, role: str | None, text: str) -> None:
        if role is not None and self._kind(role) == "answer":
            self._answer += text
        elif role is not None or self._opened or text.strip():
            self._say(role or STRAY, text)

    def _say(self, role: str, text: str) -> None:
        if not self._opened:
            text = text.lstrip()
        if text:
            self._tell(Piece(self._blocks, role, self._kind(role), text, not self._opened))
            self._opened = True

    def _close(self) -> None:
        self._blocks += self._opened
        self._opened = False

    def _kind(self, role: str) -> str:
        if role == self._grammar.observation:
            return "observation"
        return self._grammar.by_name[role].kind if role in self._grammar.by_name else STRAY
