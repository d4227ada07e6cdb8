"""Timing of several pieces of work side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

Work = Callable[[], object]


def side_by_side(works: Mapping[str, Work], device: torch.device, *, seconds: float = 1.0) -> dict[str, float]:
    """Return the median time of each piece of work, in seconds.

    After a warm-up they take turns, so that a temporary slowdown of the machine affects all of them. A turn repeats
    short work until it takes some milliseconds, so that the start does not count. Each piece of work gets about as many
    turns as fit into `seconds`, but at least five.
    """
    for work in works.values():
        work()
    once = {name: _time(work, 1, device) for name, work in works.items()}  # by now, everything is compiled
    once = {name: min(once[name], _time(work, 1, device)) for name, work in works.items()}
    least = 0.005 if device.type == "cuda" else 0.02
    repeats = {name: max(1, min(1000, round(least / max(once[name], 1e-6)))) for name in works}
    turn = max(once[name] * repeats[name] for name in works)
    turns = max(5, min(50, round(seconds / turn)))
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(turns):
        for name, work in works.items():
            times[name].append(_time(work, repeats[name], device))
    return {name: median(values) for name, values in times.items()}


def _time(work: Work, repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end)) / 1e3 / repeats
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - began) / repeats


def peak_memory(work: Work, device: torch.device) -> int:
    """Return the peak memory allocated on a GPU during the work, in bytes, including what was allocated before."""
    work()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def captured(work: Work) -> Work:
    """Capture the work as a CUDA graph and return its replay."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
