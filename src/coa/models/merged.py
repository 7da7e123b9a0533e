"""A model with its adapter in its weights: the tensors one by one, and a folder of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from coa.engines.codec import Codec
from coa.engines.llama import MergedTensors
from coa.engines.lora import read_adapter
from coa.engines.shape import read_config
from coa.engines.store import ModelSource, base_hash
from coa.engines.weights import weight_files
from coa.errors import ModelError
from coa.train.folders import write_json, write_model

_HALVED = {"float16": 1, "q8_0": 127}
"""Types that keep a value in float16, and what it is divided by: a block of q8_0 keeps a step."""


EXPORT_ADVICE = " Export with --dtype bfloat16 or float32."


def refuse_quantised(folder: Path) -> None:
    """Numbers that mean something with their scales alone can be neither merged nor rounded."""
    quantised = read_config(folder).get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise ModelError(
            f"{folder}: found quantised weights (quantization_config in config.json"
            f"{f', {method!r}' if method else ''}), expected plain ones. "
            "Export the model that it was made from."
        )


class Merged:
    """The tensors of a model, merged in float32, read one at a time."""

    def __init__(self, source: ModelSource, folder: Path) -> None:
        adapter = None
        if source.adapter is not None:
            adapter = read_adapter(source.adapter, base_hash(folder))
        self.take = MergedTensors(folder, adapter, torch.float32)
        self.shapes: dict[str, list[int]] = {}
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                self.shapes |= {name: file.get_slice(name).get_shape() for name in names}
        if read_config(folder).get("tie_word_embeddings"):
            self.shapes.pop("lm_head.weight", None)  # the embedding itself

    def count(self) -> int:
        """Weights in all tensors."""
        return sum(map(math.prod, self.shapes.values()))


def check_range(
    folder: Path, name: str, tensor: Tensor, dtype: str, advice: str = EXPORT_ADVICE
) -> None:
    """A value that is too large for the type it is written in is an error, not an infinity."""
    if dtype not in _HALVED:
        return
    largest = tensor.abs().max()
    if not bool(torch.isfinite((largest / _HALVED[dtype]).to(torch.float16))):
        raise ModelError(
            f"{folder}: {name!r} has the value {float(largest):g}, which {dtype} cannot hold."
            f"{advice}"
        )


def write_hf(target: Path, folder: Path, merged: Merged, dtype: str) -> None:
    """A folder that plain transformers loads, with settings that end a turn where we end it."""
    tensors = {}
    for name in merged.shapes:
        tensor = tensors[name] = merged.take(name)
        if tensor.is_floating_point():
            check_range(folder, name, tensor, dtype)
            tensors[name] = tensor.to(getattr(torch, dtype))
    write_model(target, folder, tensors)
    config = read_config(folder)
    beside = folder / "generation_config.json"
    settings = json.loads(beside.read_text("utf-8")) if beside.is_file() else {}
    settings.pop("_from_model_config", None)  # else transformers would make it anew
    ends = set(Codec.from_folder(folder).end_ids())
    for said in (settings.get("eos_token_id"), config.get("eos_token_id")):
        ends.update(said if isinstance(said, list) else [] if said is None else [said])
    for key in ("bos_token_id", "pad_token_id"):
        if config.get(key) is not None:
            settings.setdefault(key, config[key])
    write_json(target / "generation_config.json", settings | {"eos_token_id": sorted(ends)})
