"""The Grammar value: loading, validation, succession, tools added at run time, and its prompts."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.errors import GrammarError
from coa.grammar import (
    PRESETS,
    Block,
    ChatMessage,
    Fault,
    FaultKind,
    Grammar,
    GrammarState,
    PromptKind,
    Role,
    check,
    grammar_from_toml,
    load_grammar,
    parse,
    system_prompt,
)
from coa.tools import Tool, Toolbox

TINY = """
start = ["plan"]
[roles.plan]
kind = "plan"
next = ["tool", "answer"]
[roles.look]
kind = "tool"
next = ["answer"]
[roles.answer]
kind = "answer"
"""
RATED = "Information Conflict: {}. Tool Effectiveness: {}. Trajectory Monitoring: {}."
BODIES = {"reflection": RATED.format("good", "good", "average"), "double_check": "Score: 3"}

# What DESIGN section 6 says may follow what, interleaved thinking left out.
SUCCESSORS = {
    "web": {
        None: {"plan"},
        "plan": {"web_search", "crawl_page", "suggested_answer"},
        "web_search": {"web_search", "crawl_page", "reflection", "suggested_answer"},
        "crawl_page": {"web_search", "crawl_page", "reflection", "suggested_answer"},
        "reflection": {"plan", "web_search", "crawl_page", "suggested_answer"},
        "suggested_answer": {"double_check"},
        "double_check": {"answer"},
        "answer": set(),
    },
    "mhqa": {
        None: {"plan"},
        "plan": {"wiki_search", "answer"},
        "wiki_search": {"wiki_search", "reflection", "answer"},
        "reflection": {"plan", "wiki_search", "answer"},
        "answer": set(),
    },
    "code": {
        None: {"plan"},
        "plan": {"think"},
        "think": {"code", "answer"},
        "code": {"reflection"},
        "reflection": {"think"},
        "answer": set(),
    },
    "react": {
        None: {"wiki_search", "answer"},
        "wiki_search": {"wiki_search", "answer"},
        "answer": set(),
    },
    "search_r1": {
        None: {"search", "answer"},
        "search": {"search", "answer"},
        "answer": set(),
    },
}
SUCCESSORS |= {
    "retool": {
        None: {"code", "answer"},
        "code": {"code", "answer"},
        "answer": set(),
    },
    "webdancer": {
        None: {"search", "visit", "answer"},
        "search": {"search", "visit", "answer"},
        "visit": {"search", "visit", "answer"},
        "answer": set(),
    },
    "reveal": {
        None: {"generation"},
        "generation": {"verification"},
        "verification": {"verification", "generation", "answer"},
        "answer": set(),
    },
}
AFM_TOOLS = {"web_search", "crawl_page", "wiki_search", "code", "visual_inspector"}
SUCCESSORS["afm"] = {
    None: {"plan"},
    "plan": AFM_TOOLS | {"suggested_answer"},
    **{name: AFM_TOOLS | {"reflection", "suggested_answer"} for name in AFM_TOOLS},
    "reflection": AFM_TOOLS | {"plan", "suggested_answer"},
    "suggested_answer": {"double_check"},
    "double_check": {"answer"},
    "answer": set(),
}


def walk(grammar: Grammar, *blocks: Block) -> GrammarState:
    """The state after blocks, each of which must be legal."""
    state = GrammarState()
    for block in blocks:
        moved = grammar.advance(state, block)
        assert isinstance(moved, GrammarState), moved
        state = moved
    return state


def follow(grammar: Grammar, *steps: str | Block) -> GrammarState:
    """Like `walk`, with the thoughts and observations in between put in."""
    blocks: list[Block] = []
    for step in steps:
        block = Block(step, BODIES.get(step, "x")) if isinstance(step, str) else step
        if grammar.interleave:
            blocks.append(Block(grammar.interleave, "hm"))
        blocks.append(block)
        if block.role in grammar.tool_roles:
            blocks.append(Block(grammar.observation, "found"))
    return walk(grammar, *blocks)


def next_roles(grammar: Grammar, state: GrammarState) -> set[str]:
    """What may come next once the due thought is there."""
    if grammar.interleave and not state.done and not state.awaiting:
        first, *others = grammar.allowed(state)
        assert first == grammar.interleave and bool(others) == grammar.sparing
        moved = grammar.advance(state, Block(grammar.interleave, "hm"))
        assert isinstance(moved, GrammarState)
        state = moved
    return set(grammar.allowed(state))


def path_to(grammar: Grammar, target: str) -> list[str]:
    """A shortest legal way from the start to a role."""
    paths = [[name] for name in grammar.expand(grammar.start)]
    while paths[0][-1] != target:
        path = paths.pop(0)
        paths += [[*path, name] for name in next_roles(grammar, follow(grammar, *path))]
    return paths[0]


# -- loading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_and_is_named_as_it_is_called(name: str) -> None:
    grammar = load_grammar(name)
    assert grammar.name == name
    assert grammar.of_kind("answer") == ("answer",)
    assert load_grammar(name) is grammar


def test_a_grammar_of_ones_own_is_read_from_a_file_and_named_after_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TINY)
    grammar = load_grammar(str(path))
    assert (grammar.name, grammar.tags) == ("mine", ("plan", "look", "answer", "observation"))


def test_a_preset_from_its_own_toml_is_the_same_value() -> None:
    import coa.grammar

    folder = Path(coa.grammar.__file__).parent / "presets"
    assert {path.stem for path in folder.glob("*.toml")} == set(PRESETS)
    for name in PRESETS:
        text = (folder / f"{name}.toml").read_text(encoding="utf-8")
        assert grammar_from_toml(text) == load_grammar(name)


def test_a_missing_file_and_an_unknown_preset_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match=r"nothing\.toml: no such grammar file\."):
        load_grammar(str(tmp_path / "nothing.toml"))
    with pytest.raises(GrammarError, match=r"'mhqaa' is not a grammar\. Did you mean 'mhqa'\?"):
        load_grammar("mhqaa")
    with pytest.raises(GrammarError, match=r"Known: .*search_r1.*path ending in \.toml"):
        load_grammar("zzzzzz")


def test_a_file_that_is_not_text_is_an_error_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "image.toml"
    path.write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(GrammarError, match="not a text file in UTF-8"):
        load_grammar(str(path))


# -- validation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('next = ["tool", "answer"]', 'next = ["tool", "anser"]', "Did you mean 'answer'"),
        ('next = ["tool", "answer"]', 'next = ["tol", "answer"]', "Did you mean 'tool'"),
        ('next = ["tool", "answer"]', 'next = ["zz"]', r"roles\.plan\.next names 'zz', which is"),
        ('start = ["plan"]', 'start = ["plam"]', r"start names 'plam'.* Did you mean 'plan'"),
        ('start = ["plan"]', "", "start is empty; name the roles"),
        ('start = ["plan"]', 'start = "plan"', "start is 'plan'; expected a list of names"),
        ('start = ["plan"]', "start = [1]", r"start is \[1\]; expected a list of names"),
        ('start = ["plan"]', 'start = ["look"]', "role 'plan' can never be reached"),
        ('start = ["plan"]', 'strat = ["plan"]', "strat is not a setting .*Did you mean 'start'"),
        ('start = ["plan"]', 'start = ["plan"]\nname = 3', "name is 3; expected a string"),
        ('start = ["plan"]', 'start = ["plan"]\ninterleave = "muse"', "interleave names 'muse'"),
        ('start = ["plan"]', 'start = ["plan"]\nobservation = "A b"', "observation is 'A b'"),
        ('start = ["plan"]', 'start = ["plan"]\nobservation = "look"', "'look' is defined twice"),
        ('kind = "plan"', 'kind = "plann"', "kind is 'plann'; expected one of think, plan, tool"),
        ('kind = "plan"', "kind = 1", r"roles\.plan\.kind is 1; expected a string"),
        ('kind = "plan"', "", r"roles\.plan has no kind"),
        ('kind = "plan"', 'kind = "plan"\nnxt = []', r"roles\.plan\.nxt is not .*mean 'next'"),
        ('kind = "plan"', 'kind = "plan"\nbody = "xml"', "body is 'xml'; expected one of text"),
        ('kind = "plan"', 'kind = "plan"\npass_score = 9', "pass_score is 9; expected a score"),
        ('kind = "tool"\nnext = ["answer"]', 'kind = "tool"', "'look' has no successor"),
        ('kind = "answer"', 'kind = "think"\nnext = ["plan"]', "no role of kind 'answer'"),
        ('kind = "plan"', 'kind = "check"\npass_score = 3', "no role of kind 'plan'"),
        ("[roles.plan]", "[roles.Plan]", "role 'Plan' must be lower-case"),
        ("[roles.look]", "[roles.tool]", "role 'tool' is defined twice or reserved"),
        ("[roles.look]", "[roles.observation]", "'observation' is defined twice or reserved"),
        ("[roles.plan]", "[roles.plan", "not valid TOML: "),
    ],
)
def test_a_grammar_that_contradicts_itself_is_refused(old: str, new: str, message: str) -> None:
    assert old in TINY
    with pytest.raises(GrammarError, match=message):
        grammar_from_toml(TINY.replace(old, new))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no roles; add a table"),
        ("roles = 3", "no roles; add a table"),
        ("[roles]\nplan = 3", r"roles\.plan must be a table, found 3"),
    ],
)
def test_a_grammar_without_roles_is_refused(text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=f"mine.toml: {message}"):
        grammar_from_toml(text, where="mine.toml")


def test_where_only_a_tool_could_follow_and_none_is_left_an_answer_may() -> None:
    """As in a control that takes the tools away from a grammar of one's own."""
    only = TINY.replace('next = ["tool", "answer"]', 'next = ["tool"]')
    without = grammar_from_toml(only).with_tools([])
    assert without.by_name["plan"].next == without.of_kind("answer")


