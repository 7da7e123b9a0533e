"""Weights, gradients and optimiser state divided by DeepSpeed's ZeRO, stages 1 to 3.

DeepSpeed keeps the weights that it trains in flat pieces of its own, so what this cannot do is to
put other weights in: there is no reference model, and a run cannot be continued.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from coa.errors import MissingExtra, TrainingError
from coa.train.plain import PlainModel
from coa.train.spread import MakeOptimizer


class ZeroSpread:
    """A model and its optimiser in a DeepSpeed engine."""

    def __init__(
        self, plain: PlainModel, parameters: Sequence[str], make: MakeOptimizer, grad_clip: float
    ) -> None:
        try:
            import deepspeed
            from accelerate.utils import DeepSpeedPlugin
        except ImportError as exc:
            raise MissingExtra("Training under DeepSpeed", "train") from exc
        self._library: Any = deepspeed
        self.count = torch.distributed.get_world_size()
        self.main = torch.distributed.get_rank() == 0
        named = dict(plain.model.named_parameters())
        config = _settings(DeepSpeedPlugin().deepspeed_config, grad_clip)
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=plain, optimizer=make([named[name] for name in parameters]), config=config
        )

    def backward(self, loss: Tensor, last: bool) -> None:
        self.model.set_gradient_accumulation_boundary(last)
        self.model.backward(loss * self.count)

    def clip(self) -> float:
        return 0.0  # a part of the step

    def step(self, norm: float) -> float:
        self.model.step()
        return float(self.model.get_global_grad_norm())

    def settle(self, changes_weights: bool = False) -> None:
        if changes_weights:
            raise TrainingError(
                "Under DeepSpeed weights cannot be replaced: there is no reference model, and a "
                "run cannot be continued. Use FSDP; or set loss.kl = 0, and start in a new "
                "directory."
            )

    def gather(self, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
        for parameter in parameters:
            with self._library.zero.GatheredParameters([parameter]):
                together = parameter.detach().clone()
            yield together

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.settle(changes_weights=True)


def _settings(given: dict[str, Any], grad_clip: float) -> dict[str, Any]:
    """The settings file's, except for what is decided here: clipping, types, when a step is taken.

    Weights stay float32 and the model computes in its own type, as without DeepSpeed.
    """
    kept = {name: value for name, value in given.items() if value != "auto"}
    return kept | {
        "gradient_clipping": grad_clip,
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
