"""The ways to ask a server for one turn, from the most exact to the least.

`TokenCompletions` (vLLM) and `LlamaCppCompletions` take the prompt as token ids and return every
sampled id with its logprob, those of the stop string and of the end of sequence included.
`TextApi` exchanges text: it encodes what the server says again, which can give other ids than those
sampled, and there are no logprobs, so nothing trained from it is on-policy.

Whether a server speaks one of them is found by a probe, never assumed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from coa.engines.base import Completion, Finish, OnText, Sampling, TextCodec
from coa.engines.transport import ServerRefused, Transport
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


class ServerApi:
    """One way to ask a server for a turn."""

    exact = True
    """The ids are those the server sampled; otherwise they are the text, encoded again."""
    tempered = True
    """Logprobs are of the distribution sampled from; otherwise before temperature, or unknown."""
    path = "{api}/completions"

    def __init__(self, transport: Transport, model: str, codec: TextCodec) -> None:
        self._transport, self._codec = transport, codec
        self._address = self.path.format(api=transport.api, root=transport.root)
        self.model = model
        """Where requests go: the model, or an adapter that was loaded onto it."""

    def probe(self) -> bool:
        """Whether the server speaks it; asks for one token."""
        raise NotImplementedError

    def constrains(self) -> bool:
        """Whether the server samples under a grammar; the first call may ask it."""
        return False

    def remember(self, ids: list[int], system: str, user: str) -> None:
        """Note which messages a prompt's ids stand for, where the server wants messages."""

    async def complete(self, turn: Turn) -> Completion:
        """Ask for a turn."""
        raise NotImplementedError

    def _settings(self, turn: Turn) -> dict[str, Any]:
        """What every server calls the same."""
        sampling = turn.sampling
        return {
            "model": self.model,
            "prompt": turn.prompt,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
        }

    def _error(self, problem: str) -> EngineError:
        return EngineError(f"{self._transport.api}: {problem}")


class TokenCompletions(ServerApi):
    """/v1/completions with `return_token_ids` (vLLM).

    A constraint is sent as `structured_outputs.grammar`. The logprobs are then over the allowed
    tokens, as `Completion` has them; the probability that these had together is not told by the
    server, so `allowed_logmass` is None.
    """

    _constrains: bool | None = None

    def probe(self) -> bool:
        """The answer must repeat the prompt's ids and give one id."""
        prompt = self._codec.encode(PROBE)
        first = self._try(Turn(prompt, Sampling(temperature=1.0), 1))
        if first.get("prompt_token_ids") != prompt:
            return False
        try:
            ids, _ = _ids_and_logprobs(first)
        except EngineError:
            return False
        second = self._try(Turn(prompt, Sampling(temperature=2.0), 1))
        self.tempered = _differ(first, second)
        return bool(ids)

    def constrains(self) -> bool:
        """Ask once for a text that only a grammar can bring about; blocks for that request."""
        if self._constrains is None:
            turn = Turn(self._codec.encode(PROBE), Sampling(constraint=_FORCING), 16)
            self._constrains = self._try(turn).get("text") == _FORCED
        return self._constrains

    def _try(self, turn: Turn) -> Mapping[str, Any]:
        return _choice(self._transport.probe(self._address, self._body(turn)))

    def _body(self, turn: Turn) -> dict[str, Any]:
        """Every setting is sent: a server's defaults come from the model's own files."""
        sampling = turn.sampling
        body = self._settings(turn) | {
            "max_tokens": turn.limit,
            "top_k": sampling.top_k or -1,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 1,
            "return_token_ids": True,
            "include_stop_str_in_output": True,
            "stop_token_ids": self._codec.end_ids() if isinstance(self._codec, Codec) else [],
        }
        if sampling.seeded:
            body["seed"] = sampling.key
        if sampling.constraint:
            body["structured_outputs"] = {"grammar": _LLGUIDANCE + sampling.constraint}
        return body

    async def complete(self, turn: Turn) -> Completion:
        stops = turn.sampling.stop
        try:
            answer = await self._transport.post(self._address, self._body(turn))
        except ServerRefused as error:
            if error.status == 400 and len(stops) > _STOPS and "stop" in str(error):
                raise self._error(
                    f"the server refused {len(stops)} stop strings. Start vLLM with "
                    f"VLLM_MAX_STOP_STRINGS={len(stops)} or more in its environment. {error}"
                ) from error
            raise
        choice = _choice(answer)
        if not choice:
            raise self._error("the answer has no choice in it.")
        ids, logprobs = _ids_and_logprobs(choice)
        if turn.on_text is not None and (text := self._codec.decode(ids)):
            turn.on_text(text)
        return Completion(ids, logprobs, self._finish(choice))

    def _finish(self, choice: Mapping[str, Any]) -> Finish:
        reason = choice.get("finish_reason")
        if reason == "length":
            return "length"
        if reason != "stop":
            raise self._error(f"the server ended with reason {reason!r}.")
        # The stop string; None or an id for an end of sequence.
        return "stop" if isinstance(choice.get("stop_reason"), str) else "eos"


