"""Tiers: what is reached as root, as an ordinary user and without namespaces, and refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from coa.sandbox import Sandbox, SandboxError, Tier, reach_tier
from coa.sandbox.inside import syscalls
from coa.sandbox.tiers import Finding, Reach, refusal

SOURCE = Path(__file__).resolve().parent.parent / "src"
NOBODY = 65534
SCRIPT = """
import asyncio, json, os
from pathlib import Path
from coa.sandbox import Sandbox, SandboxError, Tier, reach_tier
tier, findings = reach_tier()
found = {"tier": tier.name, "refused": "", "ended": {}}
found["wrong"] = {each.layer: [each.found, each.fix] for each in findings if not each.ok}
PROGRAMS = {
    "sum": "print(6 * 7)",
    "write": "open('/tmp/x', 'w').write('x')",
    "fork": "import os; os.fork()",
    "thread": "import threading; t = threading.Thread(target=print); t.start(); t.join()",
    "read": "open('/etc/passwd')",
    "socket": "import socket; socket.socket()",
    "signal": "import os; os.kill(os.getppid(), 9)",
    "uid": "import os; print(os.getuid())",
}
NAME = f"coa{os.getpid()}".encode()
def living():
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            yield path.read_bytes().strip() == NAME
        except OSError:
            pass
async def main():
    try:
        async with Sandbox(slots=1, packages=()):
            pass
    except SandboxError as error:
        found["refused"] = str(error)
    if tier > Tier.NONE:
        async with Sandbox(slots=1, packages=(), require=tier) as box:
            for name, program in PROGRAMS.items():
                outcome = await box.run(program)
                found["ended"][name] = outcome.ended
                found[name] = outcome.stdout
            async with box.session() as session:
                await session.run("x = 5")
                await session.run(f"import ctypes; ctypes.CDLL(None).prctl(15, {NAME!r})")
                found["named"] = sum(living())
                found["session"] = (await session.run("print(x)")).stdout
    for _ in range(100):
        found["left"] = sum(living())
        if not found["left"]:
            break
        await asyncio.sleep(0.02)
asyncio.run(main())
print(json.dumps(found))
"""


def others_python() -> str:
    """An interpreter that every user may start; ours may be in somebody's home."""
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        command = [path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if _as_nobody(command).returncode == 0:
                return path
        except OSError:
            continue
    pytest.skip("no Python of 3.11 or newer here can be started by every user")


def _as_nobody(command: Sequence[str], **more: object) -> subprocess.CompletedProcess[str]:
    identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command, capture_output=True, text=True, cwd="/", **identity, **more
    )


