"""`coa record` and `coa distill`, killed at random moments and started again: nothing shows.

Each command is killed with SIGKILL 25 times: after a part of the time that it takes, when a part of
its records is there, while the result is put together, and while a file of it is written beside its
place; the process alone, its group as a terminal would, or it and everything below it at once. The
same command is then given again, until it is done. Its files must be those of a run that nobody
disturbed, and no process may be left.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from coa.environments import make_tasks
from coa.tasks import TaskSet

pytestmark = pytest.mark.slow

KILLS = 25
"""Of each command."""
SEED = 11
WAYS = ("process", "group", "all")
LIVES = (("time", "records", "records", "end"), ("time", "records", "records", "beside"))
"""What decides when to kill, in the lives of a run and of the next one; after them it may live."""
MIXTURE = {"atlas-mhqa": 140, "atlas-web": 100, "gym-code": 80}


class Process(NamedTuple):
    pid: int
    born: str
    """In ticks of the machine: a number may be used again, with this it may not."""

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """None when it is gone, or only waits to be buried."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] == "Z" else cls(pid, fields[19])

    def lives(self) -> bool:
        return Process.of(self.pid) == self


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it ended while we looked
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def below(pid: int) -> Iterator[Process]:
    """All processes that this one started, and those that these started."""
    for child in children(pid):
        if process := Process.of(child):
            yield process
        yield from below(child)


class Command(NamedTuple):
    """A command that writes into a folder, and the file in there that grows meanwhile."""

    name: str
    arguments: tuple[str, ...]
    journal: str

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        folder.mkdir(exist_ok=True)
        words = (sys.executable, "-m", "coa", self.name, *self.arguments, "--workers", "2")
        with folder.with_suffix(".said").open("ab") as said:
            return subprocess.Popen(
                words, cwd=folder, stdout=said, stderr=said, start_new_session=True
            )

    def written(self, folder: Path) -> int:
        path = folder / self.journal
        return path.stat().st_size if path.is_file() else 0


