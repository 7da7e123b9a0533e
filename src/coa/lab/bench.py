"""Measurements against peers, in one run: `coa bench`. Here are those of parser and sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from coa.errors import EngineError, ToolError, Unavailable, UsageError, did_you_mean
from coa.grammar import PRESETS, Block, Grammar, GrammarState, load_grammar, parse
from coa.io.machine import cores
from coa.io.runs import Json
from coa.sandbox import PACKAGES, Sandbox

BENCHES = ("ask", "busy", "parse", "proxy", "rl", "rollout", "sandbox", "search", "sft")
Note = Callable[[str], None]
T = TypeVar("T")
Reader = Callable[[Grammar, str], object]
_ROUNDS = 5
_PASSAGE = (
    "The river rises in the northern hills, passes the old capital & joins the sea after 412 km. "
    "In 1989 its basin had 3.5 million inhabitants (a < b); the treaty names both banks of it. "
)
_BODIES = {
    "think": "The last result names the capital, so the next look-up is its river. " * 2,
    "plan": "1. Find the capital of the country.\n2. Find the river that flows through it.\n",
    "delegation": "Find the river that flows through the capital, and how long it is.",
    "tool": "river that flows through the capital",
    "reflection": "Information Conflict: good. Tool Effectiveness: good. "
    "Trajectory Monitoring: average. The passage answers the present step.",
    "suggestion": "the Vistula",
    "check": "Both passages agree with the question. Score: 4",
    "answer": "the Vistula | Vistula",
}
_PROGRAM = "\n```py\nfor n in range(10):\n    print(n, '</code>' if n < 3 else '<b>')\n```\n"


class Peers:
    """Those who are measured beside us. Whatever stops one must not stop the measurement."""

    def __init__(self, note: Note) -> None:
        self.note = note
        self.missing: dict[str, str] = {}
        """Who could not be measured, and why."""

    def attempt(self, name: str, work: Callable[[], T]) -> T | None:
        """What the work gives; None for a peer that failed, now or before."""
        if name in self.missing:
            return None
        try:
            return work()
        except Exception as error:
            if name == "ours":  # without it there is nothing to compare
                raise
            self.missing[name] = str(error) or type(error).__name__
            self.note(f"{name} is not measured: {self.missing[name]}")
            return None


def over(values: Mapping[str, float]) -> dict[str, float]:
    """Ours over each peer's."""
    return {n: round(values["ours"] / value, 2) for n, value in values.items() if n != "ours"}


def beside(ratio: float | None) -> str:
    return "" if ratio is None else f"   ours / peer {ratio:.2f}"


def missing_lines(result: Json) -> Iterator[str]:
    for name, reason in result["missing"].items():
        yield f"{name} is not measured: {reason}"


def peer_python(variable: str, usual: str, package: str, how: str = "") -> str:
    """The Python of a peer's own environment: what the variable names, or the usual one."""
    python = Path(os.environ.get(variable) or usual)
    if not python.is_file():
        raise Unavailable(
            f"{python}: no such file; {how}set {variable} to a Python that has {package}."
        )
    return str(python)


def run_script(
    command: Sequence[str], asked: Json, settings: Mapping[str, str] | None = None
) -> tuple[Any, float]:
    """Runs a script that reads JSON and says JSON; that, and the most memory it held, in GB.

    What a process held before it became another program counts, too, so this one has to be small.
    """
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=log,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(settings or {})},
            text=True,
            start_new_session=True,  # so that the processes it starts can be ended with it
        )
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as stdin:
                json.dump(asked, stdin)  # who ends without reading it says why below
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            log.seek(0)
            last = [line.strip() for line in log if line.strip()][-5:]
            raise EngineError(f"ended with code {process.returncode}: {' | '.join(last)}")
        said.seek(0)
        return json.load(said), usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def run_bench(
    name: str,
    rollouts: str = "32,64",
    note: Note = lambda line: None,
    overrides: Sequence[str] = (),
) -> tuple[Json, list[str]]:
    """Run the measurement of that name: its result, and the same as lines for people.

    `rollouts` is for rollout; `overrides` (name=value) change the work of ask, sft and rl.
    """
    if name not in BENCHES:
        raise UsageError(f"{name!r} is not a measurement.{did_you_mean(name, BENCHES)}")
    if overrides and name not in ("ask", "sft", "rl"):
        raise UsageError(f"bench {name} has no settings, found {overrides[0]!r}.")
    from coa.lab import (
        bench_ask,
        bench_busy,
        bench_proxy,
        bench_rollout,
        bench_search,
        bench_train,
    )

    shown: Callable[[Json], Iterator[str]]
    if name == "ask":
        result, shown = bench_ask.bench_ask(overrides, note), bench_ask.ask_lines
    elif name == "parse":
        result, shown = bench_parse(), _parse_lines
    elif name == "busy":
        result, shown = bench_busy.bench_busy(note), bench_busy.busy_lines
    elif name == "proxy":
        result, shown = bench_proxy.bench_proxy(), bench_proxy.proxy_lines
    elif name == "sandbox":
        result, shown = bench_sandbox(note=note), sandbox_lines
    elif name == "search":
        result, shown = bench_search.bench_search(note), bench_search.search_lines
    elif name == "rollout":
        counts = rollouts.split(",")
        if not all(count.strip().isdecimal() and int(count) for count in counts):
            raise UsageError(
                f"--rollouts {rollouts!r}: expected numbers joined by commas, as 32,64."
            )
        result = bench_rollout.bench_rollout([int(count) for count in counts], note)
        shown = bench_rollout.rollout_lines
    else:
        result = bench_train.bench_training(name, overrides, note)
        shown = bench_train.train_lines
    return result, list(shown(result))


