"""Several samples of a task: pass@k against all subsets, votes, and choices that never see gold."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_server import ChatServer
from coa.engines.base import Completion, OnText, Sampling
from coa.engines.scripted import ScriptedEngine
from coa.environment import open_environments
from coa.errors import ConfigError
from coa.evaluation.run import EvalSettings, run_eval, summarise
from coa.evaluation.samples import (
    Sample,
    best_of,
    depths,
    majority,
    own_check,
    pass_at,
    sample_figures,
)
from coa.io.runs import Json, read_jsonl
from coa.rewards import Scored
from coa.rollouts import choose_environments
from coa.statistics import bootstrap, estimate, wilson
from coa.tasks import Task, TaskSet
from coa.trajectory import Chain, StopReason, Trajectory
from playing import REPLAN, SUGGEST, play

TASK = Task("Where?", ("Paris",))
ANSWERS = st.lists(st.sampled_from(["Paris", "paris.", "Rome", "Oslo", "", None]), min_size=1)


def sample(answer: str | None, rating: float | None = None, score: float = 0.0) -> Sample:
    return Sample(Trajectory("t", "Where?", "mhqa", answer=answer), score, rating)


# -- pass@k ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_right_sample(n: int) -> None:
    for right in range(n + 1):
        samples = [place < right for place in range(n)]
        for k in range(1, n + 1):
            subsets = list(combinations(samples, k))
            share = sum(map(any, subsets)) / len(subsets)
            assert pass_at(n, right, k) == pytest.approx(share)


def test_the_depths_are_powers_of_two_and_all_samples() -> None:
    assert [depths(n) for n in (1, 2, 3, 8, 12)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 12],
    ]


@given(n=st.integers(1, 40), right=st.integers(0, 40))
def test_more_samples_never_pass_less(n: int, right: int) -> None:
    values = [pass_at(n, min(n, right), k) for k in range(1, n + 1)]
    assert values == sorted(values)
    assert values[0] == pytest.approx(min(n, right) / n)
    assert values[-1] == float(right > 0)


# -- the vote --------------------------------------------------------------------------------


@given(answers=ANSWERS, shuffled=st.randoms())
def test_a_vote_does_not_depend_on_the_order_unless_it_is_a_tie(
    answers: list[str | None], shuffled: random.Random
) -> None:
    samples = [sample(answer) for answer in answers]
    names = [name for answer in answers if (name := (answer or "").strip(".").lower())]
    counts = sorted((names.count(name) for name in set(names)), reverse=True)
    winner = majority(TASK, samples).trajectory.answer
    if not names:
        assert winner == answers[0]
        return
    assert names.count((winner or "").strip(".").lower()) == counts[0]
    if len(counts) == 1 or counts[0] > counts[1]:
        shuffled.shuffle(samples)
        again = majority(TASK, samples).trajectory.answer
        assert (again or "").strip(".").lower() == (winner or "").strip(".").lower()
    else:
        tied = [name for name in names if names.count(name) == counts[0]]
        assert (winner or "").strip(".").lower() == tied[0]


def test_the_first_sample_with_the_winning_answer_stands_for_it() -> None:
    made = [sample("Rome"), sample("the Paris", score=1.0), sample("paris"), sample(None)]
    assert majority(TASK, made) is made[1]


def test_alternatives_are_the_same_in_any_order_and_programs_only_when_equal() -> None:
    made = [sample("Oslo"), sample("Rome | Paris"), sample("Paris|Rome")]
    assert majority(TASK, made) is made[1]
    program = Task("Add.", gold={"tests": []})
    made = [sample("print(a+b)"), sample("print(a*b)"), sample("print(a*b)")]
    assert majority(program, made) is made[1]


# -- the best of them ------------------------------------------------------------------------


def test_the_highest_rating_wins_then_the_first_and_never_one_without_an_answer() -> None:
    made = [sample(None, 9.0), sample("a"), sample("b", 2.0), sample("c", 3.0), sample("d", 3.0)]
    assert best_of(made) is made[3]
    assert best_of(made[:2]) is made[1]
    assert best_of([made[0]]) is made[0]


async def test_the_own_check_is_that_of_the_last_suggestion() -> None:
    passed = await play(
        [SUGGEST.format(4) + "<think>e</think><answer>Rome</answer>"], grammar="web"
    )
    assert (passed.answer, own_check(Chain.read(passed))) == ("Rome", 4)
    failed = await play([SUGGEST.format(2) + REPLAN], grammar="web", turns=1)
    assert (failed.stop, own_check(Chain.read(failed))) == (StopReason.RELEASED, 2)
    later = "<think>i</think><suggested_answer>Oslo</suggested_answer>" + "<think>" + "x" * 999
    cut = await play([SUGGEST.format(2) + REPLAN, later], grammar="web", turn_tokens=320)
    assert (cut.answer, own_check(Chain.read(cut))) == ("Oslo", None)
    plain = await play(["<think>t</think><plan>p</plan><think>u</think><answer>A</answer>"])
    assert own_check(Chain.read(plain)) is None


def test_the_figures_by_hand() -> None:
    one, two, never = (Task(f"{n}?", ("a",)) for n in range(3))
    scores = {one.id: [(0, 1), (1, 4), (0, 3), (0, None)], two.id: [(1, None)] * 4, never.id: []}
    samples = {
        task_id: [sample(str(place), rating, score) for place, (score, rating) in enumerate(found)]
        for task_id, found in scores.items()
    }
    found = sample_figures([one, two, never], samples, "double_check")
    value = {k: each["value"] for k, each in found["pass_at"].items()}
    assert value == {"1": round(1.25 / 3, 4), "2": 0.5, "4": round(2 / 3, 4)}
    assert found["pass_at"]["4"]["ci95"] == [round(x, 4) for x in wilson(2, 3)[1:3]]
    low, high = bootstrap([0.25, 1.0, 0.0])[1:3]
    assert found["avg_at_k"] == {
        "value": round(1.25 / 3, 4),
        "ci95": [round(low, 4), round(high, 4)],
    }
    assert found["majority"]["value"] == round(1 / 3, 4)
    assert (found["best_of"]["by"], found["best_of"]["value"]) == ("double_check", round(2 / 3, 4))


def test_without_any_rating_the_best_is_the_first_that_answered() -> None:
    made = [
        replace(sample(None).trajectory, sample=0),
        replace(sample("Paris").trajectory, sample=1),
    ]
    task = replace(TASK, id="t")
    summary, _ = summarise([task], made, [Scored(0.0), Scored(1.0)])
    assert summary["best_of"] == {"by": "first", "value": 1.0, "ci95": [0.2065, 1.0]}
    assert (summary["accuracy"], summary["pass_at"]["2"]["value"]) == (0.5, 1.0)


@pytest.mark.slow
def test_intervals_over_tasks_cover_the_truth_as_often_as_they_say() -> None:
    """Tasks differ in difficulty, samples of a task are alike: the case that a naive interval over
    all samples gets wrong."""
    rng = random.Random(0)
    rounds, tasks, k, hit = 400, 80, 4, {"mean": 0, "pass": 0, "naive": 0}
    for _ in range(rounds):
        chances = [rng.betavariate(0.5, 0.5) for _ in range(tasks)]
        right = [sum(rng.random() < p for _ in range(k)) for p in chances]
        mean = bootstrap([each / k for each in right])
        hit["mean"] += mean.low <= 0.5 <= mean.high
        passed = estimate([pass_at(k, each, 2) for each in right])
        truth = 1 - (1.5 / 2) * (0.5 / 1)  # 1 - E[(1-p)^2] for this spread of chances
        hit["pass"] += passed.low <= truth <= passed.high
        naive = wilson(sum(right), tasks * k)
        hit["naive"] += naive.low <= 0.5 <= naive.high
    covered = {name: count / rounds for name, count in hit.items()}
    assert 0.91 <= covered["mean"] <= 0.98 and 0.91 <= covered["pass"] <= 0.98, covered
    assert covered["naive"] < 0.85, covered


# -- through the stage -----------------------------------------------------------------------


class Chance(ScriptedEngine):
    """Answers one of these, by the key of the sample."""

    def __init__(self, answers: Sequence[str]) -> None:
        super().__init__([])
        self.answers = answers

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        answer = random.Random(repr(sampling.key)).choice(self.answers)
        text = SUGGEST.replace(" Rome\n", answer).format(4 if answer == "Paris" else 3)
        ids = self.encode(f"{text}<think>e</think><answer>{answer}</answer>")
        return Completion(ids, [0.0] * len(ids), "stop")


def evaluate(folder: Path, gold: str = "Paris", **changes: object) -> Json:
    folder.mkdir(exist_ok=True)
    TaskSet(tuple(Task(f"Where {n}?", (gold,)) for n in range(6))).save(folder / "tasks.jsonl")
    settings = EvalSettings(
        **{
            "model": "scripted:unused",
            "tasks": str(folder / "tasks.jsonl"),
            "grammar": "web",
            "k": 4,
            "temperature": 1.0,
            "context": 99_999,
            "turn_tokens": 9999,
        }
        | changes
    )
    return run_eval(settings, folder / "run", engine=Chance(["Paris", "Rome", "Oslo"]), quiet=True)


def chosen_answers(folder: Path) -> list[tuple[str, float | None]]:
    records = [record for _, record in read_jsonl(folder / "run" / "scores.jsonl")]
    return [(record["answer"], record.get("rating")) for record in records]


def test_the_check_of_the_model_chooses_and_gold_has_no_say(tmp_path: Path) -> None:
    found = evaluate(tmp_path / "a")
    assert list(found["pass_at"]) == ["1", "2", "4"] and found["k"] == 4
    assert found["best_of"]["by"] == "double_check"
    assert found["best_of"]["value"] == found["pass_at"]["4"]["value"] > found["majority"]["value"]
    garbage = evaluate(tmp_path / "b", gold="garbage")
    assert garbage["pass_at"]["4"]["value"] == garbage["best_of"]["value"] == 0.0
    assert chosen_answers(tmp_path / "a") == chosen_answers(tmp_path / "b")


def test_a_judge_chooses_by_the_work_and_is_asked_once(tmp_path: Path) -> None:
    def verdict(body: Json) -> str:
        case = json.loads(body["messages"][1]["content"])
        assert case.keys() == {"case", "question", "work", "answer"}
        assert "double_check" in case["work"]
        word = "correct" if case["answer"] == "Oslo" else "incorrect"
        return json.dumps({"case": case["case"], "judgement": word})

    with ChatServer(verdict) as server:
        asked = {"best_of": "judge", "judge": server.ref}
        found = evaluate(tmp_path / "a", gold="Oslo", **asked)
        assert found["best_of"] | {"ci95": []} == {
            "by": "judge",
            "value": found["pass_at"]["4"]["value"],
            "ci95": [],
        }
        calls = len(server.bodies)
        assert 0 < calls <= 24 and "accepted_answers" not in json.dumps(server.bodies)
        assert evaluate(tmp_path / "a", gold="Oslo", **asked) == found
        assert len(server.bodies) == calls
    again = evaluate(tmp_path / "a", gold="Oslo")  # another choice is made of the same rollouts
    assert again["best_of"]["by"] == "double_check" and again["accuracy"] == found["accuracy"]


def test_a_function_of_ones_own_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_choice.py").write_text(
        "def rome(task, trajectory):\n"
        "    assert not task.answers and not task.gold\n"
        "    return 1.0 if trajectory.answer == 'Rome' else None\n"
        "def broken(task, trajectory):\n"
        "    return float('nan')\n"
    )
    found = evaluate(tmp_path / "a", gold="Rome", best_of="own_choice:rome")
    assert found["best_of"]["value"] == found["pass_at"]["4"]["value"] > 0
    with pytest.raises(ConfigError, match=r"best_of 'own_choice:broken', on task .* found nan"):
        evaluate(tmp_path / "a", gold="Rome", best_of="own_choice:broken")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"best_of": "doublecheck"}, "is not a choice. Did you mean 'double_check'? Own: module:"),
        ({"best_of": "judge"}, "best_of 'judge' needs a model, openai:NAME@URL: --judge."),
        ({"best_of": "math:pi"}, "best_of 'math:pi' is a float, not a function."),
        ({"prices": "1,2"}, "prices '1,2': expected three numbers joined by commas"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused_before_any_work(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        evaluate(tmp_path / "a", **changes)
    assert not (tmp_path / "a" / "run").exists()


async def test_tasks_are_grouped_by_what_they_say_of_themselves() -> None:
    metas: list[Json] = [
        {"world": 0, "family": "f", "phrasing_heldout": True},
        {"world": 7, "set": "atlas-web", "hops": 2},
        {"set": "gaia", "level": 3},
        {},
    ]
    named = [Task(f"{n}?", ("a",), id=f"t{n}", meta=meta) for n, meta in enumerate(metas)]
    made = [Trajectory(task.id, task.question, "mhqa", answer="a") for task in named]
    scored = [Scored(score) for score in (1.0, 0.0, 1.0, 0.0)]
    environments, tasks = choose_environments((), TaskSet(tuple(named)))
    async with open_environments(environments, tasks) as opened:
        summary, records = summarise(tasks, made, scored, groups_of=opened.groups_of)
    found = {
        field: {name: (group["n"], group["accuracy"]) for name, group in summary[field].items()}
        for field in summary
        if field.startswith("by_")
    }
    assert found == {
        "by_family": {"f": (1, 1.0)},
        "by_hops": {"2": (1, 0.0)},
        "by_phrasing_heldout": {"True": (1, 1.0)},
        "by_world": {"0": (1, 1.0), "7": (1, 0.0)},
        "by_level": {"3": (1, 1.0)},
        "by_set": {"gaia": (1, 1.0)},
        "by_environment": {"atlas-mhqa": (1, 1.0), "atlas-web": (1, 0.0), "search": (2, 0.5)},
    }
    assert records[2]["groups"] == {"level": "3", "set": "gaia", "environment": "search"}
    environments, alone = choose_environments((), TaskSet((named[3],)))
    async with open_environments(environments, alone) as opened:
        summary, records = summarise(alone, made[3:], scored[3:], groups_of=opened.groups_of)
    assert "groups" not in records[0] and not any(key.startswith("by_") for key in summary)
