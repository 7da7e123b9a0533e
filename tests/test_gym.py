"""The set gym-code: splits, determinism, and scores by the package's own verifiers."""

from __future__ import annotations

import decimal
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import coa.environments
from coa.environments.gym import tasks as gym
from coa.environments.gym.tasks import (
    GENERATORS,
    LONGEST_ANSWER,
    SPLITS,
    generators_of,
    is_doubtful,
    item_number,
    make_tasks,
    problem_of,
    score,
)
from coa.errors import MissingExtra, RecordError, UsageError
from coa.tasks import Task, TaskSet

pytest.importorskip("reasoning_gym")

ALL = sorted(GENERATORS)
TRAINED = sorted(generators_of("train"))
SMALL = ("gcd", "word_sorting", "rotate_matrix")


def some(name: str, n: int = 3, seed: int = 0) -> TaskSet:
    split = "heldout_generator" if GENERATORS[name].held_out else "train"
    return make_tasks(split, n, seed, [name])


@pytest.mark.parametrize(
    ("name", "question", "answer", "facts", "doubtful"),
    [
        ("power_function", "-3^2", "9", {"base": -3, "exponent": 2}, True),
        ("power_function", "-3^-2", "0.111", {"base": -3, "exponent": -2}, True),
        ("power_function", "-3^3", "-27", {"base": -3, "exponent": 3}, False),
        ("power_function", "3^2", "9", {"base": 3, "exponent": 2}, False),
        ("letter_counting", "", "2", {"span": ["Sun", "sets"], "target_letter": "s"}, False),
        ("letter_counting", "", "3", {"span": ["Sun", "sets"], "target_letter": "s"}, True),
        ("basic_arithmetic", "", "0", {"expression": "8 / -( 5 * -8 + -39 )"}, True),
        ("basic_arithmetic", "", "-25", {"expression": "-33 / 11 + -22"}, False),
        ("calendar_arithmetic", "Which day is 05/04/2022?", "Wednesday", {}, True),
        ("calendar_arithmetic", "Which day is 05/22/2022?", "Sunday", {}, False),
        ("calendar_arithmetic", "Which day is 05/05/2022?", "Thursday", {}, False),
        ("time_intervals", "From 02/02/2048 to 02/09/2050.", "738 days", {}, True),
        ("time_intervals", "From 10/28/2438 to 03/06/2439.", "129 days", {}, False),
        ("time_intervals", "From 2021-10-30 to 2022-11-03.", "369 days", {}, False),
        ("gcd", "any", "1", {}, False),
    ],
)
def test_an_item_whose_words_allow_another_answer_is_doubtful(
    name: str, question: str, answer: str, facts: Any, doubtful: bool
) -> None:
    assert (
        is_doubtful(name, {"question": question, "answer": answer, "metadata": facts}) is doubtful
    )


def test_no_task_is_doubtful() -> None:
    for name in ("power_function", "letter_counting", "calendar_arithmetic"):
        for task in some(name, 40):
            entry = {"question": task.question, **task.gold}
            assert not is_doubtful(name, entry), task.question


def test_there_are_at_least_40_generators_and_some_are_never_trained_on() -> None:
    assert len(generators_of("train")) >= 40
    assert generators_of("train") == generators_of("heldout_seed")
    assert len(generators_of("heldout_generator")) >= 10
    assert not {*generators_of("train")} & {*generators_of("heldout_generator")}


