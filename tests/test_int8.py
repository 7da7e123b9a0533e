"""Weights of 8 bits: the kernel against numpy, what the engine does with them, who may not, and the
measurement of all that."""

from __future__ import annotations

import asyncio
import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_model import make_tiny_model

torch = pytest.importorskip("torch")

from coa.engines import Sampling, kernels, load_engine  # noqa: E402
from coa.engines.kernels import GROUP, LANES, Int8Linear  # noqa: E402
from coa.engines.llama import FEW_ROWS, Chunk, LlamaForward, make_linear  # noqa: E402
from coa.errors import ConfigError  # noqa: E402
from coa.evaluation.run import EvalSettings, run_eval  # noqa: E402
from coa.io.machine import cpu_features  # noqa: E402
from coa.lab.bench_ask import ask_lines, bench_ask, led_along  # noqa: E402
from coa.tasks import Task, TaskSet  # noqa: E402


def library() -> ctypes.CDLL:
    found = kernels.load_kernels()
    if isinstance(found, str):
        pytest.skip(f"no kernels: {found}")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def reference(x: Any, weight: Any, bias: Any) -> Any:
    """The same in numpy: weights rounded by groups, rows to 16 bits, sums in double precision."""
    w, rows = weight.float().numpy().astype(np.float64), x.float().numpy().astype(np.float64)
    rounded = np.zeros_like(w)
    for first in range(0, w.shape[1], GROUP):
        group = w[:, first : first + GROUP]
        scale = np.abs(group).max(axis=1, keepdims=True) / 127
        whole = np.rint(np.divide(group, scale, out=np.zeros_like(group), where=scale > 0))
        rounded[:, first : first + GROUP] = whole * scale
    scale = np.abs(rows).max(axis=1, keepdims=True) / 32767
    whole = np.rint(np.divide(rows, scale, out=np.zeros_like(rows), where=scale > 0))
    out = (whole * scale) @ rounded.T
    return out if bias is None else out + bias.float().numpy()


@given(
    rows=st.integers(1, 19),
    width=st.integers(1, 13).map(lambda n: n * LANES),
    outputs=st.integers(1, 101),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    biased=st.booleans(),
    size=st.sampled_from([1e-6, 1.0, 300.0]),
    seed=st.integers(0, 999),
)
@settings(max_examples=80, deadline=None)
def test_products_are_those_of_rounded_weights(
    rows: int, width: int, outputs: int, dtype: str, biased: bool, size: float, seed: int
) -> None:
    kind, made = getattr(torch, dtype), torch.Generator().manual_seed(seed)
    x = (size * torch.randn(rows, width, generator=made)).to(kind)
    weight = torch.randn(outputs, width, generator=made).to(kind)
    x[rows // 2], weight[outputs // 2] = 0.0, 0.0
    weight[0, 0] = 50.0  # a group with one large weight rounds the others coarsely
    bias = torch.randn(outputs, generator=made).to(kind) if biased else None
    found = Int8Linear(library(), weight, bias)(x)
    assert found.dtype == kind and found.shape == (rows, outputs)
    exact = torch.from_numpy(reference(x, weight, bias))
    # A weight in the middle of two steps may be rounded either way.
    close = 3e-3 if dtype == "float32" else 1e-2
    most = exact.abs().max().item()
    assert torch.allclose(found.double(), exact, atol=close * most, rtol=close)
    alone = torch.cat([Int8Linear(library(), weight, bias)(row[None]) for row in x])
    assert torch.equal(found, alone)  # to the bit, whoever else is there


def test_rounded_products_are_close_to_whole_ones() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 576), torch.randn(200, 576)
    found, whole = Int8Linear(library(), weight)(x), x @ weight.T
    assert 0.001 < ((found - whole).norm() / whole.norm()).item() < 0.01
    views = torch.randn(5, 1152)[:, ::2]  # rows that are not contiguous
    assert torch.equal(
        Int8Linear(library(), weight)(views), Int8Linear(library(), weight)(views + 0)
    )


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_spoils_its_row_and_no_other(odd: float) -> None:
    torch.manual_seed(0)
    x, linear = torch.randn(3, 64), Int8Linear(library(), torch.randn(40, 64))
    clean = linear(x)
    x[1, 5] = odd
    found = linear(x)
    assert found[1].isnan().all() and torch.equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize(
    ("march", "lanes", "needs"),
    [("x86-64-v2", 16, "sse4_2"), ("haswell", 8, "avx2"), ("skylake-avx512", 16, "avx512bw")],
)
def test_code_for_other_machines_gives_the_same_numbers(
    march: str, lanes: int, needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = library()
    if needs not in cpu_features().split():
        pytest.skip(f"no {needs} here")
    other_flags = {"-march=native": f"-march={march}", f"-DLANES={LANES}": f"-DLANES={lanes}"}
    flags = [other_flags.get(each, each) for each in kernels._FLAGS]
    names = ("coa_pack_int8", "coa_multiply_int8")
    monkeypatch.setattr(kernels, "_FLAGS", ["-O1" if each == "-O3" else each for each in flags])
    monkeypatch.setattr(kernels, "SOURCES", ("vectors.c", "int8.c"))
    monkeypatch.setattr(kernels, "_ARGUMENTS", {name: kernels._ARGUMENTS[name] for name in names})
    monkeypatch.setenv("COA_CACHE", str(tmp_path))
    other = kernels.load_kernels.__wrapped__()
    assert not isinstance(other, str), other
    torch.manual_seed(3)
    for rows in (1, 7):
        x, weight = torch.randn(rows, 208), torch.randn(77, 208)
        found, same = (Int8Linear(each, weight)(x) for each in (other, ours))
        assert torch.allclose(found, same, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 48])
