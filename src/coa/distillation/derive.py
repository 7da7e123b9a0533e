"""A grammar derived from a team at work: a role for each agent and each tool, and what may follow.

Who plans, criticises and is handed work follows from what messages do (`distillation/evidence.py`),
not from names. What somebody stated as a message's `part` holds. Which block may follow which is
read from the chains that the converter itself makes of the episodes under a grammar that forbids
nothing, so every one of them is legal under the result.

The result is a TOML file to be read and edited: its comments say on what evidence a line stands.
Words in it are those of prompts and descriptions of tools, never of questions or answers.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from coa.distillation.convert import NotConvertible, convert
from coa.distillation.evidence import LONGEST, TeamEvidence, listed, shortened_words, times
from coa.distillation.flow import HANDED_OVER
from coa.errors import RecordError, UsageError
from coa.grammar import Block, Grammar, Role, parse
from coa.grammar.grammar import Kind, is_block_name
from coa.grammar.load import block_names, grammar_to_toml
from coa.io.runs import Json
from coa.recording.episode import Episode, read_episodes
from coa.tools.recorded import RecordedTool
from coa.trajectory import Author

THINK, ANSWER, OBSERVATION = "think", "answer", "observation"
_PLAIN: Mapping[str, tuple[Kind, str, str]] = {
    "plan": (
        "plan",
        "steps",
        "Break the task into steps, in order; after a failure, write what changes",
    ),
    "reflection": (
        "reflection",
        "critique",
        "Review the work so far: what is wrong with it, and what must change",
    ),
    "suggested_answer": ("suggestion", "answer", "The answer that you would give now"),
    "double_check": ("check", "score", "Verify the suggested answer against what was observed"),
}
"""Blocks that belong to no agent, and what a prompt says of them: of an agent that says nothing of
itself, too."""
_PASS = 3
Words = Callable[[Json], Json]
"""Is given what is known of the agents, and returns what it knows better."""
_KINDS_OF_AGENTS = ("plan", "reflection", "delegation")
_PROMPT = 600
"""Characters of an agent's prompt that a model is shown."""


@dataclass(frozen=True)
class Derived:
    """A grammar, what it stands on, and what became of the episodes under it."""

    grammar: Grammar
    comments: Mapping[str, Sequence[str]]
    """Evidence by the key that it is of: `roles.NAME`, `roles.NAME.next`; the head under ''."""
    episodes: int
    converted: int
    """Of those that were read for it: the others failed."""
    read: int
    reasons: Mapping[str, int]
    """Why others did not become a chain."""
    wordless: Sequence[str] = ()
    """Agents without a block, since it would say the same in every chain."""

    def toml(self) -> str:
        told = {key: list(map(_in_one_line, lines)) for key, lines in self.comments.items()}
        return grammar_to_toml(self.grammar, told)

    def to_json(self) -> Json:
        return {
            "grammar": self.grammar.record(),
            "episodes": self.episodes,
            "read": self.read,
            "converted": self.converted,
            "reasons": dict(self.reasons),
            "wordless": list(self.wordless),
        }

    def lines(self) -> Iterator[str]:
        kinds = Counter(role.kind for role in self.grammar.roles)
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        yield f"{self.grammar.name}: {len(self.grammar.roles)} blocks ({told})"
        yield f"{self.converted} of {self.read} episodes become chains under it"
        for reason, count in self.reasons.items():
            yield f"  {count}: {reason}"
        yield from _told_of_wordless(self.wordless)


