"""Processes that run the trials of the zoo, one model at a time, each with one thread and a time limit.

The limit is kept from outside: a process that takes too long is ended and another one started in its place, and so is
one that the system ended, for example for its memory.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from zoo_models import SOURCES
from zoo_trial import measure, portability

START = 120  # seconds that a process may take to import everything
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class ZooJob:
    """A trial: of a model's promises, or of whether it compiles and exports."""

    source: str
    family: str
    model: str
    portability: bool = False


@dataclass
class Worker:
    """A process and its current job."""

    process: Any
    pipe: Connection
    job: ZooJob | None = None
    since: float = field(default_factory=time.monotonic)
    started: bool = False  # has taken its first job


def run(
    jobs: list[ZooJob], *, processes: int, limit: int, end: float, device: str
) -> Iterator[tuple[ZooJob, dict[str, Any]]]:
    """Yield each job and its row as it is done, until `end` of `time.monotonic`."""
    for name in ONE_THREAD:
        os.environ[name] = "1"
    sources = sorted({job.source for job in jobs})
    waiting, workers = list(reversed(jobs)), [_started(device, sources) for _ in range(min(processes, len(jobs)))]
    try:
        while (waiting or any(worker.job for worker in workers)) and time.monotonic() < end:
            for worker in workers:
                if worker.job is None and waiting and worker.process.is_alive():
                    worker.job, worker.since = waiting.pop(), time.monotonic()
                    worker.pipe.send(worker.job)
            ready = wait([worker.pipe for worker in workers if worker.job], timeout=1)
            for number, worker in enumerate(workers):
                if (job := worker.job) is None:
                    continue
                row = None
                if worker.pipe in ready:
                    try:
                        row = worker.pipe.recv()
                    except EOFError:
                        row = _failed(job, "the process was ended, perhaps for its memory")
                elif time.monotonic() - worker.since > limit + (0 if worker.started else START):
                    row = _failed(job, "took too long")
                if row is None:
                    continue
                worker.job, worker.started = None, True
                if row.pop("ended", False):
                    worker.process.kill()
                    workers[number] = _started(device, sources)
                yield job, row
    finally:
        for worker in workers:
            worker.pipe.close()  # an idle process ends by itself
        for worker in workers:
            worker.process.join(timeout=0.0 if worker.job else 5.0)
            worker.process.kill()


def _started(device: str, sources: list[str]) -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, device, sources), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours)


def _failed(job: ZooJob, error: str) -> dict[str, Any]:
    known = {"source": job.source, "family": job.family, "model": job.model, "ended": True}
    return known if job.portability else known | {"error": error, "seconds": ""}


def _work(pipe: Connection, device: str, sources: list[str]) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)  # a failed export prints its whole graph
    for stream in (1, 2):
        os.dup2(silence, stream)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    cases = {(case.source, case.model): case for source in sources for case in SOURCES[source]()}
    while True:
        try:
            job: ZooJob = pipe.recv()
        except EOFError:
            return
        pipe.send((portability if job.portability else measure)(cases[job.source, job.model], device=device))
