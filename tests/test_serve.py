"""coa serve with the official client: answers, chains, refusals. A real server on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coa import Environment, State, Task, Tool, tool
from coa.engines.scripted import ScriptedEngine
from coa.errors import ConfigError, MissingExtra, UsageError
from coa.io.runs import Json
from coa.serving.server import listening
from coa.serving.session import Serving
from coa.trajectory import load_trajectories
from serving import PLAN, TURNS, WAIT_S, BrokenEngine, Server, Watched, engine_error, limits

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

QUESTION = "What is the capital of Peru?"
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
KEY = "a long key"
CHAIN = ["think", "plan", "think", "wiki_search", "observation", "think"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("serve"), key=KEY) as running:
        yield running


def client_of(server: Server, **options: Any) -> Any:
    chosen = {"api_key": KEY, "max_retries": 0, "timeout": WAIT_S, **options}
    return openai.OpenAI(base_url=f"{server.url}/v1", **chosen)


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return client_of(server)


def post(server: Server, body: Json | bytes, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json", "authorization": f"Bearer {KEY}", **headers}
    url = f"{server.url}/v1/chat/completions"
    return httpx.post(url, content=content, headers=sent, timeout=WAIT_S)


def refused(response: httpx.Response) -> tuple[int, str | None, str]:
    """Status, code and message of an error that has OpenAI's shape."""
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"], error["message"]


# -- answers ---------------------------------------------------------------------------------


def test_the_official_client_gets_the_answer_as_content_and_the_chain_as_reasoning(
    client: Any,
) -> None:
    done = client.chat.completions.create(model="scripted", messages=ASKED)
    message = done.choices[0].message
    assert (message.content, done.choices[0].finish_reason) == ("Lima", "stop")
    assert message.reasoning_content == message.reasoning
    assert message.reasoning.startswith("think: I plan.\n\nplan: 1. look it up\n\nthink: I search.")
    assert "\n\nobservation: [1] Peru is a country" in message.reasoning
    assert "Lima" not in message.reasoning.rpartition("\n\n")[2]
    assert [step["role"] for step in done.coa["steps"]] == CHAIN
    assert (done.coa["stop"], done.coa["trajectory"]) == ("answered", done.id)
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.usage.completion_tokens == sum(map(len, TURNS))
    assert 0 < done.usage.prompt_tokens_details.cached_tokens < done.usage.prompt_tokens


def test_a_stream_brings_the_steps_then_the_answer_and_ends_with_usage(client: Any) -> None:
    chunks = list(
        client.chat.completions.create(
            model="scripted",
            messages=ASKED,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta for chunk in chunks[1:-1]]
    assert "".join(delta.content or "" for delta in deltas) == "Lima"
    steps = [chunk.coa for chunk in chunks[1:-2]]
    assert [step["role"] for step in steps] == [*CHAIN, "answer"]
    assert [step["kind"] for step in steps][3:5] == ["tool", "observation"]
    assert [step["block"] for step in steps] == list(range(7))
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    whole = client.chat.completions.create(model="scripted", messages=ASKED)
    assert reasoning == whole.choices[0].message.reasoning
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-2].coa["stop"] == "answered"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_stream_without_usage_has_none(client: Any) -> None:
    chunks = list(client.chat.completions.create(model="scripted", messages=ASKED, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


async def test_fifty_streaming_clients_at_once_all_get_their_own_answer(tmp_path: Path) -> None:
    script = {
        f"question {n}.": [f"{PLAN}<think>t</think><answer>answer {n}</answer>"] for n in range(50)
    }
    with Server(tmp_path, ScriptedEngine(script), key=KEY) as many:
        asking = openai.AsyncOpenAI(base_url=f"{many.url}/v1", api_key=KEY, max_retries=0)

        async def ask(n: int) -> str:
            stream = await asking.chat.completions.create(
                model="scripted",
                messages=[{"role": "user", "content": f"question {n}."}],
                stream=True,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*(ask(n) for n in range(50)))
        assert answers == [f"answer {n}" for n in range(50)]
        done = await asking.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "question 7."}]
        )
        assert done.choices[0].message.content == "answer 7"
        await asking.close()
    assert many.busy == (0, 0)
    assert sum(" 200 answered" in line for line in many.lines) == 51


