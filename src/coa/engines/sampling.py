"""Drawing tokens: the random number depends on the request's key and position, nothing else.

One uniform number per token, taken through the cumulative distribution, so a draw does not depend
on who shares the batch or on when it is made. Log-probabilities are float32 and belong to the
distribution that was sampled from: after temperature, after a constraint's mask and after top-k,
top-p and min-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from coa.engines.base import Sampling
from coa.engines.kernels import load_kernels
from coa.errors import EngineError, MissingExtra
from coa.models.codec import Codec

Found = tuple[list[int], list[float], list[float]]
"""Tokens, their log-probabilities, and the log of what the allowed tokens had together."""
_BLOCK = 256
_MASK = (1 << 64) - 1
_FAINT = 1e-20
"""Allowed tokens with less mass than this are computed apart, where nothing underflows."""


def uniform(key: int, position: int) -> float:
    """A number in [0, 1) from a 64-bit mix (splitmix64) of key and position."""
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return float((z ^ (z >> 31)) >> 11) / float(1 << 53)


def draw(
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    allowed: Tensor | None = None,
) -> Found:
    """Sample one token per row among those allowed (0 or 1, [rows, vocab]; None: all).

    The third list is the log of the probability that the allowed tokens of a row had together.
    """
    plain = [row for row, each in enumerate(samplings) if not each.constraint and not _is_cut(each)]
    quick = _draw_compiled(
        _rows(logits, plain), [samplings[row] for row in plain], [positions[row] for row in plain]
    )
    if quick is None:
        return _draw_by_torch(logits, samplings, positions, allowed)
    if len(plain) == len(samplings):
        return quick
    # The two ways differ in the last bits, so a row's way must not depend on its neighbours.
    rest = sorted(set(range(len(samplings))).difference(plain))
    slow = _draw_by_torch(
        _rows(logits, rest),
        [samplings[row] for row in rest],
        [positions[row] for row in rest],
        None if allowed is None else _rows(allowed, rest),
    )
    drawn = [*zip(*quick, strict=True), *zip(*slow, strict=True)]
    found = dict(zip([*plain, *rest], drawn, strict=True))
    tokens, logprobs, shares = zip(*(found[row] for row in range(len(samplings))), strict=True)
    return list(tokens), list(logprobs), list(shares)


def _draw_by_torch(
    logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int], allowed: Tensor | None
) -> Found:
    """Every case; a row comes out the same to the bit, whatever the others ask for.

    Softmax is by far the fastest way to exponents here, so everything is read from its result.
    """
    logits = logits.float()
    rows = range(len(samplings))
    hot = [row for row in rows if samplings[row].temperature > 0]
    scale = [s.temperature if s.temperature > 0 else 1.0 for s in samplings]
    scaled = logits if set(scale) == {1.0} else logits / torch.tensor(scale)[:, None]
    cut = [row for row in hot if _is_cut(samplings[row])]
    if allowed is None:
        mass = scaled.softmax(dim=-1)
        for row in cut:
            mass[row] = _keep_top(scaled[row], samplings[row]).softmax(dim=-1)
        totals, shares = torch.ones(len(samplings)), torch.zeros(len(samplings))
    else:
        bound = [row for row in rows if samplings[row].constraint]
        mass, totals, shares = _restrict(scaled, allowed, bound, samplings, cut)
    chosen = torch.empty(len(samplings), dtype=torch.long)
    cold = [row for row in rows if samplings[row].temperature <= 0]
    if cold:
        chosen[cold] = _rows(mass, cold).argmax(dim=-1)
    if hot:
        points = [uniform(samplings[row].key, positions[row]) for row in hot]
        chosen[hot] = _invert(_rows(mass, hot), points)
    picked = (mass.gather(1, chosen[:, None])[:, 0] / totals).log()
    return chosen.tolist(), picked.tolist(), shares.tolist()


def _draw_compiled(
    logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> Found | None:
    """The common case, nothing cut and nothing forbidden, by a kernel; None without kernels.

    One pass finds the largest, one sums; nothing of the size of the vocabulary is written.
    """
    kernels = load_kernels()
    if isinstance(kernels, str):
        return None
    rows, logits = len(samplings), logits.contiguous()
    temperatures = np.array([s.temperature for s in samplings], np.float32)
    points = np.array([uniform(s.key, at) for s, at in zip(samplings, positions, strict=True)])
    tokens, logprobs = np.empty(rows, np.int64), np.empty(rows, np.float32)
    arrays = (each.ctypes.data for each in (temperatures, points, tokens, logprobs))
    bf16 = int(logits.dtype == torch.bfloat16)
    kernels.coa_draw(logits.data_ptr(), rows, logits.shape[-1], *arrays, bf16)
    return tokens.tolist(), logprobs.tolist(), [0.0] * rows


def _restrict(
    scaled: Tensor,
    allowed: Tensor,
    bound: Sequence[int],
    samplings: Sequence[Sampling],
    cut: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The mass of each allowed token, its sum per row, and the log of the allowed share.

    Rows that are not bound by a constraint come out as if there were none in the batch.
    """
    mass = scaled.softmax(dim=-1).mul_(allowed)
    totals, shares = torch.ones(len(scaled)), torch.zeros(len(scaled))
    for row in bound:  # torch adds up a row of several in another order than one alone
        totals[row] = mass[row].sum()
    shares[bound] = totals[bound].log().clamp_(max=0.0)
    faint = (totals < _FAINT).nonzero()[:, 0].tolist()
    for row in {*cut, *faint}:
        kept = scaled[row]
        if row in bound:
            kept = kept.masked_fill(allowed[row] == 0, float("-inf"))
            shares[row] = kept.logsumexp(dim=-1) - scaled[row].logsumexp(dim=-1)
        kept = _keep_top(kept, samplings[row]) if row in cut else kept
        mass[row], totals[row] = kept.softmax(dim=-1), 1.0
    return mass, totals, shares


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
    within = (wanted - before).clamp_(min=0.0)  # rounding must not find a token without mass
    fine = torch.searchsorted(inside.cumsum(dim=-1), within, right=True)
    last = _BLOCK - 1 - inside.flip(-1).gt(0).to(torch.uint8).argmax(dim=-1, keepdim=True)
    return (block * _BLOCK + torch.minimum(fine, last))[:, 0]


