"""Measurements against peers, in one run: `coa bench`. Here is that of the parser."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import find_spec

from coa.errors import UsageError, did_you_mean
from coa.grammar import PRESETS, Block, Grammar, GrammarState, load_grammar, parse
from coa.io.runs import Json
from coa.io.settings import load_recipe

BENCHES = ("parse", "rl", "rollout", "sandbox", "search", "sft")
Reader = Callable[[Grammar, str], object]
_ROUNDS = 5
_PASSAGE = (
    "The river rises in the northern hills, passes the old capital & joins the sea after 412 km. "
    "In 1989 its basin had 3.5 million inhabitants (a < b); the treaty names both banks of it. "
)
_BODIES = {
    "think": "The last result names the capital, so the next look-up is its river. " * 2,
    "plan": "1. Find the capital of the country.\n2. Find the river that flows through it.\n",
    "tool": "river that flows through the capital",
    "reflection": "Information Conflict: good. Tool Effectiveness: good. "
    "Trajectory Monitoring: average. The passage answers the present step.",
    "suggestion": "the Vistula",
    "check": "Both passages agree with the question. Score: 4",
    "answer": "the Vistula | Vistula",
}
_PROGRAM = "\n```py\nfor n in range(10):\n    print(n, '</code>' if n < 3 else '<b>')\n```\n"


def run_bench(
    name: str,
    rollouts: str = "32,64",
    note: Callable[[str], None] = lambda line: None,
    overrides: Sequence[str] = (),
) -> tuple[Json, list[str]]:
    """Run the measurement of that name: its result, and the same as lines for people.

    `rollouts` is for rollout; `overrides` (name=value) change the work of sft and rl.
    """
    if name not in BENCHES:
        raise UsageError(f"{name!r} is not a measurement.{did_you_mean(name, BENCHES)}")
    if name in ("sft", "rl"):
        return _run_training(name, overrides, note)
    if overrides:
        raise UsageError(f"bench {name} has no settings, found {overrides[0]!r}.")
    if name == "parse":
        result = bench_parse()
        return result, list(_parse_lines(result))
    if name == "sandbox":
        from coa.lab.bench_sandbox import bench_sandbox, sandbox_lines

        result = bench_sandbox(note=note)
        return result, list(sandbox_lines(result))
    if name == "search":
        from coa.lab.bench_search import bench_search, search_lines

        result = bench_search(note)
        return result, list(search_lines(result))
    from coa.lab.bench_rollout import bench_rollout, rollout_lines

    counts = rollouts.split(",")
    if not all(count.strip().isdecimal() and int(count) for count in counts):
        raise UsageError(f"--rollouts {rollouts!r}: expected numbers joined by commas, as 32,64.")
    result = bench_rollout([int(count) for count in counts], note)
    return result, list(rollout_lines(result))


def _run_training(
    name: str, overrides: Sequence[str], note: Callable[[str], None]
) -> tuple[Json, list[str]]:
    from coa.lab.bench_train import RlSetup, SftSetup, bench_rl, bench_sft, train_lines

    if name == "sft":
        result = bench_sft(load_recipe(None, overrides, SftSetup), note)
    else:
        result = bench_rl(load_recipe(None, overrides, RlSetup), note)
    return result, list(train_lines(result))


def bench_parse(megabytes: float = 2.0) -> Json:
    """Whole parsing of trajectories of every preset, in MB/s, best of five; peers likewise.

    The peers find tags only: they check no succession, accept a forged observation, and take a tag
    inside a program for a block. They show what the same bytes cost with common means.
    """
    texts = _texts(megabytes)
    size = sum(len(text.encode()) for _, text in texts) / 1e6
    speeds = {name: size / _best(read, texts) for name, read in _readers().items()}
    ours = speeds.pop("ours")
    shown = {name: round(speed, 1) for name, speed in speeds.items()}
    ratio = {name: round(ours / speed, 2) for name, speed in speeds.items()}
    return {"ours": round(ours, 1), **shown, "unit": "MB/s", "ratio": ratio}


def _best(read: Reader, texts: Sequence[tuple[Grammar, str]]) -> float:
    """The shortest of a few runs over all texts, in seconds."""
    taken = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        for grammar, text in texts:
            read(grammar, text)
        taken.append(time.perf_counter() - started)
    return min(taken)


def _readers() -> dict[str, Reader]:
    """Ours and every peer that is installed; the regex and html.parser always are."""
    pairs = re.compile(r"<(\w+)>(.*?)</\1>", re.S)

    def html(_: Grammar, text: str) -> None:
        parser = HTMLParser()
        parser.feed(text)
        parser.close()

    readers: dict[str, Reader] = {
        "ours": lambda grammar, text: parse(grammar, text, env=True),
        "regex": lambda _, text: pairs.findall(text),
        "html.parser": html,
    }
    if find_spec("lxml") is not None:
        etree = import_module("lxml.html")
        readers["lxml"] = lambda _, text: etree.fragments_fromstring(text)
    if find_spec("bs4") is not None:
        soup = import_module("bs4").BeautifulSoup
        readers["beautifulsoup"] = lambda _, text: soup(text, "html.parser")
    return readers


def _texts(megabytes: float) -> list[tuple[Grammar, str]]:
    """Trajectories of 2 to 12 calls in every preset, observations of one to eight passages."""
    made: list[tuple[Grammar, str]] = []
    length, calls = 0, 0
    while length < megabytes * 1e6:
        grammar = load_grammar(PRESETS[calls % len(PRESETS)])
        calls += 1
        text = grammar.render(_walk(grammar, 2 + calls % 11, 1 + calls % 8))
        made.append((grammar, text))
        length += len(text)
    return made


def _walk(grammar: Grammar, calls: int, passages: int) -> Sequence[Block]:
    """A legal trajectory with so many tool calls."""
    state, blocks = GrammarState(), list[Block]()
    while not state.done:
        options = grammar.allowed(state)
        called = sum(block.role == grammar.observation for block in blocks)
        ways = [name for name in options if name in grammar.tool_roles]
        if called >= calls:
            ways = [name for name in options if name in ("answer", "suggested_answer")] or ways
        name = ways[len(blocks) % len(ways)] if ways else options[-1]
        blocks.append(Block(name, _body(grammar, name, passages)))
        moved = grammar.advance(state, blocks[-1])
        assert isinstance(moved, GrammarState), moved
        state = moved
    return blocks


def _body(grammar: Grammar, name: str, passages: int) -> str:
    if name == grammar.observation:
        return grammar.escape(_PASSAGE * passages)
    role = grammar.by_name[name]
    return _PROGRAM if role.body == "code" else _BODIES[role.kind]


def _parse_lines(result: Json) -> Iterator[str]:
    yield f"{'ours':<28} {result['ours']:>10.1f} {result['unit']}"
    for peer, ratio in result["ratio"].items():
        yield f"{peer:<28} {result[peer]:>10.1f} {result['unit']}   ours / peer {ratio:.2f}"
