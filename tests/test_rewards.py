"""Scores, as tables: what counts as the same answer, and what cannot be judged."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coa.environment import OpenEnvironment, open_environments
from coa.errors import ConfigError
from coa.rewards import (
    RewardSettings,
    auto,
    choose_reward,
    exact,
    exact_match,
    f1,
    normalise,
)
from coa.rewards.answers import same_words, squad, token_f1
from coa.rewards.reward import load_scorer
from coa.rollouts import choose_environments
from coa.tasks import Task, TaskSet
from coa.trajectory import Trajectory


def answered(answer: str | None) -> Trajectory:
    return Trajectory("t", "q?", "mhqa", answer=answer)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("  The  Netherlands\n", "netherlands"),
        ("a U.S. Dollar", "u.s dollar"),
        ("theatre an hour", "theatre hour"),
        ("A", "a"),
        ("the", "the"),
        ("1,234,567", "1234567"),
        ("12,34", "12 34"),
        ("12,500.00 km", "12500 km"),
        ("$ 3.50", "3.50"),
        ("3.0", "3"),
        ("-5", "-5"),
        ("-5.", "-5"),
        ("1.5.", "1.5"),
        ("-- x --", "x"),
        ("Guinea - Bissau", "guinea bissau"),
        (".pe", "pe"),
        ("'Peru'!", "peru"),
        ("UTC-3", "utc-3"),
        ("x - 1", "x-1"),
        ("- 5", "-5"),
        ("1990 - 1995", "1990-1995"),
        ("Apollo - 11", "apollo 11"),
        ("x >= 5", "x>=5"),
        ("O(n^2)", "o n^2"),
        ("2 * x + 1", "2*x+1"),
        ("a + 1", "a+1"),
        ("C++", "c++"),
        ("F#", "f#"),
        ("#1", "1"),
        ("AC/DC", "ac dc"),
        ("**Paris**", "paris"),
        ("2.0.1", "2.0.1"),
        ("2.0.", "2"),
        ("", ""),
        (" .,!? ", ""),
        ("S\u00e3o Paulo", "s\u00e3o paulo"),
    ],
)
def test_normalising_keeps_what_an_answer_means(text: str, plain: str) -> None:
    assert normalise(text) == plain
    assert normalise(plain) == plain


@pytest.mark.parametrize(
    ("answer", "golds", "score"),
    [
        ("Lima", ("Lima",), 1),
        ("the LIMA.", ("Lima",), 1),
        ("Lima, Peru", ("Lima",), 0),
        ("sol", ("Peruvian sol", "sol"), 1),
        ("sol | Peruvian sol", ("Peruvian sol", "sol"), 1),
        ("sol | dollar", ("Peruvian sol", "sol"), 0),
        ("sol |", ("sol",), 1),
        ("|", ("sol",), 0),
        ("", ("sol",), 0),
        ("", ("",), 0),
        ("...", ("!",), 0),
        ("1,000,000", ("1000000",), 1),
        ("1,000,000.0", ("1 000 000",), 0),
        ("5", ("-5",), 0),
        ("-5.", ("5",), 0),
        ("A", ("A",), 1),
        ("B", ("A",), 0),
        ("P(A|B)", ("P(A|B)",), 1),
        ("x + 1", ("x - 1",), 0),
        ("x > 5", ("x < 5",), 0),
        ("O(n^2)", ("O(n/2)",), 0),
        ("C#", ("C++",), 0),
        ("2.0.1", ("2.1",), 0),
    ],
)
def test_exact_match(answer: str, golds: tuple[str, ...], score: float) -> None:
    assert exact_match(answer, golds) == score
    assert exact(Task("q?", golds), answered(answer)) == score


@pytest.mark.parametrize(
    ("answer", "gold", "by_squad", "by_exact"),
    [
        ("Washington DC", "Washington, D.C.", 1, 0),
        ("JK Rowling", "J.K. Rowling", 1, 0),
        ("Spiderman", "Spider-Man", 1, 0),
        ("1980's", "1980s", 1, 0),
        ("3", "3.0", 0, 1),
        ("The Sol", "sol", 1, 1),
        ("", "...", 0, 0),
        ("A", "B", 0, 0),
        ("The The", "the the", 1, 1),
        ("A", "a", 1, 1),
    ],
)
def test_the_published_sets_are_scored_as_squad_scores(
    answer: str, gold: str, by_squad: float, by_exact: float
) -> None:
    task = Task("q?", (gold,))
    found = (squad(task, answered(answer)), exact(task, answered(answer)))
    assert found == (by_squad, by_exact)
    assert squad(Task("q?"), answered("Lima")) is None


@pytest.mark.parametrize(
    ("answer", "golds", "score"),
    [
        ("Peruvian sol", ("Peruvian sol",), 1.0),
        ("sol", ("Peruvian sol",), 2 / 3),  # precision 1, recall 1/2
        ("the old Peruvian sol", ("Peruvian sol",), 0.8),  # precision 2/3, recall 1
        ("sol sol", ("sol",), 2 / 3),  # a word counts as often as it stands there
        ("sol", ("dollar", "sol"), 1.0),
        ("euro", ("sol",), 0.0),
        ("", ("sol",), 0.0),
        ("sol", ("",), 0.0),
    ],
)
def test_token_f1(answer: str, golds: tuple[str, ...], score: float) -> None:
    assert token_f1(answer, golds) == pytest.approx(score)
    assert f1(Task("q?", golds), answered(answer)) == pytest.approx(score)


def test_f1_of_the_published_sets_has_squads_words_and_is_never_below_their_match() -> None:
    task = Task("q?", ("J.K. Rowling",), meta={"reward": "squad"})
    assert f1(task, answered("JK Rowling")) == squad(task, answered("JK Rowling")) == 1.0


def test_what_needs_no_judge_is_the_gold_word_for_word() -> None:
    for answer, gold in (("LIMA.", "Lima"), (" 1,000 km", "1000  km"), ("x - 1", "X - 1")):
        assert same_words(answer, (gold,)), (answer, gold)
    for answer, gold in (("x - 1", "x + 1"), ("A!", "A?"), ("5%", "5"), ("a.", "b."), ("", "a")):
        assert not same_words(answer, (gold,)), (answer, gold)


def test_no_answer_scores_zero_and_no_gold_cannot_be_judged() -> None:
    for scorer in (exact, f1):
        assert scorer(Task("q?", ("Lima",)), answered(None)) == 0.0
        assert scorer(Task("q?"), answered("Lima")) is None
        assert scorer(Task("q?"), answered(None)) is None


MHQA = Task("q?", ("Lima",))
WEB = Task("w?", ("Lima",), meta={"set": "atlas-web"})
GYM = Task("g?", ("12",), meta={"set": "gym-code"})


@asynccontextmanager
async def judging(*tasks: Task, reward: str = "auto") -> AsyncIterator[OpenEnvironment]:
    """The shipped environments of these tasks, with their rewards open."""
    environments, named = choose_environments((), TaskSet(tasks))
    how = RewardSettings(reward)
    async with open_environments(environments, named, reward=how, dry=True) as opened:
        yield opened


async def test_the_reward_that_all_tasks_share_is_chosen_and_otherwise_each_has_its_own() -> None:
    assert choose_reward("f1", [MHQA, GYM]) == "f1"
    assert choose_reward("auto", [MHQA, WEB]) == "exact"
    for tasks, asked, named in (
        ((MHQA, GYM), "f1", "f1"),
        ((MHQA, WEB), "auto", "exact"),
        ((GYM,), "auto", "gym"),
        ((MHQA, GYM), "auto", "auto"),
    ):
        async with judging(*tasks, reward=asked) as opened:
            assert opened.reward_name == named


async def test_in_a_mixed_set_every_task_is_judged_by_its_own_reward() -> None:
    _, tasks = choose_environments((), TaskSet((MHQA, WEB, GYM)))
    async with judging(*tasks) as opened:

        async def score(task: Task, answer: str) -> float | None:
            return (await opened.score(task, answered(answer))).score

        mhqa, web, gym = tasks
        assert await score(mhqa, "the LIMA") == await score(web, "lima") == 1.0
        assert await score(web, "Quito") == 0.0
        assert await score(gym, "12") is None, "it has no gold for its verifier"
    assert auto(MHQA, answered("the LIMA")) == exact(GYM, answered("12")) == 1.0


def test_scorers_are_found_by_name_or_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scorer_of_mine.py").write_text(
        "NUMBER = 3\ndef length(task, trajectory):\n    return float(len(trajectory.answer))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_scorer("exact") is exact and load_scorer("f1") is f1
    assert load_scorer("scorer_of_mine:length")(Task("q?"), answered("abc")) == 3.0
    for reference, says in (
        ("exat", r"'exat' is not a reward\. Did you mean 'exact'\? Own ones: module:attribute\."),
        ("scorer_of_mine:NUMBER", r"reward 'scorer_of_mine:NUMBER' is a int, not a function\."),
        ("scorer_of_mine:lenght", r"scorer_of_mine has no 'lenght'\. Did you mean 'length'\?"),
        ("scorer_of_yours:length", r"no module named 'scorer_of_yours'"),
        ("scorer_of_mine:", r"expected module:attribute"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_scorer(reference)