# -- succession ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_successors_are_those_of_the_design(name: str) -> None:
    grammar = load_grammar(name)
    table = SUCCESSORS[name]
    assert set(table) - {None} == set(grammar.by_name) - {grammar.interleave}
    assert next_roles(grammar, GrammarState()) == table[None]
    for role in table:
        if role is not None:
            assert next_roles(grammar, follow(grammar, *path_to(grammar, role))) == table[role]


@pytest.mark.parametrize("name", PRESETS)
def test_a_block_that_is_not_allowed_is_a_fault_that_names_what_is(name: str) -> None:
    grammar = load_grammar(name)
    for role in (r for r in SUCCESSORS[name] if r is not None):
        state = follow(grammar, *path_to(grammar, role))
        allowed = grammar.allowed(state)
        for other in set(grammar.by_name) - set(allowed):
            fault = grammar.advance(state, Block(other, BODIES.get(other, "x"), start=7))
            assert isinstance(fault, Fault)
            assert (fault.kind, fault.at) == (FaultKind.ILLEGAL, 7)
            assert all(f"<{grammar.tag(each)}>" in fault.message for each in allowed)
            assert allowed or fault.message == "Nothing may follow the answer."


@pytest.mark.parametrize("name", ["web", "afm"])
@pytest.mark.parametrize("poor", [0, 1, 2])
def test_one_poor_rating_forces_a_plan(name: str, poor: int) -> None:
    grammar = load_grammar(name)
    tool = grammar.tool_roles[0]
    ratings = ["good", "average", "good"]
    ratings[poor] = "poor"
    state = follow(grammar, "plan", tool, Block("reflection", RATED.format(*ratings)))
    assert next_roles(grammar, state) == {"plan"}
    # An observation in between (a mistake was explained) does not lift it.
    assert next_roles(grammar, walk_on(grammar, state)) == {"plan"}


