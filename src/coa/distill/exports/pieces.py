"""Pieces: a chain cut where training begins and ends, and the chat format around it.

A trainer of somebody else's gets its loss mask from roles, so what is one assistant turn for us is
handed over as a row of messages: `assistant` is trained, `tool` (an observation) and `mistake` (a
marked error) are shown and not trained. A chat template that writes no header between them joins
them to the one turn again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coa.distill.chain import CHAT_MARKER
from coa.engines.codec import Codec
from coa.errors import ModelError
from coa.trajectory import Author, Segment, Trajectory

Encode = Callable[[str], tuple[list[int], list[tuple[int, int]]]]

_SYSTEM, _USER = "coa:system", "coa:user"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is trained as a whole or not at all."""

    role: str
    """`assistant`, `tool` or `mistake`."""
    text: str

    @property
    def trained(self) -> bool:
        return self.role == "assistant"


def pieces(trajectory: Trajectory, encode: Encode | None = None) -> list[Piece]:
    """The chain after its prompt, cut into the longest pieces of one role.

    A token that holds a part of a mistake is not trained by our rows. With `encode` the cuts are
    put there; without it, the blank before a word is taken to belong to the word's token.
    """
    found: list[Piece] = []
    for segment in trajectory.segments:
        if segment.author is Author.PROMPT:
            continue
        for role, text in _cut(segment, encode):
            if found and found[-1].role == role:
                found[-1] = Piece(role, found[-1].text + text)
            elif text:
                found.append(Piece(role, text))
    return found


def _cut(segment: Segment, encode: Encode | None) -> Iterator[tuple[str, str]]:
    if segment.author is Author.ENV:
        yield "tool", segment.text
        return
    position = 0
    for start, end in _mistakes(segment, encode):
        yield "assistant", segment.text[position:start]
        yield "mistake", segment.text[start:end]
        position = end
    yield "assistant", segment.text[position:]


def _mistakes(segment: Segment, encode: Encode | None) -> list[tuple[int, int]]:
    """Marked spans in order, none touching another, widened to the borders of tokens."""
    if not segment.errs:
        return []
    text, spans = segment.text, segment.errs
    if encode is None:
        spans = [(max(0, start), end) for start, end in spans if start < end]
        spans = [(start - (text[start - 1 : start] == " "), end) for start, end in spans]
    else:
        ends = [end for _, end in encode(text)[1]]
        tokens = zip([0, *ends], ends, strict=False)
        spans = [t for t in tokens if any(t[0] < end and start < t[1] for start, end in spans)]
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


@dataclass(frozen=True, slots=True)
class Frame:
    """What a chat format writes before, between and after system text and question."""

    before: str = "<|im_start|>system\n"
    between: str = "<|im_end|>\n<|im_start|>user\n"
    after: str = "<|im_end|>\n<|im_start|>assistant\n"

    def prompt(self, system: str, user: str) -> str:
        return f"{self.before}{system}{self.between}{user}{self.after}"

    def template(self) -> str:
        """A Jinja chat template: one turn without headers between its pieces, of which only
        `assistant` stands in generation markers. It never ends the turn, and neither do we."""
        before, between, after = (
            json.dumps(text, ensure_ascii=False) for text in (self.before, self.between, self.after)
        )
        return (
            "{%- for message in messages -%}\n"
            "{%- if message['role'] == 'system' -%}\n"
            f"{{{{- {before} + message['content'] + {between} -}}}}\n"
            "{%- elif message['role'] == 'user' -%}\n"
            f"{{{{- message['content'] + {after} -}}}}\n"
            "{%- elif message['role'] == 'assistant' -%}\n"
            "{%- generation -%}\n"
            "{{- message['content'] -}}\n"
            "{%- endgeneration -%}\n"
            "{%- else -%}\n"
            "{{- message['content'] -}}\n"
            "{%- endif -%}\n"
            "{%- endfor -%}\n"
        )


CHATML = Frame()
"""The format of the embedded model, of Qwen and of many others."""


def is_template(text: str) -> bool:
    """Whether a chat template is one of ours, whatever its frame is."""
    before, turn, after = CHATML.template().partition("{%- elif message['role'] == 'assistant'")
    return text.startswith(before.partition("{{")[0]) and text.endswith(turn + after)


def frame_of(codec: Codec) -> Frame:
    """The chat format of a model, read off a prompt; refused when its markers are no tokens."""
    ids = codec.encode_prompt(_SYSTEM, _USER)
    text: str = codec.tokenizer.decode(ids, skip_special_tokens=False)
    before, _, rest = text.partition(_SYSTEM)
    between, found, after = rest.partition(_USER)
    if not found:
        raise ModelError(
            "the tokenizer does not give back a prompt that it encoded, so its chat format cannot "
            "be read. Use --to trl-tokens, which needs ids only."
        )
    return Frame(before, between, after)


def check_markers(codec: Codec) -> None:
    """Raise when the chat template writes a marker that the tokenizer would split into pieces.

    [INST] is ordinary text for the models that were trained with it.
    """
    written = CHAT_MARKER.findall(frame_of(codec).prompt("", ""))
    for marker in (each for each in written if each.startswith("<")):
        count = len(codec.tokenizer.encode(marker, add_special_tokens=False).ids)
        if count > 1:
            raise ModelError(
                f"the model's chat template writes {marker!r}, which its tokenizer does not know "
                f"and splits into {count} tokens. Use a model whose vocabulary has them."
            )
