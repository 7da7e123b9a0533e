"""Works: what the agents of a team did for whom, found by what was said.

A reply asks for calls (`Asked`); each has a result, or a work that an agent did because of it. A
work (`AgentWork`) is what an agent does from being asked to its reply. The one who asked is found
by texts: an argument that turns up in what the agent is given, a reply that turns up in the result
of a call; time alone decides only where nothing else is possible. `heard_by` says who was told what
came of a work that nobody asked for.

A short text proves nothing: it has to be the whole of a message, or its origin the only possible
one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from coa.recording.calls import LoggedSession
from coa.recording.programs import (
    ENDS,
    PYTHON,
    Program,
    ProgramCall,
    Programs,
    functions_in,
    is_last,
)
from coa.recording.turns import (
    AgentTurn,
    Count,
    as_json,
    call_key,
    quoted,
    result_of,
    results_in,
    squash,
    strings_in,
)
from coa.recording.wire import FunctionCall, WireMessage

SURE = 16
"""Characters of a job or a reply that prove where it came from; what is shorter has to be the whole
of a message, or the only possible origin."""
_ENDS = re.compile(r"\Afinal_(?:answer|result|response|output)(?:_\w+)?\Z")
"""Tools by which frameworks let an agent end."""


def ends_a_work(tool: str) -> bool:
    return bool(_ENDS.match(tool))


@dataclass(slots=True, eq=False)
class Asked:
    """One call of a reply, and what became of it."""

    turn: AgentTurn
    index: int
    call: FunctionCall
    result: WireMessage | None = None
    answered_by: AgentTurn | None = None
    """The first turn that was shown the result."""
    work: AgentWork | None = None
    """What an agent did because of it."""
    inside: list[AgentWork] = field(default_factory=list)
    """What agents did for the tool that it called, which made its result of that."""
    last: bool = False
    """Its arguments are what the agent ends with, though the tool's name does not say so."""
    joined: str = ""
    """A text that holds its result beside others, where they cannot be told apart."""

    @property
    def ends(self) -> bool:
        return self.last or ends_a_work(self.call.name)

    def pending(self, turn: AgentTurn) -> bool:
        """Whether nobody had its result when a turn began."""
        began = self.turn.call.ended <= turn.call.begun and self.turn.number < turn.number
        return began and (
            self.answered_by is None
            or (self.answered_by.number >= turn.number and self.answered_by is not turn)
        )


@dataclass(slots=True, eq=False)
class AgentWork:
    """The turns of an agent from a request to the reply to it."""

    turns: list[AgentTurn]
    asker: Asked | None = None
    handed: bool = False
    """The asker handed its own conversation over and does not wait."""
    inside: Asked | None = None
    """The call in whose tool it was done, where the tool made something else of the reply."""

    @property
    def agent(self) -> str:
        return self.turns[0].agent

    @property
    def begun(self) -> float:
        return self.turns[0].call.begun

    @property
    def ended(self) -> float:
        return self.turns[-1].call.ended