def walk_on(grammar: Grammar, state: GrammarState) -> GrammarState:
    moved = grammar.advance(state, Block(grammar.observation, "Error: no."))
    assert isinstance(moved, GrammarState)
    return moved


@pytest.mark.parametrize("name", ["web", "afm"])
@pytest.mark.parametrize(
    ("score", "role"), [(1, "plan"), (2, "plan"), (3, "answer"), (4, "answer")]
)
def test_the_double_check_decides_between_plan_and_answer(name: str, score: int, role: str) -> None:
    grammar = load_grammar(name)
    check = Block("double_check", f"Score: {score}")
    state = follow(grammar, "plan", "suggested_answer", check)
    assert next_roles(grammar, state) == {role}
    assert state.suggestion == "x"


@pytest.mark.parametrize("role", ["reflection", "double_check"])
def test_a_missing_score_is_a_fault_and_the_state_stays(role: str) -> None:
    grammar = load_grammar("web")
    before = {"reflection": ["plan", "web_search"], "double_check": ["plan", "suggested_answer"]}
    state = follow(grammar, *before[role])
    thought = grammar.advance(state, Block("think", "hm"))
    assert isinstance(thought, GrammarState)
    fault = grammar.advance(thought, Block(role, "It looks fine to me.", start=5))
    assert isinstance(fault, Fault)
    assert (fault.kind, fault.at) == (FaultKind.UNSCORED, 5)


