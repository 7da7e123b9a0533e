"""Row: one training sequence, with a weight for every token.

Weights come from authorship: what the model wrote has weight 1, what it was shown has weight 0, and
a mistake that was left in so that its correction can be learnt has weight 0 too. (Both can be given
a weight, to measure what that does.) Nothing is found by searching text or ids. A row that would
train nothing is an error. How rows become batches is `coa.train.sft`; what is in them is told
by `coa.train.row_report`.

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
EncodeWithOffsets = Callable[[str], tuple[list[int], list[tuple[int, int]]]]


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids and, for each, how much it counts in the loss."""

    task_id: str
    ids: list[int]
    weights: list[float]
    advantages: list[float] | None = None
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
    prompt_ids: Sequence[int],
    encode_with_offsets: EncodeWithOffsets,
    *,
    err_weight: float = 0.0,
    observation_weight: float = 0.0,
    max_length: int | None = None,
    decode: Decode | None = None,
) -> Row:
    """The row of a trajectory whose prompt was encoded as `prompt_ids`.

    Later segments keep the ids they carry; one without ids is encoded by itself, as the rollout
    does. `decode` places marked mistakes on sampled ids, and checks that ids belong to their text.
    A row longer than `max_length` loses whole segments from its end, never a part of one.
    """
    if decode is not None:
        _check_tokenizer(trajectory, encode_with_offsets, decode)
    ids, weights = list(prompt_ids), [0.0] * len(prompt_ids)
    logprobs, lengths = [0.0] * len(prompt_ids), [len(prompt_ids)]
    sampled = shortened = False
    for segment in trajectory.segments:
        if segment.author is Author.PROMPT:
            continue
        new_ids, new_weights = _weigh(
            segment, encode_with_offsets, decode, err_weight, observation_weight
        )
        if max_length is not None and len(ids) + len(new_ids) > max_length:
            shortened = True
            break
        ids += new_ids
        weights += new_weights
        lengths.append(len(new_ids))
        sampled = sampled or segment.logprobs is not None
        logprobs += _logprobs(trajectory, segment, len(new_ids))
    if not any(weight > 0 for weight in weights):
        if shortened:
            whole = build_row(
                trajectory,
                prompt_ids,
                encode_with_offsets,
                err_weight=err_weight,
                observation_weight=observation_weight,
                decode=decode,
            )
            raise _too_long(whole, max_length or 0)
        raise TrainingError(
            f"Task {trajectory.task_id!r}: its trajectory has no trainable token. Expected at "
            "least one token that the model wrote and that is not marked as a mistake."
        )
    kept = logprobs if sampled else None
    return Row(
        trajectory.task_id, ids, weights, logprobs=kept, cut=shortened, segments=tuple(lengths)
    )


def _logprobs(trajectory: Trajectory, segment: Segment, count: int) -> list[float]:
    if segment.logprobs is None:
        return [0.0] * count
    if len(segment.logprobs) != count:
        raise RecordError(
            f"task {trajectory.task_id!r}: a segment has {count} ids and {len(segment.logprobs)} "
            "logprobs, expected one for each id. Sample it again, or drop its logprobs."
        )
    return segment.logprobs


def _too_long(whole: Row, limit: int) -> TooLong:
    """What to say of a row that has nothing to train before the limit."""
    first = next(at for at, weight in enumerate(whole.weights) if weight > 0)
    needed = next(end for end in accumulate(whole.segments) if end > first)
    return TooLong(
        f"Task {whole.task_id!r}: no trainable token within max_length {limit}: its trajectory has "
        f"{len(whole.ids)} tokens, and its first turn to train ends after {needed}. Raise "
        f"max_length to at least {needed}, or leave the task out."
    )


def row_maker(
    codec: Codec,
    *,
    err_weight: float = 0.0,
    observation_weight: float = 0.0,
    max_length: int | None = None,
) -> Callable[[Trajectory], Row]:
    """A function that makes the training row of a trajectory."""

    def make(trajectory: Trajectory) -> Row:
        prompt = opening(trajectory)
        prompt_ids = prompt.ids or codec.encode_prompt(prompt.text, trajectory.question)
        return build_row(
            trajectory,
            prompt_ids,
            codec.encode_with_offsets,
            err_weight=err_weight,
            observation_weight=observation_weight,
            max_length=max_length,
            decode=codec.decode,
        )

    return make


def _check_tokenizer(trajectory: Trajectory, encode: EncodeWithOffsets, decode: Decode) -> None:
    """Raise unless ids and text of every segment agree under this tokenizer.

    A budget may cut a character in half, so replacement characters at the end are not compared. A
    prompt's ids hold the chat template too; there, the text must be inside. A tokenizer that
    normalises does not give back what it was given: what was encoded is compared as it gives it.
    """
    for segment in trajectory.segments:
        if segment.ids is None:
            continue
        found, text = decode(segment.ids).rstrip("\ufffd"), segment.text.rstrip("\ufffd")
        if segment.author is Author.PROMPT:
            same = all(
                each.strip() in found or decode(encode(each)[0]).strip() in found
                for each in (text, trajectory.question)
            )
        else:
            same = found == text
            same = same or (segment.author is Author.ENV and encode(segment.text)[0] == segment.ids)
        if not same:
            raise RecordError(
                f"task {trajectory.task_id!r}: was sampled with another tokenizer; train on text "
                "by dropping the ids, or use the same base model."
            )


def _weigh(
    segment: Segment,
    encode: EncodeWithOffsets,
    decode: Decode | None,
    err_weight: float,
    observation_weight: float,
) -> tuple[list[int], list[float]]:
    if segment.author is not Author.MODEL:
        ids = segment.ids if segment.ids is not None else encode(segment.text)[0]
        return list(ids), [observation_weight] * len(ids)
    if segment.ids is not None and not segment.errs:
        return list(segment.ids), [1.0] * len(segment.ids)
    if segment.ids is None:
        ids, spans = encode(segment.text)
    else:
        assert decode is not None, "marked mistakes on sampled ids need `decode`"
        ids, spans = segment.ids, token_spans(segment.ids, decode)
    weights = [
        err_weight if any(s < end and start < e for s, e in segment.errs) else 1.0
        for start, end in spans
    ]
    return list(ids), weights


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
        digest.update(repr((row.task_id, row.ids, row.weights, row.advantages)).encode())
    return digest.hexdigest()


def total_tokens(rows: Iterable[Row]) -> int:
    return sum(len(row.ids) for row in rows)