class TeamAtWork:
    """Turns with their calls, results and works."""

    def __init__(self, turns: Sequence[AgentTurn], session: LoggedSession, count: Count) -> None:
        self.turns, self.session, self.count = turns, session, count
        self.about = {**session.about, **(session.end or {})}
        self.stated = str(self.about.get("answer") or "")
        self._told: dict[int, list[str]] = {}
        self.asked = {
            turn.number: [Asked(turn, at, call) for at, call in enumerate(turn.said.calls)]
            for turn in turns
        }
        self._find_results()
        self._find_endings()
        self.programs: dict[int, tuple[Program | None, Asked]] = {}
        """Turn -> its program, where that can be read, and the call that runs it."""
        self._read_programs()
        self.finals: dict[int, str] = {}
        """Turn -> what its agent ends with, where that is not in its reply."""
        self.works: list[AgentWork] = []
        self.work_of: dict[int, AgentWork] = {}
        self._find_works()
        self._judge_programs()

    def all_asked(self) -> Iterator[Asked]:
        for turn in self.turns:
            yield from self.asked[turn.number]

    def _find_results(self) -> None:
        looked: Counter[int] = Counter()
        for turn in self.turns:
            for place, spoke in sorted(turn.spoken.items()):
                looked[spoke.number] += 1
                if looked[spoke.number] > 3:  # a conversation only repeats what it once said
                    continue
                calls = turn.messages[place].calls or spoke.said.calls
                results = list(results_in(turn, place))
                for each in self.asked[spoke.number]:
                    self._find_result(each, turn, calls, results)
            for spoke, error in turn.lost:
                for each in self.asked[spoke.number]:
                    if each.result is None and not each.joined:
                        each.result = WireMessage("tool", error, failed=True)
                        each.answered_by = turn
        for each in self.all_asked():
            if each.result is None:
                each.result = self.session.results.get(each.call.id) if each.call.id else None

    def _find_result(
        self,
        asked: Asked,
        turn: AgentTurn,
        calls: Sequence[FunctionCall],
        results: list[WireMessage],
    ) -> None:
        same = [at for at, call in enumerate(calls) if _same(call, asked.call)]
        before = self.asked[asked.turn.number][: asked.index]
        nth = sum(_same(each.call, asked.call) for each in before)
        found = result_of(calls, same[nth], results) if nth < len(same) else None
        if found is None:
            if nth < len(same) and len(results) == 1 and not results[0].answers:
                asked.joined, asked.answered_by = results[0].text, asked.answered_by or turn
            return
        known = asked.result
        if known is None:
            asked.result, asked.answered_by = found, turn
        elif found.text != known.text and known.text.startswith(found.text):
            asked.result = found  # what had been joined to it, such as a request of the program

    def _find_endings(self) -> None:
        """Structured outputs: a call that nobody answers, and whose arguments others are told."""
        stated = squash(self.stated)
        for turn in self.turns:
            asked = self.asked[turn.number]
            if len(asked) != 1 or asked[0].result or asked[0].joined or asked[0].answered_by:
                continue
            text = squash(only_text(asked[0].call))
            later = others_after(turn, self.turns)
            asked[0].last = (
                asked[0].call.name != PYTHON
                and bool(text)
                and (text == stated or any(found_in(text, self.told(each)) == 4 for each in later))
            )

    # -- programs

    def _read_programs(self) -> None:
        """Put the calls of a program in the place of the call that runs it."""
        memories: dict[int, Programs] = {}
        for turn in self.turns:
            own = [spoke.number for spoke in turn.spoken.values() if spoke.agent == turn.agent]
            known = [memories[number] for number in sorted(own) if number in memories]
            asked = self.asked[turn.number]
            if [each.call.name for each in asked] != [PYTHON] or asked[0].call.id:
                continue
            memory = known[-1] if known else Programs(functions_in(turn.system))
            memories[turn.number] = memory
            (runs,) = asked
            code, seen = as_json(runs.call.arguments), runs.result
            program = memory.read(code, seen.text if seen else None, bool(seen and seen.failed))
            if program is None and turn.call.used:  # what it did was seen, though not read
                program = self._seen(turn, is_last(code))
            self.programs[turn.number] = program, runs
            if program is None:
                self.asked[turn.number] = [runs, *([_ending(turn, "")] if is_last(code) else [])]
                continue
            inner = [
                self._of_program(turn, at, each, runs) for at, each in enumerate(program.calls)
            ]
            if program.ends:
                answer = program.answer
                known_answer = answer if isinstance(answer, str) else answer.value
                inner.append(_ending(turn, known_answer or ""))
            self.asked[turn.number] = inner

    def _seen(self, turn: AgentTurn, ends: bool) -> Program:
        """A program, by the calls that spans show of it."""
        results = self.session.results
        known = {each.id: results[each.id].text for each in turn.call.used if each.id in results}
        calls = [
            ProgramCall(each.name, each.arguments, value=known.get(each.id))
            for each in turn.call.used
            if isinstance(each.arguments, dict) and not ends_a_work(each.name)
        ]
        return Program(calls, ends=ends)

    @staticmethod
    def _of_program(turn: AgentTurn, index: int, call: ProgramCall, runs: Asked) -> Asked:
        failed = bool(runs.result and runs.result.failed)
        result = None if call.value is None else WireMessage("tool", call.value, failed=failed)
        made = FunctionCall("", call.name, call.arguments)
        return Asked(turn, index, made, result, runs.answered_by, joined=_shown(runs))

    def _judge_programs(self) -> None:
        """Keep the calls of a program where all of their results are known."""
        for number, (program, runs) in self.programs.items():
            asked, work = self.asked[number], self.work_of[runs.turn.number]
            ending = next((each for each in asked if each.ends), None)
            if ending and not only_text(ending.call):
                asker = None if work.handed else work.asker
                told = asker.result.text if asker and asker.result else "" if asker else self.stated
                self.finals[number] = told
                if told and not asker and program and isinstance(program.answer, ProgramCall):
                    same = [call is program.answer for call in program.calls].index(True)
                    asked[same].result = asked[same].result or WireMessage("tool", told)
            calls = [each for each in asked if not each.ends]
            if program and all(each.work or each.result for each in calls):
                continue
            self.count.gap("program_unread")
            self.asked[number] = [runs, *([ending] if ending else [])]
            for each in calls:
                for done in [*each.inside, *([each.work] if each.work else [])]:
                    done.asker, done.inside = None, runs
                    runs.inside += [] if done in runs.inside else [done]

    # -- works

    def _find_works(self) -> None:
        for turn in self.turns:
            if work := self._going_on(turn):
                work.turns.append(turn)
            else:
                work = AgentWork([turn])
                self.works.append(work)
            self.work_of[turn.number] = work
        for work in list(self.works):
            self._find_asker(work)

    def _going_on(self, turn: AgentTurn) -> AgentWork | None:
        """The work that a turn goes on with: that of the words before it, unless they ended it."""
        if own := turn.own:
            work = self.work_of[own[1].number]
            lost = [each for each, _ in turn.lost]
            since = work.turns[work.turns.index(own[1]) + 1 :]
            unfinished = bool(since) or own[1].aside or not self.is_final(own[1])
            return work if unfinished and all(each in lost for each in since) else None
        given = [squash(each.text) for each in turn.messages if each.role == "user"]
        for work in reversed(self.works):  # its own words may have been left out, or summed up
            first, last = work.turns[0], work.turns[-1]
            if work.agent == turn.agent and last.call.ended <= turn.call.begun:
                summed_up = any(quoted(squash(last.said.text), each) for each in given)
                if summed_up and not self._shown_to_others(last, turn):
                    return work
                grown = len(turn.ids) > len(first.ids) and turn.ids[:1] == first.ids[:1]
                return work if grown and not self.is_final(last) else None
        return None

    def _shown_to_others(self, turn: AgentTurn, until: AgentTurn) -> bool:
        """Whether another agent was told what was said, before the agent itself went on."""
        text = squash(self.final_text(turn))
        return any(
            turn in each.spoken.values() or found_in(text, self.told(each)) == 4
            for each in self.turns[turn.number + 1 : until.number]
            if each.agent != turn.agent
        )

    def is_final(self, turn: AgentTurn) -> bool:
        return not self.asked[turn.number] or self.ends(turn)

    def _find_asker(self, work: AgentWork) -> None:
        turn = work.turns[0]
        own = turn.own
        before = self.work_of[own[1].number] if own else None
        if before and before.asker and before.asker.pending(turn) and not before.handed:
            self._merge(work, before)
            return
        if handed := self._handed_by(turn):
            work.asker, work.handed, handed.work = handed, True, work
            return
        best = max(
            (
                (self._evidence(work, each), -each.turn.number, -each.index, each)
                for each in self._open(work)
            ),
            key=lambda each: each[:3],
            default=None,
        )
        pending = [each for each in self.all_asked() if each.pending(turn) and not each.ends]
        if best and best[0] >= 1 and (best[0] >= 4 or len(pending) == 1 or not best[3].work):
            asked = best[3]
            if self._is_reply(work, asked, best[0]):
                work.asker, asked.work = asked, work
            else:
                work.inside = asked
                asked.inside.append(work)
        elif before and not self._shown_to_others(before.turns[-1], turn):
            self._merge(work, before)
        elif (
            len(pending) == 1
            and pending[0].turn.agent != work.agent
            and self._within(work, pending[0])
        ):
            work.inside = pending[0]
            pending[0].inside.append(work)

    def _merge(self, work: AgentWork, before: AgentWork) -> None:
        before.turns += work.turns
        self.works.remove(work)
        for turn in work.turns:
            self.work_of[turn.number] = before

    def _handed_by(self, turn: AgentTurn) -> Asked | None:
        """The call by which another agent handed its conversation to this one."""
        last = turn.last_spoken
        if last is None or last[1].agent == turn.agent:
            return None
        place, spoke = last
        if any(
            each.own == each.last_spoken and each.own[1] is spoke for each in self.turns if each.own
        ):
            return None  # the other one went on by itself: this one was only shown what it did
        calls = turn.messages[place].calls or spoke.said.calls
        results = list(results_in(turn, place))
        found = [
            each
            for each in self.asked[spoke.number]
            if any(_same(each.call, call) for call in calls)
            and result_of(calls, _place(calls, each.call), results) is not None
        ]
        return next((each for each in reversed(found) if not each.call.arguments), None) or (
            found[-1] if found else None
        )

    def _open(self, work: AgentWork) -> list[Asked]:
        """Calls that another agent was waiting for while a work was done."""
        return [
            each
            for each in self.all_asked()
            if each.pending(work.turns[0])
            and each.work is None
            and not each.ends
            and each.turn.agent != work.agent
            and self._within(work, each)
        ]

    def _within(self, work: AgentWork, asked: Asked) -> bool:
        by = asked.answered_by
        return asked.turn not in work.turns and (by is None or work.turns[-1].number < by.number)

    def _evidence(self, work: AgentWork, asked: Asked) -> int:
        """How surely a work was done for a call: 4 for a text that proves it, 1 for one that may be
        chance, for the job and for the reply each."""
        given = [squash(each.text) for each in work.turns[0].new() if each.role == "user"]
        job = max(
            (found_in(squash(each), given) for each in strings_in(asked.call.arguments)), default=0
        )
        result = [squash(asked.result.text if asked.result else asked.joined)]
        reply = found_in(squash(self.final_text(work.turns[-1])), result)
        return job + reply

    def _is_reply(self, work: AgentWork, asked: Asked, evidence: int) -> bool:
        """Whether the result of a call is the reply of the work itself."""
        if asked.result is None or asked.result.failed:
            return True
        final, result = squash(self.final_text(work.turns[-1])), squash(asked.result.text)
        if not final or not found_in(final, [result]):
            return False
        return evidence >= 5 or 2 * len(final) >= len(result)

    def told(self, turn: AgentTurn) -> list[str]:
        """What others than models said to an agent since it last spoke, with blanks made equal."""
        if turn.number not in self._told:
            new = (message.text for message in turn.new() if message.role != "assistant")
            self._told[turn.number] = list(map(squash, new))
        return self._told[turn.number]

    def ends(self, turn: AgentTurn) -> bool:
        """Whether an agent ends its work by calling a tool for that."""
        return any(each.ends for each in self.asked[turn.number])

    def final_text(self, turn: AgentTurn) -> str:
        """What an agent says that ends its work with this turn."""
        if turn.number in self.finals:
            return self.finals[turn.number]
        ending = next((each for each in self.asked[turn.number] if each.ends), None)
        return turn.said.text if ending is None else only_text(ending.call)


