"""Hand-written backward passes for a CPU, each checked against autograd.

They are here because they are measurably faster than the general ones for rows of a few hundred
tokens: attention keeps its probabilities instead of computing them again, skips what is above the
diagonal block by block and never expands the shared key heads; log-probabilities never hold the
vocabulary in float32 for more than a few positions. Or they keep less for the backward pass than
autograd would, with the same bits: a norm its input and not a float32 copy, a gated unit its input
alone.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coa.engines.shape import rotate

BLOCK = 192
POSITIONS = 32


class CausalAttention(torch.autograd.Function):
    """Rotary, causal attention inside each row of a concatenation.

    heads [tokens, n + 2m, dim] holds n query, m key and m value heads -> [tokens, n * dim].
    """

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, key_heads: int, lengths: list[int]
    ) -> Tensor:
        count = heads.shape[1] - 2 * key_heads
        turned = rotate(heads[:, : count + key_heads], cos, sin)
        q, k = turned[:, :count] / math.sqrt(heads.shape[-1]), turned[:, count:]
        v, out = heads[:, count + key_heads :], torch.empty_like(q)
        ctx.lengths, ctx.turn, start = lengths, (cos, sin), 0
        held: list[Tensor] = []
        for length in lengths:
            rows = slice(start, start + length)
            row = (_by_group(q[rows], key_heads), _by_head(k[rows]), _by_head(v[rows]))
            held += [*row, *_attend(*row, _by_group(out[rows], key_heads))]
            start += length
        ctx.save_for_backward(*held)  # unlike an attribute it is let go of layer by layer
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        held = iter(ctx.saved_tensors)
        key_heads, group, _, dim = ctx.saved_tensors[0].shape
        count = key_heads * group
        upstream = grads[0].view(-1, count, dim)
        out, start = grads[0].new_empty(len(upstream), count + 2 * key_heads, dim), 0
        for length in ctx.lengths:
            q, k, v, *kept = islice(held, 3 + math.ceil(length / BLOCK))
            rows = slice(start, start + length)
            above, dq = (_by_group(t[rows], key_heads) for t in (upstream, out[:, :count]))
            dk, dv = _attend_backward(above, q, k, v, kept, dq)
            out[rows, count : count + key_heads] = dk.transpose(0, 1)
            out[rows, count + key_heads :] = dv.transpose(0, 1)
            start += length
        out[:, :count] /= math.sqrt(dim)
        cos, sin = ctx.turn
        out[:, : count + key_heads] = rotate(out[:, : count + key_heads], cos, -sin)
        return out, None, None, None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Tensor]:
    """Fill `out` [key heads, group, tokens, dim]; return the probabilities of each block."""
    key_heads, group, length, dim = q.shape
    mask = torch.full((BLOCK, BLOCK), -math.inf, dtype=q.dtype).triu_(1)
    kept = []
    for first in range(0, length, BLOCK):
        last = min(first + BLOCK, length)
        size = last - first
        scores = torch.bmm(q[:, :, first:last].flatten(1, 2), k[:, :last].transpose(1, 2))
        scores.view(key_heads, group, size, last)[..., first:] += mask[:size, :size]
        kept.append(torch.softmax(scores, dim=-1))
        mixed = torch.bmm(kept[-1], v[:, :last])
        out[:, :, first:last] = mixed.view(key_heads, group, size, dim)
    return kept


def _attend_backward(
    above: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: list[Tensor], dq: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill `dq`; return the gradients of keys and values [key heads, tokens, dim]."""
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for index, weights in enumerate(kept):
        first = index * BLOCK
        last = weights.shape[-1]
        upstream = above[:, :, first:last].flatten(1, 2)
        dv[:, :last] += torch.bmm(weights.transpose(1, 2), upstream)
        slope = torch.bmm(upstream, v[:, :last].transpose(1, 2))
        slope = torch._softmax_backward_data(slope, weights, -1, weights.dtype)
        dq[:, :, first:last] = torch.bmm(slope, k[:, :last]).view(*q.shape[:2], -1, q.shape[3])
        dk[:, :last] += torch.bmm(slope.transpose(1, 2), q[:, :, first:last].flatten(1, 2))
    return dk, dv


def _by_head(x: Tensor) -> Tensor:
    """[tokens, heads, dim] -> contiguous [heads, tokens, dim]."""
    return x.transpose(0, 1).contiguous()


def _by_group(x: Tensor, key_heads: int) -> Tensor:
    """A view [key heads, queries per key head, tokens, dim] of [tokens, heads, dim]."""
    return x.view(len(x), key_heads, -1, x.shape[-1]).permute(1, 2, 0, 3)


class TokenLogprobs(torch.autograd.Function):
    """float32 log-probability of targets [n] given hidden [n, width] and an output layer.

    A frozen layer gets no gradient, which would be as large as itself.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, heat: float) -> Tensor:
        logits = F.linear(hidden, head)
        totals = torch.empty(len(hidden), dtype=torch.float32)
        picked = torch.empty_like(totals)
        for at in range(0, len(hidden), POSITIONS):
            part = slice(at, at + POSITIONS)
            wide = logits[part].to(torch.float32, copy=True)
            if heat != 1.0:
                wide /= heat
            totals[part] = wide.logsumexp(dim=-1)
            picked[part] = wide.gather(1, targets[part, None])[:, 0]
        ctx.save_for_backward(logits, hidden, head, targets, totals)
        ctx.heat = heat
        return picked - totals

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, hidden, head, targets, totals = ctx.saved_tensors
        slope = grads[0] / ctx.heat
        # The largest tensor there is, at the moment when most is held: its gradient takes its
        # place. A second backward through the same graph is then refused by autograd.
        out = logits
        for at in range(0, len(logits), POSITIONS):
            part = slice(at, at + POSITIONS)
            wide = logits[part].to(torch.float32, copy=True)
            if ctx.heat != 1.0:
                wide /= ctx.heat
            wide.sub_(totals[part, None]).exp_().mul_(-slope[part, None])
            wide.scatter_add_(1, targets[part, None], slope[part, None])
            out[part] = wide
        d_head = out.t() @ hidden if ctx.needs_input_grad[1] else None
        return out @ head, d_head, None, None


class RmsNorm(torch.autograd.Function):
    """`F.rms_norm` over the last dimension of bfloat16 numbers, computed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        wide, grad = x.float(), grads[0].float()
        d_weight = None
        if ctx.needs_input_grad[1]:
            every = tuple(range(x.dim() - 1))
            d_weight = (grad * (wide * scale)).sum(every).to(weight.dtype)
        grad = grad * weight
        d_scale = (grad * wide).sum(-1, keepdim=True)
        d_square = -0.5 * d_scale * scale.pow(3) / x.shape[-1]
        d_x = (grad * scale).add_(d_square * (2.0 * wide))
        return d_x.to(x.dtype), d_weight, None


class GatedUnit(torch.autograd.Function):
    """silu(gate) * up of [tokens, gate and up side by side] -> [tokens, half of that]."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gate, up = ctx.saved_tensors[0].chunk(2, dim=-1)
        d_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return torch.cat([d_gate, grads[0] * F.silu(gate)], dim=-1)
