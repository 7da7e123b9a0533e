"""Who made which model call: the agents of a team, and their names.

An agent is a system prompt and the tools on offer. Both may vary a little from call to call, and so
calls are put together

- where the source names the agent: by that name, and by nothing else;
- where the prompts are the same but for numbers and dates, or one only adds lines to the other, and
  the tools are the same;
- where one conversation goes on: the prompt is the same and the tools are not (a last call without
  any), or the tools are the same and the prompt is much alike;
- where a call without tools is made beside a conversation: it sees what the agent saw, asks
  something that the agent is never shown, and what it says is the agent's own words afterwards, or
  nothing comes afterwards (a plan, a summary, a last answer when the steps have run out).

Calls that nothing of this holds for are those of another agent: two names for one agent are better
than one name for two. No name is guessed: it is the one that the source or a message states, that
of the tool by which others reach the agent, the one that its prompt calls it, or a number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from coa.recording.episode import SYSTEM, USER
from coa.recording.turns import AgentTurn, results_in, squash

Root = tuple[str, str, frozenset[str]]
"""What the source calls it, its system prompt without numbers and dates, its tools."""
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}"
_VARIES = re.compile(
    r"\b(?:[0-9a-f]{8}-[0-9a-f-]{27}|(?:mon|tues|wednes|thurs|fri|satur|sun)day|"
    rf"{_MONTH}(?=[\s.,]+\d)|(?<=\d\s){_MONTH}|\d[\d:.,/TZ-]*)\b",
    re.I,
)
"""Dates, times, numbers and ids: what differs between two calls of one agent."""
_ALIKE = 0.6
"""Of two prompts in one conversation: more than half is the same."""
_ADDED = 0.5
"""How much of a prompt another one must hold to be the same with something added."""


def root_of(turn: AgentTurn) -> Root:
    return turn.call.agent, _VARIES.sub("#", squash(turn.system)), turn.tools


def find_agents(turns: Sequence[AgentTurn]) -> None:
    """Give every turn the number of its agent, in the order in which agents first spoke."""
    roots = list(dict.fromkeys(map(root_of, turns)))
    same = {root: root for root in roots}

    def first(root: Root) -> Root:
        while same[root] != root:
            root = same[root]
        return root

    def join(one: Root, other: Root) -> None:
        if not (one[0] or other[0]):
            same[first(other)] = first(one)

    for number, root in enumerate(roots):
        for earlier in roots[:number]:
            if root[0] and root[0] == earlier[0]:
                same[first(root)] = first(earlier)
            elif root[2] == earlier[2] and _adds(root[1], earlier[1]):
                join(earlier, root)
    for turn in turns:
        last = turn.last_spoken
        if last and _goes_on(root_of(turn), root_of(last[1])):
            join(root_of(last[1]), root_of(turn))
    beside = _beside(turns, first)
    owners = [first(beside.get(turn.number) or root_of(turn)) for turn in turns]
    order = list(dict.fromkeys(owners))
    for turn, owner in zip(turns, owners, strict=True):
        turn.agent, turn.aside = str(order.index(owner)), turn.number in beside


def _adds(one: str, other: str) -> bool:
    """Whether one prompt is the other with something put in."""
    short, long = sorted((one, other), key=len)
    if not short or len(short) < _ADDED * len(long):
        return False
    words, more = short.split(), iter(long.split())
    return all(word in more for word in words) and len(words) > 3


def _goes_on(root: Root, before: Root) -> bool:
    """Whether the next call of a conversation is one of the same agent."""
    if root == before:
        return True
    if root[1] == before[1]:
        return bool(root[1]) or not root[2] or not before[2]
    alike = SequenceMatcher(None, root[1].split(), before[1].split(), autojunk=False).ratio()
    return bool(root[2]) and root[2] == before[2] and alike > _ALIKE


def _beside(turns: Sequence[AgentTurn], first: Callable[[Root], Root]) -> dict[int, Root]:
    """Turns that were made beside a conversation of another root -> that root.

    All turns of their own root have to be such.
    """
    found: dict[Root, dict[int, Root | None]] = {}
    for turn in turns:
        of = _aside(turn, turns, first)
        found.setdefault(first(root_of(turn)), {})[turn.number] = root_of(of) if of else None
    whole = [owners for owners in found.values() if all(owners.values())]
    return {number: of for owners in whole for number, of in owners.items() if of}


def _aside(
    turn: AgentTurn, turns: Sequence[AgentTurn], first: Callable[[Root], Root]
) -> AgentTurn | None:
    """A turn of the agent beside whose conversation this call was made."""
    if turn.tools or turn.call.agent or turn.said.calls or not turn.messages:
        return None
    root, later = first(root_of(turn)), turns[turn.number + 1 :]
    shown = [each for each in later if turn in each.spoken.values()]
    after = next((each for each in shown if first(root_of(each)) != root), None)
    last = turn.last_spoken
    if last is None:  # a plan, of the task alone
        asked_aside = after is not None and not set(turn.ids) & set(after.ids)
        return after if asked_aside and not turn.system else None
    place, spoke = last
    if first(root_of(spoke)) == root or next(results_in(turn, place), None) is None:
        return None  # it is its own, or what came before was complete
    if after is not None:
        return after if turn.ids[-1] not in after.ids else None
    goes_on = any(spoke in each.spoken.values() for each in later)
    return None if shown or goes_on else spoke


# -- names -------------------------------------------------------------------------------------

_CALLED = re.compile(
    r"\b(?:[Yy]ou(?:'re| are)|[Aa]ct as|[Yy]our (?:name|role) is|I am)\s+"
    r"(?:(?:a|an|the|our|my)\s+(?=[A-Za-z])|(?=['\"*`]*[A-Z]))['\"*`]*"
    r"(?P<name>[A-Za-z][\w &/-]{1,60}?)['\"*`]*"
    r"(?=\s*(?:[.,;:!?\n(]|$)|\s+(?:who|that|which|and|for|at|in|of|on|with|to|from|tasked|whose|"
    r"[sS]peciali\w+|responsible|working|named|called|able|designed|helping)\b)"
)
"""What a prompt calls its agent: a noun with an article, or a name in capitals."""
_NAMED = re.compile(r"\bnamed\s+['\"`*](?P<name>[\w -]{1,60})['\"`*]")
_REACHES = re.compile(
    r"\A(?:(?:transfer|hand_?off|delegate|route|escalate)_(?:back_)?to_(?=.)"
    r"|(?:delegate[_ ]work|ask[_ ]question)[_ ]to[_ ]coworker\Z)",
    re.I,
)
"""How frameworks call tools that reach an agent: before the agent's name, or for all of them."""
_ASKS = re.compile(r"\A(?:ask|call|consult)_(?:the_)?(?=.)", re.I)
"""How programs call tools that turned out to reach an agent, before its name."""
_RECIPIENT = re.compile(r"agent|coworker|recipient", re.I)
"""Arguments that name an agent."""
_VAGUE = frozenset(
    "agent ai assistant bot expert helpful model language large smart professional friendly world "
    "capable intelligent ai-powered llm chatbot you".split()
)


