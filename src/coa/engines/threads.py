"""How many threads compute: those that were asked for, less the cores that others use.

The threads of a product wait for one another. When one of them shares its core with another
process, all go at its pace, and who waits awake takes time from who works: two threads beside one
busy process were slower than one thread that has a core to itself. So a job of ours leaves others
the cores that they use, down to half of its own, and takes them back when they are free.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from coa.io.machine import cores, fair_cores

_STAT = Path("/proc/stat")


class Threads:
    """Threads for the products of this process: at most `most`, at least half as many.

    `adapt` is called between steps, in the thread that computes: OpenMP keeps the number by thread.
    """

    PERIOD = 0.5
    """Seconds over which the use of the cores is measured."""
    TAKEN, FREE = 0.4, 0.25
    """Shares of a core: others that use more get it, and it is free again below the other."""
    PATIENCE, LONGEST = 20, 160
    """Measurements until all threads are tried again: what runs at low priority fills a core that
    was left to somebody else, and would give it back. After each try in vain twice as many, up to
    the second: a step of training that shares its cores costs a second or more."""

    def __init__(self, most: int, fixed: bool = False) -> None:
        self.most, self.now = most, most
        self._waited, self._patience = 0, self.PATIENCE
        self._watched = most > 1 and not fixed and _STAT.exists()
        self._since, self._used = time.monotonic(), used_by_others() if self._watched else 0.0

    def adapt(self) -> None:
        if self._watched and (passed := time.monotonic() - self._since) >= self.PERIOD:
            used, before = used_by_others(), self._used
            self._since, self._used = self._since + passed, used
            self.judge((used - before) / passed)
        if torch.get_num_threads() != self.now:
            torch.set_num_threads(self.now)

    def judge(self, others: float) -> None:
        """Choose a number when others use so many cores."""
        free = cores() - others
        fewest, most = int(free + self.FREE), int(free + self.TAKEN)
        wanted = min(max(self.now, fewest), most)
        self._waited += 1
        if wanted >= self.most:
            self._waited, self._patience = 0, self.PATIENCE
        elif self._waited >= self._patience:
            wanted, self._waited = self.most, 0
            self._patience = min(2 * self._patience, self.LONGEST)
        self.now = min(max(wanted, (self.most + 1) // 2), self.most)


def used_by_others() -> float:
    """Seconds of this process's cores that other processes have used since the machine started."""
    own, mine = os.times(), os.sched_getaffinity(0)
    ticks = 0
    for line in _STAT.read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(" ")
        if name[3:].isdigit() and name.startswith("cpu") and int(name[3:]) in mine:
            user, nice, system, _, _, irq, softirq, *_ = map(int, rest.split())
            ticks += user + nice + system + irq + softirq
    return ticks / os.sysconf("SC_CLK_TCK") - own.user - own.system


_threads: Threads | None = None


def use_threads(threads: int | None, fixed: bool = False) -> None:
    """Compute with at most so many threads (None: a fair share of the cores), or, where `fixed`,
    with as many whatever others do."""
    global _threads
    _threads = Threads(threads or fair_cores(), fixed)
    torch.set_num_threads(_threads.now)


def adapt_threads() -> None:
    """Leave cores to others, or take them back; for the thread that computes, between steps."""
    if _threads is not None:
        _threads.adapt()
