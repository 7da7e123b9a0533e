"""What an evaluation spent: calls by agent as the loop counted them, money, and seconds apart."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.errors import ConfigError
from coa.evaluation.spending import calls_by_agent, calls_of, find_tariff, latency, money
from coa.io.machine import in_words
from coa.trajectory import StopReason, Trajectory, Usage
from playing import AGAIN, ANSWER, REPLAN, SEARCH, SUGGEST, play

CRAWL = "<think>i</think><crawl_page>https://a.example</crawl_page>"
TURNS = {
    "mhqa": [SEARCH.format("x"), AGAIN.format("x"), AGAIN.format("y"), ANSWER, "no tag", ""],
    "web": [REPLAN, CRAWL, SUGGEST.format(2) + REPLAN, "<plan>", CRAWL + "</crawl_page>", ""],
    "code": ["<plan>p</plan><think>t</think><code>```py\nprint('</code>')\n```</code>", "", "x"],
}


@settings(max_examples=60, deadline=None)
@given(
    grammar=st.sampled_from(sorted(TURNS)),
    places=st.lists(st.integers(0, 5), max_size=7),
    turn_tokens=st.sampled_from([20, 60, 400]),
)
def test_the_calls_that_are_read_are_those_that_were_made(
    grammar: str, places: list[int], turn_tokens: int
) -> None:
    turns = [TURNS[grammar][place % len(TURNS[grammar])] for place in places]
    played = asyncio.run(play(turns, grammar=grammar, turns=6, turn_tokens=turn_tokens))
    called = calls_of(played)
    assert len(called) == played.usage.tool_calls
    assert {call.role for call in called} <= set(played.tools)


async def test_calls_are_counted_by_agent() -> None:
    two = await play([REPLAN, CRAWL, CRAWL], grammar="web", turns=3)
    none = await play([""], grammar="web", turns=1)
    assert two.usage.tool_calls == 3
    assert calls_by_agent([two, none]) == {"crawl_page": 1.0, "web_search": 0.5}


async def test_a_call_that_a_budget_cut_is_not_counted() -> None:
    whole = SEARCH.format("x")
    cut = await play([whole], turn_tokens=len(whole) - 3)
    assert (cut.stop, cut.usage.tool_calls) == (StopReason.TOKENS, 0)
    assert calls_of(cut) == []


# -- money -----------------------------------------------------------------------------------


def spent(prompt: int, cached: int, sampled: int) -> Trajectory:
    return Trajectory("t", "q?", "mhqa", usage=Usage(prompt, cached, sampled))


def test_money_is_what_tokens_cost_at_the_price_of_the_model() -> None:
    tariff = find_tariff("prices.toml", "example-small")
    assert tariff is not None and tariff.currency == "USD"
    found = money([spent(3_000_000, 1_000_000, 1_000_000), spent(0, 0, 0)], 1.0, tariff)
    assert found == {"per_task": 0.4875, "per_solved": 0.975, "currency": "USD"}
    assert money([spent(10, 0, 0)], 0, tariff)["per_solved"] is None


def test_prices_are_a_table_or_three_numbers() -> None:
    assert find_tariff("", "any") is None
    plain = find_tariff("1,0.1,5", "any")
    assert plain is not None and plain.price.of(2_000_000, 1_000_000, 1_000_000) == 6.1
    served = "openai:example-local@http://127.0.0.1:1/v1"
    local = find_tariff("prices.toml", served)
    assert local is not None and money([spent(9, 0, 9)], 1, local)["per_task"] == 0.0
    with pytest.raises(ConfigError, match="has no price of the model 'smollm2-135m'"):
        find_tariff("prices.toml", "smollm2-135m")


# -- seconds ---------------------------------------------------------------------------------


def test_seconds_are_of_rollouts_and_the_last_time_counts(tmp_path: Path) -> None:
    lines = [{"at": "now", "event": "started"}, {"task_id": "t0", "sample": 0, "total": 99.0}]
    for n in range(20):
        line = {"task_id": f"t{n}", "sample": 0, "total": n + 1.0, "engine": 0.5, "tools": 0.25}
        lines.append(line)
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"task_id": "t2'  # torn by a kill
    (tmp_path / "timings.jsonl").write_text(text)
    assert latency(tmp_path, 7.0, concurrency=8) == {
        "n": 20,
        "concurrency": 8,
        "machine": in_words(),
        "mean": 10.5,
        "p50": 10.0,
        "p95": 19.0,
        "per_solved": 30.0,
        "engine": 0.5,
        "tools": 0.25,
    }
    assert latency(tmp_path, 0, concurrency=8)["per_solved"] is None


def test_without_timings_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "timings.jsonl").write_text('{"event": "started"}\n')
    assert latency(tmp_path, 1.0, concurrency=8) == {"n": 0}
