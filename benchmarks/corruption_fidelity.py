"""Compare our corruptions with the outputs of the original generators: a CSV file and the table in the docs.

    python benchmarks/corruption_fidelity.py [--data ROOT] [--csv FILE] [--docs FILE]

The data root must hold `golden/cifar10_c.npz` and `golden/mnist_c.npz` (outputs of the original generators for 24 test
images each), CIFAR-10's test batch, the frost textures, and the public ResNet-20's weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trueup_lab.data import cifar10
from trueup_lab.data.corruptions import corrupt, corruption_names, severities
from trueup_lab.data.fidelity import WITHOUT_CHANCE, change, within
from trueup_lab.data.images import IMAGENET
from trueup_lab.data.root import data_root
from trueup_lab.models.public import load_public
from trueup_lab.tables import number, write_table

HERE = Path(__file__).resolve().parent
SEEDS = 12
START, END = "<!-- table: start -->", "<!-- table: end -->"


@dataclass(frozen=True, kw_only=True)
class FidelityRow:
    """One corruption and severity: how ours and the original change 24 images.

    `within_2` is the percentage of bytes within two grey levels, for corruptions without randomness. `furthest` is the
    largest difference of any statistic, in standard deviations of ours over seeds, for random ones.
    """

    family: str
    corruption: str
    severity: int | None
    chance: str  # fixed or random
    within_2: float | None = number(".2f")
    mean_ours: float = number(".2f")
    mean_theirs: float = number(".2f")
    spread_ours: float = number(".2f")
    spread_theirs: float = number(".2f")
    correlation_ours: float = number(".3f")
    correlation_theirs: float = number(".3f")
    accuracy_ours: float | None = number(".1f")
    accuracy_theirs: float | None = number(".1f")
    furthest: float | None = number(".1f")
    agrees: str  # yes or no


def main() -> None:
    """Compare, write the CSV file, and replace the table in the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--csv", type=Path, default=HERE.parent / "results" / "corruption_fidelity.csv")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs" / "corruptions.md")
    options = parser.parse_args()
    root = data_root(options.data)
    rows = [*cifar_rows(root), *mnist_rows(root)]
    write_table(options.csv, FidelityRow, rows)
    text = options.docs.read_text(encoding="utf-8")
    before, rest = text.split(START)
    after = rest.split(END)[1]
    options.docs.write_text(f"{before}{START}\n{table(rows)}\n{END}{after}", encoding="utf-8", newline="\n")
    print(table(rows))


def cifar_rows(root: Path) -> list[FidelityRow]:
    """Compare CIFAR-10-C at all severities, with the accuracy of the public ResNet-20."""
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


def mnist_rows(root: Path) -> list[FidelityRow]:
    """Compare MNIST-C at its published severities."""
    golden = np.load(root / "golden" / "mnist_c.npz")
    clean = as_images(golden["identity"][..., None])
    numbers = list(range(9976, 10000))
    return [
        compare("mnist-c", name, None, clean, as_images(golden[name][..., None]), numbers, None, root)
        for name in corruption_names("mnist-c")
    ]


def as_images(array: np.ndarray) -> torch.Tensor:
    """Turn an array (images, height, width, channels) into a tensor (images, channels, height, width)."""
    return torch.from_numpy(array.transpose(0, 3, 1, 2).copy())


def compare(
    family: str,
    name: str,
    severity: int | None,
    clean: torch.Tensor,
    theirs: torch.Tensor,
    numbers: list[int],
    accuracy: Callable[[torch.Tensor], float] | None,
    root: Path,
) -> FidelityRow:
    """Compare one corruption. A random one agrees if theirs is within 4.5 standard deviations of ours over seeds."""
    chance = name not in WITHOUT_CHANCE[family]
    made = [
        corrupt(clean, name, severity, family=family, indices=numbers, seed=seed, root=root)
        for seed in range(SEEDS if chance else 1)
    ]
    statistics = np.array([[*change(clean, m), accuracy(m) if accuracy else 0.0] for m in made])
    their = np.array([*change(clean, theirs), accuracy(theirs) if accuracy else 0.0])
    ours = statistics.mean(0)
    near = within(made[0], theirs)
    # Smallest deviations that count: half a grey level of rounding in the mean, one image of 24 in the accuracy.
    floor = np.array([0.55 / 4.5, 0.3 / 4.5, 0.02 / 4.5, 100 / 24 / 4.5])
    spread = statistics.std(0, ddof=1) * (1 + 1 / SEEDS) ** 0.5 if chance else floor
    furthest = float((np.abs(ours - their) / np.maximum(spread, floor)).max())
    return FidelityRow(
        family=family,
        corruption=name,
        severity=severity,
        chance="random" if chance else "fixed",
        within_2=None if chance else 100 * near,
        mean_ours=ours[0],
        mean_theirs=their[0],
        spread_ours=ours[1],
        spread_theirs=their[1],
        correlation_ours=ours[2],
        correlation_theirs=their[2],
        accuracy_ours=ours[3] if accuracy else None,
        accuracy_theirs=their[3] if accuracy else None,
        furthest=furthest if chance else None,
        agrees="yes" if (furthest <= 4.5 if chance else near >= 0.995) else "no",
    )


def table(rows: Sequence[FidelityRow]) -> str:
    """Return the table of the document: one line per corruption, averaged over severities."""
    lines = [
        "| | within 2 levels | mean change | spread | correlation | ResNet-20 | severities that agree |",
        "|---|---|---|---|---|---|---|",
    ]
    for family in ("cifar10-c", "mnist-c"):
        for name in corruption_names(family):
            mine = [row for row in rows if (row.family, row.corruption) == (family, name)]
            near = min((f"{row.within_2:.1f} %" for row in mine if row.within_2 is not None), default="random")
            agree = f"{sum(row.agrees == 'yes' for row in mine)} of {len(mine)}"
            pairs = [_pair(mine, "mean", 1), _pair(mine, "spread", 1), _pair(mine, "correlation", 2)]
            cells = (f"{family} {name}", near, *pairs, _pair(mine, "accuracy", 1), agree)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _pair(rows: Sequence[FidelityRow], what: str, digits: int) -> str:
    """Format the means of ours and theirs; empty if they were not measured."""
    if getattr(rows[0], f"{what}_ours") is None:
        return ""
    ours, theirs = (np.mean([getattr(row, f"{what}_{who}") for row in rows]) for who in ("ours", "theirs"))
    return f"{ours:.{digits}f} / {theirs:.{digits}f}"


if __name__ == "__main__":
    main()
