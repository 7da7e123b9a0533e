"""How a server is asked for token ids: /v1/completions with `return_token_ids`, as vLLM has it.

A dialect takes the prompt as ids and gives back every sampled id with its logprob, the stop
string's and the end of sequence's included. Whether a server speaks it is found by a probe, never
assumed. llama.cpp's is in `native.py`, those that exchange only text in `text_dialects.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from coa.engines.base import Completion, Finish, OnText, Sampling, TextCodec, completes_stop
from coa.engines.transport import ServerRefused, Transport, offered
from coa.errors import EngineError
from coa.models.codec import Codec

PROBE = "The three most common words of the language are"
_FORCED = "<coa>"
_FORCING = 'start: TAG\nTAG: "<" /co{1}a/ ">"'
"""A grammar for `_FORCED` alone, of the constructs that `grammar/constrain.py` uses."""
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
        except ServerRefused as error:
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


# ------------------------------------------------------------------------------------------------
# How a server is asked that speaks only text: what it says is encoded again, and that is said.
#
# Encoding sampled text again can give other ids than those sampled, and there are no logprobs for
# them, so nothing trained from here is on-policy. Both dialects send text that somebody else
# wrote, so a special token spelled out in it is broken up first: a page must not close the
# model's turn.
# ------------------------------------------------------------------------------------------------


Recall = Callable[[Sequence[int]], tuple[str, str, str]]
"""Prompt ids -> system, user, and the assistant's text so far; EngineError when not known."""
_BEGUN = "one, two,"
_EXTRAS = {"include_stop_str_in_output": True}


class TextCompletions:
    """/v1/completions with the prompt as text, the chat template written out by us."""

    exact = tempered = False

    def __init__(self, transport: Transport, model: str, codec: Codec, recall: Recall) -> None:
        self._transport, self._model, self._codec = transport, model, codec
        self._recall = recall
        self._address = f"{transport.api}/completions"
        self._extras: dict[str, Any] = {}

    @classmethod
    def probe(
        cls, transport: Transport, model: str, codec: Codec, recall: Recall
    ) -> TextCompletions | None:
        found = cls(transport, model, codec, recall)
        plain = {"model": model, "prompt": "The", "max_tokens": 1, "temperature": 0.0}
        for extras in (_EXTRAS, {}):
            answer = offered(transport, found._address, plain | extras)
            if _text(answer) is not None:
                found._extras = extras
                return found
        return None

    def constrains(self) -> bool:
        return False

    async def complete(self, turn: Turn) -> Completion:
        body = _settings(self._model, turn) | self._extras
        body["prompt"] = spell(self._codec, turn.prompt)
        answer = await self._transport.post(self._address, body)
        try:
            begun = self._recall(turn.prompt)[2]
        except EngineError:  # a prompt of the caller's own making
            begun = ""
        return _completion(self._transport, self._codec, answer, turn, begun)


class ChatContinuation:
    """/v1/chat/completions, the assistant's message continued turn after turn."""

    exact = tempered = False

    def __init__(self, transport: Transport, model: str, codec: TextCodec, recall: Recall) -> None:
        self._transport, self._model, self._codec = transport, model, codec
        self._recall = recall
        self._address = f"{transport.api}/chat/completions"
        self._extras: dict[str, Any] = {}
        self._repeats = False
        """The answer begins with the message that was to be continued (llama.cpp)."""

    @classmethod
    def probe(
        cls, transport: Transport, model: str, codec: TextCodec, recall: Recall
    ) -> ChatContinuation | None:
        """A server that refuses `continue_final_message` cannot continue a chain."""
        found = cls(transport, model, codec, recall)
        for extras in (_EXTRAS, {}):
            body = {"model": model, "max_tokens": 1, "temperature": 0.0, **extras}
            body |= _messages("Count.", "To three.", _BEGUN)
            text = _text(offered(transport, found._address, body))
            if text is not None:
                found._extras, found._repeats = extras, text.startswith(_BEGUN)
                return found
        return None

    def constrains(self) -> bool:
        return False

    async def complete(self, turn: Turn) -> Completion:
        special = special_texts(self._codec)
        system, user, begun = (break_up(part, special) for part in self._recall(turn.prompt))
        body = _settings(self._model, turn) | self._extras | _messages(system, user, begun)
        answer = await self._transport.post(self._address, body)
        repeated = begun if self._repeats else ""
        return _completion(self._transport, self._codec, answer, turn, begun, repeated)


