"""Many programs in a row leave no process, file or descriptor behind.

    python benchmarks/sandbox_leaks.py [RUNS]

The programs write files, fork, leave orphans, fail, flood, crash and make forbidden calls; some are
cancelled. Counted before and after, on the host: descriptors of this process, processes below it,
files in the folder for temporary files, and the memory of this process. All but the memory must be
equal: while the sandbox is open, and after it is closed.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from coa.sandbox import Limits, Sandbox

PROGRAMS = {
    "print": "print(1)",
    "fail": "1 / 0",
    "write": "open('/tmp/left', 'w').write('x' * 1000)",
    "shared memory": "import _posixshmem, os\n_posixshmem.shm_open('/x', os.O_CREAT | os.O_RDWR)",
    "orphan": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)",
    "threads": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    "flood": "while True: print('x' * 1000)",
    "crash": "import ctypes\nctypes.string_at(0)",
    "forbidden": "import ctypes\nctypes.CDLL(None).unshare(0x10000000)",
    "numpy": "import numpy\nprint(numpy.arange(5).sum())",
}
WEIGHTS = (30, 10, 10, 4, 10, 5, 1, 5, 5, 20)


def counted(folder: str) -> dict[str, int]:
    """What could leak."""
    processes, waiting = 0, [os.getpid()]
    while waiting:
        for thread in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            children = [int(each) for each in thread.read_text().split()]
            processes += len(children)
            waiting += children
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "processes": processes,
        "temporary files": len(list(Path(folder).iterdir())),
    }


def memory_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


async def measure(runs: int, folder: str) -> dict[str, object]:
    choose = random.Random(0)
    ends = Counter[str]()
    closed_before = counted(folder)
    async with Sandbox(limits=Limits(seconds=5), slots=2, packages=("numpy",)) as box:

        async def one(index: int) -> None:
            name = choose.choices(list(PROGRAMS), WEIGHTS)[0]
            if index % 500 == 499:
                task = asyncio.create_task(box.run("while True: pass"))
                await asyncio.sleep(0.05)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                ends["cancelled"] += 1
                return
            outcome = await box.run(PROGRAMS[name])
            ends[f"{name}: {outcome.ended}"] += 1

        for index in range(100):
            await one(index)
        before, memory, started = counted(folder), memory_mb(), time.perf_counter()
        for index in range(0, runs, 4):
            await asyncio.gather(*(one(index + each) for each in range(min(4, runs - index))))
        await asyncio.sleep(2)  # slots that are being replaced
        seconds, after = time.perf_counter() - started, counted(folder)
        left = (await box.run("import os; print(os.listdir('/tmp'), os.getppid())")).stdout
        memory_after = memory_mb()
    closed_after = counted(folder)
    return {
        "runs": runs,
        "runs_per_s": round(runs / seconds, 1),
        "before": before,
        "after": after,
        "closed_before": closed_before,
        "closed_after": closed_after,
        "inside": left.strip(),
        "memory_mb": [memory, memory_after],
        "ends": dict(sorted(ends.items())),
        "leaks": before != after or closed_before != closed_after,
    }


if __name__ == "__main__":
    # Orphans of what we start come to us and not to process 1, so that none escapes the count.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as made:
        tempfile.tempdir = made
        found = asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, made))
    print(json.dumps(found, indent=2))
    sys.exit(1 if found["leaks"] else 0)
