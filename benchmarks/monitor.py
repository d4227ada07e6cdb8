"""Measure the cost of monitoring (the report in the forward pass, and `Monitor.update`) against the model's own time.

    python benchmarks/monitor.py                                   # results/monitor_cpu.csv, in about a minute
    python benchmarks/monitor.py --device cuda --out results/monitor_h200.csv

All pieces of work take turns, and a cost is the median over turns of the difference to the corrected model without a
report in the same turn. `update` includes its share of the counting, which happens every 2048 images or 512 batches. On
a CPU, times are of one thread and count only while it runs, so that other work on the machine does not matter much.
Weights and images are random: they do not change the time. Rows of the same case are replaced.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from trueup_lab import models
from trueup_lab.tables import number, read_table, write_table

RULES = {"no gate": trueup.Evidence(budget=1, strength=0.05, base=0), "gated": trueup.Evidence()}
CASES = {  # input side, batch sizes on a CPU and on a GPU
    "resnet20": (32, {"cpu": (1, 32), "cuda": (1, 32, 256)}),
    "resnet50": (224, {"cpu": (1, 8), "cuda": (1, 32)}),
}


@dataclass(frozen=True)
class MonitorCostRow:
    """Times in milliseconds per forward pass; shares of the model's own time."""

    model: str
    rule: str
    batch: int
    model_ms: float = number(".3f")
    corrected_ms: float = number(".3f")
    report_ms: float = number(".3f")  # what report=True adds
    report_all_ms: float = number(".3f")  # what report="all" adds
    update_ms: float = number(".4f")  # one call of Monitor.update, with its share of the counting
    report_share: float = number(".4f")
    report_all_share: float = number(".4f")
    update_share: float = number(".4f")
    device: str = ""
    torch: str = ""

    @property
    def key(self) -> tuple[str, str, int, str]:
        """The fields that identify the measurement."""
        return self.model, self.rule, self.batch, self.device


def main() -> None:
    """Measure every case and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", action="append", choices=CASES, help="only this model; repeatable")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("results/monitor_cpu.csv"))
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    rows = {row.key: row for row in read_table(asked.out, MonitorCostRow)}
    for name in asked.model or CASES:
        side, batches = CASES[name]
        model = network(name).to(device)
        targets = trueup.calibrate(model, (pictures(32, side, seed).to(device) for seed in range(2)), decide=False)
        for rule in RULES:
            for batch in batches[device.type]:
                row = measure(name, model, targets, rule, pictures(batch, side, 9).to(device), asked.turns)
                rows[row.key] = row
                print(
                    f"{name} {rule} {batch}: report {row.report_share:.1%}, all {row.report_all_share:.1%}, "
                    f"update {row.update_share:.2%} of the model's {row.model_ms:.2f} ms"
                )
                write_table(asked.out, MonitorCostRow, sorted(rows.values(), key=lambda row: row.key))


def network(name: str) -> nn.Module:
    """A model with random weights."""
    torch.manual_seed(0)
    return (models.ResNet20() if name == "resnet20" else models.ResNet50()).eval()


def pictures(count: int, side: int, seed: int) -> Tensor:
    """Smooth made-up images."""
    coarse = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(coarse, size=(side, side), mode="bilinear", align_corners=False)


@torch.inference_mode()
def measure(
    name: str, model: nn.Module, targets: trueup.Targets, rule: str, images: Tensor, turns: int
) -> MonitorCostRow:
    """Measure one case."""
    plain = trueup.correct(model, targets, RULES[rule])
    one, every = (trueup.correct(model, targets, RULES[rule], report=which) for which in (True, "all"))
    monitor = trueup.Monitor(one, unusual=0.05)
    works: dict[str, Callable[[], object]] = {
        "model": lambda: model(images),
        "corrected": lambda: plain(images),
        "one": lambda: one(images),
        "all": lambda: every(images),
    }
    for work in works.values():
        work()
    report = one(images)[1]
    calls = max(8, 4096 // len(images) if len(images) > 4 else 1024)  # so many that the counting is part of it
    monitor.update(report)
    monitor.snapshot()
    times = [{which: seconds(work, 1, images.device) for which, work in works.items()} for _ in range(turns)]
    updates = [seconds(lambda: monitor.update(report), calls, images.device) for _ in range(max(5, turns // 3))]

    def added(which: str) -> float:
        return max(0.0, median(turn[which] - turn["corrected"] for turn in times))

    own = median(turn["model"] for turn in times)
    return MonitorCostRow(
        name,
        rule,
        len(images),
        1000 * own,
        1000 * median(turn["corrected"] for turn in times),
        1000 * added("one"),
        1000 * added("all"),
        1000 * median(updates),
        added("one") / own,
        added("all") / own,
        median(updates) / own,
        torch.cuda.get_device_name(images.device) if images.is_cuda else "cpu",
        torch.__version__,
    )


def seconds(work: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds per call; on a CPU, of the process's own time."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = clock()
    for _ in range(calls):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (clock() - began) / calls


if __name__ == "__main__":
    main()