async def test_fifty_streaming_clients_share_the_batch_of_a_local_model(
    tmp_path: Path, tiny_model: Path
) -> None:
    from coa.engines.local import LocalEngine

    engine = Watched(LocalEngine(f"hf:{tiny_model}", slots=64, context=512, threads=1))
    with Server(tmp_path, engine, key=KEY) as many:
        asking = openai.AsyncOpenAI(base_url=f"{many.url}/v1", api_key=KEY, max_retries=0)

        async def ask(n: int) -> Any:
            stream = await asking.chat.completions.create(
                model="scripted",
                messages=[{"role": "user", "content": f"number {n}"}],
                stream=True,
                max_tokens=16,
            )
            return [chunk async for chunk in stream][-1]

        ends = await asyncio.gather(*(ask(n) for n in range(50)))
        await asking.close()
    assert all(end.choices[0].finish_reason in ("stop", "length") for end in ends)
    assert len({end.id for end in ends}) == 50 and many.busy == (0, 0)
    assert engine.most > 10, "the requests did not meet in the engine"


# -- models and liveness ---------------------------------------------------------------------


def test_models_are_the_grammars_that_are_served(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["scripted", "scripted:mhqa"]
    one = client.models.retrieve("scripted:mhqa")
    assert one.coa == {"grammar": "mhqa", "tools": ["wiki_search"], "weights": "scripted"}
    done = client.chat.completions.create(model="scripted:mhqa", messages=ASKED)
    assert (done.model, done.coa["grammar"]) == ("scripted:mhqa", "mhqa")


def test_a_name_picks_the_grammar(tmp_path: Path) -> None:
    web = f"{PLAN}<think>t</think><suggested_answer>Lima</suggested_answer>"
    web += "<think>t</think><double_check>Score: 4</double_check><think>t</think><answer>Lima"

    def turn(prompt: str, index: int) -> str:
        return f"{web}</answer>" if "double_check" in prompt else TURNS[index]

    engine = ScriptedEngine(turn)
    with Server(tmp_path, engine, key=KEY, grammars=("mhqa", "web"), name="afm") as several:
        asking = client_of(several)
        assert [m.id for m in asking.models.list()] == ["afm", "afm:mhqa", "afm:web"]
        found = {
            name: asking.chat.completions.create(model=name, messages=ASKED)
            for name in ("afm", "afm:web")
        }
    assert found["afm"].coa["steps"][3]["role"] == "wiki_search"
    assert [s["kind"] for s in found["afm:web"].coa["steps"]].count("check") == 1
    assert {done.choices[0].message.content for done in found.values()} == {"Lima"}


def test_an_environment_of_ones_own_is_served_with_a_state_for_each_request(tmp_path: Path) -> None:
    class Visits(list[str]):
        closed = False

        def close(self) -> None:
            self.closed = True

    made: list[Visits] = []

    def setup(task: Task) -> Visits:
        if "broken" in task.question:
            raise OSError("no such file: a-private-place")
        made.append(Visits())
        return made[-1]

    def look(word: str, state: State) -> str:
        """Look a word up."""
        state.append(word)  # type: ignore[attr-defined]
        return f"{word} {len(state)}"  # type: ignore[arg-type]

    def tools(task: Task) -> list[Tool]:  # which one there is depends on the question
        return [tool(look, name="peek" if "peek" in task.question else "look")]

    env = Environment("words", tools=tools, grammar="react", setup=setup)
    turns = {
        f"{name} at it": [
            f"<think>t</think><{name}>a</{name}>",
            "<think>u</think><answer>a 1</answer>",
        ]
        for name in ("look", "peek")
    }
    script = ScriptedEngine({**turns, "broken": []})
    with Server(tmp_path, script, key=KEY, env=env, grammars=(), out=tmp_path / "t.jsonl") as own:
        listed = [model.id for model in client_of(own).models.list()]
        asking = client_of(own).chat.completions
        for question, name in ((each, each.split()[0]) for _ in range(2) for each in turns):
            asked = [{"role": "user", "content": question}]
            done = asking.create(model="words", messages=asked)
            assert done.choices[0].message.content == "a 1"
            told = [(step["role"], step["text"]) for step in done.coa["steps"]]
            assert told == [("think", "t"), (name, "a"), ("observation", "a 1"), ("think", "u")]
        broken = {"model": "scripted", "messages": [{"role": "user", "content": "broken"}]}
        status, _, message = refused(post(own, broken))
    assert status == 503 and "private" not in message
    assert listed == ["words", "scripted", "scripted:react"]
    assert any("a-private-place" in line for line in own.lines)
    assert [list(each) for each in made[1:]] == [["a"]] * 4 and all(each.closed for each in made)
    kept = load_trajectories(tmp_path / "t.jsonl")
    assert [each.protocol.tool_roles for each in kept[:2]] == [("look",), ("peek",)]


def test_a_name_that_was_given_comes_before_that_of_the_environment(tmp_path: Path) -> None:
    env = Environment("words", tools=[], grammar="react")
    with Server(tmp_path, key=KEY, env=env, grammars=(), name="clerk") as own:
        assert [m.id for m in client_of(own).models.list()] == ["clerk", "words", "clerk:react"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
@pytest.mark.parametrize("key", ["", KEY])
def test_the_request_that_is_shown_can_be_pasted(tmp_path: Path, key: str) -> None:
    with Server(tmp_path, key=key, name="it's") as own:
        (line,) = [each for each in own.lines if each.startswith("to ask it: ")]
        assert not key or key not in line
        shell = ["sh", "-c", line.removeprefix("to ask it: ").replace("curl ", "curl -s ", 1)]
        variables = {**os.environ, "COA_SERVE_KEY": key, "NO_PROXY": "*"}
        done = subprocess.run(shell, env=variables, capture_output=True)
    assert json.loads(done.stdout)["model"] == "it's", done


def test_liveness_needs_no_key_and_tells_nothing_else(server: Server) -> None:
    answer = httpx.get(f"{server.url}/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


# -- who may ask -----------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "wrong", KEY[:-1], f"{KEY}x", "\u00e9"])
def test_a_wrong_key_is_refused_everywhere_but_at_liveness(server: Server, key: str) -> None:
    for path in ("/v1/models", "/v1/chat/completions", "/nowhere"):
        sent = {"authorization": f"Bearer {key}".encode()} if key else {}
        answer = httpx.get(f"{server.url}{path}", headers=sent)
        status, code, _ = refused(answer)
        assert (status, code) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_the_client_knows_a_wrong_key_and_an_unknown_model_by_their_errors(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
        client_of(server, api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError, match="there are scripted, scripted:mhqa") as missing:
        client_of(server).chat.completions.create(model="gpt-5", messages=ASKED)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


def test_without_a_key_only_this_machine_is_served(tmp_path: Path) -> None:
    with Server(tmp_path) as open_door:
        assert any("no key: only this machine is served" in line for line in open_door.lines)
        assert httpx.get(f"{open_door.url}/v1/models").status_code == 200
        port = open_door.url.rpartition(":")[2]
        for host in ("localhost", f"localhost:{port}", f"[::1]:{port}", "[::1]"):
            answer = httpx.get(f"{open_door.url}/v1/models", headers={"host": host})
            assert answer.status_code == 200, host
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
            answer = httpx.get(f"{open_door.url}/v1/models", headers={"host": host})
            assert refused(answer)[:2] == (403, "host_not_allowed"), host


async def test_a_door_for_others_without_a_key_is_not_opened() -> None:
    with pytest.raises(UsageError, match=r"'0\.0\.0\.0' can be reached by others"):
        async with listening(Serving(host="0.0.0.0"), print):
            raise AssertionError


async def test_a_port_that_is_taken_is_said_before_anything_is_loaded(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(UsageError, match=f"port {port}: Address already in use. Choose another"):
        async with listening(Serving(model="no-such-model", port=port), print):
            raise AssertionError


# -- what is refused -------------------------------------------------------------------------


def test_unknown_paths_and_methods_are_refused_in_the_same_shape(server: Server) -> None:
    auth = {"authorization": f"Bearer {KEY}"}
    assert refused(httpx.get(f"{server.url}/v1/nothing", headers=auth))[:2] == (404, "unknown_url")
    wrong = httpx.get(f"{server.url}/v1/chat/completions", headers=auth)
    assert refused(wrong)[:2] == (405, "unknown_url") and wrong.headers["allow"] == "POST"
    missing = httpx.get(f"{server.url}/v1/models/other", headers=auth)
    assert refused(missing)[:2] == (404, "model_not_found")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b"[" * 100_000])
def test_what_is_not_a_json_object_is_refused(server: Server, body: bytes) -> None:
    status, code, message = refused(post(server, body))
    assert (status, code) == (400, "invalid_json") and message.startswith("the body is")


def test_a_body_that_is_not_declared_as_json_is_refused(server: Server) -> None:
    answer = post(server, {"model": "scripted"}, **{"content-type": "text/plain"})
    assert refused(answer)[:2] == (415, "unsupported_media_type")


@pytest.mark.parametrize("times", [2, 30])
def test_an_oversized_body_is_refused_and_the_client_reads_why(server: Server, times: int) -> None:
    size = server.settings.limits.body_bytes * times
    with pytest.raises((openai.APIStatusError, openai.APIConnectionError)) as told:
        client_of(server).chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "x" * size}]
        )
    if times == 2:  # of one that is far too large the server reads no more, which may cut it off
        assert (told.value.status_code, told.value.code) == (413, "body_too_large")
    assert client_of(server).models.list().data[0].id == "scripted"


