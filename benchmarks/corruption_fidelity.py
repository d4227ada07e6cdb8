"""Our corruptions beside the originals' outputs, one by one: writes a CSV and the table in the docs.

    python benchmarks/corruption_fidelity.py [--data ROOT] [--csv FILE] [--docs FILE]

Needs under the data root: `golden/cifar10_c.npz` and `golden/mnist_c.npz` (outputs of the original generators
for 24 test images each), CIFAR-10's test batch, the frost textures, and the public ResNet-20's weights.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
import torch

from trueup_lab.data import cifar10
from trueup_lab.data.corruptions import corrupt, corruption_names, severities
from trueup_lab.data.fidelity import WITHOUT_CHANCE, change, within
from trueup_lab.data.images import IMAGENET
from trueup_lab.data.root import data_root
from trueup_lab.models.public import load_public

HERE = Path(__file__).resolve().parent
SEEDS = 12
COLUMNS = (
    "family",
    "corruption",
    "severity",
    "chance",
    "within_2",
    "mean_ours",
    "mean_theirs",
    "spread_ours",
    "spread_theirs",
    "correlation_ours",
    "correlation_theirs",
    "accuracy_ours",
    "accuracy_theirs",
    "furthest",
    "agrees",
)
START, END = "<!-- table: start -->", "<!-- table: end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--csv", type=Path, default=HERE.parent / "results" / "corruption_fidelity.csv")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs" / "corruptions.md")
    options = parser.parse_args()
    root = data_root(options.data)
    rows = [*cifar_rows(root), *mnist_rows(root)]
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    text = options.docs.read_text()
    before, rest = text.split(START)
    after = rest.split(END)[1]
    options.docs.write_text(f"{before}{START}\n{table(rows)}\n{END}{after}")
    print(table(rows))


def cifar_rows(root: Path) -> list[dict[str, object]]:
    """Each corruption at each severity, with the accuracy of the public ResNet-20."""
    golden = np.load(root / "golden" / "cifar10_c.npz")
    clean = as_images(golden["clean"])
    numbers = list(range(976, 1000))
    labels = cifar10.load("test", root).labels[numbers]
    model = load_public(root / "weights" / "resnet20_cifar10_bn_public.safetensors")

    def accuracy(images: torch.Tensor) -> float:
        with torch.inference_mode():
            return 100 * float((model(IMAGENET(images)).argmax(1) == labels).float().mean())

    return [
        compare("cifar10-c", name, severity, clean, as_images(golden[name][severity - 1]), numbers, accuracy, root)
        for name in corruption_names("cifar10-c")
        for severity in severities("cifar10-c", name)
    ]


def mnist_rows(root: Path) -> list[dict[str, object]]:
    """Each corruption at its published severity."""
    golden = np.load(root / "golden" / "mnist_c.npz")
    clean = as_images(golden["identity"][..., None])
    numbers = list(range(9976, 10000))
    return [
        compare("mnist-c", name, None, clean, as_images(golden[name][..., None]), numbers, None, root)
        for name in corruption_names("mnist-c")
    ]


def as_images(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.transpose(0, 3, 1, 2).copy())


def compare(family, name, severity, clean, theirs, numbers, accuracy, root) -> dict[str, object]:
    """One row. A random corruption agrees if theirs is within 4.5 spreads of ours over seeds."""
    chance = name not in WITHOUT_CHANCE[family]
    made = [
        corrupt(clean, name, severity, family=family, indices=numbers, seed=seed, root=root)
        for seed in range(SEEDS if chance else 1)
    ]
    statistics = np.array([[*change(clean, m), accuracy(m) if accuracy else 0.0] for m in made])
    their = np.array([*change(clean, theirs), accuracy(theirs) if accuracy else 0.0])
    ours = statistics.mean(0)
    near = within(made[0], theirs)
    # floors: half a grey level of rounding in the mean, and one image of 24 in the accuracy
    floor = np.array([0.55 / 4.5, 0.3 / 4.5, 0.02 / 4.5, 100 / 24 / 4.5])
    spread = statistics.std(0, ddof=1) * (1 + 1 / SEEDS) ** 0.5 if chance else floor
    furthest = float((np.abs(ours - their) / np.maximum(spread, floor)).max())
    return {
        "family": family,
        "corruption": name,
        "severity": severity or "",
        "chance": "random" if chance else "fixed",
        "within_2": "" if chance else f"{100 * near:.2f}",
        "mean_ours": f"{ours[0]:.2f}",
        "mean_theirs": f"{their[0]:.2f}",
        "spread_ours": f"{ours[1]:.2f}",
        "spread_theirs": f"{their[1]:.2f}",
        "correlation_ours": f"{ours[2]:.3f}",
        "correlation_theirs": f"{their[2]:.3f}",
        "accuracy_ours": f"{ours[3]:.1f}" if accuracy else "",
        "accuracy_theirs": f"{their[3]:.1f}" if accuracy else "",
        "furthest": f"{furthest:.1f}" if chance else "",
        "agrees": "yes" if (furthest <= 4.5 if chance else near >= 0.995) else "no",
    }


def table(rows: list[dict[str, object]]) -> str:
    """Severities averaged, a line a corruption."""
    lines = [
        "| | within 2 levels | mean change | spread | correlation | ResNet-20 | severities that agree |",
        "|---|---|---|---|---|---|---|",
    ]
    for family in ("cifar10-c", "mnist-c"):
        for name in corruption_names(family):
            mine = [row for row in rows if (row["family"], row["corruption"]) == (family, name)]

            def pair(what: str, digits: int, mine: list[dict[str, object]] = mine) -> str:
                if not mine[0][f"{what}_ours"]:
                    return ""
                ours, theirs = (np.mean([float(row[f"{what}_{who}"]) for row in mine]) for who in ("ours", "theirs"))
                return f"{ours:.{digits}f} / {theirs:.{digits}f}"

            near = min((f"{float(row['within_2']):.1f} %" for row in mine if row["within_2"]), default="random")
            agree = f"{sum(row['agrees'] == 'yes' for row in mine)} of {len(mine)}"
            cells = (f"{family} {name}", near, pair("mean", 1), pair("spread", 1), pair("correlation", 2))
            lines.append(f"| {' | '.join(cells)} | {pair('accuracy', 1)} | {agree} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
