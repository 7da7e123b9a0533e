"""What a program may use, and how a zygote is shut in: its command, and what it is told.

Three ways, from the strongest. `root`: bubblewrap runs as root, so it can show an interpreter from
a folder that others cannot enter, and the zygote then drops to a uid of its own. `user`:
bubblewrap in a user namespace, as an ordinary user (or, where root may not make namespaces but can
change its uid, as a throwaway one). `process`: no namespaces; a program can then start no further
process and write no file, because neither could be cleared away with certainty.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from coa.errors import CoaError, ConfigError

HOME = "/py"
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
"""Not /dev/zero: mapped, it is shared memory that no limit counts."""
INSIDE = Path(__file__).with_name("inside")
_HIDDEN = {"site-packages", "dist-packages", "test", "idlelib", "ensurepip", "turtledemo"}
"""Parts of the standard library's folder that are not shown: others' packages, and bulk."""
_LOOK_S = 120
_LOADER = re.compile(rb"/[\w./-]*/ld-[\w.-]+\.so\.\d+(?=\0)")

_LOOK = """
import contextlib, importlib, io, json, os, sys
stdlib, paths, names = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]
sys.path += [each for each in paths if each not in sys.path]
skip = ("_tkinter", "_test", "_xx", "xx", "_curses", "readline", "_dbm", "_gdbm", "_ctypes_test")
folder = os.path.join(stdlib, "lib-dynload")
for file in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
    name = file.split(".")[0]
    if not name.startswith(skip):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
before, missing = set(sys.modules), []
for name in names:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module(name)
    except Exception as error:
        missing.append([name, f"{type(error).__name__}: {error}"])
loaded = {}
for name in {each.partition(".")[0] for each in set(sys.modules) - before}:
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if path and name not in sys.stdlib_module_names:
        loaded[name] = os.path.dirname(path) if hasattr(module, "__path__") else path
mapped = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/" in line}
json.dump({"loaded": loaded, "missing": missing, "mapped": sorted(mapped)}, sys.stdout)
"""


class SandboxError(CoaError, RuntimeError):
    """Programs cannot be run here, or the sandbox (not a program in it) failed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use."""

    seconds: float = 10.0
    """By the clock."""
    cpu_seconds: int = 10
    """Of each process; a session is limited by the clock alone."""
    memory_mb: int = 1024
    """Of address space in each process, and of memory in all of them together."""
    output_bytes: int = 65536
    """On standard output, and as many on standard error."""
    file_mb: int = 64
    """All files together: they are in memory."""
    processes: int = 16
    """Processes and threads together."""
    open_files: int = 64
    files: int = 4096
    """How many there may be."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            fits = isinstance(value, (int, float) if each.name == "seconds" else int)
            if not fits or isinstance(value, bool) or not value > 0:
                kind = "a number" if each.name == "seconds" else "a whole number"
                raise ConfigError(f"limits.{each.name} is {value!r}, expected {kind} above 0.")


@dataclass(frozen=True)
class Layout:
    """Paths of this machine that a program may read."""

    executable: Path
    loader: str
    """The path of the dynamic loader that the executable names; empty when it needs none."""
    stdlib: Path
    libraries: tuple[tuple[str, Path], ...]
    """(name that is looked for, file)."""
    packages: tuple[tuple[str, Path], ...]
    """(name in the folder of packages, folder or file)."""
    preload: tuple[str, ...]
    missing: tuple[tuple[str, str], ...]
    """(package that was asked for, why it is not there)."""

    def binds(self) -> Iterator[tuple[str, str]]:
        """(path here, path in there), all for reading only."""
        yield str(self.executable), f"{HOME}/bin/python3"
        if self.loader:
            yield str(Path(self.loader).resolve()), self.loader
        yield str(self.stdlib), f"{HOME}/{self.stdlib.parent.name}/{self.stdlib.name}"
        yield from ((str(path), f"{HOME}/so/{name}") for name, path in self.libraries)
        yield from ((str(path), f"{HOME}/site/{name}") for name, path in self.packages)
        yield str(INSIDE), f"{HOME}/box/inside"

    def readable(self) -> list[str]:
        """Paths here that a program reads where it is not given a view of its own."""
        parts = [str(each) for each in sorted(self.stdlib.iterdir()) if each.name not in _HIDDEN]
        others = [path for _, path in (*self.libraries, *self.packages)]
        return [*parts, *map(str, others), str(INSIDE)]