def test_a_question_that_does_not_fit_the_context_is_refused(tmp_path: Path) -> None:
    with Server(tmp_path, ScriptedEngine(TURNS, context=100), key=KEY) as small:
        status, code, message = refused(post(small, {"model": "scripted", "messages": ASKED}))
    assert (status, code) == (400, "context_length_exceeded")
    assert "and the context holds 100. Shorten the question." in message


async def test_what_is_missing_or_cannot_be_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="temperature is -1, expected 0 or more"):
        Serving(temperature=-1)
    for odd in (float("inf"), float("nan"), -1.0):
        with pytest.raises(ConfigError, match=f"grace_s is {odd}, expected a finite number"):
            Serving(grace_s=odd)
        for name in ("seconds", "stall_s"):
            with pytest.raises(ConfigError, match=f"{name} is {odd}, expected a finite number"):
                Serving(limits=limits(**{name: odd}))
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingExtra, match=r"chain-of-agents\[serve\]"):
        async with listening(Serving(model="no-such-model"), print):
            raise AssertionError


def test_what_the_world_broke_is_503_and_says_nothing_of_this_side(tmp_path: Path) -> None:
    with Server(tmp_path, BrokenEngine(engine_error()), key=KEY) as broken:
        with pytest.raises(openai.InternalServerError, match="the engine of this model") as told:
            client_of(broken).chat.completions.create(model="scripted", messages=ASKED)
        assert (told.value.status_code, told.value.code) == (503, "engine_failed")
        assert int(told.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.InternalServerError, match="engine of this model") as streamed:
            list(
                client_of(broken).chat.completions.create(
                    model="scripted", messages=ASKED, stream=True
                )
            )
    assert "10.1.2.3" not in str(told.value.body) + str(streamed.value.body)
    assert any("10.1.2.3" in line for line in broken.lines)