def reaches_an_agent(tool: str) -> bool:
    """Whether a tool's name says that it hands over to an agent."""
    return bool(_REACHES.match(tool))


def name_agents(
    turns: Sequence[AgentTurn],
    reached: Mapping[str, Iterable[str]],
    stated: Mapping[str, Iterable[str]],
) -> dict[str, str]:
    """The name of each agent, by its number.

    `reached` are the tools by which other agents reach it, `stated` are names that messages give
    it.
    """
    names: dict[str, str] = {}
    numbers = list(dict.fromkeys(turn.agent for turn in turns))
    shared = Counter(tool for tools in reached.values() for tool in set(tools))
    for position, number in enumerate(numbers, start=1):
        own = [turn for turn in turns if turn.agent == number]
        own_tools = [tool for tool in reached.get(number, ()) if shared[tool] == 1]
        tools = [_ASKS.sub("", _REACHES.sub("", tool)) for tool in own_tools]
        found = (
            _most(turn.call.agent for turn in own),
            _most(stated.get(number, ())),
            _most(tools),
            _most(_self_named(turn.system) for turn in own if not turn.aside),
        )
        name = next((each for each in found if each), f"agent_{position}")
        if name in (USER, SYSTEM):
            name = f"{name}_agent"
        taken = [each for each in names.values() if each == name or each.startswith(f"{name}_")]
        names[number] = f"{name}_{position}" if name in taken else name
    return names


def _most(names: Iterable[str]) -> str:
    counted = Counter(name for name in names if name)
    return counted.most_common(1)[0][0] if counted else ""


def _self_named(prompt: str) -> str:
    """What a prompt calls the one that it is for; a mere 'helpful assistant' is no name."""
    found = _NAMED.search(prompt[:2000]) or _CALLED.search(prompt[:2000])
    name = _slug(found["name"]) if found else ""
    return "" if not set(name.split("_")) - _VAGUE or name.count("_") > 3 else name


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def agent_named_in(arguments: Any) -> str:
    """The agent that a call is for, where one tool reaches several: its coworker, its recipient."""
    given = arguments.items() if isinstance(arguments, dict) else ()
    names = [str(value).strip() for key, value in given if _RECIPIENT.search(key)]
    return names[0] if len(names) == 1 and 0 < len(names[0]) <= 60 else ""
