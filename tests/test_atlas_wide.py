"""The set atlas-wide: sound gold, experts who solve it, and nothing that is held out elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coa.environments import make_tasks
from coa.environments.atlas.catalogues import (
    CATALOGUES,
    MHQA,
    REWORDED,
    WEB,
    WIDE,
    is_held_out,
    understand,
)
from coa.environments.atlas.families import (
    Catalogue,
    Comparison,
    Difference,
    LookupChain,
    Superlative,
)
from coa.environments.atlas.pages import read
from coa.environments.atlas.tasks import families_of, held_out
from coa.environments.atlas.world import load_world
from coa.environments.experts import Experts
from coa.errors import UsageError
from coa.rewards import exact_match
from coa.tasks import Task
from scripts import episodes_of

WORLDS = (0, 7)


@pytest.fixture(
    scope="module", params=[(s, w) for s in ("train", "heldout_entity") for w in WORLDS]
)
def tasks(request: pytest.FixtureRequest) -> list[Task]:
    split, world = request.param
    return list(make_tasks("atlas-wide", split, 430, seed=3, world_seed=world))


def concluded(task: Task) -> str:
    """The answer that follows from what the passages of a task say, by a reading of its family."""
    shape = WIDE.families[task.meta["family"]].shape
    said = [str(hop["answer"]) for hop in task.gold["hops"]]
    if isinstance(shape, LookupChain):
        return said[-1]
    numbers = [
        (int(hop["answer"].replace(",", "")), str(hop["subject"]))
        for hop in task.gold["hops"]
        if hop["relation"] == shape.relations[-1]
    ]
    if isinstance(shape, Difference):
        return str(abs(numbers[0][0] - numbers[1][0]))
    assert isinstance(shape, Comparison | Superlative)
    best = (min if shape.smaller else max)(numbers)[1]
    if isinstance(shape, Superlative):
        return best
    starts = task.gold["hops"][:: len(shape.relations)]
    ends = task.gold["hops"][len(shape.relations) - 1 :: len(shape.relations)]
    return next(
        str(s["subject"]) for s, e in zip(starts, ends, strict=True) if e["subject"] == best
    )


def test_the_answer_follows_from_the_passages(tasks: list[Task]) -> None:
    for task in tasks:
        for hop in task.gold["hops"]:
            assert ", ".join(read(hop["relation"], hop["subject"], hop["passage"])) == hop["answer"]
        assert exact_match(concluded(task), task.answers) == 1.0, task.question


def test_every_question_is_understood(tasks: list[Task]) -> None:
    for task in tasks:
        understood = understand(task.question, WIDE)
        assert understood is not None, task.question
        assert (understood.family, understood.phrasing) == (
            task.meta["family"],
            task.meta["phrasing"],
        ), task.question
        solution = understood.meaning.shape.solve(load_world(task.meta["world"]), understood.slots)
        assert solution is not None and solution.answer == task.answers[0]


def test_every_family_is_there_and_splits_are_clean(tasks: list[Task]) -> None:
    split, world = tasks[0].meta["split"], tasks[0].meta["world"]
    missing = set(families_of(split, WIDE)) - {task.meta["family"] for task in tasks}
    # Few elements were discovered in a country that is held out as well.
    assert not missing or (
        split != "train" and all(name.startswith("element_") for name in missing)
    )
    names = {name for _, name in held_out(load_world(world))}
    for task in tasks:
        named = {hop["subject"] for hop in task.gold["hops"]}
        assert (named <= names) == (split == "heldout_entity"), task.question
        assert split != "train" or not is_held_out(task.meta["phrasing"])


@pytest.mark.parametrize(("catalogue", "each"), [(WIDE, 2), (REWORDED, 5)])
def test_careful_experts_solve_it(catalogue: Catalogue, each: int) -> None:
    tasks = make_tasks(catalogue.name, "train", each * len(catalogue.families), seed=4)
    assert not any(is_held_out(task.meta["phrasing"]) for task in tasks)
    episodes = episodes_of(tasks, Experts(error_rate=0.0, false_alarm_rate=0.0))
    wrong = [
        (task.question, episode.answer, episode.error)
        for task, episode in zip(tasks, episodes, strict=True)
        if not episode.answer or not exact_match(episode.answer, task.answers)
    ]
    assert len(wrong) <= len(tasks) // 20, wrong


def parts(relations: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for start in range(len(relations)):
        for end in range(start + 1, len(relations) + 1):
            yield relations[start:end]


def test_what_other_sets_hold_out_occurs_nowhere() -> None:
    new = [MHQA.families[name].shape for name in families_of("heldout_family", MHQA)]
    new += [WEB.families[name].shape for name in families_of("heldout_family", WEB)]
    shapes = [family.shape for family in WIDE.families.values()]
    for shape in new:
        assert all(repr(shape) != repr(other) for other in shapes)
        if isinstance(shape, LookupChain):  # nor as a part of something longer
            for other in shapes:
                if isinstance(other, LookupChain | Comparison):
                    assert shape.relations not in parts(other.relations), other
    differences = {shape.by for shape in shapes if isinstance(shape, Difference)}
    assert "neighbour_count" not in differences
    superlatives = {(s.by, s.smaller) for s in shapes if isinstance(s, Superlative)}
    assert ("area", True) not in superlatives
    compared = {s.relations for s in shapes if isinstance(s, Comparison)}
    assert ("capital", "population") not in compared


def test_no_family_is_one_of_atlas_mhqa() -> None:
    known = {repr(family.shape) for family in MHQA.families.values()}
    assert not known & {repr(family.shape) for family in WIDE.families.values()}
    assert not set(MHQA.families) & set(WIDE.families)
    assert CATALOGUES["atlas-wide"] is WIDE and len(WIDE.families) > 40


def test_asking_for_held_out_families_says_where_they_are() -> None:
    with pytest.raises(UsageError, match=r"atlas-wide holds out no family.* Take atlas-mhqa\."):
        make_tasks("atlas-wide", "heldout_family", 5, 0)
