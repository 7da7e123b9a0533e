"""Programs that a model wrote, run where they can do no harm.

    async with Sandbox() as box:
        outcome = await box.run("print(6 * 7)")

Programs run behind several walls at once (see `tiers`, `walls` and `inside.confine`), and a machine
that cannot build them refuses. A warm process waits behind each wall, so a run takes milliseconds.
"""

from __future__ import annotations

from coa.sandbox.box import PACKAGES, Sandbox
from coa.sandbox.slot import Outcome
from coa.sandbox.tiers import Tier, reach_tier
from coa.sandbox.walls import Limits, SandboxError

__all__ = [
    "PACKAGES",
    "Limits",
    "Outcome",
    "Sandbox",
    "SandboxError",
    "Tier",
    "reach_tier",
]