def derive_grammar(
    episodes: Sequence[Episode], name: str = "team", words: Words | None = None
) -> Derived:
    """The grammar of the team whose work these episodes are. `words` may name its agents better
    than the rules do; see `words_of_model`."""
    sound = [each for each in episodes if each.answer is not None and not found_wrong(each)]
    if not sound:
        raise UsageError(
            f"none of {len(episodes)} episodes has an answer that nobody found wrong, so there is "
            "nothing to derive a grammar from."
        )
    team = TeamEvidence(sound)
    roles = _Roles(team, words)
    free = roles.freely(name)
    chains, reasons = _chains(sound, free)
    if not chains:
        reason, count = reasons.most_common(1)[0]
        raise UsageError(f"none of {len(sound)} episodes becomes a chain; {count}: {reason}.")
    if wordless := roles.drop_wordless(chains):
        free = roles.freely(name)
        chains, reasons = _chains(sound, free)
    order = _Order([[block.role for block in chain] for chain in chains], roles, team)
    grammar = order.grammar(free)
    head = [
        f"Derived from {len(sound)} episode{'s' * (len(sound) > 1)} of "
        f"{listed(sorted({e.teacher for e in sound}), 3)}.",
        "Edit it: `about` and `hint` are what a prompt says, `next` is what may follow a block.",
        "Seen 0 times: the tools of one agent may follow each other, and unused ones any tool.",
        "A model is trained on one version of it: derive and edit before `coa distill`.",
        *_told_of_wordless(wordless),
    ]
    comments = {"": head} | roles.comments(order) | order.comments(grammar)
    counts = (len(episodes), len(chains), len(sound))
    return Derived(grammar, comments, *counts, reasons, wordless)


def sound_episodes(path: Path, note: Callable[[str], None]) -> list[Episode]:
    """The episodes of a file; lines that are none are counted, with the first of them."""
    read = list(read_episodes(path))
    sound = [each for _, each in read if isinstance(each, Episode)]
    odd = [f"line {line}: {each}" for line, each in read if isinstance(each, RecordError)]
    if not sound:
        raise UsageError(f"{path}: holds no episode." + (f" {odd[0]}" if odd else ""))
    if odd:
        note(f"{path}: {len(odd)} lines are no episode; {odd[0]}")
    return sound


def _told_of_wordless(agents: Sequence[str]) -> Iterator[str]:
    if agents:
        have = "have no block: they were" if len(agents) > 1 else "has no block: it was"
        yield f"{listed(agents, 8)} {have} always handed the work without a word, and used no tool"


def _in_one_line(text: str) -> str:
    """A comment, whatever stands in the names that it mentions: a new line would end it."""
    return "".join(character if character.isprintable() else " " for character in text)


def found_wrong(episode: Episode) -> bool:
    """Whether somebody judged its answer, and not as right."""
    success = episode.meta.get("success")
    return isinstance(success, int | float) and success < 1


# -- the roles --------------------------------------------------------------------------------


