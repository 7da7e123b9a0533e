"""What training changed, as a value: LoRA factors that an engine merges, or whole weights.

It only means something on the weights it was trained on, so its folder has a `manifest.json` with
the hash of that base, and reading it for another base is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coa.errors import ModelError
from coa.models.weights import weight_files

MANIFEST, CONFIG, WEIGHTS = "manifest.json", "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank updates by module name: weight += scale * up @ down; or tensors that replace."""

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


def check_base(folder: Path, base: str) -> None:
    """Refuse an adapter whose manifest names another base."""
    path = folder / MANIFEST
    try:
        wanted = json.loads(path.read_text(encoding="utf-8")).get("base_sha256")
    except (OSError, ValueError) as exc:
        raise ModelError(
            f"{folder}: the adapter has no readable {MANIFEST}, so its base is unknown. "
            "Expected a folder written by coa sft or coa rl."
        ) from exc
    if wanted != base:
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


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a whole model that was trained here, not LoRA factors."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("full") is True


def read_tensors(folder: Path) -> dict[str, Any]:
    """All tensors of a model folder by name."""
    return {
        name: each for path in weight_files(folder) for name, each in load_tensors(path).items()
    }


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
    from safetensors.torch import save_file

    if adapter.whole:
        raise ModelError(
            "All weights were trained, and a running server takes LoRA factors only. Train with "
            "full = false, or start the server on the saved model folder."
        )
    tensors = {}
    for module, (down, up) in adapter.pairs.items():
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = down.contiguous()
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = up.contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    rank = next(iter(adapter.pairs.values()))[0].shape[0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": adapter.scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module in adapter.pairs}),
    }
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def pair_up(tensors: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Group peft's tensor names into (down, up) pairs by module."""
    pairs = {}
    for name, down in tensors.items():
        if ".lora_A." not in name:
            continue
        module = name.removeprefix(_PREFIX).split(".lora_A.")[0]
        pairs[module] = (down, tensors[name.replace(".lora_A.", ".lora_B.")])
    return pairs
