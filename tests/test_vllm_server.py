"""The openai engine against a real server: vLLM on the CPU with the embedded model, on loopback.

`make test-vllm` installs the server into an environment of its own and runs this file. Without it,
or without the model (`coa model pull`), the tests are skipped and say why. The server computes in
float32, so that its numbers can be compared with a plain forward pass; what they are is printed.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from coa.engines import Completion, Engine, Sampling, load_engine  # noqa: E402
from coa.engines.openai import OpenAIEngine  # noqa: E402
from coa.engines.server_apis import TokenCompletions  # noqa: E402
from coa.errors import EngineError, ModelError, Unavailable  # noqa: E402
from coa.grammar import PRESETS  # noqa: E402
from coa.loop import Budget  # noqa: E402
from coa.models import references as store  # noqa: E402
from coa.models.weights import MANIFEST, write_adapter  # noqa: E402
from coa.trajectory import StopReason  # noqa: E402
from plain_forward import (  # noqa: E402
    chosen,
    forced,
    largest_difference,
    load_plain,
    merged,
    random_adapter,
)
from playing import constrained_rollouts, sampled_rollout  # noqa: E402

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
VLLM = Path(os.environ.get("COA_TEST_VLLM") or ROOT / ".cache" / "vllm")
SCRIPT = Path(__file__).with_name("vllm_server.py")
QUESTIONS = (
    "What is the capital of France?",
    "Who wrote the play Hamlet?",
    "Which river flows through Lyon?",
    "How many legs does a spider have?",
    "What is the largest planet?",
    "Name a metal that is liquid at room temperature.",
    "When did the Second World War end?",
    "What do bees make?",
)
CLOSE = 1e-3
"""Logprobs of two float32 computations of one model differ by less."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """The server's process; it has `url` once it answers."""
    python = VLLM / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"no vLLM in {VLLM}: make test-vllm")
    if not store.is_pulled():
        pytest.skip("the embedded model is not in the cache: coa model pull")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as said:
        process = subprocess.Popen(
            [str(python), str(SCRIPT), str(store.base_folder()), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), log.read_text()[-2000:]
            process.url = address  # type: ignore[attr-defined]
            yield process
        finally:
            stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def ref(server: Any) -> str:
    return f"openai:smollm2@{server.url}/v1"


@pytest.fixture(scope="module")
def engine(ref: str) -> OpenAIEngine:
    notes: list[str] = []
    engine = load_engine(ref, note=notes.append)
    assert isinstance(engine, OpenAIEngine) and notes == []
    return engine


@pytest.fixture(scope="module")
def local() -> Iterator[Engine]:
    engine = load_engine(store.BASE, dtype="float32", slots=8, context=1024)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def plain() -> Any:
    """The same weights as a plain transformers model."""
    return load_plain(store.base_folder())


def prompts_of(engine: Engine) -> list[list[int]]:
    return [engine.encode_prompt("You answer in a sentence.", each) for each in QUESTIONS]


def ask(engine: OpenAIEngine, prompt: list[int], **sampling: Any) -> Completion:
    done = asyncio.run(engine.generate(prompt, Sampling(**sampling)))
    assert len(done.ids) == len(done.logprobs) > 0
    assert all(p <= 0 and math.isfinite(p) for p in done.logprobs)
    return done


def ask_all(engine: Engine, prompts: Sequence[list[int]], **sampling: Any) -> list[Completion]:
    async def together() -> list[Completion]:
        jobs = [
            engine.generate(prompt, Sampling(key=n, **sampling)) for n, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*jobs)

    return asyncio.run(together())


def test_the_engine_finds_out_that_tokens_are_exchanged(engine: OpenAIEngine) -> None:
    assert isinstance(engine._dialect, TokenCompletions)
    assert engine.exact and engine.tempered and engine.context == 2048
    assert engine.weights == "smollm2"
    text = "a <|im_end|> b, na\u00efve \U0001f642 </answer>\n"
    assert engine.decode(engine.encode(text)) == text


def test_greedy_is_repeatable_and_continues_itself(engine: OpenAIEngine) -> None:
    prompt = prompts_of(engine)[0]
    whole = ask(engine, prompt, max_tokens=24)
    assert ask(engine, prompt, max_tokens=24).ids == whole.ids
    half = ask(engine, prompt, max_tokens=4)
    assert half.finish == "length" and half.ids == whole.ids[:4]
    rest = ask(engine, [*prompt, *half.ids], max_tokens=20)
    assert half.ids + rest.ids == whole.ids


def test_a_stop_string_may_end_inside_a_token(engine: OpenAIEngine) -> None:
    prompt = engine.encode("one two three four five six. one two three four five six. one two")
    done = ask(engine, prompt, max_tokens=20, stop=("ee fo",))
    assert (engine.decode(done.ids), done.finish) == (" three four", "stop")
    assert engine.decode(done.ids[:-1]) == " three"


def test_the_end_of_a_sequence_is_sampled_with_its_logprob(engine: OpenAIEngine) -> None:
    prompt = [*engine.encode_prompt("You repeat.", "Say: yes"), *engine.encode("yes")]
    forced_end = ask(engine, prompt, constraint='start: "."')
    assert forced_end.finish == "eos" and forced_end.ids == [*engine.encode("."), 2]
    for token in (0, 2):  # with the bias of a model that wants to end
        sampled = ask_biased(engine, prompt, token)
        assert sampled.finish == "eos" and sampled.ids == [token]
        assert engine.decode(sampled.ids) == ""


def ask_biased(engine: OpenAIEngine, prompt: list[int], token: int) -> Completion:
    """A turn whose next token is forced; the engine has no such setting, so the body gets it."""

    class Biased(TokenCompletions):
        def _body(self, turn: Any) -> dict[str, Any]:
            return super()._body(turn) | {"logit_bias": {str(token): 100.0}}

    usual = engine._dialect
    engine._dialect = Biased(engine._transport, "smollm2", engine.codec, tempered=True)
    try:
        return ask(engine, prompt, max_tokens=4)
    finally:
        engine._dialect = usual


def test_the_key_decides_what_is_drawn(engine: OpenAIEngine) -> None:
    prompt = prompts_of(engine)[1]
    large = (1 << 63) - 5
    one = ask(engine, prompt, temperature=1.0, max_tokens=12, key=large)
    assert ask(engine, prompt, temperature=1.0, max_tokens=12, key=large).ids == one.ids
    others = {tuple(ask(engine, prompt, temperature=1.0, max_tokens=12, key=k).ids) for k in (6, 7)}
    assert len(others | {tuple(one.ids)}) > 1


def test_requests_at_once_do_not_mix(engine: OpenAIEngine) -> None:
    numbers = range(20, 36)
    prompts = [engine.encode("Count: " + f"{n}, " * 8) for n in numbers]
    for number, done in zip(numbers, ask_all(engine, prompts, max_tokens=3), strict=True):
        assert str(number) in engine.decode(done.ids)


def test_many_long_prompts_at_once_with_keys_of_their_own(engine: OpenAIEngine) -> None:
    """More tokens of prompts than the server computes in one step."""
    prompts = [engine.encode(f"{n}, {n}, {n}, " * 50) for n in range(16)]
    assert sum(map(len, prompts)) > 4096
    done = ask_all(engine, prompts, temperature=1.0, max_tokens=4)
    assert all(each.finish in ("length", "eos") for each in done)


def test_what_the_server_counts_is_reported(engine: OpenAIEngine) -> None:
    prompt = engine.encode("The same long beginning, said again. " * 60)
    assert len(prompt) > 384
    ask(engine, prompt, max_tokens=2)
    before = (engine.usage.prompt_tokens, engine.usage.cached_tokens)
    ask(engine, [*prompt, *engine.encode("And on.")], max_tokens=2)
    now = (engine.usage.prompt_tokens, engine.usage.cached_tokens)
    assert now[0] - before[0] == len(prompt) + len(engine.encode("And on."))
    cached = now[1] - before[1]
    print(f"prefix cache: {cached} of {len(prompt)} tokens of a repeated beginning")
    assert 256 <= cached <= len(prompt)


def test_logprobs_are_of_the_distribution_sampled_from(engine: OpenAIEngine, plain: Any) -> None:
    prompts = prompts_of(engine)[:4]
    for temperature, top_k, min_p in ((0.7, 0, 0.0), (1.0, 5, 0.0), (1.0, 0, 0.1)):
        sampling = {"temperature": temperature, "top_k": top_k, "min_p": min_p, "max_tokens": 16}
        done = ask_all(engine, prompts, **sampling)
        for prompt, each in zip(prompts, done, strict=True):
            logs = forced(plain, prompt, each.ids) / temperature
            lowest = logs.amin(-1, keepdim=True)
            if top_k:
                lowest = logs.topk(top_k, -1).values[:, -1:]
            elif min_p:
                lowest = logs.amax(-1, keepdim=True) + math.log(min_p)
            logs = logs.masked_fill(logs < lowest, float("-inf"))
            mine = chosen(torch.log_softmax(logs, -1), each.ids)
            assert each.logprobs == pytest.approx(mine, abs=CLOSE)


def test_logprobs_are_those_of_a_plain_forward(engine: OpenAIEngine, plain: Any) -> None:
    prompts = prompts_of(engine)
    done = ask_all(engine, prompts, temperature=1.0, max_tokens=64)
    worst = largest_difference(plain, prompts, done)
    count = sum(len(each.ids) for each in done)
    print(f"logprobs against transformers, float32: at most {worst:.1e} apart over {count} tokens")
    assert worst < CLOSE


def agreed(ours: Completion, theirs: Completion) -> int:
    pairs = zip(ours.ids, theirs.ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_greedy_agrees_with_the_model_in_this_process(
    engine: OpenAIEngine, local: Engine, plain: Any
) -> None:
    """Where the two part, the two best tokens were as good as equal."""
    prompts = [engine.encode(f"{each} Here is the story of") for each in QUESTIONS]
    ours, theirs = (ask_all(each, prompts, max_tokens=64) for each in (local, engine))
    same = [agreed(*pair) for pair in zip(ours, theirs, strict=True)]
    lengths = [len(each.ids) for each in ours]
    worst = 0.0
    for prompt, mine, other, count in zip(prompts, ours, theirs, same, strict=True):
        apart = [abs(a - b) for a, b in zip(mine.logprobs[:count], other.logprobs, strict=False)]
        worst = max([worst, *apart])
        if count < min(len(mine.ids), len(other.ids)):
            best, second = forced(plain, prompt, mine.ids[: count + 1])[-1].topk(2).values.tolist()
            assert best - second < CLOSE
    print(f"greedy: {same} of {lengths} tokens agree; logprobs there at most {worst:.1e} apart")
    assert worst < CLOSE


def test_a_rollout_keeps_the_ids_that_were_sampled(engine: OpenAIEngine) -> None:
    trajectory = sampled_rollout(engine)
    assert trajectory.weights == "smollm2" and trajectory.meta == {}


# -- constraints --------------------------------------------------------------------------------


def test_a_constraint_gives_the_logprobs_of_the_allowed_tokens(
    engine: OpenAIEngine, local: Engine
) -> None:
    """The same as in this process, where each is over the allowed tokens."""
    constraint = 'start: /(yes|no|perhaps), [0-9]{3}/ "."'
    prompts = prompts_of(engine)
    for temperature in (0.0, 1.0):
        done = ask_all(engine, prompts, constraint=constraint, temperature=temperature)
        for each in done:
            word, _, number = engine.decode(each.ids).removesuffix(".").partition(", ")
            assert word in ("yes", "no", "perhaps") and len(number) == 3 and number.isdigit()
            assert each.finish == "eos" and each.allowed_logmass is None
    ours, theirs = (ask_all(e, prompts, constraint=constraint) for e in (local, engine))
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        count = min(agreed(mine, other), len(other.ids) - 1)  # which ends are allowed may differ
        assert count > 0
        apart = [abs(a - b) for a, b in zip(mine.logprobs[:count], other.logprobs, strict=False)]
        worst = max([worst, *apart])
    print(f"constrained logprobs against the local engine: at most {worst:.1e} apart")
    assert worst < CLOSE
    with pytest.raises(EngineError, match="Grammar error"):
        ask(engine, prompts[0], constraint="start: (")


@pytest.mark.parametrize("name", PRESETS)
def test_the_untrained_base_is_never_malformed_under_a_constraint(
    name: str, engine: OpenAIEngine
) -> None:
    """At temperature 1, which without a constraint almost never gets it right."""
    budget = Budget(turns=3, turn_tokens=224)
    done = constrained_rollouts(engine, name, QUESTIONS[:4], 8, budget)
    malformed = sum(t.usage.malformed for t in done)
    stops = [t.stop for t in done]
    cut = sum(stop is not StopReason.ANSWERED for stop in stops)
    turns = sum(t.usage.turns for t in done)
    print(
        f"{name}: {malformed} malformed in {turns} turns of {len(done)} rollouts, {cut} cut short"
    )
    assert malformed == 0 and [t.error for t in done if t.error] == []
    kept = (StopReason.ANSWERED, StopReason.RELEASED)
    assert all(stop in kept or (stop and stop.truncated) for stop in stops)


# -- adapters -----------------------------------------------------------------------------------


def test_adapters_are_loaded_while_the_server_runs(
    ref: str, plain: Any, local: Any, tmp_path: Path
) -> None:
    engine = load_engine(ref)
    assert isinstance(engine, OpenAIEngine)
    prompts = prompts_of(engine)
    folder = store.base_folder()
    first, second = random_adapter(folder, 1), random_adapter(folder, 2, rank=4)
    write_adapter(first, tmp_path)
    record = json.dumps({"base_sha256": local.base_sha256})
    (tmp_path / MANIFEST).write_text(record, encoding="utf-8")
    base = ask_all(engine, prompts, max_tokens=32)
    for adapter, source in ((first, tmp_path), (second, second)):
        version = type(source).__name__
        asyncio.run(engine.load(source, version))
        assert engine.weights == version
        asyncio.run(local.load(adapter, version))
        done = ask_all(engine, prompts, max_tokens=32, temperature=1.0)
        with merged(plain, adapter) as model:
            worst = largest_difference(model, prompts, done)
        unmerged = largest_difference(plain, prompts, done)
        ours, theirs = (ask_all(e, prompts, max_tokens=32) for e in (local, engine))
        same = [agreed(*pair) for pair in zip(ours, theirs, strict=True)]
        lengths = [len(each.ids) for each in ours]
        print(
            f"adapter from a {version}: logprobs at most {worst:.1e} from the merged model "
            f"({unmerged:.2f} from the base); greedy {same} of {lengths} agree with ours"
        )
        assert worst < CLOSE < 0.1 < unmerged
        assert same != [agreed(*pair) for pair in zip(ours, base, strict=True)]
    asyncio.run(engine.load(None, "base again"))
    asyncio.run(local.load(None, "base"))
    again = ask_all(engine, prompts, max_tokens=32)
    assert engine.weights == "base again"
    assert largest_difference(plain, prompts, again) < CLOSE
    assert [m["id"] for m in engine._transport.ask(f"{engine._transport.api}/models")["data"]] == [
        "smollm2"
    ]


def test_adapters_that_the_server_refuses(ref: str, tmp_path: Path, local: Any) -> None:
    engine = load_engine(ref)
    assert isinstance(engine, OpenAIEngine)
    with pytest.raises(EngineError, match=r"rank 33.*--max-lora-rank 64\.") as caught:
        asyncio.run(engine.load(random_adapter(store.base_folder(), 1, rank=33), "large"))
    assert "\n" not in str(caught.value) and engine.weights == "smollm2"
    write_adapter(random_adapter(store.base_folder(), 1, rank=2), tmp_path)
    (tmp_path / MANIFEST).write_text('{"base_sha256": "other"}', encoding="utf-8")
    with pytest.raises(ModelError, match="trained on a base with hash 'other'"):
        asyncio.run(engine.load(tmp_path, "other"))
    assert ask(engine, prompts_of(engine)[0], max_tokens=2).finish == "length"


# -- failures; the last test ends the server ----------------------------------------------------


def test_errors_of_the_real_server(ref: str, engine: OpenAIEngine) -> None:
    with pytest.raises(ModelError, match="Did you mean 'smollm2'"):
        load_engine(ref.replace("smollm2", "smolm2"))
    with pytest.raises(EngineError, match="the context holds 2048"):
        asyncio.run(engine.generate([1] * 2048, Sampling()))
    full = asyncio.run(engine.generate([1] * 2040, Sampling(max_tokens=100)))
    assert len(full.ids) <= 8 and full.finish in ("length", "eos")


def test_a_server_that_ends_in_the_middle_of_a_request_is_one_line(ref: str, server: Any) -> None:
    engine = load_engine(ref, retries=2, backoff_s=0.05)

    async def interrupted() -> None:
        prompt = engine.encode("Count: 1, 2, 3, 4, 5, 6, 7, 8, 9,")
        request = asyncio.create_task(engine.generate(prompt, Sampling(max_tokens=1500)))
        await asyncio.sleep(1.0)
        assert not request.done()
        await asyncio.to_thread(stop, server)
        with pytest.raises((Unavailable, EngineError)) as caught:
            await request
        assert "\n" not in str(caught.value)
        print(f"a server that ends: {caught.value}")
        await engine.close()

    asyncio.run(interrupted())
