"""The chain-of-agents protocol: one Grammar value, and everything that is read from it."""

from coa.protocol.constrain import Limits, turn_grammar
from coa.protocol.grammar import Block, Fault, FaultKind, Grammar, Role, State
from coa.protocol.load import PRESETS, grammar_from_toml, load_grammar
from coa.protocol.parse import (
    Code,
    Event,
    Parsed,
    Splitter,
    alternatives,
    check,
    parse,
    parse_code,
)
from coa.protocol.prompt import PromptKind, system_prompt
from coa.protocol.scores import parse_ratings, parse_score

__all__ = [
    "PRESETS",
    "Block",
    "Code",
    "Event",
    "Fault",
    "FaultKind",
    "Grammar",
    "Limits",
    "Parsed",
    "PromptKind",
    "Role",
    "Splitter",
    "State",
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
