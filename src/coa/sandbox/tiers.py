"""Which protection this machine offers, found by trying: `reach_tier()`.

FULL is everything: a view of its own (bubblewrap), Landlock, a filter of system calls and limits,
and a throwaway uid where we are root. PROCESS is the same without namespaces. A tier is reached
when a program runs in it and the attacks in `PROBES` do not get through.
"""

from __future__ import annotations

import asyncio
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache

from coa.sandbox.slot import Slot
from coa.sandbox.walls import Limits, SandboxError, Walls, can_drop, find_layout

_TRY = """
import contextlib, ctypes, os, platform, resource, socket, sys, time
def attempt(call, *arguments):
    try:
        call(*arguments)
        print("OPEN", *arguments)
    except (MemoryError, OSError, ValueError):
        pass
def system_call(on_x86, on_arm, *arguments):
    number = on_x86 if platform.machine() == "x86_64" else on_arm
    if ctypes.CDLL(None, use_errno=True).syscall(number, *arguments) >= 0:
        print("OPEN", number)
"""
_SOCKETS = """
for family in (socket.AF_INET, socket.AF_UNIX):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        attempt(socket.socket, family, kind)
"""
_HOST_FILES = """
for path in ("/etc/passwd", "/etc/hostname", "/proc/1/environ", "/proc/self/maps", "/sys", "/usr"):
    attempt(lambda path: os.listdir(path) if os.path.isdir(path) else open(path).read(), path)
"""
_WRITES = """
for folder in ("/", "/dev", "/var/tmp", os.path.dirname(os.__file__), "/py", "/py/site"):
    attempt(open, os.path.join(folder, "coa-was-here"), "w")
"""
_SIGNALS = """
with contextlib.suppress(OSError):
    os.kill(os.getppid(), 9)  # one that arrives ends the sandbox, and that is noticed
"""
_EXECUTES = """
for path in ("/bin/sh", sys.executable or "/py/bin/python3", "/py/bin/python3"):
    attempt(os.execv, path, [path, "-c", "print('OPEN')"])
"""
_IDENTITY = """
attempt(os.setuid, 0)
attempt(os.setgid, 0)
attempt(os.setgroups, [0])
if os.getuid() == 0:
    print("OPEN")
"""
_LIMITS = """
for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
    attempt(resource.setrlimit, kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
attempt(bytearray, 1 << 36)
"""
_FORKS = """
started = 0
for _ in range(64):
    with contextlib.suppress(OSError):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        started += 1
if started == 64:
    print("OPEN")
"""

PROBES = {
    "sockets": _SOCKETS,
    "files of the host": _HOST_FILES,
    "writing outside": _WRITES,
    "signals": _SIGNALS,
    "starting a program": _EXECUTES,
    "becoming root": _IDENTITY,
    "raising a limit": _LIMITS,
    "processes without end": _FORKS,
    "ptrace": "system_call(101, 117, 0, 0, 0, 0)",
    "unshare": "system_call(272, 97, 0x10000000)",
    "mount": "system_call(165, 40, b'none', b'/tmp', b'tmpfs', 0, None)",
    "bpf": "system_call(321, 280, 0, ctypes.create_string_buffer(64), 64)",
    "io_uring": "system_call(425, 425, 4, ctypes.create_string_buffer(120))",
    "keyctl": "system_call(250, 219, 0, -3, 1)",
    "memory outside the limit": "system_call(319, 279, b'x', 0)",
    "another's descriptors": "system_call(434, 434, 1, 0)",
}
"""Name of the attack -> program, after `_TRY`. It prints OPEN when it got through."""

_NAMESPACES_FIX = (
    "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1 "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container, "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
)
_CONFINEMENT_FIX = "run as an ordinary user, with a Python that every user may read"
_lock = threading.Lock()


class Tier(IntEnum):
    """How well a program is shut in."""

    NONE = 0
    PROCESS = 1
    """Landlock, a filter of system calls, limits; no namespaces, so no processes and no files."""
    FULL = 2
    """All layers."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One layer: whether it holds, what was found, and what to do when it does not."""

    layer: str
    ok: bool
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Reach:
    """The tier that was reached and how."""

    tier: Tier
    findings: list[Finding] = field(default_factory=list)
    walls: Walls | None = None


def reach_tier() -> tuple[Tier, list[Finding]]:
    """The highest tier that works here and a finding per layer; tried once per process."""
    found = reach()
    return found.tier, list(found.findings)