def bench_parse(megabytes: float = 2.0) -> Json:
    """Whole parsing of trajectories of every preset, in MB/s, best of five; peers likewise.

    The peers find tags only: they check no succession, accept a forged observation, and take a tag
    inside a program for a block. They show what the same bytes cost with common means.
    """
    texts = _texts(megabytes)
    size = sum(len(text.encode()) for _, text in texts) / 1e6
    speeds = {name: size / _best(read, texts) for name, read in _readers().items()}
    shown = {name: round(speed, 1) for name, speed in speeds.items()}
    return {**shown, "unit": "MB/s", "ratio": over(speeds)}


def _best(read: Reader, texts: Sequence[tuple[Grammar, str]]) -> float:
    """The shortest of a few runs over all texts, in seconds."""
    taken = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        for grammar, text in texts:
            read(grammar, text)
        taken.append(time.perf_counter() - started)
    return min(taken)


def _readers() -> dict[str, Reader]:
    """Ours and every peer that is installed; the regex and html.parser always are."""
    pairs = re.compile(r"<(\w+)>(.*?)</\1>", re.S)

    def html(_: Grammar, text: str) -> None:
        parser = HTMLParser()
        parser.feed(text)
        parser.close()

    readers: dict[str, Reader] = {
        "ours": lambda grammar, text: parse(grammar, text, env=True),
        "regex": lambda _, text: pairs.findall(text),
        "html.parser": html,
    }
    if find_spec("lxml") is not None:
        etree = import_module("lxml.html")
        readers["lxml"] = lambda _, text: etree.fragments_fromstring(text)
    if find_spec("bs4") is not None:
        soup = import_module("bs4").BeautifulSoup
        readers["beautifulsoup"] = lambda _, text: soup(text, "html.parser")
    return readers


def _texts(megabytes: float) -> list[tuple[Grammar, str]]:
    """Trajectories of 2 to 12 calls in every preset, observations of one to eight passages."""
    made: list[tuple[Grammar, str]] = []
    length, calls = 0, 0
    while length < megabytes * 1e6:
        grammar = load_grammar(PRESETS[calls % len(PRESETS)])
        calls += 1
        text = grammar.render(_walk(grammar, 2 + calls % 11, 1 + calls % 8))
        made.append((grammar, text))
        length += len(text)
    return made


def _walk(grammar: Grammar, calls: int, passages: int) -> Sequence[Block]:
    """A legal trajectory with so many tool calls."""
    state, blocks = GrammarState(), list[Block]()
    while not state.done:
        options = grammar.allowed(state)
        called = sum(block.role == grammar.observation for block in blocks)
        ways = [name for name in options if name in grammar.tool_roles]
        if called >= calls:
            ways = [name for name in options if name in ("answer", "suggested_answer")] or ways
        name = ways[len(blocks) % len(ways)] if ways else options[-1]
        blocks.append(Block(name, _body(grammar, name, passages)))
        moved = grammar.advance(state, blocks[-1])
        assert isinstance(moved, GrammarState), moved
        state = moved
    return blocks


def _body(grammar: Grammar, name: str, passages: int) -> str:
    if name == grammar.observation:
        return grammar.escape(_PASSAGE * passages)
    role = grammar.by_name[name]
    return _PROGRAM if role.body == "code" else _BODIES[role.kind]


