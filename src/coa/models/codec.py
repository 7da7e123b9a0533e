"""Codec: text to ids and back, with the chat template, without transformers.

Two rules make it safe for text that somebody else wrote. Plain text never becomes a special token:
`<|im_end|>` inside a web page is seven ordinary tokens. And a chat prompt is built from pieces: the
template is rendered around sentinels, split there, and only its own pieces may hold special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from coa.errors import MissingExtra, ModelError

_ENDS = ("<|im_end|>", "<|endoftext|>")
_SYSTEM = "\ue000system\ue001"
_USER = "\ue000user\ue001"
Offsets = list[tuple[int, int]]


class Codec:
    """The tokenizer and the chat template of one model."""

    def __init__(self, tokenizer: Tokenizer, template: str, names: dict[str, str]) -> None:
        self._markup = tokenizer
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        for each in (self._markup, self._plain):
            each.no_padding()
            each.no_truncation()
        self._plain.encode_special_tokens = True
        self._template, self._names = template, names
        self._prompt_pieces: tuple[list[int], list[int], list[int]] | None = None
        self._system_in_user = False

    @classmethod
    def from_folder(cls, folder: Path) -> Codec:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja of a model folder."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder}: found no tokenizer.json, expected a model folder.")
        tokenizer = Tokenizer.from_file(str(path))
        config = _read_json(folder / "tokenizer_config.json")
        names = {key: _token_text(config.get(key)) for key in ("bos_token", "eos_token")}
        template = template_text(folder, config)
        if not template:
            raise ModelError(
                f"{folder}: the tokenizer has no chat template. "
                "Use an instruct model, or add a chat_template.jinja to the folder."
            )
        return cls(tokenizer, template, names)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._markup

    def token_id(self, token: str) -> int | None:
        found: int | None = self._markup.token_to_id(token)
        return found

    def end_ids(self) -> list[int]:
        """Tokens that end a turn, also where a configuration does not name them."""
        return [found for token in _ENDS if (found := self.token_id(token)) is not None]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Ids of plain text, and the characters [start, end) each of them covers."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._plain.decode(list(ids), skip_special_tokens=True)
        return text

    def encode_prompt(self, system: str, user: str) -> list[int]:
        """Ids of a chat prompt that ends where the assistant's text begins."""
        if self._prompt_pieces is None:
            self._prompt_pieces = self._split_template()
        before, between, after = self._prompt_pieces
        if self._system_in_user:
            joined = f"{system}\n\n{user}" if system else user
            return [*before, *self.encode(joined), *after]
        return [*before, *self.encode(system), *between, *self.encode(user), *after]

    def _split_template(self) -> tuple[list[int], list[int], list[int]]:
        messages = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": _USER},
        ]
        rendered = self._render(messages)
        if rendered is None or _SYSTEM not in rendered:  # a template without a system role
            self._system_in_user = True
            rendered = self._render(messages[1:])
        if rendered is None or rendered.count(_USER) != 1:
            raise ModelError("The model's chat template does not show the user's message once.")
        head, _, tail = rendered.partition(_USER)
        before, _, between = head.partition(_SYSTEM)
        return self._encode_markup(before), self._encode_markup(between), self._encode_markup(tail)

    def _encode_markup(self, text: str) -> list[int]:
        ids: list[int] = self._markup.encode(text, add_special_tokens=False).ids
        return ids

    def _render(self, messages: list[dict[str, str]]) -> str | None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as exc:
            raise MissingExtra("A chat template", "train") from exc

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", "coa.models.generation_tag.GenerationTag"],
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: ""
        try:
            template = environment.from_string(self._template)
            return template.render(messages=messages, add_generation_prompt=True, **self._names)
        except TemplateError:
            return None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _token_text(value: Any) -> str:
    """A token is written as a string or as {"content": ...}."""
    return str(value["content"]) if isinstance(value, dict) else str(value or "")


def template_text(folder: Path, config: dict[str, Any]) -> str:
    """The chat template of a model folder, of several the default one; empty where it has none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return str(template or "")
