"""Tasks from files: fields, columns, and gold that stays where only scorers look."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from coa import tasks as table
from coa.environment import ToolSettings, open_environments
from coa.errors import CoaError, ConfigError, RecordError
from coa.evaluation.run import EvalSettings, run_eval
from coa.rewards.reward import REWARDS as NAMED_REWARDS
from coa.rollouts import choose_environments
from coa.tasks import Task, TaskSet


def test_every_column_that_sounds_like_an_answer_is_hidden_from_the_public_task(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tasks.csv"
    path.write_text("question,answer,target,Gold,level\nWhere?,Lima,LIMA,lima,2\n")
    (task,) = TaskSet.load(path)
    assert task.answers == ("Lima",)
    assert task.gold == {"target": "LIMA", "Gold": "lima"}
    assert task.meta == {"level": "2"}
    public = task.public()
    assert not public.gold and not public.answers and public.meta == {"level": "2"}


def test_what_was_said_before_the_question_is_part_of_the_task(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    lines = [{"question": "Where?", "history": each} for each in (said, [], said[:1])]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    talk, alone, told = TaskSet.load(path)
    assert talk.history == (("system", "Be brief."), ("user", "Hi")) and not alone.history
    assert len({talk.id, alone.id, told.id}) == 3 and alone.id == Task("Where?").id
    assert talk.public().history == talk.history and Task.from_json(talk.to_json()) == talk
    assert "history" not in alone.to_json()


@pytest.mark.parametrize(
    "wrong", ["x", ["x"], [{"role": "robot", "content": "x"}], [{"role": "user", "content": None}]]
)
def test_a_history_that_is_no_list_of_messages_is_refused(wrong: Any) -> None:
    with pytest.raises(RecordError, match=r"'history': found .*, expected"):
        Task.from_json({"question": "Where?", "history": wrong})


def test_one_answer_may_be_written_without_a_list(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "Where?", "answer": "Lima"}\n')
    (task,) = TaskSet.load(path)
    assert task.answers == ("Lima",)


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ('"answer": 42', ("42",)),
        ('"answer": 0', ("0",)),
        ('"answers": [1.5, "one and a half"]', ("1.5", "one and a half")),
        ('"answer": ""', ()),
        ('"answers": null, "meta": null, "gold": null, "id": null', ()),
        ('"answers": null, "answer": "Lima"', ("Lima",)),
    ],
)
def test_numbers_are_answers_and_null_is_nothing(
    fields: str, answers: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"question": "Where?", {fields}}}\n{{"question": "When?", {fields}}}\n')
    first, second = TaskSet.load(path)
    assert first.answers == second.answers == answers
    assert first.id != second.id and not first.meta and not first.gold


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ('"answers": {"a": 1}', "'answers': found {'a': 1}, expected a text, a number or a list"),
        ('"answers": [["a"]]', "'answers': found ['a'], expected"),
        ('"meta": [1]', "'meta': found [1], expected an object"),
        ('"gold": "x"', "'gold': found 'x', expected an object"),
    ],
)
def test_a_field_of_another_type_is_named_with_its_line(
    fields: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"question": "Where?", {fields}}}\n')
    with pytest.raises(RecordError, match=re.escape(f"tasks.jsonl:1: {says}")):
        TaskSet.load(path)


def test_an_unknown_field_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "Where?", "anwser": "Lima"}\n')
    with pytest.raises(RecordError, match=r"tasks.jsonl:1: 'anwser' is not a field of a task. Did"):
        TaskSet.load(path)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({}, "has no gold answer"),
        ({"gold": {"tests": {"calls": [1]}}}, "task t-1: tests: function is None"),
    ],
)
def test_a_task_that_cannot_be_judged_is_told_before_anything_is_rolled_out(
    record: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"question": "Where?", "id": "t-1", **record}) + "\n")
    script = tmp_path / "model.jsonl"
    script.write_text('{"question": "Where?", "turns": ["<answer>Lima</answer>"]}\n')
    settings = EvalSettings(model=f"scripted:{script}", tasks=str(path))
    with pytest.raises(CoaError, match=says):
        run_eval(settings, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_several_rollouts_at_temperature_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="k is 4 at temperature 0"):
        EvalSettings(k=4)


async def test_a_closed_book_has_no_tools(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "Where?", "answer": "Lima"}\n')
    environments, tasks = choose_environments((), path)
    for observations, tools in (("closed_book", []), ("withheld", ["wiki_search"])):
        how = ToolSettings(observations=observations)
        async with open_environments(environments, tasks, how) as opened:
            assert list(await opened.toolbox(tasks[0].public())) == tools


def test_a_table_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.csv"
    path.write_bytes(b"question,answer\nfine,1\ncaf\xe9?,2\n")
    with pytest.raises(RecordError, match=r"tasks.csv:3: not UTF-8. Save the file as UTF-8"):
        TaskSet.load(path)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_a_temperature_is_a_number_from_zero_up(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature is"):
        EvalSettings(temperature=temperature)


def test_ids_of_ones_own_in_a_csv_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("ID,question,answer\nq-7,Where?,Lima\n,Who?,Ada\n")
    first, second = TaskSet.load(path)
    assert first.id == "q-7" and not first.meta
    assert second.id == Task("Who?").id


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("tools", "ruler", "no such column: only JSONL can declare tools"),
        ("world", "Middle-earth", "the number of a world"),
        ("grammar", "past tense", "a path ending in .toml or one of mhqa, web"),
        ("reward", "5 points", "one of exact, squad"),
        ("reward", "gym", "one of exact, squad"),
    ],
)
def test_a_column_that_happens_to_be_called_like_an_order_is_named(
    tmp_path: Path, column: str, value: str, expected: str
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"question,answer,{column}\nWhere?,Lima,\nWho?,Ada,{value}\n")
    with pytest.raises(RecordError) as caught:
        TaskSet.load(path)
    assert f"mine.csv:3: column '{column}' is '{value}', expected {expected}" in str(caught.value)
    assert str(caught.value).endswith("Rename the column if it means something else.")


def test_columns_that_give_orders_are_kept_where_they_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("question,answer,world,grammar,reward,set\nWhere?,Lima,7,web,squad,A\n")
    (task,) = TaskSet.load(path)
    assert task.meta == {"world": "7", "grammar": "web", "reward": "squad", "set": "A"}
    assert sorted(table.REWARDS) == sorted(NAMED_REWARDS)


def test_a_row_that_occurs_twice_is_named_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("question,answer\nWhere?,Lima\nWho?,Ada\nWhere?,Peru\n")
    with pytest.raises(RecordError, match=r"mine\.csv:4: the question is that of line 2\. Remove"):
        TaskSet.load(path)
    path.write_text("id,question\n1,Where?\n1,Who?\n")
    with pytest.raises(RecordError, match=r"mine\.csv:3: the id is that of line 2\. Remove"):
        TaskSet.load(path)


def test_episodes_and_trajectories_are_not_taken_for_tasks() -> None:
    for key in ("events", "segments"):
        with pytest.raises(RecordError, match="is an episode or a trajectory, expected a task"):
            Task.from_json({"schema": 2, "question": "q?", key: []})
