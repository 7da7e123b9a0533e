"""A lean forward for the Llama family: merged and fused weights, one KV slot per rollout.

Why not the transformers model: it keeps one cache length for a whole batch, cannot keep a rollout's
KV across turns, and spends more time between matrix products than in them. Here q/k/v and gate/up
are one product each, weights are packed once in oneDNN's own layout (up to twice as fast at small
batches), and what lies between the products is in `kernels.py`.

A step takes any mixture of chunks: single tokens of rollouts that decode, pieces of prompts,
guesses to be checked. All their tokens are rows of the same products, so weights are read once for
all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from coa.engines.kernels import (
    LANES,
    CompiledOps,
    Int8Linear,
    KernelRun,
    TorchOps,
    load_kernels,
)
from coa.errors import ModelError
from coa.models.weights import Adapter, Shape, read_config, weight_files

EXACT_ROWS = 16
"""Rows of every decoding step in exact mode: a product's last bits depend on its shape."""
FEW_ROWS = 16
"""Most rows of a product with weights of 8 bits: with more, computing takes longer than reading."""
Linear = Callable[[Tensor], Tensor]


class MergedTensors:
    """Tensors of a model folder by name, with an adapter merged in float32, cast once."""

    def __init__(self, folder: Path, adapter: Adapter | None, dtype: torch.dtype) -> None:
        self._files = {}
        for path in weight_files(folder):
            file = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))
        self._adapter, self._dtype = adapter, dtype
        self._unused = {*adapter.pairs, *adapter.whole} if adapter else set()

    def __call__(self, name: str) -> Tensor:
        if name not in self._files:
            raise ModelError(f"The model's weights have no tensor {name!r}.")
        module = name.removesuffix(".weight")
        tensor: Tensor
        if self._adapter is not None and name in self._adapter.whole:
            tensor = self._adapter.whole[name]
        else:
            tensor = self._files[name].get_tensor(name)
            if self._adapter is not None and module in self._adapter.pairs:
                down, up = self._adapter.pairs[module]
                tensor = tensor.float() + self._adapter.scale * (up.float() @ down.float())
        self._unused -= {name, module}
        # A table or a mask is no weight and keeps its type.
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def optional(self, name: str) -> Tensor | None:
        return self(name) if name in self._files else None

    def fused(self, names: list[str]) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of several linear modules that share their input."""
        weight = torch.cat([self(f"{name}.weight") for name in names])
        biases = [self.optional(f"{name}.bias") for name in names]
        present = [bias for bias in biases if bias is not None]
        return weight, torch.cat(present) if len(present) == len(names) else None

    def check_all_used(self) -> None:
        if self._unused:
            first = min(self._unused)
            raise ModelError(f"The adapter trains {first!r}, which the engine cannot merge.")


def make_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    kernels: ctypes.CDLL | None = None,
    exact: bool = False,
) -> Linear:
    """A linear layer; with `kernels` a few rows are multiplied with weights of 8 bits. `exact` is
    torch's plain product: the rows of a packed one may be rounded by how many there are."""
    plain = exact or not torch.backends.mkldnn.is_available()
    whole = partial(F.linear, weight=weight, bias=bias) if plain else _packed_linear(weight, bias)
    if kernels is None:
        return whole
    few = Int8Linear(kernels, weight, bias)
    return lambda x: few(x) if len(x) <= FEW_ROWS else whole(x)


def _packed_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The weight is packed for oneDNN where this build of torch can."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
        product = torch.ops.mkldnn._linear_pointwise
        product(weight.new_zeros(1, weight.shape[1]), packed, bias, "none", [], "")
    except (RuntimeError, AttributeError, NotImplementedError):
        return partial(F.linear, weight=weight, bias=bias)  # another build of torch
    return lambda x: product(x, packed, bias, "none", [], "")


@dataclass(slots=True)
class Layer:
    norm_in: Tensor
    qkv: Linear
    out: Linear
    norm_mlp: Tensor
    gate_up: Linear
    down: Linear
    norms: tuple[Tensor, Tensor] | None
    """Of queries and keys, where the model has them (Qwen3)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to add to one slot, whose first `start` tokens are already there."""

    slot: int
    start: int
    ids: list[int]
    tail: int = 1
    """Of how many of the last tokens logits are wanted."""


