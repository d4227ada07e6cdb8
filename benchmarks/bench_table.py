"""Markdown tables of results/bench.csv, written between the markers of the documents that show them.

python benchmarks/bench_table.py            # rewrite the tables in README.md, docs/results.md and docs/bench.md
python benchmarks/bench_table.py --check    # fail if a document does not show what the file holds
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import sqrt
from pathlib import Path

from bench import BenchRow
from trueup_lab.page_blocks import fill, rewrite
from trueup_lab.tables import read_table

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = 0.5  # points that a rival may lose on clean images to be compared with
NAMES = {
    "mobilenet_v2_imagenet_bn": "MobileNetV2, ImageNet",
    "efficientnet_lite0_imagenet_bn": "EfficientNet-Lite0, ImageNet",
    "efficientnet_lite1_imagenet_bn": "EfficientNet-Lite1, ImageNet",
    "efficientnet_lite2_imagenet_bn": "EfficientNet-Lite2, ImageNet",
    "resnet50_v1_imagenet_bn": "ResNet-50, ImageNet",
    "resnet20_cifar10_bn_public": "ResNet-20 (public), CIFAR-10",
    "resnet20-bn-cifar10": "ResNet-20, batch norm, CIFAR-10",
    "resnet20-gn-cifar10": "ResNet-20, group norm, CIFAR-10",
    "resnet20-frn-cifar10": "ResNet-20, filter response norm, CIFAR-10",
    "vgg-bn-cifar10": "VGG, CIFAR-10",
    "mobilenet-bn-cifar10": "MobileNetV2, CIFAR-10",
    "convnext-ln-cifar10": "ConvNeXt, layer norm, CIFAR-10",
    "vit-ln-cifar10": "ViT, layer norm, CIFAR-10",
    "resnet20-bn-mnist": "ResNet-20, batch norm, MNIST",
    "resnet20-frn-mnist": "ResNet-20, filter response norm, MNIST",
    "resnet20-gn-mnist": "ResNet-20, group norm, MNIST",
}
IN_README = (
    *("mobilenet_v2_imagenet_bn", "efficientnet_lite0_imagenet_bn", "resnet50_v1_imagenet_bn"),
    *("resnet20-bn-cifar10", "vgg-bn-cifar10", "mobilenet-bn-cifar10", "convnext-ln-cifar10", "vit-ln-cifar10"),
    "resnet20-gn-mnist",
)
FORMER = "evidence"
ALL_SHIFTS = "shifts"  # the rows of their mean in other_shifts.csv
STRONG = "evidence:budget=1.0,strength=0.25,base=0.0,nuisance=True"


def main() -> None:
    """Rewrite or check the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is stale")
    asked = parser.parse_args()
    for path, tables in documents().items():
        text = path.read_text(encoding="utf-8")
        if asked.check and fill(text, tables, str(path)) != text:
            raise SystemExit(f"{path} does not show what results/bench.csv holds; run python benchmarks/bench_table.py")
        if not asked.check:
            rewrite(path, tables)


def documents() -> dict[Path, dict[str, str]]:
    """The documents and their tables."""
    rows = read_table(ROOT / "results" / "bench.csv", BenchRow)
    return {
        ROOT / "README.md": {"bench": default_table(rows, IN_README)},
        ROOT / "docs" / "results.md": {"bench": default_table(rows)},
        ROOT / "docs" / "bench.md": {
            "others": others_table(rows),
            "rivals": rivals_table(read_table(ROOT / "results" / "bench_rivals.csv", BenchRow)),
            "shifts": shifts_table(read_table(ROOT / "results" / "other_shifts.csv", BenchRow)),
        },
    }


def default_table(rows: Sequence[BenchRow], models: Sequence[str] = tuple(NAMES)) -> str:
    """The default on every model: clean and corrupted, beside mixing."""
    lines = [
        "| model | clean | with trueup | corrupted | with trueup | best BN mixing |",
        "|---|---|---|---|---|---|",
    ]
    for model in models:
        mine = [row for row in rows if row.model == model and row.method == "default"]
        clean, corrupted = ([row for row in mine if row.corruption == group] for group in ("identity", "fifteen"))
        if not clean or not corrupted:
            continue
        several = f" ({len(clean)} models)" if len(clean) > 1 else ""
        lines.append(
            f"| {NAMES[model]}{several} | {_before(clean):.1f} | {_gain(clean)} | {_before(corrupted):.1f} | "
            f"**{_gain(corrupted)}** | {_mixing(rows, model)} |"
        )
    return "\n".join(lines) + "\n"


