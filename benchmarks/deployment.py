"""Try every way to run a corrected model on a CPU, and measure its answers and its cost.

    python benchmarks/deployment.py --data ROOT                      # results/deployment.csv
    python benchmarks/deployment.py --data ROOT --routes onnxruntime openvino   # only these, measured again
    python benchmarks/deployment.py --data ROOT --resume             # only routes, and rows of serving, not yet there

ResNet-20 of the zoo on CIFAR-10, one thread. Each route is taken by the model and by the corrected model, which are
timed in turns: the median of the processor's time over calls with 1 and with 32 images. `difference` is the largest one
between the route's logits and those of the corrected model in eager mode, over 50 clean and 50 noisy images; `same` the
share of equal answers. In the eager rows they compare with the corrected model in float64: so much is rounding.
`prepare` are seconds of the processor's time to export, convert or compile; `nodes` those of the graph. A route whose
package is missing, or that does not take a rule, is skipped and says why. "no gate" is
`Evidence(budget=1, strength=0.1, base=0)`, "gated" `Evidence()`. The paper's rule sorts where it is exported, and is
compared with its sort.

`serving` rows are of eager mode: batches on two cores and threads that serve single images, by the clock; and the
memory that 10,000 calls add, for a small network, because a leak per call does not depend on its size.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trueup
from trueup_lab.data import cifar10
from trueup_lab.data.corruptions import corrupt
from trueup_lab.data.images import NORMALISATION
from trueup_lab.models import load
from trueup_lab.tables import number, read_table, start_table, write_table

Run = Callable[[Tensor], Tensor]
BATCH = {0: torch.export.Dim("batch", min=1, max=4096)}


@dataclass(frozen=True)
class DeploymentRow:
    """One route, or one way of serving, with one rule."""

    route: str
    rule: str
    needs: str
    batch: int | None
    difference: float | None = number(".2e")
    same: float | None = number(".3f")
    model: float = number(".3f")
    corrected: float = number(".3f")
    unit: str
    ratio: float = number(".2f")
    prepare_model: float | None = number(".1f")
    prepare_corrected: float | None = number(".1f")
    nodes_model: int | None
    nodes_corrected: int | None
    versions: str


@dataclass(frozen=True)
class Ready:
    """A network made ready for a route."""

    run: Run
    nodes: int | None = None


def eager(module: nn.Module, _example: Tensor, _folder: Path) -> Ready:
    """The module as it is."""
    return Ready(module)


def compiled(module: nn.Module, _example: Tensor, _folder: Path) -> Ready:
    """torch.compile."""
    return Ready(torch.compile(module, fullgraph=True, dynamic=True))


def exported(module: nn.Module, example: Tensor, folder: Path) -> Ready:
    """torch.export, saved and loaded."""
    program = torch.export.export(module, (example,), dynamic_shapes=(BATCH,))
    torch.export.save(program, folder / "exported.pt2")
    nodes = sum(node.op == "call_function" for node in program.graph.nodes)
    return Ready(torch.export.load(folder / "exported.pt2").module(), nodes)


def traced(module: nn.Module, example: Tensor, folder: Path) -> Ready:
    """torch.jit.trace, saved and loaded."""
    torch.jit.trace(module, example).save(folder / "traced.pt")
    return Ready(torch.jit.load(folder / "traced.pt"))


def aotinductor(module: nn.Module, example: Tensor, folder: Path) -> Ready:
    """AOTInductor: compiled ahead of time to a package."""
    program = torch.export.export(module, (example,), dynamic_shapes=(BATCH,))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "aoti.pt2"))
    return Ready(torch._inductor.aoti_load_package(path))


def onnx_file(module: nn.Module, example: Tensor, folder: Path) -> tuple[str, int]:
    """Export to ONNX with a free batch size; return the path and the number of nodes."""
    onnx, path = importlib.import_module("onnx"), str(folder / "model.onnx")
    torch.onnx.export(
        module, (example,), path, dynamo=True, external_data=False, verbose=False, dynamic_shapes=(BATCH,)
    )
    return path, len(onnx.load(path).graph.node)


def onnxruntime(module: nn.Module, example: Tensor, folder: Path) -> Ready:
    """ONNX Runtime."""
    ort = importlib.import_module("onnxruntime")
    path, nodes = onnx_file(module, example, folder)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options)
    (name,) = (given.name for given in session.get_inputs())
    return Ready(lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0]), nodes)


def openvino(module: nn.Module, example: Tensor, folder: Path) -> Ready:
    """OpenVINO, from the ONNX file."""
    ov = importlib.import_module("openvino")
    path, _ = onnx_file(module, example, folder)
    hints = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
    found = ov.compile_model(ov.convert_model(path), "CPU", hints)
    return Ready(lambda x: torch.from_numpy(found(x.numpy())[0].copy()))


def executorch(module: nn.Module, example: Tensor, folder: Path) -> Ready:
    """ExecuTorch with XNNPACK, in programs for 1 and for 32 images."""
    exir = importlib.import_module("executorch.exir")
    xnnpack = importlib.import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    runtime = importlib.import_module("executorch.runtime").Runtime.get()
    methods: dict[int, Any] = {}

    def prepare(size: int) -> Any:
        program = torch.export.export(module, (example[:1].expand(size, -1, -1, -1).contiguous(),))
        lowered = exir.to_edge_transform_and_lower(program, partitioner=[xnnpack.XnnpackPartitioner()])
        path = folder / f"{size}.pte"
        path.write_bytes(lowered.to_executorch().buffer)
        return runtime.load_program(str(path)).load_method("forward")

    def run(x: Tensor) -> Tensor:
        if len(x) not in (1, 32):
            return torch.cat([run(image[None]) for image in x])
        if len(x) not in methods:
            methods[len(x)] = prepare(len(x))
        return methods[len(x)].execute([x.contiguous()])[0].clone()

    methods[1] = prepare(1)
    return Ready(run)


ROUTES: dict[str, tuple[Callable[[nn.Module, Tensor, Path], Ready], str]] = {
    "eager": (eager, "torch, trueup"),
    "torch.compile": (compiled, "torch, trueup"),
    "torch.export": (exported, "torch"),
    "torch.jit.trace": (traced, "torch"),
    "aotinductor": (aotinductor, "torch or C++"),
    "onnxruntime": (onnxruntime, "onnxruntime"),
    "openvino": (openvino, "openvino"),
    "executorch": (executorch, "executorch"),
}
RULES = ["no gate", "gated", "paper"]
SHOWS_PAPER = ("eager", "onnxruntime")  # elsewhere it is the same sort, which takes most of the time


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="data root that holds cifar-10-batches-py")
    parser.add_argument("--routes", nargs="+", default=[*ROUTES, "serving"], choices=[*ROUTES, "serving"])
    parser.add_argument("--rules", nargs="+", default=RULES, choices=RULES)
    parser.add_argument("--calls", type=int, default=10_000, help="calls over which memory is watched")
    parser.add_argument("--resume", action="store_true", help="keep the routes that the file holds")
    parser.add_argument("--out", default="results/deployment.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    normalise = NORMALISATION["cifar10"]
    clean = normalise(cifar10.load("train", options.data).images[:300])
    test = cifar10.load("test", options.data).images[:100]
    noisy = corrupt(test[50:], "gaussian_noise", 3, family="cifar10-c", root=options.data)
    x = normalise(torch.cat([test[:50], noisy]))
    model = load("resnet20-bn-cifar10")
    targets = trueup.calibrate(model, clean.split(100), decide=False)  # what a rule costs does not depend on it
    rules = {
        "no gate": trueup.Evidence(budget=1, strength=0.1, base=0),
        "gated": trueup.Evidence(),
        "paper": trueup.Correction(lambda1=1.0, lambda2=0.2),
    }
    start_table(options.out, DeploymentRow)
    for route in options.routes:
        rows = read_table(options.out, DeploymentRow)
        mine = [row for row in rows if _route_of(row) == route]
        if options.resume and mine and route != "serving":
            continue
        known = mine if options.resume else []
        kept = [row for row in rows if row not in mine] + known
        robust = {name: trueup.correct(model, targets, rules[name]) for name in options.rules}
        if route not in SHOWS_PAPER:
            robust.pop("paper", None)
        elif "paper" in robust and route != "eager":
            robust["paper"] = trueup.correct(model, targets, replace(rules["paper"], method="sort"))
        with torch.inference_mode():
            found = (
                serving(model, robust["no gate"], x, options.calls, {row.route for row in known})
                if route == "serving"
                else along(route, model, robust, x)
            )
            for row in found:
                print(row, flush=True)
                kept.append(row)
                if route == "serving":
                    write_table(options.out, DeploymentRow, in_order(kept))
        write_table(options.out, DeploymentRow, in_order(kept))  # any other route is written when it is complete


def in_order(rows: list[DeploymentRow]) -> list[DeploymentRow]:
    """Sort rows by route, rule and batch, whatever was measured first. Rows of serving keep their order, at the end."""

    def place(row: DeploymentRow) -> tuple[int, int, int]:
        if (route := _route_of(row)) == "serving":
            return len(ROUTES), 0, 0
        return list(ROUTES).index(route), RULES.index(row.rule), row.batch or 0

    return sorted(rows, key=place)


def _route_of(row: DeploymentRow) -> str:
    return row.route.partition(",")[0]


def along(route: str, model: nn.Module, robust: dict[str, nn.Module], x: Tensor) -> Iterator[DeploymentRow]:
    """Take one route with the model and every corrected model."""
    prepare, needs = ROUTES[route]
    with tempfile.TemporaryDirectory() as folder:
        ready: dict[str, tuple[Ready, float]] = {}
        # The first export imports and compiles much that all later ones find ready, so the model is prepared twice.
        for count, (name, module) in enumerate({"first": model, "model": model, **robust}.items()):
            place = Path(folder) / str(count)
            place.mkdir()
            start = time.process_time()
            try:
                made = prepare(module, x[:2], place)
                made.run(x[:1])
            except ImportError as error:
                print(f"{route}: skipped, {error}")
                return
            except Exception as error:  # one that the runtime's own converter raises
                print(f"{route}, {name}: skipped, {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            ready[name] = made, time.process_time() - start
        del ready["first"]
        base, base_prepare = ready.pop("model")
        for name, (made, seconds) in ready.items():
            answers = made.run(x)
            wanted = copy.deepcopy(robust[name]).double()(x.double()) if route == "eager" else robust[name](x)
            for batch, calls in ((1, 100), (32, 15)):
                times = in_turns([base.run, made.run], x[:batch], calls)
                yield DeploymentRow(
                    route=route,
                    rule=name,
                    needs=needs,
                    batch=batch,
                    difference=(answers - wanted).abs().max().item(),
                    same=(answers.argmax(1) == wanted.argmax(1)).double().mean().item(),
                    model=times[0],
                    corrected=times[1],
                    unit="ms of processor time",
                    ratio=times[1] / times[0],
                    prepare_model=base_prepare,
                    prepare_corrected=seconds,
                    nodes_model=base.nodes,
                    nodes_corrected=made.nodes,
                    versions=versions(),
                )


def versions() -> str:
    """Versions of torch and trueup."""
    return f"torch {torch.__version__}, trueup {trueup.__version__}"


def in_turns(
    runs: list[Run], x: Tensor, calls: int = 100, clock: Callable[[], float] = time.process_time
) -> list[float]:
    """Median milliseconds per call of each, called in turns."""
    for run in runs:
        for _ in range(10):
            run(x)
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(calls):
        for run, seen in zip(runs, times, strict=True):
            start = clock()
            run(x)
            seen.append(1000 * (clock() - start))
    return [statistics.median(seen) for seen in times]


def serving(
    model: nn.Module, robust: nn.Module, x: Tensor, calls: int, known: Collection[str]
) -> Iterator[DeploymentRow]:
    """Batches on two cores, threads that share a network, and memory, in eager mode; without the rows `known`."""

    def on_two_cores() -> list[float]:
        torch.set_num_threads(2)  # threads that wait use the processor too, so only the clock on the wall can tell
        try:
            return in_turns([model, robust], x[:32], 25, time.perf_counter)
        finally:
            torch.set_num_threads(1)

    def rates(threads: int) -> list[float]:
        return [statistics.median(rate(network, x, threads) for _ in range(3)) for network in (model, robust)]

    small, works = memory_works()
    alone = functools.cache(lambda: growth(small, calls))
    ways: dict[str, tuple[int, str, Callable[[], list[float]]]] = {"two cores": (32, "ms", on_two_cores)}
    for threads in (1, 8):
        name = f"{threads} serving thread{'s' if threads > 1 else ''}"
        ways[name] = 1, "images per second", functools.partial(rates, threads)
    for what, work in works.items():
        measure = functools.partial(lambda work: [alone(), growth(work, calls)], work)
        ways[f"memory over {calls:,} calls: {what}"] = 1, "bytes per call", measure
    for name, (batch, unit, measure) in ways.items():
        if (route := f"serving, {name}") not in known:
            a, b = measure()
            rest = (b / a if a else 0.0, None, None, None, None, versions())
            yield DeploymentRow(route, "no gate", "torch, trueup", batch, None, None, a, b, unit, *rest)


def memory_works() -> tuple[Callable[[], object], dict[str, Callable[[], object]]]:
    """A call of a small model, and calls of what trueup adds to it."""
    torch.manual_seed(0)
    layers = [(nn.Conv2d(a, b, 3), nn.BatchNorm2d(b), nn.ReLU()) for a, b in ((3, 8), (8, 8), (8, 8))]
    model = nn.Sequential(*(layer for block in layers for layer in block), nn.Flatten(), nn.LazyLinear(10)).eval()
    images = torch.rand(64, 3, 16, 16)
    model(images)
    targets = trueup.calibrate(model, [images], decide=False)
    one = images[:1]
    robust, watched = (trueup.correct(model, targets, trueup.Evidence(), report=which) for which in (False, "all"))
    monitor = trueup.Monitor(watched, unusual=0.05)
    return lambda: model(one), {
        "corrected": lambda: robust(one),
        "report and Monitor": lambda: monitor.update(watched(one)[1]),
        "measure": lambda: trueup.measure(model, targets, one),
    }


def rate(network: nn.Module, x: Tensor, threads: int, seconds: float = 2.0) -> float:
    """Single images per second that threads answer together."""
    counts, stop = [0] * threads, time.perf_counter() + seconds

    def serve(k: int) -> None:
        with torch.inference_mode():
            while time.perf_counter() < stop:
                network(x[k : k + 1])
                counts[k] += 1

    workers = [threading.Thread(target=serve, args=(k,)) for k in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) / seconds


def growth(work: Callable[[], object], calls: int) -> float:
    """Bytes of resident memory that each call adds."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for _ in range(3000):  # until the buffers of a monitor have their size
        work()
    before = resident()
    for _ in range(calls):
        work()
    return (resident() - before) / calls


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
