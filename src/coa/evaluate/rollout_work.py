"""The work of `coa bench rollout`: the same rollouts for every engine, and the least they cost.

Tokens in, tokens out: a rollout is a prompt, and between its turns an observation. All texts are
passages of the Atlas, none used twice, so that only the system prompt is shared. All rollouts have
the same lengths, which is the best case of a peer that works in rectangular batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from coa.corpus.atlas import atlas_passages
from coa.engines.base import TextCodec, common_prefix
from coa.protocol import load_grammar, system_prompt

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a rollout: prompt, sampled, (observation, sampled)..."""

    prompt: int = 200
    sampled: int = 64
    observation: int = 150
    turns: int = 3

    @property
    def total(self) -> int:
        return self.prompt + self.turns * self.sampled + (self.turns - 1) * self.observation


@dataclass(frozen=True, slots=True)
class Work:
    """Rollouts to be done at once, by one engine, in one run."""

    prompts: list[Ids]
    observations: list[list[Ids]]
    """Of each rollout, one after each turn but the last."""
    lengths: Lengths

    @property
    def tokens(self) -> int:
        """How many are sampled in all."""
        return len(self.prompts) * self.lengths.turns * self.lengths.sampled

    @property
    def shared(self) -> int:
        """Leading tokens that all prompts have in common, and that need computing only once."""
        return min(common_prefix(self.prompts[0], prompt) for prompt in self.prompts)


class Texts:
    """An endless supply of pieces of text of a given number of tokens."""

    def __init__(self, codec: TextCodec, seed: int = 0) -> None:
        self._codec = codec
        passages = list(atlas_passages())
        Random(seed).shuffle(passages)
        self._passages = itertools.cycle(passages)
        self._system = system_prompt(load_grammar("mhqa"), "compact")
        self._around = len(codec.encode_prompt(self._system, ""))

    def work(self, rollouts: int, lengths: Lengths) -> Work:
        made = [self._rollout(lengths) for _ in range(rollouts)]
        return Work([prompt for prompt, _ in made], [seen for _, seen in made], lengths)

    def _rollout(self, lengths: Lengths) -> tuple[Ids, list[Ids]]:
        pieces = (self._piece(lengths.observation) for _ in range(lengths.turns - 1))
        return self._prompt(lengths.prompt), list(pieces)

    def _prompt(self, size: int) -> Ids:
        """A cut text does not always encode to as many tokens again; then the next one is tried."""
        assert size > self._around, (size, self._around)
        while True:
            text = self._codec.decode(self._piece(size - self._around))
            ids = self._codec.encode_prompt(self._system, text)
            if len(ids) == size:
                return ids

    def _piece(self, size: int) -> Ids:
        text = ""
        for passage in self._passages:
            text += passage.text + " "
            if len(text) >= size:  # a token has at least one character
                ids = self._codec.encode(text)
                if len(ids) >= size:
                    return ids[:size]
        raise AssertionError("the passages never end")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a work needs at the least: every token computed once, every weight read once a step."""

    prefill_flops: float
    decode_flops: float
    decode_bytes: float

    def seconds(self, flops: float, bandwidth: float) -> float:
        """The shortest time on a machine of these peaks, each per second.

        Prefill has many tokens per weight, so that only arithmetic counts there.
        """
        decode = max(self.decode_flops / flops, self.decode_bytes / bandwidth)
        return self.prefill_flops / flops + decode


def cost(work: Work, config: dict[str, Any], bytes_each: int) -> Cost:
    """Of a llama-like model; the output layer counts only where a token is sampled."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    wide, narrow = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = 2 * hidden * (wide + narrow) + 3 * hidden * config["intermediate_size"]
    output = hidden * config["vocab_size"]
    n, shared, prefill, decode, read = len(work.prompts), work.shared, 0.0, 0.0, 0.0
    for start, sampled in _passes(work.lengths):
        if sampled:
            decode += n * (2 * (layers * layer + output) + 4 * layers * wide * (start + 1))
            read += (layers * layer + output) + n * 2 * layers * narrow * (start + 1)
        else:
            times = 1 if start < shared else n
            prefill += times * (2 * layers * layer + 4 * layers * wide * (start + 1))
    prefill += n * work.lengths.turns * 2 * output  # the first token of a turn
    return Cost(prefill, decode, read * bytes_each)


def _passes(lengths: Lengths) -> Iterator[tuple[int, bool]]:
    """(position, whether it is decoded) of every token that is computed.

    The last token of a turn is computed with the observation after it, that of the last turn never.
    """
    position = 0
    for turn in range(lengths.turns):
        fresh = lengths.prompt if turn == 0 else lengths.observation + 1
        for is_decoded, count in ((False, fresh), (True, lengths.sampled - 1)):
            for _ in range(count):
                yield position, is_decoded
                position += 1
