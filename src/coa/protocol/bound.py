"""A grammar with the tools that a trajectory names: what it was written under.

And what the blocks of tools are called whose own names are none of a block.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from functools import cache

from coa.protocol.grammar import Grammar, Role, is_block_name
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


def block_names(names: Iterable[str], taken: Container[str]) -> dict[str, str]:
    """Tool -> block: `Math.Hypot` becomes `math_hypot`; no two are the same, and none is taken."""
    found: dict[str, str] = {}
    for name in names:
        block = re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_")
        if not is_block_name(block) or block in taken:
            block = f"call_{block}"
        while block in found.values() or block in taken:
            block += "_2"
        found[name] = block
    return found
