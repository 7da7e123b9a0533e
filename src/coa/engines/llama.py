"""A lean forward for the Llama family: merged and fused weights, one KV slot per rollout.

Why not the transformers model: it keeps one cache length for a whole batch, cannot keep a rollout's
KV across turns, and spends more time between matrix products than in them. Here q/k/v and gate/up
are one product each, weights are packed once in oneDNN's own layout (up to twice as fast at small
batches), rows of a prefill are ragged, and decoding reads the cache in place.

Slots [0, n) are the running ones: the scheduler keeps them contiguous by swapping, so that a decode
step takes views of the cache and never copies it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from coa.engines.lora import Adapter
from coa.engines.weights import weight_files
from coa.errors import ModelError

FIRST_CAPACITY = 512
EXACT_ROWS = 16
"""Rows of every decoding step in exact mode: a product's last bits depend on its shape."""
FAMILY = ("llama", "qwen2", "qwen3", "mistral")
Linear = Callable[[Tensor], Tensor]


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


class MergedTensors:
    """Tensors of a model folder by name, with an adapter merged in float32, cast once."""

    def __init__(self, folder: Path, adapter: Adapter | None, dtype: torch.dtype) -> None:
        self._files = {}
        for path in weight_files(folder):
            file = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))
        self._adapter, self._dtype = adapter, dtype
        self._unused = set(adapter.pairs) if adapter else set()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __call__(self, name: str) -> Tensor:
        if name not in self._files:
            raise ModelError(f"The model's weights have no tensor {name!r}.")
        tensor: Tensor = self._files[name].get_tensor(name).float()
        module = name.removesuffix(".weight")
        if self._adapter is not None and module in self._adapter.pairs:
            down, up = self._adapter.pairs[module]
            tensor = tensor + self._adapter.scale * (up.float() @ down.float())
            self._unused.discard(module)
        return tensor.to(self._dtype)

    def optional(self, name: str) -> Tensor | None:
        return self(name) if name in self else None

    def fused(self, names: list[str]) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of several linear modules that share their input."""
        weight = torch.cat([self(f"{name}.weight") for name in names])
        biases = [self.optional(f"{name}.bias") for name in names]
        present = [bias for bias in biases if bias is not None]
        return weight, torch.cat(present) if len(present) == len(names) else None

    def check_all_used(self) -> None:
        if self._unused:
            raise ModelError(
                f"The adapter trains {sorted(self._unused)[0]!r}, which the engine cannot merge."
            )


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A linear layer with the weight packed for oneDNN where that is possible (bf16 on CPU)."""
    if weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
            product = torch.ops.mkldnn._linear_pointwise
            product(weight.new_zeros(1, weight.shape[1]), packed, bias, "none", [], "")
        except (RuntimeError, AttributeError, NotImplementedError):
            pass  # another torch build: the plain product below gives the same numbers
        else:
            return lambda x: product(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)


