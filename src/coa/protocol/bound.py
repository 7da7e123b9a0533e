"""A grammar with the tools that a trajectory names: what it was written under."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from coa.protocol.grammar import Grammar, Role
from coa.protocol.load import load_grammar


def bound_to(grammar: Grammar, tools: Sequence[str]) -> Grammar:
    """The grammar with these tools; where none is named, as it is.

    Tools that the grammar knows keep what it says of them. Of others a record has no more than the
    name, so their blocks are plain text.
    """
    return grammar.with_tools([Role(name, "tool") for name in tools]) if tools else grammar


@cache
def load_bound(grammar: str, tools: tuple[str, ...]) -> Grammar:
    """`bound_to`, from a preset's name or a file; read once."""
    return bound_to(load_grammar(grammar), tools)
