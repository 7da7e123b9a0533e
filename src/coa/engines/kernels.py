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
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from coa.io.machine import cpu_features
from coa.models.references import cache_dir
from coa.models.weights import Shape, rotary, rotate

SOURCES = ("vectors.c", "attention.c", "rows.c", "int8.c")
LANES = 16 if "avx512f" in cpu_features().split() else 8
"""Numbers of a vector; see vectors.c."""
PAGE, PADDING = 256, 64
"""How the compiled kernels lay out the cache; see attention.c."""
TILE, GROUP = 32, 64
"""Outputs and inputs that weights of 8 bits are stored by; see int8.c."""
_FLAGS = [
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=gnu11", "-fno-strict-aliasing"),
    *(f"-DLANES={LANES}", f"-DPAGE={PAGE}", f"-DPADDING={PADDING}"),
    *(f"-DTILE={TILE}", f"-DGROUP={GROUP}"),
]
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_ARGUMENTS: dict[str, list[Any]] = {
    "coa_attend": [_POINTER, _POINTER, _INT, *[_POINTER] * 5],
    "coa_add_norm": [*[_POINTER] * 4, _INT, _INT, _FLOAT, _INT],
    "coa_gate": [_POINTER, _POINTER, _INT, _INT, _INT],
    "coa_draw": [_POINTER, _INT, _INT, *[_POINTER] * 4, _INT],
    "coa_pack_int8": [_POINTER, _INT, _INT, _POINTER, _INT],
    "coa_multiply_int8": [_POINTER, _INT, _INT, _POINTER, _INT, _POINTER, _POINTER, _INT],
    "coa_release_threads": [],
}


@functools.cache
def load_kernels() -> ctypes.CDLL | str:
    """The library, or in a few words why there is none."""
    if os.environ.get("COA_KERNELS") == "off":
        return "switched off (COA_KERNELS=off)"
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        return "no C compiler (install gcc)"
    folder = files("coa.engines")
    source = "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in SOURCES)
    key = "\n".join([source, compiler, *_FLAGS, platform.machine(), cpu_features()])
    path = cache_dir() / "kernels" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    try:
        if not path.is_file():
            _compile(compiler, source, path)
        library = ctypes.CDLL(str(path))  # torch is loaded, and its OpenMP serves the kernels too
    except (OSError, subprocess.SubprocessError) as exc:
        said = str(getattr(exc, "stderr", None) or exc).strip().splitlines()
        return f"{compiler} could not build them: {said[0] if said else type(exc).__name__}"
    for name, types in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


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


class KernelRun(NamedTuple):
    """New tokens of one slot: `size` from position `start`; the step's rows from `first`."""

    slot: int
    start: int
    size: int
    first: int


