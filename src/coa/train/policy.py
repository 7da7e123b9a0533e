"""Policy: the trainable model. A frozen base, LoRA factors by peft, float32 masters.

peft owns the parameters and their file format, so adapters load anywhere; for the Llama family the
computation goes through `LeanLlama`. An adapter folder carries the hash of its base.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coa.engines.codec import Codec
from coa.engines.lora import MANIFEST, Adapter, check_base, pair_up
from coa.engines.shape import read_config, unsupported
from coa.engines.store import base_hash, model_folder, resolve
from coa.engines.weights import sync_folder
from coa.errors import MissingExtra, ModelError
from coa.train.lean import LeanLlama
from coa.train.losses import token_logprobs

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_ADAPTER = "default"


class Policy:
    """A base model with trainable LoRA factors."""

    def __init__(
        self,
        ref: str,
        *,
        rank: int = 16,
        alpha: float | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        max_length: int = 2048,
    ) -> None:
        source = resolve(ref)
        if source.kind != "local":
            raise ModelError(f"{ref!r} cannot be trained: it does not run in this process.")
        self.ref, self.folder = ref, model_folder(source)
        self.base_sha256 = base_hash(self.folder)
        self.codec = Codec.from_folder(self.folder)
        config = read_config(self.folder)
        if source.adapter is not None:
            check_base(source.adapter, self.base_sha256)
            rank, alpha = _rank_and_alpha(source.adapter)
        self.rank, self.alpha = rank, float(2 * rank if alpha is None else alpha)
        self.model = _make_peft_model(self.folder, rank, self.alpha, dtype, seed)
        if source.adapter is not None:
            self._read_parameters(source.adapter)
        self._lean = None
        if unsupported(config) is None:
            self._lean = LeanLlama(self.model, config, _ADAPTER, max_length)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Trainable parameters, always in the same order."""
        return [p for _, p in sorted(self.model.named_parameters()) if p.requires_grad]

    @property
    def trainable(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def refresh(self) -> None:
        """Make the next forward use the parameters' present values."""
        if self._lean is not None:
            self._lean.merge()

    def hidden(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Final hidden states of the rows, concatenated: [sum of lengths, hidden]."""
        if self._lean is not None:
            return self._lean.hidden(rows)
        inner = self.model.get_base_model().model
        states = [inner(torch.tensor([list(row)]), use_cache=False)[0][0] for row in rows]
        return torch.cat(states)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states [n, hidden]; call it on the weighted positions only."""
        if self._lean is not None:
            return self._lean.logits(hidden)
        logits: Tensor = self.model.get_base_model().get_output_embeddings()(hidden)
        return logits

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """float32 log-probability of each target after a hidden state, at a temperature."""
        if self._lean is not None:
            return self._lean.logprobs(hidden, targets, temperature)
        return token_logprobs(self.logits(hidden), targets, temperature)

    def adapter(self) -> Adapter:
        """The present factors, copied, for `LocalEngine.load`."""
        pairs = pair_up({k: v.clone() for k, v in self._tensors().items()})
        return Adapter(self.alpha / self.rank, pairs)

    def _tensors(self) -> dict[str, Tensor]:
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in state.items()}

    def save(self, folder: Path, **manifest: Any) -> None:
        """Write the adapter folder beside and rename it; `manifest` adds to its manifest.json."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as part:
            target = Path(part) / folder.name
            self.write(target, **manifest)
            sync_folder(target)
            replace_folder(target, folder)

    def write(self, folder: Path, **manifest: Any) -> None:
        """Write the adapter's files into a folder of the caller's."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in sorted(self._tensors().items())}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_model.safetensors").chmod(0o644)
        _write_json(folder / "adapter_config.json", _peft_config(self.ref, self.rank, self.alpha))
        record = {"schema": 1, "base": self.ref.partition("+")[0], "base_sha256": self.base_sha256}
        record |= {"rank": self.rank, "alpha": self.alpha, "trainable": self.trainable, **manifest}
        _write_json(folder / MANIFEST, record)

    def _read_parameters(self, folder: Path) -> None:
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        set_peft_model_state_dict(self.model, load_file(folder / "adapter_model.safetensors"))

    def restore(self, folder: Path) -> None:
        """Take the parameters of an adapter folder that fits this policy."""
        check_base(folder, self.base_sha256)
        self._read_parameters(folder)
        self.refresh()


def _make_peft_model(folder: Path, rank: int, alpha: float, dtype: torch.dtype, seed: int) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the folder is local; never wait for a hub
    try:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging
    except ImportError as exc:
        raise MissingExtra("Training", "train") from exc
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # annotated int, any number works
        lora_dropout=0.0,
        target_modules=TARGETS,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config, adapter_name=_ADAPTER)
    return model.eval()


def _peft_config(ref: str, rank: int, alpha: float) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": ref.partition("+")[0].removeprefix("hf:"),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": TARGETS,
    }


def _rank_and_alpha(folder: Path) -> tuple[int, float]:
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    return int(config["r"]), float(config["lora_alpha"])


def _write_json(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def replace_folder(new: Path, target: Path) -> None:
    """Rename `new` to `target`, moving an older target out of the way first."""
    if target.exists():
        old = new.with_name(new.name + ".old")
        target.rename(old)
        new.rename(target)
        shutil.rmtree(old)
    else:
        new.rename(target)
