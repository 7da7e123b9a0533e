"""Files of what was trained: a peft adapter's settings, or a complete model folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from coa.engines.lora import CONFIG, MANIFEST
from coa.engines.shape import read_config
from coa.engines.weights import BASE_FILE
from coa.train.plain import TARGETS
from coa.whole_files import open_to_others

SHARD = "5GB"
_KEPT = (".json", ".jinja", ".txt", ".model")
_LEFT_OUT = (MANIFEST, BASE_FILE, CONFIG, "config.json")


def write_model(folder: Path, base: Path, tensors: dict[str, Tensor]) -> None:
    """Write weights with the configuration and the tokenizer of the base they came from."""
    from huggingface_hub import save_torch_state_dict

    for path in sorted(base.iterdir()):
        index = path.name.endswith(".index.json")
        if path.suffix in _KEPT and path.name not in _LEFT_OUT and not index and path.is_file():
            shutil.copyfile(path, folder / path.name)
    config = read_config(base)
    # Older files call it torch_dtype; a reader that finds both would have to choose.
    config.pop("torch_dtype", None)
    weights = (tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    config["dtype"] = str(next(weights)).removeprefix("torch.")
    write_json(folder / "config.json", config)
    save_torch_state_dict(tensors, folder, max_shard_size=SHARD)
    for path in folder.glob("*.safetensors"):
        open_to_others(path)


def peft_config(base: str, rank: int, alpha: float) -> dict[str, Any]:
    """The adapter_config.json of LoRA factors on the model `base`, a reference."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.removeprefix("hf:"),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": TARGETS,
    }


def write_json(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
