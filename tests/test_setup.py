"""Installation: once, torch first, and one line when something is missing.

The script runs with stubs on its PATH (an old Python, a full disk); the unreachable index is real.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coa.doctor import OPTIONAL, examine, print_findings

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = (
    *("sh", "awk", "cat", "cksum", "df", "dirname", "grep", "id", "rm", "tail", "mkdir", "chmod"),
    "uname",
)

GOOD_PYTHON = """#!/bin/sh
# A Python new enough, whose environments note what pip is asked for.
case "$*" in
*"-m venv"*)
    mkdir -p .venv/bin
    cat "$0" >.venv/bin/python
    chmod +x .venv/bin/python ;;
*"-m pip install"*) echo "$*" >>calls ;;
esac
"""
OLD_PYTHON = """#!/bin/sh
[ "$1" = -V ] && echo "Python 3.9.2" && exit 0
exit 1
"""
NO_VENV_PYTHON = """#!/bin/sh
[ "$1" = -m ] || exit 0
mkdir -p .venv
echo "The virtual environment was not created successfully because ensurepip is not available."
exit 1
"""
SMALL_DISK = """#!/bin/sh
echo "Filesystem 1024-blocks Used Available Capacity Mounted"
echo "/dev/disk 9000000 8000000 1048576 90% /"
"""


class Clone:
    """A tree as after a clone, and a PATH that holds only what a test puts there."""

    def __init__(self, root: Path) -> None:
        self.root = root / "clone"
        self.bin = root / "bin"
        (self.root / "dev").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(ROOT / "pyproject.toml", self.root)
        shutil.copy(ROOT / "dev" / "setup.sh", self.root / "dev")
        for program in PROGRAMS:
            found = shutil.which(program)
            assert found, program
            (self.bin / program).symlink_to(found)

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def setup(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
        environment |= {"PATH": str(self.bin), "PIP_CONFIG_FILE": os.devnull} | variables
        environment.pop("TORCH", None)
        return subprocess.run(
            ["sh", "dev/setup.sh"], cwd=self.root, env=environment, capture_output=True, text=True
        )

    def refusal(self, **variables: str) -> str:
        done = self.setup(**variables)
        assert done.returncode == 1, done
        lines = done.stderr.splitlines()
        assert len(lines) == 1, lines
        return lines[0]

    @property
    def calls(self) -> list[str]:
        """What pip was asked to install, in order."""
        calls = self.root / "calls"
        return [line.split()[-1] for line in calls.read_text().splitlines()]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_torch_is_installed_first_and_the_second_time_nothing_is(clone: Clone) -> None:
    clone.program("python3", GOOD_PYTHON)
    assert clone.setup().returncode == 0
    assert clone.calls == ["torch==2.13.0", ".[train,tools,export,serve,mcp,dev]", ".[gym]"]
    again = clone.setup()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert len(clone.calls) == 3


def test_without_task_generators_and_a_sandbox_the_rest_is_installed(clone: Clone) -> None:
    clone.program(
        "python3", GOOD_PYTHON.replace('echo "$*" >>calls', 'case "$*" in *gym*) exit 1; esac')
    )
    done = clone.setup()
    assert done.returncode == 0
    assert "setup: they cannot be installed" in done.stdout
    again = "To try again: rm .venv/.installed && make setup\n"
    assert f"so there are no gym-code tasks. {again}" in done.stdout
    if sys.platform == "linux":
        assert "bubblewrap is missing, so programs of a model are refused" in done.stdout
        assert f"See docs/security.md. {again}" in done.stdout
        clone.program("bwrap", "#!/bin/sh\n")
        (clone.root / ".venv" / ".installed").unlink()
        assert "bubblewrap" not in clone.setup().stdout


def test_the_task_generators_can_be_left_out_and_come_when_they_are_wanted(clone: Clone) -> None:
    clone.program("python3", GOOD_PYTHON)
    clone.setup(NO_GYM="1")
    assert clone.calls == ["torch==2.13.0", ".[train,tools,export,serve,mcp,dev]"]
    clone.setup()
    assert clone.calls[-1] == ".[gym]"


def test_a_changed_pyproject_installs_again(clone: Clone) -> None:
    clone.program("python3", GOOD_PYTHON)
    clone.setup()
    pyproject = clone.root / "pyproject.toml"
    pyproject.write_text(pyproject.read_text() + "\n")
    clone.setup()
    assert len(clone.calls) == 6


def test_a_tree_that_was_moved_installs_again(clone: Clone) -> None:
    clone.program("python3", GOOD_PYTHON)
    clone.setup()
    moved = clone.root.with_name("moved")
    clone.root.rename(moved)
    clone.root = moved
    clone.setup()
    assert len(clone.calls) == 6


def test_a_newer_python_is_found_when_python3_is_old(clone: Clone) -> None:
    clone.program("python3", OLD_PYTHON)
    clone.program("python3.13", "#!/bin/sh\nexit 127\n")
    clone.program("python3.12", GOOD_PYTHON)
    assert clone.setup().returncode == 0
    assert clone.calls[0] == "torch==2.13.0"


def test_an_old_python_is_one_line(clone: Clone) -> None:
    clone.program("python3", OLD_PYTHON)
    assert clone.refusal() == (
        "setup: Python 3.11 or newer is needed, and python3 is Python 3.9.2. "
        "Install one, or name it: make run PYTHON=/path/to/python3.11"
    )
    assert not (clone.root / ".venv").exists()


def test_no_python_is_one_line(clone: Clone) -> None:
    assert clone.refusal().startswith(
        "setup: Python 3.11 or newer is needed, and python3 is no program that runs."
    )


def test_a_python_asked_for_by_name_is_not_replaced(clone: Clone) -> None:
    clone.program("python3", GOOD_PYTHON)
    clone.program("python3.9", OLD_PYTHON)
    assert "and python3.9 is Python 3.9.2." in clone.refusal(PYTHON="python3.9")


def test_a_python_without_venv_is_one_line(clone: Clone) -> None:
    clone.program("python3", NO_VENV_PYTHON)
    assert clone.refusal() == (
        "setup: python3 cannot make a virtual environment (its venv module is missing). "
        "Install it (Debian, Ubuntu: apt install python3-venv), or set PYTHON."
    )
    assert not (clone.root / ".venv").exists()


def test_a_full_disk_is_one_line(clone: Clone) -> None:
    clone.program("python3", GOOD_PYTHON)
    clone.program("df", SMALL_DISK)
    assert clone.refusal() == (
        "setup: 6 GB of free disk space are needed here, and 1024 MB are free. "
        "Free some, or put the project on another disk."
    )


def test_an_unreachable_index_is_one_line_and_names_the_log(clone: Clone) -> None:
    clone.program("python3", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    line = clone.refusal(PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="1")
    assert line == (
        "setup: the package index cannot be reached, so torch cannot be installed. Check the "
        "network, or point pip at an index you can reach (PIP_INDEX_URL). Log: .venv/install.log"
    )
    assert "torch==2.13.0" in (clone.root / ".venv" / "install.log").read_text()
    assert not (clone.root / ".venv" / ".installed").exists()


def test_a_package_that_does_not_exist_is_one_line_with_the_reason(clone: Clone) -> None:
    failing = GOOD_PYTHON.replace(
        'echo "$*" >>calls', 'echo "ERROR: No matching distribution found for $5" && exit 1'
    )
    clone.program("python3", failing)
    assert clone.refusal() == (
        "setup: pip could not install torch: ERROR: No matching distribution found for "
        "torch==2.13.0. Log: .venv/install.log"
    )


def test_make_names_every_target() -> None:
    command = ["make", "--no-print-directory", "help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    named = [line.split()[1] for line in done.stdout.splitlines()]
    tests = "test test-slow test-servers test-vllm test-peers test-parity test-frameworks test-mcp"
    assert named == f"help setup run {tests} python-docs check bench clean".split()


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "big.bin").write_bytes(b"x" * 500_001)
    (tmp_path / "small.bin").write_bytes(b"x" * 500_000)
    script = ROOT / "dev" / "large_files.py"
    done = subprocess.run(
        [sys.executable, script, "big.bin", "small.bin", "deleted.bin"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (
        1,
        "big.bin: 500 kB, expected at most 500 kB.\n",
    )


def test_the_doctor_names_what_is_optional_and_missing_without_failing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    monkeypatch.delattr(os, "sysconf")
    found = examine()
    checks = {each["check"]: each for each in found["checks"]}
    assert checks["memory"]["found"] == "unknown"
    assert checks["pypdf"]["fix"] == 'pip install "chain-of-agents[tools]"'
    others = [each for name, each in checks.items() if name not in sum(OPTIONAL.values(), ())]
    assert found["ok"] == all(each["ok"] for each in others)
    print_findings(found)
    assert '--  pypdf          not installed  -> pip install "chain' in capsys.readouterr().out
