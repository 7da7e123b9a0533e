"""Turns: the answered model calls of a session, each with whose words its conversation holds.

A request repeats the conversation so far. So what a model said in one call stands in later ones as
a message of the assistant: of the same agent, which goes on, or of another one, which was handed
the conversation or shown it. `turns_of` finds these places (`AgentTurn.spoken`); everything else
about a team is read from them. Nothing here looks at who is who.

Programs change what they send back: they drop reasoning, close a block of code, keep some of
several calls. A message is taken for what a turn said where its calls are the turn's, or where its
text holds the turn's.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from coa.recording.calls import LoggedCall, LoggedSession
from coa.recording.episode import ChatMessage
from coa.recording.programs import functions_in
from coa.recording.text_calls import lost_error, read_conversation, read_reply, said_beside
from coa.recording.wire import FunctionCall, WireMessage

ENOUGH = 24
"""Characters that a text needs to be recognised inside another one: less may be chance."""


@dataclass(slots=True, eq=False)
class AgentTurn:
    """One answered model call."""

    number: int
    """In the order in which calls were answered."""
    call: LoggedCall
    messages: tuple[WireMessage, ...]
    """The whole conversation that it was given, with calls that were written as text read."""
    said: WireMessage
    """Its reply, read likewise."""
    beside: str
    """What its reply says beside its calls."""
    sent: list[ChatMessage]
    """What it was given, word by word."""
    written: str
    """What it wrote, as `sent` of a later call has it where nothing was changed."""
    ids: list[int] = field(default_factory=list)
    """One number for each message of the conversation; equal messages have equal ones."""
    spoken: dict[int, AgentTurn] = field(default_factory=dict)
    """Place in the conversation -> the turn that said what stands there."""
    lost: list[tuple[AgentTurn, str]] = field(default_factory=list)
    """Turns whose words were left out of the conversation, and the error that stands there."""
    agent: str = ""
    aside: bool = False
    """It was made beside the agent's conversation, with a prompt that is not the agent's."""

    @property
    def last_spoken(self) -> tuple[int, AgentTurn] | None:
        """The last words of anybody in the conversation."""
        return max(self.spoken.items(), key=lambda each: each[0]) if self.spoken else None

    @property
    def own(self) -> tuple[int, AgentTurn] | None:
        """The last words of the same agent in the conversation."""
        own = [each for each in self.spoken.items() if each[1].agent == self.agent]
        return max(own, key=lambda each: each[0]) if own else None

    @property
    def tools(self) -> frozenset[str]:
        """Those on offer, be it as functions that its prompt defines."""
        declared = (tool.name for tool in self.call.exchange.tools)
        return frozenset([*declared, *functions_in(self.system)])

    @property
    def system(self) -> str:
        return self.call.exchange.system

    def new(self) -> tuple[WireMessage, ...]:
        """What it is given that the agent had not seen when it last spoke."""
        own = self.own
        return self.messages[own[0] + 1 :] if own else self.messages


def squash(text: str) -> str:
    """A text with its blanks made equal."""
    return " ".join(text.split())


def as_json(value: Any) -> str:
    """JSON text of arguments, the same for the same arguments."""
    return (
        value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    )


def as_text(message: WireMessage) -> str:
    """A message as one text: what it says, then a line for each call."""
    calls = (f"{call.name}({as_json(call.arguments)})" for call in message.calls)
    return "\n".join([*([message.text] if message.text else []), *calls])


def quoted(text: str, inside: str) -> bool:
    """Whether a text stands in another one; both are squashed.

    It may be shortened, or, where it is a JSON object, filled into a form: then more than half of
    what it says has to be there, and enough of it.
    """
    if len(text) < ENOUGH:
        return False
    if text in inside:
        return True
    pieces = _pieces(text)
    found = sum(len(piece) for piece in pieces if piece in inside)
    return found > ENOUGH and found * 2 > sum(map(len, pieces))


@lru_cache(maxsize=1024)
def _pieces(text: str) -> list[str]:
    """What may stand alone of a text: the texts in a JSON value, or long sentences."""
    try:
        if text[:1] in ("{", "["):
            found = strings_in(json.loads(text))
            return [squash(each) for each in found if len(each) > 3]
    except (ValueError, RecursionError):  # no JSON, or nested deeper than anybody reads
        pass
    return [each for each in re.split(r"(?<=[.!?:;])\s", text) if len(each) > ENOUGH]


def strings_in(value: Any) -> Iterator[str]:
    """Every text inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from strings_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings_in(each)


# -- which calls count -------------------------------------------------------------------------


def turns_of(session: LoggedSession, count: Count) -> list[AgentTurn]:
    """The answered calls, each once; `count` counts what is not known."""
    turns = [
        _turn(number, call, whole) for number, (call, whole) in enumerate(_kept(session, count))
    ]
    _find_spoken(turns)
    return turns


