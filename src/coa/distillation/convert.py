"""Episode -> Trajectory: many agents' messages become one chain under a chosen grammar.

Agents that worked at the same time are put one after the other. Hand-offs between agents are
folded into think blocks, plans and critiques become their own blocks where the grammar has them
(and thoughts where it has not), tool calls become tool blocks, and observations are rendered
exactly as the student's runtime renders them. Blocks in which the teacher erred are marked, so that
training can weigh them. What cannot be converted is rejected with a reason; nothing is patched.

What a message is, its `part`, is stated by whoever recorded the team, or read from the flow of the
work (`distillation/flow.py`): where the grammar names agents, as a derived one does, and where no
message states one. What only repeats what the chain already holds is then left out.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from coa.distillation.flow import HANDED_OVER, Deed, SoFar, job_of, read_flow
from coa.errors import CoaError, did_you_mean
from coa.grammar import Block, Fault, Grammar, GrammarState, system_prompt
from coa.grammar.constrain import Schemas
from coa.grammar.grammar import BODIES, NO_THOUGHT, Body, Kind, parse_ratings, parse_score
from coa.grammar.prompt import PromptKind
from coa.io.runs import Json
from coa.recording.episode import SYSTEM, USER, Episode, EpisodeEvent, Message, ToolSpec, ToolUse
from coa.rewards import normalise
from coa.tools.arguments import in_order, only_text, unwrap
from coa.tools.recorded import RecordedTool
from coa.trajectory import Author, Segment, StopReason, Trajectory, Usage

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
_PARTS = (*_BLOCKS, "delegation", "query", "finding", "verdict", "failure", "malformed")
"""Of messages; the last two do not appear in a chain, and neither does one without a part."""
_RATINGS = ("good", "average", "fair", "poor")


class NotConvertible(CoaError, ValueError):
    """An episode that has no counterpart under the grammar.

    `reason` is the same for all episodes with the same trouble, `detail` is of this one and names
    its event.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class _Given(NamedTuple):
    """A job that was given out, and what was thought before it."""

    role: str
    asker: str
    agent: str
    event: Message
    where: str
    thoughts: tuple[_Piece, ...]


class _Piece(NamedTuple):
    """Text for a block, and the event that it is of."""

    text: str
    erred: bool
    where: str


def convert(
    episode: Episode,
    grammar: Grammar,
    prompt: PromptKind = "compact",
    schemas: Schemas = (),
) -> Trajectory:
    """One chain for one episode; `grammar` must be bound to the teacher's toolbox. `schemas` are
    those of the tools that the student will have, where they are not the record's."""
    check_record(episode)
    trajectory = Trajectory(
        task_id=episode.task_id,
        question=episode.question,
        grammar=grammar.name,
        grammar_id=grammar.unbound_id,
        prompt=prompt,
        tools=list(grammar.tool_roles),
        segments=[Segment(Author.PROMPT, system_prompt(grammar, prompt, episode.history))],
        weights=episode.teacher,
        seed=episode.seed,
        meta=dict(episode.meta),
    )
    writer = _ChainWriter(grammar, trajectory, episode, schemas)
    ordered = in_one_line(episode.events)
    for at, (number, event) in enumerate(ordered, start=1):
        writer.where = _where(number, event)
        deed = writer.deeds[number - 1]
        writer.begin(event)
        if isinstance(event, ToolUse):
            writer.call(event)
        elif deed is not None and not _part(event):
            writer.follow(event, deed)
        else:
            later = [event for _, event in ordered[at:]]
            writer.say(event, replans=_replans(later), refused=_refused(later))
    assert episode.answer is not None, episode.task_id
    writer.finish(episode.answer)
    return trajectory


def in_one_line(events: Sequence[EpisodeEvent]) -> list[tuple[int, EpisodeEvent]]:
    """(number from 1, event), each branch whole and in its order, and branch 2 before branch 10;
    what came between branches stays there."""
    ended = accumulate(not event.branch for event in events)
    numbered = zip(ended, enumerate(events, start=1), strict=True)

    def place(each: tuple[int, tuple[int, EpisodeEvent]]) -> tuple[int, int, str]:
        branch = each[1][1].branch
        return each[0], len(branch), branch

    return [event for _, event in sorted(numbered, key=place)]


def _replans(later: Sequence[EpisodeEvent]) -> bool:
    """Whether somebody plans before anything else is done."""
    parts = (_part(event) if isinstance(event, Message) else "call" for event in later)
    return next((part for part in parts if part in ("plan", "call", "suggestion")), "") == "plan"


