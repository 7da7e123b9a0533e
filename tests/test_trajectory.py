"""Trajectory: the record on disk, and the views that are derived from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.errors import CoaError, RecordError, UsageError
from coa.io.runs import Appender
from coa.tasks import Task
from coa.trajectory import (
    SCHEMA,
    Author,
    Segment,
    Step,
    StopReason,
    Trajectory,
    Usage,
    load_trajectories,
    save_trajectories,
)
from playing import mask_of

COUNT = st.integers(0, 2**40)
LOGPROBS = st.floats(-1e4, 0.0).map(lambda value: round(value, 6))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def segments(text: str) -> st.SearchStrategy[Segment]:
    """Segments of a text, with marks inside it."""
    places = st.integers(0, len(text))
    return st.builds(
        Segment,
        author=st.sampled_from(Author),
        text=st.just(text),
        ids=st.none() | st.lists(COUNT, max_size=5),
        logprobs=st.none() | st.lists(LOGPROBS, max_size=5),
        errs=st.lists(
            st.tuples(places, places).map(lambda span: (min(span), max(span))), max_size=3
        ),
    )


SEGMENTS = st.text().flatmap(segments)
TRAJECTORIES = st.builds(
    Trajectory,
    task_id=st.text(),
    question=st.text(),
    grammar=st.text(),
    segments=st.lists(SEGMENTS, max_size=5),
    prompt=st.sampled_from(["full", "compact"]),
    stop=st.none() | st.sampled_from(StopReason),
    answer=st.none() | st.text(),
    error=st.none() | st.text(),
    usage=st.builds(Usage, *[COUNT] * 7),
    weights=st.text(),
    seed=st.integers(),
    sample=COUNT,
    meta=st.dictionaries(st.text(), JSON, max_size=3),
)


def sample(**fields: Any) -> Trajectory:
    return Trajectory(
        "t1",
        "Where?",
        "mhqa",
        [
            Segment(Author.PROMPT, "system", [1, 2, 3]),
            Segment(Author.MODEL, "<a>", [4, 5], [-0.5, -0.25]),
            Segment(Author.ENV, "<o>", [6]),
            Segment(Author.MODEL, "<b>", [7, 8], [-1.0, 0.0], errs=[(0, 2)]),
        ],
        **fields,
    )


@settings(deadline=None)
@given(TRAJECTORIES)
def test_a_record_read_back_is_the_same_trajectory(trajectory: Trajectory) -> None:
    record = trajectory.to_json()
    assert Trajectory.from_json(json.loads(json.dumps(record))) == trajectory
    assert Trajectory.from_json(record).to_json() == record


@settings(deadline=None)
@given(st.lists(TRAJECTORIES, max_size=4))
def test_a_file_read_back_is_the_same_list(
    tmp_path_factory: pytest.TempPathFactory, trajectories: list[Trajectory]
) -> None:
    path = tmp_path_factory.mktemp("files") / "trajectories.jsonl"
    save_trajectories(path, trajectories)
    assert load_trajectories(path) == trajectories
    assert path.read_bytes().count(b"\n") == len(trajectories)


def test_logprobs_are_kept_to_six_digits() -> None:
    segment = Segment(Author.MODEL, "x", [1], [-0.123456789])
    assert segment.to_json()["logprobs"] == [-0.123457]


def test_seconds_are_not_part_of_the_record_nor_of_equality() -> None:
    slow = sample(seconds={"total": 9.0, "engine": 8.0, "tools": 1.0})
    assert slow.to_json() == sample().to_json()
    assert "seconds" not in json.dumps(slow.to_json())
    assert slow == sample()


def test_a_file_cut_in_the_middle_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    save_trajectories(path, [sample(), sample()])
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(RecordError) as caught:
        load_trajectories(path)
    assert str(caught.value).startswith(f"{path}:2: the line is cut in the middle. ")
    with Appender(path) as appender:
        appender.write(sample().to_json())
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": SCHEMA + 1}, f"found trajectory schema {SCHEMA + 1}, expected {SCHEMA}"),
        ({"schema": None}, "found trajectory schema None"),
        ({"stop": "bored"}, "'bored' is not a valid StopReason"),
        ({"usage": {"tokens": 3}}, "unexpected keyword argument 'tokens'"),
        ({"segments": [{"author": "god", "text": ""}]}, "'god' is not a valid Author"),
        ({"segments": [{"author": "env"}]}, "no field 'text'"),
        ({"segments": None}, "NoneType"),
    ],
)
def test_a_record_that_is_not_ours_is_named_with_its_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "trajectories.jsonl"
    records = [sample().to_json(), sample().to_json() | change]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(RecordError) as caught:
        load_trajectories(path)
    assert str(caught.value).startswith(f"{path}:2: ") and message in str(caught.value)


def test_a_missing_field_or_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    path.write_text(json.dumps({"schema": SCHEMA}) + "\n")
    with pytest.raises(RecordError, match=r"trajectories\.jsonl:1: no field 'task_id'"):
        load_trajectories(path)
    with pytest.raises(UsageError, match=r"other\.jsonl: no such file"):
        load_trajectories(tmp_path / "other.jsonl")


def test_steps_pair_each_turn_with_the_observation_after_it() -> None:
    trajectory = sample()
    _, first, seen, last = trajectory.segments
    assert trajectory.steps == [Step(first, seen), Step(last)]
    assert sample().text == "<a><o><b>"


def test_the_mask_is_authorship() -> None:
    trajectory = sample()
    assert trajectory.ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert mask_of(trajectory) == [False] * 3 + [True] * 2 + [False] + [True] * 2


@settings(deadline=None)
@given(TRAJECTORIES)
def test_the_mask_counts_what_the_model_wrote_and_nothing_else(trajectory: Trajectory) -> None:
    wrote = [s for s in trajectory.segments if s.author is Author.MODEL]
    assert sum(mask_of(trajectory)) == sum(len(s.ids or ()) for s in wrote)
    assert len(trajectory.steps) == len(wrote)


def test_ids_of_a_trajectory_that_was_never_tokenised_are_a_bug_of_ours() -> None:
    trajectory = sample()
    trajectory.segments[2].ids = None
    with pytest.raises(AssertionError, match="t1: a env segment has no ids"):
        _ = trajectory.ids


def test_total_tokens_count_everything_once() -> None:
    usage = Usage(prompt_tokens=100 + 150, cached_tokens=120, sampled_tokens=20 + 30)
    assert usage.total_tokens == 100 + 20 + 30 + 30


def test_every_stop_reason_is_an_end_of_one_kind() -> None:
    for reason in StopReason:
        blamed = reason is StopReason.MALFORMED
        ended = reason is StopReason.ANSWERED
        assert [blamed, ended, reason.truncated, reason.outside].count(True) == 1


def test_record_errors_are_for_people() -> None:
    assert issubclass(RecordError, CoaError) and issubclass(RecordError, ValueError)


@pytest.mark.parametrize("span", [[0, 4], [-1, 2], [2, 1]])
def test_a_mark_outside_of_its_text_is_refused(span: list[int]) -> None:
    record = {"author": "model", "text": "abc", "errs": [span]}
    with pytest.raises(RecordError, match=rf"marked at {span[0]} to {span[1]}, outside of its"):
        Segment.from_json(record)


def test_an_episode_is_not_taken_for_an_old_trajectory() -> None:
    with pytest.raises(RecordError, match="this is a task, expected a trajectory"):
        Trajectory.from_json(Task("Where?", ("here",)).to_json())
    with pytest.raises(RecordError, match="this is an episode, expected a trajectory"):
        Trajectory.from_json({"schema": 2, "events": []})
