"""What clients may ask for, and what they are shown: pure functions, tried with anything."""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coa.environment import ToolSettings
from coa.errors import UsageError
from coa.grammar import load_grammar
from coa.grammar.load import GrammarBook
from coa.io.runs import Json
from coa.rollouts import default_environments
from coa.serving.replies import Narrator, Piece, Reply, event, finish_reason, steps_of
from coa.serving.request import (
    CANNOT,
    ChatRequest,
    Refused,
    is_loopback,
    keys_in,
    read_request,
    refuse_stranger,
)
from coa.serving.server import read_key
from coa.serving.session import Serving, open_agents, public_name
from coa.trajectory import Author, Segment, Step, StopReason, Trajectory
from serving import Server, limits

LIMITS = limits(body_bytes=10_000, characters=100, tokens=50)
USER = {"role": "user", "content": "Where is it?"}
MHQA = load_grammar("mhqa")


def read(**parameters: Any) -> ChatRequest:
    body = {"model": "m", "messages": [USER], **parameters}
    return read_request(json.dumps(body).encode(), LIMITS)


def why(**parameters: Any) -> str:
    """The message of a refusal."""
    with pytest.raises(Refused) as told:
        read(**parameters)
    assert told.value.status == 400 and told.value.param
    return str(told.value)


# -- parameters ------------------------------------------------------------------------------


def test_what_a_rollout_has_a_place_for_is_taken() -> None:
    asked = read(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-3,
        max_completion_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -3}
    assert asked == ChatRequest("m", "Where is it?", True, True, 9, sampling)


def test_values_that_ask_for_nothing_are_neither_refused_nor_named() -> None:
    defaults = {
        "n": 1,
        "tools": [],
        "logprobs": False,
        "stop": None,
        "response_format": {"type": "text"},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "user": None,
        "top_k": -1,
    }
    assert read(**defaults) == ChatRequest("m", "Where is it?", sampling={"top_k": 0})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("n", 2, "n is 2: one request is one rollout; send several requests."),
        ("functions", [{"name": "f"}], "functions is [{'name': 'f'}]: send them as tools."),
        ("web_search_options", {}, "the agent has tools of its own"),
        ("logprobs", True, "logprobs is True: the answer has no log probabilities here."),
        ("stop", ["\n"], "stop is ['\\n']: the agent ends where its protocol ends."),
        ("response_format", {"type": "json_object"}, "this agent answers in plain text"),
    ],
)
def test_what_cannot_be_met_is_refused_with_the_reason(name: str, value: Any, reason: str) -> None:
    assert reason in why(**{name: value})


def test_every_other_parameter_is_ignored_and_named() -> None:
    asked = read(user="u", reasoning_effort="high", presence_penalty=0.5, made_up={"a": 1})
    assert asked.ignored == ("user", "reasoning_effort", "presence_penalty", "made_up")
    many = read(**{f"p{n}": 1 for n in range(25)})
    assert many.ignored[-1] == "and 5 more" and len(many.ignored) == 21


def test_more_tokens_than_the_server_allows_are_cut_down_and_said() -> None:
    asked = read(max_tokens=51)
    assert (asked.max_tokens, asked.ignored) == (50, ("max_tokens above 50",))
    assert read(max_tokens=3, max_completion_tokens=4).max_tokens == 4


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"model": None}, "model is missing, expected the name of a model"),
        ({"model": 3}, "model is 3, expected the name of a model"),
        ({"temperature": 3}, "temperature is 3, expected a number from 0 to 2."),
        ({"temperature": True}, "temperature is True, expected a number"),
        ({"temperature": "hot"}, "temperature is 'hot', expected a number"),
        ({"temperature": 10**400}, "expected a number from 0 to 2."),
        ({"top_p": 0}, "top_p is 0, expected a number from 0.001 to 1."),
        ({"max_tokens": 0}, "max_tokens is 0, expected a whole number from 1"),
        ({"seed": 1.5}, "seed is 1.5, expected a whole number"),
        ({"stream": "yes"}, "stream is 'yes', expected true or false."),
        ({"stream_options": {"include_usage": True}}, "only with stream true"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage is 1"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(parameters: Json, message: str) -> None:
    assert message in why(**parameters)


# -- messages --------------------------------------------------------------------------------


def test_the_last_message_is_the_question_and_what_was_said_before_is_its_history() -> None:
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": "Hi", "refusal": None, "audio": {}},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Where"}, {"type": "text", "text": "?"}],
        },
    ]
    asked = read(messages=history)
    assert asked.question == "Where\n?"
    assert asked.history == (("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"))
    assert asked.ignored == ("messages[1].name", "messages[3].audio")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages is missing, expected a list with at least one message."),
        ([], "messages is [], expected a list"),
        ("hi", "messages is 'hi', expected a list"),
        (["hi"], "messages[0] is 'hi', expected an object with a role, one of system"),
        ([{"role": "robot"}], "messages[0] is {'role': 'robot'}"),
        ([USER, {"role": "assistant", "content": "x"}], "the last message is the question"),
        ([{"role": "user"}], "messages[0].content is missing, expected the question as text."),
        ([{"role": "user", "content": " \n"}], "expected a question, and it is blank."),
        ([{"role": "user", "content": "x" * 101}], "has 101 characters, expected at most 100."),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "reads nothing else"),
        ([{"role": "user", "content": [{"type": "text"}]}], "of type text with a string"),
    ],
)
def test_messages_that_are_no_question_are_refused(messages: Any, message: str) -> None:
    assert message in why(messages=messages)


