"""What this machine offers, asked in one place and without torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path


def cores() -> int:
    """Cores this process may use: a container or `taskset` may leave it fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_here() -> int:
    """Processes of this program on this machine, as torchrun and its like tell each of them."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def fair_cores() -> int:
    """Cores for this process, when all of this program's here get as many."""
    return max(1, cores() // processes_here())


def signal_name(number: int) -> str:
    """`SIGKILL`; real-time signals have no name, and 0 is none at all."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}" if number > 0 else "a signal"


def cpu_features() -> str:
    """The CPU's list of features, one line; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (elsewhere it is slower than float32).

    Where the system does not list the CPU's features, float32 is the safe answer.
    """
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpu_features().split())


def memory_gb() -> float | None:
    """Memory of the machine in GB, or None where the system does not say."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (ValueError, OSError, AttributeError):
        return None


def in_words() -> str:
    """Cores and memory, for whoever compares times: no name of the machine."""
    has = memory_gb()
    return f"{cores()} cores" + (f", {has:g} GB" if has else "")


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, up to a gigabyte (glibc; elsewhere nothing happens).

    The logits of a decoding step, or what a layer keeps for its gradient, are tens of megabytes.
    Given back and asked for anew at every step, each of their pages costs a fault.
    """
    trim_threshold, mmap_threshold = -1, -3  # names of glibc's mallopt
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, 1 << 30)
        mallopt(mmap_threshold, 32 << 20)  # the most that it takes
