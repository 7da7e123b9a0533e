"""The formats of published baselines: chains in the shape that their code writes and reads, made by
hand, are read as blocks, and their turns run in the one loop."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from coa.engines.scripted import ScriptedEngine
from coa.errors import GrammarError
from coa.grammar import (
    Block,
    Fault,
    FaultKind,
    Grammar,
    GrammarState,
    Role,
    check,
    grammar_from_toml,
    load_grammar,
    parse,
    system_prompt,
)
from coa.grammar.constrain import turn_grammar
from coa.loop import run
from coa.tasks import Task
from coa.tools import Tool, Toolbox, tool
from coa.trajectory import StopReason, Trajectory

WEBDANCER, RETOOL, REVEAL = map(load_grammar, ("webdancer", "retool", "reveal"))
WEB_CHAIN = """<think>
Which river is meant? I search for it.
</think>
<tool_call>
{"name": "search", "arguments": {"query": ["river of Lima", "Lima river name"]}}
</tool_call>
<tool_response>
1. Rimac, https://example.org/rimac
</tool_response>
<think>The page should say it.</think>
<tool_call>
{"name": "visit", "arguments": {"url": ["https://example.org/rimac"], "goal": "the river"}}
</tool_call>
<tool_response>
The Rimac flows through Lima.
</tool_response>
<think>It is the Rimac.</think>
<answer>Rimac</answer>"""
MATH_CHAIN = """We need the sum of the first hundred squares. Let me compute it.

<code>
```python
print(sum(n * n for n in range(1, 101)))
```
</code>
<interpreter>
338350
</interpreter>
So the sum is 338350, which agrees with n(n+1)(2n+1)/6.

