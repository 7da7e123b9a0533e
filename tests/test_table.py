"""Tables of questions: what could only be read by guessing is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from coa.errors import RecordError
from coa.tasks import TaskSet

HEADER = "id,question,answer,level\n"


def said_of(text: str, tmp_path: Path, name: str = "mine.csv") -> str:
    """What is said when a table is refused, without the folder."""
    (tmp_path / name).write_text(text)
    with pytest.raises(RecordError) as caught:
        TaskSet.load(tmp_path / name)
    return str(caught.value).removeprefix(f"{tmp_path}/")


def questions(text: str, tmp_path: Path, name: str = "mine.csv") -> list[str]:
    (tmp_path / name).write_text(text)
    return [task.question for task in TaskSet.load(tmp_path / name)]


def test_a_comma_that_cuts_a_question_in_two_is_found(tmp_path: Path) -> None:
    row = "q4,How many watts does the heater H-7, the old one, draw?,3600,1\n"
    assert said_of(f"{HEADER}q1,Where?,Lima,1\n\n{row}", tmp_path) == (
        "mine.csv:4: found 6 cells, expected 4, as many as the first line names. "
        "Put a cell that holds a comma in quotes."
    )
    quoted = 'q4,"How many watts does the heater H-7, the old one, draw?",3600,1\n'
    assert questions(HEADER + quoted, tmp_path) == [
        "How many watts does the heater H-7, the old one, draw?"
    ]


def test_a_cut_question_is_found_where_its_last_cell_is_empty(tmp_path: Path) -> None:
    assert "mine.csv:2: found 3 cells, expected 2," in said_of(
        "question,answer\nHow many, if any?,\n", tmp_path
    )


def test_columns_without_a_name_may_be_there_but_hold_nothing_at_the_end(tmp_path: Path) -> None:
    by_a_spreadsheet = "question,answer,,\nWhere?,Lima,,\n"
    assert questions(by_a_spreadsheet, tmp_path) == ["Where?"]
    with_an_index = ",question,answer\n0,Where?,Lima\n"
    assert questions(with_an_index, tmp_path) == ["Where?"]
    cut = "question,answer,\nHow many, if any?,5\n"
    assert "mine.csv:2: found 3 cells, expected 2," in said_of(cut, tmp_path)


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ('q1,Where?,Lima,1\nq2,"How big is it?,5,1\nq3,Who?,Ada,1\n', 3),
        ('q1,"How big is it?,5,1\nq2,"Who?",Ada,1\n', 2),
        ('q1,"one\ntwo",Lima,1\nq2,"How big?,5,1\n', 4),
        ('q1,"Dune" was written by whom?,Herbert,1\n', 2),
    ],
)
def test_a_quote_that_is_not_closed_is_named_where_its_row_begins(
    rows: str, line: int, tmp_path: Path
) -> None:
    said = said_of(HEADER + rows, tmp_path)
    assert said.startswith(f"mine.csv:{line}: a cell of this row opens a quote and does not end")
    assert said.endswith('Close it where the cell ends, and write "" for a quote inside of it.')


def test_an_open_quote_is_named_however_much_it_swallows(tmp_path: Path) -> None:
    rest = "".join(f"q{n},What is the name of number {n}?,{n},1\n" for n in range(10_000))
    assert said_of(f'{HEADER}x,"Where?,Lima,1\n{rest}', tmp_path).startswith(
        "mine.csv:2: a cell of this row opens a quote"
    )


def test_quotes_and_line_breaks_in_a_quoted_cell_are_kept(tmp_path: Path) -> None:
    rows = 'q1,"Who wrote ""Dune"",\nand when?",Herbert,1\nq2,What is a 5" pipe?,a pipe,1\n'
    assert questions(HEADER + rows, tmp_path) == [
        'Who wrote "Dune",\nand when?',
        'What is a 5" pipe?',
    ]


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("question,answer,question", "two columns are named 'question'. Rename one of them,"),
        ("question,answer, Answer", "two columns are named 'answer'. Rename one of them,"),
        ("question,answer,level,level", "two columns are named 'level'. Rename one of them,"),
        ("Prompt,question,answer", "the columns 'question' and 'Prompt' both mean the question."),
    ],
)
def test_columns_that_cannot_be_told_apart_are_refused(
    header: str, says: str, tmp_path: Path
) -> None:
    said = said_of(f"{header}\na,b,c,d\n", tmp_path)
    assert said.startswith(f"mine.csv:1: {says}") and said.endswith("or remove it.")


def test_a_row_may_end_early_when_what_is_missing_is_optional(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(f"{HEADER}q1,Where?,Lima\nq2,Who?\n")
    first, second = TaskSet.load(tmp_path / "mine.csv")
    assert (first.answers, first.meta) == (("Lima",), {}) and not second.answers
    assert said_of(f"{HEADER}q1\n", tmp_path) == (
        "mine.csv:2: the question is empty. Write one, or remove the row."
    )


def test_a_table_with_tabs_is_read_when_its_name_says_so(tmp_path: Path) -> None:
    rows = "question\tanswer\nHow many, if any?\t5\n"
    assert questions(rows, tmp_path, "mine.tsv") == ["How many, if any?"]
    assert said_of(rows + "a\tb\tc\n", tmp_path, "mine.TSV").endswith(
        "Put a cell that holds a tab in quotes."
    )
    assert "separated by tabs." in said_of("question,answer\nWhere?,Lima\n", tmp_path, "mine.tsv")


def test_a_table_under_another_name_is_told_how_it_has_to_end(tmp_path: Path) -> None:
    said = said_of("question,answer\nWhere?,Lima\n", tmp_path, "mine.txt")
    assert said.startswith("mine.txt:1: the line is not JSON")
    assert said.endswith("A table has to end in .csv or .tsv.")
    lines = '{"question": "Where?", "anwser": "Lima"}\n'
    for name in ("mine.txt", "mine.jsonl"):
        assert "A table" not in said_of(lines, tmp_path, name)
    assert "A table" not in said_of("question,answer\n", tmp_path, "mine.jsonl")
