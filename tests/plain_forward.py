"""A plain transformers model in float32: what engines and servers are compared with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from coa.engines import Completion
from coa.models.weights import Adapter


def load_plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def forced(model: Any, prompt: list[int], ids: list[int]) -> Any:
    """Logprobs of the whole vocabulary before each of the ids: [ids, vocabulary]."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0].float()
    return torch.log_softmax(logits[len(prompt) - 1 : -1], -1)


def chosen(logs: Any, ids: list[int]) -> list[float]:
    found: list[float] = logs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
    return found


def largest_difference(
    model: Any, prompts: Sequence[list[int]], done: Sequence[Completion]
) -> float:
    pairs = [
        (mine, theirs)
        for prompt, each in zip(prompts, done, strict=True)
        for mine, theirs in zip(
            chosen(forced(model, prompt, each.ids), each.ids), each.logprobs, strict=True
        )
    ]
    return max(abs(mine - theirs) for mine, theirs in pairs)


def random_adapter(folder: Path, seed: int, rank: int = 8) -> Adapter:
    """Small random factors for every layer, large enough to change what is said."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    narrow = config["head_dim"] * config["num_key_value_heads"]
    shapes = {
        **{f"self_attn.{name}_proj": (hidden, hidden) for name in ("q", "o")},
        **{f"self_attn.{name}_proj": (hidden, narrow) for name in ("k", "v")},
        **{f"mlp.{name}_proj": (hidden, inner) for name in ("gate", "up")},
        "mlp.down_proj": (inner, hidden),
    }
    draw = torch.Generator().manual_seed(seed)
    pairs = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (width, height) in shapes.items():
            down = torch.randn(rank, width, generator=draw) / math.sqrt(width)
            up = torch.randn(height, rank, generator=draw) * 0.02
            pairs[f"model.layers.{layer}.{module}"] = (down, up)
    return Adapter(2.0, pairs)


@contextmanager
def merged(model: Any, adapter: Adapter) -> Iterator[Any]:
    kept = {}
    for module, (down, up) in adapter.pairs.items():
        weight = model.get_submodule(module).weight.data
        kept[module] = weight.clone()
        weight += adapter.scale * (up @ down)
    try:
        yield model
    finally:
        for module, weight in kept.items():
            model.get_submodule(module).weight.data.copy_(weight)