class _Roles:
    """A role for each agent and each tool, and why."""

    def __init__(self, team: TeamEvidence, words: Words | None) -> None:
        self.team = team
        self.why: dict[str, str] = {}
        """Role -> what it stands on."""
        self.tools: dict[str, str] = {}
        """Tool -> its role."""
        taken = {THINK, ANSWER, OBSERVATION}
        blocks = block_names(team.specs, taken)
        self.roles: list[Role] = [*self._agents({*taken, *blocks.values()})]
        self.roles += self._stated({*taken, *blocks.values(), *(r.name for r in self.roles)})
        for tool, block in blocks.items():
            self.roles.append(self._tool(team.specs[tool], block))
            self.tools[tool] = block
        if words is not None:
            self._reword(words)

    def _agents(self, taken: set[str]) -> Iterator[Role]:
        team = self.team
        wanted: list[tuple[str, Kind, str]] = []  # agent, kind, the name that its block should have
        for agent, (_, for_itself) in team.planners.items():
            alone = agent == team.root or sum(own for _, own in team.planners.values()) == 1
            name = ("plan" if alone else f"{agent}_plan") if for_itself else agent
            wanted.append((agent, "plan", name))
        wanted += [(agent, "reflection", agent) for agent in team.critics]
        wanted += [(agent, "delegation", agent) for agent in team.asked]
        for agent, kind, name in wanted:
            block = block_names([name], taken, "agent")[name]
            taken.add(block)
            self.why[block] = self._evidence(agent, kind)
            yield self._role(block, kind, agent)

    def _role(self, block: str, kind: Kind, agent: str) -> Role:
        said = self.team.words.of(agent, self.team.private)
        if kind == "delegation":
            tools = self.team.tools_of(agent)
            does = said or (f"it has {listed(tools, 4)}" if tools else "")
            about = f"Hand the work to {agent}{f': {does}' if does else ''}"
            return Role(block, kind, about=about, hint="job", agent=agent)
        plain = "plan" if kind == "plan" else "reflection"
        _, hint, about = _PLAIN[plain]
        for_itself = kind == "plan" and self.team.planners.get(agent, (0, False))[1]
        own = "" if for_itself else said
        return Role(block, kind, about=own or about, hint=hint, agent=agent)

    def _evidence(self, agent: str, kind: Kind) -> str:
        team = self.team
        if kind == "plan":
            count, for_itself = team.planners[agent]
            whose = "its own work" if for_itself else "what others then did"
            return f"{agent!r} planned {whose} {times(count)}, before anything else and by no tool"
        if kind == "reflection":
            back, on = team.critics[agent]
            return (
                f"{agent!r} spoke after a result: the work was done again {times(back)}, "
                f"and went on {times(on)}"
            )
        by = team.asked[agent]
        return f"{agent!r} was handed work {times(by.total())}, by {listed(list(by), 3)}"

    def _stated(self, taken: set[str]) -> Iterator[Role]:
        """Roles for what messages were stated to be, where no agent has one of the kind."""
        stated = self.team.stated
        kinds = {role.kind for role in self.roles}
        plans = "plan" in kinds or stated["plan"] > 0
        critics = stated["alarm"] + stated["approval"]
        checks = stated["check"] if stated["suggestion"] and plans else 0
        counts = {
            "plan": stated["plan"],
            "reflection": critics,
            "suggested_answer": stated["suggestion"] if checks else 0,
            "double_check": checks,
        }
        for name, count in counts.items():
            kind, hint, about = _PLAIN[name]
            if not count or kind in kinds:
                continue
            block = block_names([name], taken, "agent")[name]
            self.why[block] = f"stated by the record {times(count)}"
            pass_score = _PASS if kind == "check" else 0
            yield Role(block, kind, about=about, hint=hint, pass_score=pass_score)

    def _tool(self, spec: RecordedTool, block: str) -> Role:
        used = self.team.used.get(spec.name, Counter())
        calls = f"called {times(used.total())}, by {listed(list(used), 3)}" if used else "not used"
        self.why[block] = calls
        hint = {"json": "JSON", "code": "program", "text": spec.only or "text"}[spec.body]
        about = shortened_words(spec.about, self.team.questions, 2 * LONGEST)
        about = replace(spec, about=about).described
        tool = "" if block == spec.name else spec.name
        return Role(block, "tool", about=about, hint=hint, body=spec.body, tool=tool)

    def _reword(self, words: Words) -> None:
        """Take over what somebody knows better, where it is sound; what is not is left as it is."""
        known = [self._known(role) for role in self.roles if role.agent]
        better = words({"agents": known, "tools": {t: s.about for t, s in self.team.specs.items()}})
        told = {(each["agent"], each["was"]): each for each in _objects(better.get("agents"))}
        taken = {THINK, ANSWER, OBSERVATION, *(role.name for role in self.roles)}
        for place, role in enumerate(self.roles):
            said = told.get((role.agent, role.name), {})
            texts = (said.get(key) for key in ("block", "kind", "about"))
            block, kind, about = (text if isinstance(text, str) else "" for text in texts)
            changed = role
            if kind in _KINDS_OF_AGENTS and not self._has(kind, role.agent):
                changed = self._role(role.name, kind, role.agent)  # type: ignore[arg-type]
            if is_block_name(block) and block not in taken:
                changed = replace(changed, name=block)
                self.why[block] = self.why.pop(role.name)
                taken.add(block)
            if about := shortened_words(about, self.team.private):
                changed = replace(changed, about=about)
            if changed != role:
                self.why[changed.name] += "; words of a model"
            self.roles[place] = changed

    def _has(self, kind: str, agent: str) -> bool:
        return any(role.kind == kind and role.agent == agent for role in self.roles)

    def _known(self, role: Role) -> Json:
        """What a model is told of an agent: nothing of any task."""
        said = [s for s in self.team.words.own(role.agent) if not s.startswith("```")]
        return {
            "agent": role.agent,
            "block": role.name,
            "kind": role.kind,
            "about": role.about,
            "evidence": self.why[role.name],
            "prompt": " ".join(said)[:_PROMPT],
            "tools": self.team.tools_of(role.agent),
        }

    def drop_wordless(self, chains: Iterable[Iterable[Block]]) -> list[str]:
        """Leave out the agents whose block would say in every chain that they go on, and nothing
        follows of it, since they have no tool: it would be learned in place of what matters."""
        said: dict[str, set[str]] = defaultdict(set)
        for chain in chains:
            for block in chain:
                said[block.role].add(block.body.strip())
        held = Counter(role.agent for role in self.roles)
        dropped = [
            role
            for role in self.roles
            if role.kind == "delegation" and said[role.name] == {HANDED_OVER}
            if held[role.agent] == 1 and not self.team.tools_of(role.agent)
        ]
        self.roles = [role for role in self.roles if role not in dropped]
        for role in dropped:
            del self.why[role.name]
        return [role.agent for role in dropped]

    def freely(self, name: str) -> Grammar:
        """A grammar in which any block may follow any other."""
        everything = (*(role.name for role in self.roles), ANSWER)
        think = Role(
            THINK,
            "think",
            hint="reasoning",
            about="Reason briefly about where the work stands and which block comes next",
        )
        answer = Role(
            ANSWER, "answer", hint="answer", about="The final answer, as short as possible"
        )
        plans = any(role.kind == "plan" for role in self.roles)  # what a low score calls for
        others = [
            replace(role, next=everything, pass_score=role.pass_score * plans)
            for role in self.roles
        ]
        agents = list(self.team.parts)
        with_tools = " with tools" if self.tools else ""
        of_whom = f": {listed(agents, 8)}" if len(agents) > 1 else ""
        return Grammar(
            name,
            (think, *others, answer),
            everything,
            interleave=THINK,
            preamble=(
                f"You solve a task{with_tools}. You work as a team of agents that share one memory"
                f"{of_whom}."
            ),
            brief=f"Solve the task{' with the tools' if self.tools else ''}.",
            sparing=True,
        )

    def comments(self, order: _Order) -> dict[str, list[str]]:
        found = {}
        for name, why in self.why.items():
            share = f"in {order.held[name]} of {order.chains} chains" if order.held[name] else ""
            found[f"roles.{name}"] = [
                f"{why[0].upper()}{why[1:]}" + (f"; {share}" if share else "")
            ]
        return found