def look(
    prefix: Sequence[str] = (), *, nobody: bool = False, python: str = "", path: str = ""
) -> dict[str, object]:
    """What the script finds when it is started this way."""
    environment = {"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PATH"] = path or os.environ["PATH"]
    command = [*prefix, python or sys.executable, "-c", SCRIPT]
    if nobody:
        done = _as_nobody(command, env=environment)
    else:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd="/", check=False
        )
    if "ModuleNotFoundError" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip(f"the checkout cannot be read by others: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def need_bubblewrap() -> str:
    path = shutil.which("bwrap")
    if path is None:
        pytest.skip("bubblewrap is not installed")
    return path


FULL = {"sum": "ok", "thread": "ok", "read": "error", "socket": "error"}
FULL |= {"write": "ok", "fork": "ok"}
PROCESS = FULL | {"write": "error", "fork": "error"}


def check(found: dict[str, object], tier: str, ended: dict[str, str]) -> None:
    assert found["tier"] == tier, found
    reached = found["ended"]
    assert isinstance(reached, dict)
    assert {name: reached[name] for name in ended} == ended
    assert (found["sum"], found["session"]) == ("42\n", "5\n")
    assert (found["named"], found["left"]) == (1, 0)


def test_the_full_tier_is_reached_as_whoever_runs_this() -> None:
    need_bubblewrap()
    if reach_tier()[0] < Tier.FULL:
        pytest.skip(f"not here: {[each for each in reach_tier()[1] if not each.ok]}")
    found = look()
    check(found, "FULL", FULL)
    assert found["refused"] == ""


def test_root_does_not_run_programs_as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can drop a uid")
    need_bubblewrap()
    found = look(python=others_python())
    check(found, "FULL", FULL)
    assert int(str(found["uid"])) > 65535


def test_the_full_tier_is_reached_as_nobody() -> None:
    need_bubblewrap()
    found = look(nobody=True, python=others_python())
    wrong = found["wrong"]
    assert isinstance(wrong, dict)
    if "namespaces" in wrong:
        pytest.skip(f"ordinary users may not make namespaces here: {wrong['namespaces'][0]}")
    check(found, "FULL", FULL)
    assert found["uid"] == f"{NOBODY}\n"


def without_namespaces() -> list[str]:
    """A prefix under which no further user namespace can be made, as in many containers."""
    return [need_bubblewrap(), *"--dev-bind / / --unshare-user --disable-userns --".split()]


def test_without_namespaces_a_lower_tier_is_reached_and_the_full_one_refused() -> None:
    python, prefix = others_python(), without_namespaces()
    if _as_nobody([*prefix, "/bin/true"]).returncode:
        pytest.skip("ordinary users may not make namespaces here at all")
    found = look(prefix, nobody=True, python=python)
    check(found, "PROCESS", PROCESS)
    refused = str(found["refused"])
    assert refused.startswith("programs are not run here: tier FULL is required and PROCESS is")
    assert "namespaces: user: bwrap:" in refused
    assert "allow user namespaces" in refused
    assert "\n" not in refused


def test_root_without_namespaces_and_without_another_uid_is_refused() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    found = look(without_namespaces(), python=others_python())
    assert found["tier"] == "NONE"
    assert "becoming root" in str(found["refused"])


def test_without_bubblewrap_the_refusal_says_how_to_install_it(tmp_path: Path) -> None:
    found = look(python=others_python(), path=str(tmp_path))
    assert found["tier"] == "PROCESS"
    assert "bubblewrap: not installed (apt install bubblewrap" in str(found["refused"])


def test_a_lower_tier_can_be_asked_for_and_is_refused_when_more_is_required() -> None:
    import asyncio

    async def open_it() -> None:
        async with Sandbox(packages=(), at_most=Tier.NONE):
            pass

    with pytest.raises(SandboxError, match="FULL is required and NONE is reached"):
        asyncio.run(open_it())


def test_another_system_is_refused_in_one_line() -> None:
    finding = Finding("system", False, "Darwin", "run coa in Linux: a container with bubblewrap")
    line = refusal(Reach(Tier.NONE, [finding]), Tier.FULL)
    assert "system: Darwin (run coa in Linux: a container with bubblewrap)" in line
    assert "\n" not in line


def test_reaching_stops_at_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of the system's name: there is no other system here to try."""
    from coa.sandbox import tiers

    monkeypatch.setattr(sys, "platform", "darwin")
    found = tiers._reach.__wrapped__(Tier.FULL)
    assert found.tier == Tier.NONE
    assert [(each.layer, each.ok) for each in found.findings] == [("system", False)]
    assert "run coa in Linux" in found.findings[0].fix


def test_tiers_are_ordered() -> None:
    assert Tier.NONE < Tier.PROCESS < Tier.FULL


HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"__NR_(\w+) (\d+)"),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), r"__NR(?:3264)?_(\w+)\s+(\d+)"),
}


@pytest.mark.parametrize("machine", sorted(syscalls.ARCHITECTURES))
def test_the_numbers_of_the_calls_are_the_kernels(machine: str) -> None:
    path, pattern = HEADERS[machine]
    if not path.exists():
        pytest.skip(f"{path} is not installed")
    found = re.findall(rf"^#define {pattern}", path.read_text(), re.M)
    kernel = {name: int(number) for name, number in found}
    kernel.setdefault("newfstatat", kernel.get("fstatat", -1))
    tables = (syscalls.ALLOWED, syscalls.FORKING, syscalls.EXAMINED, syscalls.FATAL)
    ours = {name: n for table in tables for name, n in syscalls.numbers(table, machine).items()}
    wrong = {name: (n, kernel.get(name)) for name, n in ours.items() if kernel.get(name) != n}
    assert not wrong


