"""One program run as several processes: each with a share of the work, or of the weights.

Started with `accelerate launch` (or torchrun) every process calls `Processes.open()` and learns its
place; alone there is one. What is decided from gathered values is decided alike by all, so no
process has to tell the others what to do.

Usually every process has the whole model, and the `PolicyOptimizer` adds up gradients. With an FSDP
settings file the weights are sharded (`ShardedModel`): a library owns parameters, gradients and the
optimiser's state, and every forward and backward is a conversation of all processes, which each
must do equally often, in the same order. FSDP is set up here and not by accelerate, which refuses
it on a CPU: what runs on GPUs is what is tested without.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from coa.errors import CoaError, ConfigError, MissingExtra, TrainingError

if TYPE_CHECKING:
    from coa.train.forward import PlainModel

MakeOptimizer = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]

T = TypeVar("T")
PATIENCE = timedelta(days=2)
"""How long one waits for another: its rollouts may take hours. Who has died is noticed at once."""
MESSAGE = 1 << 24
"""Numbers that are added up over processes at once."""


@dataclass(frozen=True, slots=True)
class Processes:
    """This process's place among all."""

    index: int = 0
    count: int = 1

    @classmethod
    def open(cls) -> Processes:
        sharding_wanted()  # refuses DeepSpeed before anything is loaded
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls()
        from accelerate import PartialState

        state = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
        return cls(state.process_index, state.num_processes)

    @property
    def main(self) -> bool:
        """Whether this is the one that writes files and speaks to people."""
        return self.index == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Every count-th item: those that this process works on."""
        return list(items[self.index :: self.count])

    def named(self, name: str) -> str:
        """The name of what this process writes of something that all of them write."""
        return name if self.count == 1 else f"{name}.{self.index}-of-{self.count}"

    def by_main(self, make: Callable[[], T]) -> T | None:
        """What the main process makes, there; what it does not like stops all of them."""
        return self.all_or_none(lambda: make() if self.main else None)

    def all_or_none(self, do: Callable[[], T]) -> T:
        """What each process makes; what one of them does not like stops all of them."""
        made, refused = list[T](), None
        try:
            made.append(do())
        except CoaError as error:
            refused = error
        for found in self.gather(refused):
            if found is not None:
                raise found
        return made[0]

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by index."""
        if self.count == 1:
            return [value]
        held: list[T] = [value] * self.count
        with _all_there():
            torch.distributed.all_gather_object(held, value)
        return held

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in messages of a moderate size."""
        if self.count == 1:
            return
        for some in _messages(tensors):
            flat = torch.cat([tensor.detach().flatten().float() for tensor in some])
            with _all_there():
                torch.distributed.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in some])
            for tensor, part in zip(some, parts, strict=True):
                tensor.detach().copy_(part.view_as(tensor))

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            with _all_there():
                torch.distributed.barrier()


def sharding_wanted() -> bool:
    """Whether `accelerate launch` was told to shard weights; DeepSpeed is refused."""

    def asked_for(name: str) -> bool:
        return os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("1", "true", "yes")

    if asked_for("DEEPSPEED"):
        raise ConfigError(
            "accelerate: found DeepSpeed, expected FSDP or none. coa does not train under "
            "DeepSpeed; launch with recipes/accelerate/fsdp.yaml."
        )
    return asked_for("FSDP")


def _messages(tensors: Sequence[Tensor], most: int = MESSAGE) -> Iterator[list[Tensor]]:
    """Tensors in their order, in parts of about `most` numbers: a sum is computed on a copy, and
    one of all gradients at once would be another model in memory."""
    some, size = list[Tensor](), 0
    for tensor in tensors:
        some.append(tensor)
        size += tensor.numel()
        if size >= most:
            yield some
            some, size = [], 0
    if some:
        yield some


@contextmanager
def _all_there() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TrainingError(
            "Another process of this run has ended, so this one ends, too. What was wrong is in "
            "the other's output; then give the same command again."
        ) from error


class ShardedModel:
    """A model and its optimiser, sharded over processes by FSDP. All of them call all of this.

    Every tensor is divided; a block of layers is together while it computes.
    """

    def __init__(
        self,
        plain: PlainModel,
        parameters: Sequence[str],
        make: MakeOptimizer,
        device: torch.device,
    ) -> None:
        """`parameters` names those to train, in their order."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        settings = _fsdp_settings(plain.cast)
        self.main = torch.distributed.get_rank() == 0  # it writes files
        settings["mesh"] = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        plain.cast = None  # the library casts whole groups at once
        for block in plain.blocks():
            fully_shard(block, **settings)
        # The outermost group, with embeddings and output layer, stays together after a forward.
        self.model: Any = fully_shard(plain, **(settings | {"reshard_after_forward": False}))
        named = dict(plain.model.named_parameters())
        self.optimizer = make([named[name] for name in parameters])

    def settle(self) -> None:
        """Put what a forward has gathered back to its place; before reading or changing weights."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's state, whole; elsewhere than in the main process nothing is kept."""
        state: dict[str, Any] = self.optimizer.state_dict()
        held: dict[int, dict[str, Tensor]] = {}
        for key, each in state["state"].items():
            for name, value in each.items():
                together = whole(value)
                if self.main:
                    held.setdefault(key, {})[name] = together.detach().cpu()
        return {**state, "state": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        held = {
            key: {
                name: sharded_like(value, order[key]) if value.shape == order[key].shape else value
                for name, value in each.items()
            }
            for key, each in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": held})


def _fsdp_settings(cast: torch.dtype | None) -> dict[str, Any]:
    """What `accelerate launch` passed on of its settings file, as torch takes it."""
    try:
        from accelerate.utils import FullyShardedDataParallelPlugin
    except ImportError as exc:
        raise MissingExtra("Training in several processes", "train") from exc
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":  # other settings differ by it
        raise ConfigError(
            f"accelerate: found fsdp_version {version}, expected 2. Set it in fsdp_config of the "
            "settings file."
        )
    plugin = FullyShardedDataParallelPlugin()
    # Gradients are added up in float32: a sum over many processes in bfloat16 loses small ones.
    casting = MixedPrecisionPolicy(cast, torch.float32) if cast else MixedPrecisionPolicy()
    return {
        "reshard_after_forward": bool(plugin.reshard_after_forward),
        "offload_policy": plugin.cpu_offload or OffloadPolicy(),
        "mp_policy": casting,
    }


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is divided over processes, together again; others as they are."""
    full = getattr(tensor, "full_tensor", None)
    found: Tensor = tensor if full is None else full()
    return found


def sharded_like(values: Tensor, like: Tensor) -> Tensor:
    """Whole values, divided as another tensor is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return values.to(like.device)
    return distribute_tensor(values.to(like.device), like.device_mesh, like.placements)
