"""Prices and budgets of model calls, and what a run is expected to cost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from chat_server import ChatServer, contents, who
from chat_team import CALLS, PRICES, TASKS, lines, one_line, record, two_steps
from coa.environments import make_tasks
from coa.errors import ConfigError
from coa.io.runs import Json, read_jsonl
from coa.recording import load_teacher
from coa.recording.budget import Amount, BudgetSpent, Price, Purse, find_price
from coa.recording.chat import journal_of
from coa.recording.episode import Message
from coa.recording.llm import CostEstimate, LLMSettings, LLMTeacher
from coa.recording.record import Recording, rehearse_recording, run_recording
from coa.tasks import Task, TaskSet


def test_a_price_table_is_checked(tmp_path: Path) -> None:
    table = tmp_path / "prices.toml"
    table.write_text(PRICES)
    assert find_price("", "tester") is None
    assert find_price(str(table), "tester") == Price(2.0, 8.0, 0.5)
    assert Price(2.0, 8.0).of(100, 50, 10) == pytest.approx(280 / 1e6)
    with pytest.raises(ConfigError, match="no price of the model 'testr'"):
        find_price(str(table), "testr")
    table.write_text("[models.tester]\ninput = -1.0\noutput = 1.0\n")
    with pytest.raises(ConfigError, match=r"a price is -1.0, expected 0 or more"):
        find_price(str(table), "tester")


async def test_a_run_stops_at_its_budget_and_continues_with_a_larger_one(tmp_path: Path) -> None:
    out, table = tmp_path / "episodes.jsonl", tmp_path / "prices.toml"
    table.write_text(PRICES)
    with ChatServer(two_steps) as server:
        whole = await record(server, tmp_path / "whole.jsonl", max_tokens=50, prices=str(table))
        tokens = [episode.count_tokens(len).total for episode in whole]
        money = sum(episode.cost or 0.0 for episode in whole)
        assert money > 0
        server.bodies.clear()
        half = {"budget_tokens": sum(tokens) // 2, "budget_money": money / 2}
        for option, most in half.items():
            out.unlink(missing_ok=True)
            journal_of(out).unlink(missing_ok=True)
            with pytest.raises(BudgetSpent, match="does not suffice for another call") as caught:
                await record(
                    server, out, concurrency=2, max_tokens=50, prices=str(table), **{option: most}
                )
            said = one_line(caught.value)
            done = lines(out)
            assert said.startswith("the budget of ")
            assert said.endswith(f"Raise {option} and continue.") and 0 < done < len(TASKS)
            kept = [line for _, line in read_jsonl(journal_of(out))]
            spent = sum(line["prompt_tokens"] + line["sampled_tokens"] for line in kept)
            assert f"{spent} tokens and" in said and spent <= sum(tokens) * 0.6
            assert sum(line["cost"] for line in kept) <= money * 0.6
        await record(server, out, max_tokens=50, prices=str(table), budget_money=money * 9)
        assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
        keys = [line["key"] for _, line in read_jsonl(journal_of(out))]
        assert len(keys) == len(set(keys)) == CALLS * len(TASKS)


async def test_calls_at_once_do_not_spend_what_is_left_twice() -> None:
    """Twenty calls want 100 each of 1000 and use 90: no more are begun than can be paid."""
    purse, at_once, paid = Purse(1000), 0, 0

    async def call() -> None:
        nonlocal at_once, paid
        await purse.reserve(Amount(100))
        at_once += 100
        assert purse.spent.tokens + at_once <= 1000
        await asyncio.sleep(0)
        at_once -= 100
        paid += 1
        purse.settle(Amount(100), Amount(90))

    results = await asyncio.gather(*(call() for _ in range(20)), return_exceptions=True)
    spent = [each for each in results if isinstance(each, BudgetSpent)]
    assert paid == 11 and purse.spent.tokens == 990 and len(spent) == 9
    assert purse.reserved == Amount(0)


async def test_a_task_over_its_own_budget_is_an_episode_with_an_error(tmp_path: Path) -> None:
    def reply(body: Json) -> str:
        long = "country 2" in contents(body)[1] and who(body) == "planner"
        return two_steps(body) + " " * 9 + "more " * 3000 * long

    with ChatServer(reply) as server:
        episodes = await record(server, tmp_path / "a.jsonl", max_tokens=50, task_tokens=4500)
    errors = [episode.error for episode in episodes]
    assert errors[2] == "over the task's budget of 4500 tokens"
    assert errors.count(None) == 5
    assert episodes[2].calls and episodes[2].answer is None
    for place in episodes[2].calls:
        said = episodes[2].events[place]
        assert isinstance(said, Message) and said.call is not None


def estimated(tasks: Sequence[Task], out: Path, **options: str) -> CostEstimate:
    """What `coa record --dry-run` says; there is no server."""
    given = {"model": "openai:tester@http://127.0.0.1:1", **options}
    recording = Recording(tasks=TaskSet(tuple(tasks)), teacher="llm", options=given)
    found = rehearse_recording(recording, out)
    assert isinstance(found, CostEstimate)
    return found


def test_an_estimate_makes_no_call_and_comes_near_what_a_smooth_run_takes(tmp_path: Path) -> None:
    table = tmp_path / "prices.toml"
    table.write_text(PRICES)
    tasks = list(make_tasks("atlas-mhqa", "train", 150, seed=1))
    tasks += [Task(f"Compute {n}.", meta={"set": "gym-code"}) for n in range(50)]
    found = estimated(tasks, tmp_path / "episodes.jsonl", prices=str(table))
    assert found.tasks == 200 and found.money is not None
    assert found.money == pytest.approx((found.prompt_tokens * 2 + found.sampled_tokens * 8) / 1e6)
    assert found.calls == 150 * (1 + 3 * 3 + 2) + 50 * (1 + 2 + 2)
    said = found.lines()
    assert said[0].startswith(f"200 tasks: about {found.calls} model calls and ")
    assert "in money" in said[0] and "3 look-ups a task" in said[2]
    nothing = estimated([], tmp_path / "episodes.jsonl", prices=str(table))
    assert nothing == CostEstimate(0, 0, 0, 0, 0.0)


def test_an_estimate_knows_the_tools_that_a_task_declares(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"sides": {"type": "integer"}}, "required": ["sides"]}
    declared = {"name": "area", "description": "The area of a shape.", "parameters": schema}
    longer = {**declared, "description": "The area of a shape. " * 20}
    found, more = [
        estimated([Task("Draw it.", meta={"tools": [each]})], tmp_path / "episodes.jsonl")
        for each in (declared, longer)
    ]
    assert found.calls == 1 + 3 * 3 + 2
    assert more.prompt_tokens > found.prompt_tokens, "the declaration is in the prompt"


def test_the_identity_of_a_run_is_what_decides_its_record(tmp_path: Path) -> None:
    table = tmp_path / "prices.toml"
    table.write_text(PRICES)
    base = LLMTeacher(LLMSettings("openai:tester@http://127.0.0.1:1")).identity()
    moved = LLMSettings("openai:tester@http://127.0.0.1:2", budget_tokens=9, slots=1, retries=0)
    assert LLMTeacher(moved).identity() == base
    for other in ({"temperature": 1.0}, {"max_tokens": 5}, {"task_tokens": 5}, {"rounds": 9}):
        changed = LLMSettings("openai:tester@http://127.0.0.1:1", **other)
        assert LLMTeacher(changed).identity() != base
    priced = LLMSettings("openai:tester@http://127.0.0.1:1", prices=str(table))
    assert LLMTeacher(priced).identity()["price"] == {"input": 2.0, "output": 8.0, "cached": 0.5}


# -- as a stage ----------------------------------------------------------------------------------


def test_a_recording_goes_on_where_its_budget_ended(tmp_path: Path) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "episodes.jsonl"
    TASKS.save(tasks)
    with ChatServer(two_steps) as server:

        def recording(**options: int) -> Recording:
            given = {"model": server.ref, "max_tokens": 50, "structured": "off", **options}
            return Recording(tasks=tasks, teacher="llm", options=given)

        expected = rehearse_recording(recording(), out)
        assert expected.to_json()["calls"] == 12 * len(TASKS) and server.bodies == []
        with pytest.raises(BudgetSpent, match=r"episodes.jsonl: \d tasks are done; the budget of"):
            run_recording(recording(budget_tokens=9000), out)
        paid = len(server.bodies)
        assert paid == lines(journal_of(out)) > 0
        recorded = run_recording(replace(recording(), workers=2), out)
        assert (recorded.answered, recorded.calls) == (len(TASKS), CALLS * len(TASKS))
        assert recorded.lines()[-1] == f"model calls {recorded.calls}, {recorded.tokens} tokens"
        assert len(server.bodies) == CALLS * len(TASKS) == lines(journal_of(out))
        with pytest.raises(ConfigError, match="started with max_tokens 50, and it is 60 here"):
            run_recording(recording(max_tokens=60), out)


def test_the_settings_of_a_team_are_checked() -> None:
    teacher = load_teacher("llm", model="openai:m@http://127.0.0.1:1", extra={"seed": None})
    assert isinstance(teacher, LLMTeacher) and teacher.settings.extra == {"seed": None}
    with pytest.raises(ConfigError, match="budget_token is not a setting"):
        load_teacher("llm", model="openai:m@http://127.0.0.1:1", budget_token=5)
    with pytest.raises(ConfigError, match="slots is '8', expected an integer"):
        load_teacher("llm", model="openai:m@http://127.0.0.1:1", slots="8")
