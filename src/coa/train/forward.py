"""What a policy computes: hidden states and log-probabilities of rows.

`PlainModel` does it through transformers, for any architecture and device; `FastLlama` faster, for
the Llama family on a CPU.

`PlainModel` is a module, so that FSDP can take it in hand. Rows are packed into one
sequence where that is the same as computing them one by one. Whether it is, is not looked up by
architecture but tried on the model itself when it is loaded: from positions that start again
transformers sees where a row ends, but not every model asks it.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coa.engines.local import choose_dtype, vocabulary_of
from coa.errors import MissingExtra, ModelError
from coa.models.weights import Shape, read_adapter, rotary, rotate
from coa.train.prefixes import PrefixSpan, PrefixTree

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTER = "default"
CHANGED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Settings of architectures that do something to logits after the output layer."""
Note = Callable[[str], None]


def computing_dtype(dtype: str, deterministic: bool) -> torch.dtype:
    """`auto` is bfloat16 on a GPU, and on a CPU what the engine would choose."""
    if dtype == "auto" and not deterministic and torch.cuda.is_available():
        return torch.bfloat16
    return choose_dtype(dtype, deterministic)


def load_causal(folder: Path, dtype: torch.dtype) -> Any:
    """The transformers model of a folder, in evaluation mode: dropout would falsify logprobs."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the folder is local; never wait for a hub
    # With FSDP accelerate has the weights left empty in all processes but the first.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging
    except ImportError as exc:
        raise MissingExtra("Training", "train") from exc
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def load_low_rank(folder: Path, rank: int, alpha: float, dtype: torch.dtype, seed: int) -> Any:
    """A frozen model with new LoRA factors in float32."""
    base = load_causal(folder, dtype)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as exc:
        raise MissingExtra("Training", "train") from exc
    present = {name.rpartition(".")[2] for name, _ in base.named_modules()}
    if missing := [name for name in TARGETS if name not in present]:
        raise ModelError(
            f"{folder}: the model has no modules named {missing[0]!r}, where LoRA factors would "
            "go. Train all its weights instead: full = true."
        )
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # annotated int, any number works
        lora_dropout=0.0,
        target_modules=TARGETS,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # peft asks by a name that transformers 5.23 has deprecated
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return get_peft_model(base, config, adapter_name=ADAPTER).eval()


def load_whole(folder: Path, adapter: Path | None, base_sha256: str) -> Any:
    """A model with all weights trainable, in float32; an adapter is merged first."""
    model = load_causal(folder, torch.float32)
    if adapter is not None:
        found = read_adapter(adapter, base_sha256)
        with torch.no_grad():
            for name, (down, up) in found.pairs.items():
                model.get_submodule(name).weight += found.scale * (up.float() @ down.float())
    return model.requires_grad_(True)


def causal_of(model: Any) -> Any:
    """The transformers model itself, out of peft where it is in it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class PlainModel(torch.nn.Module):
    """Hidden states and log-probabilities of rows, by a transformers model."""

    def __init__(self, model: Any, *, cast: torch.dtype | None, checkpointing: bool) -> None:
        """`cast`: compute in this type while the weights keep theirs."""
        super().__init__()
        self.model = model
        causal = causal_of(model)
        self.config = causal.config
        self.cast = cast
        self.packs = True
        if checkpointing:
            _enable_checkpointing(causal)
        self.train(False)

    def train(self, mode: bool = True) -> PlainModel:
        """Stay in evaluation mode whoever asks; only what decides on checkpointing is switched."""
        super().train(False)
        for module in self.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True  # not what is in it: its dropout stays off
        return self

    def blocks(self) -> list[torch.nn.Module]:
        """The layers, as transformers names what must not be divided over devices."""
        named = set(getattr(causal_of(self.model), "_no_split_modules", None) or ())
        return [module for module in self.modules() if type(module).__name__ in named]

    def forward(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Final hidden states [tokens, hidden] of `ids`, one row of `lengths` after another."""
        if not self.packs:
            return torch.cat([self._one_sequence(row, [len(row)]) for row in ids.split([*lengths])])
        return self._one_sequence(ids, lengths)

    def _one_sequence(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
        # A cache would hide from transformers that rows are packed, and mix them up.
        arguments = {"position_ids": positions[None], "use_cache": False}
        with self._casting(ids.device):
            states: Tensor = causal_of(self.model).base_model(ids[None], **arguments)[0]
        return states[0].clone()  # FSDP hangs its backward on what is returned: not on a view

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states [n, hidden]."""
        with self._casting(hidden.device):
            logits: Tensor = causal_of(self.model).get_output_embeddings()(hidden)
        return logits

    def _casting(self, device: torch.device) -> Any:
        return torch.autocast(device.type, dtype=self.cast, enabled=self.cast is not None)

    @torch.no_grad()
    def probe(self, name: str, note: Note) -> None:
        """Try whether rows can be packed, and whether logits are what we take them for."""
        causal = causal_of(self.model)
        device, size = causal.get_output_embeddings().weight.device, vocabulary_of(causal)
        first, other, row = (
            (torch.arange(8, device=device) * step + start) % size
            for step, start in ((1, 1), (5, 3), (3, 2))
        )
        alone = self._one_sequence(row, [8])
        after, after_other = (
            self._one_sequence(torch.cat([before, row]), [8, 8])[8:] for before in (first, other)
        )
        scale = float(alone.abs().max())
        # What stood before must not be felt at all; against the row alone, shapes differ, so
        # rounding does.
        mixed = float((after - after_other).abs().max()) > 1e-3 * scale
        moved = float((after - alone).abs().max()) > 5e-2 * scale
        if mixed or moved:
            self.packs = False
            note(f"{name}: rows cannot be packed for this architecture; computing them one by one")
        with self._casting(device):
            theirs = causal(row[None], use_cache=False).logits[0]
        known = any(getattr(self.config, key, None) not in (None, 1.0) for key in CHANGED_LOGITS)
        if known or float((self.head(alone) - theirs).abs().max()) > 5e-3 * theirs.abs().max():
            raise ModelError(
                f"{name}: its logits are not one product with the output layer (a cap or a scale "
                "comes after it), which training does not support."
            )


def _enable_checkpointing(causal: Any) -> None:
    if not getattr(causal, "supports_gradient_checkpointing", False):
        raise ModelError(
            f"checkpointing: {type(causal).__name__} does not support it; expected false."
        )
    older = "gradient_checkpointing_enable"  # before transformers 5.23
    enable = getattr(causal, "activation_checkpointing_enable", None) or getattr(causal, older)
    enable({"use_reentrant": False})
    # With frozen embeddings nothing that enters the first layer needs a gradient; that is fine
    # without reentrance.


# ------------------------------------------------------------------------------------------------
# Hand-written backward passes for a CPU, each checked against autograd.
#
# They are here because they are measurably faster than the general ones for rows of a few hundred
# tokens: attention keeps its probabilities instead of computing them again, skips what is above
# the diagonal block by block and never expands the shared key heads; log-probabilities never hold
# the vocabulary in float32 for more than a few positions. Or they keep less for the backward pass
# than autograd would, with the same bits: a norm its input and not a float32 copy, a gated unit
# its input alone.
# ------------------------------------------------------------------------------------------------


BLOCK = 192
POSITIONS = 32


class CausalAttention(torch.autograd.Function):
    """Rotary, causal attention of each span to what its rows hold before it, and to itself.

    heads [tokens, n + 2m, dim] holds n query, m key and m value heads -> [tokens, n * dim].
    """

    @staticmethod
    def forward(
        ctx: Any,
        heads: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_heads: int,
        spans: Sequence[PrefixSpan],
    ) -> Tensor:
        count = heads.shape[1] - 2 * key_heads
        turned = rotate(heads[:, : count + key_heads], cos, sin)
        q, k = turned[:, :count] / math.sqrt(heads.shape[-1]), turned[:, count:]
        v, out = heads[:, count + key_heads :], torch.empty_like(q)
        ctx.spans, ctx.turn = spans, (cos, sin)
        held: list[Tensor] = []
        for span in spans:
            row = (_by_group(q[span.own], key_heads), _by_head(k, span), _by_head(v, span))
            held += [*row, *_attend(*row, _by_group(out[span.own], key_heads))]
        ctx.save_for_backward(*held)  # unlike an attribute it is let go of layer by layer
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        held = iter(ctx.saved_tensors)
        key_heads, group, _, dim = ctx.saved_tensors[0].shape
        count = key_heads * group
        upstream = grads[0].view(-1, count, dim)
        out = grads[0].new_zeros(len(upstream), count + 2 * key_heads, dim)
        for span in ctx.spans:
            q, k, v, *kept = islice(held, 3 + math.ceil(span.length / BLOCK))
            above, dq = (_by_group(t[span.own], key_heads) for t in (upstream, out[:, :count]))
            dk, dv = _attend_backward(above, q, k, v, kept, dq)
            at = 0
            for seen in span.seen:  # what several rows share gets the gradients of all of them
                part = slice(at, at := at + seen.stop - seen.start)
                out[seen, count : count + key_heads] += dk[:, part].transpose(0, 1)
                out[seen, count + key_heads :] += dv[:, part].transpose(0, 1)
        out[:, :count] /= math.sqrt(dim)
        cos, sin = ctx.turn
        out[:, : count + key_heads] = rotate(out[:, : count + key_heads], cos, -sin)
        return out, None, None, None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Tensor]:
    """Fill `out` [key heads, group, tokens, dim]; return the probabilities of each block."""
    key_heads, group, length, dim = q.shape
    before = k.shape[1] - length
    mask = torch.full((BLOCK, BLOCK), -math.inf, dtype=q.dtype).triu_(1)
    kept = []
    for first in range(0, length, BLOCK):
        last = min(first + BLOCK, length)
        size, keys = last - first, before + last
        scores = torch.bmm(q[:, :, first:last].flatten(1, 2), k[:, :keys].transpose(1, 2))
        scores.view(key_heads, group, size, keys)[..., -size:] += mask[:size, :size]
        kept.append(torch.softmax(scores, dim=-1))
        mixed = torch.bmm(kept[-1], v[:, :keys])
        out[:, :, first:last] = mixed.view(key_heads, group, size, dim)
    return kept


