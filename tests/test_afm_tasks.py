"""Tasks from the published AFM files and benchmarks: every shape of gold, and none of it shown."""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.distillation.exports import export
from coa.environments.published.afm import import_rl, read_rows, run_import_rl
from coa.environments.published.questions import after_instructions
from coa.io.runs import Json
from coa.tasks import Task, TaskSet
from export_chains import short_chain

BENCHMARKS = os.environ.get("COA_TEST_BENCHMARKS", "")
ROWS_OF = {
    "OlympiadBench.parquet": 675,
    "aime24.parquet": 30,
    "aime25.parquet": 30,
    "amc23.parquet": 40,
    "livecodebench_v4.parquet": 100,
    "livecodebench_v5.parquet": 167,
    "math500.parquet": 500,
    "nq_full.jsonl": 3610,
    "webwalker_main.json": 680,
}


def rl_row(truth: Any, **more: Any) -> Json:
    """A row as AFM's scripts write it; the question is in the prompt only unless given."""
    prompt = [{"role": "user", "content": f"Use <code>.\n\nTask:\n{more.pop('asked', 'Why?')}"}]
    extra = {"index": "7", "split": "train", "tools_kwargs": {"code": {"x": "GOLD"}}}
    return {
        "data_source": "made_up",
        "prompt": prompt,
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": extra | more,
    }


@pytest.mark.parametrize(
    ("truth", "answers"),
    [
        ("204", ("204",)),
        ("[1, 2]", ("[1, 2]",)),
        ('{"a": 1}', ('{"a": 1}',)),
        ("\\{1, 2\\}", ("\\{1, 2\\}",)),
        (204, ("204",)),
        (["Paris", "City of Light"], ("Paris", "City of Light")),
        ({"target": ["Paris"], "question": "Q"}, ("Paris",)),
        ({"target": "Paris", "question": "Q"}, ("Paris",)),
        ('{"target": ["Paris", "P."], "question": "Q"}', ("Paris", "P.")),
        ('{"target": "Paris", "question": "Q"}', ("Paris",)),
        ({"target": [None, "Paris", "", float("nan")]}, ("Paris",)),
    ],
)
def test_the_ground_truth_may_be_text_json_a_list_or_an_object(truth: Any, answers: Any) -> None:
    (task,) = import_rl([rl_row(truth)]).items
    assert task.answers == answers and task.question == "Why?"
    assert task.meta == {
        "index": "7",
        "split": "train",
        "data_source": "made_up",
        "ability": "fact-reasoning",
    }


def test_tests_of_a_program_are_gold_and_no_answer() -> None:
    held = {"stdin": ["1\n"], "expected_output": ["2\n"], "question_id": "abc"}
    for truth in (held, json.dumps(held)):
        (task,) = import_rl([rl_row(truth, starter_code="def f():")]).items
        assert task.answers == ()
        assert task.gold == {"tests": {"stdin": ["1\n"], "expected_output": ["2\n"]}}
        assert task.meta["starter_code"] == "def f():"


def test_no_gold_is_shown_by_an_imported_task() -> None:
    row = rl_row({"target": ["GOLD"]}, answer="GOLD", question="Who?", reference="GOLD")
    (task,) = import_rl([row]).items
    assert task.question == "Who?" and "GOLD" not in json.dumps(task.public().to_json())


def test_plain_rows_with_question_and_answer_are_tasks_too() -> None:
    rows = [{"question": "who?", "answer": ["a", "b"], "data_source": "nq"}]
    (task,) = import_rl(rows).items
    assert task.answers == ("a", "b") and task.meta == {"data_source": "nq"}


def test_rows_without_question_or_gold_and_repeated_ones_are_left_out_with_a_reason() -> None:
    odd = [{"answer": "x"}, rl_row(None), rl_row("1"), rl_row("2"), rl_row("", asked="What?")]
    imported = import_rl(
        [*odd, {"question": 5, "answer": "x"}, {"question": "\ud800", "answer": "x"}]
    )
    assert [task.answers for task in imported.items] == [("1",)]
    assert [(r["row"], r["reason"].partition(":")[0]) for r in imported.rejected] == [
        (1, "no question"),
        (2, "no ground truth"),
        (4, "asked before"),
        (5, "no ground truth"),
        (6, "no question"),
        (7, "the question is not text"),
    ]


def test_objects_that_a_table_holds_as_text_are_read() -> None:
    row = rl_row({"target": ["Paris"]})
    told = {key: json.dumps(row[key]) for key in ("extra_info", "reward_model")}
    assert import_rl([row | told]).items == import_rl([row]).items


def test_a_row_of_another_shape_does_not_cost_the_others() -> None:
    odd = [
        rl_row("1") | {"extra_info": "no JSON"},
        rl_row("1") | {"reward_model": ["1"]},
        rl_row("1", level={"name": b"hard"}),
        rl_row(float("nan")),
    ]
    imported = import_rl([*odd, rl_row("1", contest_date=date(2024, 5, 1))])
    assert [(t.answers, t.meta["contest_date"]) for t in imported.items] == [(("1",), "2024-05-01")]
    assert [each["reason"].partition(":")[0] for each in imported.rejected] == [
        "'extra_info' is not an object",
        "'reward_model' is not an object",
        "holds what JSON cannot",
        "no ground truth",
    ]


def test_a_chain_is_not_mistaken_for_a_task_with_gold() -> None:
    imported = import_rl([short_chain().to_json()])
    assert imported.reasons == {"a chain of ours, whose answer is no gold": 1}


def test_what_verl_gets_comes_back_as_the_same_tasks(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    tasks = [Task(f"Question {n}?", (f"a{n}", f"b{n}"), meta={"split": "train"}) for n in range(5)]
    export([short_chain()], "verl", tmp_path, tasks=tasks, note=lambda line: None)
    out = tmp_path / "tasks.jsonl"
    assert run_import_rl(tmp_path / "rl.parquet", out)["rows"] == 5
    again = TaskSet.load(out)
    assert [(t.id, t.question, t.answers) for t in again] == [
        (t.id, t.question, t.answers) for t in tasks
    ]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["target", "stdin", "answer", "x"]), inner, max_size=3
            )
        ),
        max_leaves=8,
    )
)
@settings(deadline=None)
def test_any_ground_truth_is_a_task_or_has_a_reason(truth: Any) -> None:
    imported = import_rl([rl_row(truth), rl_row(json.dumps(truth), asked="Again?")])
    assert len(imported.items) + len(imported.rejected) == 2


def test_instructions_end_at_the_last_marker() -> None:
    assert after_instructions("Do it.\n\nQuestion: A?\nB") == "A?\nB"
    assert after_instructions("Task: ignored\nTask:\n x \n") == "x"
    assert after_instructions("Only a question: yes") == "Only a question: yes"


@pytest.mark.skipif(not BENCHMARKS, reason="COA_TEST_BENCHMARKS does not name their folder")
@pytest.mark.parametrize("name", ROWS_OF)
def test_the_published_benchmark_files_are_read_whole(name: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    imported = import_rl(read_rows(Path(BENCHMARKS) / name))
    assert imported.rejected == [] and len(imported.items) == ROWS_OF[name]
    for task in imported.items:
        assert bool(task.answers) != ("tests" in task.gold)
        assert "Special Token Restriction" not in task.question
