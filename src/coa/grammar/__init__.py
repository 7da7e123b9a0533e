"""The chain-of-agents protocol: one Grammar value, and everything that is read from it."""

from __future__ import annotations

from coa.grammar.constrain import TextLimits, turn_grammar
from coa.grammar.grammar import (
    Block,
    Fault,
    FaultKind,
    Grammar,
    GrammarState,
    Role,
    parse_ratings,
    parse_score,
)
from coa.grammar.load import PRESETS, grammar_from_toml, load_grammar
from coa.grammar.parse import (
    Event,
    Parsed,
    Splitter,
    alternatives,
    check,
    parse,
    parse_code,
)
from coa.grammar.prompt import ChatMessage, PromptKind, system_prompt

__all__ = [
    "PRESETS",
    "Block",
    "ChatMessage",
    "Event",
    "Fault",
    "FaultKind",
    "Grammar",
    "GrammarState",
    "Parsed",
    "PromptKind",
    "Role",
    "Splitter",
    "TextLimits",
    "alternatives",
    "check",
    "grammar_from_toml",
    "load_grammar",
    "parse",
    "parse_code",
    "parse_ratings",
    "parse_score",
    "system_prompt",
    "turn_grammar",
]
