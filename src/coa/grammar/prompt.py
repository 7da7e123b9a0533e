"""Prompts written from the grammar.

`full` tells a model that was never trained on the protocol everything it needs: each block, who
writes it, what may follow what, what a score forces, and one worked example with the tools at hand:
small models copy what they are shown, so nothing in it stands for something else. `compact` only
names the blocks, for a model that was trained on them: every prompt token is paid for in each row
of training. Tools that the grammar did not know before it was bound have a line each in both.

What was said before the question stands at the end of either, a line or more for each message. A
prompt without such messages has nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from coa.grammar.grammar import Block, Grammar, GrammarState, Role

PromptKind = Literal["full", "compact"]
Speaker = Literal["system", "user", "assistant", "tool"]
EARLIER = "\n\nEarlier messages, oldest first:\n"
"""Between a prompt and what was said before the question."""


class ChatMessage(NamedTuple):
    """One message of a conversation, as chat models take them."""

    role: Speaker
    text: str


def system_prompt(
    grammar: Grammar, kind: PromptKind = "compact", history: Sequence[ChatMessage] = ()
) -> str:
    """The system prompt for a grammar; `history` is what was said before the question."""
    prompt = _full(grammar) if kind == "full" else _compact(grammar)
    return prompt + earlier(grammar, history)


def earlier(grammar: Grammar, history: Sequence[ChatMessage]) -> str:
    """What a prompt says of earlier messages, in which nothing reads as a tag; nothing where there
    are none."""
    return f"{EARLIER}{grammar.escape(conversation(history))}" if history else ""


def conversation(history: Sequence[ChatMessage]) -> str:
    """Messages as text. A line that goes on with one is indented, so that only a message begins at
    the margin."""
    return "\n".join("\n  ".join(f"{role}: {text}".splitlines()) for role, text in history)


def _compact(grammar: Grammar) -> str:
    """Names of blocks, and of tools where these have none, and a line for each tool that says more
    than its name."""
    signed = {role.name: role.signature for role in grammar.roles if role.signature}
    listed = " ".join(f"<{name}>" for name in grammar.tagged if name not in signed)
    said = f"{grammar.brief or 'Answer the question in blocks.'} Blocks: {listed}"
    if grammar.call and (plain := [name for name in grammar.tool_roles if name not in signed]):
        said += f" Tools: {' '.join(plain)}"
    shown = "{}" if grammar.call else "<{}>"
    lines = (f"\n{shown.format(name)} {signature}" for name, signature in signed.items())
    return f"{said}\nTools:{''.join(lines)}" if signed else said


def _full(grammar: Grammar) -> str:
    parts = [
        grammar.preamble.strip(),
        "Write a sequence of blocks. A block begins with its tag and ends with the same tag "
        "closed, as in the example. Nothing stands outside a block, blocks never nest, and block "
        "names never appear inside a block's text.",
        "Blocks:\n" + "\n".join(_blocks(grammar)),
        "Order:\n" + "\n".join(f"- {line}" for line in _order(grammar)),
        _example(grammar),
    ]
    return "\n\n".join(part for part in parts if part)


def _blocks(grammar: Grammar) -> Iterator[str]:
    """What each block is for; tools that share a tag are listed below it."""
    for name, role in grammar.tagged.items():
        if name != grammar.call:
            yield f"- <{name}>: {_describe(grammar, role)}"
            continue
        yield f"- <{name}>: call a tool; a JSON object with its name and its arguments. The tools:"
        for tool in map(grammar.by_name.__getitem__, grammar.tool_roles):
            takes = "" if tool.body == "json" else f" It stands under {json.dumps(tool.only)}."
            yield f"  - {tool.name}: {_describe(grammar, tool)}{takes}"
    yield (
        f"- <{grammar.observation}>: what a tool returned. The environment writes it after "
        "your call; never write it yourself."
    )


def _describe(grammar: Grammar, role: Role) -> str:
    text = role.about.strip().rstrip(".") or role.hint or role.kind
    plan, answer = (grammar.choice(grammar.of_kind(kind)) for kind in ("plan", "answer"))
    if role.ratings:
        text += (
            f"; rate each of {', '.join(role.ratings)} as good, average or poor; "
            f"if any is poor, the next block is {plan}"
        )
    if role.kind == "delegation":
        text += "; the content is the job, and you go on as the one who does it"
    if role.pass_score:
        text += (
            "; score the suggestion from 1 (wrong) to 4 (right); "
            f"{role.pass_score} or more: write {answer} with it; less: go back to {plan}"
        )
    return text + "."


def _order(grammar: Grammar) -> list[str]:
    lines = [f"begin with {grammar.choice(grammar.expand(grammar.start))}"]
    if grammar.interleave:
        when = "may come" if grammar.sparing else "comes"
        lines.insert(0, f"<{grammar.interleave}> {when} before every other block")
    for role in grammar.roles:
        if role.next:
            after = grammar.choice([role.name])
            lines.append(f"after {after}: {grammar.choice(grammar.expand(role.next))}")
    ends = f"{grammar.choice(grammar.of_kind('answer'))} ends the work"
    return [*dict.fromkeys(lines), ends]


# -- a worked example -------------------------------------------------------------------------


class _Case(NamedTuple):
    """A small task that one call of a tool solves."""

    question: str
    body: str
    observed: str
    answer: str
    sought: str


_LOOK_UP = _Case(
    "Who founded the town of Arlen?",
    "founder of Arlen",
    "Arlen was founded by Mira Holt in 1871.",
    "Mira Holt",
    "the founder of Arlen",
)
_RECKONED = _Case("What is 12 times 34?", "```py\nprint(12 * 34)\n```", "408", "408", "12 times 34")
_PAGE = "https://example.org/arlen"


def _example(grammar: Grammar) -> str:
    """One chain from the question to the answer, by the shortest way that calls a tool once."""
    way = _shortest(grammar)
    called = next((grammar.by_name[name] for name in way if name in grammar.tool_roles), None)
    case = _case(called)
    chain = []
    for at, name in enumerate(way):
        after = grammar.by_name.get(way[at + 1]) if at + 1 < len(way) else None
        observed = name == grammar.observation
        body = case.observed if observed else _body(grammar, name, after, case)
        chain.append(Block(name, body))
    shown = grammar.render(chain)
    written = f"; the environment wrote <{grammar.observation}>" * (called is not None)
    return f"An example with another question, {json.dumps(case.question)}{written}:\n{shown}"


def _case(tool: Role | None) -> _Case:
    """A task for a tool: what it is given follows from its kind, its hint or its schema."""
    if tool is None or (tool.body == "text" and not tool.example):
        words = f"{tool.name} {tool.only} {tool.hint}".lower() if tool else ""
        opens = any(word in words for word in ("url", "address", "page"))
        return _LOOK_UP._replace(body=_PAGE) if opens else _LOOK_UP
    if tool.body == "code":
        return _RECKONED
    body = tool.example or "{}"
    question = f"What does {tool.name} return for {body}?"
    return _Case(question, body, "17", "17", f"what {tool.name} returns for it")


def _body(grammar: Grammar, name: str, after: Role | None, case: _Case) -> str:
    """What a block of the example holds; a thought is about the block after it."""
    role = grammar.by_name[name]
    if role.kind == "think":
        kind = after.kind if after else ""
        calls = f"I use {after.name} to find out {case.sought}." if after else ""
        return {
            "tool": calls,
            "plan": "First I decide what has to be found out.",
            "delegation": "I hand this over.",
            "suggestion": f"I write down {case.sought}." if case is _RECKONED else "",
            "reflection": "I look at what came back.",
            "check": "I check it against what came back.",
        }.get(kind) or f"I know {case.sought} now."
    if role.kind == "reflection":
        rated = "".join(f" {each}: good." for each in role.ratings)
        return f"The result tells {case.sought}.{rated}"
    if role.kind == "check":
        return f"The result says so.{' Score: 4' * bool(role.pass_score)}"
    if role.kind in ("suggestion", "answer"):
        return case.body if role.body == "code" else case.answer
    return {
        "plan": f"1. Find out {case.sought}. 2. Answer with it.",
        "tool": case.body,
        "delegation": f"Find out {case.sought}.",
    }[role.kind]


def _shortest(grammar: Grammar) -> Sequence[str]:
    """Names of the blocks of the shortest legal chain that calls a tool, where there is any, with
    all thoughts that may be in it."""
    grammar = replace(grammar, sparing=False)
    goal = bool(grammar.tool_roles)
    frontier: list[tuple[GrammarState, tuple[str, ...]]] = [(GrammarState(), ())]
    seen = set[tuple[GrammarState, bool]]()
    while frontier:
        state, way = frontier.pop(0)
        called = grammar.observation in way
        if state.done and called == goal:
            return way
        if (state, called) in seen:
            continue
        seen.add((state, called))
        for name in grammar.allowed(state):
            after = None if name == grammar.observation else grammar.by_name[name]
            body = _body(grammar, name, after, _LOOK_UP) if after else "x"
            moved = grammar.advance(state, Block(name, body))
            if isinstance(moved, GrammarState):
                frontier.append((moved, (*way, name)))
    return ()