def _parse_lines(result: Json) -> Iterator[str]:
    yield f"{'ours':<28} {result['ours']:>10.1f} {result['unit']}"
    for peer, ratio in result["ratio"].items():
        yield f"{peer:<28} {result[peer]:>10.1f} {result['unit']}{beside(ratio)}"


# -- the sandbox -----------------------------------------------------------------------------

RunProgram = Callable[[str], Awaitable[str]]

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
    """Runs per second of the plain program for each runner, and p50 and p95 of every program.

    Every runner runs the same programs and each output is checked. `subprocess` starts Python
    without any protection; `bubblewrap` starts Python in namespaces, without Landlock, filter or
    limits. Both start an interpreter for every program; ours, at the full tier, forks a waiting
    one, and then applies all layers. Rates are with as many programs at once as there are cores,
    times with one after the other.
    """
    missing = {name: "it is not installed." for name in programs if not _is_there(name)}
    programs = [name for name in programs if name not in missing]
    rates, times = asyncio.run(_measure(seconds, programs, missing, note))
    return {
        **rates,
        "unit": "runs/s",
        "ratio": over(rates),
        "ms": times,
        "missing": missing,
        "tier": "FULL",
        "cores": cores(),
        "rounds": ROUNDS,
    }


def sandbox_lines(result: Json) -> Iterator[str]:
    """The result as a small table."""
    for name, times in result["ms"].items():
        ratio = beside(result["ratio"].get(name))
        yield f"{name:<28} {result[name]:>10.1f} {result['unit']}{ratio}"
        shown = (f"{each} {t['p50_ms']:.1f} (p95 {t['p95_ms']:.1f})" for each, t in times.items())
        yield f"{'':<28} ms: {', '.join(shown)}"
    yield from missing_lines(result)
    yield (
        f"{result['cores']} cores, tier {result['tier']}; rates: the plain program, "
        f"median of {result['rounds']} rounds"
    )


async def _measure(
    seconds: float, programs: Sequence[str], missing: dict[str, str], note: Note
) -> tuple[dict[str, float], dict[str, Json]]:
    """Rates are the medians of rounds in which all take turns: machines are rarely quiet."""
    async with Sandbox(slots=cores(), packages=PACKAGES) as box:

        async def ours(program: str) -> str:
            return (await box.run(program)).stdout

        runs: dict[str, RunProgram] = {"ours": ours, "subprocess": _spawned}
        runs["bubblewrap"] = partial(_spawned, walls=_WALLS)
        times: dict[str, Json] = {}
        for name, run in list(runs.items()):
            try:
                times[name] = {each: await _one_by_one(run, each, seconds / 3) for each in programs}
            except (OSError, ToolError) as error:
                if name == "ours":  # without it there is nothing to compare
                    raise
                missing[name] = str(error)
                note(f"{name} is not measured: {error}")
                del runs[name]
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                rates[name].append(await _at_once(run, seconds / ROUNDS))
                note(f"{name}: {rates[name][-1]:.0f} runs/s")
    return {name: round(statistics.median(found), 1) for name, found in rates.items()}, times


def _is_there(program: str) -> bool:
    """Whether the package that a program is named after is installed."""
    return program == "plain" or find_spec(program) is not None


async def _checked(run: RunProgram, name: str) -> None:
    program, expected = PROGRAMS[name]
    found = await run(program)
    if found != expected:
        raise ToolError(f"the program {name!r} printed {found!r}, expected {expected!r}.")


async def _one_by_one(run: RunProgram, name: str, seconds: float) -> Json:
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


async def _at_once(run: RunProgram, seconds: float) -> float:
    """Programs per second with two in flight for every core, so that none waits for the next."""
    done, started = 0, time.perf_counter()

    async def one_after_another() -> None:
        nonlocal done
        while time.perf_counter() - started < seconds:
            await _checked(run, "plain")
            done += 1

    await asyncio.gather(*(one_after_another() for _ in range(2 * cores())))
    return done / (time.perf_counter() - started)


_WALLS = (
    *"bwrap --unshare-all --die-with-parent --ro-bind / / --tmpfs /tmp".split(),
    *("--ro-bind", sys.prefix, sys.prefix, "--"),  # which may be below /tmp
)


async def _spawned(program: str, walls: Sequence[str] = ()) -> str:
    if walls and shutil.which(walls[0]) is None:
        raise ToolError("bubblewrap is not installed; apt install bubblewrap.")
    process = await asyncio.create_subprocess_exec(
        *(*walls, sys.executable, "-I", "-c", program),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    out, _ = await process.communicate()
    return out.decode()
