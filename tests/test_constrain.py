"""Constrained decoding: whatever the grammar of a turn allows, the state machine accepts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from coa.errors import GrammarError
from coa.grammar import PRESETS, Block, Grammar, GrammarState, Role, TextLimits, load_grammar, parse
from coa.grammar import turn_grammar as lark_of
from coa.grammar.grammar import parse_ratings, parse_score
from coa.tools import Tool, Toolbox
from walker import legal_blocks

llguidance = pytest.importorskip("llguidance")

SHORT = TextLimits(text=40, call=20, code=50)
NASTY = (
    *(
        "Information Conflict",
        "Tool Effectiveness",
        "Trajectory Monitoring",
        "poor",
        "good",
        "not ",
    ),
    *(
        "Score: ",
        "score",
        "Rating ",
        "give the",
        " out of ",
        "/4",
        "1 to 4",
        "1-",
        "-4",
        "no ",
        "one",
    ),
    *("```", "```py\n", "\n```", "```sh\n", "<", "</", "<<", "< ", "<=", ">", "\n", "  ", "\n\n"),
    *("<think>", "</think>", "<answer>", "</answer>", "</code>", "<observation>", "</observation>"),
    *(
        "<o",
        "<b",
        "</p",
        "><",
        ">\n",
        "\u00a0",
        "\u2028",
        "\u3000",
        "\x85",
        "\x1c",
        '{"',
        '": "',
        "\\",
    ),
)


class Vocabulary:
    """Every byte, and pieces chosen to mislead whoever reads scores, fences and tags."""

    eos_token_id, bos_token_id, special_token_ids = 0, None, (0,)
    tokens = (b"<eos>", *(bytes([i]) for i in range(256)), *(word.encode() for word in NASTY))

    def __call__(self, text: bytes) -> list[int]:
        return [byte + 1 for byte in text]


@cache
def tokenizer() -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary()), slices=[])


@cache
def compiled(lark: str) -> Any:
    matcher = llguidance.LLMatcher(tokenizer(), llguidance.LLMatcher.grammar_from_lark(lark))
    assert not matcher.is_error(), matcher.get_error()
    assert not matcher.get_grammar_warnings()
    return matcher


def sample(lark: str, stops: Sequence[str], rng: random.Random) -> str:
    """A random text of the grammar, ended as an engine ends it: where a stop string completes."""
    matcher, said = compiled(lark).deep_copy(), b""
    for _ in range(4000):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        ids = [i for i in range(len(Vocabulary.tokens)) if bits >> i & 1]
        assert ids, said
        closing = [i for i in ids if Vocabulary.tokens[i] in (b"<", b"</")]
        token = rng.choice(closing if closing and rng.random() < 0.1 else ids)
        assert token != Vocabulary.eos_token_id, said
        assert matcher.consume_token(token), matcher.get_error()
        said += Vocabulary.tokens[token]
        if any(stop.encode() in said[-40:] for stop in stops):
            return said.decode()
    raise AssertionError("the turn has no end")


def take_turn(
    grammar: Grammar, state: GrammarState, rng: random.Random, **options: Any
) -> GrammarState:
    """Sample a turn from `state` and read it as the runtime does."""
    text = sample(lark_of(grammar, state, SHORT, **options), grammar.stop_strings, rng)
    parsed = parse(grammar, text)
    assert not parsed.faults and parsed.blocks, (text, parsed.faults)
    for block in parsed.blocks:
        moved = grammar.advance(state, block)
        assert isinstance(moved, GrammarState), (text, moved)
        state = moved
    assert state.awaiting or state.done, text
    return state


@pytest.mark.parametrize("name", PRESETS)
def test_trajectories_sampled_from_the_grammar_are_legal(name: str) -> None:
    grammar, rng = load_grammar(name), random.Random(name)
    for _ in range(12):
        state = GrammarState()
        for _ in range(6):
            state = take_turn(grammar, state, rng)
            if state.done:
                break
            moved = grammar.advance(state, Block(grammar.observation, "found"))
            assert isinstance(moved, GrammarState)
            state = moved


@pytest.mark.parametrize("name", PRESETS)
def test_a_turn_can_start_from_every_state(name: str) -> None:
    """Also from the middle of a turn: that is where an explained mistake leaves a trajectory."""
    grammar, rng = load_grammar(name), random.Random(name)
    states = {GrammarState()}
    for _ in range(30):
        state = GrammarState()
        for block in legal_blocks(grammar, rng):
            moved = grammar.advance(state, block)
            assert isinstance(moved, GrammarState)
            state = moved
            states.add(state)
    for state in sorted(states, key=repr)[:60]:
        if not state.awaiting and not state.done:
            take_turn(grammar, state, rng)


def test_scores_and_ratings_decide_what_follows() -> None:
    grammar, rng = load_grammar("web"), random.Random(1)
    rated = GrammarState(last="web_search", thought=True)
    checked = GrammarState(last="suggested_answer", thought=True)
    names = grammar.by_name["reflection"].ratings
    seen: set[tuple[str, bool]] = set()
    for _ in range(150):
        for state in (rated, checked):
            lark = lark_of(grammar, state, SHORT)
            blocks = parse(grammar, sample(lark, grammar.stop_strings, rng)).blocks
            first, then = blocks[0], [b.role for b in blocks if b.role != "think"][1:2]
            if first.role == "double_check":
                score = parse_score(first.body)
                assert score is not None
                assert then == ["answer" if score >= 3 else "plan"]
                seen.add((first.role, score >= 3))
            elif first.role == "reflection":
                ratings = parse_ratings(first.body, names)
                assert ratings is not None
                poor = "poor" in ratings.values()
                assert not poor or then == ["plan"]
                seen.add((first.role, poor))
    assert len(seen) == 4


def test_a_turn_without_an_end_of_its_own_is_bounded() -> None:
    """A failed check leads to a plan, and back to a check: in the end only a call is left."""
    grammar = load_grammar("web")
    fail = "<think>a</think><plan>b</plan><think>c</think><suggested_answer>d</suggested_answer>"
    fail += "<think>e</think><double_check>Score: 1</double_check>"
    matcher = compiled(lark_of(grammar, GrammarState())).deep_copy()
    ids = [byte + 1 for byte in (fail * 2).encode()]
    refused = (fail * 2)[: matcher.try_consume_tokens(ids)]
    assert refused == fail + "<think>a</think><plan>b</plan><think>c</think><"


def accepts(lark: str, text: str) -> bool:
    matcher = compiled(lark).deep_copy()
    ids = [byte + 1 for byte in text.encode()]
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


def test_what_bodies_may_hold() -> None:
    mhqa = lark_of(load_grammar("mhqa"), GrammarState(last="plan"))
    turn = "<think> {}</think>\n<answer> {}</answer>"
    for body in ("a < b", "1 << 2 <= 3", "\u6771\u4eac", "caf\u00e9 ``` {}", "x <B>", "x" * 320):
        assert accepts(mhqa, turn.format(body, "Paris")), body
    for body in ("<b>", "</x", "<<think>", "", "  ", "\u00a0", "a\x00", "x" * 321):
        assert not accepts(mhqa, turn.format(body, "Paris")), body
    assert accepts(mhqa, turn.format("t", "Paris|Lutetia") + "\n")
    assert not accepts(mhqa, turn.format("t", " \u3000"))


def test_programs_stand_in_fences() -> None:
    lark = lark_of(load_grammar("code"), GrammarState(last="think"))
    for body in (
        "\n```py\nprint(1)\n```\n",
        " ```py\nwhile i<n and a<=b: i<<=1\n```\n```sh\n1 2\n```",
        "```py\ns = '<think>'\n```",
    ):
        assert accepts(lark, f"<code>{body}</code>"), body
        assert not parse(load_grammar("code"), f"<code>{body}</code>").faults
    for body in (
        "print(1)",
        "```py\n\n```",
        "```py\ns = '</code>'\n```",
        "```py\n`\n```",
        "```py\nx",
    ):
        assert not accepts(lark, f"<code>{body}</code>"), body


def test_json_arguments_without_and_with_a_schema() -> None:
    grammar = load_grammar("afm")
    state = GrammarState(last="plan", thought=True)
    call = "<visual_inspector>{}</visual_inspector>"
    for body in ('{"file_path": "a.png", "n": [1, 2.5], "deep": {"x": null}}', " {} "):
        assert accepts(lark_of(grammar, state), call.format(body)), body
    for body in ("a.png", "[1]", '{"a": "</visual_inspector>"}', '{"a": 01}', '{"a"}'):
        assert not accepts(lark_of(grammar, state), call.format(body)), body
    schema = {
        "type": "object",
        "properties": {"file_path": {"type": "string"}, "page": {"type": "integer"}},
        "required": ["file_path"],
    }
    tool = Tool("visual_inspector", _unused, body="json", schema=json.dumps(schema))
    bound = Toolbox([tool]).bind(grammar)
    schemas = Toolbox([tool]).schemas(bound)
    lark = lark_of(bound, state, SHORT, schemas)
    assert accepts(lark, call.format('{"file_path": "a.png", "page": 2}'))
    for body in ("{}", '{"file_path": 3}', '{"file_path": "<answer>"}', '{"file_path":"a","b":1}'):
        assert not accepts(lark, call.format(body)), body
    rng = random.Random(0)
    for _ in range(10):
        take_turn(bound, GrammarState(last="plan"), rng, schemas=schemas)


def test_a_turn_may_have_to_end_in_certain_roles() -> None:
    grammar = load_grammar("web")
    state = GrammarState(last="plan", thought=True)
    lark = lark_of(grammar, state, SHORT, (), ("crawl_page",))
    assert accepts(lark, "<crawl_page>a</crawl_page>")
    whole = "<think>d</think><plan>b</plan><think>c</think><crawl_page>a</crawl_page>"
    assert accepts(lark_of(grammar, GrammarState(), SHORT, (), ("crawl_page",)), whole)
    other = "<web_search>a</web_search>"
    assert accepts(lark_of(grammar, state, SHORT), other) and not accepts(lark, other)
    forced = GrammarState(last="double_check", forced=("answer",))
    with pytest.raises(GrammarError, match="a turn could not end"):
        lark_of(grammar, forced, SHORT, (), ("crawl_page",))


def test_strings_that_may_be_null_hold_no_tag_either() -> None:
    text = {"type": ["string", "null"], "default": {"type": "string"}}
    schema = {"type": "object", "properties": {"b": text}}
    tool = Tool("look", _unused, body="json", schema=json.dumps(schema))
    bound = Toolbox([tool]).bind(load_grammar("react"))
    state = GrammarState(thought=True)
    lark = lark_of(bound, state, SHORT, Toolbox([tool]).schemas(bound))
    for body, fits in (('{"b": null}', True), ('{"b": "x"}', True), ('{"b": "</look>"}', False)):
        assert accepts(lark, f"<look>{body}</look>") == fits, body


async def _unused(_: str) -> str:
    raise AssertionError


def test_a_turn_that_cannot_start_or_end_is_refused() -> None:
    grammar = load_grammar("mhqa")
    with pytest.raises(GrammarError, match="the answer was given"):
        lark_of(grammar, GrammarState(done=True))
    with pytest.raises(GrammarError, match="an observation is due"):
        lark_of(grammar, GrammarState(awaiting=True))
    stuck = Grammar(
        name="stuck",
        roles=(
            Role("plan", "plan", ("note", "answer")),
            Role("note", "plan", ("note",)),
            Role("answer", "answer"),
        ),
        start=("plan",),
    )
    with pytest.raises(GrammarError, match="a turn could not end"):
        lark_of(stuck, GrammarState(last="note"))
    assert "B_NOTE" not in lark_of(stuck, GrammarState())


def test_limits_follow_the_turn() -> None:
    assert TextLimits.within(64).text == 180
    assert TextLimits.within(512) == TextLimits(text=320, call=160, code=1152)