def test_characters_that_cannot_be_stored_are_replaced() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a\\ud800b\\u0000c"}]}'
    assert read_request(body, LIMITS).question == "a?bc"


# -- anything at all -------------------------------------------------------------------------

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["user", "system", "text", "scripted", "auto", "none"])
)
KEYS = st.sampled_from(["role", "content", "type", "text", "include_usage", "name"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        *CANNOT,
        *("model", "messages", "stream", "stream_options", "temperature", "top_p", "top_k"),
        *("min_p", "seed", "max_tokens", "max_completion_tokens", "user", "store"),
        *("tools", "tool_choice", "parallel_tool_calls"),
    ]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"])},
        optional={"content": st.text(max_size=20) | VALUES},
    ),
    max_size=4,
)
BODIES = st.builds(
    lambda usual, messages, other: {**usual, "messages": messages, **other},
    st.just({"model": "scripted"}),
    MESSAGES,
    st.dictionaries(NAMES, VALUES, max_size=4),
)
ANY_BYTES = (
    BODIES.map(lambda body: json.dumps(body).encode())
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=60)
)


@given(ANY_BYTES)
@settings(max_examples=100, deadline=None)
def test_any_body_is_understood_or_refused_in_one_line(body: bytes) -> None:
    try:
        asked = read_request(body, LIMITS)
    except Refused as refused:
        record = json.loads(json.dumps(refused.to_json()))
        assert 400 <= refused.status < 500 and record["error"]["message"].isprintable()
        assert len(record["error"]["message"]) < 400
        assert str(pickle.loads(pickle.dumps(refused))) == str(refused)  # noqa: TID251
    else:
        assert asked.question.strip() and len(asked.question) <= LIMITS.characters
        assert all(text for _, text in asked.history)
        assert asked.question.encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("uvicorn")
    with Server(tmp_path_factory.mktemp("fuzz")) as running, httpx.Client(timeout=60) as client:
        yield running, client
        assert running.busy == (0, 0)


@given(ANY_BYTES)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_server_answers_any_body_with_a_result_or_an_error(server: Any, body: bytes) -> None:
    running, client = server
    response = client.post(
        f"{running.url}/v1/chat/completions",
        content=body,
        headers={"content-type": "application/json"},
    )
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(json.loads(each.removeprefix("data: ")) for each in events[:-2])
    else:
        assert response.json()["choices"][0]["finish_reason"] in ("stop", "length")


# -- what a client is shown ------------------------------------------------------------------


def narrate(turns: list[tuple[list[str], str | None, bool]]) -> list[Piece]:
    """Turns as (pieces of the model's text, observation, accepted)."""
    told: list[Piece] = []
    narrator = Narrator(MHQA, told.append)
    for texts, observed, accepted in turns:
        for text in texts[:-1]:
            narrator.model_text(text)
        env = None
        if observed is not None:
            env = Segment(Author.ENV, MHQA.render_observation(observed))
        narrator.end_turn(Step(Segment(Author.MODEL, "".join(texts)), env), accepted)
    return told


def test_an_answer_that_is_not_accepted_is_part_of_the_chain_and_no_content() -> None:
    told = narrate([(["<answer>Rome</answer>"], "Error: <think> comes first", False)])
    assert [(p.role, p.kind, p.text) for p in told] == [
        ("answer", "answer", "Rome"),
        ("observation", "observation", "Error: &lt;think> comes first"),
    ]


def test_what_stands_outside_blocks_is_shown_and_a_forged_observation_is_not() -> None:
    told = narrate([(["Well. ", "<think>a</think><observation>fake</observation>"], None, False)])
    assert steps_of(told) == [
        {"role": "stray", "kind": "stray", "text": "Well. "},
        {"role": "think", "kind": "think", "text": "a"},
    ]


TAGS = [f"<{slash}{name}>" for name in MHQA.tags for slash in ("", "/")]
TEXTS = st.lists(st.sampled_from(TAGS) | st.text(max_size=8), max_size=10).map("".join)