def test_the_same_arguments_give_the_same_tasks_in_another_process() -> None:
    """Also where Python orders its sets in another way."""
    n = 3 * len(generators_of("train"))
    code = (
        "from coa.environments.gym.tasks import make_tasks\n"
        f"print(make_tasks('train', {n}, 5).fingerprint(),"
        " make_tasks('heldout_generator', 60, 5).fingerprint())"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    here = make_tasks("train", n, 5), make_tasks("heldout_generator", 60, 5)
    assert done.stdout.split() == [tasks.fingerprint() for tasks in here]


@pytest.mark.parametrize("split", SPLITS)
def test_tasks_are_spread_evenly_and_fewer_are_the_first_of_more(split: str) -> None:
    known = generators_of(split)
    many = make_tasks(split, 2 * len(known) + 3, 0)
    counts = Counter(task.meta["family"] for task in many)
    assert {*counts} == {*known}
    assert max(counts.values()) - min(counts.values()) <= 1
    few = make_tasks(split, len(known) - 1, 0)
    assert few.tasks == many.tasks[: len(few)]


def test_other_seeds_and_splits_give_other_tasks() -> None:
    sets = [make_tasks(split, 60, seed, SMALL) for split in SPLITS[:2] for seed in (0, 1)]
    questions = [{task.question for task in tasks} for tasks in sets]
    assert all(len(each) == 60 for each in questions)
    assert len(set.union(*questions)) > 230
    assert not (questions[0] | questions[1]) & (questions[2] | questions[3])


def problems(split: str, n: int, names: list[str]) -> set[str]:
    return {problem_of(t.meta["family"], as_entry(t)) for t in make_tasks(split, n, 0, names)}


def as_entry(task: Task) -> dict[str, Any]:
    return {"question": task.question, **task.gold}


def test_no_problem_of_a_small_generator_is_in_train_and_in_heldout_seed() -> None:
    """There are few words; disjoint seeds alone would not keep the splits apart."""
    names = ["count_bits", "calendar_arithmetic", "spell_backward", "maze"]
    assert not problems("train", 1200, names) & problems("heldout_seed", 400, names)


def test_no_date_or_year_is_in_train_and_in_heldout_seed_in_other_words() -> None:
    """Every calendar fact has several wordings: a split by text would tell the answers."""
    asked: dict[str, tuple[str, ...]] = {
        "is_leap_year": ("year",),
        "weekday_of_date": ("target_date",),
        "recurring_event_day": ("month", "ordinal", "weekday"),
    }
    seen: dict[str, dict[str, set[str]]] = {}
    for split, n in (("train", 3000), ("heldout_seed", 1000)):
        for task in make_tasks(split, n, 0, ["calendar_arithmetic"]):
            facts = task.gold["metadata"]
            if facts["task"] in asked:
                fact = " ".join(str(facts[key]) for key in asked[facts["task"]])
                seen.setdefault(facts["task"], {}).setdefault(split, set()).add(fact)
    assert len(seen) == 3
    for kind, facts_of in seen.items():
        assert len(facts_of["train"]) > 2 * len(facts_of["heldout_seed"]) > 40, kind
        assert not facts_of["train"] & facts_of["heldout_seed"], kind


@pytest.mark.parametrize("name", TRAINED)
def test_what_decides_the_split_tells_problems_apart_and_serves_both_sides(name: str) -> None:
    """A generator whose metadata said too little would have all its questions on one side."""
    for split in SPLITS[:2]:
        tasks = make_tasks(split, 12, 0, [name])
        answers: dict[str, set[str]] = {}
        for task in tasks:
            answers.setdefault(problem_of(name, as_entry(task)), set()).add(task.answers[0])
        assert len(answers) >= 6
        assert all(len(each) == 1 for each in answers.values()), answers


ITEM = st.tuples(
    st.sampled_from(SPLITS[:2]),
    st.integers(0, gym.LARGEST_SEED),
    st.integers(0, 2**gym.INDEX_BITS - 1),
)


@given(ITEM, ITEM)
@settings(deadline=None)
def test_items_of_other_splits_seeds_and_indices_are_made_from_other_numbers(
    one: tuple[str, int, int], other: tuple[str, int, int]
) -> None:
    assert (item_number(*one) == item_number(*other)) == (one == other)
    assert 0 <= item_number(*one) < 2**32


def test_a_task_says_where_it_comes_from_and_hides_its_gold() -> None:
    (task,) = some("gcd", 1, seed=3)
    assert dict(task.meta) == {
        "set": "gym-code",
        "family": "gcd",
        "kind": "arithmetic",
        "split": "train",
        "seed": 3,
    }
    assert task.public().gold == {} and task.public().answers == ()
    assert task.gold["generator"] == "gcd"
    made = gym._entry("gcd", item_number("train", 3, task.gold["index"]))
    assert made is not None and made["answer"] == task.answers[0]


@pytest.mark.parametrize("name", ALL)
def test_the_gold_answer_scores_1_from_the_file_alone(name: str, tmp_path: Path) -> None:
    some(name).save(tmp_path / "tasks.jsonl")
    for task in TaskSet.load(tmp_path / "tasks.jsonl"):
        assert score(task, task.answers[0]) == 1.0, task.question
        assert score(task, f" {task.answers[0]}\n") == 1.0, task.question


@pytest.mark.parametrize("name", ALL)
def test_questions_are_short_text(name: str) -> None:
    for task in some(name):
        assert len(task.question) < 1000, len(task.question)
        assert task.question == task.question.strip()
        assert len(task.answers[0]) < LONGEST_ANSWER / 4


SEVERAL_ANSWERS = {"jugs", "n_queens", "pool_matrix", "quantum_lock", "shortest_path"}
"""Generators where the gold of another problem can be right as well: there are several solutions,
or several ways to write one (a row for a column, 5.0 for 5)."""


@pytest.mark.parametrize("name", ALL)
def test_a_wrong_answer_does_not_score_1(name: str) -> None:
    tasks = some(name, 6)
    for task in tasks:
        for wrong in ("", None, "no idea", "0/0", "[]", "nan", "[NaN]", "inf", "-1e999"):
            found = score(task, wrong)
            assert found is not None and 0 <= found < 1, wrong
    golds = {task.answers[0] for task in tasks}
    others = [score(task, gold) for task in tasks for gold in golds - {task.answers[0]}]
    assert others and all(found is not None and 0 <= found <= 1 for found in others)
    below = [found is not None and found < 1 for found in others]
    assert any(below) if name in SEVERAL_ANSWERS else all(below), golds


def test_a_right_answer_with_something_after_it_is_wrong() -> None:
    """Nine times a ninth is more than 1 in floating point: partial credit must not become full."""
    for task in some("spell_backward", 200):
        for more in ("x", "xyz"):
            found = score(task, task.answers[0] + more)
            assert found is not None and 0 < found < 1, task.answers


def test_partial_credit_is_the_verifiers_own_number() -> None:
    (task,) = some("word_sorting", 1)
    words = task.answers[0].split(", ")
    swapped = [words[1], words[0], *words[2:]]
    assert score(task, ", ".join(swapped)) == pytest.approx((len(words) - 2) / len(words))


PAYLOADS = (
    "__import__('pathlib').Path({path!r}).write_text('x')",
    "[__import__('pathlib').Path({path!r}).write_text('x')]",
    "[[x for x in [__import__('pathlib').Path({path!r}).write_text('x')]]]",
)


@pytest.mark.parametrize("name", ALL)
def test_no_verifier_runs_an_answer(name: str, tmp_path: Path) -> None:
    (task,) = some(name, 1)
    for payload in PAYLOADS:
        found = score(task, payload.format(path=str(tmp_path / "made")))
        assert found is not None and found < 1
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion"])
def test_without_the_guard_these_verifiers_would_run_an_answer(name: str, tmp_path: Path) -> None:
    (task,) = some(name, 1)
    made = tmp_path / "made"
    answer = PAYLOADS[0].format(path=str(made))
    gym._dataset(name).score_answer(answer, {"question": task.question, **task.gold})
    assert made.exists()


@pytest.mark.parametrize("name", ["number_sorting", "bitwise_arithmetic"])
def test_gold_that_would_be_run_is_refused(name: str, tmp_path: Path) -> None:
    (task,) = some(name, 1)
    payload = PAYLOADS[0].format(path=str(tmp_path / "made"))
    gold = {**task.gold, "answer": payload}
    gold["metadata"] = {**task.gold["metadata"], "problem": payload}
    with pytest.raises(RecordError, match="has gold that the generator does not make"):
        score(replace(task, gold=gold), "['1']")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "problem", ["(0x9 ** 0x999999999)", "(0x9 << 0x999999999)", "(0x9 << (0x99999 * 0x99999))"]
)
def test_a_huge_number_in_gold_is_refused(problem: str) -> None:
    (task,) = some("bitwise_arithmetic", 1)
    gold = {**task.gold, "metadata": {"problem": problem}}
    with pytest.raises(RecordError, match="does not make"):
        score(replace(task, gold=gold), "0x1")