def test_no_call_is_in_two_tables() -> None:
    tables = (syscalls.ALLOWED, syscalls.FORKING, syscalls.EXAMINED, syscalls.FATAL)
    names = [entry.split(":")[0] for table in tables for entry in table.split()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("machine", sorted(syscalls.ARCHITECTURES))
@pytest.mark.parametrize("forks", [True, False])
def test_the_filter_decides_as_the_tables_say(machine: str, forks: bool) -> None:
    """Run the kernel's program here, step by step, for every call number there could be."""
    confine = pytest.importorskip("coa.sandbox.inside.confine")
    code = confine.filter_code(machine, forks, pid=77)
    allowed = set(syscalls.numbers(syscalls.ALLOWED, machine).values())
    if forks:
        more = f"{syscalls.FORKING} {syscalls.OWN_DISK}"
        allowed |= set(syscalls.numbers(more, machine).values())
    fatal = set(syscalls.numbers(syscalls.FATAL, machine).values())
    examined = syscalls.numbers(syscalls.EXAMINED, machine)
    _, architecture = syscalls.ARCHITECTURES[machine]
    for number in range(600):
        if number in examined.values():
            continue
        verdict = decide(code, number, architecture)
        expected = "pass" if number in allowed else "kill" if number in fatal else "refuse"
        assert verdict == expected, number
    assert decide(code, 0, architecture + 1) == "kill"

    def of(name: str, *arguments: int) -> str:
        return decide(code, examined[name], architecture, arguments)

    assert of("clone3") == "absent"
    assert of("clone", 0x10000) == "pass"
    assert of("clone", 17) == ("pass" if forks else "refuse")
    assert of("clone", 0x10000000 | 17) == of("clone", 0x20000 | 0x10000) == "refuse"
    assert of("socketpair", 1, 1 | 0o2000000) == "pass"
    assert of("socketpair", 1, 2) == of("socketpair", 2, 1) == of("socketpair", 1, 5) == "refuse"
    assert of("mmap", 0, 4096, 3, 0x22) == of("mmap", 0, 4096, 3, 0x01, 5) == "pass"
    assert of("mmap", 0, 4096, 3, 0x21) == of("mmap", 0, 4096, 3, 0x4021) == "refuse"
    assert of("getsockopt", 0, 1, 3) == "pass"
    assert of("getsockopt", 0, 1, 77) == "refuse"  # a handle of the process at the other end
    assert of("ioctl", 0, 0x5401) == "pass"
    assert of("ioctl", 0, 0x5412) == "refuse"  # typing into a terminal
    assert of("fcntl", 0, 1) == "pass"
    assert of("fcntl", 0, 8, 1) == of("fcntl", 0, 15) == "refuse"
    assert of("prlimit64", 0) == "pass"
    assert of("prlimit64", 1) == of("sched_setaffinity", 1) == "refuse"
    assert of("prctl", 15) == "pass"
    assert of("prctl", 22) == "refuse"
    assert of("kill", 77) == of("tgkill", 77) == "pass"
    assert of("kill", 78) == of("tgkill", 1) == ("pass" if forks else "refuse")


VERDICTS = {0x7FFF0000: "pass", 0x00050001: "refuse", 0x00050026: "absent", 0x80000000: "kill"}


def decide(
    code: Sequence[tuple[int, int, int, int]],
    number: int,
    architecture: int,
    arguments: Sequence[int] = (),
) -> str:
    """What the kernel would do: an interpreter of the few instructions that the filter uses."""
    words = [*arguments, *([0] * (6 - len(arguments)))]
    memory = struct.pack("=IIQ6Q", number, architecture, 0, *words)
    at, value = 0, 0
    while True:
        operation, yes, no, operand = code[at]
        at += 1
        if operation == 0x20:
            value = struct.unpack_from("=I", memory, operand)[0]
        elif operation == 0x54:
            value &= operand
        elif operation == 0x06:
            return VERDICTS[operand]
        else:
            holds = {
                0x15: value == operand,
                0x25: value > operand,
                0x35: value >= operand,
                0x45: bool(value & operand),
            }[operation]
            at += yes if holds else no


def test_the_self_test_notices_a_wall_with_a_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that succeeds by design stands for a wall that does not hold."""
    from coa.sandbox import tiers

    if reach_tier()[0] < Tier.FULL:
        pytest.skip("this machine has no full sandbox")
    walls = tiers.reach().walls
    assert walls is not None
    monkeypatch.setitem(tiers.PROBES, "a hole", "print('OPEN', 'sesame')")
    assert tiers._try(walls) == f"{walls.way}: an attack got through: a hole ['sesame']"
