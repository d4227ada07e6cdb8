"""Share work among the processes that torchrun starts, or do it all in a single process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import distributed

from trueup_lab.devices import find_device


@dataclass(frozen=True)
class Processes:
    """The rank of this process and the number of processes that work together."""

    rank: int = 0
    world: int = 1

    def mine(self, number: int) -> bool:
        """Return whether this process does the piece of work with this number."""
        return number % self.world == self.rank

    def any(self, here: bool) -> bool:
        """Return whether `here` is true in any process. All processes must call this."""
        if self.world == 1:
            return here
        told = [False] * self.world
        distributed.all_gather_object(told, here)
        return any(told)

    def wait(self) -> None:
        """Wait for all processes."""
        if self.world > 1:
            distributed.barrier()


ALONE = Processes()


@contextmanager
def together(backend: str = "gloo") -> Iterator[Processes]:
    """Join the processes that torchrun started; yield `ALONE` without torchrun.

    `gloo` is enough to exchange small objects; training on GPUs asks for `nccl`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    distributed.init_process_group(backend)
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size())
        distributed.barrier()  # a process that leaves while another still talks to it takes both down
    finally:
        distributed.destroy_process_group()
        gc.collect()  # without it, a process sometimes aborted at exit after all its work was done


def own_device(name: str | None = None) -> str:
    """Return the device of this process: `name`, or its own GPU ("cuda" or None), or the CPU if there is no GPU."""
    found = find_device(name)
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if found == "cuda" else found
