"""Which rule corrects single images best? Many rules, calibrated and scored on many models.

Chosen on clean images and four corruptions only (speckle noise, gaussian blur, spatter, saturate; for MNIST blur,
speckle and fade, none of them in MNIST-C); the fifteen others only with `--final`.

    PYTHONPATH=src python benchmarks/method_lab sweep --data ROOT --out DIR --device cuda --time-limit 240

writes sweep.csv (a row a set), summary.csv (a row a model and rule) and report.txt as it goes. What is not there is
skipped, and said. In the report: `agree`, the share of clean test predictions that stay; `regret`, how much less
probable the uncorrected model finds the new answers, in points; `held`, the same two on clean images kept out of the
calibration (for ImageNet, on the calibration's own). For rules with a gate: `x1`, `x5`, `x20`, the share of clean test
images whose exceedance is at most 1, 5, 20 % (calibrated if it is that); `found`, of the corrupted ones at most 5 %.
"""

from __future__ import annotations

import argparse
import copy
import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from grid import configs
from rules import Gated
from scoring import Bench
from torch import nn

from data import CHOOSE, Task, task
from trueup.data.corruptions import corruptions
from trueup.data.corruptions.blur import gaussian_blur
from trueup.data.images import IMAGENET, Images
from trueup.models.files import read_models
from trueup.models.public import load_public


def proxies(images: Images, level: int) -> dict[str, Images]:
    """For MNIST, corruptions that MNIST-C does not have: blur, speckle, and contrast lost towards grey."""
    x = images.images.float()
    step = {1: 0, 2: 0, 3: 1, 4: 1, 5: 2}[level]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(level)).to(x.device)
    made = {
        "gaussian_blur": gaussian_blur(images.images, (0.6, 1.0, 1.6)[step]).float(),
        "speckle_noise": x + noise * (0.3, 0.6, 0.9)[step] * (x + 40),
        "fade": 127.5 + (x - 127.5) * (0.8, 0.5, 0.3)[step],
    }
    return {k: Images(v.round().clamp(0, 255).to(torch.uint8), images.labels) for k, v in made.items()}


def subjects(folder: Path, root: Path, seeds: int) -> list[tuple[str, str, Callable[[], list[nn.Module]]]]:
    """(task, name, models) of what is there; says what is not."""
    found = []

    def add(set_name: str, name: str, path: Path, read: Callable[[Path], list[nn.Module]]) -> None:
        if path.exists():
            found.append((set_name, name, lambda: read(path)))
        else:
            print(f"skip {name}: no {path}", flush=True)

    def some(path: Path) -> list[nn.Module]:
        return list(read_models(path).values())[:seeds]

    add(
        "cifar10",
        "public-resnet20",
        root / "weights/resnet20_cifar10_bn_public.safetensors",
        lambda p: [load_public(p)],
    )
    for norm in ("bn", "gn", "frn"):
        add("cifar10", f"cifar10-{norm}", folder / f"resnet20-{norm}-cifar10.safetensors", some)
    add("imagenet", "public-resnet50", root / "weights/resnet50_v1_imagenet_bn.safetensors", lambda p: [load_public(p)])
    for norm in ("bn", "gn", "frn"):
        add("mnist", f"mnist-{norm}", folder / f"resnet20-{norm}-mnist.safetensors", some)
    return found


def sweep(args: argparse.Namespace) -> None:
    start = time.time()
    out, root = Path(args.out), Path(args.data)
    out.mkdir(parents=True, exist_ok=True)
    device = args.device
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    benches: list[Bench] = []
    tasks: dict[str, Task | None] = {}
    for set_name, name, read in subjects(Path(args.models), root, args.seeds):
        if args.only and not any(name.startswith(o) for o in args.only):
            continue
        if set_name not in tasks:
            try:
                tasks[set_name] = make_task(set_name, root, args)
                print(f"{time.time() - start:6.1f}s {set_name}: {len(tasks[set_name].sets)} sets", flush=True)
            except (OSError, RuntimeError, ImportError, ValueError) as error:
                print(f"skip {set_name}: {error}", flush=True)
                tasks[set_name] = None
        if tasks[set_name] is None:
            continue
        for number, model in enumerate(read()):
            view = copy.copy(tasks[set_name])
            if name == "public-resnet20":
                view.normalise = IMAGENET
            batch = args.batch if set_name != "imagenet" else min(args.batch, 250)
            benches.append(Bench(model.to(device), view, f"{name}/{number}", batch))
    print(f"{time.time() - start:6.1f}s {len(benches)} models", flush=True)
    rows: list[dict[str, Any]] = []
    with (out / "sweep.csv").open("w", newline="") as file, (out / "summary.csv").open("w", newline="") as short:
        long = csv.writer(file)
        long.writerow(("model", "rule", "set", "severity", "images", "accuracy"))
        brief = csv.DictWriter(
            short,
            (
                "model",
                "rule",
                "clean",
                "agree",
                "regret",
                "held",
                "held_regret",
                "mean",
                "s1",
                "s2",
                "s3",
                "s4",
                "s5",
                *CHOOSE,
                "fade",
                "x1",
                "x5",
                "x20",
                "found",
                "seconds",
            ),
            extrasaction="ignore",
        )
        brief.writeheader()
        for number, tier in enumerate(configs()):
            for name, make, sequential in tier:
                if args.rules and not any(r in name for r in args.rules):
                    continue
                for bench in benches:
                    heavy = bench.name.startswith("public-resnet50")
                    if time.time() - start > args.time_limit:
                        print("time is up", flush=True)
                        report(rows, out)
                        return
                    # beyond the third tier one seed of each will do, and the big model sees the first two only
                    if (number > 2 and not bench.name.endswith("/0")) or (heavy and number > 1 + args.heavy):
                        continue
                    if name.startswith("bn-mix") and "bn" not in bench.name and "public" not in bench.name:
                        continue
                    try:
                        rules = make()
                        if heavy and isinstance(rules.get("norm"), Gated):
                            rules["norm"].at_resnet50()
                        result = bench.score(rules, sequential=sequential)
                    except RuntimeError as error:
                        print(f"{bench.name} {name}: {str(error)[:200]}", flush=True)
                        continue
                    for (corruption, level), value in result["sets"].items():
                        count = len(bench.task.sets[corruption, level])
                        long.writerow((bench.name, name, corruption, level, count, f"{value:.3f}"))
                    row = {"model": bench.name, "rule": name, **{k: v for k, v in result.items() if k != "sets"}}
                    brief.writerow({k: f"{v:.3f}" if isinstance(v, float) else v for k, v in row.items()})
                    rows.append(row)
                file.flush()
                short.flush()
            print(f"{time.time() - start:6.1f}s tier {number} done", flush=True)
    report(rows, out)