def others_table(rows: Sequence[BenchRow]) -> str:
    """Other methods on the same models: clean, then corrupted, in points over the uncorrected model."""
    kinds = {
        FORMER: "`Evidence()`, the default of 0.1",
        STRONG: "the default's rule at strength 0.25",
        "correct": "the paper's rule",
        **{f"bn-mix{'' if n == 8 else f':prior={n}'}": f"BN mixing, N = {n}" for n in (4, 8, 16, 32, 64)},
    }
    lines = ["| model | method | models | clean | corrupted |", "|---|---|---|---|---|"]
    for model, name in NAMES.items():
        for kind, label in kinds.items():
            some = [r for r in rows if r.model == model and (r.method == kind or _is_paper(r.method, kind))]
            clean = [row for row in some if row.corruption == "identity"]
            corrupted = [row for row in some if row.corruption == "fifteen"]
            if clean and corrupted:
                cells = f"{_mean(clean)} | {_mean(corrupted)}"
                lines.append(f"| {name} | {label} | {len(clean)} | {cells} |")
    return "\n".join(lines) + "\n"


def rivals_table(rows: Sequence[BenchRow]) -> str:
    """Single-image rivals on one network, each with what it needs, best first."""
    lines = ["| method | needs | images per set | clean | corrupted |", "|---|---|---|---|---|"]
    corrupted = [row for row in rows if row.corruption == "fifteen" and row.method != "uncorrected"]
    for row in sorted(corrupted, key=lambda row: -row.gain):
        clean = [r for r in rows if r.corruption == "identity" and r.method == row.method]
        lines.append(f"| `{row.method}` | {row.needs} | {row.images} | {_mean(clean)} | {_mean([row])} |")
    return "\n".join(lines) + "\n"


def shifts_table(rows: Sequence[BenchRow]) -> str:
    """The default under other shifts: the mean over all of them, and the shifts with the smallest and largest gain."""
    lines = ["| model | as trained | the default | best BN mixing | least gain | largest gain |", "|---" * 6 + "|"]
    for model, name in NAMES.items():
        mine = [row for row in rows if row.model == model]
        whole = {row.method: row for row in mine if row.corruption == ALL_SHIFTS}
        if "default" not in whole:
            continue
        each = [r for r in mine if r.method == "default" and r.corruption != ALL_SHIFTS]
        ends = [f"{row.corruption.replace('_', ' ')} {_mean([row])}" for row in sorted(each, key=lambda row: row.gain)]
        mixing = [
            f"{_gain([row])} (N = {method.partition('=')[2] or 8})"
            for method, row in whole.items()
            if method.startswith("bn-mix")
        ]
        own = whole["default"]
        before = own.score - own.gain
        cells = f"{before:.1f} | **{_gain([own])}** | {''.join(mixing) or '-'} | {ends[0]} | {ends[-1]}"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"


def _is_paper(method: str, kind: str) -> bool:
    return kind == "correct" and method.partition(":")[0] == "correct"


def _before(rows: Sequence[BenchRow]) -> float:
    """Mean score of the uncorrected models."""
    return sum(row.score - row.gain for row in rows) / len(rows)


def _gain(rows: Sequence[BenchRow]) -> str:
    """Mean gain over models; its standard error is over images, which the models share."""
    gain, error = (sum(values) / len(rows) for values in ([r.gain for r in rows], [r.error for r in rows]))
    return f"{gain:+.1f} ± {error:.1f}"


def _mean(rows: Sequence[BenchRow]) -> str:
    """Mean gain over models, and its standard error: over models if there are several, else over images."""
    gains = [row.gain for row in rows]
    mean = sum(gains) / len(gains)
    if len(gains) == 1:
        return f"{mean:+.2f} ± {rows[0].error:.2f}"
    spread = sqrt(sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1) / len(gains))
    return f"{mean:+.2f} ± {spread:.2f}"


def _mixing(rows: Sequence[BenchRow], model: str) -> str:
    """The best mixing whose clean loss is within `ALLOWED`, as a mean over the models of that name."""
    best = ""
    top = float("-inf")
    for method in sorted({row.method for row in rows if row.model == model and row.method.startswith("bn-mix")}):
        some = [row for row in rows if row.model == model and row.method == method]
        clean = [row.gain for row in some if row.corruption == "identity"]
        gains = [row.gain for row in some if row.corruption == "fifteen"]
        if clean and gains and sum(clean) / len(clean) >= -ALLOWED and sum(gains) / len(gains) > top:
            top = sum(gains) / len(gains)
            best = f"{top:+.1f} (N = {method.partition('=')[2] or 8})"
    return best or "-"


if __name__ == "__main__":
    main()