def test_our_own_mistake_is_500_with_the_traceback_in_the_log_alone(tmp_path: Path) -> None:
    class Silly(ScriptedEngine):
        def encode_prompt(self, system: str, user: str) -> list[int]:
            raise ZeroDivisionError("a bug")

    with Server(tmp_path, Silly(TURNS), key=KEY) as broken:
        answer = post(broken, {"model": "scripted", "messages": ASKED})
        assert refused(answer)[:2] == (500, "bug")
        assert "ZeroDivision" not in answer.text and "Traceback" not in answer.text
        streamed = post(broken, {"model": "scripted", "messages": ASKED, "stream": True})
        assert refused(streamed)[:2] == (500, "bug")  # before anything was sent
    assert sum("ZeroDivisionError: a bug" in line for line in broken.lines) == 2
    assert broken.busy == (0, 0)


# -- records ---------------------------------------------------------------------------------


def test_the_log_has_a_line_for_each_request_and_no_question(server: Server, client: Any) -> None:
    before = len(server.lines)
    done = client.chat.completions.create(model="scripted", messages=ASKED)
    post(server, b"{")
    lines = server.lines[before:]
    assert len(lines) == 2 and f"{done.id} scripted 200 answered" in lines[0]
    assert "POST /v1/chat/completions 400 invalid_json" in lines[1]
    assert not any("Peru" in line for line in server.lines)


def test_questions_are_logged_and_trajectories_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    kept = tmp_path / "asked.jsonl"
    with Server(tmp_path, key=KEY, out=kept, log_questions=True) as recording:
        done = client_of(recording).chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "two\nlines\x1b[2J"}], seed=4
        )
    line = next(line for line in recording.lines if done.id in line)
    assert "two\\nlines" in line and "\x1b" not in line
    (trajectory,) = load_trajectories(kept)
    assert (trajectory.meta["request"], trajectory.seed) == (done.coa["trajectory"], 4)
    assert trajectory.answer == "Lima"


def test_text_of_a_model_or_a_page_cannot_break_the_framing(tmp_path: Path) -> None:
    nasty = 'a\r\n\r\ndata: {"error": 1}\n\nevent: x\u2028\u2029\x85\x0b b'
    turn = f"{PLAN}<think>{nasty}</think><answer>{nasty}</answer>"
    with Server(tmp_path, ScriptedEngine([turn]), key=KEY) as server:
        body = {"model": "scripted", "messages": ASKED, "stream": True}
        raw = post(server, body).content
        stream = client_of(server).chat.completions.create(**body)
        answer = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert answer == nasty
    lines = raw.decode("ascii").split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all("\n" not in line and "\r" not in line for line in lines)
    assert all(json.loads(line.removeprefix("data: ")) for line in lines[:-2])
