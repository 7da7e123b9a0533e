"""Row: one training sequence, with a weight for every token.

Weights come from authorship: what the model wrote has weight 1, what it was shown has weight 0, and
a mistake that was left in so that its correction can be learnt has weight 0 too. (Both can be given
a weight, to measure what that does.) Nothing is found by searching text or ids. A row that would
train nothing is an error. How rows become batches is `coa.train.sft`; what is in them is told
by `coa.train.row_report`. `coa export` stands here because one of its formats is these rows.

Ids that a trajectory carries are trained as they are, so they must belong to the tokenizer of the
model that is trained. Ids do not say whose they are; that they decode to their text does.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from coa.errors import RecordError, TrainingError
from coa.models.codec import Codec
from coa.trajectory import Author, Segment, Trajectory

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids and, for each, how much it counts in the loss."""

    task_id: str
    ids: list[int]
    weights: list[float]
    logprobs: list[float] | None = None
    """Of the distribution sampled from; 0 where the model did not write."""
    cut: bool = False
    """Whether it lost its end to `max_length`."""
    segments: tuple[int, ...] = ()
    """Tokens of each segment that it holds, in order, the prompt's first; () when nobody said."""

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.weights), (len(self.ids), len(self.weights))
        assert not self.segments or sum(self.segments) == len(self.ids), self.segments

    @property
    def trained(self) -> int:
        return sum(weight > 0 for weight in self.weights)

    @property
    def places(self) -> list[int]:
        """Where the tokens that count are; the first of a row is predicted by none."""
        return [at for at, weight in enumerate(self.weights) if at and weight > 0]


class TooLong(TrainingError):
    """Nothing to train is left of a trajectory within `max_length`."""


def opening(trajectory: Trajectory) -> Segment:
    """The prompt segment, without which nobody can say what the model was asked."""
    if not trajectory.segments or trajectory.segments[0].author is not Author.PROMPT:
        raise RecordError(
            f"task {trajectory.task_id!r}: its trajectory does not begin with a prompt segment. "
            "Train on what coa distill or coa eval wrote."
        )
    return trajectory.segments[0]


def build_row(
    trajectory: Trajectory,
    codec: Codec,
    *,
    err_weight: float = 0.0,
    observation_weight: float = 0.0,
    max_length: int | None = None,
) -> Row:
    """The row of a trajectory, under the tokenizer of the model to train.

    Segments keep the ids they carry; one without ids is encoded by itself, as the rollout does.
    A row longer than `max_length` loses whole segments from its end, never a part of one.
    """
    _check_tokenizer(trajectory, codec)
    prompt = opening(trajectory)
    ids = list(prompt.ids or codec.encode_prompt(prompt.text, trajectory.question))
    weights, logprobs, lengths = [0.0] * len(ids), [0.0] * len(ids), [len(ids)]
    later = [segment for segment in trajectory.segments if segment.author is not Author.PROMPT]
    fit = 1 + len(later)
    for segment in later:
        new_ids, new_weights = _weigh(segment, codec, err_weight, observation_weight)
        if max_length is not None and len(ids) + len(new_ids) > max_length:
            fit = min(fit, len(lengths))
        ids += new_ids
        weights += new_weights
        lengths.append(len(new_ids))
        if segment.logprobs is not None and len(segment.logprobs) != len(new_ids):
            raise RecordError(
                f"task {trajectory.task_id!r}: a segment has {len(new_ids)} ids and "
                f"{len(segment.logprobs)} logprobs, expected one for each id. Sample it again, or "
                "drop its logprobs."
            )
        logprobs += segment.logprobs or [0.0] * len(new_ids)
    first = next((at for at, weight in enumerate(weights) if weight > 0), None)
    if first is None:
        raise TrainingError(
            f"Task {trajectory.task_id!r}: its trajectory has no trainable token. Expected at "
            "least one token that the model wrote and that is not marked as a mistake."
        )
    end = sum(lengths[:fit])
    if first >= end:
        needed = next(each for each in accumulate(lengths) if each > first)
        raise TooLong(
            f"Task {trajectory.task_id!r}: no trainable token within max_length {max_length}: its "
            f"trajectory has {len(ids)} tokens, and its first turn to train ends after {needed}. "
            f"Raise max_length to at least {needed}, or leave the task out."
        )
    sampled = any(segment.logprobs is not None for segment in later[: fit - 1])
    return Row(
        trajectory.task_id,
        ids[:end],
        weights[:end],
        logprobs=logprobs[:end] if sampled else None,
        cut=fit < len(lengths),
        segments=tuple(lengths[:fit]),
    )


