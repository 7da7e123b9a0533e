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

from coa.errors import CoaError, TrainingError

T = TypeVar("T")
PATIENCE = timedelta(days=2)
"""How long one waits for another: its rollouts may take hours. Who has died is noticed at once."""


@dataclass(frozen=True, slots=True)
class Processes:
    """This process's place among all."""

    index: int = 0
    count: int = 1

    @classmethod
    def open(cls) -> Processes:
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
        made, refused = None, None
        if self.main:
            try:
                made = make()
            except CoaError as error:
                refused = error
        if (first := self.gather(refused)[0]) is not None:
            raise first
        return made

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by index."""
        if self.count == 1:
            return [value]
        held: list[T] = [value] * self.count
        with _all_there():
            torch.distributed.all_gather_object(held, value)
        return held

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes; one message for all of them."""
        if self.count == 1 or not tensors:
            return
        flat = torch.cat([tensor.detach().flatten().float() for tensor in tensors])
        with _all_there():
            torch.distributed.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            with _all_there():
                torch.distributed.barrier()


@contextmanager
def _all_there() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TrainingError(
            "Another process of this run has ended, so this one ends, too. What was wrong is in "
            "the other's output; then give the same command again."
        ) from error
