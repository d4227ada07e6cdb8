"""Compile for several cases in parallel processes, before the measurements, which need a quiet machine.

Run as a program, this file is such a process: `python -m trueup_lab.performance.ahead DEVICE CASE ...`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from trueup_lab.performance.cases import CASES, PerformanceCase


def compile_ahead(cases: Sequence[PerformanceCase], device: torch.device, processes: int) -> None:
    """Prepare cases, one process per architecture. Errors are ignored, since the measurement raises them again."""
    groups: dict[str, list[str]] = {}
    for case in cases:
        if case.prepare is not None:
            groups.setdefault(case.name.partition(",")[0], []).append(case.name)
    waiting, running = list(groups.values()), list[subprocess.Popen[bytes]]()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                command = [sys.executable, "-m", __name__, str(device), *waiting.pop(0)]
                running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(0.1)
            running = [process for process in running if process.poll() is None]
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    """Prepare the cases named on the command line."""
    device, *names = sys.argv[1:]
    for case in CASES:
        if case.name in names and case.prepare is not None:
            case.prepare(torch.device(device))


if __name__ == "__main__":
    main()
