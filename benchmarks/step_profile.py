"""Where a decoding step of the local engine spends its time, and how far the machine's peaks are.

    python benchmarks/step_profile.py [ROLLOUTS] [TOKENS_EACH] [MODEL]

One step of rollouts that hold so many tokens each, by part: the matrix products, attention, and
what lies between, with the compiled kernels and with torch's operations; and how fast the products
of all layers are at several numbers of rows. Least of five.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from coa.engines import kernels
from coa.engines.llama import Chunk, LlamaForward
from coa.engines.local import choose_dtype
from coa.models.references import model_folder, resolve

PIECE = 256
STEPS = 5
ROWS = (1, 16, 64, 128, 256)
DTYPE = choose_dtype("auto", deterministic=False)


class Clock:
    """Sums the time of wrapped calls by name, while it runs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **options)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            return result

        return measured


def profile(forward: LlamaForward, rollouts: int, tokens: int) -> dict[str, float]:
    """Milliseconds of the parts of one step."""
    for slot in range(rollouts):
        for start in range(0, tokens, PIECE):
            forward.step([Chunk(slot, start, [1] * min(PIECE, tokens - start), 0)])
    clock = Clock()
    for layer in forward._layers:
        for name in ("qkv", "out", "gate_up", "down"):
            setattr(layer, name, clock.timed("products of the layers", getattr(layer, name)))
    forward._head = clock.timed("product of the vocabulary", forward._head)
    ops: Any = forward._ops
    for name, part in (("attend", "attention"), ("add_norm", "norms"), ("gate", "gates")):
        setattr(ops, name, clock.timed(part, getattr(ops, name)))
    best: dict[str, float] = {}
    for _ in range(STEPS):
        clock.seconds = {}
        started = time.perf_counter()
        forward.step([Chunk(slot, tokens, [1]) for slot in range(rollouts)])
        found = clock.seconds | {"whole step": time.perf_counter() - started}
        best = {name: min(best.get(name, 9e9), took) for name, took in found.items()}
    return {name: round(1000 * took, 1) for name, took in best.items()}


def products(forward: LlamaForward) -> dict[str, float]:
    """GFLOP/s of the layers' products, by rows: few rows wait for the weights."""
    shape, found = forward.shape, {}
    for rows in ROWS:
        hidden = torch.randn(rows, shape.hidden).to(DTYPE)
        wide = torch.randn(rows, shape.heads * shape.head_dim).to(DTYPE)
        inner = forward._layers[0].gate_up(hidden)[:, ::2].contiguous()
        given = {"qkv": hidden, "out": wide, "gate_up": hidden, "down": inner}
        took, flops = [], 0
        for _ in range(STEPS):
            started, flops = time.perf_counter(), 0
            for layer in forward._layers:
                for name, x in given.items():
                    flops += 2 * x.shape[1] * getattr(layer, name)(x).numel()
            took.append(time.perf_counter() - started)
        found[str(rows)] = round(flops / min(took) / 1e9, 1)
    return found


def peaks() -> dict[str, float]:
    """What the machine does at best: products of the engine's type, and reading memory."""
    square = torch.randn(4096, 4096).to(DTYPE)
    long = torch.ones(1 << 26)
    found = {}
    for name, amount, call in (
        ("gflops", 2 * 4096**3, lambda: square @ square),
        ("read_gb_s", 4 * len(long), long.sum),
    ):
        took = []
        for _ in range(STEPS):
            started = time.perf_counter()
            call()
            took.append(time.perf_counter() - started)
        found[name] = round(amount / min(took) / 1e9, 1)
    return found


def main() -> None:
    rollouts, tokens = (int(given) for given in [*sys.argv[1:3], "64", "400"][:2])
    model = sys.argv[3] if len(sys.argv) > 3 else "smollm2-135m"
    folder = model_folder(resolve(model))
    record: dict[str, Any] = {"rollouts": rollouts, "tokens_each": tokens, "unit": "ms"}
    record["dtype"] = str(DTYPE)
    with torch.inference_mode():
        record["peaks"] = peaks()
        compiled = LlamaForward(folder, DTYPE, rollouts, tokens + 1, exact=False)
        record["products_gflops_by_rows"] = products(compiled)
        record["compiled"] = profile(compiled, rollouts, tokens)
        if compiled.slow:
            record["compiled"] = f"no kernels: {compiled.slow}"
        del compiled
        kernels.load_kernels = lambda: "switched off"  # type: ignore[assignment]
        sys.modules["coa.engines.llama"].load_kernels = kernels.load_kernels  # type: ignore
        plain = LlamaForward(folder, DTYPE, rollouts, tokens + 1, exact=False)
        record["torch"] = profile(plain, rollouts, tokens)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