class LlamaForward:
    """Weights and KV slots; computes the logits after the last tokens of each chunk."""

    can_rewind = True  # each token has its own place in a slot

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        slots: int,
        context: int,
        exact: bool,
        adapter: Adapter | None = None,
        int8: bool = False,
    ) -> None:
        assert slots <= EXACT_ROWS or not exact, slots
        assert not (int8 and exact), "rounded weights are not exact"
        config = read_config(folder)
        self.shape = Shape.read(config)
        self._tied = config.get("tie_word_embeddings") is True
        self._folder, self._dtype, self._exact = folder, dtype, exact
        self.slots, self.vocabulary = slots, self.shape.vocab
        kernels = load_kernels()
        widths = (self.shape.head_dim, self.shape.hidden, config["intermediate_size"])
        if not isinstance(kernels, str) and any(width % LANES for width in widths):
            kernels = f"the model's widths {widths} are not multiples of {LANES}"
        self.slow = kernels if isinstance(kernels, str) else ""
        """Why the compiled kernels are not used."""
        self._int8 = kernels if int8 and not isinstance(kernels, str) else None
        self.int8 = self._int8 is not None
        """Whether a few rows are multiplied with weights of 8 bits."""
        if isinstance(kernels, str):
            self._ops = TorchOps(self.shape, slots, context, dtype)
        else:
            self._ops = CompiledOps(kernels, self.shape, slots, context, dtype)
        self.load(adapter)

    def load(self, adapter: Adapter | None) -> None:
        """Read the base again, merge the adapter, fuse and pack."""
        take = MergedTensors(self._folder, adapter, self._dtype)
        embed, norm = take("model.embed_tokens.weight"), take("model.norm.weight")
        layers = [self._read_layer(take, i) for i in range(self.shape.layers)]
        # A tied head has no weights of its own, even where a file holds a copy of them.
        head = None if self._tied else take.optional("lm_head.weight")
        take.check_all_used()  # an adapter that is refused has changed nothing
        self._embed, self._layers, self._norm = embed, layers, norm
        self._head = make_linear(embed if head is None else head, None, self._int8, self._exact)

    def _read_layer(self, take: MergedTensors, index: int) -> Layer:
        at = f"model.layers.{index}."
        attention = at + "self_attn."
        q_norm = take.optional(attention + "q_norm.weight")
        k_norm = take.optional(attention + "k_norm.weight")

        def linear(*names: str) -> Linear:
            return make_linear(*take.fused([*names]), self._int8, self._exact)

        return Layer(
            norm_in=take(at + "input_layernorm.weight"),
            qkv=linear(*[attention + f"{x}_proj" for x in "qkv"]),
            out=linear(attention + "o_proj"),
            norm_mlp=take(at + "post_attention_layernorm.weight"),
            gate_up=linear(at + "mlp.gate_proj", at + "mlp.up_proj"),
            down=linear(at + "mlp.down_proj"),
            norms=None if q_norm is None or k_norm is None else (q_norm, k_norm),
        )

    def step(self, chunks: list[Chunk]) -> Tensor:
        """Store the chunks' tokens; logits [sum of tails, vocab] in the model's type, in order.

        In exact mode the caller passes single tokens, or one chunk: rows are then filled up to the
        same number, whoever is there.
        """
        ids = [token for chunk in chunks for token in chunk.ids]
        runs, wanted, first = [], list[int](), 0
        for chunk in chunks:
            size = len(chunk.ids)
            runs.append(KernelRun(chunk.slot, chunk.start, size, first))
            first += size
            wanted.extend(range(first - chunk.tail, first))
        alone = self._exact and all(len(chunk.ids) == 1 for chunk in chunks)
        if alone:
            ids += [0] * (EXACT_ROWS - len(ids))
        every = alone or len(wanted) == len(ids)
        hidden = self._run(self._embed[torch.tensor(ids)], runs, None if every else wanted)
        if not wanted:
            return hidden.new_empty(0, self.shape.vocab)
        return self._head(self._ops.add_norm(hidden, None, self._norm))[: len(wanted)]

    def _run(self, x: Tensor, runs: list[KernelRun], wanted: list[int] | None) -> Tensor:
        """Hidden states after the last layer, of the wanted rows (None: of all).

        The last layer stores keys and values of all rows; the rest of it is for the wanted ones.
        """
        ops, delta = self._ops, None
        ops.begin(runs)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(ops.add_norm(x, delta, layer.norm_in))
            seen = ops.attend(index, qkv, layer.norms)
            if wanted is not None and index == len(self._layers) - 1:
                if not wanted:
                    return x[:0]
                x, seen = x[wanted], seen[wanted]
            delta = layer.out(seen)
            gate_up = layer.gate_up(ops.add_norm(x, delta, layer.norm_mlp))
            delta = layer.down(ops.gate(gate_up))
        return x if delta is None else x + delta

    def copy(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` tokens of `source`."""
        self._ops.copy(source, target, length)
