"""Scheduling: who is computed when, what is shared, what is guessed, what fits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tiny_model import make_tiny_model

torch = pytest.importorskip("torch")

from coa.engines import Sampling, load_engine  # noqa: E402
from coa.engines.batch import FREE_ROWS, PROMPT_TOKENS, Batch, BatchRequest, Guesses  # noqa: E402  # noqa: E402
from coa.engines.llama import LlamaForward  # noqa: E402
from coa.engines.sampling import draw  # noqa: E402
from coa.errors import ConfigError, EngineError  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


class Watched:
    """A forward that remembers the chunks of every step."""

    def __init__(self, folder: Path, slots: int = 4, exact: bool = False) -> None:
        self._inner = LlamaForward(folder, torch.float32, slots, 500, exact)
        self.slots, self.steps, self.can_rewind = slots, list[Any](), True
        self.vocabulary = self._inner.vocabulary
        self.copy, self.load = self._inner.copy, self._inner.load

    def step(self, chunks: Any) -> Any:
        self.steps.append(list(chunks))
        return self._inner.step(chunks)


class PlainCodec:
    """Text is not the subject here."""

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


def batch(forward: Any, guesses: Guesses | None = None, exact: bool = False) -> Batch:
    codec: Any = PlainCodec()
    return Batch(forward, codec, frozenset(), exact, guesses)


def request(prompt: list[int], tokens: int = 8, key: int = 0, **options: Any) -> BatchRequest:
    return BatchRequest(prompt, Sampling(key=key, max_tokens=tokens, **options), tokens)


def finish(made: Batch, *requests: BatchRequest) -> None:
    for each in requests:
        made.join(each)
    with torch.inference_mode():
        for _ in range(1000):
            if not made.running:
                return
            made.step()
    raise AssertionError("the batch does not end")


def words(count: int, start: int = 0) -> list[int]:
    return [3 + (7 * i + start) % 380 for i in range(count)]


def test_a_long_prompt_is_computed_beside_the_others_decoding(folder: Path) -> None:
    forward = Watched(folder)
    made = batch(forward)
    first = request(words(10), 20)
    made.join(first)
    with torch.inference_mode():
        for _ in range(3):
            made.step()
        long = request(words(450, 5), 4)
        made.join(long)
        for _ in range(2):
            before = len(first.ids)
            made.step()
            assert len(first.ids) == before + 1  # it got its token in the same step
            assert sum(len(c.ids) for c in forward.steps[-1] if c.slot == long.slot) > 1
    assert [len(chunk.ids) for step in forward.steps for chunk in step if chunk.slot == long.slot][
        :2
    ] == [PROMPT_TOKENS, 450 - PROMPT_TOKENS]


def test_a_group_that_comes_together_computes_its_prompt_once(folder: Path) -> None:
    for exact in (False, True):
        forward = Watched(folder, exact=exact)
        made, prompt = batch(forward, exact=exact), words(200)
        group = [request(prompt, 6, key, temperature=1.0) for key in range(4)]
        finish(made, *group)
        computed = sum(len(c.ids) for step in forward.steps for c in step if c.start < len(prompt))
        again = 3 * (1 if not exact else 200 % 64)  # the last token, or the last chunk, for logits
        assert computed == 200 + again
        assert len({tuple(each.ids) for each in group}) > 1


def test_prompts_that_begin_alike_are_computed_together(folder: Path) -> None:
    """Once the system prompt is there, each takes a copy and none waits for another."""
    forward = Watched(folder, slots=8)
    made, system = batch(forward), words(80)
    rollouts = [request([*system, *words(60, 3 * index + 1)]) for index in range(8)]
    for each in rollouts:
        made.join(each)
    with torch.inference_mode():
        made.step()
        made.step()
    assert sum(len(chunk.ids) for chunk in forward.steps[1] if len(chunk.ids) > 1) == PROMPT_TOKENS
    finish(made)
    computed = sum(len(c.ids) for step in forward.steps for c in step if c.start < 140)
    assert computed == 80 + 8 * 60


def test_a_group_waits_for_nobody_who_has_gone(folder: Path) -> None:
    forward = Watched(folder)
    made, prompt = batch(forward), words(400)
    leader, follower = request(prompt), request(prompt)
    made.join(leader)
    made.join(follower)
    with torch.inference_mode():
        made.step()
        leader.answer.cancel()
        finish(made)
    assert len(follower.ids) == 8


def test_guesses_change_no_token(folder: Path) -> None:
    """Rollouts that repeat themselves are guessed well, and come out the same."""
    prompts = [words(30, start) for start in range(6)]
    for options in ({}, {"temperature": 1.0}, {"temperature": 0.3, "top_k": 5}):
        plain, guesses = batch(Watched(folder)), Guesses()
        forward = Watched(folder)
        guessing = batch(forward, guesses)
        for _ in range(2):  # the second time all has been seen
            for index, prompt in enumerate(prompts):
                one, other = (request(prompt, 60, index, **options) for _ in range(2))
                finish(plain, one)
                finish(guessing, other)
                assert one.ids == other.ids
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        sampled = 2 * len(prompts) * 60
        assert len(forward.steps) < sampled * 0.8


def test_guesses_together_equal_alone(folder: Path) -> None:
    guesses, prompts = Guesses(), [words(30 + start, start) for start in range(4)]
    forward = Watched(folder)
    together = batch(forward, guesses)
    for _ in range(2):
        group = [request(prompt, 50, i, temperature=1.0) for i, prompt in enumerate(prompts)]
        finish(together, *group)
        for index, prompt in enumerate(prompts):
            alone = request(prompt, 50, index, temperature=1.0)
            finish(batch(Watched(folder)), alone)
            assert alone.ids == group[index].ids
    assert any(chunk.tail > 1 for step in forward.steps for chunk in step)


def test_in_company_only_what_followed_twice_is_guessed() -> None:
    def said(*ids: int) -> BatchRequest:
        return BatchRequest(prompt=list(range(100, 106)), sampling=Sampling(), limit=99, ids=[*ids])

    guesses = Guesses()
    guesses.learn(said(1, 2, 3, 4))
    crowd = [said(1) for _ in range(FREE_ROWS)]
    assert guesses.make([said(1)]) == [[2, 3, 4]]
    assert not any(guesses.make(crowd))
    guesses.learn(said(1, 2, 3, 5))
    assert guesses.make(crowd) == [[2, 3]] * FREE_ROWS
    guesses.learn(said(1, 7))
    assert not any(guesses.make(crowd))


def test_a_guess_never_passes_a_limit_or_a_stop(folder: Path) -> None:
    guesses, prompt = Guesses(), words(30)
    made = batch(Watched(folder), guesses)
    free = request(prompt, 40)
    finish(made, free)
    for tokens in (1, 2, 3, 17):
        cut = request(prompt, tokens)
        finish(made, cut)
        assert (cut.ids, cut.finish) == (free.ids[:tokens], "length")
    stop = PlainCodec().decode(free.ids[9:12])
    stopped = request(prompt, 40, stop=(stop,))
    finish(made, stopped)
    assert stopped.finish == "stop" and stopped.ids == free.ids[: len(stopped.ids)]
    assert stop in PlainCodec().decode(stopped.ids)
    again = [*prompt, *stopped.ids, *words(5)]
    warm, cold = request(again), request(again)
    finish(made, warm)
    finish(batch(Watched(folder)), cold)
    assert warm.ids == cold.ids


def test_interrupted_and_queued_again_is_the_same_bits(folder: Path) -> None:
    def load() -> Any:
        return load_engine(f"hf:{folder}", deterministic=True, slots=3)

    async def whole(engine: Any, prompt: list[int]) -> Any:
        return await engine.generate(prompt, Sampling(temperature=1.0, max_tokens=40, key=5))

    async def run() -> None:
        engine, prompt = load(), words(150)
        expected = await whole(engine, prompt)
        await engine.close()
        engine = load()
        noise = [
            asyncio.create_task(engine.generate(words(90 + i, i), Sampling(max_tokens=60, key=i)))
            for i in range(6)
        ]
        for wait in (0.01, 0.03, 0.08):  # cancelled in the queue, in the prompt, while decoding
            task = asyncio.create_task(whole(engine, prompt))
            await asyncio.sleep(wait)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        again = await whole(engine, prompt)
        await asyncio.gather(*noise)
        await engine.close()
        assert (again.ids, again.logprobs) == (expected.ids, expected.logprobs)

    asyncio.run(run())


def test_memory_is_bounded_by_a_setting(folder: Path) -> None:
    each = 2 * 2 * 2 * 64 * 4 * 512 / 1e9  # K and V, layers, heads, padded dimension, bytes
    engine: Any = load_engine(f"hf:{folder}", dtype="float32", memory_gb=3.5 * each, slots=64)
    assert engine._forward.slots == 3

    async def run() -> None:
        jobs = [engine.generate(words(20, i), Sampling(max_tokens=5)) for i in range(9)]
        assert len(await asyncio.gather(*jobs)) == 9
        await engine.close()

    asyncio.run(run())
    with pytest.raises(ConfigError, match=r"one rollout of 512 tokens take .* GB.*Lower context"):
        load_engine(f"hf:{folder}", dtype="float32", memory_gb=0.5 * each)


def test_min_p_keeps_what_is_likely_beside_the_best() -> None:
    weights = [0.5, 0.3, 0.15, 0.05]
    logits = torch.log(torch.tensor([weights]))
    for min_p, kept in ((0.25, {0, 1, 2}), (0.5, {0, 1}), (0.7, {0}), (0.0, {0, 1, 2, 3})):
        found = set()
        for key in range(300):
            sampling = Sampling(temperature=1.0, min_p=min_p, key=key)
            (token,), (logprob,), _ = draw(logits.clone(), [sampling], [0])
            mass = sum(weights[i] for i in kept)
            assert logprob == pytest.approx(
                torch.log(torch.tensor(weights[token] / mass)).item(), abs=1e-5
            )
            found.add(token)
        assert found == kept


def test_what_a_neighbour_asks_for_changes_no_bit_of_a_draw() -> None:
    """Cut, constrained, cold and plain rows, each alone and beside each of the others."""
    vocabulary = 49_152
    logits = 4 * torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(0))
    bound = (torch.arange(vocabulary) % 3 == 0).to(torch.uint8)
    samplings = [
        Sampling(temperature=0.8, key=1),
        Sampling(temperature=1.0, top_p=0.9, key=2),
        Sampling(temperature=1.0, constraint="start: /a/", key=3),
        Sampling(temperature=0.0),
    ]

    def drawn(rows: list[int], position: int) -> list[Any]:
        """What the first of the rows drew."""
        asked = [samplings[row] for row in rows]
        allowed = None
        if any(each.constraint for each in asked):
            allowed = torch.stack([bound if each.constraint else bound | 1 for each in asked])
        found = draw(logits[rows], asked, [position] * len(rows), allowed)
        return [values[0] for values in found]

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for row in range(4):
            for position in range(3):
                alone = drawn([row], position)
                others = [[row, other] for other in range(4)] + [[row, 0, 1, 2, 3]]
                assert all(drawn(beside, position) == alone for beside in others)
    finally:
        torch.set_num_threads(before)


def test_closing_beside_a_long_prompt_answers(folder: Path) -> None:
    engine: Any = load_engine(f"hf:{folder}", dtype="float32", slots=2)

    async def run() -> None:
        job = asyncio.create_task(engine.generate(words(400), Sampling(max_tokens=90)))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await job

    asyncio.run(run())
