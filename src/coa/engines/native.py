"""llama.cpp's own /completion: token ids in, token ids and probabilities out.

Streamed, because only the stream has the stop string's probabilities. Probabilities after sampling
are asked for when there is a temperature; a greedy turn has those of the plain softmax.

One thing the stream keeps to itself: a token that ends inside a letter (an emoji of three tokens)
is counted and not shown. Such a turn is asked for once more, whole, for the ids, which must agree
with what was streamed; the missing probabilities are computed from the server's full distribution.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import aclosing
from itertools import accumulate
from typing import Any

from coa.engines.base import Completion, Finish, OnText, Sampling, TextCodec
from coa.engines.dialects import LOWEST, PROBE, Turn
from coa.engines.transport import Transport, offered
from coa.errors import EngineError

_FINISH: dict[Any, Finish] = {"word": "stop", "eos": "eos", "limit": "length"}
_ALL = 1 << 20
"""More than any vocabulary has."""


class NativeCompletions:
    """The dialect of a llama.cpp server."""

    exact = True
    tempered = True

    def __init__(self, transport: Transport, model: str, plain: int = 0) -> None:
        self._transport, self._model = transport, model
        self._address = f"{transport.root}/completion"
        self._plain = plain
        """An id that ends a letter, to be sampled where only the distribution is wanted."""

    @classmethod
    def probe(cls, transport: Transport, model: str, codec: TextCodec) -> NativeCompletions | None:
        """Ask for one token; no token may have been added to the prompt."""
        ids = codec.encode(PROBE)
        found = cls(transport, model, ids[-1])
        body = found._body(Turn(ids, Sampling(), 1)) | {"stream": False}
        answer = offered(transport, found._address, body)
        if not isinstance(answer, dict) or answer.get("tokens_evaluated") != len(ids):
            return None
        entries, tokens = answer.get("completion_probabilities"), answer.get("tokens")
        if not isinstance(entries, list) or not isinstance(tokens, list) or len(tokens) != 1:
            return None
        same = [entry.get("id") for entry in entries] == tokens and "logprob" in entries[0]
        return found if same else None

    def constrains(self) -> bool:
        """Its grammars are of another kind (GBNF), without bounded regular expressions."""
        return False

    def _body(self, turn: Turn) -> dict[str, Any]:
        sampling = turn.sampling
        return {
            "model": self._model,
            "prompt": turn.prompt,
            "n_predict": turn.limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repeat_penalty": 1.0,
            "samplers": ["temperature", "top_k", "top_p", "min_p"],
            "seed": sampling.key % 0xFFFFFFFF,  # the largest value means: at random
            "stop": list(sampling.stop),
            "n_probs": 1,
            "post_sampling_probs": sampling.temperature > 0,
            "return_tokens": True,
            "cache_prompt": True,
            "stream": True,
        }

    async def complete(self, turn: Turn) -> Completion:
        told: dict[int, tuple[int, float]] = {}
        last: dict[str, Any] = {}
        show = Shown(turn.on_text)
        events = self._transport.events(self._address, self._body(turn))
        async with aclosing(events):
            async for event in events:
                if event is None:
                    told, last = {}, {}
                    show.restart()
                    continue
                last = event
                for entry in event.get("completion_probabilities") or ():
                    told[int(event["tokens_predicted"]) - 1] = (entry["id"], _logprob(entry))
                show.add(event.get("content") or "")
        count = self._count(last)
        show.add(last.get("stopping_word") or "")
        if len(told) < count:
            await self._fill_in(turn, told, count)
        pairs = [told[position] for position in range(count)]
        ids, logprobs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return Completion(ids, logprobs, _FINISH[last["stop_type"]])

    def _count(self, last: Mapping[str, Any]) -> int:
        """Tokens sampled, by the stream's last event, which must be there."""
        reason, count = last.get("stop_type"), last.get("tokens_predicted")
        if reason not in _FINISH or not isinstance(count, int):
            where = self._transport.api
            raise EngineError(f"{where}: the stream ended without saying why; found {reason!r}.")
        usage = self._transport.usage
        usage.prompt_tokens += int(last.get("tokens_evaluated") or 0)
        usage.completion_tokens += count
        usage.cached_tokens += int((last.get("timings") or {}).get("cache_n") or 0)
        return count

    async def _fill_in(self, turn: Turn, told: dict[int, tuple[int, float]], count: int) -> None:
        """Add the tokens that the stream did not show."""
        body = self._body(turn) | {"stream": False, "n_predict": count, "stop": []}
        ids = (await self._transport.post(self._address, body)).get("tokens")
        agree = isinstance(ids, list) and len(ids) == count
        if not agree or any(ids[position] != token for position, (token, _) in told.items()):
            raise EngineError(
                f"{self._transport.api}: the server showed {len(told)} of {count} tokens, and "
                "sampled others when it was asked for all of them."
            )
        for position in range(count):
            if position not in told:
                prompt = [*turn.prompt, *ids[:position]]
                told[position] = ids[position], await self._score(prompt, ids[position], turn)

    async def _score(self, prompt: list[int], token: int, turn: Turn) -> float:
        """The logprob of a token; what is sampled meanwhile is forced and thrown away."""
        body = self._body(Turn(prompt, Sampling(), 1))
        body |= {"stream": False, "n_probs": _ALL, "logit_bias": [[self._plain, 1000.0]]}
        answer = await self._transport.post(self._address, body)
        entries = (answer.get("completion_probabilities") or [{}])[0].get("top_logprobs") or ()
        raw = {int(entry["id"]): float(entry["logprob"]) for entry in entries}
        return sampled_logprob(raw, token, turn.sampling)


def sampled_logprob(raw: Mapping[int, float], token: int, sampling: Sampling) -> float:
    """A token's logprob after temperature, top-k, top-p and min-p, from all the plain ones."""
    scale = sampling.temperature or 1.0
    order = sorted(raw.items(), key=lambda pair: -pair[1])
    if sampling.temperature > 0 and sampling.top_k > 0:
        order = order[: sampling.top_k]
    masses = [math.exp(logprob / scale) for _, logprob in order]
    if sampling.temperature > 0 and sampling.top_p < 1:
        reached = list(accumulate(masses))
        kept = 1 + bisect_left(reached, sampling.top_p * reached[-1])
        order, masses = order[:kept], masses[:kept]
    if sampling.temperature > 0 and sampling.min_p > 0:
        kept = sum(mass >= sampling.min_p * masses[0] for mass in masses)
        order, masses = order[:kept], masses[:kept]
    chosen = dict(order).get(token)
    return LOWEST if chosen is None else chosen / scale - math.log(sum(masses))


class Shown:
    """Passes text on; after a new attempt, only what was not shown before."""

    def __init__(self, on_text: OnText | None) -> None:
        self._on_text, self._text, self._shown = on_text, "", 0

    def restart(self) -> None:
        self._text = ""

    def add(self, text: str) -> None:
        self._text += text
        if self._on_text is not None and len(self._text) > self._shown:
            self._on_text(self._text[self._shown :])
            self._shown = len(self._text)


def _logprob(entry: Mapping[str, Any]) -> float:
    if "logprob" in entry:
        return max(LOWEST, float(entry["logprob"]))
    probability = float(entry["prob"])
    return math.log(probability) if probability > 0 else LOWEST
