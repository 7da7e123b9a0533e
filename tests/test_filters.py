"""The filters: what is dropped has a reason, what is kept is worth training on, chance is keyed."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import pytest

from coa.distillation.convert import NotConvertible, convert
from coa.distillation.dataset import DistillSettings
from coa.distillation.filters import Candidate, Filtered, FilterSettings, apply_filters
from coa.environments import make_tasks
from coa.environments.experts import Experts
from coa.errors import ConfigError
from coa.grammar import load_grammar
from coa.io.settings import find_recipe, load_recipe, read_toml
from coa.rewards import auto
from coa.tasks import Task
from coa.trajectory import Chain
from made_chains import (
    GOOD,
    LENIENT,
    LIMA,
    LOOK,
    PLAN,
    POOR,
    SEARCH,
    Said,
    chain,
    checked,
    closing,
    filtered,
    reason_for,
    searched,
)
from scripts import TOOLBOX_OF, episodes_of

STAGES = ["contamination", "complexity", "quality", "duplicates", "reflection", "correction"]

# -- the stages together ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def experts() -> tuple[dict[str, Task], list[Candidate]]:
    """What real experts with many mistakes made, converted and scored, wrong ones among them."""
    tasks = [
        *make_tasks("atlas-mhqa", "train", 90, seed=3),
        *make_tasks("atlas-web", "train", 60, seed=3),
    ]
    candidates = []
    for task, episode in zip(
        tasks, episodes_of(tasks, Experts(error_rate=0.4, miss_rate=0.4)), strict=True
    ):
        grammar = "web" if task.meta.get("set") == "atlas-web" else "mhqa"
        try:
            made = convert(episode, TOOLBOX_OF(task).bind(load_grammar(grammar)))
        except NotConvertible:
            continue
        candidates.append(Candidate(made, auto(task, made)))
    return {task.id: task for task in tasks}, candidates


def test_stages_come_in_order_and_their_numbers_add_up(
    experts: tuple[dict[str, Task], list[Candidate]],
) -> None:
    _, candidates = experts
    done = apply_filters(
        candidates, FilterSettings(keep_without_reflection=0.5, copies_of_corrected=2)
    )
    assert [stage["stage"] for stage in done.stages] == STAGES
    entered = len(candidates)
    for stage in done.stages:
        own = [note for note in done.notes if note["stage"] == stage["stage"]]
        assert stage["entered"] == entered
        assert stage["dropped"] == sum("copies" not in note for note in own)
        assert stage["repeated"] == sum(note.get("copies", 0) for note in own)
        assert sum(stage["reasons"].values()) == stage["dropped"] + stage["repeated"]
        entered = stage["left"]
        assert entered == stage["entered"] - stage["dropped"] + stage["repeated"]
    assert entered == len(done.kept)
    met = {stage["stage"] for stage in done.stages if stage["dropped"] or stage["repeated"]}
    assert met >= {"quality", "reflection", "correction"}, "the experts should meet these stages"


def test_every_chain_kept_is_right_and_legal_and_every_other_has_its_reason(
    experts: tuple[dict[str, Task], list[Candidate]],
) -> None:
    tasks, candidates = experts
    done = apply_filters(candidates, FilterSettings())
    for trajectory in done.kept:
        assert auto(tasks[trajectory.task_id], trajectory) == 1.0
        assert Chain.read(trajectory).fault is None
    originals = [each for each in done.kept if "copy" not in each.meta]
    dropped = [note["task_id"] for note in done.notes if "copies" not in note]
    assert sorted(dropped + [each.task_id for each in originals]) == sorted(
        each.trajectory.task_id for each in candidates
    )
    place = {each.trajectory.task_id: number for number, each in enumerate(candidates)}
    assert [place[each.task_id] for each in done.kept] == sorted(
        place[each.task_id] for each in done.kept
    )
    assert all(
        note["reason"] and set(note) >= {"task_id", "stage", "detail"} for note in done.notes
    )
    json.dumps([done.notes, done.stages])


def test_the_same_candidates_give_the_same_result(
    experts: tuple[dict[str, Task], list[Candidate]],
) -> None:
    _, candidates = experts
    assert apply_filters(candidates, FilterSettings()) == apply_filters(
        candidates, FilterSettings()
    )


def test_no_candidate_at_all_passes_through() -> None:
    done = filtered()
    assert done.kept == [] and [stage["entered"] for stage in done.stages] == [0] * len(STAGES)


# -- complexity ------------------------------------------------------------------------------


def test_thoughts_are_no_interactions_and_everything_else_that_the_model_writes_is() -> None:
    made = checked(2, 4)
    assert len(Chain.read(made).interactions) == 9  # plan, search, suggestion, check, twice; answer
    assert len(Chain.read(made).of_kind("think")) == 9
    nine, ten = (replace(LENIENT, min_interactions=least) for least in (9, 10))
    assert reason_for(made, nine) == "" and reason_for(made, ten) == "too few interactions"


def test_an_answer_without_a_tool_call_is_too_simple() -> None:
    least = replace(LENIENT, min_tool_calls=1)
    assert reason_for(searched("capital of Peru"), least) == ""
    done = filtered(searched(), settings=least)
    assert done.notes == [
        {
            "task_id": "t1",
            "stage": "complexity",
            "reason": "too few tool calls",
            "detail": "0 of 1",
        }
    ]


# -- duplicates ------------------------------------------------------------------------------


def test_of_two_near_duplicates_the_first_sound_one_stays_and_copies_stay_too() -> None:
    settings = FilterSettings(keep_without_reflection=1.0, copies_of_corrected=2)
    wrong, right, again = (checked(2, 4, task_id=name) for name in ("wrong", "right", "again"))
    given = [Candidate(wrong, 0.0), Candidate(right, 1.0), Candidate(again, 1.0)]
    done = apply_filters(given, settings)
    assert [each.task_id for each in done.kept] == ["right"] * 3
    near = next(note for note in done.notes if note["stage"] == "duplicates")
    assert near == {
        "task_id": "again",
        "stage": "duplicates",
        "reason": "near-duplicate",
        "detail": "1.000 like task right",
    }
    off = apply_filters(given, replace(settings, duplicate_similarity=0))
    assert len(off.kept) == 6


def test_contamination_is_reported_with_the_file_it_comes_from() -> None:
    given = [Candidate(searched("a", question="Tell me the capital of Peru."), 1.0)]
    exam = Task("What is the capital of Peru?", ("Lima",), id="e7")
    done = apply_filters(given, LENIENT, {"exam.jsonl": [exam]})
    assert not done.kept and done.notes[0]["reason"] == "is an evaluation question"
    assert done.notes[0]["detail"] == "exam.jsonl task e7"
    assert apply_filters(given, LENIENT, {"exam.jsonl": [Task("Capital of Chile?")]}).kept


# -- reflection ------------------------------------------------------------------------------


def plain(count: int) -> list[Candidate]:
    return [Candidate(searched("a", task_id=f"t{number}"), 1.0) for number in range(count)]


def names(done: Filtered) -> set[str]:
    return {each.task_id for each in done.kept}


def test_chains_without_reflection_are_drawn_by_task_and_never_by_order() -> None:
    settings = replace(LENIENT, keep_without_reflection=0.4)
    given = plain(1000)
    kept = names(apply_filters(given, settings))
    assert 340 < len(kept) < 460
    mixed = random.Random(1).sample(given, 500)
    assert names(apply_filters(mixed, settings)) == kept & {c.trajectory.task_id for c in mixed}
    assert names(apply_filters(given, replace(settings, seed=1))) != kept
    more = names(apply_filters(given, replace(settings, keep_without_reflection=0.6)))
    assert kept < more


def test_a_probability_of_nought_or_one_means_it() -> None:
    given = [*plain(30), Candidate(searched("a", reflection="It fits.", task_id="r"), 1.0)]
    none = apply_filters(given, replace(LENIENT, keep_without_reflection=0.0))
    assert names(none) == {"r"}
    assert none.stages[4]["reasons"] == {"no reflection, not drawn": 30}
    assert len(apply_filters(given, replace(LENIENT, keep_without_reflection=1.0)).kept) == 31


def test_where_reflection_is_required_chance_does_not_help() -> None:
    made = chain([PLAN, ("think", " Easy."), ("answer", " 1")], "code")
    assert reason_for(made) == ""
    required = replace(LENIENT, reflection_required=("code",))
    assert reason_for(made, required) == "no reflection where it is required"


def test_a_grammar_without_reflections_is_not_asked_for_any() -> None:
    made = chain([LOOK, LIMA], "react")
    assert reason_for(made, replace(LENIENT, keep_without_reflection=0.0)) == ""


# -- correction ------------------------------------------------------------------------------

TWICE = replace(LENIENT, copies_of_corrected=2, no_copies=("code",))


def test_a_low_check_that_ended_right_is_repeated_behind_its_original() -> None:
    low, high = checked(2, 4, task_id="low", meta={"world": 0}), checked(3, task_id="high")
    done = filtered(high, low, high, settings=TWICE)
    assert [each.task_id for each in done.kept] == ["high", "low", "low", "low", "high"]
    assert [each.meta.get("copy") for each in done.kept] == [None, None, 1, 2, None]
    assert done.kept[1] is low and low.meta == {"world": 0}
    assert all(each.segments == low.segments for each in done.kept[1:4])
    assert done.notes == [
        {
            "task_id": "low",
            "stage": "correction",
            "reason": "a low check was put right",
            "detail": "",
            "copies": 2,
        }
    ]
    last = replace(TWICE, low_check=3)  # nothing was put right after the only check
    assert len(filtered(high, settings=last).kept) == 1
    lower = replace(TWICE, low_check=1)
    assert len(filtered(low, settings=lower).kept) == 1


def test_what_nobody_judged_is_not_repeated() -> None:
    assert len(filtered(checked(2, 4), settings=TWICE, score=None).kept) == 1


ERR: Said = ("wiki_search", " capitl of Per", True)
OBJECT: Said = ("reflection", " It does not say.")
ALARM: Said = ("reflection", " It does not say.", True)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([PLAN, ERR, OBJECT, LOOK, LIMA], "a marked mistake was put right"),
        ([PLAN, ERR, LIMA], ""),
        ([PLAN, ERR, ALARM, LOOK, LIMA], ""),
        ([PLAN, LOOK, OBJECT, ERR, LIMA], ""),
        ([PLAN, LOOK, OBJECT, LIMA], ""),
        ([PLAN, LOOK, ALARM, ("wiki_search", " Peru"), LIMA], ""),
        ([PLAN, LOOK, OBJECT, ("plan", " 1. read"), LIMA], "an objection led to a new plan"),
        ([PLAN, LOOK, ALARM, ("plan", " 1. read"), LIMA], ""),
    ],
)
def test_without_checks_a_mistake_that_a_critic_met_counts_and_a_false_alarm_does_not(
    said: list[Said], reason: str
) -> None:
    done = filtered(chain(said), settings=TWICE)
    assert [note["reason"] for note in done.notes] == ([reason] if reason else [])
    assert len(done.kept) == (3 if reason else 1)


def test_without_critics_a_marked_mistake_after_which_the_work_went_on_counts() -> None:
    assert len(filtered(chain([ERR, LOOK, LIMA], "react"), settings=TWICE).kept) == 3
    assert len(filtered(chain([ERR, LIMA], "react"), settings=TWICE).kept) == 1


def test_some_grammars_are_not_repeated() -> None:
    made = checked(2, 4)
    assert len(filtered(made, settings=replace(TWICE, no_copies=("web",))).kept) == 1
    assert len(filtered(made, settings=replace(TWICE, copies_of_corrected=0)).notes) == 0


def test_a_rating_of_poor_sends_back_and_is_no_low_check() -> None:
    back: list[Said] = [("reflection", f" {POOR}"), ("plan", " 1. again"), ("web_search", " Peru")]
    made = chain([PLAN, SEARCH, *back, ("reflection", f" {GOOD}"), *closing("Lima")], "web")
    assert len(filtered(made, settings=TWICE).kept) == 1


# -- settings and recipes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "wanted"),
    [
        ("min_interactions", -1, "0 or more"),
        ("copies_of_corrected", -1, "0 or more"),
        ("duplicate_shingle", 0, "at least 1"),
        ("low_check", 5, "between 1 and 4"),
        ("keep_without_reflection", 1.5, "between 0 and 1"),
        ("contamination_overlap", 0.0, "more than 0, at most 1"),
    ],
)
def test_a_threshold_that_means_nothing_is_refused(setting: str, value: Any, wanted: str) -> None:
    message = f"filter.{setting}: found {value!r}, expected {wanted}."
    with pytest.raises(ConfigError, match=message):
        FilterSettings(**{setting: value})
    with pytest.raises(ConfigError, match=f"override 'filter.{setting}={value}'|{message}"):
        load_recipe(None, [f"filter.{setting}={value}"], Recipe)


@dataclass(frozen=True)
class Recipe:
    filter: FilterSettings = field(default_factory=FilterSettings)


def filters_of(name: str) -> tuple[dict[str, Any], FilterSettings]:
    """The table of a shipped recipe, and what it becomes."""
    written = read_toml(find_recipe(name))["filter"]
    return written, load_recipe(None, [], Recipe, {"filter": written}).filter


def test_the_shipped_recipe_names_every_setting_once_with_its_default() -> None:
    written, loaded = filters_of("distill")
    assert loaded == FilterSettings()
    assert list(written) == [each.name for each in fields(FilterSettings)]
    lines = find_recipe("distill").read_text().splitlines()
    keys = Counter(line.split("=")[0].strip() for line in lines if "=" in line.split("#")[0])
    assert set(keys.values()) == {1} and set(keys) >= set(written)


@pytest.mark.parametrize("name", ["distill", "distill-paper"])
def test_the_shipped_recipes_are_what_the_command_reads(name: str) -> None:
    loaded = load_recipe(find_recipe(name), [], DistillSettings)
    assert loaded == replace(DistillSettings(), filter=filters_of(name)[1])


def test_the_recipe_of_the_paper_has_its_values() -> None:
    written, loaded = filters_of("distill-paper")
    assert loaded.min_interactions == 5 and loaded.low_check == 2
    assert loaded.reflection_required == loaded.no_copies == ("code",)
    assert loaded.keep_without_reflection < FilterSettings().keep_without_reflection
    assert asdict(loaded) == asdict(FilterSettings()) | {
        key: tuple(value) if isinstance(value, list) else value for key, value in written.items()
    }
