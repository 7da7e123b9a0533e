"""Evidence of what the agents of a team are, over all its episodes: who plans, who criticises, who
is handed work, and what prompts and tools say of themselves.

    plan        said before its agent does anything else, without a tool, and acted on step by step:
                by the agent itself, or by others, who never report to it
    criticism   comes after a result; the one whose result it was works on it again, or the work
                goes on. A critic adds nothing to the answer
    delegation  begins the work of another agent, with a job or with the results of the one before

A name decides only where the flow does not, and so does a prompt: whether one who always lets the
work go on is a critic. Messages whose part is stated are not looked at.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from coa.distillation.convert import team_tools
from coa.distillation.flow import Deed, alike, read_flow, words_of
from coa.recording.episode import SYSTEM, Episode, EpisodeEvent, Message, ToolUse

_PLANNER = re.compile(r"plan", re.I)
_CRITIC = re.compile(
    r"critic|critiq|review|reflect|verif|evaluat|judge|audit|check|approv|assess|\bgrad(?:e|ing)|"
    r"quality|\bqa\b",
    re.I,
)
_STEP = re.compile(r"^\s*(?:\d{1,2}[.)]|[-*]|step\s+\d)", re.I | re.M)
_REWORK = 0.3
"""Two jobs with so many words in common are the same one, given again."""
LONGEST = 160
"""Characters that a prompt is shortened to."""
_FEW = 3
"""With fewer questions than this, words of one task may stand in every prompt."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])|\n+")
_TO_IT = re.compile(r"you\b|you're\b|your\b", re.I)
_LISTED = re.compile(r"^(?:[^\w\s'\"(]|\d+[.)])|[{}]|\w\(|:$|^(?!your\b)[\w ]{1,30}: ", re.I)
"""A sentence of a prompt that is one of a list, a heading, a signature or a labelled value."""


class _Said(NamedTuple):
    """A message of an episode that states no part, in its place."""

    place: int
    event: Message
    deed: Deed
    first: bool
    """The first word of its agent since it was asked, or began."""


class _Work:
    """One episode, read."""

    def __init__(self, episode: Episode) -> None:
        self.episode, self.events = episode, episode.events
        self.deeds = read_flow(episode)
        self.said: list[_Said] = []
        going: set[tuple[str, str]] = set()
        for place, (event, deed) in enumerate(zip(self.events, self.deeds, strict=True)):
            who = (event.agent, event.branch)
            if isinstance(event, ToolUse):
                going.add(who)
            elif deed is not None:
                stated = bool(event.facts.get("part"))
                if not stated:
                    self.said.append(_Said(place, event, deed, who not in going))
                (going.discard if deed.doing in ("reports", "answers") else going.add)(who)

    def uses(self, start: int = 0, end: int | None = None, but: str = "") -> list[ToolUse]:
        """Tool uses of a stretch, those of an agent left out."""
        events = self.events[start:end]
        return [each for each in events if isinstance(each, ToolUse) and each.agent != but]

    def acts_after(self, said: _Said, by: str = "", but: str = "") -> int:
        """Tool uses and jobs after a message, by an agent or by all but one."""
        after = said.place + 1
        uses = [use.agent for use in self.uses(after)]
        asks = [e.deed.agent for e in self.said if e.place >= after and e.deed.begins]
        return sum((agent == by if by else agent != but) for agent in uses + asks)

    def hears(self, agent: str, after: int = 0) -> bool:
        """Whether somebody reports to an agent."""
        return any(
            each.deed.doing == "reports" and each.deed.other == agent
            for each in self.said
            if each.place > after
        )

    def answers(self, agent: str) -> bool:
        return any(each.deed.doing == "answers" and each.deed.agent == agent for each in self.said)


