"""Prompts written from the grammar.

`full` tells a model that was never trained on the protocol everything it needs: each block, who
writes it, what may follow what, what a score forces. `compact` only names the blocks, for a model
that was trained on them: every prompt token is paid for in each row of training.
"""

from __future__ import annotations

from typing import Literal

from coa.grammar.grammar import Grammar, Role

PromptKind = Literal["full", "compact"]
_RATING_RULE = (
    "rate each of {names} as good, average or poor; if any is poor, the next block is {plan}"
)
_SCORE_RULE = (
    "score the suggestion from 1 (wrong) to 4 (right); {at_least} or more: write {answer} "
    "with it; less: go back to {plan}"
)


def system_prompt(grammar: Grammar, kind: PromptKind = "compact") -> str:
    """The system prompt for a grammar."""
    return _full(grammar) if kind == "full" else _compact(grammar)


def _tag(name: str) -> str:
    return f"<{name}>"


def _compact(grammar: Grammar) -> str:
    listed = " ".join(f"<{r.name}>" for r in grammar.roles)
    brief = grammar.brief or "Answer the question in blocks."
    return f"{brief} Blocks: {listed}"


def _full(grammar: Grammar) -> str:
    parts = [grammar.preamble.strip()] if grammar.preamble.strip() else []
    parts.append(
        "Write a sequence of blocks, each as <name>content</name>. Nothing stands outside a block, "
        "blocks never nest, and block names never appear inside a block's text."
    )
    blocks = [f"- {_tag(role.name)}: {_describe(grammar, role)}" for role in grammar.roles]
    blocks.append(
        f"- {_tag(grammar.observation)}: what a tool returned. The environment writes it after "
        "your call; never write it yourself."
    )
    parts.append("Blocks:\n" + "\n".join(blocks))
    parts.append("Order:\n" + "\n".join(f"- {line}" for line in _order(grammar)))
    return "\n\n".join(parts)


def _describe(grammar: Grammar, role: Role) -> str:
    text = role.about.strip().rstrip(".") or role.hint or role.kind
    if role.ratings:
        plan = " or ".join(map(_tag, grammar.of_kind("plan")))
        text += "; " + _RATING_RULE.format(names=", ".join(role.ratings), plan=plan)
    if role.pass_score:
        text += "; " + _SCORE_RULE.format(
            at_least=role.pass_score,
            answer=" or ".join(map(_tag, grammar.of_kind("answer"))),
            plan=" or ".join(map(_tag, grammar.of_kind("plan"))),
        )
    return text + "."


def _order(grammar: Grammar) -> list[str]:
    def either(names: tuple[str, ...]) -> str:
        return " or ".join(_tag(name) for name in grammar.expand(names))

    lines = []
    if grammar.interleave:
        lines.append(f"{_tag(grammar.interleave)} comes before every other block")
    lines.append(f"begin with {either(grammar.start)}")
    for role in grammar.roles:
        if role.next:
            lines.append(f"after {_tag(role.name)}: {either(role.next)}")
    answers = " or ".join(_tag(name) for name in grammar.of_kind("answer"))
    lines.append(f"{answers} ends the work")
    return lines
