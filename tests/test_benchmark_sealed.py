"""What benchmarks hide from crawlers is opened, and only that: BrowseComp's seal, LiveCodeBench's
pickles, which come from strangers."""

from __future__ import annotations

import base64
import hashlib
import os
import pickle
import zlib
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark_rows import GOLD, LIVE, ROWS, loaded, packed, sealed, write
from coa.environments.published import load_benchmark
from coa.environments.published.questions import unsealed
from coa.errors import RecordError
from coa.rewards.programs import read_suite


@settings(deadline=None)
@given(st.text(), st.text())
def test_what_was_sealed_with_a_canary_is_opened_with_it(text: str, canary: str) -> None:
    try:
        key = cycle(hashlib.sha256(canary.encode()).digest())
        hidden = bytes(a ^ b for a, b in zip(text.encode(), key, strict=False))
    except UnicodeEncodeError:  # half of a character
        return
    assert unsealed(base64.b64encode(hidden).decode(), canary) == text


@pytest.mark.parametrize("broken", ["not base64!", sealed("Which")[:-1], "gICA"])
def test_what_cannot_be_opened_is_said_in_one_line(broken: str, tmp_path: Path) -> None:
    path = write(tmp_path / "b.csv", [ROWS["browsecomp"][0] | {"problem": broken}])
    with pytest.raises(RecordError, match="row 1: cannot be decrypted with its canary"):
        loaded("browsecomp", path)


def test_decrypted_browsecomp_is_read_as_it_stands(tmp_path: Path) -> None:
    row = {"question": "Which town?", "answer": GOLD, "topic": "Towns"}
    assert loaded("browsecomp", write(tmp_path / "b.json", [row]))[0].question == "Which town?"


def test_hidden_tests_join_the_public_ones_in_their_order(tmp_path: Path) -> None:
    first, second = loaded(
        "livecodebench-v4", write(tmp_path / "l.jsonl", ROWS["livecodebench-v4"])
    )
    assert first.gold["tests"] == {
        "stdin": ["1 2\n", "4 5\n"],
        "expected_output": ["3\n", "9\n"],
        "compare": "lines",
        "library": True,
    }
    assert second.gold["tests"] == {
        "function": "add",
        "calls": [{"args": [1, [2, 3]], "expected": 6}],
    }
    assert "class Solution" in second.question
    for task in (first, second):
        assert read_suite(task.gold["tests"]).cases


def pickled(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


class Boom:
    """What a stranger may put in a pickle: a call that runs when it is opened."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("never",)


def test_a_call_in_a_pickle_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = LIVE | {"private_test_cases": pickled(Boom())}
    with pytest.raises(RecordError, match=r"it asks for posix\.mkdir, expected text alone"):
        loaded("livecodebench-v5", write(tmp_path / "l.jsonl", [row]))
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (base64.b64encode(zlib.compress(b"junk")).decode(), "private_test_cases"),
        (base64.b64encode(b"junk").decode(), "cannot be unpacked"),
        ("not base64!", "cannot be unpacked"),
        (packed({"input": 1}), "not a list of tests with input and output"),
        (pickled(b"[]"), "not a list of tests with input and output"),
        (pickled({1}), "not a list of tests with input and output"),
    ],
)
def test_a_pickle_that_is_more_than_text_is_refused(held: str, why: str, tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", [LIVE | {"private_test_cases": held}])
    with pytest.raises(RecordError, match=f"row 1: .*{why}"):
        loaded("livecodebench-v5", path)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_make_the_reader_of_pickles_fail_in_another_way(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    held = base64.b64encode(zlib.compress(content)).decode()
    path = tmp_path_factory.mktemp("fuzz") / "l.jsonl"
    with pytest.raises(RecordError, match="row 1"):
        loaded("livecodebench-v5", write(path, [LIVE | {"private_test_cases": held}]))


def test_tests_that_are_too_long_are_left_out_from_the_longest(tmp_path: Path) -> None:
    long = {"input": "1" * (5 << 20), "output": "1", "testtype": "stdin"}
    short = {"input": "2", "output": "2", "testtype": "stdin"}
    row = LIVE | {"private_test_cases": packed([long, short])}
    found = load_benchmark("livecodebench-v5", write(tmp_path / "l.jsonl", [row]))
    task = found.tasks[0]
    assert task.gold["tests"]["stdin"] == ["1 2\n", "2"] and task.meta["tests_left_out"] == 1
    assert found.shortened == 1 and not found.left_out  # the problem itself is there
