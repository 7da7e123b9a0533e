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

from coa.corpus.build import CorpusSettings, build_corpus, read_all
from coa.corpus.read_file import Job, ReadLimits
from coa.corpus.scan import SourceFile
from coa.corpus.site import Corpus
from coa.corpus.store import Stamp
from coa.errors import ToolError
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


DEADLY = """
import os
from coa.corpus import build as read_all

read = read_all.read_file
read_all.read_file = lambda job, limits: (
    os._exit(3) if job.file.key == "deadly.html" else read(job, limits)
)
read_all.work()
"""


def _jobs(folder: Path, *more: SourceFile) -> list[Job]:
    """Files enough that processes are started for them."""
    paths = sorted(folder.glob("*.[hmt]*"))
    files = [SourceFile(path.name, path, Stamp(path.stat().st_size, 1)) for path in paths]
    return [Job(file) for file in (files[0], *more, *files[1:])]


LIMITS = ReadLimits("https://x.example", 1000, 1 << 24, 60.0)


def test_a_file_that_kills_its_reader_is_named_and_the_others_are_read(folder: Path) -> None:
    deadly = SourceFile("deadly.html", folder / "deadly.html", Stamp(2 << 20, 1))
    command = (sys.executable, "-c", DEADLY)
    read = {each.key: each.problem for each in read_all(_jobs(folder, deadly), LIMITS, 2, command)}
    assert read.pop("deadly.html").startswith("the process that read it died")
    assert read == {"index.html": "", "my file.txt": "", "notes.md": ""}


def test_a_reader_that_cannot_start_says_why(folder: Path) -> None:
    large = SourceFile("large.html", folder / "large.html", Stamp(2 << 20, 1))
    command = (sys.executable, "-c", "raise SystemExit('no such library')")
    with pytest.raises(ToolError, match="that reads files could not start: no such library"):
        list(read_all(_jobs(folder, large), LIMITS, 2, command))


def test_a_script_needs_no_guard(folder: Path, target: Path, tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    command = [sys.executable, str(script), str(folder), str(target)]
    subprocess.run(command, check=True)
    assert Corpus.open(target).search("whales", 1)


def test_a_file_that_takes_too_long_is_skipped(folder: Path, target: Path) -> None:
    (folder / "slow.html").write_text("<main>" + "<p><b>slow</b> page</p>" * 200_000)
    report = build(folder, target, CorpusSettings(seconds_per_file=0.05))
    assert report.skipped["slow.html"] == "reading it takes longer than 0.05 s"


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
    store = target / "v2" / "pages.sqlite"
    while process.poll() is None and not (store.exists() and store.stat().st_size > 100_000):
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
