"""Terms: under which licences the texts of a dataset are, and what must not be read into it.

Only what is known of its chains is said: whose questions they ask, and which teacher wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coa.tasks.sets import DEFAULT_SET, GYM, KINDS
from coa.trajectory import Trajectory

OTHER_TASKS = "other tasks"
EXPERTS = "experts"
"""The teacher whose sentences are ours to license."""
_ATLAS = KINDS.keys() - {GYM}
_ATLAS_LICENCES = """\
Facts of the Atlas come from GeoNames (*contains information from GeoNames, geonames.org, licensed
under [CC BY 4.0](https://creativecommons.org/licenses/by/4.0/); numbers rounded, names spelled in
ASCII*), Unicode CLDR (Unicode License v3, copyright Unicode, Inc.,
<https://www.unicode.org/license.txt>), the CIA World Factbook (public domain), and the packages
countryinfo and mendeleev (MIT). All sentences of the Atlas are the project's own. Invented worlds
use invented names."""
_GYM_LICENCES = """\
Questions of `gym-code` are made by reasoning-gym (Apache-2.0)."""
_OTHER_LICENCES = """\
Other questions, and what tools returned for them, keep the licences of their sources. **State them
here before publishing.**"""
_OTHER_TEACHERS = """\
What another teacher than the experts wrote is under its own terms, say those of the provider of a
language model. **State them here before publishing.**"""
_JUDGED = """\
- Chains with a wrong answer were dropped, so the share of right answers says nothing about the
  teacher."""
_UNJUDGED = """\
- Nobody could judge the answers of {} chains: some may be wrong."""
_REGULAR = """\
- Rule-based experts write few and regular sentences: a model trained on them learns the protocol
  and the work, not a way of writing."""
_PLACES = """\
- Statements about places are those of the sources; some are disputed, some will be out of date."""
_BY_WORDS = """\
- Near-duplicates and contamination are found by words: the same question in other words throughout,
  or in another language, is not found."""


def set_of(trajectory: Trajectory) -> str:
    """The task set; Atlas questions of the first set do not name it, but they have a world."""
    named = str(trajectory.meta.get("set", DEFAULT_SET if "world" in trajectory.meta else ""))
    return named if named in KINDS else OTHER_TASKS


def licence_names(distinct: Sequence[Trajectory]) -> list[str]:
    """The names that the hub has for the licences of all chains together."""
    sets = set(map(set_of, distinct))
    if OTHER_TASKS in sets or _others_wrote(distinct):
        return ["unknown"]
    return ["apache-2.0", *(["cc-by-4.0"] if sets & _ATLAS else [])]


def licences(distinct: Sequence[Trajectory]) -> str:
    """The section of the card that says under which terms its texts are."""
    sets, others_wrote = set(map(set_of, distinct)), _others_wrote(distinct)
    whose = " of the experts" * others_wrote + " of known sets" * (OTHER_TASKS in sets)
    paragraphs = {
        f"Chains{whose}: Apache-2.0.": True,
        _ATLAS_LICENCES: sets & _ATLAS,
        _GYM_LICENCES: GYM in sets,
        _OTHER_LICENCES: OTHER_TASKS in sets,
        _OTHER_TEACHERS: others_wrote,
    }
    return "\n\n".join(["## Licences", *(text for text, holds in paragraphs.items() if holds)])


def limits(distinct: Sequence[Trajectory], unjudged: int) -> str:
    """The section of the card that says what not to conclude from it."""
    lines = {
        _JUDGED: len(distinct) > unjudged,
        _UNJUDGED.format(f"{unjudged:,}"): unjudged,
        _REGULAR: any(each.weights == EXPERTS for each in distinct),
        _PLACES: set(map(set_of, distinct)) & _ATLAS,
        _BY_WORDS: True,
    }
    return "\n".join(["## Limits", "", *(text for text, holds in lines.items() if holds)])


def _others_wrote(distinct: Iterable[Trajectory]) -> bool:
    return any(each.weights != EXPERTS for each in distinct)
