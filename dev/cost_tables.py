"""The tables of docs/cost.md, from what `coa study cost` measured:
python dev/cost_tables.py [runs/cost/cost.json]"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from coa.io.runs import Json
from coa.lab.study_cost import CACHINGS, PEER, PROMPTS, STRETCHED

PARTS = ("planner", "searcher", "reader", "coder", "reflector", "critic", "verifier")
LENGTHS = {
    "0x": "none at all",
    "0.5x": "half of ours",
    "1x": "**ours**",
    "2x": "twice ours",
    "4x": "four times",
    PEER: "as smolagents'",
}


def percent(found: Json) -> str:
    low, high = found["ci95"]
    return f"{found['value']:.1%} [{100 * low:.1f}, {100 * high:.1f}]"


def number(found: Json, digits: int = 0) -> str:
    low, high = found["ci95"]
    return f"{found['value']:,.{digits}f} [{low:,.{digits}f}, {high:,.{digits}f}]"


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: str) -> Iterator[str]:
    yield ""
    yield row(*cells)
    yield "|" + "---|" * len(cells)


def savings(sets: Json) -> Iterator[str]:
    """Tokens for a solved task, and what the chain saves of them."""
    yield from head("set", "cache", "team", "chain, compact", "fewer", "chain, full", "fewer")
    for name, found in sets.items():
        for cache in CACHINGS:
            compact = found["per_solved"]["compact"][f"tokens.{cache}"]
            full = found["per_solved"]["full"][f"tokens.{cache}"]
            yield row(
                name if cache == "none" else "",
                cache,
                number(compact["team"]),
                number(compact["chain"]),
                f"**{percent(compact['reduction'])}**",
                number(full["chain"]),
                percent(full["reduction"]),
            )


def tasks(sets: Json) -> Iterator[str]:
    """How many tasks the counts are over."""
    yield from head(
        "set", "tasks", "solved by the team", "... and converted", "no chain", "tool calls, both"
    )
    for name, found in sets.items():
        calls = found["per_solved"]["compact"]["tool_calls"]["team"]
        missing = sum(found["without_chain"].values())
        solved = found["solved"]
        yield row(name, found["n"], solved["team"], solved["chain"], missing, number(calls, 2))


def both_solve(sets: Json) -> Iterator[str]:
    """The same over the tasks that both solve, and in money."""
    yield f"\nboth solve: {[found['paired_tasks'] for found in sets.values()]}"
    for what, of in (("tokens", "paired"), ("money", "per_solved")):
        yield from head(f"{what}, {of}", *sets)
        for cache in CACHINGS:
            saved = [f[of]["compact"][f"{what}.{cache}"]["reduction"] for f in sets.values()]
            yield row(cache, *map(percent, saved))


def makeup(sets: Json) -> Iterator[str]:
    """What the tokens are made of."""
    yield from head("set", "", "system prompts", "what agents have seen", "written", "model calls")
    for name, found in sets.items():
        for side, label in (("team", "team"), ("compact", "chain, compact")):
            made = found["makeup"][side]
            tokens = (f"{made[key]:,.0f}" for key in ("system", "context", "written"))
            yield row(name if side == "team" else "", label, *tokens, f"{made['model_calls']:.1f}")


def by_tool_calls(sets: Json) -> Iterator[str]:
    """The saving by the number of tool calls."""
    most = max(each["tool_calls"] for found in sets.values() for each in found["by_tool_calls"])
    yield from head("fewer tokens, no cache", *map(str, range(1, most + 1)))
    for name, found in sets.items():
        by = {each["tool_calls"]: each["reduction"]["none"] for each in found["by_tool_calls"]}
        cells = (f"{by[k]['value']:.1%}" if k in by else "" for k in range(1, most + 1))
        yield row(name, *cells)


def prompts(sets: Json) -> Iterator[str]:
    """How long the system prompts are."""
    yield from head("system prompt of", *sets, PEER)
    for part in PARTS:
        held = [found["prompts"]["team"].get(part) for found in sets.values()]
        peer = next((f"{each[PEER]:,.0f}" for each in held if each), "")
        yield row(part, *(f"{each['tokens']:.0f}" if each else "" for each in held), peer)
    for kind in PROMPTS:
        own = (f"{found['prompts']['chain'][kind]:.0f}" for found in sets.values())
        yield row(f"student, {kind}", *own, "")


def lengths(sets: Json) -> Iterator[str]:
    """The saving if the team's prompts were longer or shorter."""
    for kind in PROMPTS:
        for cache in STRETCHED:
            yield from head(f"{kind}, {cache}", *sets)
            for key, label in LENGTHS.items():
                cells = []
                for found in sets.values():
                    each = next(e for e in found["sensitivity"] if e["prompts"] == key)
                    saved = percent(each["reduction"][kind][cache])
                    cells.append(f"{each['tokens_a_call']:,.0f}: {saved}")
                yield row(label, *cells)


def claim(sets: Json) -> Iterator[str]:
    """How long they would have to be for the paper's figure."""
    yield from head("84.6% needs", *sets)
    for kind in PROMPTS:
        for cache in STRETCHED:
            needed = (found["prompt_tokens_for_claim"][kind][cache] for found in sets.values())
            yield row(f"{kind} student, {cache}", *(f"{each:,}" for each in needed))


TABLES = (savings, tasks, both_solve, makeup, by_tool_calls, prompts, lengths, claim)


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/cost/cost.json")
    found = json.loads(path.read_text(encoding="utf-8"))["sets"]
    for table in TABLES:
        print("\n".join(table(found)))
