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

    def __init__(self, folder: Path, dtype: torch.dtype, slots: int, context: int) -> None:
        self._folder, self._dtype = folder, dtype
        self.slots, self.context = slots, context
        self._caches: list[Any] = [None] * slots
        self.load(None)

    def load(self, adapter: Adapter | None) -> None:
        try:
            from transformers import AutoModelForCausalLM
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
        self._model = model.to(self._dtype)
        self._caches = [None] * self.slots

    def prefill(self, chunks: list[Chunk]) -> Tensor:
        return torch.stack([self._extend(c.slot, c.start, c.ids) for c in chunks])

    def decode(self, tokens: list[int], lengths: list[int]) -> Tensor:
        rows = enumerate(zip(tokens, lengths, strict=True))
        return torch.stack([self._extend(slot, length, [token]) for slot, (token, length) in rows])

    def _extend(self, slot: int, start: int, ids: list[int]) -> Tensor:
        from transformers import DynamicCache

        cache = self._caches[slot]
        if start == 0 or cache is None:
            cache = self._caches[slot] = DynamicCache(config=self._model.config)
        elif cache.get_seq_length() > start:
            cache.crop(start)
        positions = torch.arange(start, start + len(ids))[None]
        output = self._model(
            input_ids=torch.tensor([ids]),
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[0, -1].float()
        return logits

    def swap(self, first: int, second: int, length: int) -> None:
        caches = self._caches
        caches[first], caches[second] = caches[second], caches[first]

    def copy(self, source: int, target: int, length: int) -> None:
        import copy

        self._caches[target] = copy.deepcopy(self._caches[source])
