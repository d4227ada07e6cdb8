"""What each way of dividing the kernels of `Evidence` gains on a GPU: the networks with it, over those without it.

    python benchmarks/kernel_variants.py --out variants.csv --limit 150

Each variant is switched off in a process of its own, which times the corrected networks beside the models. All of them
compile at the same time and then take turns, so that each is timed alone. If no row's ratio rises by 5 % without a
variant, it should go.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from trueup_lab.performance.cases import BY_NAME
from trueup_lab.performance.networks import EVIDENCE, Network

NAMES = ("ResNet-50", "MobileNetV2", "ViT-S/16")
WITHOUT: dict[str, tuple[str, Callable[[Any], Any]]] = {  # attribute of `trueup.kernels.cuda.maps`, and its new value
    "nothing": ("CACHE_LINE", lambda value: value),
    "early start": ("starts_early", lambda _: lambda *_: False),
    "halvings": ("MAX_HALVINGS", lambda _: 0),
    "fewer rows written": ("ROWS_WRITTEN", lambda _: 1 << 20),
    "one kernel for small maps": ("WHOLE_ROWS", lambda _: 0),
}


def networks() -> Iterator[tuple[str, Network]]:
    """The rows of the table that the variants were made for."""
    rules = {"evidence, no gate": EVIDENCE["evidence, no gate"]}
    for name in NAMES:
        architecture = BY_NAME[name]
        options: dict[str, Any] = {"dtype": torch.bfloat16, "channels_last": architecture.convolutional, "rules": rules}
        yield f"{name}, batch 1, CUDA graph", Network(architecture, 1, how="graph", **options)
        yield f"{name}, batch 64, bfloat16, CUDA graph", Network(architecture, 64, how="graph", **options)


def measure_one(without: str, out: Path) -> None:
    """Switch one variant off, compile, wait for a line from outside, and write the ratios."""
    from trueup.kernels.cuda import maps

    attribute, change = WITHOUT[without]
    setattr(maps, attribute, change(getattr(maps, attribute)))
    device = torch.device("cuda")
    for _, network in networks():
        network.prepare(device)
    print("ready", flush=True)
    sys.stdin.readline()
    with out.open("a", encoding="utf-8", newline="") as file:
        for case, network in networks():
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
        measure_one(asked.without, asked.out)
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