def reach(at_most: Tier = Tier.FULL) -> Reach:
    """As `reach_tier`, not above `at_most`, and with the walls that reached it."""
    with _lock:
        return _reach(at_most)


def refusal(found: Reach, required: Tier) -> str:
    """One line: what is required, which layer is missing, how to get it."""
    wrong = [each for each in found.findings if not each.ok]
    why = "; ".join(f"{each.layer}: {each.found} ({each.fix})" for each in wrong)
    return (
        f"programs are not run here: tier {required.name} is required and "
        f"{found.tier.name} is reached. {why or 'a lower tier was asked for'}. "
        "To run them without protection: --unsafe-code, or unsafe=True in Python."
    )


@cache
def _reach(at_most: Tier) -> Reach:
    findings = list(_grounds())
    if not all(each.ok for each in findings):
        return Reach(Tier.NONE, findings)
    stopped = Finding("self-test", True, f"{len(PROBES)} attacks stopped")
    if at_most >= Tier.FULL:
        bwrap = shutil.which("bwrap") or ""
        findings.append(_bubblewrap(bwrap))
        reasons = []
        for walls in _full_walls(bwrap):
            failure = _try(walls)
            if failure is None:
                shut = "dropped" if walls.drops else "not root: a user namespace"
                findings.append(Finding("namespaces", True, f"bubblewrap as {walls.way}"))
                findings += [Finding("uid", True, shut), stopped]
                return Reach(Tier.FULL, findings, walls)
            reasons.append(failure)
        if bwrap:
            findings.append(Finding("namespaces", False, "; ".join(reasons), _NAMESPACES_FIX))
    if at_most >= Tier.PROCESS:
        walls = Walls("process", find_layout(()), drops="inside" if can_drop() else "")
        failure = _try(walls)
        if failure is None:
            return Reach(Tier.PROCESS, [*findings, stopped], walls)
        findings.append(Finding("confinement", False, failure, _CONFINEMENT_FIX))
    return Reach(Tier.NONE, findings)


def _grounds() -> Iterator[Finding]:
    """What every tier needs; `fix` counts where it is missing."""
    fix = "run coa in Linux: a virtual machine, WSL 2 or a container with bubblewrap"
    yield Finding("system", sys.platform == "linux", platform.system() or sys.platform, fix)
    if sys.platform != "linux":
        return
    from coa.sandbox.inside.confine import landlock_version
    from coa.sandbox.inside.syscalls import ARCHITECTURES

    machine, known = platform.machine(), ", ".join(ARCHITECTURES)
    yield Finding("seccomp", machine in ARCHITECTURES, machine, f"known machines: {known}")
    version = landlock_version()
    fix = "boot a kernel of 5.13 or newer with lsm=landlock,... ; containers: allow its calls"
    yield Finding("landlock", version > 0, f"version {version}" if version else "off", fix)


def _bubblewrap(path: str) -> Finding:
    if not path:
        fix = "apt install bubblewrap (dnf, pacman and apk have it under the same name)"
        return Finding("bubblewrap", False, "not installed", fix)
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return Finding("bubblewrap", True, done.stdout.strip() or path)


def _full_walls(bwrap: str) -> Iterator[Walls]:
    if bwrap and can_drop():
        yield Walls("root", find_layout(()), bwrap, "inside")
        yield Walls("user", find_layout(()), bwrap, "outside")
    elif bwrap:
        yield Walls("user", find_layout(()), bwrap)


def _try(walls: Walls) -> str | None:
    """Attack these walls; what went wrong, or None when they hold.

    In a thread of its own, so that it works whether or not a loop is running here.
    """
    with ThreadPoolExecutor(1, "sandbox self-test") as thread:
        try:
            return thread.submit(asyncio.run, _attack(walls)).result()
        except (SandboxError, OSError) as error:
            return str(error)


async def _attack(walls: Walls) -> str | None:
    slot = Slot(walls, Limits(seconds=10, memory_mb=512))
    try:
        await slot.start()
        for name, program in {"a sum": "print(6 * 7)", **PROBES}.items():
            outcome = await slot.run(b"J", f"{_TRY}{program}")
            out, err = outcome.stdout, outcome.stderr.strip()[-200:]
            if name == "a sum" and out != "42\n":
                return f"{walls.way}: a program printed {out!r} {err!r}, expected 42"
            if "OPEN" in out:
                return f"{walls.way}: an attack got through: {name} {out.split()[1:]}"
            if outcome.ended not in ("ok", "error", "killed") or not await slot.settled():
                return f"{walls.way}: the sandbox did not survive: {name}"
    finally:
        await slot.close()
    return None
