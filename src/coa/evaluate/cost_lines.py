"""The result of `coa study cost` as small tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from coa.estimates import interval
from coa.evaluate.study_cost import PEER
from coa.protocol.prompt import PromptKind
from coa.runs import Json

_TITLES = {
    "tokens.none": "tokens, no cache",
    "tokens.task": "tokens, cache of a task",
    "tokens.warm": "tokens, warm cache",
    "money.none": "money, no cache",
    "money.task": "money, cache of a task",
    "money.warm": "money, warm cache",
    "tool_calls": "tool calls",
}


def cost_lines(result: Json) -> Iterator[str]:
    """The result as small tables, one set after the other."""
    yield (
        f"tokens of {result['tokenizer']}; 95% intervals: paired bootstrap over tasks, "
        f"{result['resamples']:,} resamples, seed {result['seed']}"
    )
    yield "the chain is the converted episode: a student that does what the chain says"
    for name, found in result["sets"].items():
        yield ""
        yield from _set_lines(name, found)
    yield ""
    price = result["price"]
    again = price["input"] if price["cached"] is None else price["cached"]
    label = "example prices, nobody's offer" if result["example_price"] else "prices"
    yield (
        f"{label}, for a million tokens: {price['input']:g} read, {again:g} from a "
        f"cache, {price['output']:g} written"
    )
    yield (
        f"the paper claims {result['claim']:.1%} fewer tokens (10 tasks); prompts compared with "
        f"{PEER} {result['peer'][PEER]}"
    )


def _set_lines(name: str, found: Json) -> Iterator[str]:
    solved, pairs = found["solved"], found["paired_tasks"]
    yield (
        f"{name}: {found['n']} tasks, {solved['team']} solved by the team, {solved['chain']} by "
        f"chains, {found['tool_calls_changed']} with another number of tool calls"
    )
    for reason, count in found["without_chain"].items():
        yield f"  no chain: {count} x {reason}"
    yield from _versus_lines("a solved task, failed ones paid", "compact", found["per_solved"])
    yield from _versus_lines("a solved task, failed ones paid", "full", found["per_solved"])
    yield from _versus_lines(f"a task that both solve, n={pairs}", "compact", found["paired"])
    yield f"  {'agents have the prompts of':<28}{'tokens':>8}   fewer without a cache"
    for row in found["sensitivity"]:
        saved = row["reduction"]["compact"]
        prompts = f"ours, {row['prompts']}" if row["prompts"] != PEER else PEER
        yield (
            f"  {prompts:<28}{row['tokens_a_call']:>8.0f}   {_percent(saved['none'])}"
            f"   with one {_percent(saved['task'])}"
        )
    yield f"  {'tool calls of a task':<28}{'n':>8}   fewer without a cache"
    for row in found["by_tool_calls"]:
        saved = row["reduction"]
        yield (
            f"  {row['tool_calls']:<28}{row['n']:>8}   {_percent(saved['none'])}"
            f"   with one {_percent(saved['task'])}"
        )
    needed = found["prompt_tokens_for_claim"]["compact"]
    yield (
        f"  the claimed saving needs prompts of {needed['none']:,} tokens in every agent without "
        f"a cache, of {needed['task']:,} with one"
    )


def _versus_lines(title: str, kind: PromptKind, found: Json) -> Iterator[str]:
    yield f"  {title + ', ' + kind + ' prompt':<46}{'team':>10}{'chain':>10}   fewer"
    for measure, row in found[kind].items():
        means = f"{row['team']['value']:>10.4g}{row['chain']['value']:>10.4g}"
        yield f"    {_TITLES[measure]:<44}{means}   {_percent(row['reduction'])}"


def _percent(found: Json) -> str:
    return f"{found['value']:6.1%} {interval(found['ci95'], '.1%')}"
