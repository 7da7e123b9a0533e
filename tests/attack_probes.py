"""Every attack on the code sandbox, as values; docs/security.md has the table."""

from __future__ import annotations

from attacks.bombs import BOMBS
from attacks.files import FILES
from attacks.kernel import KERNEL
from attacks.lasting import LASTING
from attacks.network import NETWORK
from attacks.probe import Probe
from attacks.processes import PROCESSES
from attacks.sessions import SESSIONS
from attacks.takeover import TAKEOVER

PROBES: tuple[Probe, ...] = (
    *(*NETWORK, *FILES, *PROCESSES, *KERNEL),
    *(*BOMBS, *LASTING, *SESSIONS, *TAKEOVER),
)