def test_an_endless_answer_is_wrong() -> None:
    (task,) = some("number_sorting", 1)
    assert score(task, "[" * 10**6) == 0.0


@given(
    st.sampled_from(ALL),
    st.text(max_size=60) | st.text("0123456789 .,-/[](){}'\"naife+*", max_size=60),
)
@settings(max_examples=300, deadline=None)
def test_any_text_has_a_score(name: str, answer: str) -> None:
    (task,) = some(name, 1)
    found = score(task, answer)
    assert found is not None and 0 <= found <= 1


def test_a_task_without_gold_cannot_be_judged() -> None:
    assert score(Task("What is 1 + 1?", ("2",)), "2") is None
    (task,) = some("gcd", 1)
    assert score(task.public(), task.answers[0]) is None


def test_an_unknown_generator_in_a_file_is_named() -> None:
    task = Task("?", ("2",), gold={"generator": "gdc", "answer": "2", "metadata": {}})
    with pytest.raises(RecordError, match=r"'gdc' is not a generator of gym-code.*gcd"):
        score(task, "2")


def test_generators_leave_the_process_as_it_was() -> None:
    """Two of them set the precision of decimals and the seed of numpy."""
    np.random.seed(7)  # noqa: TID251
    wanted = np.random.random()
    np.random.seed(7)  # noqa: TID251
    make_tasks("train", 20, 0, ["decimal_arithmetic", "pool_matrix"])
    assert decimal.getcontext().prec == 28
    assert np.random.random() == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trian", 1, 0), r"unknown split 'trian'.*train"),
        (("train", 0, 0), r"n = 0: expected a positive number"),
        (("train", 1, -1), r"seed = -1: expected 0 to 32767"),
        (("train", 1, 2**15), r"seed = 32768: expected 0 to 32767"),
        (("train", 1, 0, []), r"generators: the list is empty"),
        (("train", 1, 0, ["gdc"]), r"unknown generator 'gdc'.*gcd"),
        (("train", 1, 0, ["lcm"]), r"generator 'lcm' does not belong to split 'train'"),
        (("train", 10**5, 0, ["jugs"]), r"are more than the \d+ that these"),
    ],
)
def test_mistakes_of_the_caller_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_tasks(*arguments)


def test_a_world_is_refused_because_there_is_none() -> None:
    with pytest.raises(UsageError, match=r"gym-code has no worlds\. Leave --world-seed out\."):
        coa.environments.make_tasks("gym-code", "train", 1, 0, world_seed=7)
    assert len(coa.environments.make_tasks("gym-code", "train", 1, 0)) == 1


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    gym._dataset.cache_clear()
    with pytest.raises(MissingExtra, match=r"gym-code needs packages.*chain-of-agents\[gym\]"):
        make_tasks("train", 1, 0)


def test_importing_the_tasks_does_not_import_the_package() -> None:
    code = "import sys, coa.environments.gym.tasks; print('reasoning_gym' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_gold_answers_of_many_seeds_score_1(name: str) -> None:
    for seed in range(5):
        for task in some(name, 40, seed):
            again = Task.from_json(json.loads(json.dumps(task.to_json())))
            assert score(again, again.answers[0]) == 1.0, task.question
