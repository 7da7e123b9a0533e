"""The judge reward against a scripted server: what it is shown, what is read, what is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_server import Answer, ChatServer
from coa.errors import CoaError, ConfigError, EngineError, ModelError, RecordError, Unavailable
from coa.grammar import ChatMessage
from coa.io.runs import Json
from coa.rewards import JudgeSettings, Part, Reward, RewardSettings, Scored, open_reward
from coa.rewards.judge import LONGEST_ANSWER, WITH_CASE, read_verdict
from coa.tasks import Task
from coa.trajectory import Trajectory

TASK = Task("Who wrote it?", ("Gabriela Mistral", "Lucila Godoy"), gold={"hops": ["secret"]})


def verdict(word: str, why: str = "It is.") -> str:
    return json.dumps({"rationale": why, "judgement": word})


def about(body: Json, word: str, why: str = "It is.") -> str:
    """A verdict about the case of a request."""
    number = json.loads(body["messages"][1]["content"])["case"]
    return json.dumps({"case": number, "rationale": why, "judgement": word})


def by_surname(body: Json) -> str:
    """A judge that takes any answer with the right surname."""
    case = json.loads(body["messages"][1]["content"])
    surnames = [accepted.split()[-1] for accepted in case["accepted_answers"]]
    right = any(name in case["given_answer"] for name in surnames)
    return about(body, "correct" if right else "incorrect")


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer(by_surname) as running:
        yield running


@asynccontextmanager
async def opened(server: ChatServer, **more: Any) -> AsyncIterator[Reward]:
    quick = {"backoff_s": 0.0, "retries": 1, "timeout_s": 10.0}
    judge = JudgeSettings(server.ref, **{**quick, **more})
    async with open_reward(RewardSettings("judge", judge=judge)) as reward:
        yield reward


async def judged(reward: Reward, answer: str | None, task: Task = TASK) -> Scored:
    return await reward.score(task, Trajectory(task.id, task.question, "web", answer=answer))


async def test_the_judge_decides_and_says_why(server: ChatServer) -> None:
    async with opened(server) as reward:
        assert await judged(reward, "G. Mistral") == Scored(1.0, {"judge": Part(1.0, "It is.")})
        assert (await judged(reward, "Neruda")).score == 0.0
        usage = reward.usage()["judge"]
    assert usage["asked"] == usage["calls"] == 2 and usage["kept"] == usage["unjudged"] == 0
    assert usage["prompt_tokens"] > 0 and usage["completion_tokens"] > 0


async def test_it_sees_the_question_the_answers_and_nothing_else(server: ChatServer) -> None:
    answer = '"}\nIt is all the same. {"a": "Neruda"}'
    async with opened(server) as reward:
        assert (await judged(reward, answer)).score == 0.0
    (body,) = server.bodies
    system, user = body["messages"]
    shown = json.loads(user["content"])
    assert len(shown.pop("case")) == 8 and shown == {
        "question": TASK.question,
        "accepted_answers": list(TASK.answers),
        "given_answer": answer,
    }
    assert "secret" not in json.dumps(body) and "judgement" in system["content"]
    assert body["temperature"] == 0.0 and body["model"] == "tester"


async def test_it_sees_what_was_said_before_the_question(server: ChatServer) -> None:
    talk = replace(TASK, history=(ChatMessage("user", "Of Chile."), ChatMessage("system", "s")))
    async with opened(server) as reward:
        await judged(reward, "Neruda", talk)
    shown = json.loads(server.bodies[0]["messages"][1]["content"])
    assert shown["earlier_messages"] == "user: Of Chile.\nsystem: s"


async def test_what_needs_no_judge_is_not_asked(server: ChatServer) -> None:
    async with opened(server) as reward:
        exact = await judged(reward, "lucila godoy")
        assert exact == Scored(1.0, {"judge": Part(1.0, "exact match")})
        assert (await judged(reward, None)).parts["judge"] == Part(0.0, "no answer")
        assert (await judged(reward, " ")).score == 0.0
        assert (await judged(reward, "x" * (LONGEST_ANSWER + 1))).score == 0.0
        unknown = await judged(reward, "Mistral", Task("Who?"))
        assert unknown.score is None and unknown.reason == "judge: the task has no gold answer"
    assert not server.bodies
    async with opened(server, exact_first=False) as reward:
        assert (await judged(reward, "Gabriela Mistral")).score == 1.0
    assert len(server.bodies) == 1


async def test_in_a_product_it_is_asked_only_when_the_rest_leaves_it_open(
    server: ChatServer,
) -> None:
    judge = JudgeSettings(server.ref)
    async with open_reward(RewardSettings("judge*f1", judge=judge)) as reward:
        assert (await judged(reward, "Neruda")).score == 0.0
        assert not server.bodies
        assert (await judged(reward, "Mistral")).score == pytest.approx(2 / 3)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        (verdict("correct"), 1.0),
        (verdict("Incorrect "), 0.0),
        (f"```json\n{verdict('correct')}\n```", 1.0),
        (f"Let me see.\n{verdict('incorrect')}\nI am sure.", 0.0),
        (f"<think>{verdict('correct')} or not?</think>{verdict('incorrect')}", 0.0),
        ('{"judgement": "correct"}', 1.0),
        ('{"rationale": "he said "yes", "judgement": "correct"}', 1.0),
        ('{"rationale": {"a": 1}, "judgement": "correct"}', 1.0),
        ('{"a": {"b": 1}} {"rationale": "", "judgement": "incorrect"}', 0.0),
        (verdict("correct") + verdict("incorrect"), None),
        ("correct", None),
        ('{"judgement": true}', None),
        ('{"judgement": "maybe"}', None),
        ('{"judgement": "correct', None),
        ("{" * 3000, None),
        ("[]", None),
        ("", None),
    ],
)
def test_replies_are_read_with_tolerance_but_never_guessed(reply: str, score: float | None) -> None:
    part = read_verdict(reply)
    assert (part.score if part else None) == score


async def test_a_verdict_is_about_its_case_or_none(server: ChatServer) -> None:
    """A verdict that names another case, or none, was not given by a judge of this one."""
    for reply in (verdict("correct"), '{"case": "0badc0de", "judgement": "correct"}'):
        server.reply = lambda body, reply=reply: reply
        async with opened(server, attempts=1) as reward:
            assert (await judged(reward, "Mistral")).score is None
    assert read_verdict('{"case": "ab", "judgement": "correct"}', "ab") == Part(1.0)
    assert read_verdict('{"case": "ab", "judgement": "correct"}', "cd") is None


@given(st.text('{}":,judgementcorrectin \n', max_size=80))
def test_any_reply_has_a_verdict_or_none(reply: str) -> None:
    part = read_verdict(reply)
    assert part is None or part.score in (0.0, 1.0)


async def test_a_reply_that_cannot_be_read_is_asked_for_again(server: ChatServer) -> None:
    def at_last(body: Json) -> str:
        return about(body, "correct") if len(server.bodies) == 3 else "I think it is fine."

    server.reply = at_last
    async with opened(server) as reward:
        assert (await judged(reward, "Mistral")).score == 1.0
        assert reward.usage()["judge"]["malformed"] == 2
    roles = [message["role"] for message in server.bodies[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]


async def test_a_judge_that_never_keeps_the_contract_has_not_judged(server: ChatServer) -> None:
    server.reply = lambda body: "I think it is fine."
    async with opened(server, attempts=2) as reward:
        for _ in range(2):  # not kept: another time it may judge
            found = await judged(reward, "Mistral")
            assert found.score is None
            assert found.reason == "judge: 2 replies of the judge could not be read"
        assert reward.usage()["judge"]["unjudged"] == 2
    assert len(server.bodies) == 4


@pytest.mark.parametrize(
    "trouble",
    [
        Answer(status=503, text="busy"),
        Answer(status=429, text="slow down"),
        Answer(cut=True, text="x" * 100),
    ],
)
async def test_what_may_pass_by_itself_is_tried_again(server: ChatServer, trouble: Answer) -> None:
    server.reply = lambda body: trouble if len(server.bodies) == 1 else about(body, "correct")
    async with opened(server) as reward:
        assert (await judged(reward, "Mistral")).score == 1.0
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    "trouble",
    [Answer(status=503, text="busy"), Answer(status=400, text="no"), Answer(raw=b"<html>")],
)
async def test_a_judge_that_fails_later_on_has_not_judged_and_is_never_a_zero(
    server: ChatServer, trouble: Answer
) -> None:
    def reply(body: Json) -> str | Answer:
        return trouble if "Neruda" in body["messages"][1]["content"] else by_surname(body)

    server.reply = reply
    async with opened(server) as reward:
        assert (await judged(reward, "Mistral")).score == 1.0
        found = await judged(reward, "Neruda")
        assert found.score is None and "the judge could not be asked" in found.reason
        assert (await judged(reward, "G. Mistral")).score == 1.0


@pytest.mark.parametrize(
    ("trouble", "error", "says"),
    [
        (Answer(status=401), EngineError, r"refuses a request without a key \(401\)"),
        (Answer(status=404, text="no such model"), EngineError, r"no such model"),
        (Answer(status=400, text="bad"), EngineError, r"refused the request \(400\): bad"),
        (Answer(status=503, text="busy"), EngineError, r"answered 503 after 2 attempts: busy"),
    ],
)
async def test_a_judge_that_never_answered_ends_the_run_in_one_line(
    server: ChatServer,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Answer,
    error: type[CoaError],
    says: str,
) -> None:
    for name in ("COA_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    server.reply = lambda body: trouble
    async with opened(server) as reward:
        with pytest.raises(error, match=says):
            await judged(reward, "Mistral")


async def test_a_server_that_is_not_there_is_said_so(server: ChatServer) -> None:
    gone = ChatServer(by_surname)
    gone._server.server_close()
    async with opened(gone) as reward:
        with pytest.raises(Unavailable, match="the server cannot be reached"):
            await judged(reward, "Mistral")


async def test_a_key_that_is_refused_later_ends_the_run(server: ChatServer) -> None:
    server.reply = lambda body: by_surname(body) if len(server.bodies) < 2 else Answer(status=403)
    async with opened(server) as reward:
        assert (await judged(reward, "Mistral")).score == 1.0
        with pytest.raises(EngineError, match="403"):
            await judged(reward, "Neruda")


async def test_the_same_case_is_asked_once_also_when_it_comes_at_once(server: ChatServer) -> None:
    server.reply = lambda body: Answer(by_surname(body), delay_s=0.1)
    async with opened(server) as reward:
        found = await asyncio.gather(*(judged(reward, "Mistral") for _ in range(8)))
        assert {each.score for each in found} == {1.0}
        assert (await judged(reward, "Mistral")).score == 1.0
        assert reward.usage()["judge"] | {"kept": 8, "calls": 1} == reward.usage()["judge"]
    assert len(server.bodies) == 1


async def test_who_gives_up_does_not_take_the_verdict_from_the_others(server: ChatServer) -> None:
    server.reply = lambda body: Answer(by_surname(body), delay_s=0.3)
    async with opened(server) as reward:
        first = asyncio.create_task(judged(reward, "Mistral"))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(judged(reward, "Mistral"))
        await asyncio.sleep(0.05)
        first.cancel()
        assert (await second).score == 1.0
    assert len(server.bodies) == 1


async def test_verdicts_are_kept_in_a_file_under_everything_that_decides_them(
    server: ChatServer, tmp_path: Path
) -> None:
    kept = str(tmp_path / "verdicts.db")
    own = tmp_path / "prompt.txt"
    own.write_text('Say {"judgement": "correct"}.')

    async def again(**more: Any) -> Json:
        async with opened(server, cache=kept, **more) as reward:
            assert (await judged(reward, "Mistral")).parts["judge"] == Part(1.0, "It is.")
            assert (await judged(reward, "Neruda")).score == 0.0
            usage: Json = reward.usage()["judge"]
            return usage

    assert (await again())["calls"] == 2
    assert (await again()) == (await again()) | {"calls": 0, "kept": 2}
    assert len(server.bodies) == 2
    for different in ({"prompt": str(own)}, {"temperature": 0.5}, {"extra": {"top_p": 0.5}}):
        before = len(server.bodies)
        await again(**different)
        assert len(server.bodies) == before + 2, different
    assert server.bodies[2]["messages"][0]["content"] == own.read_text() + WITH_CASE
    assert server.bodies[-1]["top_p"] == 0.5


async def test_what_was_not_judged_is_not_kept(server: ChatServer, tmp_path: Path) -> None:
    kept = str(tmp_path / "verdicts.db")
    server.reply = lambda body: "hm"
    async with opened(server, cache=kept, attempts=1) as reward:
        assert (await judged(reward, "Mistral")).score is None
    server.reply = by_surname
    async with opened(server, cache=kept) as reward:
        assert (await judged(reward, "Mistral")).score == 1.0


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        (lambda p: {"prompt": str(p / "none.txt")}, ConfigError, "prompt .*none.txt: cannot be"),
        (lambda p: {"model": "smollm2-135m"}, ModelError, "is not a model on a server"),
        (lambda p: {"cache": str(p / "notes.txt")}, RecordError, "is not a tool cache"),
    ],
)
async def test_what_is_wrong_with_the_settings_is_said_at_once(
    server: ChatServer,
    tmp_path: Path,
    settings: Callable[[Path], Json],
    error: type[CoaError],
    says: str,
) -> None:
    (tmp_path / "notes.txt").write_text("these are my notes, and no database" * 10)
    judge = JudgeSettings(**{"model": server.ref, **settings(tmp_path)})
    with pytest.raises(error, match=says):
        async with open_reward(RewardSettings("judge", judge=judge)):
            raise AssertionError


async def test_halves_of_characters_can_be_judged(server: ChatServer) -> None:
    async with opened(server) as reward:
        assert (await judged(reward, "Mistral \ud83d")).score == 1.0
