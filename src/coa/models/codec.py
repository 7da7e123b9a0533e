"""Codec: text to ids and back, with the chat template, without transformers.

Two rules make it safe for text that somebody else wrote. Plain text never becomes a special token:
`<|im_end|>` inside a web page is seven ordinary tokens. And a chat prompt is built from pieces: the
template is rendered around sentinels, split there, and only its own pieces may hold special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from coa.errors import CoaError, MissingExtra, ModelError
from coa.models.references import model_folder, resolve
from coa.models.weights import read_json, template_text, token_text

_ENDS = ("<|im_end|>", "<|endoftext|>")
_SYSTEM = "\ue000system\ue001"
_USER = "\ue000user\ue001"
Offsets = list[tuple[int, int]]


class Codec:
    """The tokenizer and the chat template of one model."""

    def __init__(self, tokenizer: Tokenizer, template: str, names: dict[str, str]) -> None:
        self._template, self._names, self._plain = template, names, tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = False
        with suppress(CoaError):  # whoever wants a prompt is told
            self._frame_ids = self._encode_frame()
        tokenizer.encode_special_tokens = True

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """To which a special token is one; few need it, and reading it takes a while."""
        made = Tokenizer.from_str(self._plain.to_str())
        made.encode_special_tokens = False
        return made

    @classmethod
    def from_folder(cls, folder: Path) -> Codec:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja of a model folder."""
        path, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
        if not path.is_file():
            raise ModelError(f"{folder}: found no tokenizer.json, expected a model folder.")
        config = read_json(settings) if settings.is_file() else {}
        template = template_text(folder, config)
        if not template:
            raise ModelError(
                f"{folder}: the tokenizer has no chat template. "
                "Use an instruct model, or add a chat_template.jinja to the folder."
            )
        names = {key: token_text(config.get(key)) for key in ("bos_token", "eos_token")}
        return cls(Tokenizer.from_file(str(path)), template, names)

    def end_ids(self) -> list[int]:
        """Tokens that end a turn, also where a configuration does not name them."""
        found = map(self._plain.token_to_id, _ENDS)
        return [each for each in found if each is not None]

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
        self.frame  # noqa: B018  raises where there is none
        before, between, after = self._frame_ids
        if between is None:
            joined = f"{system}\n\n{user}" if system else user
            return [*before, *self.encode(joined), *after]
        return [*before, *self.encode(system), *between, *self.encode(user), *after]

    @cached_property
    def frame(self) -> tuple[str, str | None, str]:
        """What the chat template writes before, between and after system text and question. Nothing
        stands between where it has no system role: the system text then begins the question."""
        user = [{"role": "user", "content": _USER}]
        rendered = self._render([{"role": "system", "content": _SYSTEM}, *user]) or ""
        has_system = _SYSTEM in rendered
        if not has_system:
            rendered = self._render(user) or ""
        if rendered.count(_USER) != 1:
            raise ModelError("The model's chat template does not show the user's message once.")
        head, _, after = rendered.partition(_USER)
        before, _, between = head.partition(_SYSTEM)
        return before, between if has_system else None, after

    def _encode_frame(self) -> tuple[list[int], list[int] | None, list[int]]:
        def marked(text: str) -> list[int]:
            ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
            return ids

        before, between, after = self.frame
        return marked(before), None if between is None else marked(between), marked(after)

    def _render(self, messages: list[dict[str, str]]) -> str | None:
        """The text of a chat; None where the template refuses it."""
        try:
            from jinja2 import TemplateError, nodes
            from jinja2.ext import Extension
            from jinja2.parser import Parser
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as exc:
            raise MissingExtra("A chat template", "train") from exc

        class GenerationTag(Extension):
            """{% generation %}: trainers read a mask off it, we show its body."""

            tags = {"generation"}  # noqa: RUF012  jinja2 wants a set

            def parse(self, parser: Parser) -> list[nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: ""
        try:
            template = environment.from_string(self._template)
            return template.render(messages=messages, add_generation_prompt=True, **self._names)
        except TemplateError:
            return None


def codec_of(ref: str) -> Codec:
    """The tokenizer and chat template of a local model; nothing else of it is loaded."""
    source = resolve(ref)
    if source.kind != "local":
        raise ModelError(
            f"{ref!r} has no tokenizer here. Export for a local model: smollm2-135m or hf:FOLDER."
        )
    return Codec.from_folder(model_folder(source))
