"""Time from `correct` to the first answer, in new processes: with an empty cache of compiled kernels, then a full one.

Run as a program, it is such a process: `python -m trueup_lab.performance.first_answer FOLDER ARCHITECTURE DEVICE`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import trueup
from trueup_lab.performance.architectures import TIMED_NETWORKS, TimedNetwork, pictures
from trueup_lab.performance.networks import EVIDENCE, prepared
from trueup_lab.performance.rows import TimingRow, absolute

BATCH = 64


def measure_first_answer(architecture: TimedNetwork, device: torch.device) -> Iterator[TimingRow]:
    """Measure `correct`, the first answer with an empty and a full cache (less the model's own), and its kernels."""
    case = f"{architecture.name}: first answer"
    model, targets = prepared(architecture, device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(model.state_dict(), folder / "model.pt")
        targets.save(folder / "targets.safetensors")
        for cache, reach in (("empty", 4.0), ("full", 0.5)):
            found = _in_a_new_process(folder, architecture.name, device)
            if cache == "full":
                yield absolute(case, "correct", "second", found["correct"], 1.0, batch=BATCH)
            beyond = found["corrected"] - found["uncorrected"]
            yield absolute(case, f"first answer, {cache} cache", "second", beyond, reach, batch=BATCH)
        kernels = len(list((folder / "cache").rglob("*.cubin")))
        yield absolute(case, "compiled kernels", "kernel", kernels, None, batch=BATCH)


def _in_a_new_process(folder: Path, architecture: str, device: torch.device) -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, "-m", __name__, str(folder), architecture, str(device)],
        env={**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        raise RuntimeError(f"the process that measures the first answer of {architecture} failed:\n{run.stderr}")
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def _times(folder: Path, architecture: TimedNetwork, device: torch.device) -> dict[str, float]:
    """Seconds of `correct`, of the model's second answer, and of the corrected model's first."""
    layout = torch.channels_last if architecture.convolutional else torch.contiguous_format
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = architecture.make().to(device)
    model.load_state_dict(torch.load(folder / "model.pt", map_location=device, weights_only=True))
    model = model.to(dtype=dtype, memory_format=layout).eval()  # type: ignore[call-overload]
    x = pictures(BATCH, architecture.size, device).to(dtype, memory_format=layout)
    targets = trueup.Targets.load(folder / "targets.safetensors")

    def answer(network: torch.nn.Module) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            network(x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    answer(model)  # loads the libraries and chooses the convolutions' algorithms
    own = answer(model)
    began = time.perf_counter()
    robust = trueup.correct(model, targets, EVIDENCE["evidence, no gate"])
    correct = time.perf_counter() - began
    return {"correct": correct, "uncorrected": own, "corrected": answer(robust)}


def main() -> None:
    """Print the times of one process as JSON."""
    folder, name, device = sys.argv[1:]
    architecture = next(a for a in TIMED_NETWORKS if a.name == name)
    print(json.dumps(_times(Path(folder), architecture, torch.device(device))))


if __name__ == "__main__":
    main()
