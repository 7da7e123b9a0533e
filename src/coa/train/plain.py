"""A policy's computation through transformers: any architecture, any device, spread or whole.

`PlainModel` is a module, so that FSDP and DeepSpeed can take it in hand. Rows are packed into one
sequence where that is the same as computing them one by one. Whether it is, is not looked up by
architecture but tried on the model itself when it is loaded: from positions that start again
transformers sees where a row ends, but not every model asks it.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coa.engines.local import choose_dtype
from coa.engines.lora import read_adapter
from coa.engines.plain import vocabulary_of
from coa.errors import ConfigError, MissingExtra, ModelError

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTER = "default"
CHANGED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Settings of architectures that do something to logits after the output layer."""
Note = Callable[[str], None]


def choose_device(device: str) -> torch.device:
    """`auto` is this process's GPU where there is one, else the CPU."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"Found device {device!r}, expected 'auto', 'cpu' or 'cuda'.")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("Found device 'cuda', and torch sees no GPU here. Use 'auto' or 'cpu'.")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def computing_dtype(dtype: str, deterministic: bool) -> torch.dtype:
    """`auto` is bfloat16 on a GPU, and on a CPU what the engine would choose."""
    if dtype == "auto" and not deterministic and torch.cuda.is_available():
        return torch.bfloat16
    return choose_dtype(dtype, deterministic)


def load_causal(folder: Path, dtype: torch.dtype) -> Any:
    """The transformers model of a folder, in evaluation mode: dropout would falsify logprobs."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the folder is local; never wait for a hub
    # With FSDP accelerate has the weights left empty in all processes but the first.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging
    except ImportError as exc:
        raise MissingExtra("Training", "train") from exc
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def load_low_rank(folder: Path, rank: int, alpha: float, dtype: torch.dtype, seed: int) -> Any:
    """A frozen model with new LoRA factors in float32."""
    base = load_causal(folder, dtype)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as exc:
        raise MissingExtra("Training", "train") from exc
    present = {name.rpartition(".")[2] for name, _ in base.named_modules()}
    if missing := [name for name in TARGETS if name not in present]:
        raise ModelError(
            f"{folder}: the model has no modules named {missing[0]!r}, where LoRA factors would "
            "go. Train all its weights instead: full = true."
        )
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # annotated int, any number works
        lora_dropout=0.0,
        target_modules=TARGETS,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # peft asks by a name that transformers 5.23 has deprecated
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return get_peft_model(base, config, adapter_name=ADAPTER).eval()


def load_whole(folder: Path, adapter: Path | None, base_sha256: str) -> Any:
    """A model with all weights trainable, in float32; an adapter is merged first."""
    model = load_causal(folder, torch.float32)
    if adapter is not None:
        found = read_adapter(adapter, base_sha256)
        with torch.no_grad():
            for name, (down, up) in found.pairs.items():
                model.get_submodule(name).weight += found.scale * (up.float() @ down.float())
    return model.requires_grad_(True)


def causal_of(model: Any) -> Any:
    """The transformers model itself, out of peft where it is in it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class PlainModel(torch.nn.Module):
    """Hidden states and log-probabilities of rows, by a transformers model."""

    def __init__(self, model: Any, *, cast: torch.dtype | None, checkpointing: bool) -> None:
        """`cast`: compute in this type while the weights keep theirs."""
        super().__init__()
        self.model = model
        causal = causal_of(model)
        self.config = causal.config  # DeepSpeed asks for it
        self.cast = cast
        self.packs = True
        if checkpointing:
            _enable_checkpointing(causal)
        self.train(False)

    def train(self, mode: bool = True) -> PlainModel:
        """Stay in evaluation mode whoever asks; only what decides on checkpointing is switched."""
        super().train(False)
        for module in self.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True  # not what is in it: its dropout stays off
        return self

    def blocks(self) -> list[torch.nn.Module]:
        """The layers, as transformers names what must not be divided over devices."""
        named = set(getattr(causal_of(self.model), "_no_split_modules", None) or ())
        return [module for module in self.modules() if type(module).__name__ in named]

    def forward(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Final hidden states [tokens, hidden] of `ids`, one row of `lengths` after another."""
        if not self.packs:
            return torch.cat([self._one_sequence(row, [len(row)]) for row in ids.split([*lengths])])
        return self._one_sequence(ids, lengths)

    def _one_sequence(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
        # A cache would hide from transformers that rows are packed, and mix them up.
        arguments = {"position_ids": positions[None], "use_cache": False}
        with self._casting(ids.device):
            states: Tensor = causal_of(self.model).base_model(ids[None], **arguments)[0]
        return states[0].clone()  # FSDP hangs its backward on what is returned: not on a view

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states [n, hidden]."""
        with self._casting(hidden.device):
            logits: Tensor = causal_of(self.model).get_output_embeddings()(hidden)
        return logits

    def _casting(self, device: torch.device) -> Any:
        return torch.autocast(device.type, dtype=self.cast, enabled=self.cast is not None)

    @torch.no_grad()
    def find_out(self, name: str, note: Note) -> None:
        """Try whether rows can be packed, and whether logits are what we take them for."""
        causal = causal_of(self.model)
        device, size = causal.get_output_embeddings().weight.device, vocabulary_of(causal)
        first, other, row = (
            (torch.arange(8, device=device) * step + start) % size
            for step, start in ((1, 1), (5, 3), (3, 2))
        )
        alone = self._one_sequence(row, [8])
        after, after_other = (
            self._one_sequence(torch.cat([before, row]), [8, 8])[8:] for before in (first, other)
        )
        scale = float(alone.abs().max())
        # What stood before must not be felt at all; against the row alone, shapes differ, so
        # rounding does.
        mixed = float((after - after_other).abs().max()) > 1e-3 * scale
        moved = float((after - alone).abs().max()) > 5e-2 * scale
        if mixed or moved:
            self.packs = False
            note(f"{name}: rows cannot be packed for this architecture; computing them one by one")
        with self._casting(device):
            theirs = causal(row[None], use_cache=False).logits[0]
        known = any(getattr(self.config, key, None) not in (None, 1.0) for key in CHANGED_LOGITS)
        if known or float((self.head(alone) - theirs).abs().max()) > 5e-3 * theirs.abs().max():
            raise ModelError(
                f"{name}: its logits are not one product with the output layer (a cap or a scale "
                "comes after it), which training does not support."
            )


def _enable_checkpointing(causal: Any) -> None:
    if not getattr(causal, "supports_gradient_checkpointing", False):
        raise ModelError(
            f"checkpointing: {type(causal).__name__} does not support it; expected false."
        )
    older = "gradient_checkpointing_enable"  # before transformers 5.23
    enable = getattr(causal, "activation_checkpointing_enable", None) or getattr(causal, older)
    enable({"use_reentrant": False})
    # With frozen embeddings nothing that enters the first layer needs a gradient; that is fine
    # without reentrance.
