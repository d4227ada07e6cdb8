"""Profile a corrected network on a GPU: time per kernel and number of launches, beside the uncorrected model.

    python benchmarks/profile_network.py ViT-S/16 MobileNetV2 --out profile.csv

One row per kernel and network, in microseconds per forward pass. The row "host" is the time that Python takes to start
all kernels of a forward pass of one image.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from trueup_lab.performance.architectures import ARCHITECTURES, Architecture
from trueup_lab.performance.networks import EVIDENCE, Network

PASSES = 5


def profile(architecture: Architecture, device: torch.device) -> Iterator[tuple[str, str, str, float, float]]:
    """Rows (architecture, network, kernel, launches, microseconds) per forward pass."""
    options = {"dtype": torch.bfloat16, "channels_last": architecture.convolutional, "rules": EVIDENCE}
    networks, x = Network(architecture, 64, **options).make(device)
    with torch.inference_mode():
        for name, network in networks.items():
            for _ in range(3):
                network(x)
            torch.cuda.synchronize()
            kind = torch.profiler.ProfilerActivity.CUDA
            with torch.profiler.profile(activities=[kind], acc_events=True) as found:
                for _ in range(PASSES):
                    network(x)
                torch.cuda.synchronize()
            events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
            total = sum(event.self_device_time_total for event in events) / PASSES
            launches = sum(event.count for event in events if event.self_device_time_total) / PASSES
            yield architecture.name, name, "all", launches, total
            for event in events[:25]:
                if event.self_device_time_total:
                    each = event.self_device_time_total / PASSES
                    yield architecture.name, name, event.key, event.count / PASSES, each
            few = x[:1].contiguous(memory_format=torch.channels_last) if architecture.convolutional else x[:1]
            for _ in range(3):
                network(few)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(PASSES):
                network(few)
            host = (time.perf_counter() - began) / PASSES
            torch.cuda.synchronize()
            yield architecture.name, name, "host", 1, 1e6 * host


def main() -> None:
    """Profile the architectures whose names contain one of the given words."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[a.name for a in ARCHITECTURES])
    parser.add_argument("--out", type=Path, default=Path("profile.csv"))
    given = parser.parse_args()
    with given.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["architecture", "network", "kernel", "launches", "microseconds"])
        for architecture in ARCHITECTURES:
            if any(name.lower() in architecture.name.lower() for name in given.names):
                for *names, launches, microseconds in profile(architecture, torch.device("cuda")):
                    writer.writerow([*names, f"{launches:g}", f"{microseconds:.4g}"])


if __name__ == "__main__":
    main()
