"""Which tokenizer a server's model has: ours to read, or the server's own to ask.

Token ids mean something only with the right tokenizer, so it is never guessed: it is named by the
user (`tokenizer=` or COA_TOKENIZER), read from the folder the server says it loaded (when that
folder is on this machine), or asked of the server. A named tokenizer is compared with the server's
where that is possible.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from coa.engines.base import TextCodec
from coa.engines.codec import Codec
from coa.engines.store import BASE, is_pulled, model_folder, resolve
from coa.engines.transport import Transport, offered
from coa.errors import ModelError

TOKENIZER_NAME = "COA_TOKENIZER"
_SAMPLE = "<b>A caf\u00e9 in Z\u00fcrich: 3,141 steps.</b>\n\n<i>yes</i>"
_SYSTEM, _USER = "\ue000system\ue001", "\ue000user\ue001"


class ServerCodec:
    """Text to ids and back by a llama.cpp server's /tokenize, /detokenize and /apply-template.

    It can leave special tokens unread (`parse_special`), which the rest of coa depends on: a page
    must not be able to close the model's turn. Calls block for about a millisecond each.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._pieces: tuple[list[int], list[int], list[int]] | None = None
        self._is_special = lru_cache(maxsize=None)(self._look_up_special)

    @classmethod
    def probe(cls, transport: Transport) -> ServerCodec | None:
        """The codec, if the server has these paths and text survives the way there and back."""
        codec = cls(transport)
        body = {"content": _SAMPLE, "parse_special": False}
        answer = offered(transport, f"{transport.root}/tokenize", body)
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            return None
        answer = offered(transport, f"{transport.root}/detokenize", {"tokens": ids})
        same = isinstance(answer, dict) and answer.get("content") == _SAMPLE
        return codec if same else None

    def encode(self, text: str) -> list[int]:
        return self._tokenize(text, markup=False)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        raise ModelError("A server's tokenizer gives no offsets; pass tokenizer=.")

    def decode(self, ids: Sequence[int]) -> str:
        plain = [i for i in ids if not self._is_special(i)]
        return self._detokenize(plain) if plain else ""

    def encode_prompt(self, system: str, user: str) -> list[int]:
        if self._pieces is None:
            self._pieces = self._split_template()
        before, between, after = self._pieces
        return [*before, *self.encode(system), *between, *self.encode(user), *after]

    def _split_template(self) -> tuple[list[int], list[int], list[int]]:
        messages = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": _USER},
        ]
        address = f"{self._transport.root}/apply-template"
        rendered = str(self._transport.ask(address, {"messages": messages}).get("prompt", ""))
        head, found_user, tail = rendered.partition(_USER)
        before, found_system, between = head.partition(_SYSTEM)
        if not found_user or not found_system:
            raise ModelError(
                "The server's chat template does not show the system's and the user's message. "
                "Pass tokenizer= (a model folder)."
            )
        first, second, third = (
            self._tokenize(part, markup=True) for part in (before, between, tail)
        )
        return first, second, third

    def _tokenize(self, text: str, *, markup: bool) -> list[int]:
        if not text:
            return []
        body = {"content": text, "add_special": False, "parse_special": markup}
        ids: list[int] = self._transport.ask(f"{self._transport.root}/tokenize", body)["tokens"]
        return ids

    def _detokenize(self, ids: Sequence[int]) -> str:
        body = {"tokens": list(ids)}
        return str(self._transport.ask(f"{self._transport.root}/detokenize", body)["content"])

    def _look_up_special(self, token: int) -> bool:
        """An id is special when its text, read as plain text, is other ids."""
        text = self._detokenize([token])
        marked = len(text) > 2 and text[0] in "<[" and text[-1] in ">]"
        return (not text) or (marked and self._tokenize(text, markup=False) != [token])


def named_codec(name: str) -> Codec:
    """The codec of `tokenizer=`: a folder, or a reference to a model of ours."""
    folder = Path(name)
    if folder.is_dir():
        return Codec.from_folder(folder)
    try:
        source = resolve(name)
    except ModelError as exc:
        raise ModelError(f"tokenizer {name!r} is no folder and no model: {exc}") from exc
    if source.kind != "local":
        raise ModelError(f"tokenizer {name!r}: expected a model folder, or {BASE!r}, or hf:...")
    return Codec.from_folder(model_folder(source))


def choose_codec(
    transport: Transport, entry: dict[str, Any], tokenizer: str | None
) -> tuple[TextCodec, bool]:
    """The codec, and whether it is the model's own; a stand-in only counts tokens."""
    name = tokenizer or os.environ.get(TOKENIZER_NAME)
    served = ServerCodec.probe(transport)
    if name:
        codec = named_codec(name)
        if served is not None and served.encode(_SAMPLE) != codec.encode(_SAMPLE):
            raise ModelError(f"tokenizer {name!r} is not the one of the model that is served.")
        return codec, True
    root = entry.get("root")
    if isinstance(root, str) and (Path(root) / "tokenizer.json").is_file():
        return Codec.from_folder(Path(root)), True
    if served is not None:
        return served, True
    if is_pulled():
        return named_codec(BASE), False
    raise ModelError(
        f"{transport.api}: the server has no tokenizer to ask. "
        f"Pass tokenizer= or set {TOKENIZER_NAME} (a model folder)."
    )