class Count:
    """What could not be known, by name."""

    def __init__(self) -> None:
        self.gaps: dict[str, int] = {}
        self.retried = 0

    def gap(self, name: str, times: int = 1) -> None:
        if times:
            self.gaps[name] = self.gaps.get(name, 0) + times


def _kept(
    session: LoggedSession, count: Count
) -> Iterator[tuple[LoggedCall, tuple[WireMessage, ...]]]:
    """(call, its whole conversation) of each answered call that no later one repeats."""
    histories: dict[str, tuple[str, tuple[WireMessage, ...]]] = {}
    """By the id of a reply: what its server keeps of the system prompt, and the messages."""
    repeated = _repeated(session.calls, _requests(session.calls))
    for number, first_chosen in enumerate(session.calls):
        call = _with_chosen(first_chosen, session.calls[number + 1 :], count)
        exchange = call.exchange
        count.gap("history_missing", bool(exchange.follows) and exchange.follows not in histories)
        kept, before = histories.get(exchange.follows, ("", ()))
        whole = (*before, *exchange.messages)
        if kept:
            system = "\n\n".join(filter(None, (exchange.system, kept)))
            call = replace(call, exchange=replace(exchange, system=system))
        if exchange.reply and exchange.id:
            kept = "\n\n".join(filter(None, (kept, exchange.kept)))
            histories[exchange.id] = kept, (*whole, exchange.reply)
        if number in repeated:
            count.retried += 1
            continue
        count.gap("not_text", any(message.other for message in (*whole, exchange.reply) if message))
        if call.cut:
            count.gap("reply_cut")
        elif not call.answered:
            count.gap("reply_unread" if call.unread else "call_failed")
        if call.answered:
            yield call, whole


def _with_chosen(call: LoggedCall, later: Sequence[LoggedCall], count: Count) -> LoggedCall:
    """The call with the choice for its reply that a later call shows, or else with the first."""
    exchange = call.exchange
    if not exchange.drafts or exchange.reply is None:
        return call
    shown = {_words(message) for each in later for message in each.exchange.messages}
    choices = (exchange.reply, *exchange.drafts)
    chosen = [choice for choice in choices if _words(choice) in shown]
    count.gap("choice_unknown", len(chosen) != 1)
    reply = chosen[0] if chosen else exchange.reply
    return replace(call, exchange=replace(exchange, reply=reply))


def _words(message: WireMessage) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """What makes two messages the same; ids of calls and reasoning make no difference."""
    return message.role, squash(message.text), tuple(map(call_key, message.calls))


def _request(call: LoggedCall) -> str:
    """What a request asks for, as a text that is the same for the same request. Not of which model:
    a reply names the version that answered, and a refusal does not."""
    exchange = call.exchange
    said = [message.to_json() for message in exchange.messages]
    tools = [(tool.name, tool.schema) for tool in exchange.tools]
    return as_json({"": [exchange.system, tools, said, exchange.follows]})


def _requests(calls: Sequence[LoggedCall]) -> list[str]:
    """What tells requests apart; in full only where their last messages are the same."""
    ends = [
        (call.exchange.follows, len(call.exchange.messages), call.exchange.messages[-1:])
        for call in calls
    ]
    short = [str((follows, size, last and last[0].text)) for follows, size, last in ends]
    alike = Counter(short)
    return [
        _request(call) if alike[text] > 1 else text for call, text in zip(calls, short, strict=True)
    ]


def _repeated(calls: Sequence[LoggedCall], requests: Sequence[str]) -> set[int]:
    """Calls that the program sent again: those that failed, were cut or are superseded. The same
    request alone may well be meant as a second one."""
    found: set[int] = set()
    later: set[str] = set()
    for number in reversed(range(len(calls))):
        call = calls[number]
        if requests[number] in later and (call.cut or not call.answered):
            found.add(number)
        later.add(requests[number])
    return found


def _turn(number: int, call: LoggedCall, whole: tuple[WireMessage, ...]) -> AgentTurn:
    reply = call.exchange.reply
    assert reply is not None, call.session
    sent = [ChatMessage("system", call.exchange.system)]
    for message in whole:
        role = "user" if message.role == "tool" else message.role
        if text := as_text(message):
            sent.append(ChatMessage(role, text))
    said = read_reply(reply, replace(call.exchange, messages=whole))
    return AgentTurn(
        number,
        call,
        read_conversation(whole),
        said,
        said_beside(reply, said),
        sent,
        as_text(reply),
    )


# -- whose words stand where -------------------------------------------------------------------


