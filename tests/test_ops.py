"""What lies between the matrix products: the compiled kernels against torch in float32."""

from __future__ import annotations

import ctypes
import functools
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from coa.engines import kernels, threads  # noqa: E402
from coa.engines.base import Sampling  # noqa: E402
from coa.engines.kernels import LANES, CompiledOps, KernelRun, TorchOps  # noqa: E402
from coa.engines.sampling import draw  # noqa: E402
from coa.models.weights import Shape, unsupported  # noqa: E402

CONTEXT, SLOTS = 700, 5


def shape(heads: int, kv_heads: int, head_dim: int) -> Shape:
    return Shape(2, 64, heads, kv_heads, head_dim, 100, CONTEXT, 1e-5, 10000.0)


@functools.cache
def library(lanes: int = LANES) -> ctypes.CDLL:
    """The kernels with vectors of so many numbers, also those that other machines would have."""
    flags = [f"-DLANES={lanes}" if each.startswith("-DLANES") else each for each in kernels._FLAGS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_FLAGS", flags)
        found = kernels.load_kernels.__wrapped__()
    if isinstance(found, str):
        pytest.skip(f"no kernels: {found}")
    return found


def ragged_steps(seed: int, steps: int) -> list[list[KernelRun]]:
    """Slots grow by single tokens and by pieces, in any order; some start again."""
    choose, lengths, made = random.Random(seed), [0] * SLOTS, []
    for _ in range(steps):
        runs, first = [], 0
        for slot in choose.sample(range(SLOTS), choose.randint(1, SLOTS)):
            if choose.random() < 0.1:
                lengths[slot] = choose.randint(0, lengths[slot])
            size = choose.choice([1, 1, 1, 2, 5, 8, 17, 70])
            if lengths[slot] + size > CONTEXT:
                lengths[slot] = 0
            runs.append(KernelRun(slot, lengths[slot], size, first))
            lengths[slot] += size
            first += size
        made.append(runs)
    return made


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 2, 16), (14, 2, 128), (8, 8, 80), (4, 1, 32)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("lanes", [8, 16])
def test_compiled_attention_is_torchs(
    heads: Any, dtype: str, normed: bool, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "LANES", lanes)
    made, kind = shape(*heads), getattr(torch, dtype)
    ours = CompiledOps(library(lanes), made, SLOTS, CONTEXT, kind)
    plain = TorchOps(made, SLOTS, CONTEXT, torch.float32)
    torch.manual_seed(0)
    norms = (torch.rand(made.head_dim).to(kind), torch.rand(made.head_dim).to(kind))
    wide = (made.heads + 2 * made.kv_heads) * made.head_dim
    for count, runs in enumerate(ragged_steps(7, 40)):
        for each in (ours, plain):
            each.begin(runs)
        rows = sum(run.size for run in runs)
        for layer in range(made.layers):
            qkv = torch.randn(rows, wide).to(kind)
            found = ours.attend(layer, qkv, norms if normed else None)
            exact = plain.attend(
                layer, qkv.float(), (norms[0].float(), norms[1].float()) if normed else None
            )
            close = 2e-6 if dtype == "float32" else 2e-2
            assert torch.allclose(found.float(), exact, atol=close, rtol=close), count
        if count % 7 == 3:  # a slot takes over the beginning of another
            for each in (ours, plain):
                each.copy(runs[0].slot, (runs[0].slot + 1) % SLOTS, runs[0].start + runs[0].size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_rows_do_not_see_their_neighbours(dtype: str) -> None:
    """A run gives the same bits alone and in company, at once and in pieces."""
    made, kind = shape(9, 3, 64), getattr(torch, dtype)
    torch.manual_seed(1)
    qkv = torch.randn(60, 15 * 64).to(kind)

    def outcome(runs: list[KernelRun], rows: list[int]) -> Any:
        ops = CompiledOps(library(), made, SLOTS, CONTEXT, kind)
        ops.begin(runs)
        return ops.attend(0, qkv[rows], None)

    alone = outcome([KernelRun(2, 0, 23, 0)], list(range(23)))
    company = outcome(
        [KernelRun(0, 0, 37, 0), KernelRun(2, 0, 23, 37)], [*range(23, 60), *range(23)]
    )
    assert torch.equal(alone, company[37:])
    ops = CompiledOps(library(), made, SLOTS, CONTEXT, kind)
    pieces = []
    for start, size in ((0, 3), (3, 1), (4, 11), (15, 8)):
        ops.begin([KernelRun(1, start, size, 0)])
        pieces.append(ops.attend(0, qkv[start : start + size].clone(), None))
    assert torch.equal(alone, torch.cat(pieces))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_compiled_norm_and_gate_are_torchs(dtype: str, rows: int) -> None:
    made, kind = shape(4, 2, 16), getattr(torch, dtype)
    ours = CompiledOps(library(), made, SLOTS, CONTEXT, kind)
    plain = TorchOps(made, SLOTS, CONTEXT, torch.float32)
    torch.manual_seed(2)
    x, delta, weight = (torch.randn(*n).to(kind) for n in ((rows, 64), (rows, 64), (64,)))
    same, close = x.float().clone(), 1e-6 if dtype == "float32" else 1e-2
    for step in (None, delta):
        found = ours.add_norm(x, step, weight)
        exact = plain.add_norm(same, None if step is None else step.float(), weight.float())
        assert torch.allclose(found.float(), exact, atol=close, rtol=close)
        assert torch.allclose(x.float(), same, atol=close, rtol=close)
    wide = torch.cat([torch.linspace(-90, 90, 64).repeat(rows, 1), torch.randn(rows, 64)], 1)
    found, exact = ours.gate(wide.to(kind)), plain.gate(wide.to(kind).float())
    assert torch.allclose(found.float(), exact, atol=close, rtol=close)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocab", [49152, 1003, 7])
def test_compiled_draws_are_torchs(dtype: str, vocab: int) -> None:
    library()
    torch.manual_seed(0)
    logits = (3 * torch.randn(60, vocab)).to(getattr(torch, dtype))
    samplings = [Sampling(temperature=(0.0, 0.7, 1.0, 2.0)[i % 4], key=i) for i in range(60)]
    compiled = draw(logits, samplings, range(60))
    plain = draw(logits, samplings, range(60), torch.ones(60, vocab))
    assert compiled[0] == plain[0]
    assert torch.allclose(torch.tensor(compiled[1]), torch.tensor(plain[1]), atol=1e-5)


def test_a_compiled_draw_takes_no_token_without_mass() -> None:
    library()
    logits = torch.full((1, 1000), -1e30)
    logits[0, 300], logits[0, 700] = 0.0, -1.0
    drawn = {draw(logits, [Sampling(temperature=1.0, key=k)], [0])[0][0] for k in range(200)}
    assert drawn == {300, 700}


def test_without_a_compiler_there_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COA_CACHE", str(tmp_path))
    load = kernels.load_kernels.__wrapped__
    monkeypatch.setenv("CC", "no-such-compiler")
    assert load() == "no C compiler (install gcc)"
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'unknown option -fopenmp' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert load() == f"{broken} could not build them: unknown option -fopenmp"
    assert not list((tmp_path / "kernels").iterdir())
    monkeypatch.setenv("COA_KERNELS", "off")
    assert load() == "switched off (COA_KERNELS=off)"


def test_kernels_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    monkeypatch.setenv("COA_CACHE", str(tmp_path))
    load = kernels.load_kernels.__wrapped__
    assert isinstance(load(), ctypes.CDLL)
    (built,) = (tmp_path / "kernels").iterdir()
    written = built.stat().st_mtime_ns
    monkeypatch.setattr(kernels, "_compile", None)
    assert isinstance(load(), ctypes.CDLL)
    assert built.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"model_type": "mamba"}, "architecture 'mamba'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rotary scaling 'yarn'"),
        ({"sliding_window": 512}, "sliding-window attention"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ],
)
def test_what_the_fast_path_cannot_run_is_named(
    changed: dict[str, Any], reason: str | None
) -> None:
    config = {"model_type": "llama", "max_position_embeddings": 2048}
    assert unsupported(config | changed) == reason


