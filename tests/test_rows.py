"""Rows, with masks drawn on paper."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.engines.scripted import ByteCodec
from coa.errors import RecordError, TrainingError
from coa.train.rows import Row, TooLong, batches, build_row, fingerprint, opening, token_spans
from coa.trajectory import Author, Segment, Trajectory

CODEC = ByteCodec()


def trajectory(*segments: Segment) -> Trajectory:
    prompt = Segment(Author.PROMPT, "sysuser")
    return Trajectory("t-1", "user", "mhqa", [prompt, *segments])


PROMPT = CODEC.encode_prompt("sysuser", "user")
BEFORE = len(PROMPT)


class Refusing(ByteCodec):
    """A codec for segments that all carry their ids."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        raise AssertionError(f"encoded {text!r}")


class Words(Refusing):
    """A codec of which only these words are known."""

    def decode(self, ids: Sequence[int]) -> str:
        words = {900: "hel", 901: "lo ", 902: "world", 7: "x"}
        return "".join(words[i] for i in ids)


def row_of(made: Trajectory, codec: Any = CODEC, **how: Any) -> Row:
    """The row from its first segment after the prompt on."""
    if "max_length" in how:
        how["max_length"] += BEFORE
    row = build_row(made, codec, **how)
    assert row.ids[:BEFORE] == PROMPT and not any(row.weights[:BEFORE])
    assert row.segments[0] == BEFORE
    kept = None if row.logprobs is None else row.logprobs[BEFORE:]
    lengths = row.segments[1:]
    return Row(row.task_id, row.ids[BEFORE:], row.weights[BEFORE:], kept, row.cut, lengths)


def test_the_mask_follows_authorship() -> None:
    row = row_of(
        trajectory(
            Segment(Author.MODEL, "ab"),
            Segment(Author.ENV, "[o]"),
            Segment(Author.MODEL, "cde", errs=[(1, 2)]),
        )
    )
    #                      a  b  [  o  ]  c  d  e
    assert row.ids == [*b"ab[o]cde"]
    assert row.weights == [1, 1, 0, 0, 0, 1, 0, 1]
    assert row.trained == 4
    assert row.logprobs is None


def test_sampled_ids_are_kept_never_encoded_again() -> None:
    segment = Segment(Author.MODEL, "hello ", ids=[900, 901], logprobs=[-0.5, -0.25])
    row = row_of(trajectory(segment, Segment(Author.ENV, "x", ids=[7])), Words())
    assert row.ids == [900, 901, 7]
    assert row.weights == [1, 1, 0]
    assert row.logprobs == [-0.5, -0.25, 0]


def test_marks_on_sampled_ids_are_placed_by_decoding() -> None:
    segment = Segment(Author.MODEL, "hello world", ids=[900, 901, 902], errs=[(4, 5)])
    assert row_of(trajectory(segment), Words(), err_weight=0.25).weights == [1, 0.25, 1]


def test_a_character_of_several_tokens_is_marked_in_all_of_them() -> None:
    row = row_of(trajectory(Segment(Author.MODEL, "a\u00e9.", errs=[(1, 2)])))
    assert row.weights == [1, 0, 0, 1]


def test_an_end_of_sequence_shares_the_mark_of_the_last_character() -> None:
    ids = [*"a\u00e9".encode(), ByteCodec.BORDER]
    for marks, weights in (((0, 1), [0, 1, 1, 1]), ((1, 2), [1, 0, 0, 0])):
        segment = Segment(Author.MODEL, "a\u00e9", ids=ids, errs=[marks])
        assert row_of(trajectory(segment), Refusing()).weights == weights


