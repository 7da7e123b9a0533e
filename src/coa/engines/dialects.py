"""How a server is asked for token ids: /v1/completions with `return_token_ids`, as vLLM has it.

A dialect takes the prompt as ids and gives back every sampled id with its logprob, the stop
string's and the end of sequence's included. Whether a server speaks it is found by a probe, never
assumed. llama.cpp's is in `native.py`, those that exchange only text in `text_dialects.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from coa.engines.base import Completion, Finish, OnText, Sampling, TextCodec
from coa.engines.codec import Codec
from coa.engines.stops import completes_stop
from coa.engines.transport import Refused, Transport, offered
from coa.errors import EngineError

PROBE = "The three most common words of the language are"
_FORCED = "<coa>"
_FORCING = 'start: TAG\nTAG: "<" /co{1}a/ ">"'
"""A grammar for `_FORCED` alone, of the constructs that `protocol/constrain.py` uses."""
_LLGUIDANCE = "%llguidance {}\n"
"""Says whose Lark it is. vLLM left to itself prefers xgrammar, which reads our grammars too but is
too slow under them; it refuses this line, and vLLM then takes llguidance."""
_STOPS = 4
"""Stop strings that every server takes; some take no more."""
LOWEST = -9999.0
"""Stands for a probability that was rounded to zero; vLLM uses the same number."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request."""

    prompt: list[int]
    sampling: Sampling
    limit: int
    """Most tokens to sample: the caller's limit and the room in the context."""
    on_text: OnText | None = None


class Dialect(Protocol):
    """One way to ask a server for a turn."""

    exact: bool
    """The ids are those the server sampled; otherwise they are the text, encoded again."""
    tempered: bool
    """Logprobs are of the distribution sampled from; otherwise before temperature, or unknown."""

    def constrains(self) -> bool:
        """Whether the server samples under a grammar; the first call may ask it."""

    async def complete(self, turn: Turn) -> Completion: ...


class TokenCompletions:
    """/v1/completions with `return_token_ids` (vLLM).

    A constraint is sent as `structured_outputs.grammar`. The logprobs are then over the allowed
    tokens, as `Completion` has them; the probability that these had together is not told by the
    server, so `allowed_logmass` is None.
    """

    exact = True

    def __init__(self, transport: Transport, model: str, codec: TextCodec, tempered: bool) -> None:
        self._transport, self._codec = transport, codec
        self.model = model
        """Where requests go: the model, or an adapter that was loaded onto it."""
        self._address = f"{transport.api}/completions"
        self._ends = codec.end_ids() if isinstance(codec, Codec) else []
        self._constrains: bool | None = None
        self.tempered = tempered

    @classmethod
    def probe(cls, transport: Transport, model: str, codec: TextCodec) -> TokenCompletions | None:
        """Ask for one token; the answer must repeat the prompt's ids and give one id."""
        ids = codec.encode(PROBE)
        found = cls(transport, model, codec, tempered=False)
        first = found._probe_once(ids, 1.0)
        if first is None or first.get("prompt_token_ids") != ids:
            return None
        try:
            taken, _ = _ids_and_logprobs(first)
        except EngineError:
            return None
        if not taken:
            return None
        found.tempered = _differ(first, found._probe_once(ids, 2.0))
        return found

    def _probe_once(self, ids: list[int], temperature: float) -> dict[str, Any] | None:
        body = self._body(Turn(ids, Sampling(temperature=temperature), 1))
        return _choice(offered(self._transport, self._address, body))

    def constrains(self) -> bool:
        """Ask once for a text that only a grammar can bring about; blocks for that request."""
        if self._constrains is None:
            body = self._body(Turn(self._codec.encode(PROBE), Sampling(constraint=_FORCING), 16))
            choice = _choice(offered(self._transport, self._address, body)) or {}
            self._constrains = choice.get("text") == _FORCED
        return self._constrains

    def _body(self, turn: Turn) -> dict[str, Any]:
        """Every setting is sent: a server's defaults come from the model's own files."""
        sampling = turn.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": turn.prompt,
            "max_tokens": turn.limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": sampling.key,
            "logprobs": 1,
            "return_token_ids": True,
            "include_stop_str_in_output": True,
            "stop_token_ids": self._ends,
        }
        if sampling.constraint:
            body["structured_outputs"] = {"grammar": _LLGUIDANCE + sampling.constraint}
        return body | ({"stop": list(sampling.stop)} if sampling.stop else {})

    async def complete(self, turn: Turn) -> Completion:
        answer = await self._post(turn)
        choice = _choice(answer)
        if choice is None:
            raise EngineError(f"{self._transport.api}: the answer has no choice in it.")
        count_usage(self._transport, answer)
        ids, logprobs = _ids_and_logprobs(choice)
        finish = self._finish(choice, ids, turn.sampling.stop)
        if turn.on_text is not None and (text := self._codec.decode(ids)):
            turn.on_text(text)
        return Completion(ids, logprobs, finish)

    async def _post(self, turn: Turn) -> Any:
        try:
            return await self._transport.post(self._address, self._body(turn))
        except Refused as error:
            count = len(turn.sampling.stop)
            if error.status == 400 and count > _STOPS and "stop" in str(error):
                raise EngineError(
                    f"{self._transport.api}: the server refused {count} stop strings. "
                    f"Start vLLM with VLLM_MAX_STOP_STRINGS={count} or more in its environment. "
                    f"{error}"
                ) from error
            raise

    def _finish(self, choice: Mapping[str, Any], ids: list[int], stops: tuple[str, ...]) -> Finish:
        reason = choice.get("finish_reason")
        if reason == "length":
            return "length"
        if reason != "stop":
            raise EngineError(f"{self._transport.api}: the server ended with reason {reason!r}.")
        if "stop_reason" in choice:  # the stop string; None or an id for an end of sequence
            return "stop" if isinstance(choice["stop_reason"], str) else "eos"
        return "stop" if ids and completes_stop(self._codec.decode, ids, stops) else "eos"


def count_usage(transport: Transport, answer: Mapping[str, Any]) -> None:
    found = answer.get("usage")
    if not isinstance(found, dict):
        return
    usage, details = transport.usage, found.get("prompt_tokens_details") or {}
    usage.prompt_tokens += int(found.get("prompt_tokens") or 0)
    usage.completion_tokens += int(found.get("completion_tokens") or 0)
    usage.cached_tokens += int(details.get("cached_tokens") or 0)


def _choice(answer: Any) -> dict[str, Any] | None:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    found: dict[str, Any] = choices[0]
    return found


def _ids_and_logprobs(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    ids = choice.get("token_ids")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(ids, list) or not isinstance(logprobs, list) or len(ids) != len(logprobs):
        found = [len(x) if isinstance(x, list) else x for x in (ids, logprobs)]
        raise EngineError(f"Found {found[0]} token ids and {found[1]} logprobs, expected as many.")
    return [int(i) for i in ids], [LOWEST if p is None else float(p) for p in logprobs]


def _differ(first: Mapping[str, Any], second: Mapping[str, Any] | None) -> bool:
    """Whether the best token's logprob moves with the temperature; a raw one does not."""
    one, two = _best(first), _best(second or {})
    return one is not None and two is not None and abs(one - two) > 0.05


def _best(choice: Mapping[str, Any]) -> float | None:
    tops = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
    return max((float(value) for value in tops[0].values()), default=None)
