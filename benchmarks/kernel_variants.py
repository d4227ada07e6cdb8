"""Measure the gain of each variant of the Triton kernels: time without the variant over time with it.

    python benchmarks/kernel_variants.py ResNet-50 --out variants.csv --limit 60

Networks run as CUDA graphs, so that the host does not count. The first and the last measurement change nothing: their
difference is the noise. A variant that gains less than 5 % on every row should go.
"""

from __future__ import annotations

import argparse
import copy
import csv
import functools
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import trueup
from trueup_lab.performance.cases import BY_NAME
from trueup_lab.performance.networks import EVIDENCE, NetworkCase
from trueup_lab.performance.timing import captured, side_by_side

RULES = {"maps": EVIDENCE["evidence, no gate"], "transport": trueup.Correction(0.5, 0.5)}
# Per module of `trueup.kernels.cuda`, its constants without each variant.
WITHOUT: dict[str, dict[str, dict[str, Any]]] = {
    "maps": {
        "nothing": {},
        "early start": {"starts_early": lambda *_: False},
        "halvings": {"MAX_HALVINGS": 0},
        "fewer rows written": {"ROWS_WRITTEN": 1 << 20},
        "one kernel for small maps": {"WHOLE_ROWS": 0},
        "nothing, again": {},
    },
    "transport": {
        "nothing": {},
        "early start": {"starts_early": lambda *_: False},
        "slices of tables": {"SLICES": {True: 4, False: 4}},
        "four ways of search": {"WAYS": 2},
        "limits on registers": {"WHOLE_REGISTERS": None, "MAP_REGISTERS": None},
        "one kernel for short rows": {"WHOLE": 0},
        "nothing, again": {},
    },
}


def measure(module: str, name: str, batch: int, device: torch.device, write: Callable[..., None], until: float) -> None:
    """Time a network without each variant of a module, until a time."""
    architecture = BY_NAME[name]
    options: dict[str, Any] = {"channels_last": architecture.convolutional, "rules": {"corrected": RULES[module]}}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    networks, x = NetworkCase(architecture, batch, dtype=dtype, **options).make(device)
    kernels = importlib.import_module(f"trueup.kernels.cuda.{module}")
    ready = captured if device.type == "cuda" else lambda work: work
    with torch.inference_mode():
        for without, constants in WITHOUT[module].items():
            if time.monotonic() > until:
                return
            before = {constant: getattr(kernels, constant) for constant in constants}
            try:
                vars(kernels).update(constants)
                kernels._plan.cache_clear()
                fresh = copy.deepcopy(networks)  # they remember no kernels
                works = {which: ready(functools.partial(network, x)) for which, network in fresh.items()}
                times = side_by_side(works, device, seconds=0.3)
            finally:
                vars(kernels).update(before)
                kernels._plan.cache_clear()
            cost, of = times["corrected"], times["uncorrected"]
            write(module, without, f"{name}, batch {batch}", f"{1e6 * cost:.5g}", f"{1e6 * of:.5g}", f"{cost / of:.4g}")


def main() -> None:
    """Measure all variants on the given networks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["ResNet-50", "MobileNetV2"], help="architectures of the table")
    parser.add_argument(
        "--module",
        choices=WITHOUT,
        action="append",
        help="module whose variants are measured; repeatable (default: all)",
    )
    parser.add_argument("--out", type=Path, default=Path("variants.csv"))
    parser.add_argument("--limit", type=float, default=120, help="start no measurement after this many seconds")
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    until = time.monotonic() + asked.limit
    with asked.out.open("w", encoding="utf-8", newline="") as file:

        def write(*values: str) -> None:
            csv.writer(file).writerow(values)
            file.flush()
            print(*values, flush=True)

        write("module", "without", "case", "microseconds", "uncorrected", "ratio")
        for module in asked.module or WITHOUT:
            for name in asked.names:
                for batch in (1, 64):
                    measure(module, name, batch, torch.device(asked.device), write, until)


if __name__ == "__main__":
    main()
