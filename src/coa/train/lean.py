"""The same function as the peft model, computed faster on a CPU.

Rows are concatenated, so nothing is padded and only attention knows where a row ends. Adapters are
merged into the frozen weights once per update, which makes the forward one product per module and
is also exactly what the engine serves; gradients of the low-rank factors are taken in a backward of
our own, where frozen weights get none. q/k/v and gate/up, which share their input, are fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coa.engines.shape import Shape, rotary
from coa.train.kernels import CausalAttention, TokenLogprobs


class Group:
    """Linear modules that share their input: frozen weights and LoRA factors, merged on demand."""

    def __init__(self, modules: list[Any], adapter: str, dtype: torch.dtype) -> None:
        base = [module.base_layer for module in modules]
        self._frozen = torch.cat([layer.weight.detach().float() for layer in base])
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
            parts = [up @ down for up, down in zip(self.ups, self.downs, strict=True)]
            self.weight = torch.add(self._frozen, torch.cat(parts), alpha=self.scale).to(
                self._dtype
            )

    def __call__(self, x: Tensor) -> Tensor:
        factors = [t for pair in zip(self.downs, self.ups, strict=True) for t in pair]
        out: Tensor = _GroupProduct.apply(x, self, *factors)  # type: ignore[no-untyped-call]
        return out


class _GroupProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, *factors: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.group, ctx.weight = group, group.weight
        return F.linear(x, group.weight, group.bias)

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


class LeanLlama:
    """Hidden states of a Llama-family peft model; gradients reach the same LoRA parameters."""

    def __init__(self, model: Any, config: dict[str, Any], adapter: str, length: int) -> None:
        inner = model.get_base_model().model
        self._shape = Shape.read(config)
        weight = inner.embed_tokens.weight
        self._embed, self._dtype = weight.detach(), weight.dtype
        self._norm = inner.norm.weight.detach()
        self._cos, self._sin = rotary(self._shape, length, self._dtype)
        self._layers = [_LeanLayer(layer, adapter, self._dtype) for layer in inner.layers]
        head = model.get_base_model().lm_head.weight
        self._head = head.detach()

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
        x = self._embed[ids]
        for layer in self._layers:
            x = layer(x, self._shape, lengths, cos, sin)
        return F.rms_norm(x, (self._shape.hidden,), self._norm, self._shape.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._head)

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        picked: Tensor = TokenLogprobs.apply(hidden, self._head, targets, temperature)  # type: ignore[no-untyped-call]
        return picked


class _LeanLayer:
    def __init__(self, layer: Any, adapter: str, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = Group([attention.q_proj, attention.k_proj, attention.v_proj], adapter, dtype)
        self.out = Group([attention.o_proj], adapter, dtype)
        self.gate_up = Group([mlp.gate_proj, mlp.up_proj], adapter, dtype)
        self.down = Group([mlp.down_proj], adapter, dtype)
        self.groups = [self.qkv, self.out, self.gate_up, self.down]
        self._norm_in = layer.input_layernorm.weight.detach()
        self._norm_mlp = layer.post_attention_layernorm.weight.detach()
        self._q_norm = _frozen_norm(attention, "q_norm")
        self._k_norm = _frozen_norm(attention, "k_norm")

    def __call__(
        self, x: Tensor, shape: Shape, lengths: list[int], cos: Tensor, sin: Tensor
    ) -> Tensor:
        normed = F.rms_norm(x, (shape.hidden,), self._norm_in, shape.eps)
        heads = self.qkv(normed).view(len(x), -1, shape.head_dim)
        if self._q_norm is not None and self._k_norm is not None:
            q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
            q = F.rms_norm(q, (shape.head_dim,), self._q_norm, shape.eps)
            k = F.rms_norm(k, (shape.head_dim,), self._k_norm, shape.eps)
            heads = torch.cat([q, k, v], dim=1)
        mixed: Tensor = CausalAttention.apply(heads, cos, sin, shape.kv_heads, lengths)  # type: ignore[no-untyped-call]
        x = x + self.out(mixed)
        normed = F.rms_norm(x, (shape.hidden,), self._norm_mlp, shape.eps)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _frozen_norm(attention: Any, name: str) -> Tensor | None:
    module = getattr(attention, name, None)
    return None if module is None else module.weight.detach()
