"""Measure what each variant of the Triton kernels gains: corrected networks without it, over the same networks with it.

    python benchmarks/kernel_variants.py --out variants.csv --limit 150

Each variant is switched off in a process of its own, which times corrected networks beside the models. All processes
compile at the same time and then take turns, so that each is timed alone. The first and the last one change nothing:
their difference is the noise. A variant that gains less than 5 % on every row should go.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import trueup
from trueup_lab.performance.cases import BY_NAME
from trueup_lab.performance.networks import EVIDENCE, Network

EVERY, PAPER = "evidence, no gate", "correction"
RULES = {EVERY: EVIDENCE[EVERY], PAPER: trueup.Correction(0.5, 0.5)}
NETWORKS = {EVERY: ("ResNet-50", "MobileNetV2", "ViT-S/16"), PAPER: ("ResNet-50",)}
# The rule whose kernels have the variant, their module, and the constants without it.
WITHOUT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nothing": (EVERY, "maps", {}),
    "early start": (EVERY, "maps", {"starts_early": lambda *_: False}),
    "halvings": (EVERY, "maps", {"MAX_HALVINGS": 0}),
    "fewer rows written": (EVERY, "maps", {"ROWS_WRITTEN": 1 << 20}),
    "one kernel for small maps": (EVERY, "maps", {"WHOLE_ROWS": 0}),
    "nothing again": (EVERY, "maps", {}),
    "nothing of the paper's": (PAPER, "transport", {}),
    "early start of the paper's": (PAPER, "transport", {"starts_early": lambda *_: False}),
    "slices of tables": (PAPER, "transport", {"SLICES": {True: 4, False: 4}}),
    "four ways of search": (PAPER, "transport", {"WAYS": 2}),
    "limits on registers": (
        PAPER,
        "transport",
        {"WHOLE_REGISTERS": None, "COUNT_REGISTERS": None, "MAP_REGISTERS": None},
    ),
    "one kernel for short rows": (PAPER, "transport", {"WHOLE": 0}),
    "nothing of the paper's again": (PAPER, "transport", {}),
}


def networks(rule: str) -> Iterator[tuple[str, Network]]:
    """The rows of the table that the variants were made for: as CUDA graphs, so that the host does not count."""
    for name in NETWORKS[rule]:
        architecture = BY_NAME[name]
        options: dict[str, Any] = {"channels_last": architecture.convolutional, "rules": {rule: RULES[rule]}}
        for batch in (1, 64):
            network = Network(architecture, batch, dtype=torch.bfloat16, how="graph", seconds=0.4, **options)
            yield f"{name}, batch {batch}", network


def measure_one(without: str, out: Path, device: torch.device) -> None:
    """Switch one variant off, compile, wait for a line from outside, and write the ratios."""
    rule, module, constants = WITHOUT[without]
    kernels = importlib.import_module(f"trueup.kernels.cuda.{module}")
    for name, value in constants.items():
        if not hasattr(kernels, name):
            raise AttributeError(f"{kernels.__name__} has no {name}, which {without!r} changes")
        setattr(kernels, name, value)
    for _, network in networks(rule):
        network.prepare(device)
    print("ready", flush=True)
    sys.stdin.readline()
    with out.open("a", encoding="utf-8", newline="") as file:
        for case, network in networks(rule):
            for row in network.measure(device, case, 1.15):
                values = [without, case, f"{1e6 * row.cost:.5g}", f"{1e6 * row.of:.5g}", f"{row.ratio:.4g}"]
                csv.writer(file).writerow(values)
                file.flush()


def main() -> None:
    """Start a process per variant, and let them measure one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("variants.csv"))
    parser.add_argument("--limit", type=float, default=150, help="end after so many seconds")
    parser.add_argument("--without", choices=WITHOUT, help="measure without this variant (used for the processes)")
    asked = parser.parse_args()
    if asked.without:
        measure_one(asked.without, asked.out, torch.device("cuda"))
        return
    asked.out.write_text("without,case,microseconds,uncorrected,ratio\n", encoding="utf-8")
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, __file__, "--out", str(asked.out), "--without"]
    processes = {name: subprocess.Popen([*command, name], **pipe) for name in WITHOUT}  # type: ignore[call-overload]
    out_of_time = threading.Timer(asked.limit, lambda: [process.kill() for process in processes.values()])
    out_of_time.start()
    for process in processes.values():
        process.stdout.readline()  # it has compiled
    for name, process in processes.items():
        try:
            process.communicate("\n")
        except BrokenPipeError:
            print(f"without {name}: failed")
    out_of_time.cancel()
    print(asked.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
