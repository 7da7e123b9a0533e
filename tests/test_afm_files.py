"""Imports of the published AFM files: what they hold comes in, what does not fit has a reason."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.distillation.exports import export
from coa.environments.published.afm import (
    detect_grammar,
    import_sft,
    read_rows,
    run_import_rl,
    run_import_sft,
)
from coa.errors import RecordError, UsageError
from coa.grammar import check, load_grammar, parse, system_prompt
from coa.io.runs import Json
from coa.tasks import Task
from coa.trajectory import Author, StopReason, load_trajectories
from export_chains import ANSWER, SEARCH, SETS, chain, chains_of
from import_files import atif_team, write

WEB = """<think>
I need a plan.
</think>
<plan>
1. search
</plan>
<think>
Search it.
</think>
<web_search>
tallest tower in Oslo
</web_search>
<observation>
[Page 1] A tower. <answer>no</answer>
</observation>

<think>
Look closer.
</think>
<crawl_page>
https://towers.example/oslo|https://towers.example/list
</crawl_page>

<observation>
The tower is called Plaza.
</observation>

<think>
Good.
</think>
<suggested_answer>
Plaza
</suggested_answer>
<think>
Check it.
</think>
<double_check>
The page says so. Score: 4
</double_check>
<think>
Done.
</think>
<answer>
Plaza
</answer>"""
CODE = """<plan>
1. compute
</plan>
<think>
Run it.
</think>
<code>
```py
print(6 * 7)
```
</code>
<observation>
42
</observation>