<answer>
\\boxed{338350}
</answer>"""
CODE_CHAIN = """<think>Double the number that is read.</think>
<generation>
```py
print(2 * int(input()))
```
</generation>
<think>I test it with 4.</think>
<verification>
```py
def solve(n):
    return 2 * n
print(solve(4) == 8)
```
</verification>
<feedback>True</feedback>
<think>My test holds.</think>
<answer>
```py
print(2 * int(input()))
```
</answer>"""


def blocks(grammar: Grammar, text: str) -> list[tuple[str, str]]:
    """Role and body of each block of a whole chain, which is legal."""
    parsed = parse(grammar, text, env=True)
    assert check(grammar, parsed) is None, check(grammar, parsed)
    return [(block.role, block.body.strip()) for block in parsed.blocks]


def test_a_chain_of_webdancer_and_websailor_is_read() -> None:
    assert blocks(WEBDANCER, WEB_CHAIN) == [
        ("think", "Which river is meant? I search for it."),
        ("search", "river of Lima | Lima river name"),
        ("tool_response", "1. Rimac, https://example.org/rimac"),
        ("think", "The page should say it."),
        ("visit", "https://example.org/rimac"),
        ("tool_response", "The Rimac flows through Lima."),
        ("think", "It is the Rimac."),
        ("answer", "Rimac"),
    ]
    assert WEBDANCER.stop_strings == ("</tool_call>", "</answer>", "<tool_response>")


def test_a_chain_of_retool_is_read_its_reasoning_without_tags() -> None:
    assert blocks(RETOOL, MATH_CHAIN) == [
        ("think", "We need the sum of the first hundred squares. Let me compute it."),
        ("code", "```python\nprint(sum(n * n for n in range(1, 101)))\n```"),
        ("interpreter", "338350"),
        ("think", "So the sum is 338350, which agrees with n(n+1)(2n+1)/6."),
        ("answer", "\\boxed{338350}"),
    ]
    tagged = MATH_CHAIN.replace("We need", "<think>We need").replace("it.\n", "it.</think>\nNow.")
    assert blocks(RETOOL, tagged)[0] == (
        "think",
        "We need the sum of the first hundred squares. Let me compute it.\nNow.",
    )


def test_a_chain_of_reveal_is_read() -> None:
    assert [role for role, _ in blocks(REVEAL, CODE_CHAIN)] == [
        *("think", "generation", "think", "verification", "feedback", "think", "answer"),
    ]


async def _search(query: str) -> str:
    return f"found {query}"


async def _visit(address: str) -> str:
    return f"page {address}"


async def _code(text: str) -> str:
    return f"ran {len(text)}"


@tool
async def weather(city: str, days: int = 1) -> str:
    """Forecast the weather of a city."""
    return f"{city}: rain for {days} days"


BOX = Toolbox([Tool("web_search", _search), Tool("crawl_page", _visit)])
PYTHON = Toolbox([Tool("code", _code, body="code")])


def play(grammar: Grammar, box: Toolbox, *turns: str) -> Trajectory:
    engine = ScriptedEngine(list(turns))
    return asyncio.run(run(Task("Which?"), engine, grammar, box))


def turns_of(chain: str, grammar: Grammar) -> list[str]:
    """What the model wrote of a chain: all but observations."""
    parsed, cut, turns = parse(grammar, chain, env=True), 0, []
    for block in parsed.blocks:
        if block.role == grammar.observation:
            turns.append(chain[cut : block.start])
            cut = block.end
    return [*turns, chain[cut:]]


@pytest.mark.parametrize(
    ("grammar", "chain", "box", "answer"),
    [
        (RETOOL, MATH_CHAIN, PYTHON, "\\boxed{338350}"),
        (REVEAL, CODE_CHAIN, PYTHON, "```py\nprint(2 * int(input()))\n```"),
        (WEBDANCER, WEB_CHAIN, BOX, "Rimac"),
    ],
    ids=["retool", "reveal", "webdancer"],
)
def test_turns_of_a_published_format_run_in_the_loop(
    grammar: Grammar, chain: str, box: Toolbox, answer: str
) -> None:
    made = play(grammar, box, *turns_of(chain, grammar))
    assert (made.stop, made.answer, made.usage.malformed) == (StopReason.ANSWERED, answer, 0)
    assert made.usage.tool_calls == len(turns_of(chain, grammar)) - 1
    assert check(made.protocol, parse(made.protocol, made.text, env=True)) is None


def test_a_tool_that_the_format_does_not_name_is_called_by_its_own_name() -> None:
    box = Toolbox([*BOX.values(), weather])
    bound = box.bind(WEBDANCER)
    assert bound.tool_roles == ("search", "visit", "weather") and bound.tags == WEBDANCER.tags
    prompt = system_prompt(bound, "full")
    assert "  - weather: Forecast the weather of a city" in prompt
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Lima", "days": 2}}</tool_call>'
    made = play(WEBDANCER, box, f"<think>a</think>{call}", "<think>b</think><answer>rain</answer>")
    assert "<tool_response>Lima: rain for 2 days</tool_response>" in made.text


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("search for it", "holds no JSON object with a tool's name (search, visit) and arguments"),
        ('{"name": "search"}', "holds no JSON object with a tool's name"),
        ('{"name": "google", "arguments": {"query": "x"}}', "holds no JSON object with a tool's"),
        ('{"name": "answer", "arguments": {}}', "holds no JSON object with a tool's name"),
        ('{"name": "search", "arguments": {"q": "x"}}', "search takes its query as the argument"),
        ('{"name": "search", "arguments": {"query": [1]}}', "search takes its query as the arg"),
        ('{"name": "search", "arguments": {"query": ""}}', "<tool_call> is empty"),
        ("[" * 200, "holds no JSON object"),
    ],
)
def test_a_call_that_is_none_is_malformed_and_explained(body: str, complaint: str) -> None:
    bad, good = (
        f"<think>a</think><tool_call>{body}</tool_call>",
        "<think>b</think><answer>x</answer>",
    )
    made = play(WEBDANCER, BOX, bad, good)
    assert made.usage.malformed == 1 and made.usage.tool_calls == 0 and made.answer == "x"
    assert made.steps[0].observation is not None
    assert WEBDANCER.escape(complaint) in made.steps[0].observation.text


def test_no_call_is_too_deep_to_be_refused() -> None:
    found = WEBDANCER.read_call("[" * 100_000, 3, 9)
    assert isinstance(found, Fault) and (found.kind, found.at) == (FaultKind.UNREADABLE, 3)


def test_what_looks_like_a_tag_in_a_call_is_written_so_that_nothing_is_lost() -> None:
    bound = Toolbox([*BOX.values(), weather]).bind(WEBDANCER)
    for block in (
        Block("search", "a </tool_call><answer>9</answer> b"),
        Block("weather", '{"city": "</tool_call> <think>"}'),
    ):
        (read,) = parse(bound, bound.render([block])).blocks
        assert (read.role, read.body) == (block.role, block.body)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('call = "answer"', "call is 'answer', which is a role or the observation already"),
        ('call = "observation"', "which is a role or the observation already"),
        ('call = "Tool"', "call is 'Tool'; expected lower-case letters"),
        ('free = "answer"', "free names 'answer', which is no role of kind 'think'"),
    ],
)
def test_a_grammar_that_contradicts_itself_is_refused(line: str, problem: str) -> None:
    text = f'{line}\nstart = ["tool", "answer"]\n[roles.look]\nkind = "tool"\nnext = ["answer"]\n'
    with pytest.raises(GrammarError) as caught:
        grammar_from_toml(f'{text}[roles.answer]\nkind = "answer"\n')
    assert problem in str(caught.value)


def test_a_constrained_call_is_one_of_the_tools_with_its_arguments() -> None:
    schema = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"]}
    schema["$defs"] = {"P": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    typed = Role("point", "tool", body="json")
    bound = WEBDANCER.with_tools([WEBDANCER.by_name["search"], typed])
    schemas = (("point", json.dumps(schema)),)
    lark = turn_grammar(bound, GrammarState(thought=True), None, schemas)
    assert '"const": "search"' in lark and '"const": "point"' in lark and "visit" not in lark
    rule = next(line for line in lark.splitlines() if line.startswith("b_point:"))
    shown = json.loads(rule.split("%json ", 1)[1].rsplit(" CLOSE_CALLS", 1)[0])
    assert "$defs" in shown and "$defs" not in shown["properties"]["arguments"]


def test_free_text_is_a_fault_where_the_grammar_has_no_role_for_it() -> None:
    strict = replace(RETOOL, free="")
    assert parse(strict, MATH_CHAIN, env=True).faults[0].kind is FaultKind.STRAY
    assert parse(RETOOL, "<foo>hm</foo>").blocks == [Block("think", "<foo>hm</foo>")]
