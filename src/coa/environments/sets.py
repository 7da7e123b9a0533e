"""Names of the shipped environments that make tasks."""

from __future__ import annotations

DEFAULT_SET = "atlas-mhqa"
ATLAS_REWORDED, ATLAS_WIDE = "atlas-reworded", "atlas-wide"
ATLAS_WEB, ATLAS_CODE, GYM = "atlas-web", "atlas-code", "gym-code"
