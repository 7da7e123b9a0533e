"""Workers: the same results as in one process, and what happens when work or workers fail."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coa.errors import CoaError, ConfigError, MissingExtra, ToolTimeout
from coa.io import workers as workers_module
from coa.io.machine import cores
from coa.io.plugins import load_object
from coa.io.runs import Json
from coa.io.workers import (
    WorkerDied,
    WorkerError,
    WorkerLimits,
    WorkerPool,
    Workers,
    worker_count,
)

ODD_JOBS, ECHO = "worker_jobs:odd_jobs", "worker_jobs:echo"
WAYS = pytest.mark.parametrize("workers", [0, 2])


async def until(true: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def noted(path: Path, word: str) -> list[int]:
    """The processes that wrote this word into the log of the work."""
    return [int(line.split()[1]) for line in lines(path) if line.startswith(word + " ")]


async def all_of(pool: Workers, items: list[Json]) -> list[Json]:
    async with asyncio.timeout(120):
        return list(await asyncio.gather(*map(pool.do, items)))


@WAYS
async def test_results_do_not_depend_on_how_many_work(workers: int) -> None:
    async with Workers("worker_jobs:squares", {"plus": 1}, workers) as pool:
        found = await all_of(pool, [{"n": n} for n in range(300)])
    assert found == [{"square": n * n + 1} for n in range(300)]


async def test_all_workers_are_used_and_none_has_more_than_its_share() -> None:
    async with Workers(ODD_JOBS, {}, workers=3, at_once=2) as pool:
        found = await all_of(pool, [{"sleep": 0.005}] * 60)
    by = [each["by"] for each in found]
    assert len(set(by)) == 3 and os.getpid() not in by
    assert max(each["in_hand"] for each in found) == 2


async def test_a_slow_item_holds_up_no_other(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with Workers(ODD_JOBS, {"log": str(log)}, workers=2, at_once=2) as pool:
        slow = asyncio.create_task(pool.do({"sleep": 3600, "noted": True}))
        await until(lambda: noted(log, "began"), "it did not begin")
        found = await all_of(pool, [{"n": n} for n in range(50)])
        assert len({each["by"] for each in found}) == 2 and not slow.done()
        slow.cancel()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=40))
def test_any_json_comes_back_as_it_went(items: list[Json]) -> None:
    async def both() -> None:
        for workers in (1, 2):
            async with Workers(ECHO, {}, workers, at_once=40) as pool:
                assert await all_of(pool, items) == items

    asyncio.run(both())


@WAYS
async def test_halves_of_characters_and_large_messages_pass(workers: int) -> None:
    odd = {"half": "\ud83d", "line": "a\nb\r\n\x00", "\u706f": "\U0001f3d4"}
    large = {"text": "\u706f" * 10_000_000}
    async with Workers(ECHO, {}, workers) as pool:
        assert await all_of(pool, [odd, large, odd]) == [odd, large, odd]


async def test_full_pipes_in_both_directions_block_nobody() -> None:
    sizes = [(n * 7919) % 400_000 for n in range(150)]
    items = [{"n": n, "text": "x" * size} for n, size in enumerate(sizes)]
    async with Workers(ECHO, {}, workers=2, at_once=64) as pool:
        assert await all_of(pool, items) == items


ERRORS = {
    "config": (ConfigError, "recipe.toml: epochs is 'x', expected an integer."),
    "timeout": (ToolTimeout, "no answer within 3 s."),
    "own": ("worker_jobs:OwnError", "of one's own."),
    "fancy": (ConfigError, "a fault at 7."),
    "local": ("worker_jobs:OwnError", "of a class that nobody else knows."),
}


@WAYS
async def test_an_error_of_ours_is_the_same_error_here(workers: int) -> None:
    async with Workers(ODD_JOBS, {}, workers) as pool:
        for name, (kind, said) in ERRORS.items():
            kind = load_object(kind) if isinstance(kind, str) else kind
            with pytest.raises(CoaError) as caught:
                await pool.do({"raise": name})
            assert (type(caught.value), str(caught.value)) == (kind, said)
            assert "in _raise" in caught.value.__notes__[0], "the traceback is kept"
        with pytest.raises(MissingExtra, match=r"^crawling needs packages") as missing:
            await pool.do({"raise": "extra"})
        assert (missing.value.what, missing.value.extra) == ("crawling", "tools")


async def failure(pool: Workers, item: Json, name: str = "") -> str:
    with pytest.raises(WorkerError) as caught:
        await pool.do(item, name)
    assert caught.value.__notes__[0].startswith("Traceback"), "the traceback is kept"
    return str(caught.value)


@WAYS
async def test_any_other_error_is_one_line_that_names_the_item(workers: int) -> None:
    async with Workers(ODD_JOBS, {}, workers) as pool:
        assert await failure(pool, {"raise": "bug"}, "task mhqa-7") == (
            r"worker_jobs:odd_jobs, on task mhqa-7, failed: KeyError: 'no such\nthing'"
        )
        assert await failure(pool, {"raise": "exit"}) == (
            'worker_jobs:odd_jobs, on {"raise": "exit"}, failed: SystemExit: 3'
        )
        unfit = await failure(pool, {"unfit": "x" * 1000})
        assert unfit.startswith('worker_jobs:odd_jobs, on {"unfit": "xxx')
        assert "..., failed: TypeError: Object of type PosixPath is not JSON" in unfit
        assert (await pool.do({"n": 1}))["got"] == {"n": 1}, "the others go on"


async def test_work_that_cancels_itself_keeps_nobody_waiting() -> None:
    async with Workers(ODD_JOBS, {}, workers=2) as pool:
        assert (await failure(pool, {"raise": "cancel"})).endswith("failed: CancelledError")


async def test_an_error_that_cannot_be_told_keeps_nobody_waiting() -> None:
    pool = WorkerPool(ODD_JOBS, {}, 1, limits=WorkerLimits(60.0))
    try:
        async with asyncio.timeout(30):
            with pytest.raises(WorkerDied, match="ended with code 1"):
                await asyncio.wrap_future(pool.submit({"raise": "mute"}))
            assert (await asyncio.wrap_future(pool.submit({})))["got"] == {}
    finally:
        pool.kill()


async def test_who_gives_up_everything_starts_no_process_for_what_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []

    class Counted(workers_module._WorkerProcess):
        def __init__(self, opening: Json, shown: dict[str, object]) -> None:
            started.append(self)
            super().__init__(opening, shown)

    monkeypatch.setattr(workers_module, "_WorkerProcess", Counted)
    pool = WorkerPool(ODD_JOBS, {}, 1, limits=WorkerLimits(60.0))
    try:
        futures = [asyncio.wrap_future(pool.submit({"hang": True})) for _ in range(50)]
        await asyncio.wrap_future(started[0].opened)
        for each in futures:
            each.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
        async with asyncio.timeout(30):
            assert (await asyncio.wrap_future(pool.submit({})))["got"] == {}
        assert len(started) < 5
    finally:
        pool.kill()
    with pytest.raises(WorkerError, match=r"an item: the workers were ended before it\."):
        pool.submit({}).result()


@WAYS
async def test_work_that_cannot_be_opened_says_why(workers: int) -> None:
    with pytest.raises(ConfigError, match="epochs is 'x'"):
        await Workers(ODD_JOBS, {"refuse": "config"}, workers).__aenter__()
    with pytest.raises(
        ConfigError, match=r"worker_jobs has no 'odd_job'\. Did you mean 'odd_jobs'"
    ):
        await Workers("worker_jobs:odd_job", {}, workers).__aenter__()


async def test_a_worker_that_dies_at_its_start_says_how() -> None:
    with pytest.raises(
        WorkerError,
        match=r"^worker_jobs:odd_jobs: a worker ended with code 7 before it was ready\.$",
    ):
        await Workers(ODD_JOBS, {"die": 7}, workers=2).__aenter__()


async def test_everything_is_closed_and_what_fails_then_is_told(tmp_path: Path) -> None:
    for workers in (1, 3):
        log = tmp_path / f"{workers}.log"
        with pytest.raises(ConfigError, match="epochs is 'x'"):
            async with Workers(
                ODD_JOBS, {"log": str(log), "fail_closing": "config"}, workers
            ) as pool:
                await pool.do({"n": 1})
        opened = noted(log, "opened")
        assert len(opened) == workers and sorted(noted(log, "closed")) == sorted(opened)
        others = [pid for pid in opened if pid != os.getpid()]
        assert not any(Path(f"/proc/{pid}").exists() for pid in others)


def test_no_workers_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^workers -1, 8 at once: expected 1 or more\.$"):
        Workers(ECHO, {}, workers=-1)


def test_few_items_get_one_worker_and_many_all_cores() -> None:
    assert worker_count(0) == worker_count(1) == 1
    assert worker_count(10**6) == cores()


async def test_what_a_killed_worker_had_in_hand_is_done_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with Workers(ODD_JOBS, {"log": str(log)}, workers=2) as pool:
        items = [{"n": n, "sleep": 0.3, "noted": True} for n in range(16)]
        working = asyncio.create_task(all_of(pool, items))
        await until(lambda: len(noted(log, "began")) == 16, "they did not begin")
        killed = noted(log, "began")[0]
        os.kill(killed, signal.SIGKILL)
        found = await working
        assert [each["got"] for each in found] == items
        assert killed not in {each["by"] for each in found}
        again = await all_of(pool, [{"n": n} for n in range(100)])
        assert len({each["by"] for each in again}) == 2, "there are two workers once more"


async def test_an_item_that_kills_twice_is_named_and_the_others_are_done(tmp_path: Path) -> None:
    once = str(tmp_path / "died")
    async with Workers(ODD_JOBS, {}, workers=2) as pool:
        waiting = [asyncio.create_task(pool.do({"sleep": 0.2, "n": n})) for n in range(12)]
        deadly = asyncio.create_task(pool.do({"die": True}, "task 13"))
        unlucky = asyncio.create_task(pool.do({"die_once": once}))
        with pytest.raises(WorkerError) as caught:
            await deadly
        assert str(caught.value) == (
            "worker_jobs:odd_jobs, on task 13, ended two worker processes: one was killed by "
            "SIGKILL, another that did nothing else was killed by SIGKILL; for want of memory "
            "perhaps."
        )
        assert [(await each)["got"]["n"] for each in waiting] == list(range(12))
        assert (await unlucky)["got"] == {"die_once": once}


async def test_what_workers_print_goes_to_stderr_and_is_said_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with Workers(ODD_JOBS, {}, workers=3) as pool:
        found = await pool.do({"print": "a stray line"})
        assert found["read"] == "", "stdin is empty for the work"
    shown = capfd.readouterr()
    assert shown.out == ""
    assert sorted(shown.err.splitlines()) == ["a stray line", "coa: said by every worker", "raw"]


async def test_workers_find_modules_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_work.py").write_text(
        "import os, contextlib\n"
        "@contextlib.asynccontextmanager\n"
        "async def threads(settings):\n"
        "    async def work(item):\n"
        "        return {'threads': os.environ['OMP_NUM_THREADS'], **settings}\n"
        "    yield work\n"
    )
    monkeypatch.chdir(tmp_path)
    async with Workers("own_work:threads", {"own": 1}, workers=2) as pool:
        assert await pool.do({}) == {"threads": "1", "own": 1}


SCRIPT = """
import asyncio, json, sys
from coa.io.workers import Workers

