"""A model with its adapter in its weights: the tensors one by one, and a folder of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import safe_open

from coa.engines.codec import Codec
from coa.engines.llama import MergedTensors
from coa.engines.lora import read_adapter
from coa.engines.shape import read_config
from coa.engines.store import ModelSource, base_hash
from coa.engines.weights import weight_files
from coa.train.folders import write_json, write_model


class Merged:
    """The tensors of a model, merged in float32 and then cast, read one at a time."""

    def __init__(self, source: ModelSource, folder: Path, dtype: str) -> None:
        adapter = None
        if source.adapter is not None:
            adapter = read_adapter(source.adapter, base_hash(folder))
        self.take = MergedTensors(folder, adapter, getattr(torch, dtype))
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


def write_hf(target: Path, folder: Path, merged: Merged) -> None:
    """A folder that plain transformers loads, with settings that end a turn where we end it."""
    write_model(target, folder, {name: merged.take(name) for name in merged.shapes})
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