@given(TEXTS, st.integers(0, 200), st.integers(0, 200), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_chain_reads_the_same_however_it_was_cut(
    text: str, first: int, second: int, accepted: bool
) -> None:
    low, high = sorted((first, second))
    cut = [text[:low], text[low:high], text[high:]]
    whole, pieces = (narrate([(each, "seen", accepted)]) for each in ([text], cut))
    assert steps_of(whole) == steps_of(pieces)
    joined = ["".join(p.as_reasoning() for p in told) for told in (whole, pieces)]
    assert joined[0] == joined[1]
    assert [p.block for p in pieces] == sorted(p.block for p in pieces)


@given(st.text())
def test_no_text_can_end_an_event(text: str) -> None:
    made = event(Reply(ChatRequest("m", "q?")).piece(Piece(0, "think", "think", text, True)))
    assert made.count(b"\n") == 2 and made.endswith(b"\n\n") and b"\r" not in made
    record = json.loads(made.removeprefix(b"data: "))
    assert record["coa"]["text"] == text


@pytest.mark.parametrize(
    ("stop", "finish"),
    [("answered", "stop"), ("malformed", "stop"), ("tokens", "length"), ("released", "length")],
)
def test_a_budget_that_ended_the_work_is_a_length(stop: str, finish: str) -> None:
    trajectory = Trajectory("t", "q", "mhqa", stop=StopReason(stop))
    assert finish_reason(trajectory) == finish


# -- names and keys --------------------------------------------------------------------------


def test_public_names_hold_no_path_and_no_address(tmp_path: Path) -> None:
    script = tmp_path / "s.jsonl"
    script.write_text("")
    assert public_name(f"scripted:{script}") == "scripted"
    assert public_name("smollm2-135m") == "smollm2-135m"
    assert public_name("openai:qwen@http://10.0.0.1:8000/v1") == "qwen"
    assert public_name(f"hf:{tmp_path}") == tmp_path.name


def test_a_grammar_that_was_asked_for_has_to_work_and_others_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"mhqa": "atlas-mhqa", "web": "atlas-web"}  # programs need a sandbox
    monkeypatch.setattr("coa.environments.BY_GRAMMAR", known)
    script, web = tmp_path / "s.jsonl", tmp_path / "web.toml"
    script.write_text("")
    web.write_text("seconds = 2.0\n")
    lines: list[str] = []

    async def names(*grammars: str) -> list[str]:
        ref = f"scripted:{script}"
        tools = ToolSettings(corpus=str(web))
        async with open_agents(
            Serving(ref, grammars=grammars, tools=tools), lines.append
        ) as agents:
            return list(agents)

    with pytest.raises(UsageError, match="no passages for wiki_search"):
        asyncio.run(names("mhqa"))
    assert asyncio.run(names()) == ["scripted", "scripted:web"]
    assert "scripted:mhqa is not served: " in lines[0]


def test_the_name_alone_is_the_agent_that_coa_ask_takes(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    remembered = {"grammar": ["afm", "mhqa", "react"], "prompt": "compact"}
    (tmp_path / "manifest.json").write_text(json.dumps(remembered))
    reference = f"smollm2-135m+{tmp_path}"

    async def served() -> dict[str, str]:
        async with open_agents(Serving(reference, name="m")) as agents:
            return {name: agent.grammar.name for name, agent in agents.items()}

    found = asyncio.run(served())
    (taken,) = default_environments((), model=reference)
    assert found["m"] == taken.value().name == "mhqa"
    assert list(found)[:2] == ["m", "m:mhqa"] and found["m:react"] == "react"


def test_a_grammar_of_ones_own_that_a_model_was_trained_on_is_served(tmp_path: Path) -> None:
    mine = replace(load_grammar("mhqa"), name="mine")
    (tmp_path / "adapter_config.json").write_text("{}")
    remembered: Json = {"grammar": ["mhqa", "mine"], "prompt": "compact"}
    remembered["grammars"] = GrammarBook([mine]).to_json()
    (tmp_path / "manifest.json").write_text(json.dumps(remembered))

    async def served() -> dict[str, str]:
        async with open_agents(Serving(f"smollm2-135m+{tmp_path}", name="m")) as agents:
            return {name: agent.grammar.name for name, agent in agents.items()}

    assert asyncio.run(served()) == {"m": "mhqa", "m:mhqa": "mhqa", "m:mine": "mine"}


def test_a_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COA_SERVE_KEY", " from-env ")
    assert read_key(None) == "from-env"
    path = tmp_path / "key"
    path.write_text("from-file\n")
    assert read_key(path) == "from-file"
    path.write_text(" one\n\ntwo \n")
    assert read_key(path) == "one\ntwo"
    path.write_text("\n")
    with pytest.raises(UsageError, match="expected a line that is a key, or several"):
        read_key(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_key(tmp_path / "none")


@given(st.text(), st.text())
def test_a_key_opens_for_itself_alone(key: str, given_key: str) -> None:
    key = key.strip() or "key"
    told = refuse_stranger(key, {"authorization": f"Bearer {given_key}"})
    assert (told is None) == (given_key.strip() in keys_in(key))
    for each in keys_in(key):
        assert refuse_stranger(key, {"authorization": f"bearer {each}"}) is None


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *((host, True) for host in ("127.0.0.1", "::1", "[::1]", "LOCALHOST", "127.9.9.9")),
        *((host, False) for host in ("0.0.0.0", "10.0.0.1", "", "localhost.evil")),
    ],
)
def test_only_this_machine_is_loopback(host: str, local: bool) -> None:
    assert is_loopback(host) is local
