"""Programs in the sandbox: what they may do, how they end, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coa.errors import ConfigError
from coa.lab.bench import bench_sandbox, sandbox_lines
from coa.sandbox import Limits, Sandbox, SandboxError, Tier, reach_tier, slot, walls
from coa.sandbox.slot import Outcome

LIMITS = Limits(seconds=1.5, cpu_seconds=2, memory_mb=512, output_bytes=4096, file_mb=8, files=512)


def need_full_tier() -> None:
    tier, findings = reach_tier()
    if tier < Tier.FULL:
        wrong = [f"{each.layer}: {each.found}" for each in findings if not each.ok]
        pytest.skip(f"this machine has no full sandbox: {'; '.join(wrong)}")


@pytest.fixture
async def box() -> AsyncIterator[Sandbox]:
    need_full_tier()
    async with Sandbox(limits=LIMITS, slots=2, packages=()) as opened:
        yield opened


async def shown(box: Sandbox, program: str, stdin: str = "") -> str:
    outcome = await box.run(program, stdin)
    assert outcome.ended == "ok", outcome
    return outcome.stdout


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def descendants() -> set[int]:
    """All processes below this one."""
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        for thread in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                children = {int(each) for each in thread.read_text().split()} - found
                found |= children
                waiting += children
    return found


def signal_zygotes(number: int) -> None:
    for pid in descendants():
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            if re.search(r"^NSpid:.*\t1$", Path(f"/proc/{pid}/status").read_text(), re.M):
                os.kill(pid, number)


async def test_a_program_prints_what_it_prints(box: Sandbox) -> None:
    outcome = await box.run("import sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert (outcome.stdout, outcome.stderr) == ("out\n", "err\n")
    assert (outcome.ended, outcome.exit) == ("ok", 0)


async def test_standard_input_is_read_in_the_usual_ways(box: Sandbox) -> None:
    program = "import sys\nprint(input(), sys.stdin.readline().strip(), sys.stdin.read().split())"
    assert await shown(box, program, "one\ntwo\n3 4\n5") == "one two ['3', '4', '5']\n"
    assert await shown(box, "print(len(input()))", "x" * 300_000) == "300000\n"
    assert (await box.run("input()")).stderr.endswith("EOFError: EOF when reading a line\n")


async def test_an_exception_is_shown_from_the_programs_first_line_on(box: Sandbox) -> None:
    outcome = await box.run("def f(x):\n    return 1 / x\n\nf(0)")
    assert (outcome.ended, outcome.exit) == ("error", 1)
    lines = outcome.stderr.splitlines()
    assert lines[:4] == [
        "Traceback (most recent call last):",
        '  File "program.py", line 4, in <module>',
        "    f(0)",
        '  File "program.py", line 2, in f',
    ]
    assert lines[-1] == "ZeroDivisionError: division by zero"


async def test_an_exit_status_is_kept(box: Sandbox) -> None:
    assert (await box.run("raise SystemExit(3)")).exit == 3
    assert (await box.run("import sys; sys.exit()")).ended == "ok"
    told = await box.run("import sys; sys.exit('no such thing')")
    assert (told.ended, told.exit, told.stderr) == ("error", 1, "no such thing\n")


async def test_a_program_is_main_and_can_use_threads_processes_and_loops(box: Sandbox) -> None:
    threads = "import threading\nthreading.Thread(target=lambda: print('late')).start()"
    assert await shown(box, threads) == "late\n"
    pool = (
        "import multiprocessing\ndef f(x): return x * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.Pool(2) as pool: print(pool.map(f, [1, 2, 3]))"
    )
    assert await shown(box, pool) == "[1, 4, 9]\n"
    loop = "import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))"
    assert await shown(box, loop) == "5\n"
    assert await shown(box, "import atexit\natexit.register(print, 'bye')") == "bye\n"


async def test_a_last_expression_is_echoed_only_when_asked_and_nothing_was_printed(
    box: Sandbox,
) -> None:
    assert (await box.run("6 * 7", echo=True)).stdout == "42\n"
    assert (await box.run("6 * 7")).stdout == ""
    assert (await box.run("print(1)\n6 * 7", echo=True)).stdout == "1\n"
    assert (await box.run("None", echo=True)).stdout == ""
    assert (await box.run("x = 'a'\nx", echo=True)).stdout == "'a'\n"


async def test_the_same_program_gives_the_same_output(box: Sandbox) -> None:
    program = "import random\nprint(random.random(), hash('text'), {'b', 'a', 'c'})"
    assert len({await shown(box, program) for _ in range(4)}) == 1


async def test_nothing_of_a_program_is_there_for_the_next(box: Sandbox) -> None:
    leave = (
        "import builtins, os, sys, json\n"
        "open('/tmp/left', 'w').write('x'); os.makedirs('/tmp/a/b'); os.chmod('/tmp/a', 0)\n"
        "os.environ['LEFT'] = 'x'; builtins.left = 1; json.left = 1; sys.path.append('left')\n"
        "import _posixshmem\n_posixshmem.shm_open('/shared', os.O_CREAT | os.O_RDWR, 0o600)\n"
        "if os.fork() == 0:\n    os.setsid()\n    import time; time.sleep(60)\n"
    )
    look = (
        "import builtins, json, os, sys\n"
        "print(os.listdir('/tmp'), 'LEFT' in os.environ, hasattr(builtins, 'left'), "
        "hasattr(json, 'left'), 'left' in sys.path)\n"
        "for pid in range(2, 5000):\n"
        "    if pid != os.getpid():\n"
        "        try:\n            os.kill(pid, 0); print('alive', pid)\n"
        "        except OSError: pass\n"
    )
    for _ in range(4):
        left = await box.run(leave)
        assert left.ended == "ok", left
        assert await shown(box, look) == "[] False False False False\n"


async def test_only_the_interpreter_is_visible(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "answers.jsonl"
    secret.write_text("42")
    program = (
        "import os\n"
        f"paths = [{str(secret)!r}, {__file__!r}, '/etc/passwd', '/proc/self/status', '/bin/sh',\n"
        "         '/usr', '/sys', '/var', os.path.dirname(os.__file__) + '/site-packages/pip']\n"
        "print([path for path in paths if os.path.exists(path)], sorted(os.environ))"
    )
    names = "HOME LANG LD_LIBRARY_PATH OMP_NUM_THREADS OPENBLAS_NUM_THREADS PATH PWD"
    found = await shown(box, program)
    assert found.startswith("[] ")
    allowed = {*names.split(), "PYTHONHASHSEED", "PYTHONHOME", "TZ"}
    assert set(eval(found[3:])) <= allowed


@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile 1: pass", "timeout"),
        ("x = bytearray(1 << 31)", "memory"),
        ("x = []\nwhile True: x.append(bytearray(1 << 24))", "memory"),
        ("while True: print('x' * 100)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 100)", "output"),
        ("for i in range(10**6): open(f'/tmp/{i}', 'w')", "files"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed"),
        ("import ctypes; ctypes.CDLL(None).unshare(0x10000000)", "killed"),
    ],
)
async def test_each_way_to_end_has_its_word(box: Sandbox, program: str, ended: str) -> None:
    outcome = await box.run(program)
    allowed = {ended, "killed"} if "SIGXCPU" in program else {ended}
    assert outcome.ended in allowed, outcome
    assert len(outcome.stdout) <= LIMITS.output_bytes
    assert (await box.run("print(1)")).stdout == "1\n"


async def test_the_memory_of_many_processes_is_counted_together(box: Sandbox) -> None:
    program = (
        "import os, time\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        x = b'x' * (200 << 20)\n"
        "        time.sleep(60)\n"
        "time.sleep(60)"
    )
    assert (await box.run(program)).ended == "memory"


async def test_a_full_disk_and_too_many_processes_are_errors_of_the_program(box: Sandbox) -> None:
    disk = (
        "import errno\n"
        "try:\n"
        "    for i in range(100): open(f'/tmp/{i}', 'wb').write(b'x' * (1 << 20))\n"
        "except OSError as error: print(errno.errorcode[error.errno], i)"
    )
    assert await shown(box, disk) == "ENOSPC 8\n"
    forks = (
        "import os, time\nstarted = 0\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0: time.sleep(60)\n"
        "        started += 1\n"
        "except OSError: print(started)"
    )
    assert await shown(box, forks) == f"{LIMITS.processes - 1}\n"


async def test_more_programs_than_slots_wait_for_their_turn(box: Sandbox) -> None:
    outcomes = await asyncio.gather(*(box.run(f"print({n})") for n in range(40)))
    assert [each.stdout for each in outcomes] == [f"{n}\n" for n in range(40)]


async def test_a_cancelled_run_is_killed_and_its_slot_works_again(box: Sandbox) -> None:
    before = len(descendants())
    tasks = [asyncio.create_task(box.run("while True: pass")) for _ in range(2)]
    await asyncio.sleep(0.3)
    assert len(descendants()) == before + 2
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended)
    assert await asyncio.gather(shown(box, "print(1)"), shown(box, "print(2)")) == ["1\n", "2\n"]
    assert len(descendants()) == before


async def test_a_zygote_that_dies_is_told_apart_and_replaced(box: Sandbox) -> None:
    task = asyncio.create_task(box.run("import time; time.sleep(60)"))
    other = asyncio.create_task(box.run("import time; time.sleep(60)"))
    await asyncio.sleep(0.3)
    signal_zygotes(signal.SIGKILL)
    ended = await asyncio.gather(task, other, return_exceptions=True)
    assert [type(each) for each in ended] == [SandboxError, SandboxError]
    assert "run it again" in str(ended[0])
    assert await shown(box, "print(1)") == "1\n"


async def test_a_zygote_that_hangs_is_told_apart_and_replaced(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot, "_GRACE_S", 0.1)
    tasks = [asyncio.create_task(box.run("import time; time.sleep(60)")) for _ in range(2)]
    await asyncio.sleep(0.3)
    signal_zygotes(signal.SIGSTOP)
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(ended, SandboxError)
        assert "hung and was replaced" in str(ended)
    assert await shown(box, "print(1)") == "1\n"


async def test_closing_leaves_nothing_and_says_so_to_whoever_waits() -> None:
    need_full_tier()
    descriptors, processes = open_descriptors(), descendants()
    async with Sandbox(limits=LIMITS, slots=1, packages=()) as box:
        await box.run("print(1)")
        await box.run("while True: print('x')")
        tasks = [asyncio.create_task(box.run("import time; time.sleep(9)")) for _ in range(2)]
        await asyncio.sleep(0.2)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(each) for each in ended] == [
        "the sandbox was closed while a program ran.",
        "the sandbox was closed before the program could run.",
    ]
    await asyncio.sleep(0)
    assert descendants() == processes
    assert open_descriptors() == descriptors
    with pytest.raises(SandboxError, match="not open"):
        await box.run("print(1)")


async def test_killing_the_host_process_ends_everything_it_started(tmp_path: Path) -> None:
    need_full_tier()
    script = (
        "import asyncio\nfrom coa.sandbox import Sandbox\n"
        "async def main():\n"
        "    async with Sandbox(slots=1, packages=()) as box:\n"
        "        asyncio.create_task(box.run('while True: pass'))\n"
        "        await asyncio.sleep(0.3)\n"
        "        print('running', flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    before = descendants()
    host = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert host.stdout is not None
    assert host.stdout.readline() == b"running\n"
    inside = descendants() - before
    assert len(inside) >= 4  # the host, bubblewrap, the zygote, the program
    host.kill()
    host.wait()
    host.stdout.close()
    for _ in range(100):
        alive = [pid for pid in inside if Path(f"/proc/{pid}").exists()]
        if not alive:
            break
        await asyncio.sleep(0.05)
    assert not alive


async def test_packages_are_warm_and_only_the_chosen_ones_are_there() -> None:
    need_full_tier()
    numpy = pytest.importorskip("numpy")
    async with Sandbox(slots=1, packages=("numpy",)) as box:
        program = "import numpy\nprint(numpy.__version__, numpy.linalg.inv(numpy.eye(2)).sum())"
        assert await shown(box, program) == f"{numpy.__version__} 2.0\n"
        drawn = "import numpy\nprint(numpy.random.rand())"
        assert await shown(box, drawn) == await shown(box, drawn)
        missing = await box.run("import pytest")
        assert "ModuleNotFoundError" in missing.stderr
        async with box.session() as session:
            assert (await session.run("import numpy\nprint(numpy.ones(3).sum())")).stdout == "3.0\n"


async def test_a_missing_package_is_said_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    need_full_tier()
    async with Sandbox(slots=1, packages=("no_such_package",)) as box:
        assert box.packages == ()
    said = capsys.readouterr().err
    assert said.startswith("coa: programs run without no_such_package: ModuleNotFoundError")


async def test_without_a_sandbox_programs_run_and_every_start_warns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for _ in range(2):
        async with Sandbox(limits=LIMITS, slots=1, packages=(), unsafe=True) as box:
            assert await shown(box, "print(input())", "hi") == "hi\n"
            assert (await box.run("while True: print('x')")).ended == "output"
            assert (await box.run("import time; time.sleep(9)")).ended == "timeout"
            async with box.session() as session:
                await session.run("x = 1")
                assert (await session.run("x + 1", echo=True)).stdout == "2\n"
        assert "WITHOUT a sandbox" in capsys.readouterr().err


def test_limits_must_be_more_than_nothing() -> None:
    with pytest.raises(ConfigError, match=r"limits\.seconds is 0, expected a number above 0"):
        Limits(seconds=0)
    with pytest.raises(ConfigError, match=r"limits\.memory_mb is 0\.5, expected a whole number"):
        Limits(memory_mb=0.5)  # type: ignore[arg-type]
    with pytest.raises(SandboxError, match="slots=0"):
        Sandbox(slots=0)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.text(max_size=60) | st.binary(max_size=40).map(repr), min_size=1, max_size=12))
def test_any_text_is_a_program_with_an_outcome(programs: list[str]) -> None:
    need_full_tier()

    async def run_all() -> list[Outcome]:
        async with Sandbox(limits=LIMITS, slots=1, packages=()) as box:
            return [await box.run(each, each, echo=True) for each in programs]

    for outcome in asyncio.run(run_all()):
        assert outcome.ended in ("ok", "error", "timeout", "memory", "output")
        assert isinstance(outcome.exit, int)


def test_a_uid_is_given_once_and_when_there_is_none_left_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(walls, "_spare_uids", lambda: range(2**30, 2**30 + 16))
    monkeypatch.setattr(walls, "_in_use", set())
    taken = [walls.take_uid() for _ in range(16)]
    assert sorted(taken) == list(range(2**30, 2**30 + 16))
    with pytest.raises(SandboxError, match=r"no uid is free for another slot: 16 are in use"):
        walls.take_uid()
    walls.give_back_uid(taken[3])
    assert walls.take_uid() == taken[3]


async def test_no_capability_remains_nor_can_one_be_gained(box: Sandbox) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root has capabilities to lose")
    assert await shown(box, "print(1)") == "1\n"
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in descendants()]
    zygotes = [each for each in statuses if re.search(r"^NSpid:.*\t1$", each, re.M)]
    assert zygotes
    for status in zygotes:
        assert set(re.findall(r"^Cap\w+:\t(\w+)$", status, re.M)) == {"0" * 16}, status


def test_a_bench_without_a_package_leaves_its_program_out() -> None:
    need_full_tier()
    result = bench_sandbox(0.2, programs=("plain", "no_such_package"))
    assert result["missing"]["no_such_package"] == "it is not installed."
    assert result["ours"] > 0 and set(result["ms"]["ours"]) == {"plain"}
    lines = list(sandbox_lines(result))
    assert "no_such_package is not measured: it is not installed." in lines
