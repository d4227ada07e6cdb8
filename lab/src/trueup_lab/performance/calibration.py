"""The cost of calibration and of the decision, and the size of the targets file."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trueup
from trueup.targets.decision import LEFT_ALONE, Decision, Trial
from trueup_lab.performance.architectures import TimedNetwork, pictures
from trueup_lab.performance.networks import prepared
from trueup_lab.performance.rows import TimingRow, absolute, compared
from trueup_lab.performance.timing import side_by_side

CALIBRATION_REACH = 2.0
"""Upper bound for calibration, in forward passes over the same images."""


def measure_calibration(architecture: TimedNetwork, batch: int, device: torch.device) -> Iterator[TimingRow]:
    """Compare calibration with the same number of forward passes: more on a GPU, where tracing would dominate."""
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
    yield compared(case, "calibration", "forward passes", times, CALIBRATION_REACH, batch=batch)


def measure_decision(architecture: TimedNetwork, device: torch.device) -> Iterator[TimingRow]:
    """Compare the decision with its budget, 60 forward passes over 500 images; it takes minutes, so it runs once.

    The passes are timed on fewer images, before and after the decision. Untrained networks may keep more settings
    within the limits than trained ones, and each of these is tried on perturbed copies.
    """
    model, _ = prepared(architecture, device)
    batches = torch.split(pictures(480, architecture.size, device), 32)
    let_answers_differ(model, batches)

    def forward() -> None:
        with torch.inference_mode():
            for batch in batches[:4]:
                model(batch)

    def calibrate(decide: bool) -> tuple[float, Decision]:
        began = time.perf_counter()
        targets = trueup.calibrate(model, batches, decide=decide, progress=False)
        return time.perf_counter() - began, targets.decision or Decision()

    passes = [side_by_side({"passes": forward}, device)["passes"]]
    (without, _), (whole, decided) = calibrate(decide=False), calibrate(decide=True)
    passes.append(side_by_side({"passes": forward}, device)["passes"])
    if not decided.trials:
        raise RuntimeError(f"{architecture.name} was left alone, so nothing was timed: {decided.note}")
    budget = 60 * 500 / (4 * 32) * sum(passes) / 2
    case = f"decision, {architecture.name}"
    yield compared(case, "decision", "budget", {"decision": whole - without, "budget": budget}, 1.0, batch=32)


def let_answers_differ(model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Subtract the mean scores in the last layer: an untrained network gives all images one answer."""
    head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    with torch.inference_mode():
        mean = torch.cat([model(batch) for batch in batches]).mean(dim=0)
    with torch.no_grad():
        head.bias.sub_(mean)


def measure_file(architecture: TimedNetwork, device: torch.device) -> Iterator[TimingRow]:
    """The size of a targets file with the maximum number of images, whole and as saved by default.

    Sizes depend on numbers and shapes only, so few images are calibrated on and then repeated.
    """
    model = architecture.build(device)
    few = trueup.calibrate(model, [pictures(8, architecture.size, device)], decide=False)
    targets = _of_many_images(few)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "targets.safetensors"
        for what, small, reach in ((f"{targets.GATE_SAMPLE} images", False, None), ("as saved by default", None, 20.0)):
            targets.save(path, small=small)
            size = path.stat().st_size
            yield absolute(f"targets file, {architecture.name}", what, "megabyte", size, reach, unit=1e6)


def _of_many_images(targets: trueup.Targets) -> trueup.Targets:
    """Made-up targets of many images, whose chosen rule changes something."""
    many: dict[str, Any] = {}
    for group, most in (("activations", targets.SAMPLE), ("norms", targets.SAMPLE), ("gate", targets.GATE_SAMPLE)):
        rows = torch.arange(most)
        many[group] = {
            name: dataclasses.replace(target, sample=target.sample[rows % len(target.sample)], images=10 * most)
            for name, target in getattr(targets, group).items()
        }
    many["norms"] = {
        name: dataclasses.replace(norm, drift=torch.ones_like(norm.total[:4]), drifted=1)
        for name, norm in many["norms"].items()
    }
    rule = trueup.Evidence(budget=1, strength=0.02, base=0, nuisance=True)
    trials = tuple(Trial(r, 8, 0.0, (8.0, 8.0), gain, gain, 0.0) for r, gain in ((LEFT_ALONE, 0.0), (rule, 1.0)))
    return dataclasses.replace(targets, **many, sampled=torch.arange(targets.GATE_SAMPLE), decision=Decision(trials))
