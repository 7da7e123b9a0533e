"""The set atlas-reworded: the same questions in other words, none near to a held-out wording."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from coa.rewards import exact_match
from coa.tasks import make_tasks
from coa.tasks.atlas import families_of
from coa.tasks.atlas_catalogues import MHQA, REWORDED
from coa.tasks.atlas_phrasings import is_held_out
from coa.tasks.atlas_understanding import understand
from coa.teachers.experts import Experts
from scripts import episodes_of

CLOSE = 0.8
"""Share of words in common, in order, from which on two wordings count as the same."""


def words(template: str) -> list[str]:
    return re.findall(r"\{\w+\}|\w+", template.lower())


def test_every_trained_family_is_put_in_other_words() -> None:
    assert set(REWORDED.families) == set(families_of("train", MHQA))
    for name, templates in REWORDED.phrasings.items():
        assert REWORDED.families[name] is MHQA.families[name]
        assert len(set(templates)) == len(templates) == 7
        assert not set(templates) & set(MHQA.phrasings[name])


def test_no_wording_is_close_to_one_that_is_held_out() -> None:
    held_out = [
        words(template)
        for name, templates in MHQA.phrasings.items()
        for index, template in enumerate(templates)
        if is_held_out(index) or MHQA.families[name].held_out
    ]
    for templates in REWORDED.phrasings.values():
        for template in templates:
            mine = words(template)
            for other in held_out:
                alike = SequenceMatcher(None, mine, other, autojunk=False).ratio()
                assert alike < CLOSE, (template, other)


def test_every_wording_is_traced_back_to_its_own_family() -> None:
    fill = {
        "country": ["Saint Kitts & Nevis", "the Netherlands", "Chad"],
        "city": ["Ho Chi Minh City"],
        "element": ["Iron", "Tin"],
    }
    for name, templates in REWORDED.phrasings.items():
        kinds = REWORDED.families[name].shape.slots
        for index, template in enumerate(templates):
            slots = {slot: fill[kind][place] for place, (slot, kind) in enumerate(kinds.items())}
            understood = understand(template.format(**slots), REWORDED)
            assert understood is not None, template
            assert (understood.family, understood.phrasing) == (name, index), template
            assert dict(understood.slots) == {s: n.removeprefix("the ") for s, n in slots.items()}


def test_careful_experts_solve_it() -> None:
    tasks = make_tasks("atlas-reworded", "train", 5 * len(REWORDED.families), seed=4)
    assert not any(is_held_out(task.meta["phrasing"]) for task in tasks)
    episodes = episodes_of(tasks, Experts(error_rate=0.0, false_alarm_rate=0.0))
    wrong = [
        (task.question, episode.answer, episode.error)
        for task, episode in zip(tasks, episodes, strict=True)
        if not episode.answer or not exact_match(episode.answer, task.answers)
    ]
    assert len(wrong) <= len(tasks) // 20, wrong
