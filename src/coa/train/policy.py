"""Policy: the trainable model. A frozen base with LoRA factors, or all weights; float32 masters.

peft or transformers own the parameters and their file format, so what is trained loads anywhere.
On a CPU the Llama family is computed by `LeanLlama`; everything else, and whatever runs on a GPU or
is spread over processes, by `PlainModel`. A folder that is written carries the hash of its base.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coa.engines.local import positions_of
from coa.errors import ModelError, TrainingError
from coa.io.files import open_to_others
from coa.io.progress import say
from coa.models.codec import Codec
from coa.models.references import model_folder, resolve
from coa.models.weights import (
    BASE_FILE,
    CONFIG,
    MANIFEST,
    WEIGHTS,
    Adapter,
    base_hash,
    check_base,
    is_whole,
    load_tensors,
    pair_up,
    rank_and_alpha,
    read_config,
    read_tensors,
    sync_folder,
    unsupported,
    write_json,
)
from coa.train.forward import (
    ADAPTER,
    TARGETS,
    LeanLlama,
    PlainModel,
    causal_of,
    choose_device,
    load_low_rank,
    load_whole,
)
from coa.train.losses import token_logprobs
from coa.train.sharding import MakeOptimizer, Spread, spread_like, spread_wanted

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


class Policy:
    """A model with trainable parameters."""

    def __init__(
        self,
        ref: str,
        *,
        full: bool = False,
        rank: int = 16,
        alpha: float | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        max_length: int = 2048,
        device: str = "auto",
        checkpointing: bool = False,
        keep_reference: bool = False,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """`full` trains all weights, otherwise LoRA factors; `alpha` None is twice the rank.

        `dtype` is that of the computation. `checkpointing` computes activations twice and keeps
        them once; it takes the transformers path. `keep_reference` is for `reference()`.
        """
        source = resolve(ref)
        if source.kind != "local":
            raise ModelError(f"{ref!r} cannot be trained: it does not run in this process.")
        self.ref, self.folder, self.full = ref, model_folder(source), full
        self.base = source.base
        self.base_sha256 = base_hash(self.folder)
        self.codec = Codec.from_folder(self.folder)
        self._device = choose_device(device)
        if source.adapter is not None:
            check_base(source.adapter, self.base_sha256)
            rank, alpha = rank_and_alpha(source.adapter)
        if full:
            self.rank, self.alpha = 0, 0.0
            self.model = load_whole(self.folder, source.adapter, self.base_sha256)
        else:
            self.rank, self.alpha = rank, float(2 * rank if alpha is None else alpha)
            self.model = load_low_rank(self.folder, rank, self.alpha, dtype, seed)
            if source.adapter is not None:
                self._read_parameters(source.adapter)
        if not spread_wanted():  # else the whole of it need not fit where its parts will be
            self.model.to(self._device)
        cast = dtype if full and dtype != torch.float32 else None
        self._plain = PlainModel(self.model, cast=cast, checkpointing=checkpointing)
        self._spread: Spread | None = None
        self.trainable = sum(p.numel() for p in self.parameters)
        self.hidden_size: int = causal_of(self.model).get_output_embeddings().weight.shape[1]
        config = read_config(self.folder)
        self.positions = positions_of(config)
        self._lean: LeanLlama | None = None
        plain = checkpointing or spread_wanted() or self._device.type != "cpu"
        if unsupported(config) is None and not plain:
            lora = None if full else ADAPTER
            self._lean = LeanLlama(causal_of(self.model), config, lora, dtype, max_length)
        else:
            self._plain.find_out(ref, note or say)
        self._reference = [p.detach().clone() for p in self.parameters] if keep_reference else None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Trainable parameters, always in the same order."""
        return [p for _, p in sorted(self.model.named_parameters()) if p.requires_grad]

    @property
    def kind(self) -> str:
        """What is trained, in words."""
        return "all weights" if self.full else f"rank {self.rank}"

    @property
    def device(self) -> torch.device:
        """Where ids, places and weights of a loss belong."""
        return self._device

    def spread(self, make_optimizer: MakeOptimizer, grad_clip: float) -> Spread:
        """Spread the model and an optimiser for it over the processes.

        From here on whatever computes, gathers or writes is done by all processes together.
        """
        assert self._lean is None, "the policy was made before spread weights were asked for"
        names = sorted(name for name, p in self.model.named_parameters() if p.requires_grad)
        self._spread = Spread(self._plain, names, make_optimizer, grad_clip, self._device)
        if self._reference is not None:
            pairs = zip(self._reference, self.parameters, strict=True)
            self._reference = [spread_like(held, parameter) for held, parameter in pairs]
        return self._spread

    def idle(self) -> Tensor:
        """A loss of 0, for a process that has nothing to compute while the others compute."""
        target = torch.zeros(1, dtype=torch.long, device=self._device)
        return self.logprobs(self.hidden([[0]]), target).sum() * 0

    def refresh(self) -> None:
        """Make the next forward use the parameters' present values."""
        if self._lean is not None:
            self._lean.merge()

    def _flat(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        ids = torch.tensor([i for row in rows for i in row], device=self._device)
        return ids, [len(row) for row in rows]

    def hidden(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Final hidden states of the rows, concatenated: [sum of lengths, hidden]."""
        if self._lean is not None:
            return self._lean.hidden(rows)
        model = self._plain if self._spread is None else self._spread.model
        states: Tensor = model(*self._flat(rows))
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states [n, hidden]; call it on the weighted positions only."""
        if self._lean is not None:
            return self._lean.logits(hidden)
        return self._plain.head(hidden)

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """float32 log-probability of each target after a hidden state, at a temperature."""
        if self._lean is not None:
            return self._lean.logprobs(hidden, targets, temperature)
        return token_logprobs(self.logits(hidden), targets, temperature)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Compute with the weights that the run started from, without gradients."""
        if self._reference is None:
            raise TrainingError("The policy keeps no reference; make it with keep_reference=True.")
        self._exchange(self._reference)
        try:
            with torch.no_grad():
                yield
        finally:
            self._exchange(self._reference)

    @torch.no_grad()
    def _exchange(self, others: Sequence[Tensor]) -> None:
        if self._spread is not None:
            self._spread.settle()
        for parameter, other in zip(self.parameters, others, strict=True):
            held = parameter.detach().clone()  # one at a time: two whole models are in memory
            parameter.copy_(other)
            other.copy_(held)
        self.refresh()

    def adapter(self) -> Adapter:
        """The present parameters, copied, for `LocalEngine.load`."""
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self._tensors()}
        if self.full:
            return Adapter(1.0, {}, tensors)
        return Adapter(self.alpha / self.rank, pair_up(tensors))

    @property
    def is_spread(self) -> bool:
        """Whether weights are spread over processes: then all of them gather when one writes."""
        return self._spread is not None

    def gathered(self) -> dict[str, Tensor]:
        """What was trained, whole, for `write`; {} in a process that does not write.

        Where weights are spread it is for all processes together, before anything that can fail in
        one of them alone: a full disk must not leave the others waiting.
        """
        writes = self._spread is None or self._spread.main
        return {name: tensor.cpu() for name, tensor in self._tensors() if writes}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What was trained, by the names in its file; a tied head appears once."""
        if self._spread is not None:
            self._spread.settle()
            named = self._named_in_file()
            yield from zip(named, self._spread.gather([*named.values()]), strict=True)
            return
        if self.full:
            state = dict(self.model.named_parameters())
        else:
            from peft import get_peft_model_state_dict

            state = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        for name, tensor in state.items():
            yield name, tensor.detach()

    def _buffers(self) -> dict[str, Tensor]:
        """What a whole model's file holds beside parameters."""
        kept = self.model.state_dict().keys()
        return {name: b.detach() for name, b in self.model.named_buffers() if name in kept}

    def _named_in_file(self) -> dict[str, torch.nn.Parameter]:
        """Trainable parameters by the names in a file; peft leaves out the adapter's."""
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        return {name.replace(f".{ADAPTER}.", "."): p for name, p in named.items()}

    def save(self, folder: Path, **manifest: Any) -> None:
        """Write the folder beside and rename it; `manifest` adds to its manifest.json."""
        if not (tensors := self.gathered()):
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as part:
            target = Path(part) / folder.name
            self.write(target, tensors, **manifest)
            sync_folder(target)
            replace_folder(target, folder)

    def write(
        self, folder: Path, gathered: dict[str, Tensor] | None = None, **manifest: Any
    ) -> None:
        """Write the files into a folder of the caller's: a peft adapter, or a whole model."""
        held = self.gathered() if gathered is None else gathered
        if not held:
            return
        tensors = {name: tensor.contiguous() for name, tensor in sorted(held.items())}
        folder.mkdir(parents=True, exist_ok=True)
        record = {"schema": 1, "base": self.base, "base_sha256": self.base_sha256}
        if self.full:
            write_model(folder, self.folder, tensors | self._buffers())
            record |= {"full": True}
        else:
            from safetensors.torch import save_file

            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
            open_to_others(folder / WEIGHTS)
            write_json(folder / CONFIG, peft_config(self.base, self.rank, self.alpha))
            record |= {"rank": self.rank, "alpha": self.alpha}
        write_json(folder / MANIFEST, record | {"trainable": self.trainable, **manifest})

    def _read_parameters(self, folder: Path) -> None:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self.model, load_tensors(folder / WEIGHTS))

    def restore(self, folder: Path) -> None:
        """Take the parameters of a folder that fits this policy."""
        check_base(folder, self.base_sha256)
        if is_whole(folder) != self.full:
            held = "all weights" if is_whole(folder) else "LoRA factors"
            raise ModelError(f"{folder}: it holds {held}, and this policy trains {self.kind}.")
        if self._spread is not None or self.full:
            self._read_tensors(folder)
        else:
            self._read_parameters(folder)
        self.refresh()

    @torch.no_grad()
    def _read_tensors(self, folder: Path) -> None:
        held = read_tensors(folder)
        if self._spread is not None:
            self._spread.settle()
        for name, parameter in self._named_in_file().items():
            if name not in held:
                raise ModelError(f"{folder}: its weights have no tensor {name!r}.")
            parameter.copy_(spread_like(held[name], parameter))


def replace_folder(new: Path, target: Path) -> None:
    """Rename `new` to `target`, moving an older target out of the way first."""
    if target.exists():
        old = new.with_name(new.name + ".old")
        target.rename(old)
        new.rename(target)
        shutil.rmtree(old)
    else:
        new.rename(target)


# ------------------------------------------------------------------------------------------------
# A value head for PPO: one linear layer on the policy's hidden states, in float32.
# ------------------------------------------------------------------------------------------------


FILE = "value_head.safetensors"


class ValueHead(torch.nn.Module):
    """What is still to be earned after each token. It begins at 0 everywhere, so the first
    advantages are the rewards themselves rather than noise."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def values(self, hidden: Tensor) -> Tensor:
        """Values [n] of hidden states [n, hidden], float32 whatever their type."""
        return F.linear(hidden.float(), self.weight, self.bias)[:, 0]

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        tensors = {name: tensor.cpu() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / FILE)
        open_to_others(folder / FILE)

    def restore(self, folder: Path) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            self.load_state_dict(load_file(folder / FILE))
        except (OSError, SafetensorError, RuntimeError) as exc:
            reason = " ".join(str(exc).split())
            raise ModelError(
                f"{folder / FILE}: cannot take over the value head ({reason}). Expected one of "
                f"width {self.weight.shape[1]}."
            ) from exc