def _ending(turn: AgentTurn, answer: str) -> Asked:
    """The call by which a program ends the work of its agent."""
    given = {"answer": answer} if answer else {}
    return Asked(turn, 0, FunctionCall("", ENDS, given))


def _shown(runs: Asked) -> str:
    return runs.result.text if runs.result else ""


def _same(one: FunctionCall, other: FunctionCall) -> bool:
    return call_key(one) == call_key(other)


def _place(calls: Sequence[FunctionCall], call: FunctionCall) -> int:
    return next(at for at, each in enumerate(calls) if _same(each, call))


def found_in(text: str, places: Sequence[str]) -> int:
    """4: a text surely stands there; 1: it may be chance; 0: it does not."""
    if not text:
        return 0
    if text in places or any(quoted(text, place) for place in places):
        return 4
    word = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
    stands = any(text in place and word.search(place) for place in places)
    return (4 if len(text) >= SURE else 1) if stands else 0


def only_text(call: FunctionCall) -> str:
    """The one thing that the arguments of a call say, or all of them as JSON."""
    if isinstance(call.arguments, str):
        return call.arguments
    said = [value for value in call.arguments.values() if value not in (None, "", {}, [])]
    if len(said) == 1:
        return str(said[0]) if isinstance(said[0], int | float) else as_json(said[0])
    return as_json(call.arguments) if said else ""


