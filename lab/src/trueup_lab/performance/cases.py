"""The cases to measure, in the order of their importance, and the upper bounds that their ratios should meet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import trueup
from trueup_lab.performance.architectures import TIMED_NETWORKS, TimedNetwork
from trueup_lab.performance.calibration import (
    CALIBRATION_REACH,
    measure_calibration,
    measure_decision,
    measure_file,
)
from trueup_lab.performance.first_answer import measure_first_answer
from trueup_lab.performance.networks import EVIDENCE, NetworkCase
from trueup_lab.performance.operators import measure_operator, measure_scaling
from trueup_lab.performance.rows import TimingRow


@dataclass(frozen=True)
class PerformanceCase:
    """One or more rows of the table. `needs` is the kind of device it requires, or "" for any.

    `prepare` returns what measures the rows. If it `compiles`, that takes up to minutes, and `measure_together` lets
    several cases do it at a time. `reach` is the upper bound that the ratio of the first row should meet, also while
    nothing has been measured.
    """

    name: str
    needs: str
    prepare: Callable[[torch.device], Callable[[], Iterator[TimingRow]]]
    compiles: bool = False
    reach: float | None = None


BY_NAME = {architecture.name: architecture for architecture in TIMED_NETWORKS}
RESNET20, RESNET50 = BY_NAME["ResNet-20"], BY_NAME["ResNet-50"]
_PAPERS = {"ResNet-50": trueup.Correction(0.5, 0.5), "ResNet-20": trueup.Correction(1.0, 0.2)}
_HALF: dict[str, Any] = {"dtype": torch.bfloat16, "channels_last": True}
_NO_GATE = {"evidence, no gate": EVIDENCE["evidence, no gate"]}


def _case(
    name: str, needs: str, measure: Callable[[torch.device], Iterator[TimingRow]], reach: float | None = None
) -> PerformanceCase:
    """A case with nothing to prepare."""
    return PerformanceCase(name, needs, lambda device: functools.partial(measure, device), reach=reach)


def _network(name: str, needs: str, reach: float, network: NetworkCase) -> PerformanceCase:
    compiles = network.how == "compiled"
    return PerformanceCase(name, needs, lambda device: network.prepare(device, name, reach), compiles, reach)


def _with_paper(name: str, needs: str, reach: float, architecture: TimedNetwork, **options: Any) -> PerformanceCase:
    """A case in which the paper's rule is measured first."""
    rules = {"correction": _PAPERS[architecture.name], **EVIDENCE}
    return _network(f"{architecture.name}, {name}", needs, reach, NetworkCase(architecture, rules=rules, **options))


def _memory(architecture: TimedNetwork, batch: int) -> PerformanceCase:
    name = f"{architecture.name}, batch {batch}, bfloat16: peak memory"
    options: dict[str, Any] = {"channels_last": architecture.convolutional, "rules": _NO_GATE}
    network = NetworkCase(architecture, batch, dtype=torch.bfloat16, **options)
    return _case(name, "cuda", lambda device: network.measure_memory(device, name, 1.1), 1.1)


def _eager(architecture: TimedNetwork) -> Iterator[PerformanceCase]:
    """The rows of the table on a GPU that need no compiler but Triton."""
    name = architecture.name
    some = {**_NO_GATE, **({"correction": _PAPERS[name]} if name in _PAPERS else {})}
    options: dict[str, Any] = {"architecture": architecture, "channels_last": architecture.convolutional, "rules": some}
    half, tf32 = {**options, "dtype": torch.bfloat16}, {**options, "tf32": True}
    every = {**half, "rules": {**some, **EVIDENCE}}
    yield _network(f"{name}, batch 64, bfloat16", "cuda", 1.15, NetworkCase(batch=64, **every))
    yield _network(f"{name}, batch 64, TF32", "cuda", 1.15, NetworkCase(batch=64, **tf32))
    yield _network(f"{name}, batch 1, CUDA graph", "cuda", 1.15, NetworkCase(batch=1, how="graph", **half))
    yield _network(f"{name}, batch 1", "cuda", 1.3, NetworkCase(batch=1, **half))
    yield _memory(architecture, 64)


