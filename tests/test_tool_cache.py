"""The tool cache: record and replay, expiry, eviction, processes, files that are not one."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.errors import ConfigError, RecordError, ToolError, ToolTimeout, UsageError
from coa.tools import Observation, Tool, Toolbox, ToolCall, ToolMistake
from coa.tools import cache as cache_module
from coa.tools.cache import Answer, Provisional, ToolCache, cached, key_of


class Counting:
    """A tool that counts its calls and fails on demand."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.broken: Exception | None = None

    async def run(self, argument: str) -> str:
        self.calls.append(argument)
        await asyncio.sleep(0)
        if self.broken is not None:
            raise self.broken
        if argument == "bad":
            raise ToolMistake("  that is not a query.")
        return f"answer {len(self.calls)} to {argument}"

    def tool(self, **fields: Any) -> Tool:
        return Tool("search", self.run, about="Search", **fields)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ask(toolbox: Toolbox, *arguments: str) -> list[Observation]:
    async def all_of_them() -> list[Observation]:
        calls = (toolbox.call(ToolCall("search", argument)) for argument in arguments)
        return list(await asyncio.gather(*calls))

    return asyncio.run(all_of_them())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "tools.sqlite"


def test_live_calls_the_tool_and_stores_nothing(path: Path) -> None:
    counting, cache = Counting(), ToolCache(path)
    toolbox = Toolbox([counting.tool()])
    assert cached(toolbox, cache, "live") is toolbox
    assert cache.stats().entries == 0


def test_record_calls_once_and_replay_never(path: Path) -> None:
    counting, cache = Counting(), ToolCache(path)
    recording = cached(Toolbox([counting.tool()]), cache, "record")
    first = ask(recording, "a") + ask(recording, "b") + ask(recording, "bad")
    assert ask(recording, "a", "b", "bad") == first
    assert counting.calls == ["a", "b", "bad"]
    assert first[2] == Observation("Error:   that is not a query.", "mistake")
    assert cache.tally == {"called": 3, "stored": 3}
    replaying = cached(Toolbox([counting.tool()]), ToolCache(path, read_only=True), "replay")
    assert ask(replaying, "a", "b", "bad") == first
    assert len(counting.calls) == 3


def test_a_replay_without_an_entry_says_so(path: Path) -> None:
    counting, cache = Counting(), ToolCache(path)
    replaying = cached(Toolbox([counting.tool()]), cache, "replay")
    seen = Observation(
        "Error: no answer of search to this is recorded, and it is not called.", "failed"
    )
    assert ask(replaying, "new") == [seen] and counting.calls == []
    assert cache.tally == {"missing": 1}


FAILURES = [
    (ToolError("down."), "failed"),
    (ToolTimeout("late."), "timeout"),
    (TimeoutError(), "timeout"),
    (OSError("cut"), "failed"),
]


@pytest.mark.parametrize(("error", "kind"), FAILURES, ids=lambda value: repr(value))
def test_failures_of_the_world_are_not_answers_but_are_replayed(
    path: Path, error: Exception, kind: str
) -> None:
    counting, cache = Counting(), ToolCache(path)
    box = Toolbox([counting.tool()])
    recording, replaying = cached(box, cache, "record"), cached(box, cache, "replay")
    counting.broken = error
    failed = ask(recording, "a")
    assert failed == ask(box, "a") and failed[0].failure == kind
    assert ask(replaying, "a") == failed
    counting.broken = None
    assert ask(recording, "a")[0].failure is None, "it is called again"
    assert ask(replaying, "a")[0].text.startswith("answer")
    counting.broken = error
    assert ask(recording, "a")[0].failure is None, "an answer is not lost to a failure"


def test_an_answer_of_which_a_part_failed_is_asked_for_again_and_replayed(path: Path) -> None:
    counting, cache = Counting(), ToolCache(path)

    async def partly(argument: str) -> str:
        return Provisional(await counting.run(argument))

    box = Toolbox([Tool("search", partly)])
    recording, replaying = cached(box, cache, "record"), cached(box, cache, "replay")
    assert ask(recording, "a") == ask(replaying, "a") == [Observation("answer 1 to a")]
    assert ask(recording, "a") == ask(replaying, "a") == [Observation("answer 2 to a")]