@cache
def find_layout(packages: tuple[str, ...]) -> Layout:
    """Look at what this Python and these packages need (once per process and choice)."""
    stdlib = Path(sysconfig.get_path("stdlib")).resolve()
    paths = json.dumps([path for path in sys.path if path])
    command = [sys.executable, "-I", "-c", _LOOK, str(stdlib), paths, *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LOOK_S)
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise SandboxError(
            f"this Python cannot be looked at: importing {', '.join(packages) or 'its modules'} "
            f"takes longer than {_LOOK_S} s."
        ) from None
    except OSError as error:
        raise SandboxError(f"this Python cannot be looked at: {error}.") from None
    except ValueError:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise SandboxError(f"this Python cannot be looked at: {reason}") from None
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    with executable.open("rb") as file:
        loader = _LOADER.search(file.read(1 << 16))
    bundled = {name: Path(path) for name, path in found["loaded"].items()}
    shown = {path.name: path for path in bundled.values()}
    for path in bundled.values():
        shown.update({libs.name: libs for libs in path.parent.glob(f"{path.stem}.libs")})
    own = [stdlib, executable, *(path.resolve() for path in shown.values())]
    mapped = [Path(path) for path in found["mapped"] if ".so" in Path(path).name]
    outside = [path for path in mapped if not any(path.is_relative_to(each) for each in own)]
    absent = {name for name, _ in found["missing"]}
    return Layout(
        executable,
        loader.group().decode() if loader else "",
        stdlib,
        tuple(sorted(_by_name(outside).items())),
        tuple(sorted(shown.items())),
        tuple(name for name in packages if name not in absent),
        tuple((str(name), str(reason)) for name, reason in found["missing"]),
    )


def _by_name(libraries: list[Path]) -> dict[str, Path]:
    """Each library under its own name and those of the links to it, as programs ask for those."""
    named = {path.name: path for path in libraries}
    for folder in {path.parent for path in libraries}:
        for link in folder.iterdir():
            if ".so" in link.name and link.is_symlink():
                target = link.resolve()
                if target in libraries:
                    named[link.name] = target
    return named


Way = Literal["root", "user", "process"]
Drops = Literal["", "inside", "outside"]
_STACK_MB = 64
_UIDS_TRIED = 1000


