"""Model calls: paid for once, within budgets, retried when that helps, refused in one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chat_server import Answer, ChatServer, contents, who
from chat_team import CALLS, PRICES, TASKS, lines, one_line, record, settings, two_steps
from coa.engines.transport import ServerRefused
from coa.errors import CoaError, ConfigError, ModelError, RecordError, Unavailable, UsageError
from coa.grammar import ChatMessage
from coa.io.runs import Json, read_jsonl
from coa.recording.budget import BudgetSpent, Purse
from coa.recording.chat import ChatClient, Journal, Request, count_tokens, in_turns, journal_of
from coa.recording.episode import load_episodes
from coa.recording.llm import LLMSettings

REQUEST = Request("t", "reader", [ChatMessage("system", "Be brief."), ChatMessage("user", "Who?")])


async def ask(server: ChatServer, request: Request = REQUEST, **options: Any) -> Any:
    client = ChatClient(settings(server, **options))
    try:
        return await client.answer(request, Purse())
    finally:
        await client.close()


# -- what is counted -----------------------------------------------------------------------------


async def test_tokens_are_counted_by_the_server_and_priced_by_the_table(tmp_path: Path) -> None:
    table = tmp_path / "prices.toml"
    table.write_text(PRICES)
    with ChatServer(lambda body: Answer("one two", cached=2)) as server:
        paid = await ask(server, prices=str(table))
    call = paid.call
    assert (call.text, call.model) == ("one two", "tester")
    assert (call.prompt_tokens, call.cached_tokens, call.sampled_tokens) == (3, 2, 2)
    assert call.cost == pytest.approx((1 * 2.0 + 2 * 0.5 + 2 * 8.0) / 1e6)
    assert not paid.estimated and not paid.cut
    assert server.bodies == [
        {
            "model": "tester",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Who?"},
            ],
            "temperature": 0.0,
            "max_tokens": 1024,
            "seed": 0,
        }
    ]


async def test_what_the_server_does_not_count_is_estimated() -> None:
    with ChatServer(lambda body: Answer("x" * 40, counted=False, finish="length")) as server:
        paid = await ask(server)
    assert paid.estimated and paid.cut and paid.call.cost is None
    assert paid.call.prompt_tokens == (3 + 4) + (1 + 4)  # four bytes a token, four for a message
    assert paid.call.sampled_tokens == 10 + 4 == count_tokens("x" * 40)


async def test_fields_of_a_request_can_be_added_and_left_out() -> None:
    """Newer models of OpenAI refuse `max_tokens`, a temperature, or both."""
    extra = {"seed": None, "max_completion_tokens": 9, "top_p": 0.5}
    with ChatServer(lambda body: "so") as server:
        await ask(server, Request("t", "a", REQUEST.messages, seed=7), temperature=1.0)
        await ask(server, extra=extra)
        await ask(server, without=["seed", "temperature", "max_tokens"])
    assert server.bodies[0]["seed"] == 7 and server.bodies[0]["temperature"] == 1.0
    assert server.bodies[1].keys() == {
        *("model", "messages", "temperature", "max_completion_tokens", "top_p")
    }
    assert server.bodies[2].keys() == {"model", "messages"}


async def test_a_call_sets_aside_the_longest_reply_that_it_asks_for() -> None:
    extra = {"max_completion_tokens": 5000}
    with ChatServer(lambda body: "so") as server, pytest.raises(BudgetSpent):
        await ask(server, extra=extra, budget_tokens=4000)
    assert server.bodies == []


@pytest.mark.parametrize(
    "raw",
    [
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{"message": {"content": null}}], "usage": null}',
        b'{"choices": [{"message": {"tool_calls": []}}], "usage": {"prompt_tokens": "many"}}',
        b'{"choices": "none", "usage": [1]}',
        b"[1, 2]",
    ],
)
async def test_an_answer_without_a_reply_is_an_empty_reply(raw: bytes) -> None:
    with ChatServer(lambda body: Answer(raw=raw)) as server:
        paid = await ask(server)
    assert paid.call.text == "" and paid.estimated and paid.call.prompt_tokens > 0


async def test_a_reply_in_parts_is_put_together() -> None:
    content = [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": " two"}]
    raw = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
    with ChatServer(lambda body: Answer(raw=raw)) as server:
        assert (await ask(server)).call.text == "one two"


def test_messages_of_one_role_in_a_row_are_sent_as_one() -> None:
    given = [ChatMessage("system", "s"), ChatMessage("user", "a"), ChatMessage("user", "b")]
    given += [ChatMessage("assistant", "c"), ChatMessage("user", "d")]
    assert in_turns(given) == [
        *(ChatMessage("system", "s"), ChatMessage("user", "a\n\nb")),
        *(ChatMessage("assistant", "c"), ChatMessage("user", "d")),
    ]


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="rounds: found 0, expected at least 1"):
        LLMSettings("openai:m@http://127.0.0.1:1", rounds=0)
    with pytest.raises(ConfigError, match="a budget of money needs a table of prices"):
        LLMSettings("openai:m@http://127.0.0.1:1", budget_money=1.0)
    with pytest.raises(ConfigError, match="max_completion_tokens is 'many', expected an integer"):
        LLMSettings("openai:m@http://127.0.0.1:1", extra={"max_completion_tokens": "many"})
    with pytest.raises(ConfigError, match="retries: found -1, expected 0 or more"):
        LLMSettings("openai:m@http://127.0.0.1:1", retries=-1)
    with pytest.raises(ConfigError, match="a budget is 0, expected more than 0"):
        ChatClient(LLMSettings("openai:m@http://127.0.0.1:1", budget_tokens=0))
    with pytest.raises(ModelError, match=r"is not a model on a server \(openai:NAME@URL\)"):
        ChatClient(LLMSettings("smollm2-135m"))


# -- trouble with the server ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [
        Answer("busy", status=429, headers={"Retry-After": "0.05"}),
        Answer("sorry", status=500),
        Answer("half of this", cut=True),
    ],
    ids=["429", "500", "cut"],
)
async def test_what_may_pass_is_tried_again(trouble: Answer, tmp_path: Path) -> None:
    """The first request of every agent meets trouble; the episodes are as if it had not."""
    seen: Counter[str] = Counter()

    def reply(body: Json) -> str | Answer:
        key = json.dumps(body)
        seen[key] += 1
        return trouble if seen[key] == 1 else two_steps(body)

    with ChatServer(reply) as server:
        await record(server, tmp_path / "a.jsonl")
        assert set(seen.values()) == {2} and len(seen) == CALLS * len(TASKS)
    with ChatServer(two_steps) as server:
        await record(server, tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


async def test_a_wrong_key_stops_the_run_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COA_API_KEY", "sk-secret-451")
    reply = Answer("bad key sk-secret-451", status=401)
    with (
        ChatServer(lambda body: reply) as server,
        pytest.raises(ServerRefused, match="refuses the key it was given") as caught,
    ):
        await record(server, tmp_path / "episodes.jsonl")
    assert "Set COA_API_KEY or OPENAI_API_KEY" in one_line(caught.value)
    assert "secret-451" not in str(caught.value) and set(server.keys) == {"Bearer sk-secret-451"}
    assert all("secret-451" not in path.read_text() for path in tmp_path.iterdir())


async def test_a_model_that_is_not_there_stops_the_run_with_one_line(tmp_path: Path) -> None:
    with (
        ChatServer(lambda body: Answer("no model tester", status=404)) as server,
        pytest.raises(ServerRefused, match=r"refused the request \(404\): no model tester") as got,
    ):
        await record(server, tmp_path / "episodes.jsonl")
    one_line(got.value)


async def test_a_refused_conversation_ends_its_episode_and_a_refused_first_one_the_run(
    tmp_path: Path,
) -> None:
    def too_long(body: Json) -> str | Answer:
        lost = "country 3" in contents(body)[1] and who(body) == "reader"
        return Answer("the context is too long", status=400) if lost else two_steps(body)

    with ChatServer(too_long) as server:
        episodes = await record(server, tmp_path / "a.jsonl")
    errors = [episode.error for episode in episodes if episode.error]
    assert len(errors) == 1 and errors[0].endswith("(400): the context is too long")
    with (
        ChatServer(lambda body: Answer("unknown field seed", status=400)) as server,
        pytest.raises(ServerRefused, match="unknown field seed"),
    ):
        await record(server, tmp_path / "b.jsonl")


async def test_a_server_that_wants_money_ends_the_run_and_spoils_no_episode(tmp_path: Path) -> None:
    """Some say it with a 400, as they refuse a single conversation."""
    out, count = tmp_path / "episodes.jsonl", 0

    def reply(body: Json) -> str | Answer:
        nonlocal count
        count += 1
        broke = Answer("Your credit balance is too low.", status=400)
        return two_steps(body) if count <= CALLS + 2 else broke

    with ChatServer(reply) as server, pytest.raises(ServerRefused, match="credit balance"):
        await record(server, out, concurrency=1)
    assert [episode.error for episode in load_episodes(out)] == [None]


async def test_a_server_that_is_not_there_is_one_line_and_nothing_is_lost(tmp_path: Path) -> None:
    out = tmp_path / "episodes.jsonl"
    count = 0

    def reply(body: Json) -> str | Answer:
        nonlocal count
        count += 1
        return two_steps(body) if count <= CALLS + 4 else Answer("down", status=503)

    with (
        ChatServer(reply) as server,
        pytest.raises(ServerRefused, match="answered 503 after 2 attempts: down"),
    ):
        await record(server, out, concurrency=1, retries=1)
    assert len(load_episodes(out)) == 1
    assert len(list(read_jsonl(journal_of(out)))) == CALLS + 4
    with pytest.raises(Unavailable, match="cannot be reached") as caught:
        await record(server, out, retries=1)
    one_line(caught.value)
    with ChatServer(two_steps) as server:  # another address, the same run
        episodes = await record(server, out)
        assert len(server.bodies) == CALLS * len(TASKS) - CALLS - 4
    assert [episode.answer for episode in episodes] == ["yes"] * 6


@pytest.mark.parametrize("raw", [b"<html>busy</html>", b'{"error": {"message": "no credit"}}'])
async def test_an_answer_that_is_none_is_one_line(raw: bytes) -> None:
    with ChatServer(lambda body: Answer(raw=raw)) as server, pytest.raises(CoaError) as caught:
        await ask(server)
    assert "busy" in one_line(caught.value) or "no credit" in one_line(caught.value)


async def test_what_was_not_sent_when_a_run_is_given_up_is_not_sent(tmp_path: Path) -> None:
    with ChatServer(lambda body: Answer("no", status=401)) as server, pytest.raises(ServerRefused):
        await record(server, tmp_path / "episodes.jsonl", concurrency=6, slots=1)
    assert len(server.bodies) == 1


# -- the journal ---------------------------------------------------------------------------------


async def test_what_was_answered_is_not_asked_again(tmp_path: Path) -> None:
    out = tmp_path / "episodes.jsonl"
    with ChatServer(two_steps) as server:
        await record(server, out)
        assert len(server.bodies) == CALLS * len(TASKS)
        whole = out.read_bytes()
        out.unlink()
        await record(server, out)
        assert len(server.bodies) == CALLS * len(TASKS) and out.read_bytes() == whole
        with journal_of(out).open("ab") as file:
            file.write(b'{"key": "half a li')
        out.unlink()
        await record(server, out, temperature=0.5)
        assert len(server.bodies) == 2 * CALLS * len(TASKS)


async def test_half_a_letter_does_not_cost_the_answer(tmp_path: Path) -> None:
    """A server may cut a reply in the middle of an emoji; JSON can hold that, UTF-8 cannot."""
    raw = rb'{"choices": [{"message": {"content": "so \ud83d"}}], "id": "\ud83d"}'
    path = tmp_path / "calls.jsonl"
    with ChatServer(lambda body: Answer(raw=raw)) as server:
        client = ChatClient(settings(server), path)
        assert (await client.answer(REQUEST, Purse())).call.text == "so ?"
        await client.close()
        client = ChatClient(settings(server), path)
        assert (await client.answer(REQUEST, Purse())).call.text == "so ?"
        await client.close()
        assert len(server.bodies) == 1


async def test_another_seed_asks_anew_even_if_the_server_is_not_told(tmp_path: Path) -> None:
    with ChatServer(lambda body: "so") as server:
        client = ChatClient(settings(server, without=["seed"]), tmp_path / "calls.jsonl")
        for seed in (0, 1, 0):
            await client.answer(Request("t", "reader", REQUEST.messages, seed), Purse())
        await client.close()
    assert len(server.bodies) == 2 and server.bodies[0] == server.bodies[1]


def test_a_damaged_journal_is_one_line_and_is_not_left_locked(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text('{"key": "x"}\n')
    for _ in range(2):
        with pytest.raises(RecordError, match=r"calls.jsonl:1: no field 'model'") as caught:
            Journal(path)
        one_line(caught.value)


def test_a_journal_is_open_in_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    journal = Journal(path)
    with pytest.raises(UsageError, match="in use by another process") as caught:
        Journal(path)
    one_line(caught.value)
    journal.close()
    Journal(path).close()


async def test_a_request_in_flight_is_kept_when_its_work_is_given_up(tmp_path: Path) -> None:
    """One task fails while the others wait for answers: these are kept."""
    asked, go_on = threading.Barrier(len(TASKS), timeout=20), threading.Event()

    def reply(body: Json) -> str | Answer:
        asked.wait()
        if "country 0" in contents(body)[1]:
            threading.Timer(0.3, go_on.set).start()
            return Answer("no", status=401)
        go_on.wait(20)
        return two_steps(body)

    out = tmp_path / "episodes.jsonl"
    with ChatServer(reply) as server, pytest.raises(ServerRefused):
        await record(server, out, concurrency=len(TASKS))
    kept = [line["task_id"] for _, line in read_jsonl(journal_of(out))]
    assert sorted(kept) == sorted(task.id for task in TASKS[1:])


def test_a_killed_run_pays_for_nothing_twice_and_ends_with_the_same_file(tmp_path: Path) -> None:
    """kill -9 in the middle of episodes, three times, by what the server has answered."""
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "episodes.jsonl"
    TASKS.save(tasks)
    answered: Counter[str] = Counter()
    kill_at = [5, 20, (CALLS - 1) * len(TASKS) + 1]  # at the last, one task at least is done
    reached = threading.Event()

    def reply(body: Json) -> str | Answer:
        if kill_at and answered.total() >= kill_at[0]:
            reached.set()
            return Answer("too late", delay_s=30)  # the process is dead before it comes
        answered[json.dumps(body)] += 1
        return two_steps(body)

    with ChatServer(reply) as server:
        command = [sys.executable, "-m", "coa", "record", "--tasks", str(tasks), "--teacher", "llm"]
        command += [f"model={server.ref}", "temperature=0.0", "structured=off"]
        command += ["backoff_s=0.01", "--out"]
        while kill_at:
            reached.clear()
            with subprocess.Popen([*command, str(out)]) as process:
                assert reached.wait(60)
                # What was answered must have arrived: the journal tells, not the clock.
                wait_until(lambda: lines(journal_of(out)) == answered.total())
                wait_until(lambda: len(kill_at) > 1 or lines(out))
                process.send_signal(signal.SIGKILL)
            kill_at.pop(0)
        assert 0 < lines(out) < len(TASKS)
        subprocess.run([*command, str(out)], check=True, timeout=120)
        assert set(answered.values()) == {1} and answered.total() == CALLS * len(TASKS)
        answered.clear()
        subprocess.run([*command, str(tmp_path / "whole.jsonl")], check=True, timeout=120)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert lines(journal_of(out)) == CALLS * len(TASKS)


def wait_until(reached: Any) -> None:
    for _ in range(600):
        if reached():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it did not come to that")