def first_call(turns: Sequence[AgentTurn]) -> AgentTurn:
    """The call by which the first agent to speak was given its task."""
    own = (turn for turn in turns if turn.agent == turns[0].agent and not turn.aside)
    return next(own, turns[0])


def opening_of(turn: AgentTurn) -> str:
    """What a program says to an agent that it calls: after examples, before the agent's words."""
    said = ""
    for place, message in enumerate(turn.messages):
        if place in turn.spoken:
            break
        said = (
            message.text if message.role == "user" else "" if message.role == "assistant" else said
        )
    return said


def heard_by(team: TeamAtWork) -> dict[int, AgentTurn]:
    """Turn -> the first turn of another agent that is shown what was said in it."""
    found: dict[int, AgentTurn] = {}
    said = {
        turn.number: squash(team.final_text(turn))
        for turn in team.turns
        if turn is team.work_of[turn.number].turns[-1]
    }
    for turn in team.turns:
        if not said.get(turn.number):
            continue
        for later in others_after(turn, team.turns):
            places = [at for at, spoke in later.spoken.items() if spoke.agent == turn.agent]
            shown = bool(places) and later.spoken[max(places)] is turn
            if shown or found_in(said[turn.number], team.told(later)) == 4:
                found[turn.number] = later
                break
    opening = squash(opening_of(team.turns[0])) if team.turns else ""
    for work in team.works:  # what is too short to prove anything has to be the only possible one
        first = work.turns[0]
        if first.number == 0 or work.asker or work.inside or first in found.values():
            continue
        possible = [
            turn
            for turn in team.turns[: first.number]
            if turn.number not in found
            and first in others_after(turn, team.turns)
            and not team.work_of[turn.number].asker
            and found_in(said.get(turn.number, ""), team.told(first))
            and not found_in(said[turn.number], [opening])
        ]
        if len(possible) == 1:
            found[possible[0].number] = first
    return found


def others_after(turn: AgentTurn, turns: Sequence[AgentTurn]) -> Iterator[AgentTurn]:
    """The turns of other agents that began when this one had ended."""
    for later in turns[turn.number + 1 :]:
        if later.agent != turn.agent and later.call.begun >= turn.call.ended:
            yield later
