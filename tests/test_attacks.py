"""Attacks on the code sandbox: each works without it and is stopped by it, as root and as nobody.

Both sides of every probe run in one process per user (`attacks.trial`), which is started once; the
tests only read its verdicts. A control that this machine or this user cannot run is skipped with
the reason, after the sandbox's side has been checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attack_probes import PROBES
from attacks.probe import Probe

ROOT = Path(__file__).resolve().parent.parent
NOBODY = 65534
Case = tuple[str, str]
USERS = ("root", "nobody") if os.getuid() == 0 else ("self",)
"""An ordinary user can only be itself."""
CASES = [
    *(pytest.param((user, "FULL"), id=f"{user}-full") for user in USERS),
    pytest.param((USERS[-1], "PROCESS"), id=f"{USERS[-1]}-process", marks=pytest.mark.slow),
]
ATTACKS = [pytest.param(probe, id=probe.name) for probe in PROBES]
Trials = Callable[[Case], dict[str, Any]]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


@pytest.fixture(scope="session")
def readable() -> Iterator[Path]:
    """The package and the probes in a folder that every user may read."""
    folder = Path(tempfile.mkdtemp(prefix="coa-attacks-"))
    folder.chmod(0o755)
    kept = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "coa", folder / "coa", ignore=kept)
    shutil.copytree(ROOT / "tests" / "attacks", folder / "attacks", ignore=kept)
    shutil.copy(ROOT / "tests" / "attack_probes.py", folder)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    yield folder
    shutil.rmtree(folder)


def start(user: str, command: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start a command as this user, with the package and the probes in reach.

    Its output goes to files: a pipe may be held open by a process that outlives it.
    """
    surroundings = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)}
    who: dict[str, Any] = {}
    if user == "nobody":
        who = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    out, err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115
    started = subprocess.Popen(
        command, cwd=folder, env=surroundings, stdout=out, stderr=err, text=True, **who
    )
    started.stdout, started.stderr = out, err
    return started


def said(started: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
    """What it wrote, after its end; or after its abortion, with where each of its threads was."""
    try:
        started.wait(timeout)
    except subprocess.TimeoutExpired:
        started.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(10)
        started.kill()  # one that was stopped cannot abort; what it wrote is there all the same
        started.wait()
    texts = []
    for file in (started.stdout, started.stderr):
        assert file is not None
        with file:
            file.seek(0)
            texts.append(file.read())
    return texts[0], texts[1]


def python_for(user: str, folder: Path) -> tuple[str, str]:
    """An interpreter that the user may start, with the packages that we have here; or why not.

    Ours may lie in a private folder: then an environment around the system's, of the same version.
    """
    if user != "nobody":
        return sys.executable, ""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    tried = []
    for base in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        made = folder / f"environment{len(tried)}"
        try:
            command = [base, "-m", "venv", "--without-pip", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            packages = made / "lib" / version / "site-packages"
            roads = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
            (packages / "ours.pth").write_text("\n".join(sorted(roads)))
            python = str(made / "bin" / "python")
            asked = start(user, [python, "-I", "-c", "import numpy, pydantic, sympy"], folder)
            complaint = said(asked, 60)[1].strip()
        except (OSError, subprocess.CalledProcessError) as error:
            complaint = str(error)
        else:
            if asked.returncode == 0:
                return python, ""
        tried.append(f"{base}: {complaint.splitlines()[-1] if complaint else 'failed'}")
    return "", f"no Python that {user} may start; tried {'; '.join(tried)}"


@pytest.fixture(scope="session")
def trials(request: pytest.FixtureRequest, readable: Path) -> Trials:
    """Verdicts by user and tier; the first question starts the trials of all that were chosen."""
    chosen: dict[Case, set[str]] = {}
    for item in request.session.items:
        given = getattr(item, "callspec", None)
        if given is not None and isinstance(given.params.get("probe"), Probe):
            chosen.setdefault(given.params["case"], set()).add(given.params["probe"].name)
    running: dict[Case, subprocess.Popen[str]] = {}
    verdicts: dict[Case, dict[str, Any]] = {}

    def start_all() -> None:
        for case in chosen:
            python, reason = python_for(case[0], readable)
            if reason:
                verdicts[case] = {"refused": reason}
                continue
            command = [python, "-m", "attacks.trial", f"--tier={case[1]}", *sorted(chosen[case])]
            running[case] = start(case[0], command, readable)

    def ask(case: Case) -> dict[str, Any]:
        if not running and not verdicts:
            start_all()
        if case not in chosen:
            pytest.skip("no probe was chosen")
        if case not in verdicts:
            verdicts[case] = {"failed": "see the first test"}
            out, err = said(running[case], 600)
            assert running[case].returncode == 0, (running[case].returncode, err[-6000:])
            verdicts[case] = json.loads(out)
        if "refused" in verdicts[case]:
            pytest.skip(f"no sandbox for {case} here: {verdicts[case]['refused']}")
        assert "failed" not in verdicts[case], verdicts[case]["failed"]
        return verdicts[case]

    return ask


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("probe", ATTACKS)
def test_an_attack_works_without_the_sandbox_and_is_stopped_by_it(
    probe: Probe, case: Case, trials: Trials
) -> None:
    verdict = trials(case)[probe.name]
    inside, outside = verdict["inside"], verdict["outside"]
    assert inside["started"], f"the probe never ran: {inside}"
    assert not inside["won"], f"{probe.about}: {inside}"
    if probe.category not in ("bombs", "harm"):
        assert all(s["ended"] != "timeout" for s in inside["seen"]), (
            f"only time stopped it: {inside}"
        )
    if probe.control == "none":
        return  # outside it would harm the machine
    assert outside["started"], f"the control never ran: {outside}"
    if not outside["won"]:
        assert probe.needs, f"stopped inside, but the control proves nothing: {outside}"
        pytest.skip(f"stopped inside; no control as {case[0]}, which needs {probe.needs}")


@pytest.mark.parametrize("case", CASES)
def test_at_least_forty_attacks_are_shown_both_ways(case: Case, trials: Trials) -> None:
    verdicts = [v for v in trials(case).values() if v["outside"] is not None]
    if len(verdicts) < 40:
        pytest.skip(f"only {len(verdicts)} probes were chosen")
    shown = [v for v in verdicts if v["outside"]["won"] and not v["inside"]["won"]]
    assert len(shown) >= 40, f"{len(shown)} of {len(verdicts)}"


def test_every_probe_has_a_name_of_its_own_and_a_place_in_the_documented_table() -> None:
    names = [probe.name for probe in PROBES]
    assert len(names) == len(set(names))
    rows = (ROOT / "docs" / "security.md").read_text(encoding="utf-8").splitlines()
    for probe in PROBES:
        row = next((row for row in rows if row.startswith(f"| {probe.category} |")), "")
        assert re.search(rf"(?<![\w-]){probe.name}(?![\w-])", row), (
            f"docs/security.md: the row of {probe.category!r} does not name {probe.name!r}."
        )


def test_what_a_probe_prints_is_not_mistaken_for_success() -> None:
    """The marker itself is not in any program, so that a traceback cannot show it."""
    from attacks.probe import MARKER, PRELUDE

    texts = [PRELUDE, *(step.program for probe in PROBES for step in probe.steps)]
    assert not [text for text in texts if MARKER in text]
