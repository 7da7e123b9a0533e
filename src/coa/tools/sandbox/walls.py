"""How a zygote is shut in: the command that starts it, and what it is told.

Three ways, from the strongest. `root`: bubblewrap runs as root, so it can show an interpreter from
a folder that others cannot enter, and the zygote then drops to a uid of its own. `user`:
bubblewrap in a user namespace, as an ordinary user (or, where root may not make namespaces but can
change its uid, as a throwaway one). `process`: no namespaces; a program can then start no further
process and write no file, because neither could be cleared away with certainty.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from coa.tools.sandbox.layout import DEVICES, HOME, Layout, start_code
from coa.tools.sandbox.limits import Limits, SandboxError

Way = Literal["root", "user", "process"]
Drops = Literal["", "inside", "outside"]
_STACK_MB = 64
_OWN_UIDS, _MOST_UIDS = 256, 1024
"""Uids of each process, and how many it tries before it gives up."""
_counter = itertools.count()


@dataclass(frozen=True)
class Walls:
    """One way to shut a zygote in."""

    way: Way
    layout: Layout
    bwrap: str = ""
    drops: Drops = ""
    """Where the uid is dropped: by the zygote, before bubblewrap starts, or not at all."""

    @property
    def forks(self) -> bool:
        """Whether programs may start processes: a namespace of their own ends them all."""
        return self.way != "process"

    def command(self, limits: Limits) -> list[str]:
        """All but the settings, which come last."""
        python = ["-s", "-S", "-P", "-B", "-X", "utf8", "-c"]
        if self.way == "process":
            return [str(self.layout.executable), *python, start_code()]
        inside = [f"{HOME}/bin/python3", *python, start_code(HOME)]
        return [self.bwrap, *self._namespaces(), *self._view(limits), "--", *inside]

    def _namespaces(self) -> list[str]:
        words = "--unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try "
        words += "--die-with-parent --new-session --as-pid-1 --hostname box --cap-drop ALL "
        if self.way == "root":
            # What dropping takes; the zygote then drops these as well.
            words += "--cap-add CAP_SETUID --cap-add CAP_SETGID --cap-add CAP_SETPCAP"
        else:
            words += "--unshare-user --uid 65534 --gid 65534"
        return words.split()

    def _view(self, limits: Limits) -> list[str]:
        """The file system in there: what the layout names, some devices, and a small /tmp."""
        binds = list(self.layout.binds())
        folders = {str(each) for _, target in binds for each in Path(target).parents}
        words: list[str] = []
        for folder in sorted(folders - {"/"}):  # made on the way, they would be for root alone
            words += ["--dir", folder]
        for source, target in binds:
            words += ["--ro-bind", source, target]
        for folder in self.layout.masks():
            words += ["--tmpfs", folder, "--remount-ro", folder]
        words += ["--tmpfs", "/dev"]
        for device in DEVICES:
            words += ["--dev-bind", device, device]
        # Shared memory has a name in /dev/shm: there it is, counted and cleared like any file.
        words += ["--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev"]
        size = str(limits.file_mb << 20)
        words += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]
        return [*words, "--remount-ro", "/"]

    def environment(self) -> dict[str, str]:
        """All there is; nothing of the host's. One thread for algebra: a fork keeps one only."""
        shown = {
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PATH": f"{HOME}/bin",
            "PYTHONHASHSEED": "0",
            "TZ": "UTC",
        }
        if self.way != "process":
            shown |= {"LD_LIBRARY_PATH": f"{HOME}/so", "PYTHONHOME": HOME}
        return shown

    def settings(self, limits: Limits, preload: bool) -> dict[str, Any]:
        """What the zygote is told, but for its socket and its uid."""
        layout, alone = self.layout, self.way != "process"
        return {
            "seconds": limits.seconds,
            "files": limits.files,
            "disk": "/tmp" if alone else "",
            "site": [f"{HOME}/site"] if alone else layout.sites(),
            # Without a view of its own a program cannot look for a package in its folder.
            "preload": list(layout.preload) if preload or not alone else [],
            "forks": self.forks,
            # Tasks are counted per uid: where others have it too, theirs have to be added.
            "crowd": 0 if self.forks or self.drops else limits.processes,
            "confinement": {
                "readable": [HOME] if alone else layout.readable(),
                "listable": [] if alone else [str(layout.stdlib)],
                "writable": ["/tmp"] if alone else [],
                "devices": [each for each in DEVICES if alone or Path(each).exists()],
                "limits": self._rlimits(limits),
            },
        }

    def _rlimits(self, limits: Limits) -> dict[str, int]:
        named = {
            "AS": limits.memory_mb << 20,
            "CPU": limits.cpu_seconds,
            "FSIZE": limits.file_mb << 20,
            "NOFILE": limits.open_files,
            "STACK": _STACK_MB << 20,
            "CORE": 0,
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
            "NPROC": limits.processes + 1,  # the zygote counts too
        }
        return named


@cache
def _spare_uids() -> range:
    """The upper half of the largest range of uids that this process may use; empty when none."""
    try:
        lines = Path("/proc/self/uid_map").read_text().split("\n")
        ranges = [tuple(map(int, line.split())) for line in lines if line.strip()]
    except (OSError, ValueError):
        return range(0)
    start, _, count = max(ranges, key=lambda each: each[2], default=(0, 0, 0))
    end = min(start + count, 1 << 31)
    return range(start + (end - start) // 2, end)


def can_drop() -> bool:
    """Whether this process is root with other uids to become."""
    return hasattr(os, "geteuid") and os.geteuid() == 0 and len(_spare_uids()) >= 1024


_in_use: set[int] = set()


def take_uid() -> int:
    """A uid that no other slot of this process has and no account uses.

    The number of processes is limited per uid, over the whole machine: a shared one would let one
    program take the processes of another. Each process therefore has a stretch of uids to itself,
    by its number; stretches meet only where the range is short, or beyond 256 slots.
    """
    spare = _spare_uids()
    first = os.getpid() * _OWN_UIDS
    # In turn, so that the next slot does not get the one that was just given back.
    own = (next(_counter) % _OWN_UIDS for _ in range(_OWN_UIDS))
    for offset in itertools.chain(own, range(_OWN_UIDS, _MOST_UIDS)):
        uid = spare[(first + offset) % len(spare)]
        if uid not in _in_use and not _is_account(uid):
            _in_use.add(uid)
            return uid
    raise SandboxError(f"no uid is free for another slot: {len(_in_use)} are in use here.")


def _is_account(uid: int) -> bool:
    import pwd

    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def give_back_uid(uid: int) -> None:
    _in_use.discard(uid)