def _messages(system: str, user: str, assistant: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    if not assistant:
        return {"messages": messages}
    messages.append({"role": "assistant", "content": assistant})
    ending = {"continue_final_message": True, "add_generation_prompt": False}
    return {"messages": messages, **ending}


def _settings(model: str, turn: Turn) -> dict[str, Any]:
    """Only what every server knows; a top-k or min-p that was asked for is sent, maybe refused."""
    sampling = turn.sampling
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": turn.limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.key % (1 << 31),
    }
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if sampling.min_p:
        body["min_p"] = sampling.min_p
    return body | ({"stop": list(sampling.stop)} if sampling.stop else {})


def _text(answer: Any) -> str | None:
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (TypeError, KeyError, IndexError):
        return None
    return text if isinstance(text, str) else "" if text is None else None


def _completion(
    transport: Transport, codec: TextCodec, answer: Any, turn: Turn, begun: str, repeated: str = ""
) -> Completion:
    text = _text(answer)
    if text is None:
        raise EngineError(f"{transport.api}: the answer has no text in it.")
    count_usage(transport, answer)
    text = text.removeprefix(repeated)
    text, finish = restore_stop(text, answer["choices"][0], turn.sampling.stop, begun)
    if turn.on_text is not None and text:
        turn.on_text(text)
    ids = codec.encode(text)
    return Completion(ids, [0.0] * len(ids), finish)


def restore_stop(
    text: str, choice: Mapping[str, Any], stops: Sequence[str], begun: str = ""
) -> tuple[str, Finish]:
    """The text with the stop string that ended it, which many servers cut off.

    A server that does not name the string leaves one clue: the tag `<x>` that is still open, here
    or in what was `begun`, is the one whose `</x>` was cut.
    """
    if choice.get("finish_reason") == "length":
        return text, "length"
    named = choice.get("stop_reason")
    if isinstance(named, str) and named in stops:
        return text if text.rstrip().endswith(named) else text + named, "stop"
    if any(text.rstrip().endswith(stop) for stop in stops):
        return text, "stop"
    if "stop_reason" in choice:
        return text, "eos"
    cut = [stop for stop in stops if _is_open(begun + text, stop)]
    return (text + cut[0], "stop") if len(cut) == 1 else (text, "eos")


def _is_open(text: str, stop: str) -> bool:
    opening = stop.replace("</", "<", 1)
    return opening != stop and text.rfind(opening) > text.rfind(stop)


def special_texts(codec: TextCodec) -> tuple[str, ...]:
    """How the model's special tokens are spelled, where we can know it."""
    if not isinstance(codec, Codec):
        return ()
    added = codec.tokenizer.get_added_tokens_decoder().values()
    return tuple(token.content for token in added if token.special)


def break_up(text: str, special: Sequence[str]) -> str:
    """Put a space into every special token that is spelled out in plain text."""
    for token in special:
        if token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def spell(codec: Codec, ids: Sequence[int]) -> str:
    """The text of a prompt: special ids as their names, plain text with none in it."""
    names = {
        token_id: token.content
        for token_id, token in codec.tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    parts: list[str] = []
    run: list[int] = []
    for token_id in [*ids, None]:
        if token_id is not None and token_id not in names:
            run.append(token_id)
            continue
        parts.append(break_up(codec.decode(run), tuple(names.values())) if run else "")
        run = []
        if token_id is not None:
            parts.append(names[token_id])
    return "".join(parts)


# ------------------------------------------------------------------------------------------------
# llama.cpp's own /completion: token ids in, token ids and probabilities out.
#
# Streamed, because only the stream has the stop string's probabilities. Probabilities after
# sampling are asked for when there is a temperature; a greedy turn has those of the plain
# softmax.
#
# One thing the stream keeps to itself: a token that ends inside a letter (an emoji of three
# tokens) is counted and not shown. Such a turn is asked for once more, whole, for the ids, which
# must agree with what was streamed; the missing probabilities are computed from the server's full
# distribution.
# ------------------------------------------------------------------------------------------------


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
