"""Masks: which tokens a constraint allows next.

The grammar of a turn (`protocol/constrain.py`) is compiled by llguidance for a model's tokenizer.
Compiling is cached by text, and every request gets a copy that shares what the others have learnt.
The slices tell llguidance which tokens are plain text: inside a body it then need not try each of
them against the grammar, which makes a mask about ten times cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coa.engines.codec import Codec
from coa.errors import EngineError, MissingExtra

_TEXT = r"[^<`\"\\\x00-\x1F\x7F]"
_SLICES = [f"{_TEXT}{{1,10}}", f"{_TEXT}{{1,30}}", r"[^<`\x00-\x08\x0B-\x1F\x7F]+"]
_MOST_GRAMMARS = 512


class Matcher:
    """One turn's place in its grammar."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def fill(self, row: np.ndarray[Any, Any]) -> None:
        """Write the bits of the allowed tokens into `row`."""
        self._inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def take(self, token: int) -> str:
        """Move past a token; returns what went wrong, or nothing."""
        if self._inner.consume_token(token):
            return ""
        reason = str(self._inner.get_error()).strip().partition("\n")[0]
        return f"The constraint could not be followed: {reason or 'no token is allowed'}."


class Matchers:
    """Compiled grammars for one tokenizer."""

    def __init__(self, codec: Codec, vocabulary: int, eos: frozenset[int]) -> None:
        """`vocabulary` is the width of the logits, which can be more than the tokenizer has."""
        self._codec, self._vocabulary, self._eos = codec, vocabulary, sorted(eos)
        self._tokenizer: Any = None
        self._compiled: dict[str, Any] = {}

    def start(self, constraint: str) -> Matcher:
        """A matcher at the beginning of a grammar in Lark syntax."""
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as exc:
            raise MissingExtra("Constrained decoding", "train") from exc
        if self._tokenizer is None:
            text = self._codec.tokenizer.to_str()
            self._tokenizer = LLTokenizer(
                text, n_vocab=self._vocabulary, eos_token=self._eos, slices=_SLICES
            )
        if constraint not in self._compiled:
            inner = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(constraint), log_level=0)
            if inner.is_error():
                reason = str(inner.get_error()).strip().partition("\n")[0]
                raise EngineError(f"The constraint is not a grammar: {reason}.")
            if len(self._compiled) >= _MOST_GRAMMARS:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[constraint] = inner
        return Matcher(self._compiled[constraint].deep_copy())


def allowed_tokens(matchers: Sequence[Matcher | None], vocabulary: int) -> Tensor | None:
    """What each row allows, 0 or 1, [rows, vocabulary]; None when no row is constrained."""
    if not any(matcher is not None for matcher in matchers):
        return None
    bits = np.full((len(matchers), (vocabulary + 31) // 32), -1, dtype=np.int32)
    for row, matcher in zip(bits, matchers, strict=True):
        if matcher is not None:
            matcher.fill(row)
    flags = np.unpackbits(bits.view(np.uint8), axis=1, count=vocabulary, bitorder="little")
    return torch.from_numpy(flags)