@pytest.mark.parametrize("author", [Author.MODEL, Author.ENV])
def test_ids_of_another_tokenizer_are_refused(author: Author) -> None:
    stranger = Segment(author, "ab", ids=[4, 5])
    made = trajectory(Segment(Author.MODEL, "x", ids=[*b"x"]), stranger)
    with pytest.raises(RecordError, match=r"^task 't-1': was sampled with another tokenizer; "):
        build_row(made, CODEC)  # type: ignore[arg-type]
    made.segments[0].ids = CODEC.encode_prompt("other", "words")
    made.segments.remove(stranger)
    with pytest.raises(RecordError, match="another tokenizer"):
        build_row(made, CODEC)  # type: ignore[arg-type]
    made.segments[0].ids = CODEC.encode_prompt("sysuser", "user")
    build_row(made, CODEC)  # type: ignore[arg-type]


class ComposingCodec(ByteCodec):
    """Composes characters before it encodes them, as the tokenizers of Qwen do."""

    def encode(self, text: str) -> list[int]:
        return super().encode(unicodedata.normalize("NFC", text))

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return super().encode_with_offsets(unicodedata.normalize("NFC", text))


def test_a_tokenizer_that_normalises_is_no_other_tokenizer() -> None:
    codec, question, seen = ComposingCodec(), "How many k\u2126?", "5 k\u2126"
    segments = [
        Segment(Author.PROMPT, "in \u2126", codec.encode_prompt("in \u2126", question)),
        Segment(Author.ENV, seen, codec.encode(seen)),
        Segment(Author.MODEL, "5", codec.encode("5")),
    ]
    assert codec.decode(codec.encode(seen)) != seen
    made = Trajectory("t-1", question, "mhqa", segments)
    assert segments[0].ids is not None
    row = build_row(made, codec)  # type: ignore[arg-type]
    assert row.ids == [token for segment in segments for token in segment.ids or ()]
    segments[0].ids = codec.encode_prompt("in \u2126", "How many k\u212b?")
    with pytest.raises(RecordError, match="another tokenizer"):
        build_row(made, codec)  # type: ignore[arg-type]


def test_a_character_cut_by_a_budget_is_no_other_tokenizer() -> None:
    half = Segment(Author.MODEL, "a\ufffd", ids=[*"a\u6771".encode()[:3]])
    assert row_of(trajectory(half), Refusing()).ids == [*"a\u6771".encode()[:3]]


def test_a_trajectory_without_a_prompt_is_named() -> None:
    assert opening(trajectory()).text == "sysuser"
    for segments in ([], [Segment(Author.MODEL, "a")]):
        with pytest.raises(RecordError, match=r"task 't-1': .* does not begin with a prompt"):
            opening(Trajectory("t-1", "user", "mhqa", segments))


def test_nothing_to_train_names_the_task() -> None:
    with pytest.raises(TrainingError, match=r"Task 't-1': .*no trainable token"):
        row_of(trajectory(Segment(Author.ENV, "x")))
    with pytest.raises(TrainingError, match="t-1"):
        row_of(trajectory(Segment(Author.MODEL, "x", errs=[(0, 1)])))


def test_a_trajectory_longer_than_the_context_says_how_long_it_is_and_what_would_do() -> None:
    made = trajectory(
        Segment(Author.MODEL, "oops", errs=[(0, 4)]),
        Segment(Author.ENV, "[o]"),
        Segment(Author.MODEL, "abcd"),
        Segment(Author.ENV, "[o]"),
    )
    with pytest.raises(TooLong) as found:
        row_of(made, max_length=9)
    has, needed = BEFORE + 14, BEFORE + 11
    assert str(found.value) == (
        f"Task 't-1': no trainable token within max_length {BEFORE + 9}: its trajectory has {has} "
        f"tokens, and its first turn to train ends after {needed}. Raise max_length to at least "
        f"{needed}, or leave the task out."
    )
    row = row_of(made, max_length=11)
    assert (row.trained, row.cut, row.segments) == (4, True, (4, 3, 4))


AUTHORS = st.sampled_from([Author.MODEL, Author.ENV])


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    author, text = draw(AUTHORS), draw(st.text(max_size=12))
    errs = []
    if author is Author.MODEL and draw(st.booleans()):
        start = draw(st.integers(0, len(text)))
        errs = [(start, draw(st.integers(start, len(text))))]
    ids = CODEC.encode(text) if draw(st.booleans()) else None
    logprobs = [-0.5] * len(ids) if ids is not None and author is Author.MODEL else None
    return Segment(author, text, ids=ids, logprobs=logprobs, errs=errs)


