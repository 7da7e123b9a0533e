"""The openai engine: what it detects, what it survives, and what it says when it cannot go on.

The real servers, with the embedded model, are in `test_llama_server.py` and `test_vllm_server.py`.
Here a small scripted server on loopback stands in, because a real one does not fail on demand.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coa.engines import Sampling, load_engine
from coa.engines.server_apis import restore_stop, sampled_logprob, spell
from coa.errors import EngineError, ModelError, Unavailable
from coa.loop import Budget, run
from coa.models.codec import Codec
from coa.trajectory import StopReason
from loopback_server import STOPS, Loaded, Loopback, one_line, script, serving, write_tokenizer
from playing import MHQA, TASK, box


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("COA_API_KEY", "OPENAI_API_KEY", "COA_TOKENIZER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def server(folder: Path) -> Iterator[Loopback]:
    with serving(Loopback(Codec.from_folder(folder), script)) as listening:
        yield listening


@pytest.mark.parametrize("offers", ["tokens", "native"])
def test_a_rollout_over_token_ids(server: Loopback, folder: Path, offers: str) -> None:
    server.offers = offers
    loaded = Loaded(server, folder)
    trajectory = loaded.roll_out()
    assert trajectory.stop is StopReason.ANSWERED and trajectory.answer == "Paris"
    assert loaded.engine.exact and loaded.notes == []
    path = "/v1/completions" if offers == "tokens" else "/completion"
    first, second = server.completions(path)
    assert second["prompt"][: len(first["prompt"])] == first["prompt"]
    assert second["prompt"] == trajectory.ids[: len(second["prompt"])]
    sampled = [s for s in trajectory.segments if s.logprobs]
    assert {p for s in sampled for p in s.logprobs or ()} == {-0.25}
    assert first["seed"] != second["seed"] and first["temperature"] == 1.0
    assert trajectory.weights == "tiny"
    assert loaded.engine.name == server.ref and loaded.engine.context == 4096


@pytest.mark.parametrize("offers", ["tokens", "native", "text", "chat"])
def test_a_seed_is_sent_unless_none_is_wanted(server: Loopback, folder: Path, offers: str) -> None:
    server.offers = offers
    loaded = Loaded(server, folder)
    path = {"native": "/completion", "chat": "/v1/chat/completions"}.get(offers, "/v1/completions")
    for seeded in (True, False):
        loaded.ask(key=7, temperature=1.0, seeded=seeded)
        none = 0xFFFFFFFF if offers == "native" else None  # llama.cpp: at random
        assert server.completions(path)[-1].get("seed") == (7 if seeded else none)


def test_what_marks_the_end_of_a_stream_may_be_in_a_prompt(server: Loopback, folder: Path) -> None:
    server.offers = "native"
    loaded = Loaded(server, folder)
    prompt = loaded.engine.encode_prompt("You are an agent.", "What does data: [DONE] mean?")
    found = asyncio.run(loaded.engine.generate(prompt, Sampling(max_tokens=9)))
    assert len(found.ids) == 9 and found.finish == "length"


@pytest.mark.parametrize(("offers", "strict"), [("text", False), ("chat", False), ("chat", True)])
def test_a_rollout_over_text_says_once_that_exactness_is_lost(
    server: Loopback, folder: Path, offers: str, strict: bool
) -> None:
    server.offers, server.strict, server.repeats = offers, strict, strict
    loaded = Loaded(server, folder)
    trajectory = loaded.roll_out()
    assert trajectory.stop is StopReason.ANSWERED and trajectory.answer == "Paris"
    assert not loaded.engine.exact
    assert len(loaded.notes) == 1 and "exactness is lost" in loaded.notes[0]
    if offers == "text":
        _, second = server.completions("/v1/completions")
        assert second["prompt"].startswith("<|im_start|>system\n")
        assert second["prompt"].endswith("</observation>\n")
    else:
        first, second = server.completions("/v1/chat/completions")
        assert [m["role"] for m in first["messages"]] == ["system", "user"]
        assert second["messages"][-1]["content"].startswith("<think>t</think>")
        assert second["continue_final_message"] and not second["add_generation_prompt"]


def test_turns_end_as_the_protocol_says(server: Loopback, folder: Path) -> None:
    for offers in ("tokens", "native", "text"):
        server.offers = offers
        loaded = Loaded(server, folder)
        text, finish = loaded.ask()
        assert finish == "stop" and text.startswith("<a>x</a>")
        assert loaded.ask(max_tokens=2)[1] == "length"
        assert loaded.ask(stop=()) == ("<a>x</a> and more", "eos")


def test_a_cut_stop_string_is_put_back() -> None:
    unnamed = {"finish_reason": "stop"}
    assert restore_stop("<a>x", unnamed | {"stop_reason": "</a>"}, STOPS) == ("<a>x</a>", "stop")
    assert restore_stop("<a>x", unnamed, STOPS) == ("<a>x</a>", "stop")
    assert restore_stop("<a>x</a><b>", unnamed, STOPS) == ("<a>x</a><b></b>", "stop")
    assert restore_stop("x", unnamed, STOPS, "<a>") == ("x</a>", "stop")
    assert restore_stop("no tag", unnamed, STOPS) == ("no tag", "eos")
    assert restore_stop("<a>x</a>", unnamed, STOPS) == ("<a>x</a>", "stop")
    assert restore_stop("<a>x", {"finish_reason": "length"}, STOPS) == ("<a>x", "length")


def test_text_from_others_cannot_spell_a_special_token(folder: Path) -> None:
    codec = Codec.from_folder(folder)
    ids = [*codec.encode_prompt("s", "q<|im_end|>"), *codec.encode("<|im_start|>user")]
    text = spell(codec, ids)
    assert text.count("<|im_end|>") == 2 and "q< |im_end|>" in text
    assert text.endswith("assistant\n< |im_start|>user")


def test_what_may_pass_is_tried_again(server: Loopback, folder: Path) -> None:
    for offers in ("tokens", "native"):
        server.offers = offers
        loaded = Loaded(server, folder, timeout_s=0.5)
        server.faults.extend([429, 500, "cut", (503, {"Retry-After": "0.2"}), 0.8])
        before = len(server.asked)
        assert loaded.ask()[0].startswith("<a>x</a>")
        assert len(server.asked) - before == 6


def test_a_stream_that_is_cut_starts_anew_and_shows_nothing_twice(
    server: Loopback, folder: Path
) -> None:
    server.offers = "native"
    loaded = Loaded(server, folder)
    server.faults.append("cut late")
    assert loaded.ask()[0].startswith("<a>x</a>")


def test_tokens_that_a_stream_hides_are_found(server: Loopback, folder: Path) -> None:
    server.offers = "native"
    loaded = Loaded(server, folder)
    whole = server.codec.encode("<a>x</a> and more")
    server.split = (whole[1], whole[3])
    prompt = loaded.engine.encode_prompt("s", "q")
    done = asyncio.run(loaded.engine.generate(prompt, Sampling(temperature=0.7)))
    assert done.ids == whole and done.finish == "eos"
    half = pytest.approx(math.log(0.5))
    assert done.logprobs == [half if token in server.split else -0.25 for token in whole]


def test_a_logprob_follows_temperature_top_k_top_p_and_min_p() -> None:
    raw = {7: math.log(0.5), 8: math.log(0.3), 9: math.log(0.2)}

    def chance(token: int, **sampling: Any) -> float:
        return math.exp(sampled_logprob(raw, token, Sampling(**sampling)))

    assert chance(8) == pytest.approx(0.3) == chance(8, temperature=1.0)
    assert chance(8, temperature=0.5) == pytest.approx(0.09 / 0.38)
    assert chance(8, temperature=1.0, top_k=2) == pytest.approx(0.3 / 0.8)
    assert chance(8, temperature=1.0, top_p=0.6) == pytest.approx(0.3 / 0.8)
    assert chance(7, temperature=1.0, top_p=0.5) == pytest.approx(1.0)
    assert chance(9, temperature=1.0, top_k=2) == 0.0
    assert chance(8, temperature=1.0, min_p=0.5) == pytest.approx(0.3 / 0.8)


def test_retry_after_is_obeyed_up_to_a_limit(server: Loopback, folder: Path) -> None:
    loaded = Loaded(server, folder)
    server.faults.append((429, {"Retry-After": "3600"}))
    with pytest.raises(EngineError, match="answered 429: no, not None") as caught:
        loaded.ask()
    one_line(caught.value)


def test_retries_are_bounded(server: Loopback, folder: Path) -> None:
    loaded = Loaded(server, folder, retries=2)
    server.faults.extend([500] * 3)
    with pytest.raises(EngineError, match="answered 500 after 3 attempts"):
        loaded.ask()
    server.faults.extend(["cut"] * 3)
    with pytest.raises(Unavailable, match=r"cannot be reached.*3 attempts") as caught:
        loaded.ask()
    one_line(caught.value)
    server.faults.extend([500] * 3)
    trajectory = loaded.roll_out()
    assert trajectory.stop is StopReason.ENGINE_FAILED and "500" in (trajectory.error or "")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (b"<html>hello", "found '<html>hello', expected JSON"),
        (b'{"choices": []}', "no choice"),
        (b'{"choices": [{"token_ids": [1, 2]}]}', "Found 2 token ids and None logprobs"),
        (b'{"error": {"message": "out of memory"}}', "out of memory"),
        (400, r"refused the request \(400\): no, not None"),
        (401, r"refuses a request without a key \(401\). Set COA_API_KEY or OPENAI_API_KEY"),
    ],
)
def test_an_answer_that_is_no_use_is_one_line(
    server: Loopback, folder: Path, fault: Any, message: str
) -> None:
    loaded = Loaded(server, folder)
    server.faults.append(fault)
    with pytest.raises(EngineError, match=message) as caught:
        loaded.ask()
    one_line(caught.value)


def test_the_key_is_sent_and_never_said(
    server: Loopback, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    monkeypatch.setenv("COA_API_KEY", "sk-secret")
    loaded = Loaded(server, folder)
    loaded.ask()
    assert set(server.keys) == {"Bearer sk-secret"}
    for fault in (400, 401):
        server.faults.append(fault)
        with pytest.raises(EngineError) as caught:
            loaded.ask()
        assert "secret" not in one_line(caught.value)
    server.faults.append(401)
    with pytest.raises(EngineError, match="refuses the key it was given") as caught:
        Loaded(server, folder)
    for ref in ("openai:m@http://u:secret@h/v1", "openai:m@http://h/v1?key=secret"):
        with pytest.raises(ModelError, match="set COA_API_KEY") as refused:
            load_engine(ref)
        assert "secret" not in one_line(refused.value)


def test_an_unknown_model_lists_what_there_is(server: Loopback, folder: Path) -> None:
    for wanted, message in (("tini", "Did you mean 'tiny'"), ("gpt", "Known: tiny")):
        ref = server.ref.replace("tiny", wanted)
        with pytest.raises(ModelError, match=f"no model '{wanted}'. {message}"):
            load_engine(ref, tokenizer=str(folder))


def test_no_server_is_one_line(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unavailable, match="cannot be reached") as caught:
        load_engine(f"openai:m@http://127.0.0.1:{port}", tokenizer=str(folder), backoff_s=0.01)
    assert f":{port}/v1" in one_line(caught.value)


def test_a_server_that_can_do_nothing_is_refused(server: Loopback, folder: Path) -> None:
    server.offers = "nothing"
    with pytest.raises(ModelError, match="neither token ids nor text"):
        Loaded(server, folder)


def test_a_prompt_that_does_not_fit_is_refused(server: Loopback, folder: Path) -> None:
    loaded = Loaded(server, folder, context=64)
    assert loaded.engine.context == 64
    with pytest.raises(EngineError, match="the context holds 64"):
        loaded.ask("long " * 100)


CHOICE = 'start: "yes" | "no"'
NO_GRAMMAR = "does not sample under a grammar. Start vLLM with --structured-outputs-config"


def test_a_constraint_is_sent_once_the_server_has_shown_that_it_follows_one(
    server: Loopback, folder: Path
) -> None:
    server.forced = "<coa>"
    loaded = Loaded(server, folder)
    prompt = loaded.engine.encode_prompt("s", "q")
    for _ in range(2):
        done = asyncio.run(loaded.engine.generate(prompt, Sampling(constraint=CHOICE)))
        assert done.allowed_logmass is None
    first, second = server.completions("/v1/completions")
    grammar = {"grammar": f"%llguidance {{}}\n{CHOICE}"}
    assert first["structured_outputs"] == second["structured_outputs"] == grammar
    probes = [body for _, body in server.asked if body.get("structured_outputs")][:-2]
    assert [body["max_tokens"] for body in probes] == [16]
    loaded.ask(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
    last = server.completions("/v1/completions")[-1]
    assert "structured_outputs" not in last
    assert [last[k] for k in ("temperature", "top_p", "top_k", "min_p")] == [0.7, 0.9, 5, 0.1]


@pytest.mark.parametrize("offers", ["tokens", "native", "text"])
def test_a_server_that_ignores_a_grammar_is_found_out(
    server: Loopback, folder: Path, offers: str
) -> None:
    server.offers = offers
    loaded = Loaded(server, folder)
    with pytest.raises(EngineError, match=NO_GRAMMAR) as caught:
        loaded.ask(constraint=CHOICE)
    one_line(caught.value)
    assert loaded.ask()[1] == "stop"


def test_more_stop_strings_than_a_server_takes_is_one_line(server: Loopback, folder: Path) -> None:
    server.most_stops = 4
    loaded = Loaded(server, folder)
    server.words = "body.stop: at most 4"
    with pytest.raises(EngineError, match="VLLM_MAX_STOP_STRINGS=5 or more") as caught:
        loaded.ask(stop=("1", "2", "3", "4", "5"))
    one_line(caught.value)


def test_the_tokenizer_is_named_found_or_asked_for(
    server: Loopback, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="Pass tokenizer= or set COA_TOKENIZER"):
        Loaded(server, folder, tokenizer=None)
    with pytest.raises(ModelError, match="tokenizer 'nowhere' is no folder"):
        Loaded(server, folder, tokenizer="nowhere")
    server.models[0]["root"] = str(folder)
    assert Loaded(server, folder, tokenizer=None).engine.exact
    del server.models[0]["root"]
    monkeypatch.setenv("COA_TOKENIZER", str(folder))
    assert Loaded(server, folder, tokenizer=None).engine.exact


def test_logprobs_from_before_the_temperature_are_told_apart(
    server: Loopback, folder: Path
) -> None:
    assert Loaded(server, folder).engine.tempered
    server.processed = False
    assert not Loaded(server, folder).engine.tempered


def test_settings_that_a_server_decides_are_said(server: Loopback, folder: Path) -> None:
    loaded = Loaded(server, folder, deterministic=True, dtype="auto")
    assert len(loaded.notes) == 1 and "deterministic is the server's" in loaded.notes[0]
    with pytest.raises(EngineError, match="Unknown option 'temperatur'"):
        Loaded(server, folder, temperatur=1)


def test_requests_at_once_are_limited(server: Loopback, folder: Path) -> None:
    loaded = Loaded(server, folder, slots=3)
    server.slow_s = 0.03

    async def many() -> None:
        prompt = loaded.engine.encode_prompt("s", "q")
        sampling = Sampling(stop=STOPS)
        done = await asyncio.gather(*(loaded.engine.generate(prompt, sampling) for _ in range(9)))
        assert len({tuple(each.ids) for each in done}) == 1
        await loaded.engine.close()

    asyncio.run(many())
    assert server.most_at_once == 3


@pytest.mark.parametrize("offers", ["tokens", "native"])
def test_a_rollout_out_of_time_frees_its_place(server: Loopback, folder: Path, offers: str) -> None:
    server.offers = offers
    loaded = Loaded(server, folder, slots=1)

    async def twice() -> tuple[StopReason | None, str]:
        server.slow_s = 0.5
        late = await run(TASK, loaded.engine, MHQA, box("mhqa"), budget=Budget(seconds=0.1))
        server.slow_s = 0.0
        prompt = loaded.engine.encode_prompt("s", "q")
        done = await loaded.engine.generate(prompt, Sampling(stop=STOPS))
        await loaded.engine.close()
        return late.stop, done.finish

    assert asyncio.run(twice()) == (StopReason.TIME, "stop")
    with pytest.raises(EngineError, match="The engine is closed"):
        loaded.ask()
