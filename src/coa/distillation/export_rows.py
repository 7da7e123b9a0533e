"""One row of each format that trainers read, made from a trajectory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from coa.errors import CoaError, ModelError
from coa.io.runs import Json
from coa.models.codec import Codec
from coa.trajectory import CHAT_MARKER, Author, Segment, Trajectory

Encode = Callable[[str], tuple[list[int], list[tuple[int, int]]]]

_SYSTEM, _USER = "coa:system", "coa:user"


@dataclass(frozen=True, slots=True)
class ExportPiece:
    """Text that is trained as a whole or not at all."""

    role: str
    """`assistant`, `tool` or `mistake`."""
    text: str

    @property
    def trained(self) -> bool:
        return self.role == "assistant"


def pieces(trajectory: Trajectory, encode: Encode | None = None) -> list[ExportPiece]:
    """The chain after its prompt, cut into the longest pieces of one role.

    A token that holds a part of a mistake is not trained by our rows. With `encode` the cuts are
    put there; without it, the blank before a word is taken to belong to the word's token.
    """
    found: list[ExportPiece] = []
    for segment in trajectory.segments:
        if segment.author is Author.PROMPT:
            continue
        for role, text in _cut(segment, encode):
            if found and found[-1].role == role:
                found[-1] = ExportPiece(role, found[-1].text + text)
            elif text:
                found.append(ExportPiece(role, text))
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


QUESTION = "\n\nQuestion: "
"""Between instructions and question in the one user message of the AFM datasets."""
IGNORED = -100
"""The label of a token that is not trained, for PyTorch and all that is built on it."""


class NotExportable(CoaError, ValueError):
    """A trajectory that a format cannot hold as it is; the message is the reason."""


class TokenRow(Protocol):
    """What `coa.train.rows` makes of a trajectory."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def weights(self) -> Sequence[float]: ...


def opening(trajectory: Trajectory) -> str:
    """The system text that the chain was opened with."""
    return trajectory.segments[0].text


# -- LLaMA-Factory ---------------------------------------------------------------------------


def alpaca_row(trajectory: Trajectory, tag: str) -> Json:
    """Instructions and question in one user message, the whole chain in one answer.

    AFM's training code finds observations by their text: `<tag` after a line break, up to `tag>`
    and exactly two line breaks. Ours end with one, so one is added here.
    """
    output, expected = "", []
    chain = trajectory.segments[1:]
    following = [*(segment.text for segment in chain[1:]), ""]
    for segment, after in zip(chain, following, strict=True):
        begin = len(output)
        output += segment.text
        if segment.author is Author.ENV:
            output += "" if after.startswith("\n") else "\n"
            expected.append((begin + segment.text.startswith("\n"), begin + len(segment.text) + 1))
    if _released_mask(output, tag) != expected:
        raise NotExportable(
            f"their text would mislead AFM's masker, which searches for <{tag} and {tag}> in it; "
            "use another format"
        )
    instruction = f"{opening(trajectory)}{QUESTION}{trajectory.question}"
    return {"instruction": instruction, "input": "", "output": output}


def _released_mask(text: str, tag: str) -> list[tuple[int, int]]:
    """Spans that AFM's masker takes for observations; -1 where it would not see a border.

    It compares token ids of Qwen's tokenizer. There `<tag` is only found after a line break, and
    the end only when exactly two line breaks follow it.
    """
    spans, opened, closed = [], f"<{tag}", f"{tag}>\n\n"
    start = text.find(opened)
    while start >= 0:
        end = text.find(closed, start)
        end = end + len(closed) if end >= 0 else -1
        if text[start - 1 : start] != "\n" or text[end : end + 1] == "\n":
            end = -1
        spans.append((start, end))
        start = text.find(opened, end) if end >= 0 else -1
    return spans


def sharegpt_row(trajectory: Trajectory, frame: Frame | None, encode: Encode | None) -> Json:
    """Turns of human, gpt and observation; a trainer masks what gpt did not say.

    With a frame the first turn holds the whole prompt in the model's own format, and what is not
    trained is an observation, mistakes included: for a template that adds nothing. Without one,
    turns are as people write them, and mistakes are part of what gpt says.
    """
    system, question = opening(trajectory), trajectory.question
    if frame is None:
        turns = [_turn("system", system), _turn("human", question)]
        parts = [
            ExportPiece("tool" if p.role == "tool" else "assistant", p.text)
            for p in _plain(trajectory)
        ]
    else:
        turns = [_turn("human", frame.prompt(system, question))]
        parts = pieces(trajectory, encode)
    for part in parts:
        speaker = "gpt" if part.trained else "observation"
        same = turns[-1]["from"] == speaker or (not part.trained and turns[-1]["from"] == "human")
        if same:
            turns[-1]["value"] += part.text
        else:
            turns.append(_turn(speaker, part.text))
    while turns[-1]["from"] == "observation":  # nothing that is trained comes after it
        turns.pop()
    return {"conversations": turns}


def _plain(trajectory: Trajectory) -> list[ExportPiece]:
    roles = {Author.MODEL: "assistant", Author.ENV: "tool"}
    return [ExportPiece(roles[s.author], s.text) for s in trajectory.segments[1:] if s.text]


def _turn(speaker: str, text: str) -> dict[str, str]:
    return {"from": speaker, "value": text}


def listing(name: str, file: str, to: str) -> Json:
    """What LLaMA-Factory's dataset_info.json says about a file."""
    if to == "alpaca":
        columns = {"prompt": "instruction", "query": "input", "response": "output"}
        return {name: {"file_name": file, "formatting": "alpaca", "columns": columns}}
    tags = {
        "role_tag": "from",
        "content_tag": "value",
        "user_tag": "human",
        "assistant_tag": "gpt",
        "observation_tag": "observation",
        "function_tag": "function_call",
        "system_tag": "system",
    }
    entry: Json = {"file_name": file, "formatting": "sharegpt"}
    return {name: entry | {"columns": {"messages": "conversations"}, "tags": tags}}


# -- TRL and verl ----------------------------------------------------------------------------


def message_row(trajectory: Trajectory, encode: Encode | None) -> Json:
    """Messages whose roles say what is trained; `Frame.template` joins them to one turn."""
    messages = [
        {"role": "system", "content": opening(trajectory)},
        {"role": "user", "content": trajectory.question},
    ]
    messages += [{"role": p.role, "content": p.text} for p in pieces(trajectory, encode)]
    return {"task_id": trajectory.task_id, "messages": messages}


def token_row(trajectory: Trajectory, row: TokenRow) -> Json:
    """Ids and labels of one of our own training rows."""
    labels = [i if w > 0 else IGNORED for i, w in zip(row.ids, row.weights, strict=True)]
    return {"task_id": trajectory.task_id, "input_ids": list(row.ids), "labels": labels}
