"""What a model's configuration says: its numbers, its rotary angles, and whether we can run it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coa.errors import ModelError

FAMILY = ("llama", "qwen2", "qwen3", "mistral")


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a Llama-family model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    eps: float
    theta: float

    @classmethod
    def read(cls, config: dict[str, Any]) -> Shape:
        rope = config.get("rope_parameters") or {}
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim")
            or config["hidden_size"] // config["num_attention_heads"],
            vocab=config["vocab_size"],
            context=config["max_position_embeddings"],
            eps=config["rms_norm_eps"],
            theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        )


def unsupported(config: dict[str, Any]) -> str | None:
    """Why this forward cannot run a model, or None when it can."""
    if config.get("model_type") not in FAMILY:
        return f"architecture {config.get('model_type')!r}"
    if config.get("quantization_config"):
        return "quantised weights"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        return f"rotary scaling {kind!r}"
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and window < config["max_position_embeddings"]:
        return "sliding-window attention"
    if config.get("hidden_act", "silu") != "silu":
        return f"activation {config['hidden_act']!r}"
    return None


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ModelError(f"{path}: cannot read the model's configuration ({exc}).") from exc
    return config


def rotary(shape: Shape, context: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, both halves alike: [context, head_dim]."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(context, dtype=torch.float32), shape.theta**-half)
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
