"""The cases to measure, and the upper bounds that their ratios should meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import trueup
from trueup import functional, kernels
from trueup_lab import models
from trueup_lab.evaluation.methods import BatchStatistics, Method, Mixed, Tent
from trueup_lab.performance.rows import TimingRow
from trueup_lab.performance.timing import captured, peak_memory, side_by_side

PAPERS = {"resnet50": trueup.Correction(0.5, 0.5), "resnet20": trueup.Correction(1.0, 0.2)}
EVIDENCE = {"evidence": trueup.Evidence(), "evidence, no gate": trueup.Evidence(budget=1)}
RIVALS: dict[str, Method] = {"BN batch": BatchStatistics(), "BN mix": Mixed(), "TENT": Tent()}


@dataclass(frozen=True)
class PerformanceCase:
    """One or more rows of the table. `needs` is the kind of device it requires, or "" for any."""

    name: str
    needs: str
    measure: Callable[[torch.device], Iterator[TimingRow]]


def _operator(batch: int, n: int, reach: float) -> Callable[[torch.device], Iterator[TimingRow]]:
    def measure(device: torch.device) -> Iterator[TimingRow]:
        times = side_by_side(_on_device(_operator_works(batch, n, device), device), device)
        for name in ("correction", "correction by sorting"):
            yield _row(
                f"operator, {batch} x {n}", name, "copy", times, reach if name == "correction" else None, n, batch
            )

    return measure


def _scaling(device: torch.device) -> Iterator[TimingRow]:
    """Vary the number of activations from a thousand to ten million, and the number of rows from 1 to 1024."""
    largest = 10_000_000
    shapes = [(4, n) for n in (1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, largest)]
    shapes += [(batch, 16_384) for batch in (1, 4, 16, 64, 256, 1024)]
    for batch, n in shapes:
        works = _operator_works(batch, n, device)
        if batch * n > 2**23 and device.type == "cpu":
            del works["correction by sorting"]  # minutes
        times = side_by_side(_on_device(works, device), device, seconds=0.2)
        for name in [name for name in times if name != "copy"]:
            yield _row("scaling", name, "copy", times, None, n, batch)


def _on_device(works: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, Callable[[], Any]]:
    """On a GPU, capture the work as CUDA graphs: launching a small kernel takes longer than running it."""
    return {name: captured(work) for name, work in works.items()} if device.type == "cuda" else works


def _operator_works(batch: int, n: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(batch, n, device=device, generator=generator)
    target, levels = torch.randn(1025, device=device, generator=generator).relu().sort().values, functional.levels(1025)
    levels = levels.to(device)
    curve, rule = kernels.curve_of(target, levels), trueup.Correction()
    a = x.relu()
    return {
        "copy": x.clone,
        "correction": lambda: kernels.transport(
            x, curve, rule.step, location=rule.location, sparse=rule.sparse, relu=True
        ),
        "correction by sorting": lambda: functional.correct(
            a, target, rule.step, location=rule.location, sparse=rule.sparse, levels=levels
        ),
    }


@dataclass(frozen=True)
class _Network:
    """A network, its batches, and the way it is run."""

    kind: str  # resnet20 or resnet50
    batch: int
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    tf32: bool = False
    how: str = "eager"  # eager, compiled or graph
    rivals: bool = False
    threads: int | None = None

    def __call__(self, device: torch.device, reach: float, case: str) -> Iterator[TimingRow]:
        threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
        torch.set_num_threads(self.threads or threads)
        torch.backends.cudnn.allow_tf32 = self.tf32
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        try:
            model, targets, x = self.make(device)
            robust = trueup.correct(model, targets, PAPERS[self.kind])
            networks: dict[str, Callable[[Tensor], Any]] = {"uncorrected": model, "correction": robust}
            networks |= {name: trueup.correct(model, targets, rule) for name, rule in EVIDENCE.items()}
            if self.rivals:
                networks |= {name: method.prepare(model, None) for name, method in RIVALS.items()}
            works = {name: self._work(network, x) for name, network in networks.items()}
            times = side_by_side(works, device)
            for name in times:
                if name != "uncorrected":
                    aim = reach if name == "correction" else None
                    yield _row(case, name, "uncorrected", times, aim, 0, self.batch)
        finally:
            torch.set_num_threads(threads)
            torch.backends.cudnn.allow_tf32 = True
            torch.set_float32_matmul_precision(precision)

    def make(self, device: torch.device) -> tuple[nn.Module, trueup.Targets, Tensor]:
        """Return the model in its precision and layout, its targets, and a batch."""
        torch.manual_seed(0)
        if self.kind == "resnet20":
            model, size = models.load("resnet20-bn-cifar10").to(device), 32
        else:
            model, size = _settled(models.ResNet50("bn").to(device)), 224
        few = _pictures(8, size, device)
        targets = trueup.calibrate(model, [few], decide=False)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        model = model.to(dtype=self.dtype, memory_format=layout)  # type: ignore[call-overload]
        return model.eval(), targets, _pictures(self.batch, size, device).to(self.dtype, memory_format=layout)

    def _work(self, network: Callable[[Tensor], Any], x: Tensor) -> Callable[[], Any]:
        if self.how == "compiled":
            network = torch.compile(network, fullgraph=True)

        def work() -> Any:
            # TENT takes gradients, which torch.inference_mode forbids.
            with torch.inference_mode(isinstance(network, nn.Module)), torch.no_grad():
                return network(x)

        return captured(work) if self.how == "graph" else work


def _network(name: str, needs: str, reach: float, **options: Any) -> PerformanceCase:
    network = _Network(**options)
    return PerformanceCase(name, needs, lambda device: network(device, reach, name))


def _memory(device: torch.device) -> Iterator[TimingRow]:
    network = _Network("resnet50", 256, torch.bfloat16, channels_last=True)
    model, targets, x = network.make(device)
    robust = trueup.correct(model, targets, PAPERS["resnet50"])
    with torch.inference_mode():
        peaks = {name: float(peak_memory(lambda: n(x), device)) for name, n in _pair(model, robust)}  # noqa: B023
    yield _row("ResNet-50, batch 256, bfloat16: peak memory", "correction", "uncorrected", peaks, 1.1, 0, 256)


def _pair(model: nn.Module, robust: nn.Module) -> list[tuple[str, nn.Module]]:
    return [("uncorrected", model), ("correction", robust)]


def _calibration(device: torch.device) -> Iterator[TimingRow]:
    """Compare calibration with as many forward passes: more of them on a GPU, where tracing would dominate."""
    count = 40 if device.type == "cuda" else 10
    cases = [("resnet20", 128, "ResNet-20, batch 128")]
    if device.type == "cuda":
        cases.append(("resnet50", 64, "ResNet-50, batch 64"))
    for kind, batch, name in cases:
        model, _, x = _Network(kind, batch).make(device)

        def forward(model: nn.Module = model, x: Tensor = x) -> None:
            with torch.inference_mode():
                for _ in range(count):
                    model(x)

        def calibrate(model: nn.Module = model, x: Tensor = x) -> trueup.Targets:
            return trueup.calibrate(model, [x] * count, decide=False)

        times = side_by_side({"forward passes": forward, "calibration": calibrate}, device, seconds=0.1)
        yield _row(f"calibration, {name}", "calibration", "forward passes", times, None, 0, batch)


def _row(
    case: str, what: str, against: str, costs: dict[str, float], reach: float | None, n: int, batch: int
) -> TimingRow:
    ratio = costs[what] / costs[against]
    return TimingRow(case, what, against, n, batch, costs[what], costs[against], ratio, reach)


def _pictures(count: int, size: int, device: torch.device) -> Tensor:
    """Return random images that are smooth at some scales, like photographs."""
    generator = torch.Generator().manual_seed(count)
    coarse = torch.randn(count, 3, size // 8, size // 8, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)
    return (smooth + 0.3 * torch.randn(count, 3, size, size, generator=generator)).to(device)


@torch.no_grad()
def _settled(model: nn.Module) -> nn.Module:
    """Set the batch norm statistics of an untrained model, so that activations neither vanish nor explode."""
    device = next(model.parameters()).device
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over batches
    model.train()
    model(_pictures(32, 224, device))
    return model.eval()


_HALF = {"dtype": torch.bfloat16, "channels_last": True}
CASES = (
    PerformanceCase("operator, 64 x 802816", "cuda", _operator(64, 802_816, 2.5)),
    PerformanceCase("operator, 512 x 16384", "", _operator(512, 16_384, 3)),
    _network("ResNet-50, batch 256, bfloat16", "cuda", 1.35, kind="resnet50", batch=256, rivals=True, **_HALF),
    _network("ResNet-50, batch 256, TF32", "cuda", 1.4, kind="resnet50", batch=256, channels_last=True, tf32=True),
    _network(
        "ResNet-50, batch 256, bfloat16, compiled", "cuda", 1.4, kind="resnet50", batch=256, how="compiled", **_HALF
    ),
    _network("ResNet-50, batch 1, CUDA graph", "cuda", 1.5, kind="resnet50", batch=1, how="graph", **_HALF),
    _network("ResNet-20, batch 1024, bfloat16", "cuda", 1.6, kind="resnet20", batch=1024, rivals=True, **_HALF),
    _network("ResNet-20, batch 1024, CUDA graph", "cuda", 1.6, kind="resnet20", batch=1024, how="graph", **_HALF),
    _network("ResNet-20, batch 128, float32", "cpu", 1.5, kind="resnet20", batch=128, rivals=True, threads=2),
    PerformanceCase("ResNet-50, batch 256, bfloat16: peak memory", "cuda", _memory),
    PerformanceCase("calibration", "", _calibration),
    PerformanceCase("scaling", "", _scaling),
)
