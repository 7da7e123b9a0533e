"""How long work takes with SmolLM2-135M on two cores without a GPU, for estimates."""

from __future__ import annotations

from typing import NamedTuple

from coa.tasks.sets import (
    ATLAS_CODE,
    ATLAS_REWORDED,
    ATLAS_WEB,
    ATLAS_WIDE,
    DEFAULT_SET,
    GYM,
)


class Pace(NamedTuple):
    """Seconds of a task of one set."""

    row: float
    """To train on its chain: about 370 tokens are trained in a second, and a chain of atlas-mhqa
    has 330 of them."""
    rollout: float
    """To roll it out greedily, trained, with as many beside it as there is room for."""


PACE = {
    DEFAULT_SET: Pace(0.9, 0.35),
    ATLAS_REWORDED: Pace(0.9, 0.35),
    ATLAS_WIDE: Pace(0.9, 0.35),
    ATLAS_WEB: Pace(3.6, 1.6),
    ATLAS_CODE: Pace(1.5, 0.8),
    GYM: Pace(0.8, 0.5),
}
