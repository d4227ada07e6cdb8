"""Segmentation: a driving scene under 19 corruptions, measured with every method, in pieces that can be resumed.

    python benchmarks/segmentation.py --data ROOT --time-limit 180     # call again until it says that it is complete
    python benchmarks/segmentation.py --document                       # tables and plots of docs/segmentation.md

The public ESPNet on CamVid (360 x 480; 11 classes, void ignored), corrupted on the fly by ImageNet-C's recipe. Every
third test image is set aside for calibration, without its labels, and the others are tested; `--set-aside 0` calibrates
on the training images instead, which the model knows, and tests on all. Files, in results/segmentation:

    camvid-c.csv        one row per method and test set; the counts per image behind them stay in runs/segmentation
    summary.csv         means over groups of sets, with standard errors paired over images
    timing_DEVICE.csv   time per image against the model (--timing)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import trueup
from trueup_lab.data.corruptions import CHOSEN_ON, REPORTED_ON
from trueup_lab.data.root import data_root
from trueup_lab.devices import device_name
from trueup_lab.evaluation import EvaluationProgress, Plan, SegmentationRow, evaluate, parse_method, read_subjects
from trueup_lab.evaluation.methods import Default, Network
from trueup_lab.experiments.segmentation import BATCH, METHODS, publish
from trueup_lab.performance.rows import TimingRow, measured_on, write_timings
from trueup_lab.performance.timing import captured, side_by_side
from trueup_lab.tables import read_table, write_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "segmentation"
WEIGHTS = Path("weights", "espnet_camvid_bn.safetensors")


def main() -> None:
    """Measure what is missing, then summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"model file or name of a bundled model (default: {WEIGHTS} in the data root)")
    parser.add_argument("--data", type=Path, help="the data root")
    parser.add_argument(
        "--method", action="append", help="method as spelled in tables; repeatable (default: all of the page)"
    )
    parser.add_argument("--again", action="append", default=[], help="measure this method again; repeatable")
    parser.add_argument(
        "--set-aside", type=int, default=3, help="calibrate on every N-th test image; 0: on training images"
    )
    parser.add_argument("--images", type=int, help="images of each corrupted set (default: all)")
    parser.add_argument("--clean", type=int, help="clean images (default: all)")
    parser.add_argument("--without", action="append", default=[], help="leave this corruption out; repeatable")
    parser.add_argument("--severity", type=int, action="append", help="only these severities; repeatable")
    parser.add_argument("--time-limit", type=float, help="stop cleanly within this many seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/segmentation"), help="folder for rows, counts and calibrations"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV files")
    parser.add_argument("--timing", action="store_true", help="measure the time per image instead")
    parser.add_argument(
        "--document", action="store_true", help="write tables and plots of docs/segmentation.md instead"
    )
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    if asked.document:
        from trueup_lab.figures.segmentation import rewrite_page

        rewrite_page(ROOT)
    elif asked.timing:
        timing(asked)
    else:
        measure(asked)


def measure(asked: argparse.Namespace) -> None:
    """Evaluate in the runner, and write the rows and their summary."""
    subjects = read_subjects(asked.model or data_root(asked.data) / WEIGHTS)
    rows = asked.work / f"{subjects[0].set}-c.csv"
    forget(asked, rows)
    methods = tuple(parse_method(text) for text in asked.method) if asked.method else METHODS
    plan = Plan(methods, only=("identity",), batch=BATCH, images=asked.clean, set_aside=asked.set_aside)
    corrupted = replace(
        plan,
        only=tuple(name for name in (*CHOSEN_ON, *REPORTED_ON) if name not in asked.without),
        images=asked.images,
        severities=tuple(asked.severity or range(1, 6)),
    )
    began, complete = time.monotonic(), True
    for part in (plan, corrupted):
        left = None if asked.time_limit is None else asked.time_limit - (time.monotonic() - began)
        complete = complete and evaluate(
            subjects,
            part,
            rows,
            root=asked.data,
            device=asked.device,
            targets=asked.work / "targets",
            time_limit=left,
            report=say,
        )
    for row in publish(rows, asked.out, subjects[0].set):
        if row.kind == "all" and row.group in ("clean", "four", "fifteen"):
            print(
                f"{row.set_aside} {row.method:30} {row.group:8} {row.mean_iou:6.2f} {row.gain:+6.2f} ± {row.error:.2f}",
                row.rule,
            )
    print("complete" if complete else "stopped at the time limit; run the same command again to continue", flush=True)


def forget(asked: argparse.Namespace, rows: Path) -> None:
    """Remove rows of methods that are to be measured again, and the decisions behind the default."""
    if not asked.again or not rows.exists():
        return
    kept = [row for row in read_table(rows, SegmentationRow) if row.method not in asked.again]
    write_table(rows, SegmentationRow, kept)
    if Default().name in asked.again:
        for path in (asked.work / "targets").glob("*-decided-*.trueup.safetensors"):
            path.unlink()


def say(progress: EvaluationProgress) -> None:
    """Print a line per pass."""
    print(f"{progress.seconds:6.0f} s  {progress.done}/{progress.total}  {progress.what}", flush=True)


def timing(asked: argparse.Namespace) -> None:
    """Time the model and the methods side by side, the default in the setting that calibration chose."""
    device = torch.device(asked.device)
    (subject,) = read_subjects(asked.model or data_root(asked.data) / WEIGHTS)
    found = sorted((asked.work / "targets").glob(f"{subject.key}-*-decided-*.trueup.safetensors"))
    if not found:
        raise SystemExit(f"no calibration of {subject.name} in {asked.work / 'targets'}; measure the default first")
    targets, model = trueup.Targets.load(found[0]), subject.model.to(device)
    chosen = [m for m in METHODS if not (m.needs.gradients or m.name.startswith("bn-mix:"))]
    networks = {method.name: method.prepare(model, targets) for method in chosen}
    rows = []
    for batch in (1, 8):
        x = torch.randn(batch, 3, 360, 480, device=device, generator=torch.Generator(device).manual_seed(0)) / 255
        for graph in (False, True) if device.type == "cuda" else (False,):
            works = {name: work(network, x) for name, network in networks.items()}
            times = side_by_side({name: captured(w) if graph else w for name, w in works.items()}, device)
            case = f"{subject.name}, 360 x 480, batch {batch}" + (", CUDA graph" if graph else "")
            own = times.pop("uncorrected")
            for name, cost in times.items():
                reach = 1.2 if (name, batch, device.type) == ("default", 1, "cuda") else None
                rows.append(
                    measured_on(device, TimingRow(case, name, "uncorrected", 0, batch, cost, own, cost / own, reach))
                )
                print(f"{case}: {name} {1000 * cost:.3f} ms, {cost / own:.2f} times the model's", flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    kind = device_name(device).lower().replace("nvidia ", "").replace(" ", "_")
    write_timings(asked.out / f"timing_{kind}.csv", rows)


def work(network: Network, x: Tensor) -> Callable[[], object]:
    """One forward pass."""

    def once() -> object:
        with torch.inference_mode():
            return network(x)

    return once


if __name__ == "__main__":
    main()
