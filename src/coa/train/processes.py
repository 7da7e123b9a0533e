"""Processes: one program run as several, each with a share of the work.

Started with `accelerate launch` (or torchrun) every process calls `Processes.open()` and learns its
place; alone there is one. What is decided from gathered values is decided alike by all, so no
process has to tell the others what to do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor

from coa.errors import CoaError, ConfigError, TrainingError

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
        refuse_deepspeed()
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


def asked_for(name: str) -> bool:
    """Whether `accelerate launch` was told to spread weights by this library."""
    return os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("1", "true", "yes")


def refuse_deepspeed() -> None:
    if asked_for("DEEPSPEED"):
        raise ConfigError(
            "accelerate: found DeepSpeed, expected FSDP or none. coa does not train under "
            "DeepSpeed; launch with recipes/accelerate/fsdp.yaml."
        )


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
