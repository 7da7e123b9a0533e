"""Benchmarks from users' files: every published format becomes tasks, gold stays gold, and what is
wrong with a file is one line. The rows are written by us, in the formats of the real files.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark_rows import GOLD, ROOT, ROWS, SHOWN, loaded, packed, sealed, verl, write
from coa.environments.published import BENCHMARKS, load_benchmark
from coa.errors import RecordError, UsageError
from coa.rewards import choose_reward, exact_match
from coa.tasks import Task, TaskSet

# -- what comes out --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_rows_in_the_published_form_become_tasks_that_say_how_they_are_judged(
    name: str, tmp_path: Path
) -> None:
    tasks = loaded(name, write(tmp_path / "rows.jsonl", ROWS[name]))
    assert len(tasks) == len(ROWS[name])
    known = BENCHMARKS[name]
    for task in tasks:
        assert task.id.startswith(f"{name}-") and len(task.id) > len(name) + 1
        assert (task.meta["set"], task.meta["grammar"]) == (name, known.grammar)
        assert choose_reward("auto", [task]) == known.reward
        assert bool(task.answers) != bool(task.gold.get("tests"))
    tasks.save(tmp_path / "tasks.jsonl")
    assert tuple(TaskSet.load(tmp_path / "tasks.jsonl")) == tasks.tasks


def test_every_benchmark_but_the_one_with_files_of_its_own_is_tried_here() -> None:
    assert {*ROWS, "bfcl"} == {*BENCHMARKS}


STDIN_CASE = {"input": "8 8\n", "output": "16\n"}
OTHER_GOLD: dict[str, dict[str, Any]] = {
    "nq": {"answer": ["x"], "golden_answers": ["x"]},
    "triviaqa": {"Answer": {"Value": "x", "Aliases": ["y"]}},
    "popqa": {"possible_answers": '["x"]'},
    "hotpotqa": {"answer": "x", "supporting_facts": [["x", 1]], "context": []},
    "2wiki": {"answer": "x"},
    "musique": {"answer": "x", "answer_aliases": ["y"], "question_decomposition": []},
    "bamboogle": {"Answer": "x"},
    "gaia": {"Final answer": "x", "Annotator Metadata": {"Steps": "x"}},
    "webwalker": {"answer": "x"},
    "browsecomp": {"answer": sealed("x")},
    "hle": {"answer": "x", "rationale": "x"},
    "aime24": {"reward_model": {"ground_truth": "77", "style": "rule"}},
    "aime25": {"answer": "77"},
    "amc23": {"reward_model": {"ground_truth": "77.0", "style": "rule"}},
    "math500": {"answer": "77", "solution": "It is 77."},
    "olympiadbench": {"final_answer": ["$7$", "$8$"], "solution": ["7 and 8"]},
    "livecodebench-v4": {
        "public_test_cases": json.dumps([STDIN_CASE | {"testtype": "stdin"}]),
        "private_test_cases": packed([STDIN_CASE | {"testtype": "stdin"}]),
    },
    "livecodebench-v5": {
        "reward_model": {
            "ground_truth": json.dumps({"stdin": ["8 8\n"], "expected_output": ["16\n"]})
        }
    },
    "codecontests": {
        "public_tests": {"input": ["8 8\n"], "output": ["16\n"]},
        "private_tests": {"input": [], "output": []},
        "solutions": {"solution": ["x"]},
    },
    "humaneval": {
        "canonical_solution": "    return n + n\n",
        "test": "def check(candidate):\n    assert candidate(8) == 16\n",
    },
}
"""Of each benchmark, whatever only a scorer may see, with other content."""


def test_the_manual_lists_every_benchmark_as_it_is() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    table = [line for line in text.splitlines() if line.startswith("| `")]
    found = [[cell.strip(" `") for cell in line.split("|")] for line in table]
    assert [[row[1], *row[3:7]] for row in found] == [
        [known.name, f"{known.size:,}", known.grammar, known.reward, judged]
        for known in BENCHMARKS.values()
        for judged in ["yes" if known.reward == "judge" else "no"]
    ]


@pytest.mark.parametrize("name", ROWS)
def test_another_gold_changes_nothing_that_is_public(name: str, tmp_path: Path) -> None:
    row, other = ROWS[name][0], OTHER_GOLD[name]
    changed = row | {key: value for key, value in other.items() if key in row}
    if "info" in row:
        changed["info"] = row["info"] | {"golden_path": ["x"], "source_website": ["x"]}
    (before,) = loaded(name, write(tmp_path / "a.jsonl", [row]))
    (after,) = loaded(name, write(tmp_path / "b.jsonl", [changed]))
    assert before.public() == after.public()
    assert (before.answers, before.gold.get("tests")) != (after.answers, after.gold.get("tests"))
    assert {*before.meta} <= SHOWN


def test_aliases_are_gold_too(tmp_path: Path) -> None:
    for name in ("nq", "triviaqa", "musique"):
        (first, *_) = loaded(name, write(tmp_path / "rows.jsonl", ROWS[name]))
        assert first.answers == (GOLD, "Lagoon")
        assert exact_match("lagoon", first.answers) and not exact_match("Lagos", first.answers)


def test_reports_can_group_by_what_a_benchmark_says_of_its_tasks(tmp_path: Path) -> None:
    wanted = {
        "popqa": {"family": "capital"},
        "hotpotqa": {"family": "bridge", "level": "hard"},
        "musique": {"hops": 3},
        "gaia": {"level": 2},
        "webwalker": {"family": "single_source", "level": "easy", "lang": "en"},
        "browsecomp": {"family": "Towns"},
        "hle": {"family": "Other", "answer_type": "exactMatch"},
        "math500": {"family": "Algebra", "level": 3},
        "livecodebench-v4": {"family": "atcoder", "level": "easy"},
        "codecontests": {"family": "codeforces", "level": 800},
    }
    for name, fields in wanted.items():
        task = loaded(name, write(tmp_path / "rows.jsonl", ROWS[name]))[0]
        assert {key: task.meta[key] for key in fields} == fields


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".jsonl.gz"])
def test_a_file_may_have_any_of_the_usual_formats(suffix: str, tmp_path: Path) -> None:
    rows = [{"Question": f"Which town, {i}?", "Answer": GOLD} for i in range(3)]
    path = write(tmp_path / f"rows{suffix}", rows)
    assert [task.answers for task in loaded("bamboogle", path)] == [(GOLD,)] * 3


def test_json_may_hold_its_rows_under_a_key_or_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"Data": ROWS["triviaqa"], "Version": 1.0}))
    assert loaded("triviaqa", path)[0].answers[0] == GOLD
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS["nq"]))
    assert len(loaded("nq", path)) == 2


def test_a_question_that_is_asked_twice_counts_twice(tmp_path: Path) -> None:
    tasks = loaded("bamboogle", write(tmp_path / "rows.jsonl", ROWS["bamboogle"] * 2))
    assert len({task.id for task in tasks}) == len(tasks) == 2


def test_n_is_spread_over_families_and_families_can_be_chosen(tmp_path: Path) -> None:
    rows = [
        {"question": f"{kind}{i}?", "answer": "x", "type": kind}
        for kind in ("bridge", "comparison")
        for i in range(5)
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    some = load_benchmark("hotpotqa", path, n=4).tasks
    assert [task.meta["family"] for task in some] == ["bridge", "comparison"] * 2
    one = load_benchmark("hotpotqa", path, families=["comparison"]).tasks
    assert {task.meta["family"] for task in one} == {"comparison"} and len(one) == 5
    with pytest.raises(UsageError, match=r"no task of family 'comparisons'. Did you mean"):
        load_benchmark("hotpotqa", path, families=["comparisons"])
    with pytest.raises(UsageError, match="n is 11, expected 1 to 10"):
        load_benchmark("hotpotqa", path, n=11)


def test_what_text_alone_cannot_answer_is_left_out_and_counted(tmp_path: Path) -> None:
    with_file = ROWS["gaia"][0] | {"task_id": "d", "file_name": "table.xlsx"}
    found = load_benchmark("gaia", write(tmp_path / "g.jsonl", [*ROWS["gaia"], with_file]))
    assert len(found.tasks) == 1 and found.left_out == {"comes with a file": 1}
    picture = ROWS["hle"][0] | {"id": "e", "image": "base64 of it"}
    found = load_benchmark("hle", write(tmp_path / "h.jsonl", [*ROWS["hle"], picture]))
    assert len(found.tasks) == 1 and found.left_out == {"comes with a picture": 1}
    no = ROWS["musique"][0] | {"answerable": False}
    with pytest.raises(RecordError, match=r"no row can be used \(made to be unanswerable: 1\)"):
        load_benchmark("musique", write(tmp_path / "m.jsonl", [no]))


# -- what is wrong with a file ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nq", '{"text": "a"}\n', r"rows.jsonl: row 1: found the columns 'text', expected 'quest"),
        ("nq", '{"question": "a", "answer": []}\n', "row 1: 'answer' is empty"),
        ("nq", '{"question": "", "answer": ["a"]}\n', "row 1: 'question' is empty"),
        ("nq", '{"question": ["a"], "answer": ["a"]}\n', "row 1: 'question' is a list, expected"),
        ("nq", "", "rows.jsonl: holds no row"),
        ("nq", "[1]\n", "rows.jsonl:1: found a list, expected a JSON object"),
        ("nq", '{"question": \n', r"rows.jsonl:1: the line is not JSON \(Expecting value\)"),
        ("gaia", '{"Question": "a", "Final answer": "?"}\n', "the test split has no answers"),
        ("codecontests", '{"description": "a"}\n', "row 1: .*expected 'public_tests'"),
        ("livecodebench-v4", '{"question_content": "a"}\n', "row 1: .*'public_test_cases'"),
        ("humaneval", '{"prompt": "def f(:", "entry_point": "f"}\n', "'prompt' is not Python"),
        ("humaneval", '{"prompt": "\\u0000", "entry_point": "f"}\n', "'prompt' is not Python"),
        (
            "livecodebench-v5",
            json.dumps(verl("a", '{"question_id": "q"}')) + "\n",
            "'ground_truth' holds no tests, expected one of stdin",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_one_line_with_its_row(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(RecordError, match=message) as caught:
        load_benchmark(name, path)
    assert "\n" not in str(caught.value)


def test_a_wrong_name_format_or_place_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'hotpot' is not a benchmark. Did you mean 'hotpotqa'"):
        load_benchmark("hotpot", tmp_path / "x")
    with pytest.raises(UsageError, match="no such file"):
        load_benchmark("nq", tmp_path / "x.jsonl")
    with pytest.raises(UsageError, match="is a folder, expected a file"):
        load_benchmark("nq", tmp_path)
    for name, wrong in (("a.xlsx", UsageError), ("a.parquet", RecordError), ("a.gz", UsageError)):
        (tmp_path / name).write_bytes(b"no table")
        with pytest.raises(wrong, match=r"expected one of .jsonl|not a parquet file"):
            load_benchmark("nq", tmp_path / name)
    (tmp_path / "b.jsonl").write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(RecordError, match="not UTF-8"):
        load_benchmark("nq", tmp_path / "b.jsonl")
    whole = gzip.compress(b'{"question": "a"}')
    for content in (b"no gzip", whole[:-9], whole[:10] + b"\xff" * 20):
        (tmp_path / "c.jsonl.gz").write_bytes(content)
        with pytest.raises(RecordError, match="not a whole gzip file"):
            load_benchmark("nq", tmp_path / "c.jsonl.gz")


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ROWS)), st.data())
def test_whatever_a_column_holds_a_row_is_a_task_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, draw: st.DataObject
) -> None:
    row = dict(draw.draw(st.sampled_from(ROWS[name])))
    row[draw.draw(st.sampled_from(sorted(row)))] = draw.draw(_JSON)
    path = tmp_path_factory.mktemp("fuzz") / "rows.jsonl"
    try:
        tasks = loaded(name, write(path, [row]))
    except RecordError as error:
        assert "\n" not in str(error)
    else:
        assert all(isinstance(task, Task) and task.question for task in tasks)