def content(folder: Path) -> dict[str, bytes]:
    """All files by name, but for the lock and what tells the time."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(("timings.jsonl", ".lock"))
    }


def beside(folder: Path) -> set[str]:
    """Names under which files are written before they get their own."""
    return {path.name for path in folder.rglob(".*") if re.search(r"\.\w{8}$", path.name)}


class Undisturbed(NamedTuple):
    """A run that nobody killed."""

    files: dict[str, bytes]
    seconds: float
    size: int
    """Of the full journal."""
    tail_s: float
    """From the last record to the end of the process."""


def undisturbed(command: Command, folder: Path) -> Undisturbed:
    begun = last = time.monotonic()
    size = 0
    process = command.start(folder)
    while process.poll() is None:
        if command.written(folder) != size:
            size, last = command.written(folder), time.monotonic()
        time.sleep(0.005)
    ended = time.monotonic()
    assert process.returncode == 0, folder.with_suffix(".said").read_text()
    plain = Undisturbed(content(folder), ended - begun, command.written(folder), ended - last)
    print(f"{command.name}: {plain.seconds:.2f} s undisturbed, {plain.tail_s:.2f} s at the end")
    return plain


IsTime = Callable[[float], bool]
"""Whether to kill now, so many seconds after the start."""


def moment(
    kind: str, command: Command, folder: Path, plain: Undisturbed, rng: random.Random
) -> IsTime:
    held, part = command.written(folder), rng.random()
    which = rng.randint(1, len(plain.files) - 1)  # of the files that are written at the end
    seen, old = beside(folder), beside(folder)
    full: list[float] = []

    def is_full(seconds: float) -> bool:
        if not full and command.written(folder) >= plain.size:
            full.append(seconds)
        return bool(full)

    def is_time(seconds: float) -> bool:
        match kind:
            case "time":
                return seconds >= part * plain.seconds
            case "records":
                return command.written(folder) > held + part * (plain.size - held)
            case "beside":
                while is_full(seconds) and seconds < full[0] + plain.tail_s:
                    new = beside(folder)
                    seen.update(new)
                    if new - old and len(seen - old) >= which:
                        return True
                    seconds += 0.0005
                    time.sleep(0.0005)
                return False
            case "end":
                return is_full(seconds) and seconds >= full[0] + part * plain.tail_s
        return False

    return is_time


class Life(NamedTuple):
    killed: bool
    seconds: float
    seen: set[Process]
    """Processes below it, at any time."""


def one_life(command: Command, folder: Path, is_time: IsTime, way: str) -> Life:
    """Start it, and kill it when it is time."""
    begun = time.monotonic()
    process = command.start(folder)
    seen: set[Process] = set()
    while process.poll() is None:
        seen |= set(below(process.pid))
        seconds = time.monotonic() - begun
        if is_time(seconds):
            (os.killpg if way == "group" else os.kill)(process.pid, signal.SIGKILL)
            # Then the others: while the first lives, a program that is killed is an outcome.
            for each in seen if way == "all" else ():
                if each.lives():
                    os.kill(each.pid, signal.SIGKILL)
            return Life(process.wait(60) == -signal.SIGKILL, seconds, seen)
        time.sleep(0.005)
    assert process.returncode == 0, folder.with_suffix(".said").read_text()
    return Life(False, time.monotonic() - begun, seen)


def all_end(processes: set[Process]) -> None:
    deadline = time.monotonic() + 60
    while left := [each for each in processes if each.lives()]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)


def compare(folder: Path, plain: Undisturbed) -> None:
    found = content(folder)
    assert found.keys() == plain.files.keys()
    for name, held in plain.files.items():
        assert found[name] == held, f"{folder / name} differs"


def kill_often(command: Command, place: Path, plain: Undisturbed) -> None:
    """Kill the command again and again, and compare what it has made in the end."""
    rng = random.Random(f"{SEED} {command.name}")
    reached: list[float] = []
    runs = 0
    while len(reached) < KILLS:
        folder = place / f"{command.name}_{runs}"
        for kind in (*LIVES[runs % len(LIVES)], "never"):
            way = WAYS[len(reached) % len(WAYS)]
            life = one_life(command, folder, moment(kind, command, folder, plain, rng), way)
            all_end(life.seen)
            if not life.killed:
                break
            reached.append(command.written(folder) / plain.size)
            print(
                f"{command.name} {len(reached)}: by {kind}, {way}, after {life.seconds:.2f} s, at "
                f"{reached[-1]:.0%}; {len(life.seen)} processes were below it"
            )
        compare(folder, plain)
        runs += 1
    print(f"{command.name}: {len(reached)} kills in {runs} runs, all as if undisturbed")
    assert sum(0.0 < part < 1.0 for part in reached) >= KILLS // 4, "too few in the middle"


class Recorded(NamedTuple):
    place: Path
    command: Command
    plain: Undisturbed


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    place = tmp_path_factory.mktemp("killed")
    made = [task for name, n in MIXTURE.items() for task in make_tasks(name, "train", n, SEED)]
    TaskSet(tuple(made)).save(place / "tasks.jsonl")
    arguments = ("--tasks", "../tasks.jsonl", "--out", "episodes.jsonl", "--error-rate", "0.2")
    command = Command("record", arguments, "episodes.jsonl")
    return Recorded(place, command, undisturbed(command, place / "recorded"))


def test_episodes_of_a_killed_recording_are_those_of_an_undisturbed_one(
    recorded: Recorded,
) -> None:
    kill_often(recorded.command, recorded.place, recorded.plain)


def test_a_recording_does_not_notice_the_death_of_a_worker(recorded: Recorded) -> None:
    place, command, plain = recorded
    rng = random.Random(SEED)
    for n in range(3):
        folder = place / f"worker_{n}"
        process = command.start(folder)
        part = rng.uniform(0.0, 0.8)
        while process.poll() is None and command.written(folder) <= part * plain.size:
            time.sleep(0.005)
        victim = rng.choice(children(process.pid))
        os.kill(victim, signal.SIGKILL)
        print(f"record: worker {victim} killed at {command.written(folder) / plain.size:.0%}")
        assert process.wait(240) == 0, folder.with_suffix(".said").read_text()
        compare(folder, plain)


def test_a_dataset_of_a_killed_distillation_is_that_of_an_undisturbed_one(
    recorded: Recorded,
) -> None:
    given = ("--episodes", "../recorded/episodes.jsonl", "--tasks", "../tasks.jsonl")
    command = Command("distill", (*given, "--out", "."), "converted.jsonl")
    kill_often(command, recorded.place, undisturbed(command, recorded.place / "distilled"))