@dataclass(frozen=True)
class Walls:
    """One way to shut a zygote in."""

    way: Way
    layout: Layout
    bwrap: str = ""
    drops: Drops = ""
    """Where the uid is dropped: by the zygote, before bubblewrap starts, or not at all."""

    @property
    def alone(self) -> bool:
        """Whether programs have namespaces and a view of their own. Only there may they start
        processes and write files, since both can be cleared away with certainty."""
        return self.way != "process"

    def command(self, limits: Limits) -> list[str]:
        """All but the settings, which come last."""
        folder = f"{HOME}/box" if self.alone else str(INSIDE.parent)
        start = f"import sys; sys.path.insert(0, {folder!r}); from inside.zygote import main; "
        start += "del sys.path[0]; main(sys.argv[1])"
        python = f"{HOME}/bin/python3" if self.alone else str(self.layout.executable)
        zygote = [python, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", start]
        if not self.alone:
            return zygote
        return [self.bwrap, *self._namespaces(), *self._view(limits), "--", *zygote]

    def _namespaces(self) -> list[str]:
        words = "--unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try "
        words += "--die-with-parent --new-session --as-pid-1 --hostname box --cap-drop ALL "
        if self.way == "root":
            # What dropping takes; the zygote then drops these as well.
            words += "--cap-add CAP_SETUID --cap-add CAP_SETGID --cap-add CAP_SETPCAP"
        else:
            words += "--unshare-user --uid 65534 --gid 65534"
        return words.split()

    def _view(self, limits: Limits) -> list[str]:
        """The file system in there: what the layout names, some devices, and a small /tmp."""
        binds = list(self.layout.binds())
        folders = {str(each) for _, target in binds for each in Path(target).parents}
        words: list[str] = []
        for folder in sorted(folders - {"/"}):  # made on the way, they would be for root alone
            words += ["--dir", folder]
        for source, target in binds:
            words += ["--ro-bind", source, target]
        stdlib = self.layout.stdlib
        for name in sorted(_HIDDEN):  # shown empty
            if (stdlib / name).is_dir():
                folder = f"{HOME}/{stdlib.parent.name}/{stdlib.name}/{name}"
                words += ["--tmpfs", folder, "--remount-ro", folder]
        words += ["--tmpfs", "/dev"]
        for device in DEVICES:
            words += ["--dev-bind", device, device]
        # Shared memory has a name in /dev/shm: there it is, counted and cleared like any file.
        words += ["--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev"]
        size = str(limits.file_mb << 20)
        words += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]
        return [*words, "--remount-ro", "/"]

    def environment(self) -> dict[str, str]:
        """All there is; nothing of the host's. One thread for algebra: a fork keeps one only."""
        shown = {
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PATH": f"{HOME}/bin",
            "PYTHONHASHSEED": "0",
            "TZ": "UTC",
        }
        if self.alone:
            shown |= {"LD_LIBRARY_PATH": f"{HOME}/so", "PYTHONHOME": HOME}
        return shown

    def settings(self, limits: Limits, preload: bool) -> dict[str, Any]:
        """What the zygote is told, but for its socket and its uid."""
        layout, alone = self.layout, self.alone
        sites = sorted({str(path.parent) for _, path in layout.packages})
        return {
            "seconds": limits.seconds,
            "files": limits.files,
            "disk": "/tmp" if alone else "",
            "site": [f"{HOME}/site"] if alone else sites,
            # Without a view of its own a program cannot look for a package in its folder.
            "preload": list(layout.preload) if preload or not alone else [],
            "forks": alone,
            # Tasks are counted per uid: where others have it too, theirs have to be added.
            "crowd": 0 if alone or self.drops else limits.processes,
            "confinement": {
                "readable": [HOME] if alone else layout.readable(),
                "listable": [] if alone else [str(layout.stdlib)],
                "writable": ["/tmp"] if alone else [],
                "devices": [each for each in DEVICES if alone or Path(each).exists()],
                "limits": {
                    "AS": limits.memory_mb << 20,
                    "CPU": limits.cpu_seconds,
                    "FSIZE": limits.file_mb << 20,
                    "NOFILE": limits.open_files,
                    "STACK": _STACK_MB << 20,
                    "CORE": 0,
                    "MEMLOCK": 0,
                    "MSGQUEUE": 0,
                    "NPROC": limits.processes + 1,  # the zygote counts too
                },
            },
        }


@cache
def _spare_uids() -> range:
    """The upper half of the largest range of uids that this process may use; empty when none."""
    try:
        lines = Path("/proc/self/uid_map").read_text().split("\n")
        ranges = [tuple(map(int, line.split())) for line in lines if line.strip()]
    except (OSError, ValueError):
        return range(0)
    start, _, count = max(ranges, key=lambda each: each[2], default=(0, 0, 0))
    end = min(start + count, 1 << 31)
    return range(start + (end - start) // 2, end)


def can_drop() -> bool:
    """Whether this process is root with other uids to become."""
    return hasattr(os, "geteuid") and os.geteuid() == 0 and len(_spare_uids()) >= 1024


_in_use: set[int] = set()


def take_uid() -> int:
    """A uid that no other slot of this process has and no account uses.

    The number of processes is limited per uid, over the whole machine: a shared one would let one
    program take the processes of another. It is drawn from a wide range, so that another process
    with a sandbox hardly has the same, and the next slot not the one that was just given back.
    """
    import pwd

    spare = _spare_uids()
    for _ in range(_UIDS_TRIED):
        uid = spare[secrets.randbelow(len(spare))]
        with contextlib.suppress(KeyError):
            pwd.getpwuid(uid)
            continue
        if uid not in _in_use:
            _in_use.add(uid)
            return uid
    raise SandboxError(f"no uid is free for another slot: {len(_in_use)} are in use here.")


def give_back_uid(uid: int) -> None:
    _in_use.discard(uid)
