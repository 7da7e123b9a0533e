"""An exported GGUF in a real llama.cpp: the same tokens, the same logprobs, the same answers.

`make test-servers` installs the server and runs this file. It exports the shipped model, or the
base where none is shipped, or the one that COA_TEST_MODEL names.
"""

from __future__ import annotations

import asyncio
import os
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from coa.engines import Completion, Engine, Sampling, load_engine
from coa.environment import load_environment
from coa.environments import make_tasks
from coa.grammar import load_grammar, system_prompt
from coa.loop import Budget, Decoding
from coa.models import references as store
from coa.rollouts import choose_prompt
from coa.trajectory import Trajectory
from test_llama_server import embedded_file, ref  # noqa: F401  # a server, for the file below

pytestmark = pytest.mark.slow
MODEL = os.environ.get("COA_TEST_MODEL") or store.OURS
GRAMMAR = load_grammar("mhqa")
BOUND = {"float16": 0.03, "q8_0": 0.3}
"""Largest difference of a logprob: llama.cpp rounds activations, too."""


@pytest.fixture(scope="module", params=[*BOUND])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def gguf(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    if not store.is_pulled():
        pytest.skip("the embedded model is not in the cache: coa model pull")
    from coa.models.export import export_model

    out = tmp_path_factory.mktemp("export") / "out"
    export_model(MODEL, out, "gguf", dtype)
    return next(out.glob("*.gguf"))


@pytest.fixture(scope="module")
def engines(ref: str) -> Any:  # noqa: F811
    local = load_engine(MODEL, dtype="float32", slots=4, context=2048, threads=1)
    served = load_engine(ref)  # with the server's own tokenizer
    yield local, served
    asyncio.run(local.close())


def test_the_server_makes_the_same_tokens(engines: tuple[Engine, Engine]) -> None:
    local, served = engines
    for text in (
        *("a <|im_end|> b", "</answer>\n\n<think> x", "  12,345.678 in 1999", "don't WE'LL it's"),
        *("na\u00efve \U0001f642 \u6771\u4eac\t\r\n  end ", "<wiki_search> country of Bogota"),
    ):
        assert served.encode(text) == local.encode(text)
    assert served.encode_prompt("Be brief.", "Who?") == local.encode_prompt("Be brief.", "Who?")


def test_numbers_and_tokenizer_are_those_of_the_embedded_file(gguf: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader

    theirs, ours = GGUFReader(embedded_file(tmp_path)).fields, GGUFReader(gguf).fields
    wanted = [key for key in theirs if key.startswith(("llama.", "tokenizer."))]
    assert len(wanted) == 22
    for key in wanted:
        assert ours[key].contents() == theirs[key].contents(), key


def test_the_server_computes_the_same_logprobs(
    engines: tuple[Engine, Engine], dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = make_tasks("atlas-mhqa", "heldout_entity", 4, 3)
    system = system_prompt(GRAMMAR, choose_prompt("auto", MODEL))

    async def ask(engine: Engine, question: str) -> Completion:
        return await engine.generate(
            engine.encode_prompt(system, question),
            Sampling(max_tokens=48, stop=("</wiki_search>",)),
        )

    async def all_of(engine: Engine) -> list[Completion]:
        return [await ask(engine, task.question) for task in tasks]

    ours, theirs = (asyncio.run(all_of(engine)) for engine in engines)
    gaps = []
    for mine, other in zip(ours, theirs, strict=True):
        pairs = zip(mine.ids, other.ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert same >= min(16, len(mine.ids)), "another token where none was near"
        gaps += [
            abs(a - b) for a, b in zip(mine.logprobs[:same], other.logprobs[:same], strict=True)
        ]
    with capsys.disabled():
        print(f"\n{MODEL} {dtype}: {len(gaps)} tokens, largest logprob gap {max(gaps):.4f}")
    assert max(gaps) < BOUND[dtype]


def test_rollouts_through_the_server_end_in_the_same_answers(
    engines: tuple[Engine, Engine], dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = list(make_tasks("atlas-mhqa", "heldout_entity", 4, 3))
    budget = Budget(turns=8, turn_tokens=96, tokens=480)
    decoding = Decoding(prompt=choose_prompt("auto", MODEL))

    async def answers(engine: Engine) -> list[Trajectory]:
        env = load_environment("atlas-mhqa", grammar=GRAMMAR.name)
        async with env.open(tasks) as opened:
            return [
                await opened.play(task, engine, budget=budget, decoding=decoding) for task in tasks
            ]

    ours, theirs = (asyncio.run(answers(engine)) for engine in engines)
    same = sum((a.answer, a.stop) == (b.answer, b.stop) for a, b in zip(ours, theirs, strict=True))
    with capsys.disabled():
        print(f"\n{MODEL} {dtype}: {same} of {len(tasks)} end alike: {[t.answer for t in theirs]}")
    assert same >= len(tasks) - (dtype != "float16")