def test_packed_products_are_torchs_and_exact_ones_to_the_bit(rows: int) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(rows, 96), torch.randn(80, 96), torch.randn(80)
    usual = torch.nn.functional.linear(x, weight, bias)
    with torch.inference_mode():
        assert torch.allclose(make_linear(weight, bias)(x), usual, atol=1e-5, rtol=1e-5)
        assert torch.equal(make_linear(weight, bias, exact=True)(x), usual)


def test_only_a_few_rows_are_rounded() -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 64)
    both, whole = make_linear(weight, None, library()), make_linear(weight)
    few, many = torch.randn(FEW_ROWS, 64), torch.randn(FEW_ROWS + 1, 64)
    assert torch.equal(both(many), whole(many))
    assert torch.equal(both(few), Int8Linear(library(), weight)(few))
    assert not torch.equal(both(few), whole(few))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # qwen2 has biases
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rounded_forward_is_close_and_does_not_see_neighbours(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    library()
    folder, number = make_tiny_model(tmp_path / kind, kind=kind), getattr(torch, dtype)
    full = LlamaForward(folder, number, 4, 100, exact=False)
    made = LlamaForward(folder, number, 4, 100, exact=False, int8=True)
    assert made.int8 and not full.int8
    ids = [5, 9, 30, 44, 71, 8, 9, 10]
    with torch.inference_mode():
        whole = full.step([Chunk(0, 0, ids, 8)]).float()
        rounded = made.step([Chunk(0, 0, ids, 8)]).float()
        pieces = [made.step([Chunk(1, 0, ids[:3], 3)]), made.step([Chunk(1, 3, ids[3:], 5)])]
        one = [made.step([Chunk(2, at, [token])]) for at, token in enumerate(ids)]
    gap = ((rounded - whole).norm() / whole.norm()).item()
    assert 0 < gap < 0.03
    assert torch.equal(torch.cat(pieces).float(), rounded)
    assert torch.equal(torch.cat(one).float(), rounded)


def completed(engine: Any, **options: Any) -> list[int]:
    prompt = engine.encode_prompt("Be brief.", "Rome?")
    found: list[int] = asyncio.run(engine.generate(prompt, Sampling(max_tokens=20, **options))).ids
    return found


def test_an_engine_says_which_weights_it_sampled_with(folder: Path) -> None:
    library()
    engines = {
        name: load_engine(f"hf:{folder}", dtype="float32", slots=1, weights=name)
        for name in ("full", "int8", "auto")
    }
    default = load_engine(f"hf:{folder}", dtype="float32", slots=1)
    exact = load_engine(f"hf:{folder}", deterministic=True, slots=1, weights="auto")
    assert "int8" not in default.weights and "int8" not in exact.weights
    assert engines["full"].weights == default.weights
    assert engines["int8"].weights == engines["auto"].weights == default.weights + "+int8"
    assert completed(engines["int8"]) == completed(engines["auto"])
    asyncio.run(engines["int8"].load(None, "v2"))  # type: ignore[attr-defined]
    assert engines["int8"].weights == "v2+int8"
    for each in (*engines.values(), default, exact):
        asyncio.run(each.close())


def test_where_weights_cannot_be_rounded_one_line_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="Found weights 'int4', expected 'auto', 'full' or"):
        load_engine(f"hf:{folder}", weights="int4")
    with pytest.raises(ConfigError, match="deterministic needs full weights, found weights 'int8'"):
        load_engine(f"hf:{folder}", weights="int8", deterministic=True)
    other = make_tiny_model(tmp_path / "gpt2", kind="gpt2")
    with pytest.raises(ConfigError, match=r"weights 'int8': architecture 'gpt2' has no fast path"):
        load_engine(f"hf:{other}", weights="int8")
    reason = "no C compiler (install gcc)"
    monkeypatch.setattr("coa.engines.llama.load_kernels", lambda: reason)
    with pytest.raises(ConfigError, match="'int8' needs the compiled kernels: no C compiler"):
        load_engine(f"hf:{folder}", weights="int8")
    said: list[str] = []
    engine = load_engine(f"hf:{folder}", weights="auto", slots=1, note=said.append)
    assert "int8" not in engine.weights and reason in said[0]
    asyncio.run(engine.close())