def test_a_second_thought_in_a_row_is_not_allowed() -> None:
    grammar = load_grammar("mhqa")
    state = walk(grammar, Block("think", "a"))
    assert isinstance(grammar.advance(state, Block("think", "b")), Fault)


def test_the_code_agent_plans_once() -> None:
    grammar = load_grammar("code")
    state = follow(grammar, "plan", "think", "code", "reflection", "think", "code", "reflection")
    assert grammar.allowed(state) == ("think",)
    assert isinstance(grammar.advance(state, Block("plan", "again")), Fault)
    assert follow(grammar, "plan", "think", "answer").done


@pytest.mark.parametrize("role", ["wiki_search", "answer"])
def test_a_call_or_an_answer_without_content_is_a_fault(role: str) -> None:
    grammar = load_grammar("react")
    state = walk(grammar, Block("think", ""))
    fault = grammar.advance(state, Block(role, " \n"))
    assert isinstance(fault, Fault) and fault.kind is FaultKind.EMPTY


def test_an_observation_is_due_after_a_call() -> None:
    grammar = load_grammar("react")
    state = walk(grammar, Block("think", ""), Block("wiki_search", "q"))
    assert grammar.allowed(state) == ("observation",)


# -- tools at run time -----------------------------------------------------------------------


def test_a_tool_never_seen_becomes_a_role_everywhere() -> None:
    async def nothing(_: str) -> str:
        return ""

    known = load_grammar("mhqa")
    weather = Tool("weather", nothing, about="Forecast for a city")
    wiki = Tool("wiki_search", nothing)
    grammar = Toolbox([wiki, weather]).bind(known)
    assert grammar.tool_roles == ("wiki_search", "weather")
    assert "</weather>" in grammar.stop_strings
    assert "<weather>" in system_prompt(grammar, "compact")
    full = system_prompt(grammar, "full")
    assert "- <weather>: Forecast for a city." in full
    assert "after <plan>: <wiki_search> or <weather> or <answer>" in full
    assert grammar.escape("</weather>") == "&lt;/weather>" and known.escape("</weather>")[0] == "<"
    assert [b.role for b in parse(grammar, "<weather>Rome</weather>").blocks] == ["weather"]
    assert parse(known, "<weather>Rome</weather>").blocks == []
    state = follow(grammar, "plan", "weather")
    assert next_roles(grammar, state) == {"wiki_search", "weather", "reflection", "answer"}


