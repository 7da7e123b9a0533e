"""Drawing tokens: the random number depends on the request's key and position, nothing else.

One uniform number per token, taken through the cumulative distribution, so a draw does not depend
on who shares the batch or on when it is made. Log-probabilities are float32 and belong to the
distribution that was sampled from: after temperature and after top-k and top-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coa.engines.base import Sampling

_BLOCK = 256
_MASK = (1 << 64) - 1


def uniform(key: int, position: int) -> float:
    """A number in [0, 1) from a 64-bit mix (splitmix64) of key and position."""
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return float((z ^ (z >> 31)) >> 11) / float(1 << 53)


def draw(
    logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Sample one token per row of float32 logits [rows, vocab]."""
    hot = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    scale = torch.tensor([s.temperature if s.temperature > 0 else 1.0 for s in samplings])
    scaled = logits / scale[:, None] if hot else logits
    for row in hot:
        if samplings[row].top_k > 0 or samplings[row].top_p < 1:
            scaled[row] = _keep_top(scaled[row], samplings[row])
    totals = scaled.logsumexp(dim=-1)
    chosen = torch.empty(len(samplings), dtype=torch.long)
    cold = [row for row in range(len(samplings)) if row not in set(hot)]
    if cold:
        chosen[cold] = _rows(scaled, cold).argmax(dim=-1)
    if hot:
        points = [uniform(samplings[row].key, positions[row]) for row in hot]
        chosen[hot] = _invert((_rows(scaled, hot) - totals[hot, None]).exp_(), points)
    picked = scaled.gather(1, chosen[:, None])[:, 0] - totals
    return chosen.tolist(), picked.tolist()


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _invert(mass: Tensor, points: list[float]) -> Tensor:
    """The token at which each row's cumulative mass passes its point.

    In two levels, first a block of tokens and then a token in it: summing the whole vocabulary
    token by token in double precision would cost more than the rest of the draw.
    """
    rows, vocab = mass.shape
    blocks = F.pad(mass, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    sums = blocks.sum(dim=-1).to(torch.float64)
    coarse = sums.cumsum(dim=-1)
    wanted = torch.tensor(points, dtype=torch.float64)[:, None] * coarse[:, -1:]
    block = torch.searchsorted(coarse, wanted, right=True).clamp_(max=coarse.shape[1] - 1)
    before = coarse.gather(1, block) - sums.gather(1, block)
    inside = blocks[torch.arange(rows), block[:, 0]].to(torch.float64)
    fine = torch.searchsorted(inside.cumsum(dim=-1), wanted - before, right=True)
    last = _BLOCK - 1 - inside.flip(-1).gt(0).to(torch.uint8).argmax(dim=-1, keepdim=True)
    return (block * _BLOCK + torch.minimum(fine, last))[:, 0]


def _keep_top(row: Tensor, sampling: Sampling) -> Tensor:
    """Set everything outside top-k and top-p to minus infinity."""
    ordered, order = row.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k > 0:
        keep[sampling.top_k :] = False
    if sampling.top_p < 1:
        before = ordered.masked_fill(~keep, float("-inf")).softmax(-1).cumsum(-1)
        keep[1:] &= before[:-1] < sampling.top_p
    kept = torch.full_like(row, float("-inf"))
    kept[order[keep]] = ordered[keep]
    return kept