def make_task(name: str, root: Path, args: argparse.Namespace) -> Task:
    names = None
    if args.final:
        family = {"cifar10": "cifar10-c", "mnist": "mnist-c", "imagenet": "imagenet-c"}[name]
        names = [c for c in corruptions(family) if c not in CHOOSE or family == "mnist-c"]
    made = task(
        name,
        root,
        device=args.device,
        calibrate=args.calibrate,
        held=args.held,
        images=args.images,
        clean=args.clean,
        levels=args.levels,
        names=names,
        cache=Path(args.cache) if args.cache else None,
    )
    if name == "mnist" and not args.final:
        test = made.sets["clean", 0].first(args.images)
        for level in args.levels:
            made.sets |= {(k, level): v for k, v in proxies(test, level).items()}
    return made


def report(rows: list[dict[str, Any]], out: Path) -> None:
    """A table for each kind of model: means over seeds, differences from uncorrected."""
    lines = []
    plain = {r["model"]: r for r in rows if r["rule"] == "uncorrected"}
    for kind in dict.fromkeys(r["model"].split("/")[0] for r in rows):
        these = [r for r in rows if r["model"].startswith(f"{kind}/")]
        titles = "seeds  clean  d.clean  agree regret   held regret   mean  d.mean   sev5    x1    x5   x20 found"
        lines += [f"\n{kind}", f"{'rule':50s} {titles}"]
        for rule in dict.fromkeys(r["rule"] for r in these):
            some = [r for r in these if r["rule"] == rule]

            def mean(f: Callable[[dict[str, Any]], float], some: list[dict[str, Any]] = some) -> float:
                return sum(f(r) for r in some) / len(some)

            lines.append(
                f"{rule:50s} {len(some):5d} {mean(lambda r: r['clean']):6.2f} "
                f"{mean(lambda r: r['clean'] - plain[r['model']]['clean']):+7.2f} {mean(lambda r: r['agree']):7.2f} "
                f"{mean(lambda r: r['regret']):6.2f} {mean(lambda r: r['held']):6.2f} "
                f"{mean(lambda r: r['held_regret']):6.2f} {mean(lambda r: r['mean']):6.2f} "
                f"{mean(lambda r: r['mean'] - plain[r['model']]['mean']):+7.2f} {mean(lambda r: r.get('s5', 0)):6.2f}"
                + "".join(f" {mean(lambda r, k=k: r[k]):5.1f}" for k in ("x1", "x5", "x20", "found") if k in some[0])
            )
    text = "\n".join(lines)
    (out / "report.txt").write_text(text + "\n")
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["sweep"])
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--models", default="results/models")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--time-limit", type=float, default=240)
    parser.add_argument("--images", type=int, default=500, help="of each corrupted set")
    parser.add_argument("--clean", type=int, default=10000)
    parser.add_argument("--calibrate", type=int, default=4000)
    parser.add_argument("--held", type=int, default=2000)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--heavy", type=int, default=0, help="further tiers for the big model")
    parser.add_argument("--only", nargs="*", help="models whose name starts so")
    parser.add_argument("--rules", nargs="*", help="rules whose name holds this")
    parser.add_argument("--cache", default="", help="folder for the corrupted images")
    parser.add_argument("--final", action="store_true", help="the fifteen corruptions that nothing is chosen on")
    sweep(parser.parse_args())


if __name__ == "__main__":
    main()