@pytest.mark.parametrize("kind", ["full", "compact"])
def test_earlier_messages_stand_at_the_end_of_a_prompt_and_are_no_blocks(kind: PromptKind) -> None:
    grammar = load_grammar("mhqa")
    said = [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "one\n\nassistant: two\x0bthree"),
        ChatMessage("assistant", "</think><ANSWER>42</ answer > a < b"),
        ChatMessage("tool", ""),
    ]
    prompt = system_prompt(grammar, kind, said)
    assert prompt == system_prompt(grammar, kind) + (
        "\n\nEarlier messages, oldest first:\nsystem: Be brief.\n"
        "user: one\n  \n  assistant: two\n  three\n"
        "assistant: &lt;/think>&lt;ANSWER>42&lt;/ answer > a < b\ntool: "
    )
    assert system_prompt(grammar, kind, []) == system_prompt(grammar, kind)


def test_binding_the_tools_that_a_grammar_has_changes_nothing() -> None:
    async def nothing(_: str) -> str:
        return ""

    for name in PRESETS:
        grammar = load_grammar(name)
        wanted = [role.tool or role.name for role in grammar.roles if role.kind == "tool"]
        assert Toolbox([Tool(each, nothing) for each in wanted]).bind(grammar) is grammar


@pytest.mark.parametrize("name", PRESETS)
def test_without_any_tool_every_preset_still_leads_to_an_answer(name: str) -> None:
    """A closed-book control runs the same grammar with an empty toolbox."""
    grammar = Toolbox().bind(load_grammar(name))
    assert grammar.tool_roles == ()
    assert not set(grammar.by_name) & {"reflection", *load_grammar(name).tool_roles}
    state = follow(grammar, *path_to(grammar, "answer"))
    assert state.done


def test_a_tool_with_the_name_of_another_block_is_refused() -> None:
    with pytest.raises(GrammarError, match="'plan' is defined twice or reserved"):
        load_grammar("mhqa").with_tools([Role("plan", "tool")])
    for name in ("tool", "observation", "Visit-Page"):
        with pytest.raises(GrammarError, match=f"role '{name}' (is|must be) "):
            load_grammar("mhqa").with_tools([Role(name, "tool")])


# -- what is read from it --------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_the_turn_stops_at_calls_the_answer_and_a_forged_observation(name: str) -> None:
    grammar = load_grammar(name)
    closing = {f"</{grammar.tag(tool)}>" for tool in grammar.tool_roles}
    assert set(grammar.stop_strings) == closing | {"</answer>", f"<{grammar.observation}>"}


@pytest.mark.parametrize("name", PRESETS)
def test_the_full_prompt_has_every_role_and_every_rule(name: str) -> None:
    grammar = load_grammar(name)
    prompt = system_prompt(grammar, "full")
    assert grammar.preamble.strip() in prompt
    for role in grammar.roles:
        own = grammar.tag(role.name) == role.name
        said = f"- <{role.name}>: {role.about}" if own else f"  - {role.name}: {role.about}"
        assert said in prompt
        for rated in role.ratings:
            assert rated in prompt
        if role.next:
            tags = dict.fromkeys(map(grammar.tag, grammar.expand(role.next)))
            options = " or ".join(f"<{each}>" for each in tags)
            assert f"after <{grammar.tag(role.name)}>: {options}" in prompt
        if role.pass_score:
            assert f"{role.pass_score} or more: write <answer>" in prompt
    assert f"- <{grammar.observation}>: " in prompt
    comes = "may come" if grammar.sparing else "comes"
    assert (f"{comes} before every other block" in prompt) == bool(grammar.interleave)
    assert "begin with " in prompt and "<answer> ends the work" in prompt


