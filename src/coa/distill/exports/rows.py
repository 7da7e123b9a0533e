"""One row of each format that trainers read, made from a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from coa.distill.exports.pieces import Encode, Frame, Piece, pieces
from coa.errors import CoaError
from coa.runs import Json
from coa.trajectory import Author, Trajectory

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
            Piece("tool" if p.role == "tool" else "assistant", p.text) for p in _plain(trajectory)
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


def _plain(trajectory: Trajectory) -> list[Piece]:
    roles = {Author.MODEL: "assistant", Author.ENV: "tool"}
    return [Piece(roles[s.author], s.text) for s in trajectory.segments[1:] if s.text]


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
