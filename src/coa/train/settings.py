"""What decides the result of a training run; read from recipes, so it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from coa.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SftSettings:
    """Everything that decides the result of a run."""

    model: str = "smollm2-135m"
    rank: int = 16
    alpha: float | None = None
    """LoRA alpha; None means twice the rank."""
    lr: float = 1e-3
    warmup: float = 0.05
    """Share of the updates in which the learning rate rises; then it falls as a cosine."""
    epochs: int = 1
    batch_size: int = 8
    max_length: int = 2048
    seed: int = 0
    dtype: str = "auto"
    checkpoint_every: int = 20
    deterministic: bool = False
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    err_weight: float = 0.0
    micro_tokens: int = 4096
    """Most tokens computed at once; a larger batch is split, with the same result."""
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("rank", "epochs", "batch_size", "max_length", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"sft.{name}: found {getattr(self, name)}, expected at least 1.")
        if not self.lr > 0:
            raise ConfigError(f"sft.lr: found {self.lr}, expected a positive number.")
