"""The compiled kernels (`SOURCES`), built once by the C compiler and kept in the cache.

torch has no attention that is fast for many short queries over ragged caches on a CPU: at 64
rollouts its own took more time than all matrix products. Without a compiler everything still works,
through torch, and `load_kernels` says why. COA_KERNELS=off asks for that.

The file name holds a hash of source, compiler and processor, because the code is made for this
processor and a home directory may be shared by several machines.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

from coa.engines.store import cache_dir
from coa.machine import cpu_features

SOURCES = ("vectors.c", "attention.c", "rows.c")
LANES, PAGE, PADDING = 16, 256, 64
"""How the compiled kernels lay out the cache; see attention.c."""
_FLAGS = [
    "-O3",
    "-march=native",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-std=gnu11",
    "-fno-strict-aliasing",
    *(f"-D{name}" for name in (f"LANES={LANES}", f"PAGE={PAGE}", f"PADDING={PADDING}")),
]
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


@functools.cache
def load_kernels() -> ctypes.CDLL | str:
    """The library, or in a few words why there is none."""
    if os.environ.get("COA_KERNELS") == "off":
        return "switched off (COA_KERNELS=off)"
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        return "no C compiler (install gcc)"
    import torch  # noqa: F401  # its OpenMP is then in the process, and serves the kernels too

    folder = files("coa.engines")
    source = "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in SOURCES)
    key = "\n".join([source, compiler, *_FLAGS, platform.machine(), cpu_features()])
    path = cache_dir() / "kernels" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    try:
        if not path.is_file():
            _compile(compiler, source, path)
        return _declare(ctypes.CDLL(str(path)))
    except (OSError, subprocess.SubprocessError) as exc:
        said = str(getattr(exc, "stderr", None) or exc).strip().splitlines()
        return f"{compiler} could not build them: {said[0] if said else type(exc).__name__}"


def release_threads() -> None:
    """Let go of this thread's helpers, before another thread computes (see rows.c)."""
    if not isinstance(library := load_kernels(), str):
        library.coa_release_threads()


def _compile(compiler: str, source: str, path: Path) -> None:
    """Build beside and rename: two processes may do this at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *_FLAGS, "-x", "c", "-", "-o", str(made), "-lm"]
        subprocess.run(
            command, input=source, capture_output=True, text=True, check=True, timeout=120
        )
        made.replace(path)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.coa_attend.argtypes = [_POINTER, _POINTER, _INT, *[_POINTER] * 5]
    library.coa_add_norm.argtypes = [*[_POINTER] * 4, _INT, _INT, _FLOAT, _INT]
    library.coa_gate.argtypes = [_POINTER, _POINTER, _INT, _INT, _INT]
    library.coa_draw.argtypes = [_POINTER, _INT, _INT, *[_POINTER] * 4, _INT]
    library.coa_release_threads.argtypes = []
    for name in ("coa_attend", "coa_add_norm", "coa_gate", "coa_draw", "coa_release_threads"):
        getattr(library, name).restype = None
    return library
