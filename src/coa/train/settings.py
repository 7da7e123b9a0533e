"""What decides the result of a training run; read from recipes, so it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coa.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine"]
"""How the learning rate goes on after its rise: stays, or falls to 0."""
Layout = Literal["bucket", "pack"]
"""How rows are put together: by similar length, or into packs of equal size."""


@dataclass(frozen=True, slots=True)
class SftSettings:
    """Everything that decides the result of a run."""

    model: str = "smollm2-135m"
    full: bool = False
    """Train all weights instead of an adapter."""
    rank: int = 16
    alpha: float | None = None
    """LoRA alpha; None means twice the rank."""
    lr: float = 1e-3
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    """Share of the updates in which the learning rate rises; then it follows the schedule."""
    epochs: int = 1
    layout: Layout = "bucket"
    batch_size: int = 8
    """Rows of an update, or packs."""
    max_length: int = 2048
    """Most tokens of a row; a longer one loses whole segments from its end."""
    pack_tokens: int | None = None
    """Most tokens of a pack; None means max_length."""
    skip_too_long: bool = False
    """Leave out, and count, trajectories of which nothing to train fits; else they are an error."""
    seed: int = 0
    dtype: str = "auto"
    checkpoint_every: int = 20
    deterministic: bool = False
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    err_weight: float = 0.0
    observation_weight: float = 0.0
    """Of what tools answered. Above 0 the model learns to write it itself: docs/evidence.md."""
    micro_tokens: int = 4096
    """Most tokens computed at once; a larger batch is split, with the same result. A pack is not
    split: it is what is computed at once."""
    checkpointing: bool = False
    """Compute activations twice instead of keeping them: less memory, more time."""
    threads: int | None = None

    def __post_init__(self) -> None:
        ones = ("rank", "epochs", "batch_size", "max_length", "checkpoint_every", "micro_tokens")
        for name in ones:
            if getattr(self, name) < 1:
                raise ConfigError(f"sft.{name}: found {getattr(self, name)}, expected at least 1.")
        for name in ("lr", "grad_clip", "alpha", "threads"):
            if (given := getattr(self, name)) is not None and not given > 0:
                raise ConfigError(f"sft.{name}: found {given}, expected more than 0.")
        if not self.weight_decay >= 0:
            raise ConfigError(f"sft.weight_decay: found {self.weight_decay}, expected 0 or more.")
        for name in ("warmup", "err_weight", "observation_weight"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise ConfigError(f"sft.{name}: found {share}, expected between 0 and 1.")
        if self.pack_tokens is not None and self.pack_tokens < self.max_length:
            raise ConfigError(
                f"sft.pack_tokens: found {self.pack_tokens}, expected at least max_length "
                f"{self.max_length}: a row must fit into a pack."
            )

    @property
    def pack_limit(self) -> int:
        """Most tokens of a pack."""
        return self.pack_tokens or self.max_length