def test_name_settings_and_argument_make_the_key() -> None:
    tool = Counting().tool(fingerprint="atlas:0")
    others = [
        replace(tool, name="other"),
        replace(tool, fingerprint="atlas:1"),
        replace(tool, name="searcha", fingerprint="tlas:0"),
    ]
    keys = {key_of(each, "x") for each in [tool, *others]} | {key_of(tool, "x ")}
    assert len(keys) == 5
    assert key_of(replace(tool, timeout_s=1.0, about="", max_chars=9), "x") == key_of(tool, "x")


def test_the_same_call_at_the_same_time_is_made_once(path: Path) -> None:
    counting = Counting()
    recording = cached(Toolbox([counting.tool()]), ToolCache(path), "record")
    seen = ask(recording, *["same"] * 20, "other")
    assert counting.calls.count("same") == 1
    assert len({each.text for each in seen}) == 2


def test_what_is_cut_off_by_the_time_limit_leaves_nothing(path: Path) -> None:
    async def never(argument: str) -> str:
        await asyncio.sleep(3600)
        return ""

    cache = ToolCache(path)
    recording = cached(Toolbox([Tool("search", never, timeout_s=0.05)]), cache, "record")
    assert ask(recording, "a", "a")[0].failure == "timeout"
    assert cache.stats().entries == 0


def test_a_tool_that_remembers_is_replayed_by_the_calls_before(path: Path) -> None:
    opened = []

    @asynccontextmanager
    async def session() -> AsyncIterator[Callable[[str], Awaitable[str]]]:
        total: list[str] = []
        opened.append(total)

        async def run(argument: str) -> str:
            total.append(argument)
            return "+".join(total)

        yield run

    async def in_one_session(toolbox: Toolbox, *arguments: str) -> list[str]:
        async with toolbox.opened() as box:
            return [(await box.call(ToolCall("search", each))).text for each in arguments]

    def ask_all(toolbox: Toolbox, *arguments: str) -> list[str]:
        return asyncio.run(in_one_session(toolbox, *arguments))

    cache, box = ToolCache(path), Toolbox([Counting().tool(session=session)])
    recording, replaying = cached(box, cache, "record"), cached(box, cache, "replay")
    assert ask_all(recording, "a", "a", "b") == ["a", "a+a", "a+a+b"]
    assert ask_all(recording, "a", "b") == ["a", "a+b"], "another session remembers nothing of it"
    assert len(opened) == 2
    assert ask_all(replaying, "a", "a", "b") == ["a", "a+a", "a+a+b"]
    assert ask_all(replaying, "a", "b") == ["a", "a+b"]
    assert "is recorded" in ask_all(replaying, "b")[0]
    assert "is recorded" in ask(replaying, "a")[0].text, "a call outside of a session is another"
    assert len(opened) == 2, "a replay opens none"


@settings(deadline=None, max_examples=60)
@given(st.text(), st.text())
def test_any_text_comes_back_as_it_was(tmp_path_factory: Any, argument: str, text: str) -> None:
    cache = ToolCache(tmp_path_factory.mktemp("any") / "tools.sqlite")
    tool = Counting().tool()
    for kind in ("text", "mistake", "provisional", "failed", "timeout"):
        answer = Answer(kind, text)  # type: ignore[arg-type]
        key = key_of(tool, argument + kind)
        cache.put(key, tool.name, argument, answer)
        assert cache.get(key, any_age=True) == answer
    cache.close()


def test_what_has_expired_is_asked_for_again_but_still_replayed(path: Path) -> None:
    clock, counting = Clock(), Counting()
    cache = ToolCache(path, expire_s=100, clock=clock)
    box = Toolbox([counting.tool()])
    recording = cached(box, cache, "record")
    old = ask(recording, "a")
    clock.now += 99
    assert ask(recording, "a") == old and cache.stats().expired == 0
    clock.now += 2
    assert cache.stats().expired == 1
    assert ask(cached(box, cache, "replay"), "a") == old
    assert ask(recording, "a") != old and len(counting.calls) == 2
    assert cache.stats().expired == 0


def test_the_least_recently_used_go_first_when_the_limit_is_reached(path: Path) -> None:
    clock = Clock()
    cache = ToolCache(path, max_bytes=10_000, clock=clock)
    tool = Counting().tool()
    keys = [key_of(tool, str(n)) for n in range(20)]
    for n in range(8):
        clock.now += 1
        cache.put(keys[n], "search", str(n), Answer("text", "x" * 800))
    clock.now += 1000
    assert cache.get(keys[0]) is not None
    for n in range(8, 12):
        clock.now += 1
        cache.put(keys[n], "search", str(n), Answer("text", "x" * 800))
    held = [n for n in range(12) if cache.get(keys[n]) is not None]
    assert 0 in held and 11 in held and 1 not in held
    assert cache.stats().bytes <= 10_000
    cache.put(keys[12], "search", "12", Answer("text", "x" * 20_000))
    assert cache.get(keys[12]) is None and cache.stats().entries == len(held)
    cache.put(keys[13], "search", "13", Answer("text", "x" * 9_700))
    assert cache.get(keys[13]) is not None and cache.stats().entries == 1


