"""What a program sees of this machine: the interpreter, its libraries, and the chosen packages.

Which files these are is found by looking: a child process of the same Python imports the packages
and the standard library's extension modules, and says which shared libraries were mapped and which
top-level packages were loaded. Nothing else is visible in there, under `/py`:

    /py/bin/python3   /py/lib/python3.x   /py/so (libraries)   /py/site (packages)   /py/box (ours)
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from coa.tools.sandbox.limits import SandboxError

HOME = "/py"
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
"""Not /dev/zero: mapped, it is shared memory that no limit counts."""
_INSIDE = Path(__file__).with_name("inside")
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
        yield str(_INSIDE), f"{HOME}/box/inside"

    def masks(self) -> Iterator[str]:
        """Folders in there that are shown empty."""
        root = f"{HOME}/{self.stdlib.parent.name}/{self.stdlib.name}"
        present = sorted(name for name in _HIDDEN if (self.stdlib / name).is_dir())
        yield from (f"{root}/{name}" for name in present)

    def readable(self) -> list[str]:
        """Paths here that a program reads where it is not given a view of its own."""
        parts = [str(each) for each in sorted(self.stdlib.iterdir()) if each.name not in _HIDDEN]
        others = [path for _, path in (*self.libraries, *self.packages)]
        return [*parts, *map(str, others), str(_INSIDE)]

    def sites(self) -> list[str]:
        """Folders here that hold the packages."""
        return sorted({str(path.parent) for _, path in self.packages})


def start_code(home: str = "") -> str:
    """Python that starts the zygote, in there (`home`) or here."""
    folder = f"{home}/box" if home else str(_INSIDE.parent)
    return (
        f"import sys; sys.path.insert(0, {folder!r}); from inside.zygote import main; "
        "del sys.path[0]; main(sys.argv[1])"
    )


def program_file() -> Path:
    """The script that runs a program without walls."""
    return _INSIDE / "program.py"


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
        _loader_of(executable),
        stdlib,
        tuple(sorted(_by_name(outside).items())),
        tuple(sorted(shown.items())),
        tuple(name for name in packages if name not in absent),
        tuple((str(name), str(reason)) for name, reason in found["missing"]),
    )


def _loader_of(executable: Path) -> str:
    with executable.open("rb") as file:
        found = _LOADER.search(file.read(1 << 16))
    return found.group().decode() if found else ""


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
