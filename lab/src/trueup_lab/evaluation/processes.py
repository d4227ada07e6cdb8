"""One process or many: who does what under torchrun."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed


@dataclass(frozen=True)
class Processes:
    """The place of this process among those that work together."""

    rank: int = 0
    world: int = 1

    def mine(self, number: int) -> bool:
        """Whether the piece of work with this number is for this process."""
        return number % self.world == self.rank

    def any(self, here: bool) -> bool:
        """Whether it is so in any of the processes; all must ask."""
        if self.world == 1:
            return here
        told = [False] * self.world
        distributed.all_gather_object(told, here)
        return any(told)

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            distributed.barrier()


ALONE = Processes()


@contextmanager
def together() -> Iterator[Processes]:
    """Join the processes that torchrun started; alone where it started none."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    distributed.init_process_group("gloo")  # a few objects are exchanged; the work itself is independent
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size())
        distributed.barrier()  # one that leaves while another still talks to it takes both down
    finally:
        distributed.destroy_process_group()
        gc.collect()  # seen without it: now and then a process aborts at exit, all its work done


def own_device(name: str | None = None) -> str:
    """The device for this process: the one asked for, or else its own GPU if there are any, or else the CPU."""
    if name is not None and name != "cuda":
        return name
    if name is None and not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
