"""Rewards by recipe: how expressions are read, what None does to them, and how own ones plug in."""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.errors import CoaError, ConfigError
from coa.io.settings import load_recipe
from coa.rewards import (
    REWARDS,
    FormatSettings,
    JudgeSettings,
    Part,
    RewardSettings,
    Scored,
    choose_reward,
    lacking,
    mean_parts,
    open_reward,
)
from coa.rewards.reward import Combined, Node, evaluate, parse_expression
from coa.tasks import Task
from coa.trajectory import Trajectory
from made_chains import LIMA, LOOK, PLAN, chain

TASK = Task("What is the capital of Peru?", ("Lima",))
CHAIN = chain([PLAN, LOOK, LIMA])
NAMES = ("a", "b", "c")


def value(expression: str, **scores: float | None) -> tuple[float | None, list[str]]:
    """The value of an expression over a, b and c, and which of them were asked."""
    asked: list[str] = []

    async def ask(name: str) -> float | None:
        asked.append(name)
        return scores[name]

    node = parse_expression(expression, NAMES)
    return asyncio.run(evaluate(node, ask, lambda name: NAMES.index(name))), asked


@pytest.mark.parametrize(
    ("expression", "scores", "wanted"),
    [
        ("a", {"a": 0.25}, 0.25),
        ("a*b", {"a": 0.5, "b": 0.5}, 0.25),
        ("0.9*a+0.1*b", {"a": 1, "b": 0}, 0.9),
        (" ( 0.5 * a + .5 * b ) * c ", {"a": 1, "b": 1, "c": 1}, 1.0),
        ("0.7*a + 0.2*b + 0.1*c", {"a": 1, "b": 1, "c": 1}, 1.0),  # in binary it is a little less
        ("a*b", {"a": None, "b": 1}, None),
        ("a*b", {"a": None, "b": 0}, 0.0),
        ("a*b", {"a": 0, "b": None}, 0.0),
        ("0.5*a + 0.5*b", {"a": 0, "b": None}, None),
        ("0.5*a + 0.5*b*c", {"a": 1, "b": 0, "c": None}, 0.5),
    ],
)
def test_sums_and_products(
    expression: str, scores: dict[str, float | None], wanted: float | None
) -> None:
    assert value(expression, **scores)[0] == wanted


