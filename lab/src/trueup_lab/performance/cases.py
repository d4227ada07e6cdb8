"""The cases to measure, and the upper bounds that their ratios should meet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import trueup
from trueup_lab.performance.architectures import ARCHITECTURES, Architecture
from trueup_lab.performance.calibration import measure_calibration, measure_file
from trueup_lab.performance.first_answer import measure_first_answer
from trueup_lab.performance.networks import EVIDENCE, Network
from trueup_lab.performance.operators import measure_operator, measure_scaling
from trueup_lab.performance.rows import TimingRow


@dataclass(frozen=True)
class PerformanceCase:
    """One or more rows of the table. `needs` is the kind of device it requires, or "" for any."""

    name: str
    needs: str
    measure: Callable[[torch.device], Iterator[TimingRow]]


BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
RESNET20, RESNET50 = BY_NAME["ResNet-20"], BY_NAME["ResNet-50"]
_PAPERS = {"ResNet-50": trueup.Correction(0.5, 0.5), "ResNet-20": trueup.Correction(1.0, 0.2)}
_HALF: dict[str, Any] = {"dtype": torch.bfloat16, "channels_last": True}


def _network(name: str, needs: str, reach: float, network: Network) -> PerformanceCase:
    return PerformanceCase(name, needs, lambda device: network.measure(device, name, reach))


def _with_paper(name: str, needs: str, reach: float, architecture: Architecture, **options: Any) -> PerformanceCase:
    """A case in which the paper's rule is measured first."""
    rules = {"correction": _PAPERS[architecture.name], **EVIDENCE}
    return _network(f"{architecture.name}, {name}", needs, reach, Network(architecture, rules=rules, **options))


def _memory(architecture: Architecture, batch: int) -> PerformanceCase:
    name = f"{architecture.name}, batch {batch}, bfloat16: peak memory"
    network = Network(architecture, batch, dtype=torch.bfloat16, channels_last=architecture.convolutional)
    return PerformanceCase(name, "cuda", lambda device: network.measure_memory(device, name, 1.1))


def _table(architecture: Architecture) -> Iterator[PerformanceCase]:
    """The rows of the table on a GPU."""
    name = architecture.name
    one = {"evidence, no gate": EVIDENCE["evidence, no gate"]}
    some = {**one, **({"correction": _PAPERS[name]} if name in _PAPERS else {})}
    options: dict[str, Any] = {"architecture": architecture, "channels_last": architecture.convolutional, "rules": some}
    half, tf32 = {**options, "dtype": torch.bfloat16}, {**options, "tf32": True}
    every = {**half, "rules": {**some, **EVIDENCE}}
    yield _network(f"{name}, batch 64, bfloat16", "cuda", 1.15, Network(batch=64, **every))
    yield _network(f"{name}, batch 64, TF32", "cuda", 1.15, Network(batch=64, **tf32))
    yield _network(f"{name}, batch 1, CUDA graph", "cuda", 1.15, Network(batch=1, how="graph", **half))
    yield _network(f"{name}, batch 1", "cuda", 1.3, Network(batch=1, **half))
    compiled: dict[str, Any] = {"batch": 64, "how": "compiled", "rules": one}
    yield _network(f"{name}, batch 64, bfloat16, compiled", "cuda", 1.15, Network(**{**half, **compiled}))
    yield _network(f"{name}, batch 64, TF32, compiled", "cuda", 1.15, Network(**{**tf32, **compiled}))
    yield _memory(architecture, 64)
    yield PerformanceCase(f"{name}: first answer", "cuda", functools.partial(measure_first_answer, architecture))


CASES = (
    PerformanceCase("operator, 64 x 802816", "cuda", measure_operator(64, 802_816, 2.5)),
    PerformanceCase("operator, 512 x 16384", "", measure_operator(512, 16_384, 3)),
    _with_paper("batch 256, bfloat16", "cuda", 1.35, RESNET50, batch=256, rivals=True, **_HALF),
    _with_paper("batch 256, TF32", "cuda", 1.4, RESNET50, batch=256, channels_last=True, tf32=True),
    _with_paper("batch 256, bfloat16, compiled", "cuda", 1.4, RESNET50, batch=256, how="compiled", **_HALF),
    _memory(RESNET50, 256),
    _with_paper("batch 1024, bfloat16", "cuda", 1.6, RESNET20, batch=1024, rivals=True, **_HALF),
    _with_paper("batch 1024, CUDA graph", "cuda", 1.6, RESNET20, batch=1024, how="graph", **_HALF),
    _with_paper("batch 128, float32", "cpu", 1.5, RESNET20, batch=128, rivals=True, threads=2),
    *(case for architecture in ARCHITECTURES for case in _table(architecture)),
    PerformanceCase("calibration, ResNet-20", "", lambda device: measure_calibration(RESNET20, 128, device)),
    PerformanceCase("calibration, ResNet-50", "cuda", lambda device: measure_calibration(RESNET50, 64, device)),
    PerformanceCase("targets file, ResNet-50", "cuda", lambda device: measure_file(RESNET50, device)),
    PerformanceCase("scaling", "", measure_scaling),
)
