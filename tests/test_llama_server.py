"""The openai engine against a real server: llama.cpp with the embedded model, on loopback.

`make test-servers` installs the server into an environment of its own and runs this file. Without
it, or without the model (`coa model pull`), the tests are skipped and say why.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import subprocess
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from coa.engines import Completion, Sampling, load_engine
from coa.engines.openai import OpenAIEngine
from coa.engines.server_apis import (
    LlamaCppCompletions,
    ServerApi,
    TextApi,
    TokenCompletions,
    Turn,
)
from coa.errors import EngineError, ModelError
from coa.grammar import load_grammar
from coa.loop import Budget, run
from coa.models import references as store
from coa.models.bases import BASE, BASES
from coa.tasks import Task
from coa.tools import Toolbox, tool
from coa.trajectory import StopReason, Trajectory
from playing import sampled_rollout

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
SERVERS = Path(os.environ.get("COA_TEST_SERVERS") or ROOT / ".cache" / "servers")
SCRIPT = Path(__file__).with_name("llama_server.py")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_file(tmp_path_factory.mktemp("gguf"))


def embedded_file(folder: Path) -> Path:
    """The GGUF file of the embedded model, unpacked."""
    downloads, base = store.cache_dir() / "downloads", BASES[BASE]
    if not base.bytes_here(downloads) or not store.is_pulled():
        pytest.skip("the embedded model is not in the cache: coa model pull")
    return base.fetch("", downloads, folder, print)


@pytest.fixture(scope="module")
def ref(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python = SERVERS / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"no server in {SERVERS}: make test-servers")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as said:
        process = subprocess.Popen(
            [str(python), str(SCRIPT), str(gguf), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), log.read_text()[-2000:]
            yield f"openai:smollm2@{address}"
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module", params=["named", "asked"])
def engine(ref: str, request: pytest.FixtureRequest) -> OpenAIEngine:
    """With the tokenizer read from the model's folder, and with the server's own."""
    notes: list[str] = []
    tokenizer = BASE if request.param == "named" else None
    engine = load_engine(ref, tokenizer=tokenizer, note=notes.append, slots=4)
    assert isinstance(engine, OpenAIEngine)
    assert engine.exact and engine.tempered and notes == []
    return engine


def ask(engine: OpenAIEngine, prompt: list[int], **sampling: Any) -> Completion:
    shown: list[str] = []

    done = asyncio.run(engine.generate(prompt, Sampling(**sampling), shown.append))
    assert len(done.ids) == len(done.logprobs) > 0
    assert all(p <= 0 and math.isfinite(p) for p in done.logprobs)
    text = engine.decode(done.ids)
    assert text.startswith("".join(shown)) or not shown
    return done


def test_both_tokenizers_agree(ref: str) -> None:
    named = load_engine(ref, tokenizer=BASE)
    asked = load_engine(ref)
    for text in ("a <|im_end|> b", "na\u00efve \U0001f642 </answer>\n\n<think>", "  12,345"):
        ids = named.encode(text)
        assert asked.encode(text) == ids and asked.decode(ids) == named.decode(ids) == text
    prompt = named.encode_prompt("Be brief.", "Who?<|im_end|>")
    assert asked.encode_prompt("Be brief.", "Who?<|im_end|>") == prompt
    assert asked.decode(prompt) == named.decode(prompt)


def test_greedy_is_repeatable_and_continues_itself(engine: OpenAIEngine) -> None:
    prompt = engine.encode_prompt("You answer briefly.", "What is the capital of France?")
    whole = ask(engine, prompt, max_tokens=24)
    assert engine.decode(whole.ids) and engine.context == 2048
    assert ask(engine, prompt, max_tokens=24).ids == whole.ids
    half = ask(engine, prompt, max_tokens=4)
    assert half.finish == "length" and half.ids == whole.ids[:4]
    if whole.finish == "eos":
        assert engine.decode(whole.ids[-1:]) == ""


def test_the_stop_string_is_sampled_with_its_logprobs(engine: OpenAIEngine) -> None:
    prompt = engine.encode_prompt("You repeat what you are told.", "Say: <b>one</b> <b>two</b>")
    done = ask(engine, [*prompt, *engine.encode("<b>one")], max_tokens=40, stop=("</b>",))
    text = engine.decode(done.ids)
    assert done.finish == "stop" and text.count("</b>") == 1


def test_logprobs_are_of_the_distribution_sampled_from(engine: OpenAIEngine) -> None:
    """At a low temperature the likely token is more likely than at temperature 1."""
    prompt = engine.encode("The capital of France is")
    cold = ask(engine, prompt, temperature=0.05, max_tokens=1, key=1)
    greedy = ask(engine, prompt, max_tokens=1)
    assert cold.ids == greedy.ids and cold.logprobs[0] > -0.01 > greedy.logprobs[0]
    one = ask(engine, prompt, temperature=1.0, max_tokens=8, key=5)
    assert ask(engine, prompt, temperature=1.0, max_tokens=8, key=5).ids == one.ids
    others = {tuple(ask(engine, prompt, temperature=1.0, max_tokens=8, key=k).ids) for k in (6, 7)}
    assert len(others | {tuple(one.ids)}) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_letters_of_several_tokens_are_not_lost(engine: OpenAIEngine, temperature: float) -> None:
    """The stream hides a token that ends inside a letter; ids and logprobs are found all the same.

    The same distributions, asked for token by token in another way, give the same numbers.
    """
    letter = "\U0001d518"
    prompt = engine.encode("Repeat:" + f" {letter}" * 9)
    done = ask(engine, prompt, max_tokens=8, temperature=temperature, key=2)
    assert letter in engine.decode(done.ids)
    again = engine._api
    assert isinstance(again, LlamaCppCompletions)
    turn = Turn(prompt, Sampling(temperature=temperature), 1)

    async def scores() -> list[float]:
        return [
            await again._score([*prompt, *done.ids[:n]], token, turn)
            for n, token in enumerate(done.ids)
        ]

    assert asyncio.run(scores()) == pytest.approx(done.logprobs, abs=0.02)


def test_a_rollout_keeps_the_ids_that_were_sampled(engine: OpenAIEngine) -> None:
    sampled_rollout(engine)


def test_requests_at_once_do_not_mix(engine: OpenAIEngine) -> None:
    prompts = [engine.encode(f"Count: {n}, {n}, {n}, {n}, {n}, {n},") for n in (3, 5, 7, 8)]

    async def together() -> list[Completion]:
        sampling = Sampling(max_tokens=4)
        return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))

    for number, done in zip("3578", asyncio.run(together()), strict=True):
        assert number in engine.decode(done.ids)


@pytest.mark.parametrize("chat", [False, True])
def test_text_alone_works_and_is_called_inexact(
    ref: str, chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server gets that has no token ids: the same real server, its better paths unasked."""
    usual = TextApi.probe
    ways: tuple[type[ServerApi], ...] = (TokenCompletions, LlamaCppCompletions)
    for better in ways:
        monkeypatch.setattr(better, "probe", lambda _: False)
    monkeypatch.setattr(TextApi, "probe", lambda api: api.chat == chat and usual(api))
    notes: list[str] = []
    engine = load_engine(ref, tokenizer=BASE, note=notes.append)
    assert isinstance(engine, OpenAIEngine) and isinstance(engine._api, TextApi)
    assert not engine.exact and len(notes) == 1
    prompt = engine.encode_prompt("You repeat what you are told.", "Say: <b>one</b> <b>two</b>")
    begun = [*prompt, *engine.encode("<b>one</b> <b>")]
    sampling = Sampling(max_tokens=30, stop=("</b>",))
    done = asyncio.run(engine.generate(begun, sampling))
    text = engine.decode(done.ids)
    assert (text, done.finish) == ("two</b>", "stop")