def test_after_a_zero_in_a_product_the_dearer_parts_are_not_asked() -> None:
    assert value("c*b*a", a=0, b=1, c=1) == (0.0, ["a"])
    assert value("c*b*a", a=1, b=None, c=0) == (0.0, ["a", "b", "c"])
    assert value("c*(0.5*a + 0.5*b)", a=0, b=0, c=1) == (0.0, ["a", "b"])


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("", r"reward '': ends where a reward or a weight was expected\. Example: "),
        ("a *", r"ends where a reward"),
        ("a b", r"found 'b', expected \+ or \* or the end"),
        ("a - b", r"found '- b', expected"),
        ("a * -1", r"found '-1', expected a reward or a weight"),
        ("(a", r"a bracket is not closed"),
        ("a)", r"found '\)', expected"),
        ("(" * 30 + "a", r"too many brackets"),
        ("0*a + b", r"a weight of 0 has no effect"),
        ("0.5", r"reward '0.5' names no reward\. Known: a, b, c\."),
        ("a + b", r"can reach 2, expected at most 1\. Give the terms weights"),
        ("2*a", r"can reach 2"),
        ("a * d", r"'d' is not a reward\..* Own ones: module:attribute\."),
        ("\u00e4", r"found '\u00e4', expected a reward"),
    ],
)
def test_what_is_wrong_with_an_expression_is_one_line(expression: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_expression(expression, NAMES)
    assert "\n" not in str(caught.value)


@given(st.text("ab01.+*() :", max_size=30))
def test_any_text_is_an_expression_or_one_clear_error(text: str) -> None:
    try:
        node = parse_expression(text, NAMES)
    except ConfigError as error:
        assert "\n" not in str(error).replace(repr(text), "")
    else:
        assert isinstance(node, str | float | Combined)


def nodes() -> st.SearchStrategy[Node]:
    leaves: st.SearchStrategy[Node] = st.sampled_from(NAMES)

    def product(factors: list[Node]) -> Node:
        return Combined("*", tuple(factors))

    def mean(terms: list[Node]) -> Node:
        return Combined("+", tuple(product([1 / len(terms), term]) for term in terms))

    def several(below: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
        chosen = st.lists(below, min_size=1, max_size=3)
        return chosen.map(product) | chosen.map(mean)

    return st.recursive(leaves, several, max_leaves=8)


@settings(max_examples=200)
@given(nodes(), st.fixed_dictionaries({n: st.sampled_from([None, 0.0, 0.5, 1.0]) for n in NAMES}))
def test_none_never_hides_a_value_and_never_makes_one(
    node: Node, scores: dict[str, float | None]
) -> None:
    """A value is what every way of filling in the unknown scores agrees on; and it is in [0, 1]."""

    def filled(unknown: float) -> float | None:
        known = {name: unknown if score is None else score for name, score in scores.items()}

        async def ask(name: str) -> float | None:
            return known[name]

        return asyncio.run(evaluate(node, ask, lambda name: 0))

    async def ask(name: str) -> float | None:
        return scores[name]

    found = asyncio.run(evaluate(node, ask, lambda name: 0))
    if found is not None:
        assert 0 <= found <= 1
        assert all(math.isclose(found, filled(x) or 0.0, abs_tol=1e-9) for x in (0.0, 0.3, 1.0))


# -- opened ------------------------------------------------------------------------------------

OWN = """
from coa.rewards import Part
def half(task, trajectory): return 0.5
async def later(task, trajectory): return Part(1.0, "seen later")
def unknown(task, trajectory): return None
def right(task, trajectory): return trajectory.answer == "Lima"
def nan(task, trajectory): return float("nan")
def above(task, trajectory): return 1.5
def words(task, trajectory): return "good"
async def below(task, trajectory): return Part(-0.1)
def broken(task, trajectory): return task.no_such_field
NUMBER = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward_of_mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "reward_of_mine", raising=False)


async def judged(expression: str, trajectory: Trajectory = CHAIN, task: Task = TASK) -> Scored:
    async with open_reward(expression) as reward:
        return await reward.score(task, trajectory)


async def test_the_score_comes_with_its_parts_and_their_reasons(own: None) -> None:
    found = await judged("0.5*exact*format + 0.5*reward_of_mine:later")
    assert found.score == 1.0
    assert found.parts == {
        "exact": Part(1.0),
        "format": Part(1.0),
        "reward_of_mine:later": Part(1.0, "seen later"),
    }
    assert found.reason == "reward_of_mine:later: seen later"
    assert found.to_json()["parts"]["exact"] == {"score": 1.0}
    wrong = await judged("exact*format", chain([PLAN, ("answer", "Quito")]))
    assert wrong == Scored(0.0, {"exact": Part(0.0)})


async def test_own_rewards_may_be_functions_or_coroutines_and_may_not_know(own: None) -> None:
    assert (await judged("reward_of_mine:half")).score == 0.5
    assert (await judged("reward_of_mine:right*exact")).score == 1.0
    unknown = await judged("0.5*exact + 0.5*reward_of_mine:unknown")
    assert unknown.score is None and unknown.parts["exact"].score == 1.0


@pytest.mark.parametrize(
    ("name", "found"),
    [("nan", "nan"), ("above", "1.5"), ("words", "'good'"), ("below", "-0.1")],
)
async def test_a_reward_that_is_no_number_from_0_to_1_is_named_with_its_task(
    own: None, name: str, found: str
) -> None:
    wanted = (
        f"reward 'reward_of_mine:{name}', on task {TASK.id}: found {found}, expected a number "
        "from 0 to 1, or None when it cannot judge."
    )
    with pytest.raises(ConfigError) as caught:
        await judged(f"reward_of_mine:{name}")
    assert str(caught.value) == wanted


async def test_a_reward_that_fails_is_named_with_its_task(own: None) -> None:
    says = f"reward 'reward_of_mine:broken', on task {TASK.id}, failed: AttributeError"
    with pytest.raises(ConfigError, match=says):
        await judged("reward_of_mine:broken")


async def test_what_cannot_be_opened_is_said_before_anything_is_judged(own: None) -> None:
    for expression, says in (
        ("exat", r"'exat' is not a reward\. Did you mean 'exact'\?"),
        ("reward_of_mine:NUMBER", r"is a int, not a function"),
        ("reward_of_mine:nothing", r"has no 'nothing'"),
        ("judge", r"reward 'judge' needs a model, openai:NAME@URL: judge\.model in"),
    ):
        with pytest.raises(CoaError, match=says):
            async with open_reward(expression):
                raise AssertionError


async def test_many_are_judged_at_once_in_their_order() -> None:
    answers = ["Lima", "Quito", None, "the lima"]
    pairs = [(TASK, Trajectory(TASK.id, "q?", "mhqa", answer=answer)) for answer in answers]
    async with open_reward("exact") as reward:
        found = await reward.score_all(pairs)
        assert reward.usage() == {} and reward.name == "exact"
    assert [each.score for each in found] == [1.0, 0.0, 0.0, 1.0]
    assert mean_parts(found) == {"exact": {"mean": 0.5, "n": 4, "unjudged": 0}}
    assert mean_parts([Scored(None, {"judge": Part(None, "down")})]) == {
        "judge": {"mean": None, "n": 0, "unjudged": 1}
    }


async def test_the_first_failure_of_many_is_what_one_hears(own: None) -> None:
    async with open_reward("reward_of_mine:nan") as reward:
        with pytest.raises(ConfigError, match="found nan"):
            await reward.score_all([(TASK, CHAIN)] * 3)


async def test_auto_judges_every_task_by_what_suits_it() -> None:
    math_task = Task("How many?", ("27.0",), meta={"data_source": "amc23"})
    named = Task("Which?", ("the old sol",), meta={"reward": "f1"})
    tested = Task("Add.", gold={"tests": {"functional": "assert f()"}})
    assert [choose_reward("auto", [t]) for t in (TASK, math_task, named, tested)] == [
        "exact",
        "math",
        "f1",
        "tests",
    ]
    assert choose_reward("auto", [TASK, named]) == "auto"
    assert set(RewardSettings("auto").needs([TASK, named])) == {"auto", "exact", "f1"}
    async with open_reward("auto", tasks=[TASK, named]) as reward:
        assert (await reward.score(TASK, CHAIN)).score == 1.0
        near = Trajectory(named.id, "Which?", "mhqa", answer="sol")
        assert (await reward.score(named, near)).score == pytest.approx(2 / 3)
        wrong = Task("Which?", ("sol",), meta={"reward": "auto"})
        with pytest.raises(ConfigError, match="names the reward 'auto', which is no reward"):
            await reward.score(wrong, near)


async def test_a_reference_inside_a_task_is_never_imported(own: None) -> None:
    named = Task("Which?", ("Lima",), meta={"reward": "reward_of_mine:half"})
    says = r"names the reward 'reward_of_mine:half': a reference inside a file is never imported"
    with pytest.raises(ConfigError, match=says):
        choose_reward("auto", [named])
    with pytest.raises(ConfigError, match=says):
        await judged("auto", task=named)
    with pytest.raises(ConfigError, match=says):
        lacking("auto", named)
    assert "reward_of_mine" not in sys.modules
    assert (await judged("reward_of_mine:half", task=named)).score == 0.5, "typed by a person"


def test_what_a_task_lacks_is_known_before_it_is_tried() -> None:
    bare, tested = Task("Why?"), Task("Add.", gold={"tests": {"functional": "assert f()"}})
    for name in ("exact", "f1", "judge", "math", "auto"):
        assert lacking(name, bare) == "gold answer" and lacking(name, TASK) == ""
    assert lacking("tests", TASK) == "tests"
    assert lacking("tests", tested) == lacking("auto", tested) == ""
    assert lacking("exact", tested) == "gold answer"
    assert lacking("format", bare) == lacking("own:reward", bare) == ""


def test_a_recipe_has_it_as_a_table(tmp_path: Path) -> None:
    path = tmp_path / "reward.toml"
    path.write_text(
        'expression = "judge*format"\n[judge]\nmodel = "openai:tester@http://localhost:1"\n'
        "[format]\ngraded = true\n"
    )
    found = load_recipe(path, ["math.cpu_seconds=2"], RewardSettings)
    assert found.judge.model == "openai:tester@http://localhost:1"
    assert found.format == FormatSettings(graded=True) and found.math.cpu_seconds == 2
    for override, says in (
        ("expression=exat", r"'exat' is not a reward"),
        ("expression=exact+f1", r"can reach 2"),
        ("math.cpu_seconds=0", r"reward\.math: cpu_seconds 0"),
        ("tests.slots=0", r"reward\.tests: slots is 0"),
        ("tests.memory_mb=0", r"limits\.memory_mb is 0"),
        ("judge.attempts=0", r"reward\.judge: attempts is 0"),
        ("judge.retries=-1", r"reward\.judge: retries is -1, expected 0 or more"),
        ("format.grade=true", r"format\.grade is not a setting"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_recipe(path, [override], RewardSettings)


def test_the_identity_has_what_scores_depend_on_and_nothing_else(tmp_path: Path) -> None:
    judge = JudgeSettings("openai:tester@http://localhost:1", cache="verdicts.db", slots=2)
    found = RewardSettings("0.9 * judge + 0.1*format", judge=judge).identity()
    assert found["expression"] == "0.9*judge+0.1*format"
    assert set(found) == {"expression", "judge", "format"}
    assert not {"cache", "slots", "timeout_s", "prompt"} & set(found["judge"])
    assert found["judge"]["model"] == "tester", "wherever it is served"
    own = tmp_path / "prompt.txt"
    own.write_text("Be kind.")
    other = RewardSettings("judge", judge=replace(judge, prompt=str(own))).identity()
    assert found["judge"]["instructions"] != other["judge"]["instructions"]
    assert RewardSettings("exact").identity() == {"expression": "exact"}


def test_the_documented_rewards_are_those_there_are() -> None:
    page = (Path(__file__).parent.parent / "docs" / "rewards.md").read_text(encoding="utf-8")
    for name in REWARDS:
        assert f"`{name}`" in page, name
    for table in ("math", "tests", "judge", "format"):
        for setting in vars(getattr(RewardSettings(), table)):
            assert f"`{table}.{setting}`" in page, f"{table}.{setting}"
