"""From the model calls of a session to an episode: who spoke to whom, and what tools returned.

In: a `LoggedSession`. Out: an `Episode` in which every answered model call is one message of its
agent, in order of completion. docs/episodes.md says the rules on one page. The steps:

1. `turns_of`: which calls count, and whose words each conversation holds (turns.py);
2. `find_agents`: who made them (identities.py);
3. `TeamAtWork`: what each agent did for whom, from being asked to its reply (works.py);
4. `_EpisodeWriter`: the events, here.

What cannot be known is counted by name in `meta["gaps"]` and is None or empty in the events. What a
call was given is stated only where it does not follow from the events before it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from coa.recording.calls import LoggedSession
from coa.recording.episode import (
    SYSTEM,
    USER,
    AgentSpec,
    ChatMessage,
    Episode,
    EpisodeEvent,
    Message,
    ModelCall,
    ToolSpec,
    ToolUse,
    common,
)
from coa.recording.identities import agent_named_in, find_agents, name_agents, reaches_an_agent
from coa.recording.programs import PYTHON, functions_in
from coa.recording.text_calls import tools_in
from coa.recording.turns import AgentTurn, Count, as_json, squash, turns_of
from coa.recording.wire import ServerUse, WireMessage
from coa.recording.works import (
    AgentWork,
    Asked,
    TeamAtWork,
    ends_a_work,
    first_call,
    found_in,
    heard_by,
    only_text,
    opening_of,
)
from coa.tasks import Task

PYTHON_TOOL = ToolSpec("python", "Runs a program and shows what it prints.", "code")
"""The tool of a program that is more than calls of tools."""


def episode_of(session: LoggedSession, task: Task | None = None) -> Episode:
    """The episode of one run of a team; `task` where it is known better than the session says."""
    count = Count()
    turns = turns_of(session, count)
    find_agents(turns)
    team = TeamAtWork(turns, session, count)
    return _EpisodeWriter(team, session, task, count).episode()


# -- events ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Placed:
    """An event and where it belongs: after which turn, and in which order there."""

    after: float
    order: int
    event: EpisodeEvent
    turn: AgentTurn | None = None
    """The model call that the event is."""


class _EpisodeWriter:
    """Writes the episode of a team."""

    def __init__(
        self, team: TeamAtWork, session: LoggedSession, task: Task | None, count: Count
    ) -> None:
        self.team, self.session, self.task, self.count = team, session, task, count
        self.about = {**session.about, **(session.end or {})}
        self.reaching: set[str] = set()
        """Tools by which an agent reaches another one."""
        reached: dict[str, list[str]] = {}
        stated: dict[str, list[str]] = {}
        for asked in team.all_asked():
            if asked.work:
                self.reaching.add(asked.call.name)
                if name := agent_named_in(asked.call.arguments):
                    stated.setdefault(asked.work.agent, []).append(name)
                reached.setdefault(asked.work.agent, []).append(asked.call.name)
        for turn in team.turns:
            for place, spoke in turn.spoken.items():
                stated.setdefault(spoke.agent, []).append(turn.messages[place].name)
        self.names = name_agents(team.turns, reached, stated)
        self.heard = heard_by(team)
        self.branches = _branches(team, self.heard)
        self.receivers = self._receivers()
        self.placed: list[_Placed] = []

    def episode(self) -> Episode:
        turns = self.team.turns
        opening = opening_of(first_call(turns)) if turns else ""
        asked = self.task.question if self.task else str(self.about.get("question") or "")
        if turns:
            known = squash(asked).casefold() in squash(opening).casefold()
            text = opening if known else asked
            self._place(-1, 0, Message(USER, self.names[turns[0].agent], text))
        for work in self.team.works:
            self._begin(work)
        for turn in turns:
            self._say(turn)
        self.placed.sort(key=lambda each: (each.after, each.order))
        known_id = self.task.id if self.task else str(self.about.get("task_id") or "")
        episode = Episode(
            task_id=known_id or self.session.name,
            question=asked or _task_in(opening) or "(the question was not recorded)",
            teacher=str(self.about.get("team") or "recorded"),
            agents=self._agents(),
            events=[each.event for each in self.placed],
            tools=self._tools(),
            seconds=self._seconds(),
        )
        self._end(episode)
        _state_given(episode, [each.turn for each in self.placed])
        return episode

    def _place(
        self, after: float, order: int, event: EpisodeEvent, turn: AgentTurn | None = None
    ) -> None:
        self.placed.append(_Placed(after, order, event, turn))

    def _begin(self, work: AgentWork) -> None:
        """What the program gives an agent that no other agent asked."""
        first = work.turns[0]
        heard = any(work is self.team.work_of[by.number] for by in self.heard.values())
        if work.asker or heard or first.number == 0:
            return
        branch = self.branches.get(id(work), "")
        told = Message(
            SYSTEM, self.names[work.agent], opening_of(first_call(work.turns)), branch=branch
        )
        self._place(first.number - 0.5, 0, told)

    def _say(self, turn: AgentTurn) -> None:
        asked = self.team.asked[turn.number]
        work = self.team.work_of[turn.number]
        branch = self.branches.get(id(work), "")
        jobs = [each for each in asked if each.work]
        ending = any(each.ends for each in asked)
        thought, text, to = turn.beside, "", SYSTEM
        if not asked or ending:
            thought = turn.beside if ending else ""
            text, to = self.team.final_text(turn), self.receivers[turn.number]
        elif len(asked) == 1 and jobs and jobs[0].work:
            text, to = self._job(jobs[0]), self.names[jobs[0].work.agent]
            thought = "" if text == thought else thought
        thought = "\n".join(each for each in (turn.said.reasoning, thought) if each)
        name = self.names[turn.agent]
        for number, ran in enumerate(
            turn.call.exchange.ran
        ):  # before the words that follow from it
            self.count.gap("result_missing", not ran.result)
            self._place(turn.number, number - 2000, _server_use(name, ran, branch))
        said = Message(name, to, text, thought, branch=branch, call=_model_call(turn))
        self._place(turn.number, 0, said, turn)
        in_turn, since = turn.number in self.team.programs, turn.number
        for number, each in enumerate(asked, start=1):
            if each.work:
                self._job_events(each, number, alone=to != SYSTEM)
                since = max(since, each.work.turns[-1].number) if in_turn else since
            elif not each.result and reaches_an_agent(each.call.name):
                self.count.gap("result_missing")  # a handoff that never came to be
            elif not each.ends and (each.result or not ending):
                late = 300 if since > turn.number else -1000 * ending
                self._use(each, number + late, branch, since)

    def _job(self, asked: Asked) -> str:
        return only_text(asked.call) or asked.turn.said.text or asked.call.name

    def _job_events(self, asked: Asked, number: int, alone: bool) -> None:
        work, name = asked.work, self.names[asked.turn.agent]
        assert work is not None
        if not alone:
            branch = self.branches.get(id(work), "")
            job = Message(SYSTEM, self.names[work.agent], self._job(asked), branch=branch)
            self._place(asked.turn.number, 100 + number, job)
        final = squash(self.team.final_text(work.turns[-1]))
        if asked.result and not work.handed and not found_in(final, [squash(asked.result.text)]):
            branch = self.branches.get(id(self.team.work_of[asked.turn.number]), "")
            told = Message(SYSTEM, name, asked.result.text, branch=branch)
            self._place(work.turns[-1].number, 200 + number, told)

    def _use(self, asked: Asked, number: int, branch: str, since: int) -> None:
        """A use stands after the message that asks for it, in a program also after the jobs that
        came before it (`since`); where that message is the last of a work, before it, as the work
        goes on to end."""
        if asked.result is None:
            self.count.gap("results_joined" if asked.joined else "result_missing")
        result = asked.result or WireMessage("tool")
        done = max((work.turns[-1].number for work in asked.inside), default=since)
        used = ToolUse(
            self.names[asked.turn.agent],
            PYTHON_TOOL.name if asked.call.name == PYTHON else asked.call.name,
            as_json(asked.call.arguments),
            result.text,
            "mistake" if result.failed else None,
            branch=branch,
        )
        self._place(done, number, used)

    # -- to whom

    def _receivers(self) -> dict[int, str]:
        """Turn -> to whom its text is said."""
        found: dict[int, str] = {}
        loose: list[AgentTurn] = []
        for turn in self.team.turns:
            work = self.team.work_of[turn.number]
            found[turn.number] = SYSTEM
            if turn is not work.turns[-1] or work.inside:
                continue
            if work.asker and not work.handed:
                found[turn.number] = self.names[work.asker.turn.agent]
            elif turn.number in self.heard:
                found[turn.number] = self.names[self.heard[turn.number].agent]
            elif asker := self._asker_of_handed(work):
                found[turn.number] = self.names[asker]
            elif not self.team.asked[turn.number] or self.team.ends(turn):
                loose.append(turn)
        if loose:
            stated = squash(str(self.about.get("answer") or ""))
            told = [turn for turn in loose if squash(self.team.final_text(turn)) == stated]
            last = (told or loose)[-1]
            found[last.number] = USER
            self.count.gap("receiver_unknown", len(loose) - 1)
        return found

    def _asker_of_handed(self, work: AgentWork) -> str:
        """The agent that waits for a work, through those that handed it on; empty: none does."""
        seen: list[AgentWork] = []
        while work.handed and work.asker and work not in seen:
            seen.append(work)
            work = self.team.work_of[work.asker.turn.number]
        return work.asker.turn.agent if work.asker and not work.handed else ""

    # -- the rest of an episode

    def _agents(self) -> list[AgentSpec]:
        found = []
        for number, name in self.names.items():
            own = [turn for turn in self.team.turns if turn.agent == number]
            main = [turn for turn in own if not turn.aside] or own
            prompts = Counter(turn.system for turn in main)
            found.append(AgentSpec(name, "", prompts.most_common(1)[0][0]))
        return found

    def _tools(self) -> list[ToolSpec]:
        found: dict[str, ToolSpec] = {}
        redefined: set[str] = set()
        for turn in self.team.turns:
            for tool in turn.call.exchange.tools:
                if found.setdefault(tool.name, tool) != tool:
                    redefined.add(tool.name)
            for tool in (each.tool for each in functions_in(turn.system).values()):
                found.setdefault(tool.name, tool)
            for tool in tools_in(turn.system):
                found.setdefault(tool.name, tool)
        for tool in self.session.tools:  # told elsewhere than in a request, as by a tool's span
            found.setdefault(tool.name, tool)
        ran = (use.call for turn in self.team.turns for use in turn.call.exchange.ran)
        for call in chain((asked.call for asked in self.team.all_asked()), ran):
            missing = PYTHON_TOOL if call.name == PYTHON else ToolSpec(call.name)
            found.setdefault(missing.name, missing)
        agents = {
            name
            for name, tool in found.items()
            if name in self.reaching or reaches_an_agent(name) or _is_managed(tool)
        }
        agents |= {asked.call.name for asked in self.team.all_asked() if asked.ends}
        kept = [name for name in found if name not in agents and not ends_a_work(name)]
        self.count.gap("tool_redefined", len(redefined & set(kept)))
        return [found[name] for name in kept]

    def _seconds(self) -> dict[str, float]:
        calls = self.session.calls
        if not calls:
            return {}
        total = max(call.ended for call in calls) - min(call.begun for call in calls)
        return {"total": total, "model": sum(call.ended - call.begun for call in calls)}

    def _end(self, episode: Episode) -> None:
        answers = [
            event.text
            for event in episode.events
            if isinstance(event, Message) and event.to == USER and event.agent != USER
        ]
        stated = self.about.get("answer")
        code = self.about.get("exit_code")
        if isinstance(stated, str) and stated.strip():
            episode.answer = stated
        end = self.session.end
        cut = "the recording was cut" if end is None else str(end.get("cut") or "")
        if episode.answer is None and not cut and answers and answers[-1].strip():
            episode.answer = answers[-1]
        if cut:
            episode.error = episode.meta["cut"] = cut
        elif self.about.get("error"):
            episode.error = str(self.about["error"])
        elif code:
            episode.error = f"the program ended with exit code {code}"
        elif episode.answer is None:
            episode.error = "no final answer was recorded"
        calls = [said.call for _, said in episode.model_calls() if said.call]
        unknown = [c for c in calls if c.prompt_tokens is None or c.sampled_tokens is None]
        self.count.gap("usage_unknown", len(unknown))
        episode.meta["source"] = str(self.about.get("source") or "proxy")
        if isinstance(self.about.get("success"), int | float):
            episode.meta["success"] = self.about["success"]
        if self.count.retried:
            episode.meta["retried"] = self.count.retried
        for name, times in (self.about.get("gaps") or {}).items():  # of the source itself
            self.count.gap(name, times)
        if self.count.gaps:
            episode.meta["gaps"] = self.count.gaps


def _server_use(agent: str, ran: ServerUse, branch: str) -> ToolUse:
    arguments = as_json(ran.call.arguments)
    failure = "mistake" if ran.failed else None
    return ToolUse(agent, ran.call.name, arguments, ran.result, failure, branch=branch)


def _is_managed(tool: ToolSpec) -> bool:
    """Whether a tool is an agent of smolagents, by the arguments that all of those take."""
    try:
        schema = json.loads(tool.schema or "{}")
        return {*schema["properties"]} == {"task", "additional_args"}
    except (ValueError, KeyError, TypeError):
        return False


def _task_in(opening: str) -> str:
    """The task in what a framework says to the first agent."""
    return opening.strip().removeprefix("New task:").strip()


def _model_call(turn: AgentTurn) -> ModelCall:
    exchange = turn.call.exchange
    usage = exchange.usage
    return ModelCall(
        exchange.model, turn.written, usage.prompt, usage.cached, usage.sampled, usage.cost
    )


def _branches(team: TeamAtWork, heard: Mapping[int, AgentTurn]) -> dict[int, str]:
    """Work -> its branch, of those that were done at the same time."""
    parents: dict[int, AgentWork] = {}
    for work in team.works:
        if asked := work.asker or work.inside:
            parents[id(work)] = team.work_of[asked.turn.number]
    below: dict[int, list[AgentWork]] = {}
    for work in team.works:
        below.setdefault(id(parents.get(id(work))), []).append(work)

    def whole(work: AgentWork) -> list[AgentWork]:
        return [work, *(each for child in below.get(id(work), []) for each in whole(child))]

    found: dict[int, str] = {}
    flows = {(id(team.work_of[turn]), id(team.work_of[by.number])) for turn, by in heard.items()}

    def at_once(one: Sequence[AgentWork], other: Sequence[AgentWork]) -> bool:
        pairs = {(id(a), id(b)) for a in one for b in other}
        if flows & (pairs | {(b, a) for a, b in pairs}):
            return False
        begun, ended = min(w.begun for w in one), max(w.ended for w in one)
        return begun < max(w.ended for w in other) and min(w.begun for w in other) < ended

    def visit(siblings: Sequence[AgentWork]) -> None:
        wholes = [whole(work) for work in sorted(siblings, key=lambda each: each.begun)]
        for one in wholes:
            if any(at_once(one, other) for other in wholes if other is not one):
                label = str(len(set(found.values())) + 1)
                found.update((id(work), label) for work in one)
            else:
                visit(below.get(id(one[0]), []))

    visit(below.get(id(None), []))
    return found


def _state_given(episode: Episode, turns: Sequence[AgentTurn | None]) -> None:
    """State what a call was given where it does not follow from the events before it."""
    before: dict[str, list[ChatMessage]] = {}
    for place, turn in enumerate(turns):
        said = episode.events[place]
        if turn is None or not isinstance(said, Message) or said.call is None:
            continue
        earlier = before.get(said.agent, [])
        if turn.sent != episode.context_of(said.agent, said.branch, episode.events[:place]):
            kept = common(turn.sent, earlier)
            call = replace(said.call, given=turn.sent[kept:], kept=kept)
            episode.events[place] = replace(said, call=call)
        written = [ChatMessage("assistant", said.written)] if said.written else []
        before[said.agent] = [*turn.sent, *written]
