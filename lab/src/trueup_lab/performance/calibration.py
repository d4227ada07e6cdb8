"""The cost of calibration and the size of what it gives."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

import trueup
from trueup_lab.performance.architectures import Architecture, pictures
from trueup_lab.performance.networks import prepared
from trueup_lab.performance.rows import TimingRow, absolute, compared
from trueup_lab.performance.timing import side_by_side


def measure_calibration(architecture: Architecture, batch: int, device: torch.device) -> Iterator[TimingRow]:
    """Compare calibration with as many forward passes: more of them on a GPU, where tracing would dominate."""
    count = 40 if device.type == "cuda" else 10
    model, _ = prepared(architecture, device)
    x = pictures(batch, architecture.size, device)

    def forward() -> None:
        with torch.inference_mode():
            for _ in range(count):
                model(x)

    def calibrate() -> trueup.Targets:
        return trueup.calibrate(model, [x] * count, decide=False)

    times = side_by_side({"forward passes": forward, "calibration": calibrate}, device, seconds=0.1)
    case = f"calibration, {architecture.name}, batch {batch}"
    yield compared(case, "calibration", "forward passes", times, 2.0, batch=batch)


def measure_file(architecture: Architecture, device: torch.device) -> Iterator[TimingRow]:
    """The size of a file of targets that keeps as many images as it can."""
    model, _ = prepared(architecture, device)
    count = trueup.Targets.GATE_SAMPLE
    some = pictures(64, architecture.size, device)
    batches = (some + 0.01 * k for k in range(count // 64))
    targets = trueup.calibrate(model, batches, decide=False)
    path = Path(tempfile.mkdtemp()) / "targets.safetensors"
    for what, small, reach in ((f"{count} images", False, None), ("small", True, 20.0)):
        targets.save(path, small=small)
        size = path.stat().st_size
        yield absolute(f"targets file, {architecture.name}", what, "megabyte", size, reach, unit=1e6)
    shutil.rmtree(path.parent)