def _check_tokenizer(trajectory: Trajectory, codec: Codec) -> None:
    """Raise unless ids and text of every segment agree under this tokenizer.

    A budget may cut a character in half, so replacement characters at the end are not compared. A
    prompt's ids hold the chat template too; there, the text must be inside. A tokenizer that
    normalises does not give back what it was given: what was encoded is compared as it gives it.
    """
    for segment in trajectory.segments:
        if segment.ids is None:
            continue
        found, text = codec.decode(segment.ids).rstrip("\ufffd"), segment.text.rstrip("\ufffd")
        if segment.author is Author.PROMPT:
            same = all(
                each.strip() in found or codec.decode(codec.encode(each)).strip() in found
                for each in (text, trajectory.question)
            )
        else:
            same = found == text
            if not same and segment.author is Author.ENV:
                same = codec.encode(segment.text) == segment.ids
        if not same:
            raise RecordError(
                f"task {trajectory.task_id!r}: was sampled with another tokenizer; train on text "
                "by dropping the ids, or use the same base model."
            )


def _weigh(
    segment: Segment, codec: Codec, err_weight: float, observation_weight: float
) -> tuple[list[int], list[float]]:
    """The ids of a segment, and their weights by who wrote them."""
    if segment.author is not Author.MODEL:
        ids = segment.ids if segment.ids is not None else codec.encode(segment.text)
        return list(ids), [observation_weight] * len(ids)
    if segment.ids is None:
        ids, spans = codec.encode_with_offsets(segment.text)
    elif not segment.errs:
        return list(segment.ids), [1.0] * len(segment.ids)
    else:
        ids, spans = segment.ids, token_spans(segment.ids, codec.decode)
    marked = (any(s < end and start < e for s, e in segment.errs) for start, end in spans)
    return list(ids), [err_weight if each else 1.0 for each in marked]


def token_spans(ids: Sequence[int], decode: Decode) -> list[tuple[int, int]]:
    """Characters each sampled id wrote; sampled ids need not be what an encoder would choose.

    An id that adds none (the rest of a character's bytes, an end of sequence) belongs to the
    character before it.
    """
    pieces = [decode([each]) for each in ids]
    if "".join(pieces) == decode(ids):
        ends = list(accumulate(map(len, pieces)))
    else:  # a character of several ids, or a decoder that joins words
        ends = [len(decode(ids[:count])) for count in range(1, len(ids) + 1)]
    for at in range(len(ends) - 2, -1, -1):  # half a character may decode to several marks
        ends[at] = min(ends[at], ends[at + 1])
    return [(min(start, end - 1), end) for start, end in pairwise([0, *ends])]


def batches(rows: Sequence[Row], size: int, seed: int, epoch: int) -> list[list[Row]]:
    """Rows of similar length together, batches in random order; the same for the same seed.

    Rows are shuffled, cut into pools of 16 batches, sorted by length inside a pool, so that little
    is padded and yet every epoch has other batches.
    """
    rng = random.Random(f"{seed}|{epoch}")
    order = list(range(len(rows)))
    rng.shuffle(order)
    made: list[list[Row]] = []
    for start in range(0, len(order), size * 16):
        pool = sorted(order[start : start + size * 16], key=lambda i: (len(rows[i].ids), i))
        made += [[rows[i] for i in pool[at : at + size]] for at in range(0, len(pool), size)]
    rng.shuffle(made)
    return made


def fingerprint(rows: Iterable[Row]) -> str:
    """A hash of what would be trained, to notice that a resumed run got other rows."""
    digest = hashlib.sha256()
    for row in rows:
        # The None is for runs from before: there it stood for advantages, which no row had.
        digest.update(repr((row.task_id, row.ids, row.weights, None)).encode())
    return digest.hexdigest()


def total_tokens(rows: Iterable[Row]) -> int:
    return sum(len(row.ids) for row in rows)
