"""The cost of corrected networks, against the networks themselves."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

import trueup
from trueup.rules import Rule
from trueup_lab.evaluation.methods import BatchStatistics, Method, Mixed, Tent
from trueup_lab.performance.architectures import TimedNetwork, pictures
from trueup_lab.performance.rows import TimingRow, compared
from trueup_lab.performance.timing import captured, peak_memory, side_by_side

EVIDENCE: dict[str, Rule] = {
    # The usual choice of calibration. `nuisance=True` changes numbers in the reference and costs nothing.
    "evidence, no gate": trueup.Evidence(budget=1, strength=0.02, base=0),
    "evidence": trueup.Evidence(),
}
RIVALS: dict[str, Method] = {"BN batch": BatchStatistics(), "BN mix": Mixed(), "TENT": Tent()}


@dataclass(frozen=True)
class NetworkCase:
    """An architecture, its batches, and the way it is run."""

    architecture: TimedNetwork
    batch: int
    dtype: torch.dtype = torch.float32
    tf32: bool = False
    channels_last: bool = False
    how: Literal["eager", "compiled", "graph"] = "eager"
    rules: Mapping[str, Rule] = field(default_factory=lambda: EVIDENCE)
    rivals: bool = False
    threads: int | None = None
    seconds: float = 1.0

    def prepare(self, device: torch.device, case: str, reach: float) -> Callable[[], Iterator[TimingRow]]:
        """Make all networks and run each once, which compiles what it needs. Return what measures them.

        There is one row per rule and rival; the first rule has the `reach`.
        """
        with _threads(self.threads), precision(tf32=self.tf32):
            networks, x = self.make(device)
            works = {name: self._work(network, x) for name, network in networks.items()}
            for work in works.values():
                work()

        def measure() -> Iterator[TimingRow]:
            with _threads(self.threads), precision(tf32=self.tf32):
                times = side_by_side(works, device, seconds=self.seconds)
            for name in times:
                if name != "uncorrected":
                    aim = reach if name == next(iter(self.rules)) else None
                    yield compared(case, name, "uncorrected", times, aim, batch=self.batch)

        return measure

    def measure_memory(self, device: torch.device, case: str, reach: float) -> Iterator[TimingRow]:
        """The peak memory of a forward pass by the first rule."""
        networks, x = self.make(device)
        rule = next(iter(self.rules))
        with torch.inference_mode():
            peaks = {
                name: float(peak_memory(functools.partial(networks[name], x), device)) for name in ("uncorrected", rule)
            }
        yield compared(case, rule, "uncorrected", peaks, reach, batch=self.batch)

    def make(self, device: torch.device) -> tuple[dict[str, Callable[[Tensor], Any]], Tensor]:
        """Return the model in its precision and layout, its corrected forms, its rivals, and a batch."""
        original, targets = prepared(self.architecture, device)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        model = copy.deepcopy(original).to(dtype=self.dtype, memory_format=layout).eval()  # type: ignore[call-overload]
        networks: dict[str, Callable[[Tensor], Any]] = {"uncorrected": model}
        networks |= {name: trueup.correct(model, targets, rule) for name, rule in self.rules.items()}
        if self.rivals:
            networks |= {name: method.prepare(model, None) for name, method in RIVALS.items()}
        return networks, pictures(self.batch, self.architecture.size, device).to(self.dtype, memory_format=layout)

    def _work(self, network: Callable[[Tensor], Any], x: Tensor) -> Callable[[], Any]:
        if self.how == "compiled":
            torch.compiler.reset()
            network = torch.compile(network, fullgraph=True)

        def work() -> Any:
            # TENT takes gradients, which torch.inference_mode forbids.
            with torch.inference_mode(isinstance(network, nn.Module)), torch.no_grad():
                return network(x)

        return captured(work) if self.how == "graph" else work


@functools.lru_cache(maxsize=1)
def prepared(architecture: TimedNetwork, device: torch.device) -> tuple[nn.Module, trueup.Targets]:
    """A model in float32 and its targets."""
    model = architecture.build(device)
    return model, trueup.calibrate(model, [pictures(8, architecture.size, device)], decide=False)


@contextlib.contextmanager
def precision(*, tf32: bool) -> Iterator[None]:
    """Compute float32 convolutions and matrix products in TF32, or exactly."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
