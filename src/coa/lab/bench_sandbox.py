"""`coa bench sandbox`: programs run per second at the full tier, ours beside common means.

Every runner runs the same programs and each output is checked. `subprocess` starts Python without
any protection; `bubblewrap` starts Python in namespaces, without Landlock, filter or limits. Both
start an interpreter for every program; ours forks a waiting one, and then applies all layers.
Rates are with as many programs at once as there are cores, times with one after the other.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib.util import find_spec

from coa.errors import ToolError
from coa.io.machine import cores
from coa.io.runs import Json
from coa.sandbox import PACKAGES, Sandbox

Note = Callable[[str], None]
Run = Callable[[str], Awaitable[str]]
Opened = Callable[[], AbstractAsyncContextManager[Run]]

PROGRAMS = {
    "plain": ("print(sum(n * n for n in range(100)))", "328350\n"),
    "numpy": ("import numpy as np\nprint(int(np.arange(100).dot(np.arange(100))))", "328350\n"),
    "sympy": ("from sympy import *\nx = symbols('x')\nprint(integrate(2 * x, (x, 0, 3)))", "9\n"),
}
"""Name -> (program, what it prints)."""
_WARM_UP = 5
ROUNDS = 5


def bench_sandbox(
    seconds: float = 3.0,
    note: Note = lambda line: None,
    *,
    programs: Sequence[str] = tuple(PROGRAMS),
) -> Json:
    """Runs per second of the plain program for each runner, and p50 and p95 of every program."""
    missing = {name: "it is not installed." for name in programs if not _is_there(name)}
    programs = [name for name in programs if name not in missing]
    rates, times = asyncio.run(_measure(seconds, programs, missing, note))
    ours = rates.pop("ours")
    return {
        "ours": ours,
        **rates,
        "unit": "runs/s",
        "ratio": {name: round(ours / rate, 2) for name, rate in rates.items()},
        "ms": times,
        "missing": missing,
        "tier": "FULL",
        "cores": cores(),
        "rounds": ROUNDS,
    }


def sandbox_lines(result: Json) -> Iterator[str]:
    """The result as a small table."""
    for name, times in result["ms"].items():
        rate = result[name]
        ratio = result["ratio"].get(name)
        beside = "" if ratio is None else f"   ours / peer {ratio:.2f}"
        yield f"{name:<28} {rate:>10.1f} {result['unit']}{beside}"
        shown = (f"{each} {t['p50_ms']:.1f} (p95 {t['p95_ms']:.1f})" for each, t in times.items())
        yield f"{'':<28} ms: {', '.join(shown)}"
    for name, reason in result["missing"].items():
        yield f"{name} is not measured: {reason}"
    yield (
        f"{result['cores']} cores, tier {result['tier']}; rates: the plain program, "
        f"median of {result['rounds']} rounds"
    )


async def _measure(
    seconds: float, programs: Sequence[str], missing: dict[str, str], note: Note
) -> tuple[dict[str, float], dict[str, Json]]:
    """Rates are the medians of rounds in which all take turns: machines are rarely quiet."""
    async with AsyncExitStack() as stack:
        runs: dict[str, Run] = {}
        times: dict[str, Json] = {}
        for name, opened in _RUNNERS.items():
            try:
                run = await stack.enter_async_context(opened())
                times[name] = {each: await _one_by_one(run, each, seconds / 3) for each in programs}
                runs[name] = run
            except (OSError, ToolError) as error:
                if name == "ours":  # without it there is nothing to compare
                    raise
                missing[name] = str(error)
                note(f"{name} is not measured: {error}")
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                rates[name].append(await _at_once(run, seconds / ROUNDS))
                note(f"{name}: {rates[name][-1]:.0f} runs/s")
    return {name: round(statistics.median(found), 1) for name, found in rates.items()}, times


def _is_there(program: str) -> bool:
    """Whether the package that a program is named after is installed."""
    return program == "plain" or find_spec(program) is not None


async def _checked(run: Run, name: str) -> None:
    program, expected = PROGRAMS[name]
    found = await run(program)
    if found != expected:
        raise ToolError(f"the program {name!r} printed {found!r}, expected {expected!r}.")


async def _one_by_one(run: Run, name: str, seconds: float) -> Json:
    for _ in range(_WARM_UP):
        await _checked(run, name)
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken) < _WARM_UP:
        started = time.perf_counter()
        await _checked(run, name)
        taken.append((time.perf_counter() - started) * 1000)
    late = statistics.quantiles(taken, n=20)[-1]
    return {"p50_ms": round(statistics.median(taken), 2), "p95_ms": round(late, 2)}


async def _at_once(run: Run, seconds: float) -> float:
    """Programs per second with two in flight for every core, so that none waits for the next."""
    done, started = 0, time.perf_counter()

    async def one_after_another() -> None:
        nonlocal done
        while time.perf_counter() - started < seconds:
            await _checked(run, "plain")
            done += 1

    await asyncio.gather(*(one_after_another() for _ in range(2 * cores())))
    return done / (time.perf_counter() - started)


@asynccontextmanager
async def _ours() -> AsyncIterator[Run]:
    async with Sandbox(slots=cores(), packages=PACKAGES) as box:

        async def run(program: str) -> str:
            return (await box.run(program)).stdout

        yield run


@asynccontextmanager
async def _subprocess() -> AsyncIterator[Run]:
    async def run(program: str) -> str:
        return await _spawned([sys.executable, "-I", "-c", program])

    yield run


@asynccontextmanager
async def _bubblewrap() -> AsyncIterator[Run]:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise ToolError("bubblewrap is not installed; apt install bubblewrap.")
    walls = f"{bwrap} --unshare-all --die-with-parent --ro-bind / / --tmpfs /tmp".split()
    walls += ["--ro-bind", sys.prefix, sys.prefix, "--"]  # which may be below /tmp

    async def run(program: str) -> str:
        return await _spawned([*walls, sys.executable, "-I", "-c", program])

    yield run


async def _spawned(command: list[str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    out, _ = await process.communicate()
    return out.decode()


_RUNNERS: dict[str, Opened] = {
    "ours": _ours,
    "subprocess": _subprocess,
    "bubblewrap": _bubblewrap,
}