class TeamEvidence:
    """What the agents of a team do, over all its episodes."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self.episodes = episodes
        self.works = [_Work(each) for each in episodes]
        self.parts = {agent.name: agent.part for e in episodes for agent in e.agents}
        self.specs = {tool.name: tool for tool in team_tools(episodes)}
        self.words = _Prompts(episodes, [tool.about for tool in self.specs.values()])
        self.used: dict[str, Counter[str]] = defaultdict(Counter)
        """Tool -> how often which agent called it."""
        for work in self.works:
            for use in work.uses():
                self.used[use.tool][use.agent] += 1
        self.stated = Counter(
            str(event.facts["part"])
            for episode in episodes
            for event in episode.events
            if isinstance(event, Message) and event.facts.get("part")
        )
        self.questions = _folded(episode.question for episode in episodes)
        few = len({*self.questions}) < _FEW
        self.private = self.questions + _folded(e.answer or "" for e in episodes if few)
        """What no word of a prompt may repeat: questions; answers, too, where there are so few that
        what stands in all prompts may still be of one task."""
        self.planners = self._planners()
        self.critics = self._critics()
        self.asked = self._asked()
        last = Counter(
            s.deed.agent for w in self.works for s in w.said if s.deed.doing == "answers"
        )
        self.root = last.most_common(1)[0][0] if last else ""
        """Who answers the user, in most of the episodes."""

    def tools_of(self, agent: str) -> list[str]:
        return [tool for tool, by in self.used.items() if agent in by]

    def _named(self, pattern: re.Pattern[str], agent: str) -> bool:
        return pattern.search(f"{agent} {self.parts.get(agent, '')}") is not None

    # -- plans

    def _planners(self) -> dict[str, tuple[int, bool]]:
        """Agent -> how often it planned, and whether for itself."""
        chances, plans, own = Counter[str](), Counter[str](), Counter[str]()
        for work in self.works:
            for said in work.said:
                if not said.first or said.event.agent == SYSTEM or said.deed.doing == "answers":
                    continue
                agent = said.deed.agent
                chances[agent] += 1
                if self._plans(work, said):
                    plans[agent] += 1
                    own[agent] += said.deed.doing == "remarks"
        return {
            agent: (count, 2 * own[agent] > count)
            for agent, count in plans.items()
            if 2 * count >= chances[agent]
        }

    def _plans(self, work: _Work, said: _Said) -> bool:
        agent, text = said.deed.agent, said.event.text
        if not text.strip():
            return False
        if said.deed.doing == "remarks":
            return work.acts_after(said, by=agent) > 0
        steps = len(_STEP.findall(text)) >= 2 or self._named(_PLANNER, agent)
        followed = work.acts_after(said, but=agent) >= 2 or bool(work.uses(said.place, but=agent))
        if not steps or not followed or any(use.agent == agent for use in work.uses()):
            return False
        if said.deed.doing == "reports":  # somebody asked for it before anything was done
            return not work.uses(0, said.place)
        return said.deed.begins and not work.hears(agent) and not work.answers(agent)

    # -- criticism

    def _critics(self) -> dict[str, tuple[int, int]]:
        """Agent -> how often it sent the work back, and how often it let it go on."""
        back, on, other = Counter[str](), Counter[str](), Counter[str]()
        none = {*self.planners, *(agent for by in self.used.values() for agent in by)}
        for work in self.works:
            words = [words_of(e.result if isinstance(e, ToolUse) else e.text) for e in work.events]
            for said in work.said:
                agent = said.deed.agent
                if said.event.agent == SYSTEM or agent in none:
                    continue
                if said.deed.doing == "acts" or not said.event.text.strip():
                    continue
                if not self._judges(work, said, words):
                    other[agent] += 1
                elif _sends_back(work, said, self.planners):
                    back[agent] += 1
                else:
                    on[agent] += 1
        return {
            agent: (back[agent], on[agent])
            for agent in back | on
            if not other[agent] and (back[agent] or self._called_critic(agent))
        }

    def _called_critic(self, agent: str) -> bool:
        prompt = " ".join(self.words.own(agent))
        return self._named(_CRITIC, agent) or _CRITIC.search(prompt) is not None

    def _judges(self, work: _Work, said: _Said, words: Sequence[set[str]]) -> bool:
        """Whether a message may be about a result: there is one, and it adds no answer to it.
        `words` are those of each event."""
        agent, own = said.deed.agent, words[said.place]
        answer = words_of(work.episode.answer or "")
        before = [at for at in range(said.place) if work.events[at].agent not in (agent, SYSTEM)]
        earlier = (work.events[at] for at in before)
        result = any(isinstance(e, ToolUse) or e.to == agent for e in earlier)
        if not result or (said.deed.doing == "answers" and answer <= own):
            return False
        new = answer - words_of(work.episode.question)
        adds = {word for word in new if not any(word in words[at] for at in before)}
        return not (adds and adds <= own)

    # -- jobs

    def _asked(self) -> dict[str, Counter[str]]:
        """Agent -> who made it begin, and how often."""
        jobs: dict[str, Counter[str]] = defaultdict(Counter)
        for work in self.works:
            for said in work.said:
                asker, agent = said.deed.agent, said.deed.other
                if said.deed.begins and not self._is_own_block(agent, asker):
                    jobs[agent][asker] += 1
            for event in work.events:
                if isinstance(event, Message) and event.facts.get("part") == "delegation":
                    jobs[event.to][event.agent] += 1
        return dict(jobs)

    def _is_own_block(self, agent: str, asker: str) -> bool:
        """Whether what it says is a block of itself, or it begins with a plan or a criticism,
        which is one: then a job for it needs none."""
        planner, giver = self.planners.get(agent), self.planners.get(asker)
        plans = planner is not None and not planner[1]
        told = asker in self.critics or (giver is not None and not giver[1])
        return agent in self.critics or plans or told


def _sends_back(work: _Work, said: _Said, planners: Container[str]) -> bool:
    """Whether the one whose result was judged works on it again."""
    critic, boss = said.deed.agent, said.deed.other
    after = [each for each in work.said if each.place > said.place]
    before = [each for each in work.said if each.place < said.place]

    def job(among: Iterable[_Said], agent: str) -> str | None:
        texts = (e.event.text for e in among if e.deed.begins and e.deed.other == agent)
        return next(texts, None)

    def again(agent: str) -> bool:
        """The job of an agent is the one that it had, or repeats what the critic said."""
        new, old = job(after, agent), job(reversed(before), agent)
        if new is None:
            return True  # it was told by the critic itself
        heard = words_of(said.event.text)
        repeats = len(heard & words_of(new)) >= _REWORK * len(heard) if heard else False
        return repeats or (old is not None and alike(new, old) >= _REWORK)

    def workers_of(events: Sequence[EpisodeEvent]) -> list[str]:
        others = (e.agent for e in events if e.agent not in (critic, boss, SYSTEM))
        return [agent for agent in others if agent not in planners]

    workers = workers_of(work.events[: said.place])
    later = workers_of(work.events[said.place + 1 :])
    if workers and later and later[0] == workers[-1] and again(later[0]):
        return True
    # Or whoever asked the critic showed a draft of its own, and shows another one.
    return job(after, critic) is not None and again(critic)


class _Prompts:
    """What the prompts of agents say of each of them."""

    def __init__(self, episodes: Iterable[Episode], tools: Sequence[str] = ()) -> None:
        """`tools`: what is said of these, which many prompts repeat."""
        self._of_tools = {each for about in tools for each in map(_bare, _sentences(about))}
        held: dict[str, list[list[str]]] = defaultdict(list)
        for episode in episodes:
            for agent in episode.agents:
                held[agent.name].append(_sentences(agent.system))
        self._first = {name: prompts[0] for name, prompts in held.items()}
        self._always = {name: set.intersection(*map(set, own)) for name, own in held.items()}

    def own(self, agent: str) -> list[str]:
        """The sentences that stand in all prompts of an agent, so that nothing of one task is in
        them, and in those of no other agent."""
        others = {s for name, said in self._first.items() if name != agent for s in said}
        always = self._always.get(agent, set())
        return [s for s in self._first.get(agent, ()) if s in always and s not in others]

    def of(self, agent: str, private: Sequence[str]) -> str:
        """What a prompt says that the agent is; empty: nothing of its own. What is said to the
        agent goes before the rest, and lists, of tools say, are no description."""
        said = [
            each
            for each in self.own(agent)
            if not _LISTED.search(each) and _bare(each) not in self._of_tools
        ]
        said.sort(key=lambda each: not _TO_IT.match(each))
        for sentence in said:
            told = re.sub(r"^(?:you are|you're)\s+", "", sentence, flags=re.I)
            enough = len(told.split()) > 2 or (len(told) > 4 and not told.isascii())
            if enough and (short := shortened_words(told, private)):
                return short
        return ""


def _folded(texts: Iterable[str]) -> list[str]:
    folded = (" ".join(text.casefold().split()) for text in texts)
    return [text for text in dict.fromkeys(folded) if text]


def _sentences(text: str) -> list[str]:
    return [" ".join(s.split()) for s in _SENTENCE.split(text) if re.search(r"[^\W\d_]", s)]


def _bare(sentence: str) -> str:
    return sentence.strip("\"'.` ")


def shortened_words(text: str, private: Iterable[str], most: int = LONGEST) -> str:
    """A text in one line, cut at a word; empty where a question or an answer stands in it."""
    line = " ".join(text.split()).rstrip(".")
    folded = line.casefold()
    for own in private:
        if own in folded and re.search(rf"(?<!\w){re.escape(own)}(?!\w)", folded):
            return ""
    return line if len(line) <= most else line[:most].rsplit(" ", 1)[0] + " ..."


def listed(names: Sequence[str], most: int) -> str:
    shown = [*names[:most], *([f"{len(names) - most} more"] if len(names) > most else [])]
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