def test_the_fingerprint_is_that_of_the_answers_and_their_time(path: Path) -> None:
    clock = Clock()
    cache = ToolCache(path, clock=clock)
    empty = cache.fingerprint()
    recording = cached(Toolbox([Counting().tool()]), cache, "record")
    ask(recording, "a")
    one = cache.fingerprint()
    assert ToolCache(path, read_only=True).fingerprint() == one != empty
    ask(recording, "a")
    assert cache.fingerprint() == one  # asked again, it is read
    cache.clear()
    clock.now += 1
    ask(recording, "a")
    assert cache.fingerprint() != one


def test_stats_and_clear(path: Path) -> None:
    clock = Clock()
    cache = ToolCache(path, clock=clock, expire_s=50)
    tool = Counting().tool()
    for n in range(6):
        other = replace(tool, name="other" if n % 3 == 0 else "search")
        kind = "mistake" if n == 5 else "text"
        cache.put(key_of(other, str(n)), other.name, str(n), Answer(kind, "x"))  # type: ignore[arg-type]
        clock.now += 10
    stats = cache.stats()
    assert (stats.entries, stats.tools) == (6, {"other": 2, "search": 4})
    assert stats.kinds == {"mistake": 1, "text": 5} and stats.bytes == 6 * 202
    assert cache.clear(expired=True) == 1
    assert cache.clear("other") == 1
    assert cache.clear() == 4
    assert (cache.stats().entries, cache.stats().bytes) == (0, 0)


WORKER = """
import sys, time
from pathlib import Path
from coa.tools.cache import Answer, ToolCache
path, name, n = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
while not path.parent.exists():
    time.sleep(0.001)
cache = ToolCache(path)
for i in range(n):
    own = f"{name}-{i}".encode().ljust(32)
    cache.put(own, name, str(i), Answer("text", f"{name} {i}"))
    cache.put(f"shared-{i}".encode(), "shared", str(i), Answer("text", f"shared {i}"))
    assert cache.get(own) == Answer("text", f"{name} {i}")
"""


