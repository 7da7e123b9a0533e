"""A value head for PPO: one linear layer on the policy's hidden states, in float32."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from coa.errors import ModelError
from coa.whole_files import open_to_others

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
