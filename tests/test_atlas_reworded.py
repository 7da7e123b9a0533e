"""The set atlas-reworded: the same questions in other words, none near to a held-out wording."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from coa.environments.atlas.catalogues import MHQA, REWORDED, is_held_out
from coa.environments.atlas.tasks import families_of

CLOSE = 0.8
"""Share of words in common, in order, from which on two wordings count as the same."""


def words(template: str) -> list[str]:
    return re.findall(r"\{\w+\}|\w+", template.lower())


def test_every_trained_family_is_put_in_other_words() -> None:
    assert set(REWORDED.families) == set(families_of("train", MHQA))
    for name, templates in REWORDED.phrasings.items():
        assert REWORDED.families[name] is MHQA.families[name]
        assert len(set(templates)) == len(templates) >= 12
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