def test_an_evaluation_is_of_full_weights_unless_it_says_otherwise(
    folder: Path, tmp_path: Path
) -> None:
    library()
    assert EvalSettings().weights == "full"
    with pytest.raises(ConfigError, match="weights: found 'auto', expected 'full' or 'int8'"):
        EvalSettings(weights="auto")
    tasks = tmp_path / "tasks.jsonl"
    TaskSet((Task("Where is Rome?", ("Italy",)),), "test").save(tasks)

    def evaluate(out: str, weights: str) -> str:
        asked = EvalSettings(
            model=f"hf:{folder}",
            tasks=str(tasks),
            grammar="mhqa",
            prompt="compact",
            turns=1,
            turn_tokens=8,
            context=500,
            weights=weights,
        )
        run_eval(asked, tmp_path / out, quiet=True)
        return (tmp_path / out / "trajectories.jsonl").read_text()

    assert "+int8" in evaluate("rounded", "int8") and "+int8" not in evaluate("full", "full")
    manifest = (tmp_path / "rounded" / "manifest.json").read_text()
    assert '"weights": "int8"' in manifest
    with pytest.raises(ConfigError, match="weights"):
        evaluate("full", "int8")


def test_the_ask_bench_has_speeds_of_both_weights_and_their_agreement(tmp_path: Path) -> None:
    long = make_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    said: list[str] = []
    settings = [f"model=hf:{long}", "questions=1", "chains=2", "threads=1"]
    if isinstance(reason := kernels.load_kernels(), str):
        with pytest.raises(ConfigError, match=re.escape(reason)):
            bench_ask(settings, said.append)
        return
    result = bench_ask(settings, said.append)
    assert result["speed"].keys() == result["ratio"].keys() == {"free", "constrained"}
    assert all(min(each.values()) > 0 for each in result["speed"].values())
    found = result["agreement"]
    assert found["chains"] == 2 and found["tokens"] > 10
    assert 0.5 < found["int8"] <= 1 and 0.5 < found["batched"] <= 1 and found["logprob_gap"] > 0
    assert "int8 and full" in "\n".join(ask_lines(result)) and len(said) == 5
    with pytest.raises(ConfigError, match="questions: found 0, expected at least 1"):
        bench_ask(["questions=0"])


def test_leading_along_a_chain_gives_the_choice_in_each_own_place(folder: Path) -> None:
    forward = LlamaForward(folder, torch.float32, 1, 200, exact=False)
    prompt, seen = list(range(5, 25)), list(range(40, 55))

    def greedy(ids: list[int], count: int) -> list[int]:
        for _ in range(count):
            with torch.inference_mode():
                logits = forward.step([Chunk(0, 0, ids)])
            ids = [*ids, int(logits[-1].argmax())]
        return ids

    ids = greedy([*greedy(prompt, 19), *seen], 3)
    own = [False] * 20 + [True] * 19 + [False] * 15 + [True] * 3
    chosen, logprobs = led_along(forward, ids, own)
    assert chosen == [token for token, mine in zip(ids, own, strict=True) if mine]
    assert len(logprobs) == 22 and all(value < 0 for value in logprobs)