def _refused(later: Sequence[EpisodeEvent]) -> bool:
    """Whether the next check fails."""
    checks = (e for e in later if isinstance(e, Message) and _part(e) == "check")
    return _fails(next(checks, None))


def _fails(check: Message | None) -> bool:
    return check is not None and bool(check.facts.get("score", FAILED) <= FAILED)


def _part(event: Message) -> str:
    return str(event.facts.get("part", ""))


def schema_of(spec: ToolSpec) -> Json:
    """The schema of a recorded tool; empty where the record has none that can be read."""
    try:
        read = json.loads(spec.schema) if spec.schema else {}
    except ValueError:
        return {}
    return read if isinstance(read, dict) and isinstance(read.get("properties"), dict) else {}


def as_recorded(spec: ToolSpec) -> RecordedTool:
    """The tool of a record, with its calls written as a text where that is all that it takes."""
    schema, body = schema_of(spec), spec.body
    if schema and body != "code":
        body = "text" if only_text(schema) else "json"
    return RecordedTool(spec.name, spec.about, _body(body), spec.schema if schema else "")


def team_tools(episodes: Sequence[Episode]) -> list[RecordedTool]:
    """The tools that a team had over all its episodes, noted or used, as most of them note each.

    One that was never used as a tool and has the name of an agent, or has it in its own name and
    is never on offer where that agent works, is how the agent is reached: where it was not called,
    no recorder can know that.
    """
    noted: dict[str, Counter[ToolSpec]] = {}
    used: dict[str, bool] = {}
    """Tool -> whether all of its calls are JSON objects."""
    for episode in episodes:
        for spec in episode.tools:
            noted.setdefault(spec.name, Counter())[spec] += 1
        for event in episode.events:
            if isinstance(event, ToolUse):
                written = event.argument.lstrip().startswith("{")
                used[event.tool] = written and used.get(event.tool, True)
    agents = {agent.name for episode in episodes for agent in episode.agents}
    named = {
        (agent, tool)
        for tool in noted.keys() - used.keys()
        for agent in agents
        if f"_{_slug(agent)}_" in f"_{_slug(tool)}_"
    }
    for episode in episodes if named else ():
        works, offered = ({each.name for each in e} for e in (episode.agents, episode.tools))
        named -= {(agent, tool) for agent, tool in named if agent in works and tool in offered}
    reaching = agents | {tool for _, tool in named}
    return [
        _noted_tool(name, noted.get(name, Counter()), json_calls=used.get(name, False))
        for name in dict.fromkeys([*noted, *used])
        if name in used or name not in reaching
    ]


def _slug(name: str) -> str:
    return re.sub(r"\W+", "_", name.casefold())


def _noted_tool(name: str, noted: Counter[ToolSpec], *, json_calls: bool) -> RecordedTool:
    spec = noted.most_common(1)[0][0] if noted else ToolSpec(name)
    if len(noted) > 1 and len({each.about for each in noted}) == noted.total():
        spec = replace(spec, about="")  # it says something else in every task
    tool = as_recorded(spec)
    plain = not tool.schema and tool.body == "text"
    return replace(tool, body="json") if plain and json_calls else tool


def _body(stated: str) -> Body:
    """A body that there is; records of others may state any word."""
    return next((body for body in BODIES if body == stated), "text")


def _where(number: int, event: EpisodeEvent) -> str:
    """An event as a rejection names it; `number` counts from 1, in the order of the record."""
    return f"event {number} ({event.agent})"


def check_record(episode: Episode) -> None:
    """Raise unless the team worked on one question and answered it, and every message can be read,
    under whatever grammar."""
    asked = _words(episode.question)
    for number, event in enumerate(episode.events, start=1):
        if not isinstance(event, Message):
            continue
        where, part = _where(number, event), _part(event)
        if part and part not in _PARTS:
            found = f"{where}: {part!r}.{did_you_mean(part, _PARTS)}"
            raise NotConvertible("a message has an unknown part", found)
        score = event.facts.get("score", FAILED)
        if part == "check" and not isinstance(score, int | float):
            raise NotConvertible("the score of a check is no number", f"{where}: {score!r}")
        stated = event.text if event.agent == USER else event.facts.get("question")
        if stated is not None and asked not in _words(str(stated)):
            raise NotConvertible(
                "the agents disagree on the question",
                f"{where}: says {str(stated)[:80]!r}, the episode {episode.question[:80]!r}",
            )
    if episode.answer is None:
        raise NotConvertible(episode.error or "the episode has no answer")


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