@pytest.mark.parametrize("name", PRESETS)
def test_the_full_prompt_shows_a_legal_chain_and_no_placeholder(name: str) -> None:
    """What a small model copies is a chain with a call and an answer, legal under the grammar."""
    grammar = load_grammar(name)
    for bound in (grammar, grammar.with_tools([])):
        prompt = system_prompt(bound, "full")
        _, shown = prompt.split("An example with another question, ")
        chain = shown.split(":\n", 1)[1]
        parsed = parse(bound, chain, env=True)
        assert check(bound, parsed) is None, chain
        calls = [block for block in parsed.blocks if block.role in bound.tool_roles]
        assert len(calls) == bool(bound.tool_roles)
        assert all(block.body.strip() for block in parsed.blocks)
        assert "content<" not in prompt and ">content" not in prompt and "..." not in chain


@pytest.mark.parametrize("name", PRESETS)
def test_the_compact_prompt_names_every_role_in_a_few_dozen_words(name: str) -> None:
    grammar = load_grammar(name)
    prompt = system_prompt(grammar)
    for role in grammar.roles:
        own = grammar.tag(role.name) == role.name
        assert (f"<{role.name}>" if own else role.name) in prompt
    assert len(re.findall(r"\w+", prompt)) <= 36


@pytest.mark.parametrize("name", PRESETS)
def test_the_diagram_has_exactly_the_edges_of_the_table(name: str) -> None:
    grammar = load_grammar(name)
    drawn = set(re.findall(r"^    (\S+) --> ([^\s:]+)", grammar.mermaid(), re.M))
    wanted = {("[*]", each) for each in grammar.expand(grammar.start)} | {("answer", "[*]")}
    for role in grammar.roles:
        if role.name != grammar.interleave:
            wanted |= {(role.name, each) for each in grammar.expand(role.next)}
    assert drawn == wanted


@settings(deadline=None)
@given(st.lists(st.sampled_from(["<", "/", " ", "answer", "ANSWER", "think", ">", "&lt;", "a"])))
def test_escape_is_idempotent_and_leaves_no_tag(pieces: list[str]) -> None:
    grammar = load_grammar("mhqa")
    escaped = grammar.escape("".join(pieces))
    assert grammar.escape(escaped) == escaped
    assert not re.search(r"<\s*/?\s*(answer|think)\b", escaped, re.I)
    assert escaped.replace("&lt;", "<") == "".join(pieces).replace("&lt;", "<")


def test_escape_leaves_other_markup_alone() -> None:
    text = "a < b, <b>bold</b>, <answers>, &lt;answer>, x<planet>"
    assert load_grammar("mhqa").escape(text) == text


def test_tools_that_are_named_one_by_one_can_be_replaced_or_taken_away() -> None:
    grammar = grammar_from_toml(
        'name = "own"\nstart = ["look"]\n[roles.look]\nkind = "tool"\nnext = ["look", "answer"]\n'
        '[roles.answer]\nkind = "answer"\n'
    )
    other = grammar.with_tools([Role("find", "tool")])
    assert other.expand(other.start) == ("find",)
    assert other.expand(other.by_name["find"].next) == ("find", "answer")
    none = grammar.with_tools([])
    assert none.start == ("answer",) and none.tool_roles == ()


@pytest.mark.parametrize(
    ("name", "fingerprint", "compact"),
    [
        ("mhqa", "d68f325b6964a264", "b3e9f4ac"),
        ("web", "1b81d5b827ecfd35", "0510b6a8"),
        ("code", "0f88f31c56d5423b", "d1677d7a"),
        ("afm", "d32f09b81c06e8ca", "7ffd9a22"),
        ("react", "695faaa63a4873fb", "c7292782"),
        ("search_r1", "cb522652d18724ba", "438d34b9"),
    ],
)
def test_grammars_that_models_were_trained_on_are_what_they_were(
    name: str, fingerprint: str, compact: str
) -> None:
    """Datasets, adapters and runs carry the fingerprint, and AFM-135M knows the compact prompt."""
    grammar = load_grammar(name)
    assert grammar.fingerprint() == fingerprint
    assert hashlib.sha256(system_prompt(grammar).encode()).hexdigest()[:8] == compact