# -- what follows what ------------------------------------------------------------------------


def _chains(episodes: Iterable[Episode], free: Grammar) -> tuple[list[list[Block]], Counter[str]]:
    """The blocks of each chain, and why there is none of some episodes."""
    chains: list[list[Block]] = []
    reasons = Counter[str]()
    for episode in episodes:
        try:
            chain = convert(episode, free)
        except NotConvertible as cause:
            reasons[cause.reason] += 1
            continue
        written = (s.text for s in chain.segments if s.author is Author.MODEL)
        chains.append([block for text in written for block in parse(free, text).blocks])
    return chains, reasons


class _Order:
    """Which block followed which, and how often."""

    def __init__(self, chains: Sequence[Sequence[str]], roles: _Roles, team: TeamEvidence) -> None:
        self.roles, self.team, self.chains = roles, team, len(chains)
        self.follows: dict[str, Counter[str]] = defaultdict(Counter)
        self.held = Counter[str]()
        """In how many chains a block is."""
        thoughts = blocks = 0
        for chain in chains:
            own = [name for name in chain if name != THINK]
            thoughts += sum(name != THINK and before == THINK for before, name in pairwise(chain))
            blocks += len(own)
            self.held.update(set(chain))
            for before, name in pairwise(["", *own]):
                self.follows[before][name] += 1
        self.always_thinks = thoughts == blocks

    def grammar(self, free: Grammar) -> Grammar:
        """The free grammar with what was seen, and no more than that must be."""
        tools = set(self.roles.tools.values())
        kept = [
            role
            for role in free.roles
            if role.kind in ("think", "answer") or role.name in tools or self.held[role.name]
        ]
        plans = any(role.kind == "plan" for role in kept)
        roles = [
            replace(role, next=tuple(self._next(role)), pass_score=role.pass_score * plans)
            for role in kept
        ]
        start = tuple(name for name, _ in self.follows[""].most_common())
        return replace(free, roles=tuple(roles), start=start, sparing=not self.always_thinks)

    def _next(self, role: Role) -> list[str]:
        """What followed a block; of the tools of one agent each may follow any other. A tool that
        was never used may come where others may: nobody knows which agent had it."""
        if role.kind in ("think", "answer"):
            return []
        tools = list(self.roles.tools.values())
        idle = [self.roles.tools[name] for name in self.roles.tools if name not in self.team.used]
        if role.name in idle:
            after = [name for tool in tools for name, _ in self.follows[tool].most_common()]
            return list(dict.fromkeys([*after, ANSWER]))
        seen = [name for name, _ in self.follows[role.name].most_common()]
        named = {block: tool for tool, block in self.roles.tools.items()}
        agents = set(self.team.used.get(named.get(role.name, ""), ()))
        agents |= {role.agent} if role.kind == "delegation" else set()
        own = [
            self.roles.tools[tool]
            for tool, by in self.team.used.items()
            if not agents.isdisjoint(by)
        ]
        found = list(dict.fromkeys([*seen, *own]))
        return [*found, *idle] if {*found} & {*tools} else found

    def comments(self, grammar: Grammar) -> dict[str, list[str]]:
        found = {"start": [self._counted("", grammar.start)]}
        for role in grammar.roles:
            if role.next:
                found[f"roles.{role.name}.next"] = [self._counted(role.name, role.next)]
        return found

    def _counted(self, name: str, following: Sequence[str]) -> str:
        counts = [str(self.follows[name][each]) for each in following]
        return f"seen {', '.join(counts)} times" if counts else ""


