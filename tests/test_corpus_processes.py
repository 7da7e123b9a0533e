"""Corpora are built by processes: they die, are slow, are stopped, and nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coa.corpus.build import CorpusSettings, build_corpus
from coa.corpus.site import Corpus
from coa.errors import ConfigError
from manual import build, content, make_manual


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_manual(tmp_path / "Manual")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "manual.corpus"


def test_processes_read_what_one_process_reads(folder: Path, target: Path, tmp_path: Path) -> None:
    for n in range(120):
        (folder / f"{n}.txt").write_text(f"Chapter {n}. " + f"word{n} and some more. " * 900)
    (folder / "deadly.pdf").write_bytes(b"%PDF-1.4 oh no")
    build_corpus(folder, target, workers=2, progress="silent")
    build(folder, tmp_path / "other")
    assert content(target) == content(tmp_path / "other")
    assert Corpus.open(target).search("word77", 1)[0].url.endswith("/77.txt")


def test_a_file_that_kills_its_reader_is_named_and_the_others_are_read(
    folder: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "deadly.html").write_text("<p>Dangerous.")
    monkeypatch.setattr("coa.corpus.source._READER", "worker_jobs:deadly_reader")
    report = build(folder, target)
    died = "the process that read it died, for want of memory perhaps"
    assert report.skipped == {"deadly.html": died} and report.pages == 6


def test_a_reader_that_cannot_start_says_why(
    folder: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coa.corpus.source._READER", "worker_jobs:no_such_reader")
    with pytest.raises(ConfigError, match="worker_jobs has no 'no_such_reader'"):
        build(folder, target)


def test_a_script_needs_no_guard(folder: Path, target: Path, tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    command = [sys.executable, str(script), str(folder), str(target)]
    subprocess.run(command, check=True)
    assert Corpus.open(target).search("whales", 1)


def test_a_file_that_takes_too_long_is_skipped(folder: Path, target: Path) -> None:
    (folder / "slow.html").write_text("<main>" + "<p><b>slow</b> page</p>" * 200_000)
    report = build(folder, target, CorpusSettings(seconds_per_file=0.4))
    assert report.skipped["slow.html"] == "reading it takes longer than 0.4 s"


def test_progress_goes_to_stderr(
    folder: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_corpus(folder, target, progress="plain")
    shown = capsys.readouterr()
    assert shown.out == "" and "files 6/6 100%" in shown.err and "passages " in shown.err


SCRIPT = """
import sys
from pathlib import Path
from coa.corpus.build import build_corpus

if __name__ == "__main__":
    build_corpus(Path(sys.argv[1]), Path(sys.argv[2]), workers=2, progress="silent")
"""


def _started(script: Path, folder: Path, target: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(script), str(folder), str(target)]
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)


def _children(pid: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            yield int(path.parent.name)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_build_that_is_stopped_goes_on_and_loses_nothing(
    folder: Path, target: Path, tmp_path: Path, how: signal.Signals
) -> None:
    build(folder, target)
    old = content(target)
    (folder / "notes.md").write_text("# Notes\nThe violet lamp.\n")
    for n in range(60):
        page = "".join(f"<p>Paragraph {m} of chapter{n}.</p>" for m in range(900))
        (folder / f"{n}.html").write_text(f"<main><h1>{n}</h1>{page}</main>")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = _started(script, folder, target)
    store, unsaved = target / "v2" / "pages.sqlite", target / "v2" / "pages.sqlite-journal"
    while process.poll() is None and not (
        store.exists() and store.stat().st_size > 100_000 and not unsaved.exists()
    ):
        time.sleep(0.01)
    workers = list(_children(process.pid))
    assert process.poll() is None, "it ended before it could be stopped"
    os.kill(process.pid, how)
    process.wait(timeout=60)
    assert content(target) == old
    report = build(folder, target)
    assert report.read < 61, "nothing of the stopped build was kept"
    build(folder, tmp_path / "fresh")
    assert content(target) == content(tmp_path / "fresh")
    deadline = time.monotonic() + 30
    while alive := [pid for pid in workers if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"workers outlived their parent: {alive}"
        time.sleep(0.05)


def test_a_build_stopped_before_the_switch_is_published_by_the_next(
    folder: Path, target: Path
) -> None:
    build(folder, target)
    present = (target / "manifest.json").read_bytes()
    (folder / "notes.md").write_text("# Notes\nThe violet lamp uses 3 watts\n")
    build(folder, target)
    # As if the last step had not been reached: all is read, the manifest names the old version.
    (target / "manifest.json").write_bytes(present)
    (target / "v1").mkdir()
    report = build(folder, target)
    assert report.read == 0 and Corpus.open(target).search("violet", 1)