def test_threads_leave_to_others_the_cores_that_they_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 8)
    ours = threads.Threads(8)
    found = []
    for others in (0.1, 0.39, 0.5, 0.3, 0.2, 3.1, 3.5, 3.7, 8.0, 0.0):
        ours.judge(others)
        found.append(ours.now)
    # Between the two bounds nothing changes, either way; half of them are always ours.
    assert found == [8, 8, 7, 7, 8, 5, 4, 4, 4, 8]


def test_a_job_of_two_threads_beside_a_busy_process_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 2)
    ours = threads.Threads(2)
    for others, expected in ((0.66, 1), (1.0, 1), (1.9, 1), (0.1, 2)):
        ours.judge(others)
        assert ours.now == expected


def test_now_and_then_all_threads_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 2)
    ours, found = threads.Threads(2), list[int]()
    for at in range(2 * ours.PATIENCE):
        # At low priority: it fills the core that it was left, and gives it back when we want it.
        ours.judge(1.0 if at == 0 or ours.now == 1 else 0.1)
        found.append(ours.now)
    assert found == [1] * (ours.PATIENCE - 1) + [2] * (ours.PATIENCE + 1)


def test_threads_are_tried_ever_more_rarely_beside_a_process_that_never_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 2)
    ours, tried = threads.Threads(2), list[int]()

    def judged(others: float, times: int) -> None:
        for at in range(times):
            ours.judge(others)
            if ours.now == 2:
                tried.append(at)

    judged(1.0, 500)
    assert tried == [19, 59, 139, 299, 459]
    tried.clear()
    judged(0.0, 1)  # it is gone, and the next one is tried as often as the first was
    judged(1.0, 30)
    assert tried == [0, 19]


