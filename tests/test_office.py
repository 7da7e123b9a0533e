"""The office of the examples: its questions, its tools, and the model that plays its agents."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import httpx
import pytest

OFFICE = Path(__file__).resolve().parent.parent / "examples" / "office"
sys.path.append(str(OFFICE))

import office  # noqa: E402
from model import Asked, Asking, Model, Reply, Served, Turn  # noqa: E402
from questions import SHARES, Part, questions  # noqa: E402


def words_of(asked: list[dict]) -> set[str]:
    return {word for each in asked for word in re.findall(r"[A-Z]\w+ [A-Z]\w+", each["question"])}


def test_the_files_are_what_the_script_makes() -> None:
    for name, count in (("train", 400), ("test", 100)):
        lines = (OFFICE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert list(map(json.loads, lines)) == questions(count, name == "test", 0)


def test_what_is_asked_in_a_test_was_not_trained_on() -> None:
    train, test = Part(False), Part(True)
    for name in ("years", "topics", "groups"):
        assert not set(getattr(train, name)) & set(getattr(test, name)), name
    firsts = [{each.name.split()[0] for each in part.customers} for part in (train, test)]
    assert not firsts[0] & firsts[1]
    asked = [questions(400, False, 0), questions(100, True, 0)]
    names = [words_of(each) for each in asked]
    assert not names[0] & names[1]
    years = [set(re.findall(r"\b20\d\d\b", json.dumps(each))) for each in asked]
    assert years[0] and not years[0] & years[1]
    for each in asked:
        assert {one["meta"]["kind"] for one in each} == set(SHARES)


def test_every_question_is_understood() -> None:
    for each in questions(400, False, 1) + questions(200, True, 1):
        asked = Asked.found_in(f"New task:\n{each['question']}")
        assert asked and (asked.kind == each["meta"]["kind"] or each["meta"]["kind"] == "unknown")


def one_agent(question: str, seed: int = 0, slips: float = 0.0, wrong: float = 0.0) -> str:
    """The answer of the scripted model with all tools of the office at hand."""
    tools = {each.__name__: each for each in office.tools}
    asking = Asking("", [Turn("user", question)], {name: {} for name in tools})
    for step in range(12):
        reply = Model(seed, slips, wrong).reply(asking)
        if not reply.calls:
            return reply.text
        named = [(f"{step}-{at}", *call) for at, call in enumerate(reply.calls)]
        asking.turns.append(Turn("assistant", reply.thought, named))
        for key, name, arguments in named:
            try:
                result = tools[name](**arguments)
            except LookupError as error:
                result = f"Error: {error}"
            asking.turns.append(Turn("tool", result, answers=key))
    raise AssertionError(f"it did not come to an end: {asking.turns}")


def test_the_model_answers_from_what_tools_return() -> None:
    for each in questions(400, False, 0) + questions(100, True, 0):
        assert one_agent(each["question"]) == each["answers"][0]


def test_half_a_name_costs_a_try_and_no_answer() -> None:
    asked = questions(100, False, 2)
    assert all(one_agent(each["question"], 5, slips=1.0) == each["answers"][0] for each in asked)


def test_a_forgotten_step_gives_a_wrong_answer() -> None:
    asked = [each for each in questions(200, False, 2) if each["meta"]["kind"] == "converted"]
    assert not any(
        one_agent(each["question"], 5, wrong=1.0) == each["answers"][0] for each in asked
    )


@pytest.mark.parametrize("route", ["chat/completions", "responses"])
def test_a_stream_says_what_a_whole_reply_says(route: str) -> None:
    question = "What did Willow Books pay in 2014?"
    schema = {"type": "object", "properties": {"customer": {"type": "string"}}}
    tool = {"name": "lookup_invoice", "parameters": schema}
    chat = {
        "messages": [{"role": "user", "content": question}],
        "tools": [{"type": "function", "function": tool}],
        "stream_options": {"include_usage": True},
    }
    responses = {"input": question, "tools": [{"type": "function", **tool}]}
    body = {"model": "any", **(chat if route == "chat/completions" else responses)}
    with Served(Model()) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        whole = httpx.post(f"{server.url}/{route}", json=body).text
        stream = httpx.post(f"{server.url}/{route}", json=body | {"stream": True}).text
        server.shutdown()
    called = re.compile(r'"arguments": "((?:[^"\\]|\\.)*)"')
    assert "lookup_invoice" in whole and "lookup_invoice" in stream
    pieces = [json.loads(f'"{piece}"') for piece in called.findall(stream)]
    assert json.loads(json.loads(f'"{called.findall(whole)[0]}"')) == {
        "customer": "Willow Books",
        "year": 2014,
    }
    together = "".join(pieces) if route == "chat/completions" else pieces[-1]
    assert json.loads(together) == {"customer": "Willow Books", "year": 2014}


def test_a_busy_server_answers_the_second_time() -> None:
    body = {"model": "any", "messages": [{"role": "user", "content": "Hello"}]}
    with Served(Model(), faults=1.0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        codes = [httpx.post(f"{server.url}/chat/completions", json=body).status_code]
        codes.append(httpx.post(f"{server.url}/chat/completions", json=body).status_code)
        server.shutdown()
    assert codes == [429, 200]
    assert isinstance(Model().reply(Asking("", [Turn("user", "Hello")], {})), Reply)