@dataclass(slots=True)
class Layer:
    norm_in: Tensor
    qkv: Linear
    out: Linear
    norm_mlp: Tensor
    gate_up: Linear
    down: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to add to one slot, whose first `start` tokens are already there."""

    slot: int
    start: int
    ids: list[int]


class LlamaForward:
    """Weights and KV slots; computes logits of the last token of each row."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, slots: int, context: int, exact: bool
    ) -> None:
        assert slots <= EXACT_ROWS or not exact, slots
        self.shape = Shape.read(read_config(folder))
        self._folder, self._dtype, self._exact = folder, dtype, exact
        self.slots, self.context = slots, context
        self._capacity = min(context, FIRST_CAPACITY)
        size = (slots, self.shape.kv_heads, self._capacity, self.shape.head_dim)
        self._keys = [_lazy_zeros(size, dtype) for _ in range(self.shape.layers)]
        self._values = [_lazy_zeros(size, dtype) for _ in range(self.shape.layers)]
        self._cos, self._sin = rotary(self.shape, context, dtype)
        self.load(None)

    def load(self, adapter: Adapter | None) -> None:
        """Read the base again, merge the adapter, fuse and pack."""
        take = MergedTensors(self._folder, adapter, self._dtype)
        self._embed = take("model.embed_tokens.weight")
        self._layers = [self._read_layer(take, i) for i in range(self.shape.layers)]
        self._norm = take("model.norm.weight")
        head = take.optional("lm_head.weight")
        self._head = make_linear(self._embed if head is None else head)
        take.check_all_used()

    def _read_layer(self, take: MergedTensors, index: int) -> Layer:
        at = f"model.layers.{index}."
        attention = at + "self_attn."
        return Layer(
            norm_in=take(at + "input_layernorm.weight"),
            qkv=make_linear(*take.fused([attention + f"{x}_proj" for x in "qkv"])),
            out=make_linear(*take.fused([attention + "o_proj"])),
            norm_mlp=take(at + "post_attention_layernorm.weight"),
            gate_up=make_linear(*take.fused([at + "mlp.gate_proj", at + "mlp.up_proj"])),
            down=make_linear(*take.fused([at + "mlp.down_proj"])),
            q_norm=take.optional(attention + "q_norm.weight"),
            k_norm=take.optional(attention + "k_norm.weight"),
        )

    def _make_room(self, tokens: int) -> None:
        """Double the slots' capacity until `tokens` fit, so that short rollouts take little."""
        assert tokens <= self.context, (tokens, self.context)
        if tokens <= self._capacity:
            return
        while self._capacity < tokens:
            self._capacity = min(self.context, 2 * self._capacity)
        for caches in (self._keys, self._values):
            for index, old in enumerate(caches):
                size = (self.slots, self.shape.kv_heads, self._capacity, self.shape.head_dim)
                caches[index] = _lazy_zeros(size, self._dtype)
                caches[index][:, :, : old.shape[2]] = old

    def prefill(self, chunks: list[Chunk]) -> Tensor:
        """Store the chunks' tokens; float32 logits [chunks, vocab] after each chunk's last."""
        self._make_room(max(c.start + len(c.ids) for c in chunks))
        ids = torch.tensor([i for chunk in chunks for i in chunk.ids])
        spans = [range(c.start, c.start + len(c.ids)) for c in chunks]
        positions = torch.tensor([p for span in spans for p in span])
        masks = [_chunk_mask(c.start, len(c.ids)) for c in chunks]

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts, offset = [], 0
            for chunk, mask in zip(chunks, masks, strict=True):
                size, end = len(chunk.ids), chunk.start + len(chunk.ids)
                take = slice(offset, offset + size)
                offset += size
                keys, values = self._keys[index][chunk.slot], self._values[index][chunk.slot]
                keys[:, chunk.start : end] = k[take].transpose(0, 1)
                values[:, chunk.start : end] = v[take].transpose(0, 1)
                mixed = F.scaled_dot_product_attention(
                    q[take].transpose(0, 1)[None],
                    keys[None, :, :end],
                    values[None, :, :end],
                    attn_mask=mask,
                    is_causal=mask is None and size > 1,
                    enable_gqa=True,
                )
                parts.append(mixed[0].transpose(0, 1).reshape(size, -1))
            return torch.cat(parts)

        hidden = self._run(self._embed[ids], positions, attend)
        ends = torch.tensor([len(c.ids) for c in chunks]).cumsum(0) - 1
        return self._logits(hidden[ends])

    def decode(self, tokens: list[int], lengths: list[int]) -> Tensor:
        """Add tokens[i] to slot i, which holds lengths[i] tokens; float32 logits [n, vocab]."""
        self._make_room(max(lengths) + 1)
        count, wide = len(tokens), EXACT_ROWS if self._exact else len(tokens)
        ids = torch.tensor(tokens + [0] * (wide - count))
        positions = torch.tensor(lengths + [0] * (wide - count))
        rows, places = torch.arange(count), positions[:count]
        longest = max(lengths) + 1
        mask = (torch.arange(longest) <= places[:, None])[:, None, None, :]
        bias = torch.zeros(mask.shape, dtype=self._dtype).masked_fill_(~mask, -math.inf)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._keys[index], self._values[index]
            keys[rows, :, places] = k[:count]
            values[rows, :, places] = v[:count]
            grouped = q.view(wide, self.shape.kv_heads, -1, self.shape.head_dim)
            if self._exact:
                return self._attend_alone(grouped, keys, values, lengths)
            mixed = F.scaled_dot_product_attention(
                grouped, keys[:count, :, :longest], values[:count, :, :longest], attn_mask=bias
            )
            return mixed.reshape(count, -1)

        return self._logits(self._run(self._embed[ids], positions, attend))[:count]

    def _attend_alone(self, q: Tensor, keys: Tensor, values: Tensor, lengths: list[int]) -> Tensor:
        """Each row by itself at its own length, so that its batch mates cannot change a bit."""
        mixed = torch.zeros_like(q)
        for row, length in enumerate(lengths):
            mixed[row] = F.scaled_dot_product_attention(
                q[row : row + 1],
                keys[row : row + 1, :, : length + 1],
                values[row : row + 1, :, : length + 1],
            )[0]
        return mixed.reshape(len(q), -1)

    def _run(
        self, x: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        shape = self.shape
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        split = [shape.heads, shape.kv_heads, shape.kv_heads]
        for index, layer in enumerate(self._layers):
            normed = F.rms_norm(x, (shape.hidden,), layer.norm_in, shape.eps)
            heads = layer.qkv(normed).view(len(x), -1, shape.head_dim)
            q, k, v = heads.split(split, dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = F.rms_norm(q, (shape.head_dim,), layer.q_norm, shape.eps)
                k = F.rms_norm(k, (shape.head_dim,), layer.k_norm, shape.eps)
                turned = rotate(torch.cat([q, k], dim=1), cos, sin)
            else:
                turned = rotate(heads[:, : shape.heads + shape.kv_heads], cos, sin)
            q, k = turned.split(split[:2], dim=1)
            x = x + layer.out(attend(index, q, k, v))
            normed = F.rms_norm(x, (shape.hidden,), layer.norm_mlp, shape.eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return x

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = F.rms_norm(hidden, (self.shape.hidden,), self._norm, self.shape.eps)
        return self._head(normed).float()

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange two slots, of which at most `length` tokens matter."""
        if not length:
            return
        for cache in (*self._keys, *self._values):
            kept = cache[first, :, :length].clone()
            cache[first, :, :length] = cache[second, :, :length]
            cache[second, :, :length] = kept

    def copy(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` tokens of `source`."""
        for cache in (*self._keys, *self._values):
            cache[target, :, :length] = cache[source, :, :length]


def _lazy_zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where something is stored (numpy asks for zeroed pages).

    They must be zeros: a masked key has weight 0, and 0 times a stray NaN is NaN.
    """
    width = np.uint16 if dtype == torch.bfloat16 else np.float32
    return torch.from_numpy(np.zeros(size, width)).view(dtype)


def _chunk_mask(start: int, size: int) -> Tensor | None:
    """Which keys each new token sees; None means plain causal (or everything, for one token)."""
    if start == 0 or size == 1:
        return None
    return torch.arange(start + size) <= torch.arange(start, start + size)[:, None]


def rotary(shape: Shape, context: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(context, dtype=torch.float32), shape.theta**-half)
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
