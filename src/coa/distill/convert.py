"""Episode -> Trajectory: many agents' messages become one chain under a chosen grammar.

Hand-offs between agents are folded into think blocks, plans and critiques become their own blocks
where the grammar has them (and thoughts where it has not), tool calls become tool blocks, and
observations are rendered exactly as the student's runtime renders them. Blocks in which the teacher
erred are marked, so that training can weigh them. What cannot be converted is rejected with a
reason; nothing is patched.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coa.errors import CoaError
from coa.protocol import Block, Fault, Grammar, State, system_prompt
from coa.protocol.prompt import PromptKind
from coa.teachers.episode import Episode, Say, Use
from coa.trajectory import Author, Segment, StopReason, Trajectory, Usage

Span = tuple[int, int]
LEAD = " "
"""Opens every block: a name right after a tag would be other tokens than the same name in running
text, and a small model copies tokens. Without it half of the wrong answers were misspelt copies."""


class NotConvertible(CoaError, ValueError):
    """An episode that has no counterpart under the grammar; the message is the reason."""


@dataclass
class _Turn:
    """Blocks of the model turn that is being put together."""

    blocks: list[Block] = field(default_factory=list)
    marks: list[list[Span]] = field(default_factory=list)
    """For each block the spans of its text that hold a mistake."""
    thoughts: list[tuple[str, bool]] = field(default_factory=list)
    """What is to be thought before the next block, and whether it is a mistake."""

    def think(self, text: str, erred: bool = False) -> None:
        if text.strip():
            self.thoughts.append((" ".join(text.split()), erred))

    def flush_thoughts(self, role: str) -> None:
        """One think block of all thoughts; among sound ones only the mistakes are marked."""
        thoughts, self.thoughts = self.thoughts or [("Next step.", False)], []
        self.add(role, " ".join(text for text, _ in thoughts), all(err for _, err in thoughts))
        if not self.marks[-1]:
            position = len(f"<{role}>{LEAD}")
            for text, erred in thoughts:
                if erred:
                    self.marks[-1].append((position, position + len(text)))
                position += len(text) + 1

    def add(self, role: str, body: str, erred: bool = False) -> None:
        self.blocks.append(Block(role, f"{LEAD}{body}"))
        self.marks.append([(0, len(f"<{role}>{LEAD}{body}</{role}>"))] if erred else [])


def convert(episode: Episode, grammar: Grammar, prompt: PromptKind = "compact") -> Trajectory:
    """One chain for one episode; `grammar` must be bound to the teacher's toolbox."""
    if episode.answer is None:
        raise NotConvertible(episode.error or "the episode has no answer")
    trajectory = Trajectory(
        task_id=episode.task_id,
        question=episode.question,
        grammar=grammar.name,
        prompt=prompt,
        tools=list(grammar.tool_roles),
        segments=[Segment(Author.PROMPT, system_prompt(grammar, prompt))],
        weights=episode.teacher,
        seed=episode.seed,
        meta=dict(episode.meta),
    )
    writer = _Writer(grammar, trajectory)
    for event in episode.events:
        if isinstance(event, Use):
            writer.call(event)
        else:
            writer.say(event)
    writer.finish(episode.answer)
    return trajectory


class _Writer:
    """Builds the trajectory turn by turn, keeping it legal at every block."""

    def __init__(self, grammar: Grammar, trajectory: Trajectory) -> None:
        self.grammar, self.trajectory = grammar, trajectory
        self.state = State()
        self.turn = _Turn()
        self.usage = Usage()
        self.thinker = next(iter(grammar.of_kind("think")), "")
        by_kind = {kind: grammar.of_kind(kind) for kind in ("plan", "reflection", "answer")}
        self.plan = next(iter(by_kind["plan"]), "")
        self.reflection = next(iter(by_kind["reflection"]), "")
        self.answer = by_kind["answer"][0]
        self.tools = {role.tool or role.name: role.name for role in grammar.roles}

    def say(self, event: Say) -> None:
        """A message: a plan, an alarm, or something to think."""
        part = event.facts.get("part")
        if part == "plan" and self.plan:
            self.turn.think(event.thought)
            self._block(self.plan, event.text, event.erred)
        elif part == "alarm" and self.reflection:
            self.turn.think(event.thought)
            self._block(self.reflection, event.text, event.erred)
        elif part in ("plan", "alarm", "query", "finding", "verdict"):
            silent = part in ("query", "verdict")  # the call or the answer says it
            self.turn.think(event.thought, event.erred and not silent)
            self.turn.think("" if silent else event.text, event.erred)

    def call(self, event: Use) -> None:
        """A tool call ends a model turn; what came back is the environment's."""
        role = self.tools.get(event.tool)
        if role is None:
            raise NotConvertible(f"the grammar has no agent for tool {event.tool!r}")
        if event.failure in ("failed", "timeout"):
            raise NotConvertible(f"the environment failed: {event.tool} {event.failure}")
        self._block(role, event.argument, event.erred)
        self._end_turn()
        rendered = self.grammar.render_observation(event.result, self.trajectory.segments[-1].text)
        self.trajectory.segments.append(Segment(Author.ENV, rendered))
        self._advance(Block(self.grammar.observation, event.result))
        self.usage.tool_calls += 1

    def finish(self, answer: str) -> None:
        self._block(self.answer, answer)
        self._end_turn()
        self.trajectory.stop, self.trajectory.answer = StopReason.ANSWERED, answer.strip()
        self.trajectory.usage = self.usage

    def _block(self, role: str, body: str, erred: bool = False) -> None:
        """Add a block, thinking first where the grammar wants it."""
        if self.thinker and self.thinker in self.grammar.allowed(self.state):
            self.turn.flush_thoughts(self.thinker)
            self._check(self.turn.blocks[-1])
        self.turn.add(role, body.strip(), erred)
        self._check(self.turn.blocks[-1])

    def _check(self, block: Block) -> None:
        if self.grammar.tag_pattern.search(block.body):
            raise NotConvertible(f"<{block.role}> would hold a tag of the grammar")
        self._advance(block)

    def _advance(self, block: Block) -> None:
        moved = self.grammar.advance(self.state, block)
        if isinstance(moved, Fault):
            raise NotConvertible(f"illegal under {self.grammar.name!r}: {moved.message}")
        self.state = moved

    def _end_turn(self) -> None:
        text = self.grammar.render(self.turn.blocks)
        errs, position = [], 0
        for block, marks in zip(self.turn.blocks, self.turn.marks, strict=True):
            errs += [(position + start, position + end) for start, end in marks]
            position += len(self.grammar.render([block])) + 1
        self.trajectory.segments.append(Segment(Author.MODEL, text, errs=errs))
        self.usage.turns += 1
        self.turn = _Turn(thoughts=self.turn.thoughts)