def _is_cut(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _keep_top(row: Tensor, sampling: Sampling) -> Tensor:
    """Set everything outside top-k, top-p and min-p to minus infinity."""
    ordered, order = row.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k > 0:
        keep[sampling.top_k :] = False
    if sampling.top_p < 1:
        before = ordered.masked_fill(~keep, float("-inf")).softmax(-1).cumsum(-1)
        keep[1:] &= before[:-1] < sampling.top_p
    if sampling.min_p > 0:
        keep[1:] &= ordered[1:] >= ordered[0] + math.log(sampling.min_p)
    kept = torch.full_like(row, float("-inf"))
    kept[order[keep]] = ordered[keep]
    return kept


_TEXT = r"[^<`\"\\\x00-\x1F\x7F]"
_SLICES = [f"{_TEXT}{{1,10}}", f"{_TEXT}{{1,30}}", r"[^<`\x00-\x08\x0B-\x1F\x7F]+"]
"""They tell llguidance which tokens are plain text: inside a body it then need not try each of them
against the grammar, which makes a mask about ten times cheaper."""


Matcher = Any
"""One turn's place in its grammar: an `LLMatcher`."""


class Matchers:
    """The grammars of turns (`grammar/constrain.py`), compiled by llguidance for one tokenizer.

    Compiling is cached by text, and every request gets a copy that shares what others have learnt.
    """

    def __init__(self, codec: Codec, vocabulary: int, eos: frozenset[int]) -> None:
        """`vocabulary` is the width of the logits, which can be more than the tokenizer has."""
        self._codec, self._vocabulary, self._eos = codec, vocabulary, sorted(eos)
        self._compiled = lru_cache(maxsize=512)(self._compile)

    def start(self, constraint: str) -> Matcher:
        """A matcher at the beginning of a grammar in Lark syntax."""
        return self._compiled(constraint).deep_copy()

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        text = self._codec.tokenizer.to_str()
        return LLTokenizer(text, n_vocab=self._vocabulary, eos_token=self._eos, slices=_SLICES)

    def _compile(self, constraint: str) -> Matcher:
        try:
            from llguidance import LLMatcher
        except ImportError as exc:
            raise MissingExtra("Constrained decoding", "train") from exc
        grammar = LLMatcher.grammar_from_lark(constraint)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise EngineError(f"The constraint is not a grammar: {_first_line(matcher)}.")
        return matcher


def follow(matcher: Matcher, token: int) -> str:
    """Move a matcher past a token; returns what went wrong, or nothing."""
    if matcher.consume_token(token):
        return ""
    reason = _first_line(matcher) or "no token is allowed"
    return f"The constraint could not be followed: {reason}."


def _first_line(matcher: Matcher) -> str:
    return str(matcher.get_error()).strip().partition("\n")[0]


def forced_tokens(matcher: Matcher) -> list[int]:
    """Tokens that must come next, as far as the grammar leaves no choice."""
    return list(matcher.compute_ff_tokens())


def possible(matcher: Matcher, tokens: list[int]) -> list[int]:
    """As many of the tokens as the grammar allows to come next."""
    return tokens[: matcher.validate_tokens(tokens)]


Guessed = tuple[Matcher | None, Sequence[int]]
"""A turn's matcher, and tokens that may come next, all of them possible."""


def allowed_tokens(turns: Sequence[Guessed], vocabulary: int) -> Tensor | None:
    """What each row allows, 0 or 1, [rows, vocabulary]; None when no row is constrained.

    A turn has a row for its next token, and one for what comes after each of its guesses.
    """
    if not any(matcher is not None for matcher, _ in turns):
        return None
    rows = sum(1 + len(guess) for _, guess in turns)
    bits = np.full((rows, (vocabulary + 31) // 32), -1, dtype=np.int32)
    left = iter(bits)
    for matcher, guess in turns:
        place = matcher.deep_copy() if matcher is not None and guess else matcher
        for row, before in zip(islice(left, 1 + len(guess)), [None, *guess], strict=True):
            if place is None or (before is not None and not place.consume_token(before)):
                place = None  # if this guess is drawn, following it fails, and no row counts
            else:
                place.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    flags = np.unpackbits(bits.view(np.uint8), axis=1, count=vocabulary, bitorder="little")
    return torch.from_numpy(flags)
