"""The task sets over the Atlas, by name: the same world, splits and rules, other questions."""

from __future__ import annotations

from collections.abc import Mapping

from coa.environments.atlas.code import CODE_FAMILIES, CODE_PHRASINGS
from coa.environments.atlas.families import FAMILIES, Catalogue
from coa.environments.atlas.phrasings import PHRASINGS
from coa.environments.atlas.rewordings import REWORDINGS
from coa.environments.atlas.web import WEB_FAMILIES, WEB_PHRASINGS
from coa.environments.atlas.wide import WIDE_FAMILIES, WIDE_PHRASINGS
from coa.environments.sets import ATLAS_CODE, ATLAS_REWORDED, ATLAS_WEB, ATLAS_WIDE, DEFAULT_SET

MHQA = Catalogue(DEFAULT_SET, FAMILIES, PHRASINGS, most=3000)
REWORDED = Catalogue(
    ATLAS_REWORDED, {name: FAMILIES[name] for name in REWORDINGS}, REWORDINGS, most=3000
)
WEB = Catalogue(ATLAS_WEB, WEB_FAMILIES, WEB_PHRASINGS)
WIDE = Catalogue(ATLAS_WIDE, WIDE_FAMILIES, WIDE_PHRASINGS)
CODE = Catalogue(ATLAS_CODE, CODE_FAMILIES, CODE_PHRASINGS)

CATALOGUES: Mapping[str, Catalogue] = {
    each.name: each for each in (MHQA, REWORDED, WIDE, WEB, CODE)
}
