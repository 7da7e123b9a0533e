"""Model folders: their configuration, the hash of their weights, and adapters trained on them.

An adapter only means something on the weights it was trained on, so its folder has a
`manifest.json` with the hash of that base, and reading it for another base is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coa.errors import ModelError
from coa.io.files import open_to_others
from coa.io.runs import Json, write_atomic

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MANIFEST, CONFIG, WEIGHTS = "manifest.json", "adapter_config.json", "adapter_model.safetensors"
BASE_FILE = "coa-base.json"
FAMILY = ("llama", "qwen2", "qwen3", "mistral")
_CHUNK = 1 << 24
_PREFIX = "base_model.model."
_HALVED = {"float16": 1, "q8_0": 127}
"""Types that keep a value in float16, and what it is divided by: a block of q8_0 keeps a step."""
_LARGEST_HALF = 65520
"""The smallest number that float16 rounds to infinity."""


def read_json(path: Path, expected: str = "a model folder") -> Json:
    """The JSON object in a file; what is wrong with it is one line that says what was expected."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or "not JSON"
        raise ModelError(f"{path}: cannot read it ({reason}). Expected {expected}.") from exc
    if not isinstance(found, dict):
        raise ModelError(f"{path}: found a {type(found).__name__}. Expected {expected}.")
    return found


def read_config(folder: Path) -> Json:
    return read_json(folder / "config.json")


def token_text(value: Any) -> str:
    """A token is written as a string or as {"content": ...}; empty where there is none."""
    return str(value["content"]) if isinstance(value, dict) else str(value or "")


def template_text(folder: Path, config: Json) -> str:
    """The chat template of a model folder, of several the default one; empty where it has none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return str(template or "")


def read_manifest(folder: Path) -> Json:
    """The manifest of a folder that was trained here; {} where there is none that can be read."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(path: Path, record: Json) -> None:
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# -- the hash of a base ----------------------------------------------------------------------


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in name order."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: found no *.safetensors, expected a model folder.")
    return files


def base_hash(folder: Path) -> str:
    """sha256 over names, types, shapes and bytes of all tensors, however they are split in files.

    The answer is remembered in `coa-base.json` beside the weights when the folder is writable, and
    taken from there as long as sizes and times of the files are unchanged.
    """
    files = weight_files(folder)
    stamp = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    memory = folder / BASE_FILE
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(memory.read_text(encoding="utf-8"))
        if known["stamp"] == stamp:
            return str(known["sha256"])
    digest = hashlib.sha256()
    for name, dtype, shape, start, end, path in sorted(t for f in files for t in _tensors(f)):
        digest.update(json.dumps([name, dtype, shape]).encode())
        with path.open("rb") as file:
            file.seek(start)
            left = end - start
            while left and (block := file.read(min(_CHUNK, left))):
                digest.update(block)
                left -= len(block)
        if left:
            raise ModelError(f"{path}: cut short inside {name!r}. Fetch it again.")
    with contextlib.suppress(OSError):  # a read-only model folder is hashed each time
        write_atomic(memory, json.dumps({"sha256": digest.hexdigest(), "stamp": stamp}) + "\n")
    return digest.hexdigest()


def _tensors(path: Path) -> list[tuple[str, str, list[int], int, int, Path]]:
    """(name, dtype, shape, first byte, last byte, path) of each tensor, by its file's header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size < path.stat().st_size:
            raise ModelError(f"{path}: not a safetensors file, or cut short. Fetch it again.")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        start, end = (8 + size + offset for offset in entry["data_offsets"])
        found.append((name, entry["dtype"], entry["shape"], start, end, path))
    return found


# -- the configuration of a model ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a Llama-family model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    eps: float
    theta: float

    @classmethod
    def read(cls, config: Json) -> Shape:
        rope = config.get("rope_parameters") or {}
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            context=config["max_position_embeddings"],
            eps=config["rms_norm_eps"],
            theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        )


def unsupported(config: Json) -> str | None:
    """Why our forward cannot run a model, or None when it can."""
    if config.get("model_type") not in FAMILY:
        return f"architecture {config.get('model_type')!r}"
    if config.get("quantization_config"):
        return "quantised weights"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        return f"rotary scaling {kind!r}"
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and window < config["max_position_embeddings"]:
        return "sliding-window attention"
    if config.get("hidden_act", "silu") != "silu":
        return f"activation {config['hidden_act']!r}"
    return None


def rotary(shape: Shape, context: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, both halves alike: [context, head_dim]."""
    import torch

    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(context, dtype=torch.float32), shape.theta**-half)
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    import torch

    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def check_range(folder: Path, name: str, tensor: Tensor, dtype: str) -> None:
    """A value that is too large for the type it is written in is an error, not an infinity."""
    if dtype not in _HALVED:
        return
    largest = float(tensor.abs().max())
    if not largest / _HALVED[dtype] < _LARGEST_HALF:  # also where it is not a number
        raise ModelError(
            f"{folder}: {name!r} has the value {largest:g}, which {dtype} cannot hold. "
            "Export with --dtype bfloat16 or float32."
        )


