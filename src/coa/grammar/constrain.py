"""The language of one model turn, as a Lark grammar for llguidance.

A turn starts where the trajectory stands and ends when a call or an answer closes. The rules are
found by walking `Grammar.allowed` and `Grammar.advance` themselves, so a turn sampled under them is
one that the state machine accepts: interleaved thoughts, obligatory plans and answers included. A
block whose body decides what follows (ratings, a score) becomes two terminals, one per outcome.

Three choices keep it simple and fast.
- Bodies are bounded in characters and a turn in blocks, so every turn ends.
- In a body, `<` is never followed by a small letter or a slash: no tag can appear, `a < b` can.
  A program is freer (`i<n`), but holds no backtick, no `</` and no start of an observation's tag.
- Ratings and scores stand at the end of their body, where they win over anything said before.

Observations are outside: the next turn has a grammar of its own. That an answer repeats the
suggestion is not enforced; it is not a property of a context-free language.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from coa.errors import GrammarError
from coa.grammar.grammar import Block, Grammar, GrammarState, Role

_CONTROL = r"\x00-\x08\x0B-\x1F\x7F"
_PLAIN = rf"[^<{_CONTROL}]|<{{1,3}}[^<a-z\/{_CONTROL}]"
_WORD = rf"[^\s<{_CONTROL}]"
_JSON_CHAR = r"[^\"\\<\x00-\x1F\x7F]|\\[\"\\\/bfnrt]"
_JSON_MEMBERS = 8
_JSON_STRING = 120
_TOP_SCORE = 4

Schemas = tuple[tuple[str, str], ...]
"""(tool role, JSON schema of its arguments as JSON text): a value that can be a cache's key."""


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Longest bodies in characters, and most blocks of one turn, thoughts included."""

    text: int = 320
    """Thoughts, plans, reflections, and what is said before a score."""
    call: int = 160
    """A tool's argument, a suggestion, an answer."""
    code: int = 1200
    blocks: int = 12

    @classmethod
    def within(cls, tokens: int) -> TextLimits:
        """Limits under which a usual turn ends within `tokens`; small turns are still sentences."""
        text = max(180, tokens * 5 // 8)
        return cls(text=text, call=max(80, text // 2), code=max(600, tokens * 9 // 4))


class _Form(NamedTuple):
    """One way to write a block: its symbol, what it stands for, and a body of that form."""

    symbol: str
    definition: str
    example: str


def turn_grammar(
    grammar: Grammar,
    state: GrammarState,
    limits: TextLimits | None = None,
    schemas: Schemas = (),
    ends: tuple[str, ...] = (),
) -> str:
    """The Lark grammar of one model turn from `state`; `grammar` must be bound to its tools. `ends`
    are the roles that may end it, where not all may."""
    state = replace(state, suggestion=None)
    return _turn_grammar(grammar, state, limits or TextLimits(), schemas, ends)


@lru_cache(maxsize=1024)
def _turn_grammar(
    grammar: Grammar,
    state: GrammarState,
    limits: TextLimits,
    schemas: Schemas,
    ends: tuple[str, ...],
) -> str:
    if state.ended:
        raise GrammarError(
            f"grammar {grammar.name!r}: no model turn can start here; "
            + ("the answer was given." if state.done else "an observation is due.")
        )
    return _TurnGrammar(grammar, limits, dict(schemas), ends).lark(state)


class _TurnGrammar:
    """Collects the rules and terminals of one turn."""

    def __init__(
        self,
        grammar: Grammar,
        limits: TextLimits,
        schemas: dict[str, str],
        ends: tuple[str, ...],
    ) -> None:
        self._grammar, self._limits, self._ends = grammar, limits, ends
        self._forms = {
            role.name: tuple(_forms(grammar, role, limits, schemas.get(role.name, "")))
            for role in grammar.roles
        }
        self._distance: dict[GrammarState, int] = {}
        self._rules: dict[tuple[GrammarState, int], str] = {}
        self._lines: list[str] = []
        self._used: dict[str, str] = {}

    def lark(self, start: GrammarState) -> str:
        self._measure(start)
        if start not in self._distance:
            raise GrammarError(
                f"grammar {self._grammar.name!r}: after {start.last!r} no call and no answer can "
                "be reached, so a turn could not end."
            )
        first = self._rule(start, max(self._limits.blocks, self._distance[start]))
        forms = [f"{symbol}: {definition}" for symbol, definition in self._used.items()]
        shared = _text_terminals(self._limits)
        used = " ".join(self._used.values())
        if "J_OBJECT" in used:
            shared += _json_terminals()
        if "OPEN_CALLS" in used:
            shared += _tag_terminals("CALLS", self._grammar.call)
        return "\n".join([f"start: {first}", *self._lines, *forms, *shared, ""])

    def _moves(self, state: GrammarState) -> Iterator[tuple[_Form, GrammarState]]:
        """Every form that may come next, with the state after it."""
        for name in self._grammar.allowed(state):
            for form in self._forms[name]:
                moved = self._grammar.advance(state, Block(name, form.example))
                assert isinstance(moved, GrammarState), (state, name, form.example, moved)
                if not (moved.ended and self._ends and name not in self._ends):
                    yield form, replace(moved, suggestion=None)

    def _measure(self, start: GrammarState) -> None:
        """How many blocks each state is from the end of the turn; states that are stuck are out."""
        after: dict[GrammarState, set[GrammarState]] = {}
        frontier = [start]
        while frontier:
            state = frontier.pop()
            if state not in after:
                after[state] = set() if state.ended else {s for _, s in self._moves(state)}
                frontier += after[state]
        known, layer, steps = self._distance, [state for state in after if state.ended], 0
        while layer:
            known |= dict.fromkeys(layer, steps)
            layer = [s for s in after if s not in known and not after[s].isdisjoint(known)]
            steps += 1

    def _rule(self, state: GrammarState, left: int) -> str:
        """The name of the rule for what may be written from `state` in `left` blocks."""
        key = (state, left)
        if key in self._rules:
            return self._rules[key]
        name = self._rules[key] = f"turn{len(self._rules)}"
        options = []
        for form, after in self._moves(state):
            if self._distance.get(after, left) > left - 1:
                continue  # nothing would lead to the end in the blocks that are left
            self._used[form.symbol] = form.definition
            if after.ended:
                options.append(f"{form.symbol} END?")
            else:
                options.append(f"{form.symbol} {self._rule(after, left - 1)}")
        self._lines.append(f"{name}: " + " | ".join(options))
        return name


# -- terminals ----------------------------------------------------------------------------------


def _text_terminals(limits: TextLimits) -> list[str]:
    """What blocks are made of. END: the last token may hold its tag and a line break."""
    return [
        r'END: "\n"',
        r"GAP: /[ \n]{0,2}/",
        f"TEXT: GAP /{_WORD}({_PLAIN}){{0,{limits.text - 1}}}/",
        f"CALL: GAP /{_WORD}({_PLAIN}){{0,{limits.call - 1}}}/",
    ]


def _json_terminals() -> list[str]:
    """A JSON object of bounded size; what it holds is flat."""

    def listed(item: str) -> str:
        return f'(GAP {item} (GAP "," GAP {item}){{0,{_JSON_MEMBERS - 1}}})? GAP'

    return [
        rf'J_STRING: /"({_JSON_CHAR}){{0,{_JSON_STRING}}}"/',
        r"J_NUMBER: /-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,14})?/",
        'J_ATOM: J_STRING | J_NUMBER | "true" | "false" | "null"',
        'J_FLAT: J_STRING GAP ":" GAP J_ATOM',
        f'J_LIST: "[" {listed("J_ATOM")} "]"',
        f'J_MAP: "{{" {listed("J_FLAT")} "}}"',
        'J_PAIR: J_STRING GAP ":" GAP (J_ATOM | J_LIST | J_MAP)',
        f'J_OBJECT: "{{" {listed("J_PAIR")} "}}"',
    ]


def _forms(grammar: Grammar, role: Role, limits: TextLimits, schema: str) -> Iterator[_Form]:
    """The ways to write a role's block, one per outcome."""
    symbol = f"B_{role.name.upper()}"

    def block(body: str) -> str:
        return f'GAP "<{role.name}>" {body} "</{role.name}>"'

    if role.ratings:
        names = [" ".join(name.split()) for name in role.ratings]
        told = "\n".join(f"{name}: {{0}}" for name in names)
        yield _Form(f"{symbol}__FINE", block(_rated(names, poor=False)), told.format("good"))
        yield _Form(f"{symbol}__POOR", block(_rated(names, poor=True)), told.format("poor"))
    elif role.pass_score:
        low, top = role.pass_score, _TOP_SCORE
        yield _Form(f"{symbol}__PASS", block(_scored(low, top)), f"Score: {top}")
        if low > 1:
            yield _Form(f"{symbol}__FAIL", block(_scored(1, low - 1)), "Score: 1")
    elif grammar.tag(role.name) != role.name:
        # A program inside a JSON string holds no `<` then: schemas cannot say what may follow it.
        rule = f"OPEN_CALLS %json {json.dumps(_called(role, schema, limits))} CLOSE_CALLS"
        yield _Form(symbol.lower(), rule, "{}" if role.body == "json" else "x")
    elif role.body == "code":
        yield _Form(symbol, block(_fenced(grammar, limits)), "```py\n1\n```")
    elif role.body == "json" and schema:  # a rule, in small letters: schemas are no terminals
        tags = _tag_terminals(role.name.upper(), role.name)
        rule = f"OPEN_{role.name.upper()} %json {json.dumps(_guarded(json.loads(schema)))} "
        rule += f"CLOSE_{role.name.upper()}"
        yield _Form(symbol.lower(), "\n".join([rule, *tags]), "{}")
    elif role.body == "json":
        yield _Form(symbol, block("GAP J_OBJECT GAP"), "{}")
    else:
        short = role.kind in ("tool", "suggestion", "answer")
        yield _Form(symbol, block("CALL" if short else "TEXT"), "x")


def _tag_terminals(symbol: str, tag: str) -> list[str]:
    """Tags around JSON are whole terminals, as other blocks are: one that began with a line break
    of its own would be lost where another block may stand after the same line break."""
    return [f'OPEN_{symbol}: GAP "<{tag}>" GAP', f'CLOSE_{symbol}: GAP "</{tag}>"']


def _called(role: Role, schema: str, limits: TextLimits) -> Any:
    """The schema of a call in a grammar where calls are JSON."""
    if role.body != "json":
        longest, line = (limits.code, "") if role.body == "code" else (limits.call, r"\x00-\x1F")
        text = {"type": "string", "pattern": f"^[^<{line}]{{1,{longest}}}$"}
        arguments = _table({role.only: text})
    elif schema:
        arguments = _guarded(json.loads(schema))
    else:
        flat = [_guarded({"type": "string"}), {"type": "number"}, {"type": "boolean"}]
        arguments = {"type": "object", "additionalProperties": {"anyOf": flat}}
    shared = arguments.pop("$defs", None)  # references begin at the root
    called = _table({"name": {"const": role.name}, "arguments": arguments})
    return called | ({"$defs": shared} if shared else {})


def _table(properties: dict[str, Any]) -> Any:
    """The schema of an object that has just these."""
    named = {"properties": properties, "required": [*properties]}
    return {"type": "object", **named, "additionalProperties": False}


def _rated(names: list[str], poor: bool) -> str:
    """Ratings at the end of a body: with at least one poor, or with none."""
    fine, every = "(good|average)", "(good|average|poor)"
    labels = [json.dumps(("\n" if at else "") + f"{name}: ") for at, name in enumerate(names)]
    choices = []
    for first_poor in range(len(names)) if poor else [len(names)]:
        words = ([fine] * first_poor + ["poor"] + [every] * len(names))[: len(names)]
        rated = zip(labels, words, strict=True)
        choices.append(" ".join(f"{label} /{word}/" for label, word in rated))
    return f'(TEXT "\\n" | GAP) ({" | ".join(choices)}) /\\n?/'


def _scored(low: int, high: int) -> str:
    """A score at the end of a body."""
    return f'(TEXT "\\n" | GAP) "Score: " /[{low}-{high}]/ /\\n?/'


def _fenced(grammar: Grammar, limits: TextLimits) -> str:
    """A program in a fence, and its standard input in a second one if there is any."""
    first = grammar.observation[0]
    char = rf"[^<`{_CONTROL}]|<{{1,3}}[^<`{first}\/{_CONTROL}]"
    program = rf"/[^\s<`{_CONTROL}]({char}){{0,{limits.code - 1}}}/"
    stdin = rf"/({char}){{0,{limits.call}}}/"
    closing = '"\\n```"'
    second = f'"\\n```sh\\n" {stdin} {closing}'
    return f'GAP "```py\\n" {program} {closing} ({second})? GAP'


_VALUES = ("enum", "const", "default", "examples")
"""Keywords of a schema that hold values and no schemas."""


def schema_fault(schema: str) -> str:
    """Why constrained decoding cannot follow a schema; empty: it can, as far as is known here."""
    try:
        from llguidance import LLMatcher
    except ImportError:  # whoever samples has it
        return ""
    guarded = json.dumps(_guarded(json.loads(schema)))
    fault = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(guarded))
    return str(fault).strip().partition("\n")[0]


def _guarded(schema: Any) -> Any:
    """A schema whose strings hold no `<` and have an end, so that no tag can stand in them."""
    if isinstance(schema, list):
        return [_guarded(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    guarded = {k: v if k in _VALUES else _guarded(v) for k, v in schema.items()}
    kind = schema.get("type")
    texts = kind == "string" or (isinstance(kind, list) and "string" in kind)
    if texts and not {"enum", "const", "pattern", "format"} & set(schema):
        shortest, longest = schema.get("minLength", 0), schema.get("maxLength", _JSON_STRING)
        longest = min(longest, _JSON_STRING) if isinstance(longest, int) else _JSON_STRING
        shortest = min(shortest, longest) if isinstance(shortest, int) else 0
        guarded = {k: v for k, v in guarded.items() if k not in ("maxLength", "minLength")}
        guarded["pattern"] = f"^[^<\\x00-\\x1F]{{{shortest},{longest}}}$"
    elif kind == "object":
        guarded.setdefault("additionalProperties", False)
    elif kind == "array":
        guarded.setdefault("maxItems", _JSON_MEMBERS)
    return guarded
