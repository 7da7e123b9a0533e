"""Policy: the trainable model. A frozen base with LoRA factors, or all weights; float32 masters.

peft or transformers own the parameters and their file format, so what is trained loads anywhere.
On a CPU the Llama family is computed by `FastLlama`; everything else, and whatever runs on a GPU or
is sharded over processes, by `PlainModel`. A folder that is written carries the hash of its base.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coa.engines.local import positions_of
from coa.errors import ModelError, TrainingError
from coa.io.files import open_to_others, whole_folder
from coa.io.progress import say
from coa.models.codec import Codec
from coa.models.references import model_folder, resolve
from coa.models.weights import (
    BASE_FILE,
    CONFIG,
    MANIFEST,
    Adapter,
    base_hash,
    check_base,
    is_whole,
    pair_up,
    rank_and_alpha,
    read_config,
    read_tensors,
    unsupported,
    write_factors,
    write_json,
)
from coa.train.forward import (
    ADAPTER,
    TARGETS,
    FastLlama,
    PlainModel,
    causal_of,
    computing_dtype,
    load_low_rank,
    load_whole,
)
from coa.train.losses import token_logprobs
from coa.train.processes import (
    MakeOptimizer,
    ShardedModel,
    sharded_like,
    sharding_wanted,
    whole,
)
from coa.train.settings import RlSettings, SftSettings, TrainingSettings

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
        self._sharded: ShardedModel | None = None
        gpu = torch.cuda.is_available()
        rank_here = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", rank_here) if gpu else torch.device("cpu")
        """Where ids, places and weights of a loss belong."""
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
        if not sharding_wanted():  # else the whole of it need not fit where its parts will be
            self.model.to(self.device)
        cast = dtype if full and dtype != torch.float32 else None
        self._plain = PlainModel(self.model, cast=cast, checkpointing=checkpointing)
        self.trainable = sum(p.numel() for p in self.parameters)
        self.hidden_size: int = causal_of(self.model).get_output_embeddings().weight.shape[1]
        config = read_config(self.folder)
        self.positions = positions_of(config)
        self._fast: FastLlama | None = None
        if unsupported(config) or checkpointing or sharding_wanted() or gpu:
            self._plain.probe(ref, note or say)
        else:
            lora = None if full else ADAPTER
            self._fast = FastLlama(causal_of(self.model), config, lora, dtype, max_length)
        self._reference = [p.detach().clone() for p in self.parameters] if keep_reference else None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Trainable parameters, always in the same order."""
        return [p for _, p in sorted(self.model.named_parameters()) if p.requires_grad]

    @property
    def kind(self) -> str:
        """What is trained, in words."""
        return "all weights" if self.full else f"rank {self.rank}"

    def shard(self, make_optimizer: MakeOptimizer) -> ShardedModel:
        """Shard the model and an optimiser for it over the processes.

        From here on whatever computes, gathers or writes is done by all processes together.
        """
        assert self._fast is None, "the policy was made before sharding was asked for"
        names = sorted(name for name, p in self.model.named_parameters() if p.requires_grad)
        self._sharded = ShardedModel(self._plain, names, make_optimizer, self.device)
        if self._reference is not None:
            pairs = zip(self._reference, self.parameters, strict=True)
            self._reference = [sharded_like(held, parameter) for held, parameter in pairs]
        return self._sharded

    def idle(self) -> Tensor:
        """A loss of 0, for a process that has nothing to compute while the others compute."""
        target = torch.zeros(1, dtype=torch.long, device=self.device)
        return self.logprobs(self.hidden([[0]]), target).sum() * 0

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows that begin alike cost their common beginning once."""
        return self._fast is not None

    def refresh(self) -> None:
        """Make the next forward use the parameters' present values."""
        if self._fast is not None:
            self._fast.merge()

    def hidden(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Final hidden states of the rows, concatenated: [sum of lengths, hidden]."""
        states, own = self.states(rows)
        return states[torch.tensor(own, device=states.device)]

    def states(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Sequence[int]]:
        """Final hidden states [states, hidden], and for each token of the rows, one row after the
        other, which of them is its own. Tokens of a beginning that rows share have one state."""
        if self._fast is not None:
            return self._fast.states(rows)
        ids = torch.tensor([i for row in rows for i in row], device=self.device)
        model = self._plain if self._sharded is None else self._sharded.model
        return model(ids, [len(row) for row in rows]), range(len(ids))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states [n, hidden]; call it on the weighted positions only."""
        if self._fast is not None:
            return self._fast.logits(hidden)
        return self._plain.head(hidden)

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """float32 log-probability of each target after a hidden state, at a temperature."""
        if self._fast is not None:
            return self._fast.logprobs(hidden, targets, temperature)
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
        self._settle()
        for parameter, other in zip(self.parameters, others, strict=True):
            held = parameter.detach().clone()  # one at a time: two whole models are in memory
            parameter.copy_(other)
            other.copy_(held)
        self.refresh()

    def _settle(self) -> None:
        """Put sharded weights back to their places, before they are read or changed."""
        if self._sharded is not None:
            self._sharded.settle()

    def adapter(self) -> Adapter:
        """The present parameters, copied, for `LocalEngine.load`."""
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self._tensors()}
        if self.full:
            return Adapter(1.0, {}, tensors)
        return Adapter(self.alpha / self.rank, pair_up(tensors))

    @property
    def is_sharded(self) -> bool:
        """Whether weights are sharded over processes: then all of them gather when one writes."""
        return self._sharded is not None

    def gathered(self) -> dict[str, Tensor]:
        """What was trained, whole, for `write`; {} in a process that does not write.

        Where weights are sharded it is for all processes together, before anything that can fail
        in one of them alone: a full disk must not leave the others waiting.
        """
        writes = self._sharded is None or self._sharded.main
        return {name: tensor.cpu() for name, tensor in self._tensors() if writes}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What was trained, by the names in its file; a tied head appears once. One after the
        other: all of them, gathered, may not fit on a device."""
        self._settle()
        for name, parameter in self._named_in_file().items():
            yield name, whole(parameter.detach())

    def _named_in_file(self) -> dict[str, torch.nn.Parameter]:
        """Trainable parameters by the names in a file; peft leaves out the adapter's."""
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        return {name.replace(f".{ADAPTER}.", "."): p for name, p in named.items()}

    def save(self, folder: Path, **manifest: Any) -> None:
        """Write the folder beside and rename it; `manifest` adds to its manifest.json."""
        if tensors := self.gathered():
            with whole_folder(folder, replaces=True) as target:
                self.write(target, tensors, **manifest)

    def write(self, folder: Path, gathered: dict[str, Tensor], **manifest: Any) -> None:
        """Write the files into a folder of the caller's: a peft adapter, or a whole model."""
        if not gathered:
            return
        tensors = {name: tensor.contiguous() for name, tensor in sorted(gathered.items())}
        folder.mkdir(parents=True, exist_ok=True)
        record = {"schema": 1, "base": self.base, "base_sha256": self.base_sha256}
        if self.full:
            kept = self.model.state_dict().keys()
            buffers = {n: b.detach() for n, b in self.model.named_buffers() if n in kept}
            write_model(folder, self.folder, tensors | buffers)
            record |= {"full": True}
        else:
            base = self.base.removeprefix("hf:")
            write_factors(folder, tensors, self.rank, self.alpha, TARGETS, base)
            record |= {"rank": self.rank, "alpha": self.alpha}
        write_json(folder / MANIFEST, record | {"trainable": self.trainable, **manifest})

    def restore(self, folder: Path) -> None:
        """Take the parameters of a folder that fits this policy."""
        check_base(folder, self.base_sha256)
        if is_whole(folder) != self.full:
            held = "all weights" if is_whole(folder) else "LoRA factors"
            raise ModelError(f"{folder}: it holds {held}, and this policy trains {self.kind}.")
        self._read_parameters(folder)
        self.refresh()

    @torch.no_grad()
    def _read_parameters(self, folder: Path) -> None:
        held = read_tensors(folder)
        self._settle()
        for name, parameter in self._named_in_file().items():
            if name in held:
                parameter.copy_(sharded_like(held[name], parameter))
            elif self.full:  # somebody else's adapter may be of fewer modules
                raise ModelError(f"{folder}: its weights have no tensor {name!r}.")


def make_policy(
    settings: TrainingSettings,
    context: int = 2048,
    note: Callable[[str], None] | None = None,
) -> Policy:
    """The policy that settings train; `context` is the most tokens of a row of RL. With a
    divergence from its start in the loss, the start is kept, too."""
    return Policy(
        settings.model,
        full=settings.full,
        rank=settings.rank,
        alpha=settings.alpha,
        dtype=computing_dtype(settings.dtype, settings.deterministic),
        seed=settings.seed,
        max_length=settings.max_length if isinstance(settings, SftSettings) else context,
        checkpointing=settings.checkpointing,
        keep_reference=isinstance(settings, RlSettings) and settings.loss.kl > 0,
        note=note,
    )


class ValueHead(torch.nn.Module):
    """What is still to be earned after each token, for PPO: one linear layer on hidden states.

    It begins at 0 everywhere, so the first advantages are the rewards themselves, not noise.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def values(self, hidden: Tensor) -> Tensor:
        """Values [n] of hidden states [n, hidden], float32 whatever their type."""
        return F.linear(hidden.float(), self.weight, self.bias)[:, 0]
