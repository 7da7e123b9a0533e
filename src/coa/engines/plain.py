"""Any causal language model through transformers, one row at a time: correct, slow.

It has the methods of `LlamaForward`, so the scheduler does not know the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coa.engines.llama import Chunk
from coa.engines.lora import Adapter
from coa.errors import MissingExtra, ModelError


class PlainForward:
    """A transformers model and one cache per slot."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        slots: int,
        adapter: Adapter | None = None,
    ) -> None:
        self._folder, self._dtype = folder, dtype
        self.slots = slots
        self._caches: list[Any] = [None] * slots
        self.load(adapter)

    def load(self, adapter: Adapter | None) -> None:
        try:
            from transformers import AutoModelForCausalLM
            from transformers.cache_utils import DynamicCache, DynamicLayer
        except ImportError as exc:
            raise MissingExtra(f"Model {str(self._folder)!r}", "train") from exc
        model = AutoModelForCausalLM.from_pretrained(
            self._folder, dtype=torch.float32, local_files_only=True
        ).eval()
        for name, (down, up) in (adapter.pairs if adapter else {}).items():
            try:
                weight = model.get_submodule(name).weight
            except AttributeError as exc:
                raise ModelError(f"The adapter trains {name!r}, which the model lacks.") from exc
            with torch.no_grad():
                assert adapter is not None
                weight += adapter.scale * (up.float() @ down.float())
        if adapter is not None and adapter.whole:
            unknown = model.load_state_dict(adapter.whole, strict=False).unexpected_keys
            if unknown:
                raise ModelError(f"The trained weights have {unknown[0]!r}, which the model lacks.")
        # Weights only: rounded rotary frequencies (buffers) would not be those of training.
        buffers = dict(model.named_buffers())
        model.to(self._dtype)
        for name, buffer in buffers.items():
            place, _, own = name.rpartition(".")
            setattr(model.get_submodule(place), own, buffer)
        self._model, self.vocabulary = model, vocabulary_of(model)
        self._caches = [None] * self.slots
        # Sliding windows and recurrent layers forget: only where all is kept, an end can be cut.
        layers = DynamicCache(config=model.config).layers
        self.can_rewind = all(type(layer) is DynamicLayer for layer in layers)

    def step(self, chunks: list[Chunk]) -> Tensor:
        return torch.cat([self._extend(chunk) for chunk in chunks])

    def _extend(self, chunk: Chunk) -> Tensor:
        from transformers import DynamicCache

        cache = self._caches[chunk.slot]
        if chunk.start == 0 or cache is None:
            cache = self._caches[chunk.slot] = DynamicCache(config=self._model.config)
        elif (beyond := cache.get_seq_length() - chunk.start) > 0:
            cache.crop(-beyond)
        positions = torch.arange(chunk.start, chunk.start + len(chunk.ids))[None]
        output = self._model(
            input_ids=torch.tensor([chunk.ids]),
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=max(chunk.tail, 1),
        )
        logits: Tensor = output.logits[0].float()
        return logits[len(logits) - chunk.tail :]

    def copy(self, source: int, target: int, length: int) -> None:
        import copy

        self._caches[target] = copy.deepcopy(self._caches[source])


def vocabulary_of(model: Any) -> int:
    """How many logits a transformers model gives; not all configurations say it in one place."""
    return int(model.get_output_embeddings().weight.shape[0])
