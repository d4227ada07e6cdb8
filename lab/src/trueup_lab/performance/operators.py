"""The cost of the paper's correction alone, against a copy of its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import trueup
from trueup import functional, kernels
from trueup_lab.performance.rows import TimingRow, compared
from trueup_lab.performance.timing import captured, side_by_side


def measure_operator(batch: int, n: int, reach: float) -> Callable[[torch.device], Iterator[TimingRow]]:
    """Measure rows of `n` activations, by histogram and by sorting."""

    def measure(device: torch.device) -> Iterator[TimingRow]:
        times = side_by_side(_on_device(_works(batch, n, device), device), device)
        for name in ("correction", "correction by sorting"):
            aim = reach if name == "correction" else None
            yield compared(f"operator, {batch} x {n}", name, "copy", times, aim, activations=n, batch=batch)

    return measure


def measure_scaling(device: torch.device) -> Iterator[TimingRow]:
    """Vary the number of activations from a thousand to ten million, and the number of rows from 1 to 1024."""
    largest = 10_000_000
    shapes = [(4, n) for n in (1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, largest)]
    shapes += [(batch, 16_384) for batch in (1, 4, 16, 64, 256, 1024)]
    for batch, n in shapes:
        works = _works(batch, n, device)
        if batch * n > 2**23 and device.type == "cpu":
            del works["correction by sorting"]  # minutes
        times = side_by_side(_on_device(works, device), device, seconds=0.2)
        for name in [name for name in times if name != "copy"]:
            yield compared("scaling", name, "copy", times, None, activations=n, batch=batch)


def _on_device(works: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, Callable[[], Any]]:
    """On a GPU, capture the work as CUDA graphs: launching a small kernel takes longer than running it."""
    return {name: captured(work) for name, work in works.items()} if device.type == "cuda" else works


def _works(batch: int, n: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(batch, n, device=device, generator=generator)
    target, levels = torch.randn(1025, device=device, generator=generator).relu().sort().values, functional.levels(1025)
    levels = levels.to(device)
    curve, rule = kernels.curve_of(target, levels), trueup.Correction()
    a = x.relu()
    return {
        "copy": x.clone,
        "correction": lambda: kernels.correct(
            x, curve, rule.step, location=rule.location, sparse=rule.sparse, relu=True
        ),
        "correction by sorting": lambda: functional.correct(
            a, target, rule.step, location=rule.location, sparse=rule.sparse, levels=levels
        ),
    }