<reflection>
As expected.
</reflection>
<think>
Answer.
</think>
<answer>
\\boxed{42}
</answer>"""
INSTRUCTIONS = "You can use <web_search> and <crawl_page>. Question: is a word in here.\n"


def web_row(output: str = WEB, **more: Any) -> Json:
    asked = f"{INSTRUCTIONS} \n\nQuestion: What is the tallest tower in Oslo?"
    return {"instruction": asked, "input": "", "output": output, **more}


# -- fine-tuning -----------------------------------------------------------------------------


def test_a_web_row_becomes_a_legal_chain_with_the_environments_observations() -> None:
    imported = import_sft([web_row()])
    assert imported.rejected == []
    (trajectory,) = imported.items
    grammar = load_grammar("web")
    assert trajectory.grammar == "web" and trajectory.tools == ["web_search", "crawl_page"]
    assert trajectory.question == "What is the tallest tower in Oslo?"
    assert trajectory.task_id == Task(trajectory.question).id
    assert trajectory.segments[0].text == system_prompt(grammar, "compact")
    assert trajectory.answer == "Plaza" and trajectory.stop is StopReason.ANSWERED
    assert (trajectory.usage.turns, trajectory.usage.tool_calls) == (3, 2)
    observed = [s.text for s in trajectory.segments if s.author is Author.ENV]
    assert observed == [
        "\n<observation>\n[Page 1] A tower. &lt;answer>no&lt;/answer>\n</observation>\n",
        "\n<observation>\nThe tower is called Plaza.\n</observation>\n",
    ]
    written = [s.text for s in trajectory.segments if s.author is Author.MODEL]
    assert written[0].endswith("tallest tower in Oslo\n</web_search>")
    assert written[1].startswith("<think>\nLook closer.")
    assert check(grammar, parse(grammar, trajectory.text, env=True)) is None


def test_a_row_with_line_breaks_of_windows_is_the_same_chain() -> None:
    plain, windows = web_row(), {k: v.replace("\n", "\r\n") for k, v in web_row().items()}
    assert windows != plain
    assert import_sft([windows]).items == import_sft([plain]).items


def test_a_code_row_is_recognised_and_its_question_follows_the_last_task_line() -> None:
    row = {"instruction": "Task: solve.\n\nTask:\nWhat is 6 times 7?", "output": CODE}
    (trajectory,) = import_sft([row]).items
    assert trajectory.grammar == "code" and trajectory.question == "What is 6 times 7?"
    assert trajectory.answer == "\\boxed{42}"


@pytest.mark.parametrize("grammar", [*SETS])
def test_the_grammar_is_told_by_the_tags(grammar: str) -> None:
    assert detect_grammar([t.text for t in chains_of(grammar)]) == grammar


def test_tags_in_a_page_and_in_a_rare_row_do_not_decide() -> None:
    page = WEB.replace("A tower.", "Type <code>ls</code> and <wiki_search>x</wiki_search>.")
    assert detect_grammar([page]) == "web"
    assert detect_grammar([WEB] * 99 + ["<code>x</code>"]) == "web"
    assert detect_grammar([WEB, CODE]) == "afm"


def test_tags_of_no_preset_ask_for_a_grammar() -> None:
    with pytest.raises(RecordError, match="blocks found: none that is known; no preset"):
        detect_grammar(["plain text"])
    mixed = ["<search>x</search><code>y</code>"]
    with pytest.raises(RecordError, match=r"found: <code>, <search>; .* Choose with --grammar"):
        detect_grammar(mixed)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"output": WEB}, "no text under 'instruction' and 'output'"),
        (
            {"instruction": "Question: x", "output": None},
            "no text under 'instruction' and 'output'",
        ),
        (web_row(history=[["a", "b"]]), "a conversation of several turns ('history')"),
        ({"instruction": "Question: ", "output": WEB}, "no question after the instructions"),
        (
            web_row(WEB.replace("<web_search>\ntallest tower in Oslo\n</web_search>\n", "")),
            "an observation without a call before it",
        ),
        (web_row(WEB.partition("<answer>")[0]), "not legal under 'web', unclosed"),
        (web_row(WEB.replace("<plan>", "<plan><think>")), "not legal under 'web', nested"),
        (web_row(WEB.replace("Score: 4", "fine")), "not legal under 'web', unscored"),
        (web_row("Well. " + WEB), "not legal under 'web', stray"),
        (
            web_row(WEB.replace("</observation>\n\n<think>\nLook", "<think>\nLook")),
            "an observation that is not closed before the next one",
        ),
        (web_row(input={"a": "Why?"}), "'input' is not text"),
    ],
)
def test_a_row_that_does_not_fit_has_a_reason_and_the_rest_goes_on(row: Json, reason: str) -> None:
    imported = import_sft([row, web_row()], "web")
    assert len(imported.items) == 1 and imported.rejected[0]["row"] == 1
    assert imported.rejected[0]["reason"].startswith(reason)
    ((counted, count),) = imported.reasons.items()
    assert counted.startswith(reason) and count == 1


def test_several_chains_for_one_question_are_samples_of_one_task() -> None:
    first, second = import_sft([web_row(), web_row()]).items
    assert first.task_id == second.task_id and (first.sample, second.sample) == (0, 1)


def test_the_question_may_stand_under_input() -> None:
    row = {"instruction": "Work on the web.", "input": " Who?\n", "output": WEB}
    assert import_sft([row]).items[0].question == "Who?"


@pytest.mark.parametrize("grammar", [*SETS])
def test_what_is_exported_comes_back_the_same(grammar: str, tmp_path: Path) -> None:
    trajectories = list(chains_of(grammar))
    export(trajectories, "alpaca", tmp_path, note=lambda line: None)
    imported = import_sft(read_rows(tmp_path / "alpaca.json"))
    assert imported.rejected == []
    for again, trajectory in zip(imported.items, trajectories, strict=True):
        found = [(s.author, s.text) for s in again.segments]
        assert found == [(s.author, s.text) for s in trajectory.segments]
        assert again.question == trajectory.question and again.answer == trajectory.answer
        assert (again.grammar, again.tools) == (trajectory.grammar, trajectory.tools)
        assert again.prompt == trajectory.prompt


LINES = st.lists(
    st.sampled_from(["Lima", " ", "\n", "<", ">", "</", "<b>", "\n\nQuestion: ", "Task:", "\t"])
    | st.text(max_size=4),
    max_size=6,
).map("".join)


@given(question=LINES, observed=LINES, thought=LINES)
@settings(deadline=None)
def test_any_text_comes_back_or_is_left_out_with_a_reason(
    question: str, observed: str, thought: str
) -> None:
    grammar = load_grammar("mhqa")
    turn = f"<think>{thought.replace('<', '')}</think>\n<answer> Lima</answer>"
    trajectory = chain(SEARCH, observed, turn, question=f"Q{question}")
    told: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            export([trajectory], "alpaca", Path(folder), note=told.append)
        except RecordError as error:
            assert "left out 1: " in str(error)
            return
        (row,) = read_rows(Path(folder) / "alpaca.json")
    (again,) = import_sft([row], grammar.name).items
    assert again.question == trajectory.question
    assert [(s.author, s.text) for s in again.segments] == [
        (s.author, s.text) for s in trajectory.segments
    ]


def test_the_command_writes_trajectories_and_what_was_left_out(tmp_path: Path) -> None:
    told: list[str] = []
    source, out = tmp_path / "sft.jsonl", tmp_path / "trajectories.jsonl"
    rows = [web_row(), web_row("<answer>x</answer>"), {"instruction": "x"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = run_import_sft(source, out, note=told.append)
    assert report["rows"] == 1 and report["grammar"] == "web"
    assert [t.answer for t in load_trajectories(out)] == ["Plaza"]
    left = read_rows(tmp_path / "trajectories.rejected.jsonl")
    assert [line["row"] for line in left] == [2, 3]
    assert sorted(told) == [
        "left out 1: no text under 'instruction' and 'output' (first: row 3).",
        "left out 1: not legal under 'web', illegal (first: row 2).",
    ]


@pytest.mark.parametrize("run", [run_import_sft, run_import_rl])
def test_an_import_does_not_write_over_what_it_reads(run: Any, tmp_path: Path) -> None:
    source, link = tmp_path / "afm.rejected.jsonl", tmp_path / "link.jsonl"
    text = json.dumps(web_row() | {"question": "Where?", "answer": "Here"}) + "\n"
    source.write_text(text)
    link.symlink_to(source)
    for out in (source, link, tmp_path / "afm.jsonl"):  # the last one's rejects have its name
        with pytest.raises(UsageError, match="is the file to read"):
            run(source, out)
        assert source.read_text() == text


def test_what_was_left_out_before_is_not_told_of_a_clean_import(tmp_path: Path) -> None:
    source, out = tmp_path / "sft.jsonl", tmp_path / "t.jsonl"
    source.write_text(f"{json.dumps(web_row())}\n{json.dumps({'instruction': 'x'})}\n")
    run_import_sft(source, out, note=lambda line: None)
    assert (tmp_path / "t.rejected.jsonl").exists()
    source.write_text(f"{json.dumps(web_row())}\n")
    assert run_import_sft(source, out)["files"] == [str(out)]
    assert not (tmp_path / "t.rejected.jsonl").exists()


def test_a_file_without_any_usable_row_is_an_error(tmp_path: Path) -> None:
    source, out = tmp_path / "sft.json", tmp_path / "t.jsonl"
    source.write_text(json.dumps([web_row("<answer>x</answer>")]))
    with pytest.raises(RecordError, match="no row can be imported; left out 1: not legal"):
        run_import_sft(source, out, "web")
    source.write_text('[{"question": "x"}]')
    with pytest.raises(RecordError, match=r"sft\.json: no row has text under 'output'"):
        run_import_sft(source, out)
    source.write_text("[]")
    with pytest.raises(RecordError, match=r"sft\.json: holds no row"):
        run_import_sft(source, out)
    assert not out.exists()


# -- folders ---------------------------------------------------------------------------------

TASK = {"extra_info": {"question": "Where?"}, "reward_model": {"ground_truth": "Lima"}}


def command(*words: object) -> tuple[str, list[str]]:
    """What `coa import` says: its result, and what it notes beside it."""
    from typer.testing import CliRunner

    from coa.cli import app

    done = CliRunner().invoke(app, ["import", *map(str, words)], catch_exceptions=False)
    return done.stdout, done.stderr.splitlines()


def folder_of(path: Path, **files: object) -> Path:
    for name, value in files.items():
        write(path / f"{name}.json", value)
    (path / "README.md").write_text("# what this is")
    return path


@pytest.mark.parametrize("into", ["beside", "inside"])
def test_a_folder_of_published_files_is_imported_as_a_file_is(into: str, tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path / "sft", b=[web_row(), web_row("<answer>x</answer>")], a=[web_row()]
    )
    out = (folder if into == "inside" else tmp_path) / "t.jsonl"
    for _ in range(2):  # what it wrote itself is none of its files
        said, noted = command(folder, "--out", out)
        assert said == f"2 rows in {out} (afm-sft: chains, not episodes)\n"
        assert noted == [
            "files that are no afm-sft left out: 1",
            "left out 1: not legal under 'web', illegal (first: row 3).",
        ]
        assert [t.answer for t in load_trajectories(out)] == ["Plaza", "Plaza"]
    one = folder_of(tmp_path / "one", rl=[TASK])
    said, noted = command(one, "--out", tmp_path / "tasks.jsonl")
    assert "1 rows in" in said and noted == ["files that are no afm-rl left out: 1"]


def test_a_folder_with_chains_and_tasks_asks_which(tmp_path: Path) -> None:
    folder, out = folder_of(tmp_path / "all", sft=[web_row()], rl=[TASK]), tmp_path / "t.jsonl"
    for format in ("auto", "afm"):
        with pytest.raises(
            UsageError, match=r"all: holds afm-rl and afm-sft; choose with --format"
        ):
            command(folder, "--out", out, "--format", format)
    for words in ((folder, "--format", "afm-sft"), ("afm-sft", folder)):
        said, noted = command(*words, "--out", out)
        assert "1 rows in" in said and noted == ["files that are no afm-sft left out: 2"]
    for name in ("sft", "rl"):
        own = folder / f"{name}.json"
        held = own.read_text()
        with pytest.raises(UsageError, match=r"found neither|holds something else"):
            command(folder, "--out", own, "--format", f"afm-{name}")
        write(folder / "more.json", [web_row(), TASK][name == "rl"])
        with pytest.raises(UsageError, match="holds something else"):
            command(folder, "--out", own, "--format", f"afm-{name}")
        assert own.read_text() == held


def test_published_files_beside_those_of_a_team_are_told_by_their_names(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "all", sft=[web_row()], rl=[TASK], team=atif_team())
    for format in ("auto", "atif"):
        said, noted = command(folder, "--out", tmp_path / f"{format}.jsonl", "--format", format)
        assert said.startswith("1 episodes in")
        assert noted == [
            "files of no known format left out: 1 (first: README.md)",
            "files of afm-rl left out: 1 (first: rl.json)",
            "files of afm-sft left out: 1 (first: sft.json)",
            "not known: usage unknown 2",
        ]
    said, noted = command(folder, "--out", tmp_path / "t.jsonl", "--format", "afm-sft")
    assert "1 rows in" in said and noted == ["files that are no afm-sft left out: 3"]


def test_a_folder_without_anything_that_was_published_says_so(tmp_path: Path) -> None:
    folder, out = folder_of(tmp_path / "none", x={"nothing": 1}), tmp_path / "t.jsonl"
    with pytest.raises(UsageError, match="none: is of no format that is known"):
        command(folder, "--out", out)
    with pytest.raises(UsageError, match="none: found neither chains nor tasks as AFM published"):
        command(folder, "--out", out, "--format", "afm-sft")
    both = folder_of(tmp_path / "tie", x=[{**web_row(), **atif_team()}])
    with pytest.raises(UsageError, match=r"x\.json: may be afm-sft or atif; choose with --format"):
        command(both, "--out", out)
    bad = folder_of(tmp_path / "bad", a=[web_row("<answer>x</answer>")], b=[web_row("no chain")])
    with pytest.raises(RecordError, match=r"bad: no row can be imported"):
        command(bad, "--out", out, "--grammar", "web")
    assert not out.exists()


# -- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"x": 1}', r"a\.json: not JSON .* Expected a list of objects"),
        ("a.json", "[" * 100_000, r"a\.json: not JSON .* Expected a list of objects"),
        ("a.json", "[1]", r"a\.json: row 1 is a int, expected an object"),
        ("a.jsonl", '{"x": 1}\n{"x"\n', r"a\.jsonl:2: the line is not JSON"),
        ("a.json", '"text"', r"a\.json: found a str, expected a list of objects"),
        ("a.parquet", "PAR", r"a\.parquet: not a parquet file"),
    ],
)
def test_a_damaged_file_is_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(content)
    with pytest.raises(RecordError, match=message):
        read_rows(tmp_path / name)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json: no such file"):
        read_rows(tmp_path / "none.json")


def test_the_answer_of_a_chain_is_kept() -> None:
    (trajectory,) = import_sft(
        [{"instruction": "Question: Where?", "output": ANSWER}], "react"
    ).items
    assert trajectory.answer == "Lima"
