"""Hand-written backward passes against autograd."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from coa.models.weights import rotate  # noqa: E402
from coa.train.forward import (  # noqa: E402
    BLOCK,
    CausalAttention,
    GatedUnit,
    RmsNorm,
    TokenLogprobs,
)
from coa.train.prefixes import PrefixSpan, PrefixTree  # noqa: E402


def test_attention_is_that_of_torch_over_several_blocks_and_rows() -> None:
    torch.manual_seed(0)
    lengths, queries, keys, dim = [2 * BLOCK + 7, 1, BLOCK, BLOCK + 1], 6, 2, 8
    total = sum(lengths)
    ends = list(accumulate(lengths))
    spans = [
        PrefixSpan(slice(end - length, end)) for end, length in zip(ends, lengths, strict=True)
    ]
    heads = torch.randn(total, queries + 2 * keys, dim, requires_grad=True)
    angles = torch.randn(total, 1, dim // 2).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    ours = CausalAttention.apply(heads, cos, sin, keys, spans)
    q, k, v = heads.split([queries, keys, keys], dim=1)
    parts = []
    for row in zip(
        *(t.split(lengths) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v)), strict=True
    ):
        q_row, k_row, v_row = (t.transpose(0, 1)[None] for t in row)
        mixed = F.scaled_dot_product_attention(q_row, k_row, v_row, is_causal=True, enable_gqa=True)
        parts.append(mixed[0].transpose(0, 1).flatten(1))
    theirs = torch.cat(parts)
    assert torch.allclose(ours, theirs, atol=1e-5)
    upstream = torch.randn_like(ours)
    (one,) = torch.autograd.grad(ours, heads, upstream)
    (other,) = torch.autograd.grad(theirs, heads, upstream)
    assert torch.allclose(one, other, atol=1e-5)


def test_what_rows_share_has_the_attention_and_the_gradients_of_all_of_them() -> None:
    torch.manual_seed(0)
    queries, keys, dim = 6, 2, 8
    begun = list(range(BLOCK + 30))
    rows = [
        [*begun, *[1000] * 20, *[1] * (BLOCK + 5)],
        [*begun, *[1000] * 20, *[2] * 40],
        [*begun, *[3] * 17],
        [4] * 30,
        begun,
    ]
    tree, apart = PrefixTree.of(rows), PrefixTree.of(rows, least=10**6)
    assert len(tree.ids) < len(apart.ids) == sum(map(len, rows))
    drawn = torch.randn(len(tree.ids), queries + 2 * keys, dim, dtype=torch.float64)
    angles = torch.randn(BLOCK * 3, 1, dim // 2, dtype=torch.float64).repeat(1, 1, 2)
    upstream = torch.randn(sum(map(len, rows)), queries * dim, dtype=torch.float64)
    place = torch.tensor(tree.places)
    found = []
    for each in (tree, apart):
        heads = drawn.clone().requires_grad_()
        given = heads if each is tree else heads[place[_undone(each)]]
        turn = angles[torch.tensor(each.positions)]
        out = CausalAttention.apply(given, turn.cos(), turn.sin(), keys, each.spans)
        out = out[torch.tensor(each.places)]
        out.backward(upstream)
        found.append((out.detach(), heads.grad))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-10)


def _undone(tree: PrefixTree) -> Any:
    """For each token of a tree that shares nothing, its place among the rows."""
    return torch.tensor(tree.places).argsort()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_log_softmax(temperature: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(75, 16, requires_grad=True)
    head, targets = torch.randn(50, 16), torch.randint(0, 50, (75,))
    ours = TokenLogprobs.apply(hidden, head, targets, temperature)
    logs = torch.log_softmax((hidden @ head.t()) / temperature, dim=-1)
    theirs = logs.gather(1, targets[:, None])[:, 0]
    assert torch.allclose(ours, theirs, atol=1e-5)
    upstream = torch.randn(75)
    (one,) = torch.autograd.grad(ours, hidden, upstream)
    (other,) = torch.autograd.grad(theirs, hidden, upstream)
    assert torch.allclose(one, other, atol=1e-5)


def test_a_second_backward_through_logprobs_is_refused_and_not_wrong() -> None:
    hidden, head = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
    logprobs = TokenLogprobs.apply(hidden, head, torch.tensor([0, 1, 2, 3, 4]), 1.0)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def torch_norm(x: Any, weight: Any) -> Any:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def our_norm(x: Any, weight: Any) -> Any:
    return RmsNorm.apply(x, weight, 1e-5)


def torch_gate(x: Any) -> Any:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def result_and_gradients(function: Callable[..., Any], *inputs: Any) -> list[Any]:
    held = [tensor.clone().requires_grad_() for tensor in inputs]
    result = function(*held)
    upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    result.backward(upstream.to(result.dtype))
    return [result, *(tensor.grad for tensor in held)]


def kept_bytes(function: Callable[..., Any], *inputs: Any) -> int:
    """What a function of tensors keeps for its backward, inputs that are kept included."""
    kept: dict[int, int] = {}

    def note(tensor: Any) -> Any:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function(*(tensor.clone().requires_grad_() for tensor in inputs))
    return sum(kept.values())


@pytest.mark.parametrize("shape", [(37, 48), (5, 3, 17)])
def test_a_norm_has_the_bits_of_torch_and_keeps_half(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = 3 * torch.randn(shape).bfloat16(), torch.randn(shape[-1]).bfloat16()
    pairs = zip(
        result_and_gradients(our_norm, x, weight),
        result_and_gradients(torch_norm, x, weight),
        strict=True,
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    frozen = weight.clone()
    ours = kept_bytes(lambda x: our_norm(x, frozen), x)
    theirs = kept_bytes(lambda x: torch_norm(x, frozen), x)
    assert theirs - ours == x.nbytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gated_unit_has_the_bits_of_torch_and_keeps_its_input_alone(dtype: str) -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(29, 70).to(getattr(torch, dtype))
    ours, theirs = (result_and_gradients(f, x) for f in (GatedUnit.apply, torch_gate))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert kept_bytes(GatedUnit.apply, x) == x.nbytes < kept_bytes(torch_gate, x)