def _attend_backward(
    above: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: list[Tensor], dq: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill `dq`; return the gradients of keys and values [key heads, tokens, dim]."""
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for index, weights in enumerate(kept):
        first = index * BLOCK
        last, keys = min(first + BLOCK, q.shape[2]), weights.shape[-1]
        upstream = above[:, :, first:last].flatten(1, 2)
        dv[:, :keys] += torch.bmm(weights.transpose(1, 2), upstream)
        slope = torch.bmm(upstream, v[:, :keys].transpose(1, 2))
        slope = torch._softmax_backward_data(slope, weights, -1, weights.dtype)
        dq[:, :, first:last] = torch.bmm(slope, k[:, :keys]).view(*q.shape[:2], -1, q.shape[3])
        dk[:, :keys] += torch.bmm(slope.transpose(1, 2), q[:, :, first:last].flatten(1, 2))
    return dk, dv


def _by_head(x: Tensor, span: PrefixSpan) -> Tensor:
    """What a span sees of [tokens, heads, dim] -> contiguous [heads, tokens, dim]."""
    parts = [x[seen].transpose(0, 1) for seen in span.seen]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].contiguous()


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


# ------------------------------------------------------------------------------------------------
# The same function as the transformers model, computed faster on a CPU.
#
# Rows are concatenated, so nothing is padded and only attention knows where a row ends; beginnings
# that rows share stand once. q/k/v and gate/up, which share their input, are fused: one product per
# group, with a backward of our own.
#
# LoRA factors are merged into the frozen weights once per update, which makes the forward one
# product per module and is also exactly what the engine serves; frozen weights get no gradient.
# Where all weights are trained, the masters are float32 and each group keeps a copy in the type
# it computes in.
# ------------------------------------------------------------------------------------------------


class FusedLinear:
    """Linear modules that share their input, as one product with one merged weight.

    With an adapter's name the weights are frozen and its LoRA factors are trained; without one the
    modules' own weights are, which are float32 masters.
    """

    def __init__(self, modules: Sequence[Any], adapter: str | None, dtype: torch.dtype) -> None:
        self._dtype, self._lora = dtype, adapter is not None
        layers = [module.base_layer for module in modules] if self._lora else modules
        self._weights = [layer.weight for layer in layers]  # the model's own, no copy
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._biases = biases if len(biases) == len(layers) else []
        self.sizes = [weight.shape[0] for weight in self._weights]
        if adapter is None:
            self.trained = [*self._weights, *self._biases]
        else:
            self.downs = [module.lora_A[adapter].weight for module in modules]
            self.ups = [module.lora_B[adapter].weight for module in modules]
            self.scale = float(modules[0].scaling[adapter])
            self.trained = [t for pair in zip(self.downs, self.ups, strict=True) for t in pair]
        self.merge()

    @torch.no_grad()
    def merge(self) -> None:
        """Take over the parameters' present values."""
        weights: Sequence[Tensor] = self._weights
        if self._lora:
            factors = zip(weights, self.ups, self.downs, strict=True)
            weights = [torch.add(w.float(), up @ down, alpha=self.scale) for w, up, down in factors]
        self.weight = _side_by_side(weights, self._dtype)
        self.bias = _side_by_side(self._biases, self._dtype) if self._biases else None

    def __call__(self, x: Tensor) -> Tensor:
        product = _LowRankProduct if self._lora else _WholeProduct
        out: Tensor = product.apply(x, self, *self.trained)  # type: ignore[no-untyped-call]
        return out


def _side_by_side(masters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    held = [master.detach().to(dtype) for master in masters]
    return held[0] if len(held) == 1 else torch.cat(held)  # one float32 master needs no copy


class _Product(torch.autograd.Function):
    """The product with a merged weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fused: FusedLinear, *trained: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.fused, ctx.weight = fused, fused.weight
        return F.linear(x, fused.weight, fused.bias)


class _LowRankProduct(_Product):
    """Gradients of the input and of LoRA factors; frozen weights get none."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), grad, fused = ctx.saved_tensors, grads[0], ctx.fused
        dx = grad @ ctx.weight
        downs = torch.cat([down.detach() for down in fused.downs]).to(x.dtype)
        low = x @ downs.t()
        ranks = [down.shape[0] for down in fused.downs]
        lows, parts = low.split(ranks, dim=1), grad.split(fused.sizes, dim=1)
        ups = [up.detach().to(x.dtype) for up in fused.ups]
        back = torch.cat([part @ up for part, up in zip(parts, ups, strict=True)], dim=1)
        d_downs = (back.t() @ x).float().mul_(fused.scale).split(ranks)
        d_ups = [
            (p.t() @ one).float().mul_(fused.scale) for p, one in zip(parts, lows, strict=True)
        ]
        factors = [t for pair in zip(d_downs, d_ups, strict=True) for t in pair]
        return (dx, None, *factors)


class _WholeProduct(_Product):
    """Gradients of the input and of all weights and biases."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), grad, fused = ctx.saved_tensors, grads[0], ctx.fused
        d_weights = (grad.t() @ x).float().split(fused.sizes)
        biased = fused.bias is not None
        d_biases = grad.sum(0, dtype=torch.float32).split(fused.sizes) if biased else ()
        return (grad @ ctx.weight, None, *d_weights, *d_biases)


class FastLlama:
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
        self._layers = [_FastLayer(layer, adapter, dtype) for layer in inner.layers]
        self._head: Tensor = causal.lm_head.weight

    def merge(self) -> None:
        """Take over the parameters' present values; call it after every optimiser step."""
        for layer in self._layers:
            for linear in layer.fused:
                linear.merge()

    def states(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """Final hidden states, and for each token of the rows which of them is its own: what rows
        have in common at their beginning is computed once."""
        tree = PrefixTree.of(rows)
        positions = torch.tensor(tree.positions)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        x = F.embedding(torch.tensor(tree.ids), self._embed).to(self._dtype)
        for layer in self._layers:
            x = layer(x, self._shape, tree.spans, cos, sin)
        return _normed(x, self._norm, self._shape), tree.places

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._head.to(self._dtype))

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        head = self._head.to(self._dtype)
        picked: Tensor = TokenLogprobs.apply(hidden, head, targets, temperature)  # type: ignore[no-untyped-call]
        return picked


class _FastLayer:
    def __init__(self, layer: Any, adapter: str | None, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp

        def fused(*modules: Any) -> FusedLinear:
            return FusedLinear(modules, adapter, dtype)

        self.qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = fused(attention.o_proj)
        self.gate_up = fused(mlp.gate_proj, mlp.up_proj)
        self.down = fused(mlp.down_proj)
        self.fused = [self.qkv, self.out, self.gate_up, self.down]
        self._norm_in = layer.input_layernorm.weight
        self._norm_mlp = layer.post_attention_layernorm.weight
        self._q_norm, self._k_norm = _norm_of(attention, "q_norm"), _norm_of(attention, "k_norm")

    def __call__(
        self, x: Tensor, shape: Shape, spans: Sequence[PrefixSpan], cos: Tensor, sin: Tensor
    ) -> Tensor:
        heads = self.qkv(_normed(x, self._norm_in, shape)).view(len(x), -1, shape.head_dim)
        if self._q_norm is not None and self._k_norm is not None:
            q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
            q, k = _normed(q, self._q_norm, shape), _normed(k, self._k_norm, shape)
            heads = torch.cat([q, k, v], dim=1)
        mixed: Tensor = CausalAttention.apply(heads, cos, sin, shape.kv_heads, spans)  # type: ignore[no-untyped-call]
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
