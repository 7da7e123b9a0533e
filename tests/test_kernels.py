"""Hand-written backward passes against autograd."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from coa.engines.shape import rotate  # noqa: E402
from coa.train.kernels import BLOCK, CausalAttention, TokenLogprobs  # noqa: E402


def test_attention_is_that_of_torch_over_several_blocks_and_rows() -> None:
    torch.manual_seed(0)
    lengths, queries, keys, dim = [2 * BLOCK + 7, 1, BLOCK, BLOCK + 1], 6, 2, 8
    total = sum(lengths)
    heads = torch.randn(total, queries + 2 * keys, dim, requires_grad=True)
    angles = torch.randn(total, 1, dim // 2).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    ours = CausalAttention.apply(heads, cos, sin, keys, lengths)
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
