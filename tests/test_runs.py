"""Files that survive a kill, and the rules of a run directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coa.errors import CoaError, ConfigError, RecordError, UsageError
from coa.io.files import open_to_others
from coa.io.progress import Progress, counted, duration
from coa.io.runs import Appender, Run, claim, read_jsonl, read_records, write_atomic

SETTINGS: dict[str, Any] = {"sft": {"epochs": 2, "clip": (0.2, 0.28)}, "name": "a"}


def open_run(path: Path, settings: dict[str, Any] = SETTINGS, **changes: Any) -> Run:
    asked = {"stage": "sft", "inputs": {"tasks": "f00d"}, "seed": 7, "base": "beef"} | changes
    return Run.open(path, settings=settings, **asked)


def refusal(path: Path, settings: dict[str, Any] = SETTINGS, **changes: Any) -> str:
    with pytest.raises(CoaError) as caught:
        open_run(path, settings, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), "run")


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_an_atomic_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "x" * 100_000 + "\ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in path.parent.iterdir()] == ["b.json"]


@pytest.mark.parametrize(("umask", "usual"), [(0o077, 0o600), (0o027, 0o640), (0o022, 0o644)])
def test_who_may_read_a_file_is_left_to_the_umask_and_to_the_file_it_replaces(
    tmp_path: Path, umask: int, usual: int
) -> None:
    new, private, shared = (tmp_path / name for name in ("new", "private", "shared"))
    private.touch(0o600)
    shared.touch()
    shared.chmod(0o664)
    before = os.umask(umask)
    try:
        for path in (new, private, shared):
            write_atomic(path, "text")
        Appender(tmp_path / "grown").close()
        private.with_name("weights").touch(0o600)  # as safetensors leaves them
        open_to_others(tmp_path / "weights")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    wanted = {"new": usual, "grown": usual, "weights": usual}
    assert modes == wanted | {"private": 0o600, "shared": 0o664}


def test_a_reader_never_sees_a_part_of_an_atomic_write(tmp_path: Path) -> None:
    path = tmp_path / "whole.txt"
    code = (
        "import sys; from pathlib import Path; from coa.io.runs import write_atomic\n"
        "print('ready', flush=True)\n"
        "for n in range(10**9): write_atomic(Path(sys.argv[1]), str(n % 10) * 200_000)"
    )
    write_atomic(path, "0" * 200_000)
    writer = start(code, path)
    assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    for _ in range(50):
        text = path.read_text()
        assert len(text) == 200_000 and len(set(text)) == 1
    kill(writer)
    assert len(path.read_text()) == 200_000


def test_a_torn_last_line_is_dropped_when_the_file_grows_again(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2}\n{"n":3,"text":"' + b"x" * 200_000)
    with Appender(path) as file:
        file.write({"n": 4})
    assert [record for _, record in read_jsonl(path)] == [{"n": 1}, {"n": 2}, {"n": 4}]


def test_a_last_line_that_lacks_only_its_newline_gets_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2}')
    with Appender(path) as file:
        file.write({"n": 3})
    assert path.read_bytes() == b'{"n":1}\n{"n":2}\n{"n":3}\n'


@pytest.mark.parametrize("torn", [b"{", b'{"n', b'{"n":"' + b"x" * 200_000, b"\0\0\0", b"  "])
def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "log.jsonl"
    for whole in (b"", b'{"n":1}\n', b'\xef\xbb\xbf\n{ "n": 1 }\n'):
        path.write_bytes(whole + torn)
        Appender(path).close()
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "text",
    [
        b"question,answer\nWhere?,Lima\nWho?,Eve",
        b"question,answer\nWhere?,Lima\n",
        b'[{"n":1},{"n":2}]',
        b'{\n  "n": 1\n}',
        b"{\\rtf1 a letter}",
        b'{"n":1}\n12',
        b'a\n{"n":',
        b"x" * 200_000,
    ],
)
def test_a_file_of_another_kind_is_refused_and_left_as_it_is(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "mine"
    path.write_bytes(text)
    for use in (lambda: Appender(path), lambda: claim(path, {}).__enter__()):
        with pytest.raises(UsageError, match="mine: is not a file of JSON lines; name another"):
            use()
    assert path.read_bytes() == text and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (b'{"n":', "log.jsonl:2: the line is cut in the middle. Delete that line, or run the"),
        (b"nonsense\n", "log.jsonl:2: the line is not JSON (Expecting value). Expected one JSON"),
        (b"[1]\n", "log.jsonl:2: found a list, expected a JSON object."),
        (b"\xff\n", "log.jsonl:2: the line is not JSON (Expecting value). Expected one JSON"),
    ],
)
def test_a_damaged_line_is_named_with_its_number(
    tmp_path: Path, last: bytes, expected: str
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n":1}\n' + last)
    with pytest.raises(RecordError) as caught:
        list(read_jsonl(path))
    assert str(caught.value).replace(f"{tmp_path}/", "").startswith(expected)


def test_a_record_that_does_not_fit_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"n":1}\n\n{"m":1}\n')
    with pytest.raises(RecordError, match=r"log\.jsonl:3: no field 'n'$"):
        read_records(path, lambda record: record["n"])
    with pytest.raises(UsageError, match=r"none\.jsonl: no such file\.$"):
        list(read_jsonl(tmp_path / "none.jsonl"))


def test_a_killed_writer_loses_at_most_the_line_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    code = (
        "import sys; from pathlib import Path; from coa.io.runs import Appender\n"
        "file = Appender(Path(sys.argv[1]))\n"
        "for n in range(10**9):\n"
        "    file.write({'n': n, 'text': 'x' * 10_000})\n"
        "    print(n, flush=True)"
    )
    writer = start(code, path)
    assert writer.stdout is not None
    for _ in range(40):
        promised = int(writer.stdout.readline())
    kill(writer)
    with Appender(path) as file:
        file.write({"n": "after"})
    numbers = [record["n"] for _, record in read_jsonl(path)]
    assert len(numbers) > promised + 1
    assert numbers == [*range(len(numbers) - 1), "after"]


def test_a_manifest_says_what_made_the_run_and_not_when(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as run:
        assert not run.resumed
        manifest = json.loads((run.root / "manifest.json").read_text())
    assert manifest == run.manifest
    assert manifest["stage"] == "sft"
    assert manifest["recipe"] == {"sft": {"epochs": 2, "clip": [0.2, 0.28]}, "name": "a"}
    assert (manifest["inputs"], manifest["seed"], manifest["base"]) == (
        {"tasks": "f00d"},
        7,
        "beef",
    )
    assert manifest["python"] == sys.version.split()[0]
    assert "tokenizers" in manifest["packages"]
    assert set(manifest) == {
        *("schema", "stage", "recipe", "inputs", "seed", "base", "packages", "python", "commit")
    }


def test_the_commit_is_that_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with open_run(tmp_path / "before") as run:
        assert run.manifest["commit"] is None
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    with open_run(tmp_path / "after") as run:
        assert run.manifest["commit"] == head.strip()


def test_the_same_recipe_continues_a_run(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as run:
        run.metrics({"step": 1, "loss": 0.5})
        before = (run.root / "manifest.json").read_bytes()
    with open_run(tmp_path / "run") as run:
        assert run.resumed
        run.metrics({"step": 2, "loss": 0.25})
        run.timing({"seconds": 1.5})
    assert (run.root / "manifest.json").read_bytes() == before
    assert [r["step"] for _, r in read_jsonl(run.root / "metrics.jsonl")] == [1, 2]
    timings = [record for _, record in read_jsonl(run.root / "timings.jsonl")]
    assert [t.get("event", t.get("seconds")) for t in timings] == ["started", "resumed", 1.5]
    assert all("at" in timing for timing in timings)


def test_an_upgrade_between_the_parts_of_a_run_is_noted(tmp_path: Path) -> None:
    open_run(tmp_path / "run").close()
    path = tmp_path / "run" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"python": "3.11.0"}))
    open_run(tmp_path / "run").close()
    last = list(read_jsonl(tmp_path / "run" / "timings.jsonl"))[-1][1]
    assert (last["event"], last["python"]) == ("resumed", manifest["python"])


@pytest.mark.parametrize(
    ("settings", "changes", "difference"),
    [
        ({"sft": {"epochs": 3, "clip": [0.2, 0.28]}, "name": "a"}, {}, "sft.epochs 2, and it is 3"),
        ({"sft": {"epochs": 2}, "name": "a"}, {}, "sft.clip [0.2, 0.28], and it is not set"),
        (SETTINGS | {"new": 1}, {}, "new not set, and it is 1"),
        (SETTINGS | {"name": None}, {}, "name 'a', and it is none"),
        (SETTINGS, {"inputs": {"tasks": "bad"}}, "input tasks 'f00d', and it is 'bad'"),
        (SETTINGS, {"seed": 8}, "seed 7, and it is 8"),
        (SETTINGS, {"base": None}, "base 'beef', and it is none"),
        (SETTINGS, {"stage": "rl"}, "stage 'sft', and it is 'rl'"),
    ],
)
def test_another_recipe_is_refused_with_the_first_difference(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], difference: str
) -> None:
    open_run(tmp_path / "run").close()
    assert refusal(tmp_path / "run", settings, **changes) == (
        f"run: this was started with {difference} here. "
        "Write somewhere else, or delete it to start again."
    )
    open_run(tmp_path / "run").close()


def test_a_directory_that_is_not_a_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    assert refusal(tmp_path) == (
        "run: holds 'thesis.tex' but no manifest.json, so it is not a run directory. "
        "Use a new or an empty one."
    )
    assert refusal(tmp_path / "thesis.tex") == "run: is a file, expected a run directory."
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


HIDDEN = (".env.template", ".env.defaults", ".gitconfig.personal", ".notes.part")


def left_by_a_kill(path: Path) -> None:
    """Start to write a whole file, and die."""
    code = (
        "import os, sys; from pathlib import Path; from coa.io.files import whole_file\n"
        "with whole_file(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    start(code, path).communicate()


def test_hidden_files_of_a_user_are_never_swept(tmp_path: Path) -> None:
    mine, run, growing = tmp_path / "mine", tmp_path / "run", tmp_path / "e.jsonl"
    open_run(run).close()
    for name in HIDDEN:
        for folder in (mine, run):
            folder.mkdir(exist_ok=True)
            (folder / name).write_text("mine")
    (tmp_path / ".e.jsonl.original").write_text("mine")
    assert refusal(mine).startswith("run: holds '.env.defaults' but no manifest.json")
    open_run(run).close()
    with claim(growing, {"teacher": "experts"}):
        pass
    assert sorted(path.name for path in mine.iterdir()) == sorted(HIDDEN)
    assert all((run / name).read_text() == "mine" for name in HIDDEN)
    assert (tmp_path / ".e.jsonl.original").is_file()


def test_what_a_killed_process_left_is_swept_by_its_owner_only(tmp_path: Path) -> None:
    run, growing = tmp_path / "run", tmp_path / "e.jsonl"
    left_by_a_kill(run / "manifest.json")
    assert [path.name.endswith(".coa-part") for path in run.iterdir()] == [True]
    open_run(run).close()
    left_by_a_kill(run / "summary.json")
    refusal(run, seed=8)
    assert len(list(run.glob("*.coa-part"))) == 1
    open_run(run).close()
    assert {p.name for p in run.iterdir()} == {".lock", "manifest.json", "timings.jsonl"}
    for path in (growing, tmp_path / "e.jsonl.manifest.json", tmp_path / "other.jsonl"):
        left_by_a_kill(path)
    with claim(growing, {"teacher": "experts"}):
        left = [path.name for path in tmp_path.glob("*.coa-part")]
    assert len(left) == 1 and left[0].startswith(".other.jsonl.")


def test_a_directory_is_no_growing_file(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    with (
        pytest.raises(UsageError, match=r"runs: is a directory, expected a file\. Name one in it"),
        claim(folder, {"teacher": "experts"}),
    ):
        pass
    assert list(tmp_path.rglob("*")) == [folder]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"stage": ', "run/manifest.json: not JSON ("),
        ('{"schema": 99}', "run/manifest.json: found manifest schema 99, expected 1. Use the"),
        ("[]", "run/manifest.json: found a list, expected an object. Delete the run"),
    ],
)
def test_a_damaged_manifest_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    assert refusal(tmp_path).startswith(expected)


@pytest.mark.parametrize(("text", "found"), [('{"teacher": ', "not JSON ("), ("3", "found a int")])
def test_a_damaged_claim_is_one_line(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text("{}\n")
    (tmp_path / "e.jsonl.manifest.json").write_text(text)
    with pytest.raises(RecordError) as caught, claim(path, {"teacher": "experts"}):
        pass
    assert str(caught.value).startswith(f"{path}.manifest.json: {found}")
    assert str(caught.value).endswith(". Delete it and e.jsonl to start again.")


def test_two_processes_cannot_share_a_run_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "run"
    code = (
        "import sys, time; from pathlib import Path; from coa.io.runs import Run\n"
        "run = Run.open(Path(sys.argv[1]), 'sft', {'sft': {'epochs': 2, 'clip': [0.2, 0.28]},"
        " 'name': 'a'}, {'tasks': 'f00d'}, 7, 'beef')\n"
        "run.metrics({'step': 1}); print('open', flush=True); time.sleep(600)"
    )
    holder = start(code, path)
    assert holder.stdout is not None and holder.stdout.readline() == "open\n"
    assert refusal(path) == (
        f"run: in use by another process (pid {holder.pid}). Wait for it, or write elsewhere."
    )
    kill(holder)
    with open_run(path) as run:
        assert run.resumed
        assert refusal(path).startswith(f"run: in use by another process (pid {os.getpid()}).")
    open_run(path).close()


def test_metrics_after_a_checkpoint_can_be_dropped(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as run:
        for step in range(5):
            run.metrics({"step": step})
        with (run.root / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step":5')
        run.keep_metrics(lambda record: record["step"] < 3)
        run.metrics({"step": 3})
        assert [r["step"] for _, r in read_jsonl(run.root / "metrics.jsonl")] == [0, 1, 2, 3]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A clock that goes when `now` is changed."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("coa.io.progress.time", SimpleNamespace(monotonic=lambda: clock.now))
    yield clock


def test_the_first_of_many_says_nothing_of_the_end(clock: SimpleNamespace) -> None:
    progress = Progress("evaluate", total=200, mode="silent")
    clock.now += 9  # all 64 that run at once have taken as long
    progress.advance()
    assert progress.line() == "evaluate 1/200 0%  0.111/s  9s so far"
    clock.now += 1
    progress.advance(9)
    assert progress.line() == "evaluate 10/200 5%  1/s  3m10s left"
    slow = Progress("sft", total=200, mode="silent")
    clock.now += 31  # slow work says something after half a minute
    slow.advance()
    assert slow.line() == "sft 1/200 0%  0.0323/s  1h42m left"


def test_progress_in_a_pipe_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], clock: SimpleNamespace
) -> None:
    with Progress("sft", total=100, done=20) as progress:
        for _ in range(80):
            clock.now += 1
            progress.advance(loss=1.23456)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "sft 25/100 25%  1/s  1m15s left  loss 1.235",
        "sft 55/100 55%  1/s  45s left  loss 1.235",
        "sft 85/100 85%  1/s  15s left  loss 1.235",
        "sft 100/100 100%  1/s  1m20s so far  loss 1.235",
    ]


def test_silent_progress_counts_and_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("tasks", mode="silent") as progress:
        progress.advance(3)
    assert (progress.done, capsys.readouterr()) == (3, ("", ""))


def test_progress_on_a_terminal_is_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("tasks", total=2, mode="bar") as progress:
        progress.advance(2, solved="1/2")
    out, err = capsys.readouterr()
    assert out == ""
    assert "tasks" in err and "2/2" in err and "solved 1/2" in err


def test_what_an_earlier_part_of_a_run_did_is_not_speed(clock: SimpleNamespace) -> None:
    progress = Progress("tasks", total=100, mode="silent")
    progress.continue_from(50)
    clock.now += 10
    progress.advance(5)
    assert (progress.rate(), progress.line()) == (0.5, "tasks 55/100 55%  0.5/s  1m30s left")


@pytest.mark.parametrize("each_s", [0.05, 1.0, 20.0])
def test_an_estimate_follows_a_machine_that_becomes_ten_times_slower(
    clock: SimpleNamespace, each_s: float
) -> None:
    progress = Progress("tasks", total=10_000, mode="silent")
    for _ in range(200):
        clock.now += each_s
        progress.advance()
    assert progress.rate() == pytest.approx(1 / each_s)
    slow_since = clock.now
    while clock.now - slow_since < max(40, 40 * each_s):
        clock.now += 10 * each_s
        progress.advance()
    assert progress.rate() == pytest.approx(0.1 / each_s, rel=0.25)
    clock.now += 1000 * each_s
    assert progress.rate() < 0.05 / each_s  # what stands still is slow, too


def test_work_that_counts_by_itself_ends_at_its_total(capsys: pytest.CaptureFixture[str]) -> None:
    with counted("record", 3) as on_done:
        for done in (2, 3):
            on_done(done, 3)
    resumed, ended = capsys.readouterr().err.splitlines()
    assert resumed == "record goes on from 2 of 3" and ended.startswith("record 3/3 100%  ")


@pytest.mark.parametrize(
    ("seconds", "text"), [(7.6, "8s"), (112, "1m52s"), (7500, "2h05m"), (59.7, "1m00s")]
)
def test_durations_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    growing = tmp_path / "e.jsonl"
    growing.symlink_to("/dev/full")
    file = Appender(growing)
    for fail in (lambda: file.write({"a": 1}), file.close):
        with pytest.raises(OSError, match=r"No space left.*e\.jsonl"):
            fail()


def test_a_file_that_may_be_continued_is_read_without_its_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text('{"a":1}\n{"a":')
    assert list(read_jsonl(path, growing=True)) == [(1, {"a": 1})]
    path.write_text('{"a":\n{"a":1}\n')
    with pytest.raises(RecordError, match=r"e\.jsonl:1: the line is not JSON"):
        list(read_jsonl(path, growing=True))
    with pytest.raises(UsageError, match="is a directory, expected a file"):
        list(read_jsonl(tmp_path))


def test_a_file_is_written_from_its_lines_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomic(path, (f"{n}\n" for n in range(3)))
    with pytest.raises(ZeroDivisionError):
        write_atomic(path, (str(1 // n) for n in (1, 0)))
    assert path.read_text() == "0\n1\n2\n" and list(tmp_path.iterdir()) == [path]


def test_a_run_that_failed_before_it_made_anything_does_not_hold_its_folder(tmp_path: Path) -> None:
    def begin(model: str) -> Run:
        return Run.open(tmp_path / "run", "eval", {"model": model}, {}, 0)

    with pytest.raises(OSError, match="no weights"), begin("misspelt"):
        raise OSError("no weights")
    with pytest.raises(OSError, match="no room"), begin("right") as run:
        run.metrics({"update": 1})
        raise OSError("no room")
    with pytest.raises(ConfigError, match="started with model 'right'"):
        begin("other")
