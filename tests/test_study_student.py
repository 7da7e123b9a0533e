"""A measured student against the team: who pays, what is divided, and the whole with a script."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from coa.environments import make_tasks
from coa.errors import ConfigError
from coa.lab.studies import STUDIES
from coa.lab.study_student import StudentPart, compared, student_lines, study_student
from scripts import write_script

FEW = 300


def columns(
    team: str, student: str, spent: tuple[float, float] = (1000, 200)
) -> dict[str, list[float]]:
    """Tokens that are the same for every task, and who solved which."""
    made: dict[str, list[float]] = {}
    for who, solved, tokens in (("team", team, spent[0]), ("student", student, spent[1])):
        made[f"{who} solved"] = [float(each) for each in solved]
        made[f"{who} none"] = [tokens] * len(solved)
        made[f"{who} task"] = [tokens / 2] * len(solved)
    return made


def test_failed_tasks_are_paid_for_and_only_solved_ones_count() -> None:
    found = compared(columns("1111", "1010"), FEW)
    tokens = found["tokens"]["none"]
    assert (tokens["team"]["value"], tokens["student"]["value"]) == (1000, 400)
    assert tokens["reduction"]["value"] == 0.6 and tokens["times_fewer"]["value"] == 2.5
    assert found["solved"] == {"team": 4, "student": 2}
    assert found["success"]["value"] == -0.5 and found["success"]["losses"] == 2


def test_times_fewer_and_reduction_are_the_same_interval() -> None:
    found = compared(columns("1" * 40, "1" * 30 + "0" * 10), FEW)["tokens"]["task"]
    for fewer, times in zip(found["reduction"]["ci95"], found["times_fewer"]["ci95"], strict=True):
        assert times == pytest.approx(1 / (1 - fewer), rel=1e-4)
    assert found["times_fewer"]["ci95"][0] < found["times_fewer"]["ci95"][1]


@pytest.mark.parametrize(
    ("student", "word"), [("1" * 40, "not told apart"), ("0" * 30 + "1" * 10, "lower")]
)
def test_whether_success_is_lower_is_said(student: str, word: str) -> None:
    one = compared(columns("1" * 40, student), FEW)
    shown = "\n".join(student_lines({"model": "m", "sets": {"atlas-mhqa": one}}))
    assert f"]: {word}" in shown and "times" in shown


def test_a_student_that_solves_nothing_is_a_result() -> None:
    one = compared(columns("1111", "0000"), FEW)
    assert one["tokens"] == {} and one["success"]["value"] == -1
    shown = "\n".join(student_lines({"model": "m", "sets": {"a": one}}))
    assert "nothing to divide by" in shown


def test_a_student_has_the_budget_that_the_shipped_model_is_measured_with() -> None:
    text = resources.files("coa").joinpath("recipes", "full.toml").read_text("utf-8")
    measured, part = tomllib.loads(text)["eval"], StudentPart()
    for name in ("turns", "turn_tokens", "context"):
        assert getattr(part, name) == measured[name], name


def test_without_a_model_there_is_no_student() -> None:
    assert not STUDIES["cost"].read([]).student.model


def test_a_student_is_run_on_the_tasks_of_the_team(tiny_model: Path, tmp_path: Path) -> None:
    """The scripted student does what the experts do, so it solves what they solve."""
    tasks = make_tasks("atlas-mhqa", "heldout_entity", 6, 5)
    model = f"scripted:{write_script(tmp_path / 'student.jsonl', list(tasks))}"
    part = StudentPart(
        model=model,
        tokenizer=f"hf:{tiny_model}",
        n=6,
        sets=("atlas-mhqa",),
        error_rate=0.0,
        context=60000,
        turn_tokens=4000,
    )
    found = study_student(tmp_path / "study", part, lambda line: None, FEW)
    one = found["sets"]["atlas-mhqa"]
    assert one["n"] == 6 and one["solved"] == {"team": 6, "student": 6}
    assert one["tokens"]["none"]["student"]["value"] > 0
    again = study_student(tmp_path / "study", part, lambda line: None, FEW)
    assert json.dumps(again) == json.dumps(found)
    voting = replace(part, k=3, temperature=0.7)
    three = study_student(tmp_path / "voting", voting, lambda line: None, FEW)["sets"]["atlas-mhqa"]
    assert three["solved"] == one["solved"]
    for cache in ("none", "task"):
        paid = [found["tokens"][cache]["student"]["value"] for found in (one, three)]
        assert paid[1] == pytest.approx(3 * paid[0], rel=1e-4), "every rollout is paid"


@pytest.mark.parametrize(("k", "temperature"), [(3, 0.0), (1, 0.7)])
def test_several_rollouts_need_a_temperature_and_one_has_none(k: int, temperature: float) -> None:
    with pytest.raises(ConfigError, match=f"student.k is {k} and student.temperature"):
        StudentPart(k=k, temperature=temperature)