def test_the_work_of_others_is_what_this_process_did_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    # user, nice, system, idle, waiting, interrupts of two kinds, stolen: hundredths of a second
    stat.write_text(
        "cpu  900 0 0 0 0 0 0 0 0 0\ncpu0 200 500 30 9 9 4 6 9 0 0\n"
        "cpu1 100 0 10 9 9 0 0 9 0 0\ncpu2 700 0 0 0 0 0 0 0 0 0\nintr 5\n"
    )
    monkeypatch.setattr(threads, "_STAT", stat)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(threads.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(threads.os, "times", lambda: SimpleNamespace(user=1.5, system=0.25))
    assert threads.used_by_others() == pytest.approx(8.5 - 1.75)


def test_the_work_of_another_process_is_seen() -> None:
    before = threads.used_by_others()
    work = "import time\nwhile time.process_time() < 0.6: pass"
    subprocess.run([sys.executable, "-c", work], check=True)
    assert threads.used_by_others() - before > 0.4


def test_the_number_holds_in_the_thread_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def compute() -> None:
        for busy in (0.0, 1.0, 0.0):
            monkeypatch.setattr(threads, "used_by_others", lambda busy=busy: busy)
            for each in (ours, fixed):
                each._since, each._used = time.monotonic() - 1, 0.0
                each.adapt()
                found.append(torch.get_num_threads())

    monkeypatch.setattr(threads, "cores", lambda: 2)
    ours, fixed = threads.Threads(2), threads.Threads(2, fixed=True)
    worker = threading.Thread(target=compute)  # OpenMP's number is of each thread
    worker.start()
    worker.join()
    assert found == [2, 2, 1, 2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_product(dtype: torch.dtype) -> None:
    x, weight, before = torch.randn(64, 512).to(dtype), torch.randn(2048, 512).to(dtype), None
    usual = torch.get_num_threads()
    try:
        for count in (2, 1):
            torch.set_num_threads(count)
            product = x @ weight.T
            before = product if before is None else before
            assert torch.equal(product, before)
    finally:
        torch.set_num_threads(usual)
