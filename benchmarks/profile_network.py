"""Profile a corrected network on a GPU: time and launches per kernel, beside the uncorrected model.

    python benchmarks/profile_network.py ViT-S/16 MobileNetV2 --out profile.csv
    python benchmarks/profile_network.py RegNetY --precision TF32 --out profile.csv

Rows are added to the file: one per kernel and network, in microseconds per forward pass. The rows "all" and "trueup"
are sums over all kernels and over trueup's own. The row "host" is the time that Python takes to start all kernels of a
forward pass of one image.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trueup_lab.performance.architectures import TIMED_NETWORKS, TimedNetwork
from trueup_lab.performance.networks import EVIDENCE, NetworkCase, precision

PASSES = 5
SHOWN = 30  # kernels per network, the slowest first
OURS = (
    "realign_whole",
    "measure_whole",
    "sum_segments",
    "write_rows",
    "moments_from_sums",
    "normalise_tokens",
    "write_tokens",
)
PRECISIONS: dict[str, dict[str, Any]] = {"bfloat16": {"dtype": torch.bfloat16}, "TF32": {"tf32": True}}
Row = tuple[str, str, float, float]


def profile(network: NetworkCase, device: torch.device) -> Iterator[Row]:
    """Rows (network, kernel, launches, microseconds) per forward pass."""
    networks, x = network.make(device)  # not in inference mode: torch.fx cannot trace a model of inference tensors
    with precision(tf32=network.tf32), torch.inference_mode():
        few = x[:1].contiguous(memory_format=torch.channels_last) if network.channels_last else x[:1]
        for name, corrected in networks.items():
            for _ in range(3):
                corrected(x)
            torch.cuda.synchronize()
            kind = torch.profiler.ProfilerActivity.CUDA
            with torch.profiler.profile(activities=[kind], acc_events=True) as found:
                for _ in range(PASSES):
                    corrected(x)
                torch.cuda.synchronize()
            events = [event for event in found.key_averages() if event.self_device_time_total]
            kernels = [(event.key, event.count / PASSES, event.self_device_time_total / PASSES) for event in events]
            kernels.sort(key=lambda kernel: -kernel[2])
            for title, some in (("all", kernels), ("trueup", [k for k in kernels if k[0].startswith(OURS)])):
                yield name, title, sum(kernel[1] for kernel in some), sum(kernel[2] for kernel in some)
            yield from ((name, *kernel) for kernel in kernels[:SHOWN])
            for _ in range(3):
                corrected(few)
            times = []
            for _ in range(3 * PASSES):
                torch.cuda.synchronize()
                began = time.perf_counter()
                corrected(few)
                times.append(time.perf_counter() - began)
            yield name, "host", 1, 1e6 * min(times)


def main() -> None:
    """Profile the architectures whose names contain one of the given words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[a.name for a in TIMED_NETWORKS])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("profile.csv"))
    given = parser.parse_args()
    new = not given.out.exists()
    with given.out.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(["architecture", "batch", "precision", "network", "kernel", "launches", "microseconds"])
        for architecture in TIMED_NETWORKS:
            if any(name.lower() in architecture.name.lower() for name in given.names):
                network = _network(architecture, given.batch, given.precision)
                for name, kernel, launches, microseconds in profile(network, torch.device("cuda")):
                    what = (architecture.name, given.batch, given.precision, name, kernel)
                    writer.writerow([*what, f"{launches:g}", f"{microseconds:.4g}"])
                    file.flush()


def _network(architecture: TimedNetwork, batch: int, precision: str) -> NetworkCase:
    rules = {"evidence, no gate": EVIDENCE["evidence, no gate"]}
    options = PRECISIONS[precision]
    return NetworkCase(architecture, batch, channels_last=architecture.convolutional, rules=rules, **options)


if __name__ == "__main__":
    main()
