"""What the messages of a recorded team do, told by who speaks to whom and when.

A recorder knows that a model was called, by which agent and for whom. That a message begins the
work of another agent, goes back to the one who asked, or is said beside the work, follows from the
order of events; what somebody wrote into `facts["part"]` is not looked at here.

An agent is at work from the message that it is asked with, or from its own first word where nobody
asked it, to its report. A message to an agent that is at work begins nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from coa.recording.episode import SYSTEM, USER, Episode, Message, ToolUse

Doing = Literal["asks", "hands", "reports", "acts", "remarks", "answers"]
"""A message asks another agent to begin; hands on the results of one who never hears of them again,
with which the other begins; is the outcome of work, for whoever asked; only calls tools or gives
out jobs; stands beside the work; or is the last word to the user."""


class Deed(NamedTuple):
    """What a message does."""

    doing: Doing
    agent: str
    """Whose it is; of a job that the code between agents passes on, the one that gave it."""
    other: str
    """To whom."""

    @property
    def begins(self) -> bool:
        """Whether the other begins to work."""
        return self.doing in ("asks", "hands")


class _OpenJob(NamedTuple):
    agent: str
    asker: str
    branch: str


def read_flow(episode: Episode) -> list[Deed | None]:
    """What each event does; None: it is a tool use, or nobody of the team said it."""
    deeds = list(_FlowReader(episode).deeds())
    hearing = {deed.other for deed in deeds if deed is not None and deed.doing == "reports"}
    working: set[str] = set()
    for place, (event, deed) in enumerate(zip(episode.events, deeds, strict=True)):
        if isinstance(event, ToolUse):
            working.add(event.agent)
        elif deed is not None and deed.doing == "asks" and deed.agent in working - hearing:
            deeds[place] = deed._replace(doing="hands")
    return deeds


class _FlowReader:
    """Goes over the events once, with the jobs that are not done."""

    def __init__(self, episode: Episode) -> None:
        self.events = episode.events
        self.names = {agent.name for agent in episode.agents}
        self.jobs: list[_OpenJob] = []
        spoken = [
            place
            for place, event in enumerate(episode.events)
            if isinstance(event, Message) and event.to == USER and event.agent in self.names
        ]
        self.last = spoken[-1] if spoken else -1

    def deeds(self) -> Iterator[Deed | None]:
        for place, event in enumerate(self.events):
            if isinstance(event, ToolUse):
                self._begin(event.agent, event.branch)
                yield None
            elif event.agent == SYSTEM and event.to in self.names:
                yield self._passed_on(place, event)
            elif event.agent in self.names:
                self._begin(event.agent, event.branch)
                yield self._said(place, event)
            else:
                yield None

    def _begin(self, agent: str, branch: str) -> None:
        """An agent that nobody asked begins by itself."""
        if agent in self.names and self._job_of(agent, branch) is None:
            self.jobs.append(_OpenJob(agent, USER, branch))

    def _job_of(self, agent: str, branch: str = "") -> _OpenJob | None:
        """The job that an agent does, the latest of its branch where it has several."""
        own = [job for job in reversed(self.jobs) if job.agent == agent]
        return next((job for job in own if job.branch == branch), own[0] if own else None)

    def _passed_on(self, place: int, event: Message) -> Deed | None:
        """A job that the code between agents passes on; None: it is the program's own message, to
        an agent that is at work, or to one that works inside a tool and tells nobody."""
        asker, own = self._handing_out(place, event.branch), self._job_of(event.to, event.branch)
        at_work = own is not None and own.branch == event.branch
        if not asker or asker == event.to or at_work or not self._tells(event.to, asker, place):
            return None
        self.jobs.append(_OpenJob(event.to, asker, event.branch))
        return Deed("asks", asker, event.to)

    def _tells(self, agent: str, other: str, place: int) -> bool:
        """Whether an agent speaks to another one later."""
        later = (event for event in self.events[place + 1 :] if isinstance(event, Message))
        return any((event.agent, event.to) == (agent, other) for event in later)

    def _handing_out(self, place: int, branch: str) -> str:
        """Who last said that it hands out jobs, in the same branch or outside of all."""
        said = [e for e in self.events[:place] if isinstance(e, Message) and e.agent in self.names]
        mine = (e for e in reversed(said) if e.branch in (branch, ""))
        found = next(mine, said[-1] if said else None)
        return found.agent if found is not None and found.to == SYSTEM else ""

    def _said(self, place: int, event: Message) -> Deed:
        agent, other = event.agent, event.to
        if other == USER:
            if place != self.last:
                return Deed("remarks", agent, other)
            return Deed("answers", agent, other)
        if other == SYSTEM:
            return Deed("acts" if self._acts(place, event) else "remarks", agent, other)
        if other == agent:
            return Deed("remarks", agent, other)
        job = self._job_of(agent, event.branch)
        assert job is not None, (place, agent)
        if job.asker == other:
            self.jobs.remove(job)
            return Deed("reports", agent, other)
        if self._job_of(other) is not None:  # it is at work: this is said to it, and begins nothing
            return Deed("reports", agent, other)
        self.jobs.append(_OpenJob(other, agent, event.branch))
        return Deed("asks", agent, other)

    def _acts(self, place: int, event: Message) -> bool:
        """Whether a reply to nobody is followed by what it called or handed out."""
        for at, later in enumerate(self.events[place + 1 :], start=place + 1):
            if later.branch and event.branch and later.branch != event.branch:
                continue
            if later.agent == event.agent:
                return isinstance(later, ToolUse)
            told = later.to if isinstance(later, Message) and later.agent == SYSTEM else ""
            if told in self.names and self._tells(told, event.agent, at):
                return True
        return False


# -- what a text adds -------------------------------------------------------------------------

HANDED_OVER = "Go on."
"""The job of an agent that was given none in words."""
_FIRST = ("task", "job", "request", "question", "query", "instructions", "message", "input")
"""What frameworks call the job among the arguments with which an agent is called."""


def job_of(text: str, agent: str) -> str:
    """What an agent was asked, in words: of several arguments those that say more than its name,
    the task itself first. Of a handoff often no more is known than the name of the tool that made
    it (`transfer_to_billing`)."""
    said, name = [text.strip()], _plain(agent)
    try:
        read = json.loads(text)
    except ValueError:
        read = None
    if isinstance(read, dict):
        first = sorted(read, key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST))
        said = [str(read[key]).strip() for key in first if read[key] not in (None, {}, [])]
    told = [each for each in said if each and not (len(each.split()) == 1 and name in _plain(each))]
    return "\n".join(told) or HANDED_OVER


def _plain(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.casefold())


_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_WORD = re.compile(r"\w+(?:[.,:/-]\d+)*", re.UNICODE)
_HEADING = re.compile(r"^\W*#|^[\w ()./-]{1,60}:$")
_COMMON = frozenset(
    "a about after all also an and any are as at be been before but by can could did do does for "
    "from had has have he her here his how i if in into is it its may me more my no now of on one "
    "only or our out over per she should so some such than that the their them then there these "
    "they this those to total under up us was we were what when where which who why will with "
    "would yes you your answer result results final found information task question".split()
)
_NEW_SHARE = 0.4
"""Of the words that carry meaning: with so many that nobody said before, a sentence is news."""


def words_of(text: str) -> set[str]:
    """The words of a text that carry meaning, and its numbers."""
    found = (word.casefold() for word in _WORD.findall(text))
    return {word for word in found if word not in _COMMON}


class SoFar:
    """What has been said so far, and what another text adds to it.

    A report mostly repeats what a tool returned, and a chain holds that already. A sentence is news
    with a number that nobody said, or when two of five of its words are new.
    """

    def __init__(self) -> None:
        self._words: set[str] = set()
        self._unread: list[str] = []
        """Texts whose words nobody asked for yet."""

    def add(self, text: str) -> None:
        self._unread.append(text)

    def news(self, text: str, known: str = "") -> str:
        """The sentences of `text` that add something; headings and what is `known` add nothing."""
        for heard in self._unread:
            self._words |= words_of(heard)
        self._unread.clear()
        held = self._words | words_of(known)
        kept = []
        for sentence in _SENTENCE.split(text):
            own = words_of(sentence)
            new = own - held
            numbers = any(character.isdigit() for word in new for character in word)
            if not new or _HEADING.match(sentence.strip()):
                continue
            if numbers or len(new) >= _NEW_SHARE * len(own):
                kept.append(sentence.strip())
                held |= own
        return " ".join(kept)


def alike(one: str, other: str) -> float:
    """The share of their words that two texts have in common."""
    mine, theirs = words_of(one), words_of(other)
    return len(mine & theirs) / len(mine | theirs) if mine or theirs else 1.0