async def main(settings, items):
    async with Workers("worker_jobs:odd_jobs", settings, workers=2) as pool:
        await asyncio.gather(*map(pool.do, items))

try:
    asyncio.run(main(*json.loads(sys.argv[1])))
except KeyboardInterrupt:
    sys.exit("interrupted.")
"""


def started(log: Path, items: list[Json], **more: Any) -> subprocess.Popen[str]:
    """A program with workers busy on these items, in a process group of its own."""
    asked = json.dumps([{"log": str(log)}, items])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, asked],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **more,
    )


async def ended(log: Path) -> None:
    """All workers that this log names are gone."""
    workers = noted(log, "opened")
    await until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers),
        f"workers outlived their starter: {workers}",
    )


@pytest.mark.parametrize("group", [False, True])
async def test_workers_of_a_killed_program_close_and_end(tmp_path: Path, group: bool) -> None:
    log = tmp_path / "log"
    program = started(log, [{"sleep": 3600, "noted": True}] * 4)
    await until(lambda: len(noted(log, "began")) == 4, "they did not begin")
    (os.killpg if group else os.kill)(program.pid, signal.SIGKILL)
    assert program.wait(60) == -signal.SIGKILL
    await ended(log)
    assert sorted(noted(log, "closed")) == sorted(noted(log, "opened"))
    assert program.communicate()[1] == "coa: said by every worker\n"


async def test_workers_that_hang_end_as_well(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = started(log, [{"hang": True, "noted": True}] * 2)
    await until(lambda: len(noted(log, "began")) == 2, "they did not begin")
    program.kill()
    program.wait(60)
    await ended(log)


async def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = started(log, [{"sleep": 3600, "noted": True}] * 4)
    await until(lambda: len(noted(log, "began")) == 4, "they did not begin")
    os.killpg(program.pid, signal.SIGINT)
    said = program.communicate(timeout=60)[1]
    assert program.returncode == 1
    assert said == "coa: said by every worker\ninterrupted.\n"
    await ended(log)
    assert sorted(noted(log, "closed")) == sorted(noted(log, "opened"))
