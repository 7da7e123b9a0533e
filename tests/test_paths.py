"""Names of files without the directories of a machine."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.io.files import portable

names = st.text("abcdefgh-_0", min_size=1, max_size=6)
spaced = st.text("ab '0.", min_size=1, max_size=6).map(str.strip).filter(bool)


@given(st.lists(names, min_size=2, max_size=5), names)
def test_no_directory_of_a_machine_is_kept(parts: list[str], word: str) -> None:
    path = "/".join(parts)
    absolute, told = f"/{path}", {"a": [f"{word}+/{path}", {"b": f"/{path} {word}", "c": 3}]}
    shown = json.dumps(portable(told))
    assert f"/{parts[0]}" not in shown and parts[-1] in shown
    assert portable(absolute) == parts[-1]
    assert portable(f"hf:{absolute}") == f"hf:{parts[-1]}"
    for kept in (path, f"run/{path}", f"openai:m@http://{path}"):
        assert portable(kept) == kept


@given(st.lists(spaced, min_size=2, max_size=5), st.lists(names, min_size=2, max_size=5))
def test_each_side_of_a_reference_is_shortened_apart(base: list[str], adapter: list[str]) -> None:
    model, factors = "/".join(base), "/".join(adapter)
    for root in ("/", "~/"):
        assert portable(f"hf:{root}{model}+{root}{factors}") == f"hf:{base[-1]}+{adapter[-1]}"
        assert portable(f"hf:{root}{model}+{factors}") == f"hf:{base[-1]}+{factors}"


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ("hf:/a/b/model+runs/sft/adapter", "hf:model+runs/sft/adapter"),
        ("hf:/a/b/model+/c/d/adapter", "hf:model+adapter"),
        ("hf:owner/name+/c/my runs/adapter", "hf:owner/name+adapter"),
        ("/Users/jane doe/models/x", "x"),
        ("hf:/Users/jane doe/o'models/x+/Users/jane doe/y", "hf:x+y"),
        ("/a/jane doe/x.jsonl, /a/jane doe/y.jsonl", "x.jsonl, y.jsonl"),
        ("a|/a/u/x/y", "a|y"),
        ("/a/b|~/c/d|e/f", "b|d|e/f"),
        ("~/models/secret/x", "x"),
        ("hf:~jane/models/x", "hf:x"),
        ("--data=/a/b/c --out ~/d/e, then run/f/g", "--data=c --out e, then run/f/g"),
        ("read '/a/b/c' and (/d/e)", "read 'c' and (e)"),
        ("hf:/a//b/model/", "hf:model/"),
        ("/a/b/rewards.py:mine", "rewards.py:mine"),
        *((same, same) for same in ("/no_think", "~10/min", "a +/- b", "and/or", "a/~/b", "x /y")),
    ],
)
def test_a_path_keeps_its_name_and_loses_its_directories(told: str, kept: str) -> None:
    assert portable(told) == kept == portable(kept)