def test_many_processes_write_at_once_and_nothing_is_lost(path: Path) -> None:
    """They all make the file, too, at the same moment."""
    commands = [[sys.executable, "-c", WORKER, str(path), f"w{n}", "150"] for n in range(6)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for command in commands]
    time.sleep(1)  # until most of them wait for the folder
    path.parent.mkdir()
    for each in running:
        _, said = each.communicate(timeout=120)
        assert each.returncode == 0, said.decode()
    stats = ToolCache(path).stats()
    assert stats.tools == {**{f"w{n}": 150 for n in range(6)}, "shared": 150}
    with sqlite3.connect(path) as connection:
        (size,) = connection.execute("SELECT sum(size) FROM entries").fetchone()
    assert stats.bytes == size


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_opens_the_file_for_itself(path: Path) -> None:
    cache = ToolCache(path)
    cache.put(b"a", "search", "a", Answer("text", "from the parent"))
    child = os.fork()
    if child == 0:
        held = cache.get(b"a")
        cache.put(b"b", "search", "b", Answer("text", "from the child"))
        os._exit(0 if held is not None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cache.get(b"b") == Answer("text", "from the child")


def test_a_killed_writer_loses_nothing_that_was_stored(path: Path) -> None:
    code = WORKER.replace("assert cache.get(own)", "import os; os.kill(os.getpid(), 9); assert own")
    path.parent.mkdir()
    done = subprocess.run([sys.executable, "-c", code, str(path), "w", "5"], check=False)
    assert done.returncode == -9
    assert ToolCache(path).stats().entries == 2


# -- files that are not a cache ------------------------------------------------------------------


def test_a_file_that_is_not_a_cache_is_one_line_and_is_left_as_it_is(tmp_path: Path) -> None:
    text, foreign, newer = (tmp_path / name for name in ("notes.txt", "other.db", "newer.db"))
    text.write_bytes(b"Dear diary, this is not a database at all.\n" * 100)
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE entries (key)")
    ToolCache(newer).close()
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    said = {
        text: "is not a tool cache",
        foreign: "is a database of another program",
        newer: "is a tool cache of version 9, expected 1",
    }
    for path, found in said.items():
        before = path.read_bytes()
        with pytest.raises(RecordError) as caught:
            ToolCache(path)
        advice = "It was left as it is; name another file for the cache."
        assert str(caught.value) == f"{path}: {found}. {advice}"
        assert path.read_bytes() == before


def test_a_damaged_cache_is_one_line(path: Path) -> None:
    cache = ToolCache(path)
    for n in range(200):
        cache.put(str(n).encode(), "search", str(n), Answer("text", "x" * 500))
    cache.close()
    content = bytearray(path.read_bytes())
    content[4096 * 2 :] = os.urandom(len(content) - 4096 * 2)
    path.write_bytes(content)
    recording = cached(Toolbox([Counting().tool()]), ToolCache(path), "record")
    seen = [each for each in ask(recording, *map(str, range(20))) if each.failure]
    assert seen and all(f"{path}: the tool cache is damaged." in each.text for each in seen)
    assert all("\n" not in each.text for each in seen)


def test_a_cache_that_cannot_be_opened_or_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no such file\. Record a run first"):
        ToolCache(tmp_path / "missing.sqlite", read_only=True)
    with pytest.raises(ToolError, match="the tool cache cannot be used"):
        ToolCache(tmp_path)


def test_settings_that_cannot_be_meant_are_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="max_bytes is 0"):
        ToolCache(path, max_bytes=0)
    with pytest.raises(ConfigError, match="expire_s is -1"):
        ToolCache(path, expire_s=-1)
    with pytest.raises(
        ConfigError, match=r"cache mode 'reply' is not a choice\. Did you mean 'replay'"
    ):
        cached(Toolbox(), ToolCache(path), "reply")  # type: ignore[arg-type]
    ToolCache(path).close()
    with pytest.raises(ConfigError, match="opened for reading only"):
        cached(Toolbox(), ToolCache(path, read_only=True), "record")


def test_a_connection_of_before_a_fork_is_never_closed_by_the_child(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "cache.sqlite")
    (of_parent,) = cache._connections.values()
    cache._connections = {-1: of_parent}  # as in a child, whose number is another
    cache.put(b"1", "search", "x", Answer("text", "one"))
    cache.close()
    del cache
    assert of_parent in cache_module._OF_PARENTS
    cache_module._OF_PARENTS.remove(of_parent)
    of_parent.close()


def test_a_finished_file_is_opened_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / "cache.sqlite", list[str]()
    writer = ToolCache(path)
    writer.put(b"1", "search", "x", Answer("text", "one"))
    writer.close()
    connect = cache_module._connect

    def counted(path: Path, how: str) -> sqlite3.Connection:
        opened.append(how)
        return connect(path, how)

    monkeypatch.setattr(cache_module, "_connect", counted)
    reader = ToolCache(path, read_only=True)
    assert [reader.get(b"1", any_age=True) for _ in range(5)] == [Answer("text", "one")] * 5
    assert opened == ["mode=ro&immutable=1"]
    writer = ToolCache(path)
    writer.put(b"2", "search", "y", Answer("text", "two"))
    assert reader.get(b"2", any_age=True) == Answer("text", "two")
    writer.close()
    assert reader.get(b"2", any_age=True) == Answer("text", "two")
    path.unlink()
    with pytest.raises(UsageError, match="no such file"):
        reader.get(b"1")


def test_a_cache_opened_for_reading_writes_nothing_and_sees_what_is_recorded_meanwhile(
    path: Path,
) -> None:
    clock = Clock()
    writer = ToolCache(path, clock=clock)
    writer.put(b"a", "search", "a", Answer("text", "old"))
    writer.close()
    clock.now += 3600
    before = path.read_bytes()
    path.parent.chmod(0o555)
    try:
        reader = ToolCache(path, read_only=True, clock=clock)
        assert reader.get(b"a") == Answer("text", "old")
    finally:
        path.parent.chmod(0o755)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
    writer = ToolCache(path)
    writer.put(b"b", "search", "b", Answer("text", "new"))
    assert reader.get(b"b") == Answer("text", "new")
    for n in range(2000):
        writer.put(str(n).encode(), "search", "x", Answer("text", "much " * 100))
    writer.close()
    assert reader.get(b"1999") is not None and reader.get(b"a") == Answer("text", "old")
