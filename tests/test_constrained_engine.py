"""The local engine under a constraint: what it may sample, what it records, what it refuses."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from playing import TASK, box, constrained_rollouts
from tiny_model import make_tiny_model

torch = pytest.importorskip("torch")
pytest.importorskip("llguidance")

from coa.engines import Completion, Sampling, load_engine  # noqa: E402
from coa.engines.batch import Guesses  # noqa: E402
from coa.engines.sampling import (  # noqa: E402
    allowed_tokens,
    draw,
    follow,
    forced_tokens,
    possible,
)
from coa.errors import EngineError  # noqa: E402
from coa.grammar import (  # noqa: E402
    PRESETS,
    GrammarState,
    TextLimits,
    load_grammar,
    turn_grammar,
)
from coa.loop import Budget, Decoding, run  # noqa: E402
from coa.tasks import Task  # noqa: E402
from coa.trajectory import Author, Segment, StopReason, Trajectory  # noqa: E402

CHOICE = 'start: /(yes|no|perhaps) [0-9]{3}/ "."'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def engine(folder: Path) -> Any:
    made = load_engine(f"hf:{folder}", dtype="float32", slots=8)
    yield made
    asyncio.run(made.close())


def complete(engine: Any, samplings: list[Sampling], question: str = "Rome?") -> list[Any]:
    async def together() -> list[Any]:
        prompt = engine.encode_prompt("Be brief.", question)
        jobs = [engine.generate(prompt, sampling) for sampling in samplings]
        return await asyncio.gather(*jobs, return_exceptions=True)

    return asyncio.run(together())


def test_only_what_the_constraint_allows_is_sampled(engine: Any) -> None:
    hot = [Sampling(temperature=1.0, key=i, constraint=CHOICE) for i in range(20)]
    results = complete(engine, [*hot, Sampling(constraint=CHOICE)])
    for result in results:
        text = engine.decode(result.ids)
        word, _, number = text.removesuffix(".").partition(" ")
        assert word in ("yes", "no", "perhaps") and len(number) == 3 and number.isdigit(), text
        assert result.finish == "eos" and text.endswith(".")
        assert len(result.allowed_logmass) == len(result.ids) == len(result.logprobs)
        assert all(mass <= 0 for mass in result.allowed_logmass)
    assert len({engine.decode(result.ids) for result in results}) > 5


def test_neighbours_without_a_constraint_are_left_alone(engine: Any) -> None:
    free = Sampling(temperature=1.0, max_tokens=12, key=3)
    (alone,) = complete(engine, [free])
    engine._batch.forget()
    with_others, *_ = complete(engine, [free, *[Sampling(constraint=CHOICE)] * 3])
    assert with_others.ids == alone.ids
    assert with_others.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert alone.allowed_logmass is None and with_others.allowed_logmass is None


def test_logprobs_are_renormalised_and_the_mass_is_what_was_lost(engine: Any) -> None:
    """Logprob over the allowed tokens + log of their mass = logprob without a constraint."""
    sampling = Sampling(temperature=0.7, key=5, constraint=CHOICE)
    (result,) = complete(engine, [sampling])
    prompt = engine.encode_prompt("Be brief.", "Rome?")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(engine._folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + result.ids])).logits[0].float() / 0.7
    logs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    for i, token in enumerate(result.ids):
        free = logs[i, token].item()
        assert result.logprobs[i] + result.allowed_logmass[i] == pytest.approx(free, abs=1e-3)


def test_a_draw_among_allowed_tokens() -> None:
    weights = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    allowed = torch.tensor([[0, 1, 0, 1]], dtype=torch.uint8)
    found = set()
    for key in range(100):
        sampling = Sampling(temperature=1.0, key=key, constraint=CHOICE)
        (token,), (logprob,), (mass,) = draw(weights.log(), [sampling], [0], allowed)
        found.add(token)
        assert mass == pytest.approx(math.log(0.35), abs=1e-5)
        assert logprob == pytest.approx(math.log(weights[0, token].item() / 0.35), abs=1e-5)
    assert found == {1, 3}
    assert draw(weights.log(), [Sampling(constraint=CHOICE)], [0], allowed)[0] == [1]
    top = Sampling(temperature=1.0, top_k=1, constraint=CHOICE)
    (token,), (logprob,), (mass,) = draw(weights.log(), [top], [0], allowed)
    assert (token, logprob) == (1, 0.0) and mass == pytest.approx(math.log(0.35), abs=1e-5)
    assert allowed_tokens([(None, []), (None, [1, 2])], 4) is None


def test_tokens_that_are_all_but_impossible_can_be_drawn() -> None:
    """A forced tag may have a probability that float32 cannot hold."""
    logits = torch.tensor([[0.0, -200.0, -201.0, -50.0]])
    allowed = torch.tensor([[0, 1, 1, 0]], dtype=torch.uint8)
    found = set()
    for key in range(100):
        sampling = Sampling(temperature=1.0, key=key, constraint=CHOICE)
        (token,), (logprob,), (mass,) = draw(logits, [sampling], [0], allowed)
        found.add(token)
        share = 1 / (1 + math.exp(-1)) if token == 1 else 1 / (1 + math.e)
        assert logprob == pytest.approx(math.log(share), abs=1e-4)
        assert mass == pytest.approx(-200 + math.log(1 + math.exp(-1)), abs=1e-3)
    assert found == {1, 2}


def test_a_constraint_that_is_no_grammar_fails_alone(engine: Any) -> None:
    bad, good = complete(engine, [Sampling(constraint="start: ("), Sampling(constraint=CHOICE)])
    assert isinstance(bad, EngineError) and "\n" not in str(bad)
    assert str(bad).startswith("The constraint is not a grammar: ")
    assert isinstance(good, Completion)


@pytest.mark.parametrize("name", PRESETS)
def test_rollouts_of_a_random_model_are_never_malformed(
    name: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = classmethod(lambda cls, tokens: cls(text=20, call=8, code=24))
    monkeypatch.setattr(TextLimits, "within", short)

    async def rollouts() -> list[Trajectory]:
        jobs = [
            run(
                Task(f"Where is it? {i}"),
                engine,
                load_grammar(name),
                box(name),
                budget=Budget(turns=4),
                decoding=Decoding(temperature=1.0, sample=i, constrain=True),
            )
            for i in range(12)
        ]
        return await asyncio.gather(*jobs)

    done = asyncio.run(rollouts())
    for trajectory in done:
        assert trajectory.usage.malformed == 0, trajectory.text
        assert trajectory.error is None
        stop = trajectory.stop
        assert stop is not None and (stop is StopReason.ANSWERED or stop.truncated)
        for segment in trajectory.segments:
            if segment.author is Author.MODEL:
                assert segment.allowed is not None and segment.ids is not None
                assert len(segment.allowed) == len(segment.ids)
    assert any(t.usage.turns > 1 or t.stop is StopReason.ANSWERED for t in done)


def test_the_allowed_mass_is_on_record(engine: Any) -> None:
    decoding = Decoding(constrain=True)
    grammar = load_grammar("mhqa")
    trajectory = asyncio.run(
        run(TASK, engine, grammar, box("mhqa"), budget=Budget(turns=1), decoding=decoding)
    )
    again = Trajectory.from_json(trajectory.to_json())
    assert again.segments[1].allowed == pytest.approx(trajectory.segments[1].allowed, abs=1e-5)
    assert "allowed" not in Segment(Author.MODEL, "x", [1], [0.0]).to_json()


CODE = 'start: line+\nline: /[a-z]{1,4}/ " = " /[0-9]{1,3}/ "\\n"\n'
FORCED = 'start: "<wiki_search>capital of France</wiki_search>" /[a-z ]{1,9}/ "</answer>"'


@pytest.fixture(scope="module")
def both(folder: Path) -> Any:
    """An engine that guesses and one that does not, and how many steps each took."""
    engines = [
        load_engine(f"hf:{folder}", dtype="float32", slots=4, guess=g) for g in (True, False)
    ]
    steps = [0, 0]

    def counted(at: int) -> Any:
        step = engines[at]._forward.step  # type: ignore[attr-defined]

        def call(chunks: Any) -> Any:
            steps[at] += 1
            return step(chunks)

        return call

    for at, each in enumerate(engines):
        each._forward.step = counted(at)  # type: ignore[attr-defined]
    yield engines, steps
    for each in engines:
        asyncio.run(each.close())


@pytest.mark.parametrize("constraint", [CHOICE, CODE, FORCED, "mhqa", "code", "react"])
def test_guesses_change_no_token_under_a_constraint(both: Any, constraint: str) -> None:
    if constraint in PRESETS:
        bound = box(constraint).bind(load_grammar(constraint))
        limits = TextLimits(text=20, call=8, code=24)
        constraint = turn_grammar(bound, GrammarState(), limits)
    (guessing, plain), steps = both
    before = list(steps)
    hot = [
        Sampling(temperature=t, key=k, top_k=c, max_tokens=40, constraint=constraint)
        for k, (t, c) in enumerate([(0.0, 0), (1.0, 0), (0.3, 5), (2.0, 0), (1.0, 0)])
    ]
    for _ in range(2):  # the second time all has been seen
        for sampling in hot:
            one, other = (complete(engine, [sampling])[0] for engine in (guessing, plain))
            assert (one.ids, one.finish) == (other.ids, other.finish)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            assert one.allowed_logmass == pytest.approx(other.allowed_logmass, abs=1e-4)
    together = complete(guessing, hot), complete(plain, hot)
    assert [one.ids for one in together[0]] == [other.ids for other in together[1]]
    taken = [now - then for now, then in zip(steps, before, strict=True)]
    assert taken[0] < 0.8 * taken[1]


def test_what_a_constraint_forces_is_computed_at_once(both: Any) -> None:
    (guessing, plain), steps = both
    forced = 'start: "<wiki_search>capital of France</wiki_search>"'
    guessing._batch._guesses = Guesses()  # nothing was seen before
    counts = []
    for at, engine in enumerate((guessing, plain)):
        before = steps[at]
        (done,) = complete(engine, [Sampling(constraint=forced)], "Which?")
        counts.append(steps[at] - before)
        assert engine.decode(done.ids) == "<wiki_search>capital of France</wiki_search>"
        assert done.logprobs[:-1] == pytest.approx([0.0] * (len(done.ids) - 1), abs=1e-5)
    assert counts[0] <= counts[1] // 2


@given(guess=st.lists(st.integers(0, 399), max_size=12), head=st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_masks_after_guesses_are_those_of_following_them(
    both: Any, guess: list[int], head: int
) -> None:
    """Whatever is guessed: what is possible of it, and what may follow each of its tokens."""
    matcher = both[0][0]._matchers.start(FORCED)
    forced = forced_tokens(matcher)
    tried = possible(matcher, [*forced[:head], *guess])
    width = both[0][0]._forward.vocabulary
    found = allowed_tokens([(None, guess), (matcher, tried)], width)
    assert found is not None and len(found) == 1 + len(guess) + 1 + len(tried)
    assert bool(found[: 1 + len(guess)].all())
    walking = both[0][0]._matchers.start(FORCED)
    for row, token in zip(found[1 + len(guess) :], [*tried, None], strict=True):
        alone = allowed_tokens([(walking, [])], width)
        assert alone is not None and torch.equal(alone[0], row)
        if token is not None:
            assert follow(walking, token) == ""
            if row[token] == 0:  # the mask wants another token for these bytes: it is never drawn
                break
    assert possible(matcher, forced[:1]) == forced[:1]  # the matcher itself has not moved


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_the_untrained_base_is_never_malformed_under_a_constraint(name: str) -> None:
    """The real model at temperature 1, which without a constraint almost never gets it right."""
    engine = load_engine("smollm2-135m", slots=16, context=2048)
    questions = ["What is the capital of Peru?", "Which river flows through Lyon?"]
    budget = Budget(turns=4, turn_tokens=256)
    done = constrained_rollouts(engine, name, questions, 16, budget)
    asyncio.run(engine.close())
    assert sum(t.usage.malformed for t in done) == 0
    assert all(t.stop is StopReason.ANSWERED or (t.stop and t.stop.truncated) for t in done)
