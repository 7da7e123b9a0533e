"""Prompts written from the grammar.

`full` tells a model that was never trained on the protocol everything it needs: each block, who
writes it, what may follow what, what a score forces. `compact` only names the blocks, for a model
that was trained on them: every prompt token is paid for in each row of training. Tools that the
grammar did not know before it was bound have a line each in both.

What was said before the question stands at the end of either, a line or more for each message. A
prompt without such messages has nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from coa.grammar.grammar import Grammar, Role

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
    listed = " ".join(f"<{role.name}>" for role in grammar.roles if not role.signature)
    tools = [f"\n<{role.name}> {role.signature}" for role in grammar.roles if role.signature]
    opening = f"{grammar.brief or 'Answer the question in blocks.'} Blocks: {listed}"
    return f"{opening}\nTools:{''.join(tools)}" if tools else opening


def _full(grammar: Grammar) -> str:
    blocks = [f"- <{role.name}>: {_describe(grammar, role)}" for role in grammar.roles]
    blocks.append(
        f"- <{grammar.observation}>: what a tool returned. The environment writes it after "
        "your call; never write it yourself."
    )
    parts = [
        grammar.preamble.strip(),
        "Write a sequence of blocks, each as <name>content</name>. Nothing stands outside a block, "
        "blocks never nest, and block names never appear inside a block's text.",
        "Blocks:\n" + "\n".join(blocks),
        "Order:\n" + "\n".join(f"- {line}" for line in _order(grammar)),
    ]
    return "\n\n".join(part for part in parts if part)


def _either(names: Iterable[str]) -> str:
    return " or ".join(f"<{name}>" for name in names)


def _describe(grammar: Grammar, role: Role) -> str:
    text = role.about.strip().rstrip(".") or role.hint or role.kind
    plan, answer = (_either(grammar.of_kind(kind)) for kind in ("plan", "answer"))
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
    lines = [f"begin with {_either(grammar.expand(grammar.start))}"]
    if grammar.interleave:
        when = "may come" if grammar.sparing else "comes"
        lines.insert(0, f"<{grammar.interleave}> {when} before every other block")
    for role in grammar.roles:
        if role.next:
            lines.append(f"after <{role.name}>: {_either(grammar.expand(role.next))}")
    return [*lines, f"{_either(grammar.of_kind('answer'))} ends the work"]