def test_the_server_and_the_model_in_this_process_agree(ref: str) -> None:
    """The same weights: only the server's 4-bit arithmetic is coarser than our float32."""
    server = load_engine(ref, tokenizer=BASE)
    local = load_engine(BASE, dtype="float32", slots=1, context=512, threads=1)
    prompt = local.encode_prompt("You answer briefly.", "What is the capital of France?")
    sampling = Sampling(max_tokens=8)

    async def both() -> tuple[Completion, Completion]:
        found = await local.generate(prompt, sampling), await server.generate(prompt, sampling)
        await local.close()
        await server.close()
        return found

    ours, theirs = asyncio.run(both())
    pairs = zip(ours.ids, theirs.ids, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert same >= 4
    assert theirs.logprobs[:same] == pytest.approx(ours.logprobs[:same], abs=0.15)


def test_errors_of_the_real_server(ref: str, engine: OpenAIEngine) -> None:
    with pytest.raises(ModelError, match="Did you mean 'smollm2'"):
        load_engine(ref.replace("smollm2", "smolm2"))
    long = load_engine(ref, tokenizer=BASE)
    with pytest.raises(EngineError, match="the context holds 2048"):
        asyncio.run(long.generate([1] * 3000, Sampling()))


# -- native tool calls ---------------------------------------------------------------------------


def test_the_model_is_asked_in_its_native_format_through_the_same_loop(ref: str) -> None:
    """What so small a model says is no matter: every ending is one of the loop's, tokens are the
    server's, and what was declared was not refused."""

    @tool
    def capital(country: str) -> str:
        """Say the capital of a country."""
        return f"The capital of {country} is Lima."

    async def go() -> Trajectory:
        engine = load_engine(ref, dialect="tools")
        budget = Budget(turns=3, turn_tokens=48, malformed=1)
        try:
            box = Toolbox([capital])
            return await run(
                Task("What is the capital of Peru?"),
                engine,
                load_grammar("react"),
                box,
                budget=budget,
            )
        finally:
            await engine.close()

    made = asyncio.run(go())
    print(made.text, made.stop, made.usage)
    assert made.stop is not StopReason.ENGINE_FAILED, made.error
    assert made.usage.prompt_tokens > 20 and 0 < made.usage.sampled_tokens <= 3 * 48
    assert made.meta == {"exact": False, "dialect": "tools"}
