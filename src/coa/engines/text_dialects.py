"""How a server is asked that speaks only text: what it says is encoded again, and that is said.

Encoding sampled text again can give other ids than those sampled, and there are no logprobs for
them, so nothing trained from here is on-policy. Both dialects send text that somebody else wrote,
so a special token spelled out in it is broken up first: a page must not close the model's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coa.engines.base import Completion, Finish, TextCodec
from coa.engines.codec import Codec
from coa.engines.dialects import Turn, count_usage
from coa.engines.transport import Transport, offered
from coa.errors import EngineError

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