@given(st.lists(segments(), max_size=8), st.integers(1, 60))
def test_a_row_is_a_whole_number_of_segments_and_its_weights_follow_their_authors(
    parts: list[Segment], limit: int
) -> None:
    made = trajectory(*parts)
    marked = {id(p): {i for s, e in p.errs for i in range(s, e)} for p in parts}
    lengths = [len(CODEC.encode(p.text)) for p in parts]
    expected = [
        1.0 if p.author is Author.MODEL and at not in marked[id(p)] else 0.0
        for p in parts
        for at, character in enumerate(p.text)
        for _ in CODEC.encode(character)
    ]
    fit = next((n for n in range(len(parts)) if sum(lengths[: n + 1]) > limit), len(parts))
    end = sum(lengths[:fit])
    try:
        row = row_of(made, max_length=limit)
    except TooLong:
        assert fit < len(parts) and not any(expected[:end]) and any(expected)
        return
    except TrainingError:
        assert not any(expected)
        return
    assert row.ids == [i for p in parts[:fit] for i in CODEC.encode(p.text)]
    assert row.weights == expected[:end]
    assert row.segments == (*lengths[:fit],)
    assert row.cut == (fit < len(parts))


@given(st.lists(st.sampled_from([*b"ab <>", *"\u6771\u00e9".encode(), 257]), max_size=30))
def test_every_sampled_id_belongs_to_a_character(ids: list[int]) -> None:
    spans, text = token_spans(ids, CODEC.decode), CODEC.decode(ids)
    assert len(spans) == len(ids)
    assert [end for _, end in spans] == sorted(end for _, end in spans)
    assert not spans or spans[-1][1] == len(text)
    if text.isascii():  # one id, one character
        assert [text[s:e] for (s, e), i in zip(spans, ids, strict=True) if i < 256] == [*text]


def test_logprobs_that_do_not_fit_their_ids_are_refused() -> None:
    segment = Segment(Author.MODEL, "ab", ids=[*b"ab"], logprobs=[-1.0])
    with pytest.raises(RecordError, match=r"task 't-1': a segment has 2 ids and 1 logprobs"):
        row_of(trajectory(segment))


def test_truncation_falls_between_segments() -> None:
    parts = [Segment(Author.MODEL, "abc"), Segment(Author.ENV, "oo"), Segment(Author.MODEL, "de")]
    row = row_of(trajectory(*parts), max_length=6)
    assert (row.ids, row.cut) == ([*b"abcoo"], True)
    assert not row_of(trajectory(*parts), max_length=7).cut


def rows(count: int) -> list[Row]:
    lengths = [(37 * i) % 50 + 2 for i in range(count)]
    return [Row(f"t{i}", [i] * n, [1.0] * n) for i, n in enumerate(lengths)]


def test_batches_hold_every_row_once_and_depend_on_seed_and_epoch_only() -> None:
    made = batches(rows(301), 8, seed=1, epoch=0)
    assert sorted(row.task_id for batch in made for row in batch) == sorted(
        f"t{i}" for i in range(301)
    )
    assert made == batches(rows(301), 8, seed=1, epoch=0)
    assert made != batches(rows(301), 8, seed=1, epoch=1)
    assert made != batches(rows(301), 8, seed=2, epoch=0)
    assert max(len(batch) for batch in made) == 8


def test_batches_waste_little_padding() -> None:
    made = batches(rows(512), 8, seed=0, epoch=0)
    padded = sum(len(b) * max(len(r.ids) for r in b) for b in made)
    assert padded < 1.15 * sum(len(r.ids) for b in made for r in b)


def test_fingerprint_sees_weights() -> None:
    one, other = rows(3), rows(3)
    other[1].weights[0] = 0.0
    assert fingerprint(one) != fingerprint(other)
