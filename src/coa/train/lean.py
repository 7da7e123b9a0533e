"""The same function as the transformers model, computed faster on a CPU.

Rows are concatenated, so nothing is padded and only attention knows where a row ends. q/k/v and
gate/up, which share their input, are fused: one product per group, with a backward of our own.

LoRA factors are merged into the frozen weights once per update, which makes the forward one product
per module and is also exactly what the engine serves; frozen weights get no gradient. Where all
weights are trained, the masters are float32 and each group keeps a copy in the type it computes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from coa.engines.shape import Shape, rotary
from coa.train.kernels import CausalAttention, GatedUnit, RmsNorm, TokenLogprobs


class Group(Protocol):
    """Linear modules that share their input, as one product."""

    def merge(self) -> None:
        """Take over the parameters' present values."""

    def __call__(self, x: Tensor) -> Tensor: ...


class _Product(torch.autograd.Function):
    """The product with a group's merged weight; kinds of groups differ in what gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, *trained: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.group, ctx.weight = group, group.weight
        return F.linear(x, group.weight, group.bias)


class LowRankGroup:
    """Frozen weights and LoRA factors, merged on demand."""

    def __init__(self, modules: list[Any], adapter: str, dtype: torch.dtype) -> None:
        base = [module.base_layer for module in modules]
        self._frozen = [layer.weight.detach() for layer in base]  # the model's own, no copy
        biases = [layer.bias.detach() for layer in base if layer.bias is not None]
        self.bias = torch.cat(biases).to(dtype) if len(biases) == len(base) else None
        self.downs = [module.lora_A[adapter].weight for module in modules]
        self.ups = [module.lora_B[adapter].weight for module in modules]
        self.scale = float(modules[0].scaling[adapter])
        self.sizes = [up.shape[0] for up in self.ups]
        self._dtype = dtype
        self.merge()

    def merge(self) -> None:
        with torch.no_grad():
            factors = zip(self._frozen, self.ups, self.downs, strict=True)
            merged = [torch.add(w.float(), up @ down, alpha=self.scale) for w, up, down in factors]
            self.weight = torch.cat([weight.to(self._dtype) for weight in merged])

    def __call__(self, x: Tensor) -> Tensor:
        factors = [t for pair in zip(self.downs, self.ups, strict=True) for t in pair]
        out: Tensor = _LowRankProduct.apply(x, self, *factors)  # type: ignore[no-untyped-call]
        return out


class _LowRankProduct(_Product):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), grad, group = ctx.saved_tensors, grads[0], ctx.group
        dx = grad @ ctx.weight
        downs = torch.cat([down.detach() for down in group.downs]).to(x.dtype)
        low = x @ downs.t()
        ranks = [down.shape[0] for down in group.downs]
        lows, parts = low.split(ranks, dim=1), grad.split(group.sizes, dim=1)
        ups = [up.detach().to(x.dtype) for up in group.ups]
        back = torch.cat([part @ up for part, up in zip(parts, ups, strict=True)], dim=1)
        d_downs = (back.t() @ x).float().mul_(group.scale).split(ranks)
        d_ups = [
            (p.t() @ one).float().mul_(group.scale) for p, one in zip(parts, lows, strict=True)
        ]
        factors = [t for pair in zip(d_downs, d_ups, strict=True) for t in pair]
        return (dx, None, *factors)


class WholeGroup:
    """float32 masters, and one copy of them side by side in the type of the computation."""

    def __init__(self, modules: list[Any], dtype: torch.dtype) -> None:
        self.weights = [module.weight for module in modules]
        biases = [module.bias for module in modules if module.bias is not None]
        self.biases = biases if len(biases) == len(modules) else []
        self.sizes = [weight.shape[0] for weight in self.weights]
        self._dtype = dtype
        self.merge()

    def merge(self) -> None:
        self.weight = _side_by_side(self.weights, self._dtype)
        self.bias = _side_by_side(self.biases, self._dtype) if self.biases else None

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = _WholeProduct.apply(x, self, *self.weights, *self.biases)  # type: ignore[no-untyped-call]
        return out


def _side_by_side(masters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    held = [master.detach().to(dtype) for master in masters]
    return held[0] if len(held) == 1 else torch.cat(held)  # one float32 master needs no copy


class _WholeProduct(_Product):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), grad, group = ctx.saved_tensors, grads[0], ctx.group
        d_weights = (grad.t() @ x).float().split(group.sizes)
        d_biases = grad.sum(0, dtype=torch.float32).split(group.sizes) if group.biases else ()
        return (grad @ ctx.weight, None, *d_weights, *d_biases)


class LeanLlama:
    """Hidden states of a Llama-family model; gradients reach the parameters of that model."""

    def __init__(
        self,
        causal: Any,
        config: dict[str, Any],
        adapter: str | None,
        dtype: torch.dtype,
        length: int,
    ) -> None:
        """`adapter`: name of the LoRA factors to train; None trains all weights."""
        inner = causal.model
        self._shape, self._dtype = Shape.read(config), dtype
        self._embed, self._norm = inner.embed_tokens.weight, inner.norm.weight
        self._cos, self._sin = rotary(self._shape, length, dtype)
        self._layers = [_LeanLayer(layer, adapter, dtype) for layer in inner.layers]
        self._head: Tensor = causal.lm_head.weight

    def merge(self) -> None:
        """Take over the parameters' present values; call it after every optimiser step."""
        for layer in self._layers:
            for group in layer.groups:
                group.merge()

    def hidden(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Final hidden states of all rows, concatenated: [sum of lengths, hidden]."""
        lengths = [len(row) for row in rows]
        ids = torch.tensor([i for row in rows for i in row])
        positions = torch.cat([torch.arange(length) for length in lengths])
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        x = F.embedding(ids, self._embed).to(self._dtype)
        for layer in self._layers:
            x = layer(x, self._shape, lengths, cos, sin)
        return _normed(x, self._norm, self._shape)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._head.to(self._dtype))

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        head = self._head.to(self._dtype)
        picked: Tensor = TokenLogprobs.apply(hidden, head, targets, temperature)  # type: ignore[no-untyped-call]
        return picked


class _LeanLayer:
    def __init__(self, layer: Any, adapter: str | None, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp

        def group(*modules: Any) -> Group:
            if adapter is None:
                return WholeGroup([*modules], dtype)
            return LowRankGroup([*modules], adapter, dtype)

        self.qkv = group(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = group(attention.o_proj)
        self.gate_up = group(mlp.gate_proj, mlp.up_proj)
        self.down = group(mlp.down_proj)
        self.groups = [self.qkv, self.out, self.gate_up, self.down]
        self._norm_in = layer.input_layernorm.weight
        self._norm_mlp = layer.post_attention_layernorm.weight
        self._q_norm, self._k_norm = _norm_of(attention, "q_norm"), _norm_of(attention, "k_norm")

    def __call__(
        self, x: Tensor, shape: Shape, lengths: list[int], cos: Tensor, sin: Tensor
    ) -> Tensor:
        heads = self.qkv(_normed(x, self._norm_in, shape)).view(len(x), -1, shape.head_dim)
        if self._q_norm is not None and self._k_norm is not None:
            q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
            q, k = _normed(q, self._q_norm, shape), _normed(k, self._k_norm, shape)
            heads = torch.cat([q, k, v], dim=1)
        mixed: Tensor = CausalAttention.apply(heads, cos, sin, shape.kv_heads, lengths)  # type: ignore[no-untyped-call]
        x = x + self.out(mixed)
        gated: Tensor = GatedUnit.apply(self.gate_up(_normed(x, self._norm_mlp, shape)))  # type: ignore[no-untyped-call]
        return x + self.down(gated)


def _normed(x: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    if x.dtype == torch.float32:  # then torch keeps no copy of x
        return F.rms_norm(x, (x.shape[-1],), weight, shape.eps)
    normed: Tensor = RmsNorm.apply(x, weight.to(x.dtype), shape.eps)  # type: ignore[no-untyped-call]
    return normed


def _norm_of(attention: Any, name: str) -> Tensor | None:
    module = getattr(attention, name, None)
    return None if module is None else module.weight
