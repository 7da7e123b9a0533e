"""Episode -> Trajectory: many agents' messages become one chain under a chosen grammar.

Agents that worked at the same time are put one after the other. Hand-offs between agents are
folded into think blocks, plans and critiques become their own blocks where the grammar has them
(and thoughts where it has not), tool calls become tool blocks, and observations are rendered
exactly as the student's runtime renders them. Blocks in which the teacher erred are marked, so that
training can weigh them. What cannot be converted is rejected with a reason; nothing is patched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from coa.errors import CoaError, did_you_mean
from coa.protocol import Block, Fault, Grammar, State, system_prompt
from coa.protocol.grammar import Kind
from coa.protocol.prompt import PromptKind
from coa.protocol.scores import parse_ratings, parse_score
from coa.teachers.episode import SYSTEM, USER, Episode, Happening, Say, Use
from coa.trajectory import Author, Segment, StopReason, Trajectory, Usage

Span = tuple[int, int]
LEAD = " "
"""Opens every block: a name right after a tag would be other tokens than the same name in running
text, and a small model copies tokens. Without it half of the wrong answers were misspelt copies."""
FAILED = 2
"""A check with this score or less sends the team back."""
_BLOCKS: Mapping[str, Kind] = {
    "plan": "plan",
    "alarm": "reflection",
    "approval": "reflection",
    "suggestion": "suggestion",
    "check": "check",
}
"""What becomes of a message by its part, where the grammar has such a role."""


class NotConvertible(CoaError, ValueError):
    """An episode that has no counterpart under the grammar.

    `reason` is the same for all episodes with the same trouble, `detail` is of this one.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


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
    check_record(episode)
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
    events = list(in_one_line(episode.events))
    for place, event in enumerate(events):
        if isinstance(event, Use):
            writer.call(event)
        else:
            later = events[place + 1 :]
            writer.say(event, replans=_replans(later), refused=_refused(later))
    assert episode.answer is not None, episode.task_id
    writer.finish(episode.answer)
    return trajectory


def _replans(later: Sequence[Happening]) -> bool:
    """Whether somebody plans before anything else is done."""
    parts = (_part(event) if isinstance(event, Say) else "call" for event in later)
    return next((part for part in parts if part in ("plan", "call", "suggestion")), "") == "plan"


def _refused(later: Sequence[Happening]) -> bool:
    """Whether the next check fails."""
    checks = (e for e in later if isinstance(e, Say) and _part(e) == "check")
    return any(e.facts.get("score", FAILED) <= FAILED for e in islice(checks, 1))


_PARTS = (*_BLOCKS, "query", "finding", "verdict", "failure", "malformed", "")
"""Of messages; the last three do not appear in a chain."""


def _part(event: Say) -> str:
    return str(event.facts.get("part", ""))


def check_record(episode: Episode) -> None:
    """Raise unless the record is of one team that worked on one question and answered it."""
    names = {agent.name for agent in episode.agents} | {USER, SYSTEM}
    asked = _words(episode.question)
    for event in episode.events:
        if event.agent not in names:
            raise NotConvertible("an agent that the episode does not list took part", event.agent)
        if not isinstance(event, Say):
            continue
        if (part := _part(event)) not in _PARTS:
            raise NotConvertible("a message has an unknown part", part + did_you_mean(part, _PARTS))
        score = event.facts.get("score", FAILED)
        if part == "check" and not isinstance(score, int | float):
            raise NotConvertible("the score of a check is no number", f"{event.agent}: {score!r}")
        stated = event.text if event.agent == USER else event.facts.get("question")
        if stated is not None and asked not in _words(str(stated)):
            raise NotConvertible(
                "the agents disagree on the question",
                f"{event.agent} says {str(stated)[:80]!r}, the episode {episode.question[:80]!r}",
            )
    if episode.answer is None:
        raise NotConvertible(episode.error or "the episode has no answer")


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def in_one_line(events: Sequence[Happening]) -> Iterator[Happening]:
    """The events, each branch whole and in its order; what came between branches stays there."""
    branches: dict[str, list[Happening]] = {}
    for event in events:
        if event.branch:
            branches.setdefault(event.branch, []).append(event)
            continue
        yield from _whole(branches)
        branches = {}
        yield event
    yield from _whole(branches)


def _whole(branches: Mapping[str, list[Happening]]) -> Iterator[Happening]:
    for name in sorted(branches, key=lambda name: (len(name), name)):  # 2 before 10
        yield from branches[name]