def _choice(answer: Any) -> Mapping[str, Any]:
    """The first choice of an answer; empty where there is none."""
    match answer:
        case {"choices": [dict() as choice, *_]}:
            return choice
    return {}


def _ids_and_logprobs(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    ids = choice.get("token_ids")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(ids, list) or not isinstance(logprobs, list) or len(ids) != len(logprobs):
        found = [len(x) if isinstance(x, list) else x for x in (ids, logprobs)]
        raise EngineError(f"Found {found[0]} token ids and {found[1]} logprobs, expected as many.")
    return [int(i) for i in ids], [LOWEST if p is None else float(p) for p in logprobs]


def _differ(*choices: Mapping[str, Any]) -> bool:
    """Whether the best token's logprob moves with the temperature; a raw one does not."""
    best = []
    for choice in choices:
        tops = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
        best += sorted(map(float, tops[0].values()))[-1:]
    return len(best) == 2 and abs(best[0] - best[1]) > 0.05


_BEGUN = "one, two,"
_EXTRAS = {"include_stop_str_in_output": True}
_REMEMBERED = 4096
"""Prompts whose messages are kept."""


class TextApi(ServerApi):
    """/v1/completions with the chat template written out by us, or, with `chat`,
    /v1/chat/completions with the assistant's message continued turn after turn.

    A special token that is spelled out in text which somebody else wrote is broken up before it is
    sent: a page must not close the model's turn.
    """

    exact = tempered = False

    def __init__(self, transport: Transport, model: str, codec: TextCodec, *, chat: bool) -> None:
        self.chat, self.path = chat, "{api}/chat/completions" if chat else self.path
        super().__init__(transport, model, codec)
        self._extras: dict[str, Any] = {}
        self._repeats = False
        """The answer begins with the message that was to be continued (llama.cpp)."""
        self._prompts: dict[tuple[int, ...], tuple[str, str]] = {}

    def probe(self) -> bool:
        """A server that refuses `continue_final_message` cannot continue a chain."""
        opening = _messages("Count.", "To three.", _BEGUN) if self.chat else {"prompt": "The"}
        body = {"model": self.model, "max_tokens": 1, "temperature": 0.0, **opening}
        for extras in (_EXTRAS, {}):
            text = _text(self._transport.probe(self._address, body | extras))
            if text is not None:
                self._extras, self._repeats = extras, self.chat and text.startswith(_BEGUN)
                return True
        return False

    def remember(self, ids: list[int], system: str, user: str) -> None:
        self._prompts[tuple(ids)] = (system, user)
        if len(self._prompts) > _REMEMBERED:
            del self._prompts[next(iter(self._prompts))]

    async def complete(self, turn: Turn) -> Completion:
        sampling, special = turn.sampling, special_tokens(self._codec).values()
        # Top-k, min-p and stop strings are sent only where they are asked for: not all know them.
        body = {name: value for name, value in self._settings(turn).items() if value}
        body |= {"temperature": sampling.temperature, "max_tokens": turn.limit}
        body |= {"seed": sampling.key % (1 << 31)} if sampling.seeded else {}
        body |= self._extras
        known = self._recall(turn.prompt)
        begun = known[2] if known else ""
        if not self.chat:
            body["prompt"] = spell(self._codec, turn.prompt)
        elif known is None:
            raise EngineError("A server that wants messages needs a prompt made by encode_prompt.")
        else:
            system, user, begun = (break_up(part, special) for part in known)
            del body["prompt"]
            body |= _messages(system, user, begun)
        answer = await self._transport.post(self._address, body)
        text = _text(answer)
        if text is None:
            raise self._error("the answer has no text in it.")
        text = text.removeprefix(begun if self._repeats else "")
        text, finish = restore_stop(text, _choice(answer), sampling.stop, begun)
        if turn.on_text is not None and text:
            turn.on_text(text)
        ids = self._codec.encode(text)
        return Completion(ids, [0.0] * len(ids), finish)

    def _recall(self, ids: Sequence[int]) -> tuple[str, str, str] | None:
        """System, user, and the assistant's text so far, by the longest remembered prompt with
        which the ids begin; None for a prompt of the caller's own making."""
        prompt = tuple(ids)
        known = [each for each in self._prompts if prompt[: len(each)] == each]
        if not known:
            return None
        longest = max(known, key=len)
        return *self._prompts[longest], self._codec.decode(prompt[len(longest) :])


def _messages(system: str, user: str, assistant: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    if not assistant:
        return {"messages": messages}
    messages.append({"role": "assistant", "content": assistant})
    ending = {"continue_final_message": True, "add_generation_prompt": False}
    return {"messages": messages, **ending}


def _text(answer: Any) -> str | None:
    """The text of an answer, which may be empty; None where it has no place for one."""
    match _choice(answer):
        case {"message": {"content": (str() | None) as text}}:
            return text or ""
        case {"text": (str() | None) as text}:
            return text or ""
    return None


def restore_stop(
    text: str, choice: Mapping[str, Any], stops: Sequence[str], begun: str = ""
) -> tuple[str, Finish]:
    """The text with the stop string that ended it, which many servers cut off.

    A server that does not name the string leaves one clue: the tag `<x>` that is still open, here
    or in what was `begun`, is the one whose `</x>` was cut.
    """
    if choice.get("finish_reason") == "length":
        return text, "length"
    if text.rstrip().endswith(tuple(stops)):
        return text, "stop"
    whole = begun + text
    if "stop_reason" in choice:
        cut = [stop for stop in stops if stop == choice["stop_reason"]]
    else:
        opening = {stop: stop.replace("</", "<", 1) for stop in stops if stop.startswith("</")}
        cut = [stop for stop, tag in opening.items() if whole.rfind(tag) > whole.rfind(stop)]
    return (text + cut[0], "stop") if len(cut) == 1 else (text, "eos")


def special_tokens(codec: TextCodec) -> dict[int, str]:
    """How the model's special tokens are spelled, by id, where we can know it."""
    if not isinstance(codec, Codec):
        return {}
    added = codec.tokenizer.get_added_tokens_decoder().items()
    return {token_id: token.content for token_id, token in added if token.special}


def break_up(text: str, special: Iterable[str]) -> str:
    """Put a space into every special token that is spelled out in plain text."""
    for token in special:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def spell(codec: TextCodec, ids: Sequence[int]) -> str:
    """The text of a prompt: special ids as their names, plain text with none in it."""
    names = special_tokens(codec)
    parts: list[str] = []
    for is_special, run in groupby(ids, names.__contains__):
        if is_special:
            parts += [names[token_id] for token_id in run]
        else:
            parts.append(break_up(codec.decode(list(run)), names.values()))
    return "".join(parts)


_FINISH: dict[Any, Finish] = {"word": "stop", "eos": "eos", "limit": "length"}
_ALL = 1 << 20
"""More than any vocabulary has."""
_AT_RANDOM = 0xFFFFFFFF
"""The seed that asks for none."""


class LlamaCppCompletions(ServerApi):
    """llama.cpp's own /completion.

    Streamed, because only the stream has the stop string's probabilities. Probabilities after
    sampling are asked for when there is a temperature; a greedy turn has those of the plain
    softmax. Its grammars (GBNF) have no bounded regular expressions: ours cannot be sent.

    A token that ends inside a letter (an emoji of three tokens) is counted and not shown by the
    stream. Such a turn is asked for once more, whole, for the ids, which must agree with what was
    streamed; the missing probabilities are computed from the server's full distribution.
    """

    path = "{root}/completion"

    def probe(self) -> bool:
        """No token may have been added to the prompt."""
        prompt = self._codec.encode(PROBE)
        body = self._body(Turn(prompt, Sampling(), 1)) | {"stream": False}
        match self._transport.probe(self._address, body):
            case {
                "tokens_evaluated": count,
                "tokens": [token],
                "completion_probabilities": [{"id": sampled, "logprob": _}],
            }:
                return bool(count == len(prompt) and token == sampled)
        return False

    def _body(self, turn: Turn) -> dict[str, Any]:
        return self._settings(turn) | {
            "n_predict": turn.limit,
            "repeat_penalty": 1.0,
            "samplers": ["temperature", "top_k", "top_p", "min_p"],
            "seed": turn.sampling.key % _AT_RANDOM if turn.sampling.seeded else _AT_RANDOM,
            "n_probs": 1,
            "post_sampling_probs": turn.sampling.temperature > 0,
            "return_tokens": True,
            "cache_prompt": True,
            "stream": True,
        }

    async def complete(self, turn: Turn) -> Completion:
        told: dict[int, tuple[int, float]] = {}
        last: dict[str, Any] = {}
        text, shown = "", 0

        def show(piece: str) -> None:
            """Pass text on; after a new attempt, only what was not shown before."""
            nonlocal text, shown
            text += piece
            if turn.on_text is not None and len(text) > shown:
                turn.on_text(text[shown:])
                shown = len(text)

        events = self._transport.events(self._address, self._body(turn))
        async with aclosing(events):
            async for event in events:
                if event is None:
                    told, last, text = {}, {}, ""
                    continue
                last = event
                for entry in event.get("completion_probabilities") or ():
                    told[int(event["tokens_predicted"]) - 1] = (entry["id"], _logprob(entry))
                show(event.get("content") or "")
        reason, count = last.get("stop_type"), last.get("tokens_predicted")
        if reason not in _FINISH or not isinstance(count, int):
            raise self._error(f"the stream ended without saying why; found {reason!r}.")
        show(last.get("stopping_word") or "")
        if len(told) < count:
            await self._fill_in(turn, told, count)
        ids, logprobs = zip(*(told[at] for at in range(count)), strict=True) if count else ((), ())
        return Completion(list(ids), list(logprobs), _FINISH[reason])

    async def _fill_in(self, turn: Turn, told: dict[int, tuple[int, float]], count: int) -> None:
        """Add the tokens that the stream did not show."""
        body = self._body(turn) | {"stream": False, "n_predict": count, "stop": []}
        ids = (await self._transport.post(self._address, body)).get("tokens")
        agree = isinstance(ids, list) and len(ids) == count
        if not agree or any(ids[position] != token for position, (token, _) in told.items()):
            raise self._error(
                f"the server showed {len(told)} of {count} tokens, and sampled others when it was "
                "asked for all of them."
            )
        for position in range(count):
            if position not in told:
                prompt = [*turn.prompt, *ids[:position]]
                told[position] = ids[position], await self._score(prompt, ids[position], turn)

    async def _score(self, prompt: list[int], token: int, turn: Turn) -> float:
        """The logprob of a token; what is sampled meanwhile is forced and thrown away."""
        plain = self._codec.encode(PROBE)[-1]  # a token that ends a letter
        body = self._body(Turn(prompt, Sampling(), 1))
        body |= {"stream": False, "n_probs": _ALL, "logit_bias": [[plain, 1000.0]]}
        answer = await self._transport.post(self._address, body)
        entries = (answer.get("completion_probabilities") or [{}])[0].get("top_logprobs") or ()
        raw = {int(entry["id"]): float(entry["logprob"]) for entry in entries}
        return sampled_logprob(raw, token, turn.sampling)


def sampled_logprob(raw: Mapping[int, float], token: int, sampling: Sampling) -> float:
    """A token's logprob after temperature, top-k, top-p and min-p, from all the plain ones."""
    if sampling.temperature <= 0:
        sampling = Sampling(temperature=1.0)
    order = sorted(raw.items(), key=lambda pair: -pair[1])
    order = order[: sampling.top_k or None]
    masses = [math.exp(logprob / sampling.temperature) for _, logprob in order]
    if sampling.top_p < 1:
        reached = list(accumulate(masses))
        masses = masses[: 1 + bisect_left(reached, sampling.top_p * reached[-1])]
    masses = [mass for mass in masses if mass >= sampling.min_p * masses[0]]
    chosen = dict(order[: len(masses)]).get(token)
    return LOWEST if chosen is None else chosen / sampling.temperature - math.log(sum(masses))


def _logprob(entry: Mapping[str, Any]) -> float:
    if "logprob" in entry:
        return max(LOWEST, float(entry["logprob"]))
    probability = float(entry["prob"])
    return math.log(probability) if probability > 0 else LOWEST
