"""Weights spread over processes, by FSDP (torch's `fully_shard`).

Without this every process has the whole model, and the `Learner` adds up gradients itself. Here a
library owns parameters, gradients and the optimiser's state, and every forward and backward is a
conversation of all processes: each must do the same number of them, in the same order.

`accelerate launch` with an FSDP settings file asks for it. FSDP is set up here and not by
accelerate, which refuses it on a CPU: what runs on GPUs is what is tested without. It takes the
mean of gradients over processes; losses here are parts of a sum, so they are multiplied by the
number of processes first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from coa.errors import ConfigError, MissingExtra
from coa.train.forward import PlainModel
from coa.train.processes import asked_for, refuse_deepspeed

MakeOptimizer = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


def spread_wanted() -> bool:
    """Whether this program was started to spread weights."""
    refuse_deepspeed()
    return asked_for("FSDP")


class Spread:
    """A model and its optimiser, spread over processes. All of them call all of this.

    Every tensor is divided; a block of layers is together while it computes.
    """

    def __init__(
        self,
        plain: PlainModel,
        parameters: Sequence[str],
        make: MakeOptimizer,
        grad_clip: float,
        device: torch.device,
    ) -> None:
        """`parameters` names those to train, in their order."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        settings = _fsdp_settings(plain.cast)
        self.count, self._grad_clip = torch.distributed.get_world_size(), grad_clip
        self.main = torch.distributed.get_rank() == 0  # it writes files
        settings["mesh"] = init_device_mesh(device.type, (self.count,))
        plain.cast = None  # the library casts whole groups at once
        for block in plain.blocks():
            fully_shard(block, **settings)
        # The outermost group, with embeddings and output layer, stays together after a forward.
        self.model: Any = fully_shard(plain, **(settings | {"reshard_after_forward": False}))
        named = dict(plain.model.named_parameters())
        self.optimizer = make([named[name] for name in parameters])

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a part."""
        (loss * self.count).backward()

    def clip(self) -> float:
        """Clip the gradient; its norm before."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return float(whole(torch.nn.utils.clip_grad_norm_(parameters, self._grad_clip)))

    def settle(self) -> None:
        """Put what a forward has gathered back to its place; before reading or changing weights."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def gather(self, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
        """Whole tensors, detached, one after the other: all of them may not fit on a device."""
        return (whole(parameter.detach()) for parameter in parameters)

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
                name: spread_like(value, order[key]) if value.shape == order[key].shape else value
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


def spread_like(values: Tensor, like: Tensor) -> Tensor:
    """Whole values, divided as another tensor is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return values.to(like.device)
    return distribute_tensor(values.to(like.device), like.device_mesh, like.placements)