class _Writer:
    """Builds the trajectory turn by turn, keeping it legal at every block."""

    def __init__(self, grammar: Grammar, trajectory: Trajectory) -> None:
        self.grammar, self.trajectory = grammar, trajectory
        self.state = State()
        self.turn = _Turn()
        self.usage = Usage()
        self.thinker = next(iter(grammar.of_kind("think")), "")
        self.roles = {part: next(iter(grammar.of_kind(kind)), "") for part, kind in _BLOCKS.items()}
        self.answer = grammar.of_kind("answer")[0]
        self.tools = {role.tool or role.name: role.name for role in grammar.roles}

    def say(self, event: Say, replans: bool = False, refused: bool = False) -> None:
        """A message: a block of its own where the grammar has one for it, or something to think.

        What the call or the answer says anyway (a query, a suggestion, a verdict) is not thought as
        well, and neither is consent; a check that fails is an objection like any other, and the
        suggestion that it takes back is then thought.
        """
        part = _part(event)
        if part == "check" and not self.roles[part]:
            part = "alarm" if event.facts.get("score", FAILED) <= FAILED else ""
        role = self.roles.get(part, "")
        if part in ("plan", "alarm") and role and not self._may_come(role):
            role = ""  # a second objection to one call, a new plan where there is only one
        if role and (part != "approval" or self._wants_consent(event)):
            self.turn.think(event.thought, event.erred)
            self._block(role, self._scored(role, event, replans), event.erred)
        elif part == "suggestion":
            self.turn.think(event.thought, event.erred)
            self.turn.think(f"The answer may be {event.text}." if refused else "", event.erred)
        elif part in ("plan", "alarm", "finding"):
            self.turn.think(event.thought, event.erred)
            self.turn.think(event.text, event.erred)
        elif part == "verdict" and event.agent == SYSTEM and not self.roles["check"]:
            pass  # that the check passed says nothing in a chain that has none
        elif part in ("query", "verdict"):
            self.turn.think(event.thought)  # only the call is a mistake, not the need for it

    def _scored(self, role: str, event: Say, replans: bool) -> str:
        """A message with the ratings or the score that its block must hold.

        Critics of other systems put them into a field of their own, or only agree or object: an
        objection that makes the team plan again is poor in all respects, another one average.
        """
        spec = self.grammar.by_name[role]
        if spec.ratings and parse_ratings(event.text, spec.ratings) is None:
            overall = "good" if _part(event) == "approval" else "poor" if replans else "average"
            stated = event.facts.get("ratings", {})
            rated = (f"{name}: {stated.get(name, overall)}." for name in spec.ratings)
            return f"{' '.join(rated)} {event.text}"
        score = event.facts.get("score")
        if not spec.pass_score or score is None or parse_score(event.text) == score:
            return event.text
        text = f"{event.text} Score: {score}"
        if (read := parse_score(text)) not in (None, score):  # without any it is illegal anyway
            raise NotConvertible("a check reads as another score", f"{read}, not {score}")
        return text

    def _may_come(self, role: str) -> bool:
        """Whether the grammar lets a block come next, after a thought where it wants one."""
        state = self.state
        if self.thinker and self.thinker in self.grammar.allowed(state):
            thought = self.grammar.advance(state, Block(self.thinker, LEAD))
            assert isinstance(thought, State), thought
            state = thought
        return role in self.grammar.allowed(state)

    def _wants_consent(self, event: Say) -> bool:
        """Whether approval has to be a block: the grammar demands a reflection, or rates it."""
        if event.facts.get("rated"):
            return bool(self.grammar.by_name[self.roles["approval"]].ratings)
        allowed = self.grammar.allowed(self.state)
        return self.roles["approval"] in allowed and self.thinker not in allowed

    def call(self, event: Use) -> None:
        """A tool call ends a model turn; what came back is the environment's."""
        role = self.tools.get(event.tool)
        if role is None:
            raise NotConvertible("the grammar has no agent for a tool", event.tool)
        if event.failure in ("failed", "timeout"):
            raise NotConvertible("the environment failed", f"{event.tool} {event.failure}")
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
            raise NotConvertible("a block would hold a tag of the grammar", f"<{block.role}>")
        self._advance(block)

    def _advance(self, block: Block) -> None:
        moved = self.grammar.advance(self.state, block)
        if isinstance(moved, Fault):
            raise NotConvertible(f"illegal under {self.grammar.name!r}", moved.message)
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