def _objects(value: Any) -> list[Json]:
    """Answers of a model about agents, those that name one and its block."""
    listed = value if isinstance(value, list) else []
    named = (each for each in listed if isinstance(each, dict))
    return [e for e in named if isinstance(e.get("agent"), str) and isinstance(e.get("was"), str)]


# -- a language model that names agents --------------------------------------------------------

ASK = """You name the agents of a team. Each is described by its prompt, its tools and what it was \
seen to do. For each of them state
- "agent" and "was": its `agent` and its `block`, as they are given;
- "block": a better name of one or two words in lower-case letters and underscores, or the same;
- "kind": "plan" (it writes the steps that others take), "reflection" (it judges the work of \
others) or "delegation" (it is given jobs and does them). Keep the given one unless it is wrong;
- "about": one short sentence that says what it is for.
Reply with one JSON object and nothing else, for example
{"agents": [{"agent": "Agent 2", "was": "agent_2", "block": "researcher", "kind": "delegation", \
"about": "Finds facts in the company's documents."}]}"""


def words_of_model(reference: str, note: Callable[[str], None] = lambda line: None) -> Words:
    """The words of a model on a server (openai:NAME@URL), asked once. It sees prompts and tools, no
    question and no answer; where its reply cannot be read, the rules alone decide."""
    from coa.engines.chat import ChatModel, ChatSettings

    settings = ChatSettings(model=reference, max_tokens=2048)

    async def asked(known: Json) -> Json:
        model = ChatModel(settings)
        try:
            body = model.body([("system", ASK), ("user", json.dumps(known, ensure_ascii=False))])
            for attempt in range(settings.attempts):
                again = {**body, "temperature": 0.3 * attempt}
                if (found := _read_reply((await model.ask(again)).text)) is not None:
                    return found
        finally:
            await model.close()
        note(f"{reference}: no reply could be read, so the rules alone name the agents")
        return {}

    return lambda known: asyncio.run(asked(known))


def _read_reply(text: str) -> Json | None:
    """The JSON object of a reply, be it in a fence or between words."""
    start, end = text.find("{"), text.rfind("}")
    try:
        found = json.loads(text[start : end + 1], strict=False) if start >= 0 else None
    except ValueError:
        return None
    sound = isinstance(found, dict) and isinstance(found.get("agents"), list)
    return found if sound else None