# -- adapters --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Adapter:
    """What training changed: low-rank updates by module, or tensors that replace those of the base.

    A module's weight becomes weight + scale * up @ down.
    """

    scale: float
    pairs: dict[str, tuple[Any, Any]]
    """Module name (as in the base's state dict, without `.weight`) to (down, up) tensors."""
    whole: dict[str, Any] = field(default_factory=dict)
    """Tensor name (as in the base's state dict) to what replaces it, where all weights were
    trained; empty for LoRA."""


def adapter_hash(folder: Path) -> str:
    """sha256 of an adapter's weights file: two adapters are the same exactly if this is."""
    try:
        with (folder / WEIGHTS).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise ModelError(f"{folder}: cannot read {WEIGHTS} ({exc.strerror}).") from exc


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a whole model that was trained here, not LoRA factors."""
    return read_manifest(folder).get("full") is True


def check_base(folder: Path, base: str) -> None:
    """Refuse an adapter whose manifest names another base."""
    manifest = read_manifest(folder)
    if not manifest:
        raise ModelError(
            f"{folder}: the adapter has no readable {MANIFEST}, so its base is unknown. "
            "Expected a folder written by coa sft or coa rl."
        )
    if (wanted := manifest.get("base_sha256")) != base:
        raise ModelError(
            f"{folder}: the adapter was trained on a base with hash {str(wanted)[:12]!r}, "
            f"this base has {base[:12]!r}. Load it with the base it was trained on."
        )


def read_adapter(folder: Path, base: str) -> Adapter:
    """Read a peft LoRA folder, or one of whole weights, for the base with hash `base`."""
    if is_whole(folder):
        check_base(folder, base)
        return Adapter(1.0, {}, read_tensors(folder))
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder}: not an adapter folder (it has no {CONFIG}).")
    check_base(folder, base)
    rank, alpha = rank_and_alpha(folder)
    return Adapter(alpha / rank, pair_up(load_tensors(folder / WEIGHTS)))


def rank_and_alpha(folder: Path) -> tuple[int, float]:
    """Of LoRA factors whose scale is alpha over rank, also where their file counts otherwise."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ModelError(
            f"{path}: cannot read it ({type(exc).__name__}: {exc}). Expected a peft adapter's "
            "settings, with r and lora_alpha."
        ) from exc
    for key in ("alpha_pattern", "rank_pattern", "modules_to_save", "use_dora"):
        if config.get(key):
            raise ModelError(f"{path}: {key} is set, which is not supported.")
    return rank, alpha * math.sqrt(rank) if config.get("use_rslora") else alpha


def read_tensors(folder: Path) -> dict[str, Any]:
    """All tensors of a model folder by name."""
    return {name: t for path in weight_files(folder) for name, t in load_tensors(path).items()}


def load_tensors(path: Path) -> dict[str, Any]:
    """The tensors of one file by name."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as exc:
        raise ModelError(f"{path}: cannot read the weights ({exc}).") from exc


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """Write an adapter's factors as a folder that peft, and so a server, can read."""
    if adapter.whole:
        raise ModelError(
            "All weights were trained, and a running server takes LoRA factors only. Train with "
            "full = false, or start the server on the saved model folder."
        )
    tensors = {}
    for module, (down, up) in adapter.pairs.items():
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = down.contiguous()
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = up.contiguous()
    rank = next(iter(adapter.pairs.values()))[0].shape[0]
    modules = sorted({module.rpartition(".")[2] for module in adapter.pairs})
    write_factors(folder, tensors, rank, adapter.scale * rank, modules)


def write_factors(
    folder: Path,
    tensors: dict[str, Any],
    rank: int,
    alpha: float,
    modules: Sequence[str],
    base: str = "",
) -> None:
    """Write LoRA factors by peft's names, with the settings that peft reads."""
    from safetensors.torch import save_file

    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    open_to_others(folder / WEIGHTS)
    config: Json = {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
    config |= {"base_model_name_or_path": base} if base else {}
    config |= {"r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none"}
    write_json(folder / CONFIG, config | {"target_modules": modules})


def pair_up(tensors: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Group peft's tensor names into (down, up) pairs by module."""
    return {
        name.removeprefix(_PREFIX).split(".lora_A.")[0]: (
            down,
            tensors[name.replace(".lora_A.", ".lora_B.")],
        )
        for name, down in tensors.items()
        if ".lora_A." in name
    }