class _Speakers:
    """Finds whose words stand in conversations, turn after turn.

    A conversation is a path in a tree of messages; who said what stands at a node is settled once,
    for every conversation that begins so.
    """

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self.seen: dict[int, int] = {}
        """id() of a message -> its number; a conversation repeats most of its messages."""
        self.nodes: dict[tuple[int, int], int] = {}
        self.settled: dict[int, AgentTurn] = {}
        self.by_text: dict[str, list[AgentTurn]] = {}
        self.by_call: dict[tuple[str, str], list[AgentTurn]] = {}
        self.long: list[AgentTurn] = []

    def add(self, turn: AgentTurn) -> None:
        """Find who spoke in the conversation of a turn, and remember what was said in it."""
        turn.ids = [self._number(message) for message in turn.messages]
        node = 0
        for place, message in enumerate(turn.messages):
            node = self.nodes.setdefault((node, turn.ids[place]), len(self.nodes) + 1)
            if message.role != "assistant":
                continue
            if node not in self.settled:
                found = [
                    each
                    for each in self._speakers(message, turn.ids[:place])
                    if each.call.ended <= turn.call.begun
                ]
                if found:
                    self.settled[node] = max(found, key=lambda each: _fit(each, turn, place))
            if node in self.settled:
                turn.spoken[place] = self.settled[node]
        self._remember(turn)

    def _number(self, message: WireMessage) -> int:
        """The same number for equal messages; ids of calls and reasoning make no difference."""
        number = self.seen.get(id(message))
        if number is None:
            plain = as_json({"": list(_words(message))})
            number = self.known.setdefault(plain, len(self.known))
            self.seen[id(message)] = number
        return number

    def _remember(self, turn: AgentTurn) -> None:
        text = squash(turn.said.text)
        self.by_text.setdefault(text, []).append(turn)
        self.long += [turn] if len(text) >= ENOUGH else []
        for call in turn.said.calls:
            self.by_call.setdefault(call_key(call), []).append(turn)

    def _speakers(self, message: WireMessage, before: list[int]) -> list[AgentTurn]:
        """Turns that may have said a message that stands after others."""
        kept, text = list(map(call_key, message.calls)), squash(message.text)
        if kept and (
            found := [
                each
                for each in self.by_call.get(kept[0], ())
                if set(kept) <= set(map(call_key, each.said.calls))
            ]
        ):
            return found
        if not text:
            return []

        def may_say(turn: AgentTurn) -> bool:
            if not turn.said.calls:
                return True
            if kept:  # a program that was changed a little is known by what stands around it
                return not any(call.id for call in turn.said.calls)
            return len(squash(turn.said.text)) >= ENOUGH or turn.ids == before

        exact = [each for each in self.by_text.get(text, ()) if may_say(each)]
        held = (each for each in self.long if may_say(each) and squash(each.said.text) in text)
        return exact or list(held)


def _find_spoken(turns: Sequence[AgentTurn]) -> None:
    speakers = _Speakers()
    for turn in turns:
        speakers.add(turn)
        for place, message in enumerate(turn.messages):
            if error := lost_error(message):
                turn.lost += [
                    (each, error)
                    for each in turns[: turn.number]
                    if len(each.ids) == place and turn.ids[:place] == each.ids
                ]


def _fit(spoke: AgentTurn, turn: AgentTurn, place: int) -> tuple[bool, bool, int, int]:
    """How well a turn fits as the one that said what stands at a place of a later conversation."""
    pairs = zip(spoke.ids, turn.ids[:place], strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    whole = common == len(spoke.ids) == place
    unused = all(each is not spoke for each in turn.spoken.values())
    return whole, unused, common, spoke.number


def call_key(call: FunctionCall) -> tuple[str, str]:
    """What makes two calls the same, their ids aside."""
    return call.name, squash(as_json(call.arguments))


def results_in(turn: AgentTurn, place: int) -> Iterator[WireMessage]:
    """The results of tools that stand after what was said at a place, before anybody speaks on."""
    for message in turn.messages[place + 1 :]:
        if message.role == "assistant":
            return
        if message.role == "tool":
            yield message


def result_of(
    calls: Sequence[FunctionCall], index: int, results: Iterable[WireMessage]
) -> WireMessage | None:
    """The result of one of several calls, by its id, or in their order where ids say nothing."""
    found = list(results)
    wanted = calls[index].id
    if wanted and [call.id for call in calls].count(wanted) == 1:
        for each in found:
            if each.answers == wanted:
                return each
    named = [each for each in found if each.answers]
    if not named and len(found) == len(calls):
        return found[index]
    if (
        named
        and len(found) == len(calls)
        and not {each.answers for each in named} & {call.id for call in calls}
    ):
        return found[index]
    same = [at for at, call in enumerate(calls) if call.id == wanted]
    alike = [each for each in found if each.answers == wanted]
    return alike[same.index(index)] if len(alike) == len(same) else None