def _compiled(architecture: TimedNetwork, *, half: bool) -> PerformanceCase:
    options: dict[str, Any] = {"dtype": torch.bfloat16} if half else {"tf32": True}
    network = NetworkCase(
        architecture, 64, channels_last=architecture.convolutional, how="compiled", rules=_NO_GATE, **options
    )
    return _network(f"{architecture.name}, batch 64, {'bfloat16' if half else 'TF32'}, compiled", "cuda", 1.15, network)


def _calibration(architecture: TimedNetwork, batch: int, needs: str) -> PerformanceCase:
    name = f"calibration, {architecture.name}, batch {batch}"
    return _case(name, needs, lambda device: measure_calibration(architecture, batch, device), CALIBRATION_REACH)


def _first_answer(architecture: TimedNetwork) -> PerformanceCase:
    measure = functools.partial(measure_first_answer, architecture)
    return _case(f"{architecture.name}: first answer", "cuda", measure)


def _cpu(architecture: TimedNetwork) -> Iterator[PerformanceCase]:
    """The rows of the table on a CPU."""
    name = architecture.name
    options: dict[str, Any] = {"architecture": architecture, "rules": _NO_GATE, "threads": 1}
    yield _network(f"{name}, batch 1, one CPU thread", "cpu", 1.5, NetworkCase(batch=1, **options))
    compiled = NetworkCase(batch=1, how="compiled", **options)
    yield _network(f"{name}, batch 1, one CPU thread, compiled", "cpu", 1.2, compiled)
    last = NetworkCase(batch=1, channels_last=True, **options)
    yield _network(f"{name}, batch 1, one CPU thread, channels last", "cpu", 1.5, last)
    two = NetworkCase(batch=32, **{**options, "threads": 2})
    yield _network(f"{name}, batch 32, two CPU threads", "cpu", 1.25, two)


_SHOWN_FIRST = ("ResNet-50", "MobileNetV2", "ViT-S/16")  # of the first answers
_LATER = [architecture for architecture in TIMED_NETWORKS if architecture.name not in _SHOWN_FIRST]

# In the order in which they are wanted, because a run may end before the last: the table's columns for all
# architectures, quick ones first. Cases of one architecture that need no compiling are together, as it is built once.
CASES = (
    *(case for architecture in TIMED_NETWORKS for case in _eager(architecture)),
    *(case for name in ("ResNet-20", "MobileNetV2", "ResNet-50") for case in _cpu(BY_NAME[name])),
    _calibration(RESNET50, 64, "cuda"),
    _calibration(RESNET50, 8, "cpu"),
    _calibration(RESNET20, 128, ""),
    _case("decision, ResNet-20", "", lambda device: measure_decision(RESNET20, device)),
    _case("decision, MobileNetV2", "cuda", lambda device: measure_decision(BY_NAME["MobileNetV2"], device)),
    *(_first_answer(BY_NAME[name]) for name in _SHOWN_FIRST),
    *(_compiled(architecture, half=True) for architecture in TIMED_NETWORKS),
    *(_compiled(architecture, half=False) for architecture in TIMED_NETWORKS),
    *(_first_answer(architecture) for architecture in _LATER),
    _case("targets file, ResNet-50", "", lambda device: measure_file(RESNET50, device)),
    _with_paper("batch 256, bfloat16", "cuda", 1.35, RESNET50, batch=256, rivals=True, **_HALF),
    _with_paper("batch 256, TF32", "cuda", 1.4, RESNET50, batch=256, channels_last=True, tf32=True),
    _memory(RESNET50, 256),
    _with_paper("batch 1024, bfloat16", "cuda", 1.6, RESNET20, batch=1024, rivals=True, **_HALF),
    _with_paper("batch 1024, CUDA graph", "cuda", 1.6, RESNET20, batch=1024, how="graph", **_HALF),
    _with_paper("batch 128, float32", "cpu", 1.5, RESNET20, batch=128, rivals=True, threads=2),
    _with_paper("batch 256, bfloat16, compiled", "cuda", 1.4, RESNET50, batch=256, how="compiled", **_HALF),
    _case("operator, 64 x 802816", "cuda", measure_operator(64, 802_816, 2.5)),
    _case("operator, 512 x 16384", "", measure_operator(512, 16_384, 3)),
    _case("scaling", "", measure_scaling),
)