class _ChainWriter:
    """Builds the trajectory turn by turn, keeping it legal at every block."""

    def __init__(
        self, grammar: Grammar, trajectory: Trajectory, episode: Episode, schemas: Schemas
    ) -> None:
        self.grammar, self.trajectory, self.answered = grammar, trajectory, episode.answer or ""
        self.state = GrammarState()
        self.where = ""
        """The event that is written, as a rejection names it."""
        self.blocks: list[Block] = []
        """Of the model turn that is being put together."""
        self.errs: list[tuple[int, int]] = []
        """Spans of its text that hold a mistake."""
        self.thoughts: list[_Piece] = []
        """What is to be thought before the next block."""
        self.usage = Usage()
        self.thinker = next(iter(grammar.of_kind("think")), "")
        self.roles = {part: next(iter(grammar.of_kind(kind)), "") for part, kind in _BLOCKS.items()}
        self.answer = grammar.of_kind("answer")[0]
        called = (grammar.by_name[name] for name in grammar.tool_roles)  # a tool may be named plan
        self.tools = {role.tool or role.name: role.name for role in called}
        self.specs = {spec.name: schema_of(spec) for spec in episode.tools}
        self.schemas = {role: json.loads(schema) for role, schema in schemas}
        self.of_agents = {(r.kind, r.agent): r.name for r in grammar.roles if r.agent}
        """The blocks of agents, where the grammar names any."""
        stated = any(isinstance(e, Message) and _part(e) for e in episode.events)
        follows = bool(self.of_agents) or not stated
        self.deeds: list[Deed | None]
        """What messages do that state no part; None each: they are not in the chain."""
        self.deeds = read_flow(episode) if follows else [None] * len(episode.events)
        self.heard = SoFar()
        self.heard.add(episode.question)
        self.jobs: list[_Given] = []
        """What was given out and not begun."""
        self.at_work: set[tuple[str, str]] = set()
        """Agents, and the branch of each."""

    def say(self, event: Message, replans: bool = False, refused: bool = False) -> None:
        """A message: a block of its own where the grammar has one for it, or something to think.

        What the call or the answer says anyway (a query, a suggestion, a verdict) is not thought as
        well, and neither is consent; a check that fails is an objection like any other, and the
        suggestion that it takes back is then thought.
        """
        part = _part(event)
        if part == "delegation":
            self._think(event.thought, event.erred)
            self._give(event, event.agent, event.to)
            return
        if part == "check" and not self.roles[part]:
            part = "alarm" if _fails(event) else ""
        if part in ("alarm", "approval"):
            self._check_ratings(event)
        role = self._own(part, event.agent)
        if part in ("plan", "alarm", "approval") and role and not self._may_come(role):
            role = ""  # a second objection to one call, a new plan where there is only one
        if role and (part != "approval" or self._wants_consent(event)):
            self._think(event.thought, event.erred)
            self._block(role, self._scored(role, event, replans), event.erred)
        elif part == "suggestion":
            self._think(event.thought, event.erred)
            self._think(f"The answer may be {event.text}." if refused else "", event.erred)
        elif part in ("plan", "alarm", "finding"):
            self._think(event.thought, event.erred)
            self._think(event.text, event.erred)
        elif part == "verdict" and event.agent == SYSTEM and not self.roles["check"]:
            pass  # that the check passed says nothing in a chain that has none
        elif part in ("query", "verdict"):
            self._think(event.thought)  # only the call is a mistake, not the need for it

    def _own(self, part: str, agent: str) -> str:
        """The block of a message of this part; that of the agent where it has one of its own."""
        kind = _BLOCKS.get(part)
        return self.of_agents.get((kind, agent), self.roles.get(part, "")) if kind else ""

    # -- messages whose part is read from the flow ------------------------------------------

    def follow(self, event: Message, deed: Deed) -> None:
        """A message that states no part: a job, a plan or a criticism has a block where the grammar
        names the agent; of everything else what it adds is thought."""
        told = [piece.text for piece in self.thoughts[-1:]]
        if event.agent != SYSTEM and told != [" ".join(event.thought.split())]:
            self._think(event.thought, event.erred)
        if deed.doing == "acts":
            return
        if deed.begins and ("delegation", deed.other) in self.of_agents:
            text = event.text if deed.doing == "asks" else self.heard.news(event.text)
            self._give(replace(event, text=text), deed.agent, deed.other)
            return
        if deed.doing == "reports":
            self.at_work.discard((event.agent, event.branch))
        role = self._role_in_flow(deed)
        if role and event.text.strip() and not self._is_answer(event) and self._may_come(role):
            self._block(role, event.text, event.erred)
        else:
            known = self.answered if deed.doing == "answers" else ""
            empty = deed.begins and job_of(event.text, deed.other) == HANDED_OVER
            self._think("" if empty else self.heard.news(event.text, known), event.erred)

    def _role_in_flow(self, deed: Deed) -> str:
        """The block of a message that is no job: that of a planner or a critic, in all that it says
        to others; of an agent that plans its own work, in what it says to nobody."""
        plans = self.of_agents.get(("plan", deed.agent), "")
        works = ("delegation", deed.agent) in self.of_agents
        if plans and (deed.doing == "remarks" or (deed.doing != "answers" and not works)):
            return plans
        return self.of_agents.get(("reflection", deed.agent), "")

    def _is_answer(self, event: Message) -> bool:
        return event.to == USER and normalise(event.text) == normalise(self.answered)

    def _give(self, event: Message, asker: str, agent: str) -> None:
        """A job: its block is written when the work on it begins, since several may be given out at
        once, and each agent then works in a branch of its own."""
        role = self.of_agents.get(("delegation", agent), "")
        if role:
            given = _Given(role, asker, agent, event, self.where, tuple(self.thoughts))
            self.jobs.append(given)
            self.thoughts.clear()
        else:
            self._think(event.text, event.erred)

    def begin(self, event: EpisodeEvent) -> None:
        """Write the job that an agent now begins with; those that it has given out itself and that
        nobody began, when it goes on."""
        here = (event.agent, event.branch)
        if here not in self.at_work:
            mine = [job for job in self.jobs if job.agent == event.agent]
            found = [job for job in mine if job.event.branch == event.branch] or mine
            if found:
                self.at_work.add(here)
                self._write_job(found[0])
        if isinstance(event, Message) and event.agent != SYSTEM:
            for job in [job for job in self.jobs if job.asker == event.agent]:
                self._write_job(job)

    def _write_job(self, job: _Given) -> None:
        self.jobs.remove(job)
        where, self.where = self.where, job.where
        self.thoughts[:0] = job.thoughts
        self._block(job.role, job_of(job.event.text, job.agent), job.event.erred)
        self.where = where

    def _argument(self, role: str, event: ToolUse) -> str:
        """The argument as a block holds it: a text alone where that is all that the tool takes,
        otherwise JSON in the order of the tool's schema."""
        recorded, body = self.specs.get(event.tool, {}), self.grammar.by_name[role].body
        if body == "json":
            return in_order(event.argument, self.schemas.get(role, recorded)) or "{}"
        only = only_text(recorded)
        text = unwrap(event.argument, only) if body == "text" and only else event.argument
        return text if text.strip() else event.argument

    # -- blocks -----------------------------------------------------------------------------

    def _think(self, text: str, erred: bool = False) -> None:
        if text.strip():
            self.heard.add(text)
            self.thoughts.append(_Piece(" ".join(text.split()), erred, self.where))

    def _check_ratings(self, event: Message) -> None:
        """Raise unless a critic rates by the criteria of the grammar, where it has any."""
        role = self.roles["alarm"]
        criteria = self.grammar.by_name[role].ratings if role else ()
        stated = event.facts.get("ratings") or {}
        if criteria and not isinstance(stated, dict):
            raise self._rejection(
                "the ratings of a critic are no object",
                f"found {str(stated)[:60]!r}, expected a word for each criterion",
            )
        for name, word in stated.items() if criteria else ():
            if name not in criteria:
                known = ", ".join(criteria)
                raise self._rejection(
                    "a critic rates by an unknown criterion", f"{name!r}, expected {known}"
                )
            if str(word).lower() not in _RATINGS:
                raise self._rejection(
                    "a critic gives an unknown rating",
                    f"{name} is {word!r}, expected good, average or poor",
                )

    def _rejection(self, reason: str, detail: str) -> NotConvertible:
        return NotConvertible(reason, f"{self.where}: {detail}")

    def _scored(self, role: str, event: Message, replans: bool) -> str:
        """A message with the ratings or the score that its block must hold.

        Critics of other systems put them into a field of their own, or only agree or object: an
        objection that makes the team plan again is poor in all respects, another one average.
        """
        spec = self.grammar.by_name[role]
        if spec.ratings and parse_ratings(event.text, spec.ratings) is None:
            overall = "good" if _part(event) == "approval" else "poor" if replans else "average"
            stated = event.facts.get("ratings") or {}
            rated = (f"{name}: {stated.get(name, overall)}." for name in spec.ratings)
            return f"{' '.join(rated)} {event.text}"
        score = event.facts.get("score")
        if not spec.pass_score or score is None or parse_score(event.text) == score:
            return event.text
        text = f"{event.text} Score: {score}"
        if (read := parse_score(text)) not in (None, score):  # without any it is illegal anyway
            raise self._rejection("a check reads as another score", f"{read}, not {score}")
        return text

    def _may_come(self, role: str) -> bool:
        """Whether the grammar lets a block come next, after a thought where it wants one."""
        state = self.state
        if self.thinker and self.thinker in self.grammar.allowed(state):
            thought = self.grammar.advance(state, Block(self.thinker, LEAD))
            assert isinstance(thought, GrammarState), thought
            state = thought
        return role in self.grammar.allowed(state)

    def _wants_consent(self, event: Message) -> bool:
        """Whether approval has to be a block: the grammar demands a reflection, or rates it."""
        rated = event.facts.get("rated") or event.facts.get("ratings")
        if rated and self.grammar.by_name[self.roles["approval"]].ratings:
            return True
        allowed = self.grammar.allowed(self.state)
        return self.roles["approval"] in allowed and self.thinker not in allowed

    def call(self, event: ToolUse) -> None:
        """A tool call ends a model turn; what came back is the environment's."""
        role = self.tools.get(event.tool)
        if role is None:
            raise self._rejection(
                "the grammar has no agent for a tool",
                f"{event.tool!r}.{did_you_mean(event.tool, self.tools)} "
                "With tools=recorded the record answers for tools that are not here",
            )
        if event.failure in ("failed", "timeout"):
            raise self._rejection("the environment failed", f"{event.tool} {event.failure}")
        self._block(role, self._argument(role, event), event.erred)
        self._end_turn()
        rendered = self.grammar.render_observation(event.result, self.trajectory.segments[-1].text)
        self.trajectory.segments.append(Segment(Author.ENV, rendered))
        self._advance(Block(self.grammar.observation, event.result))
        self.heard.add(event.result)
        self.usage.tool_calls += 1

    def finish(self, answer: str) -> None:
        for job in list(self.jobs):
            self._write_job(job)
        self.where = "the answer"
        self._block(self.answer, answer)
        self._end_turn()
        self.trajectory.stop, self.trajectory.answer = StopReason.ANSWERED, answer.strip()
        self.trajectory.usage = self.usage

    def _block(self, role: str, body: str, erred: bool = False) -> None:
        """Add a block, after a thought where there is one or the grammar wants it."""
        allowed = self.grammar.allowed(self.state)
        if self.thinker and self.thinker in allowed and (self.thoughts or role not in allowed):
            thoughts, self.thoughts = self.thoughts, []
            self._add(self.thinker, *(thoughts or [_Piece(NO_THOUGHT, False, self.where)]))
        self._add(role, _Piece(body.strip(), erred, self.where))

    def _add(self, role: str, *pieces: _Piece) -> None:
        """Add a block of these pieces; among sound ones only the mistakes are marked."""
        for text, _, where in pieces:
            if found := self.grammar.tag_pattern.search(text):
                raise NotConvertible(
                    "a block would hold a tag of the grammar", f"{where}: <{role}> holds {found[0]}"
                )
        position = len(self.grammar.render(self.blocks)) + bool(self.blocks)
        block = Block(role, LEAD + " ".join(piece.text for piece in pieces))
        self.heard.add(block.body)
        if all(piece.erred for piece in pieces):
            self.errs.append((position, position + len(self.grammar.render([block]))))
        else:
            position += len(f"<{role}>{LEAD}")
            for text, erred, _ in pieces:
                self.errs += [(position, position + len(text))] if erred else []
                position += len(text) + 1
        self.blocks.append(block)
        self._advance(block)

    def _advance(self, block: Block) -> None:
        moved = self.grammar.advance(self.state, block)
        if isinstance(moved, Fault):
            raise self._rejection(f"illegal under {self.grammar.name!r}", moved.message)
        self.state = moved

    def _end_turn(self) -> None:
        text = self.grammar.render(self.blocks)
        self.trajectory.segments.append(Segment(Author.MODEL, text, errs=self.errs))
        self.usage.turns += 1
        self.blocks, self.errs = [], []