class TorchOps:
    """What `LlamaForward` needs between its products, with torch's own operations.

    Attention runs slot by slot. `CompiledOps` does the same with the kernels. Each lays its cache
    out as its attention reads it: [layers, pages, slots, kv_heads, tokens of a page * width]. The
    cache is asked for whole and takes memory only where something is stored. The first page of
    every slot comes first, so that short rollouts take little and nothing is moved when one grows.

    Runs are ragged: any number of new tokens for any slots, from one token of a rollout that
    decodes to a piece of a long prompt. Tensors have the model's type.
    """

    def __init__(self, shape: Shape, slots: int, context: int, dtype: torch.dtype) -> None:
        self._cos, self._sin = (angle[:, None] for angle in rotary(shape, context, dtype))
        self._allocate(shape, slots, context, dtype, width=shape.head_dim, page=context)

    def _allocate(
        self, shape: Shape, slots: int, context: int, dtype: torch.dtype, width: int, page: int
    ) -> None:
        self._shape, self._page = shape, page
        size = (shape.layers, -(-context // page), slots, shape.kv_heads, page * width)
        self._keys, self._values = lazy_zeros(size, dtype), lazy_zeros(size, dtype)

    def copy(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` tokens of slot `source`."""
        pages, rest = divmod(length, self._page)
        for cache in (self._keys, self._values):
            cache[:, :pages, target] = cache[:, :pages, source]
            if rest:
                part = _round_up(rest, LANES) * cache.shape[4] // self._page
                cache[:, pages, target, :, :part] = cache[:, pages, source, :, :part]

    def begin(self, runs: Sequence[KernelRun]) -> None:
        """Prepare for the step that adds these runs."""
        self._runs = runs
        places = [torch.arange(run.start, run.start + run.size) for run in runs]
        self._positions = torch.cat(places)
        # Which keys each new token sees; None means all, for one token.
        self._masks = [
            None if run.size == 1 else torch.arange(run.start + run.size) <= place[:, None]
            for run, place in zip(runs, places, strict=True)
        ]

    def attend(self, layer: int, qkv: Tensor, norms: tuple[Tensor, Tensor] | None) -> Tensor:
        """Store the new keys and values; [rows, heads * head_dim] of what each token sees."""
        shape, count = self._shape, len(self._positions)
        heads = qkv[:count].view(count, -1, shape.head_dim)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        if norms is not None:
            q = F.rms_norm(q, (shape.head_dim,), norms[0], shape.eps)
            k = F.rms_norm(k, (shape.head_dim,), norms[1], shape.eps)
        cos, sin = self._cos[self._positions], self._sin[self._positions]
        turned = rotate(torch.cat([q, k], dim=1), cos, sin)
        q, k = turned.split([shape.heads, shape.kv_heads], dim=1)
        out = qkv.new_zeros(len(qkv), shape.heads * shape.head_dim)
        for run, mask in zip(self._runs, self._masks, strict=True):
            keys, values = (
                cache[layer][0, run.slot].view(shape.kv_heads, -1, shape.head_dim)
                for cache in (self._keys, self._values)
            )
            rows, end = slice(run.first, run.first + run.size), run.start + run.size
            keys[:, run.start : end] = k[rows].transpose(0, 1)
            values[:, run.start : end] = v[rows].transpose(0, 1)
            mixed = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None],
                keys[None, :, :end],
                values[None, :, :end],
                attn_mask=mask,
                enable_gqa=True,
            )
            out[rows] = mixed[0].transpose(0, 1).reshape(run.size, -1)
        return out

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add delta to x, in place, and give x divided by its size, times weight."""
        if delta is not None:
            x += delta
        return F.rms_norm(x, (x.shape[-1],), weight, self._shape.eps)

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu of the first half of each row, times the second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class _Geometry(ctypes.Structure):
    """`Geometry` of attention.c."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "head_dim", "padded")),
        *((name, ctypes.c_int32) for name in ("slots", "bf16")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "q_norm", "k_norm")),
    ]


class CompiledOps(TorchOps):
    """With the compiled kernels. All widths must be multiples of LANES."""

    def __init__(
        self, library: ctypes.CDLL, shape: Shape, slots: int, context: int, dtype: torch.dtype
    ) -> None:
        self._library, self._bf16 = library, int(dtype == torch.bfloat16)
        self._padded = _round_up(shape.head_dim, PADDING)
        self._allocate(shape, slots, context, dtype, width=self._padded, page=PAGE)
        caches = zip(self._keys, self._values, strict=True)
        self._layers = [(keys.data_ptr(), values.data_ptr()) for keys, values in caches]
        half = shape.head_dim // 2
        both = rotary(shape, context, torch.float32)
        self._cos, self._sin = (angle[:, :half].contiguous() for angle in both)
        self._geometry = _Geometry(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            padded=self._padded,
            slots=slots,
            bf16=self._bf16,
            scale=shape.head_dim**-0.5,
            eps=shape.eps,
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
        )

    def begin(self, runs: Sequence[KernelRun]) -> None:
        self._rows = np.array(runs, dtype=np.int32)

    def attend(self, layer: int, qkv: Tensor, norms: tuple[Tensor, Tensor] | None) -> Tensor:
        shape, rows = self._shape, len(qkv)
        queries = qkv.new_empty(rows, shape.heads * self._padded)
        out = qkv.new_zeros(rows, shape.heads * shape.head_dim)
        geometry = self._geometry
        geometry.q_norm, geometry.k_norm = (n.data_ptr() for n in norms) if norms else (None, None)
        self._library.coa_attend(
            ctypes.addressof(geometry),
            self._rows.ctypes.data,
            len(self._rows),
            qkv.data_ptr(),
            *self._layers[layer],
            queries.data_ptr(),
            out.data_ptr(),
        )
        return out

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._library.coa_add_norm(
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *x.shape,
            self._shape.eps,
            self._bf16,
        )
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self._library.coa_gate(gate_up.data_ptr(), out.data_ptr(), rows, width, self._bf16)
        return out


class Int8Linear:
    """A linear layer for a few rows, by weights of 8 bits; see int8.c.

    The width must be a multiple of LANES. Bias, rows and results have the type of the weight.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None) -> None:
        self._library, self._bias, self._shape = library, bias, weight.shape
        self._bf16 = int(weight.dtype == torch.bfloat16)
        outputs, width = self._shape
        tiles, parts = -(-outputs // TILE), -(-width // GROUP)
        self._packed = lazy_zeros((tiles * parts * TILE * (GROUP // 4 + 1),), torch.float32)
        library.coa_pack_int8(
            weight.contiguous().data_ptr(), outputs, width, self._packed.data_ptr(), self._bf16
        )

    def __call__(self, x: Tensor) -> Tensor:
        x, (outputs, width) = x.contiguous(), self._shape
        out = x.new_empty(len(x), outputs)
        self._library.coa_multiply_int8(
            x.data_ptr(),
            len(x),
            width,
            self._packed.data_ptr(),
            outputs,
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            self._bf16,
        )
        return out


def slot_bytes(shape: Shape, context: int, dtype: torch.dtype) -> int:
    """Memory of the keys and values of one slot when it is full."""
    numbers = 2 * shape.layers * shape.kv_heads * _round_up(shape.head_dim, PADDING)
    return _round_up(context, PAGE) * numbers * dtype.itemsize


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def lazy_zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where something is stored (numpy asks for zeroed pages).

    They must be zeros: a masked key has weight 0, and 0 times a stray NaN is NaN. They begin at a
    multiple of 64 bytes, as the kernels' loads want it.
    """
    width = np.uint16 if dtype == torch.bfloat16 else np.float32
    count = int(np.prod(size))
    flat = np.zeros(count + 64, width)
    skip = -flat.ctypes.data % 64 // flat.itemsize
    return torch.from_numpy(flat[skip : skip + count]).view(dtype).view(size)
