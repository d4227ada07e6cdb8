"""Prepare cases in parallel processes, then measure them one after the other, so that each has a quiet machine.

Run as a program, this file is such a process: `python -m trueup_lab.performance.together DEVICE CASE`.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from tempfile import TemporaryFile
from typing import IO

import torch

from trueup_lab.performance.cases import CASES, PerformanceCase
from trueup_lab.performance.memory import keep_freed_memory
from trueup_lab.performance.rows import TimingRow

Outcome = list[TimingRow] | ImportError | RuntimeError


def measure_together(
    cases: Sequence[PerformanceCase], device: torch.device, processes: int
) -> Iterator[tuple[PerformanceCase, Outcome]]:
    """Measure each case in a process of its own, of which so many prepare at a time: its rows, or what went wrong."""
    for first in range(0, len(cases), processes):
        group = [(case, _Process(case, device)) for case in cases[first : first + processes]]
        try:
            for _, process in group:
                process.wait_until_ready()
            for case, process in group:
                yield case, process.measure()
        finally:
            for _, process in group:
                process.end()


class _Process:
    """A process that prepares a case, says so, waits for a line, and prints the case's rows."""

    def __init__(self, case: PerformanceCase, device: torch.device) -> None:
        self._errors: IO[bytes] = TemporaryFile()  # noqa: SIM115  # closed by `end`
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(device), case.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def wait_until_ready(self) -> None:
        """Wait until the case is prepared, or the process has ended."""
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def measure(self) -> Outcome:
        """Let the process measure, and return its rows."""
        found, _ = self._process.communicate("measure\n" if self._process.poll() is None else None)
        if self._process.returncode != 0:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            last = said[-1] if said else f"its process ended with {self._process.returncode}"
            return ImportError(last) if last.startswith(("ImportError", "ModuleNotFoundError")) else RuntimeError(last)
        return [TimingRow(**row) for row in json.loads(found)]

    def end(self) -> None:
        """End the process if it still runs."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def main() -> None:
    """Prepare and measure the case named on the command line."""
    device, name = sys.argv[1:]
    out, sys.stdout = sys.stdout, sys.stderr  # others may print
    if torch.device(device).type == "cpu":
        keep_freed_memory()
    measure = next(case for case in CASES if case.name == name).prepare(torch.device(device))
    print("ready", file=out, flush=True)
    if sys.stdin.readline():
        print(json.dumps([dataclasses.asdict(row) for row in measure()]), file=out, flush=True)


if __name__ == "__main__":
    main()
