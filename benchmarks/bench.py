"""The bench: the default, the paper's rule and every rival on every model, in one run, with paired standard errors.

    python benchmarks/bench.py cifar10 vgg-bn-cifar10 results/models/resnet20-bn-cifar10.safetensors --data ROOT
    python benchmarks/bench.py imagenet weights/mobilenet_v2_imagenet_bn.safetensors --data ROOT --images 400

A row per model, method and test set: accuracy in percent, the difference to the uncorrected model in points, and the
standard error of that difference, paired over images. New rows replace those of the same model and method.
`identity` is clean. (Segmentation: benchmarks/segmentation.py.)
`fifteen` and `four` are means over severities 1 to 5 of the fifteen corruptions that results are reported on and of
the four on which constants may be chosen; their standard errors are over images, each counted by its mean over sets.

ImageNet is calibrated on every other image of `imagenet_cal_2k` and tested on the others and on `imagenet_val_1k`;
CIFAR-10 and MNIST are calibrated on training images. MNIST-C has one severity per corruption, and all of its
corruptions are reported on.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import trueup
from trueup_lab.data.corruptions import CHOSEN_ON, REPORTED_ON, corrupt
from trueup_lab.data.imagenet import ImageFolder
from trueup_lab.data.images import Images, Normalisation
from trueup_lab.data.sets import SETS
from trueup_lab.devices import device_name
from trueup_lab.evaluation import Method, parse_method, read_subjects
from trueup_lab.evaluation.methods import Calibrating, Default, Mixed, Uncorrected, has_batch_norm
from trueup_lab.experiments.specs import PAPERS
from trueup_lab.tables import append_rows, number, read_table, start_table, write_table

MNIST_C = (
    *("shot_noise", "impulse_noise", "glass_blur", "motion_blur", "shear", "scale", "rotate", "brightness"),
    *("translate", "stripe", "fog", "spatter", "dotted_line", "zigzag", "canny_edges"),
)
MIXING = tuple(Mixed(prior) for prior in (4, 8, 16, 32, 64))
RIVALS = ("iabn", "quantile", "aqr", "intent", "views", "pea")
CALIBRATED = {"cifar10": 2000, "mnist": 2000, "imagenet": 1000}


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One model, method and test set."""

    set: str
    model: str
    seed: int
    method: str
    needs: str
    corruption: str
    severity: int
    images: int
    score: float = number(".3f")
    gain: float = number(".3f")
    error: float = number(".3f")
    changed: float = number(".2f")  # percent of answers that differ from the uncorrected model's
    rule: str  # that calibration chose
    calibrated: int
    torch: str
    device: str


class Data(NamedTuple):
    """Calibration and test images, uint8; labels `(n,)`."""

    calibration: Tensor
    test: Tensor
    labels: Tensor


class Entry(NamedTuple):
    """One model with its prepared methods."""

    name: str
    seed: int
    normalise: Callable[[Tensor], Tensor]
    methods: list[tuple[Method, Callable[[Tensor], Tensor]]]
    rule: str


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=list(CALIBRATED))
    parser.add_argument("models", nargs="+", help="model files, or names of bundled models")
    parser.add_argument("--data", type=Path, required=True, help="the data root")
    parser.add_argument("--seeds", type=int, nargs="*", help="seeds in files of several models (default: all)")
    parser.add_argument("--method", action="append", help="only this method; repeatable (default: all)")
    parser.add_argument("--rivals", action="store_true", help="also measure the rivals other than mixing")
    parser.add_argument("--images", type=int, default=1000, help="images of each corrupted set")
    parser.add_argument("--clean", type=int, help="clean test images (default: all)")
    parser.add_argument("--calibrate", type=int, help="clean images for calibration")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/bench.csv"))
    asked = parser.parse_args()
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {what}", flush=True)

    data = read(asked.set, asked.data, asked.calibrate or CALIBRATED[asked.set])
    say(f"{asked.set}: {len(data.calibration)} images for calibration, {len(data.test)} for testing")
    entries = []
    for where in asked.models:
        for name, seed, model, normalise, methods in subjects(asked, where):
            entries.append(prepare(name, seed, model, normalise, methods, data, asked))
            say(f"{name} {seed}: {entries[-1].rule}")
    rows = Rows(asked, data, entries)
    start_table(asked.out, BenchRow)
    forget(asked.out, {(asked.set, e.name, e.seed, method.name) for e in entries for method, _ in e.methods})
    names = MNIST_C if asked.set == "mnist" else (*CHOSEN_ON, *REPORTED_ON)
    levels: tuple[int | None, ...] = (None,) if asked.set == "mnist" else (1, 2, 3, 4, 5)
    rows.measure("identity", 0, data.test[: asked.clean])
    append_rows(asked.out, rows.take())
    for corruption in names:
        for severity in levels:
            made = corrupt_set(asked, data.test[: asked.images], corruption, severity)
            rows.measure(corruption, severity or 0, made)
        append_rows(asked.out, rows.take())
        say(corruption)
    groups = {"fifteen": MNIST_C if asked.set == "mnist" else REPORTED_ON, "four": CHOSEN_ON}
    for group, members in groups.items():
        if group == "fifteen" or asked.set != "mnist":
            append_rows(asked.out, rows.means(group, members))


def forget(path: Path, measured: set[tuple[str, str, int, str]]) -> None:
    """Remove the rows of models and methods that are measured again."""
    rows = read_table(path, BenchRow)
    write_table(path, BenchRow, [row for row in rows if (row.set, row.model, row.seed, row.method) not in measured])


def subjects(asked: argparse.Namespace, where: str) -> list[tuple[str, int, nn.Module, Normalisation, list[Method]]]:
    """The models of a file, with their normalisation and the methods that apply to them."""
    found = read_subjects(where, asked.seeds)
    return [(s.name, s.seed, s.model, s.normalisation, methods_for(asked, s.model, s.norm)) for s in found]


def methods_for(asked: argparse.Namespace, model: nn.Module, norm: str) -> list[Method]:
    """The uncorrected model first, then the default, the former default, the paper's rule, mixing and rivals."""
    if asked.method:
        chosen = [parse_method(text) for text in asked.method]
    else:
        papers = PAPERS.get(asked.set, PAPERS["imagenet"])
        chosen = [Default(), parse_method("evidence"), papers.get(norm, papers["bn"]), *MIXING]
        chosen += [parse_method(text) for text in RIVALS] if asked.rivals else []
    fits = [method for method in chosen if has_batch_norm(model) or not method.needs.batch_norm]
    return [Uncorrected(), *fits]


def prepare(
    name: str,
    seed: int,
    model: nn.Module,
    normalise: Normalisation,
    methods: Sequence[Method],
    data: Data,
    asked: argparse.Namespace,
) -> Entry:
    """Calibrate a model, let it choose its setting, and prepare every method."""
    model = model.to(asked.device).eval()
    batches = [normalise(part.to(asked.device)) for part in data.calibration.split(asked.batch)]
    targets = trueup.calibrate(model, batches, progress=False, decide=any(isinstance(m, Default) for m in methods))
    ready = []
    for method in methods:
        known = method.calibrate(model, batches) if isinstance(method, Calibrating) else targets
        ready.append((method, method.prepare(model, known)))  # type: ignore[arg-type]
    return Entry(name, seed, normalise, ready, repr(targets.rule))


class Rows:
    """Rows as they are measured, and the gain of every image on every set."""

    def __init__(self, asked: argparse.Namespace, data: Data, entries: list[Entry]) -> None:
        self.asked, self.data, self.entries = asked, data, entries
        self.gains: dict[tuple[str, int, str], dict[str, list[Tensor]]] = {}
        self.scores: dict[tuple[str, int, str], dict[str, list[float]]] = {}
        self._rows: list[BenchRow] = []

    def take(self) -> list[BenchRow]:
        """The rows since the last call."""
        rows, self._rows = self._rows, []
        return rows

    def measure(self, corruption: str, severity: int, images: Tensor) -> None:
        """Test every model and method on one set."""
        labels = self.data.labels[: len(images)]
        for entry in self.entries:
            own: Tensor | None = None
            before: Tensor | None = None
            for method, network in entry.methods:
                said = answers(network, entry.normalise, images, self.asked)
                values = 100 * (said == labels).double()
                score = float(values.mean())
                if own is None or before is None:
                    own, before, first = said, values, score
                gain = values - before
                key = (entry.name, entry.seed, method.name)
                self.gains.setdefault(key, {}).setdefault(corruption, []).append(gain)
                self.scores.setdefault(key, {}).setdefault(corruption, []).append(score)
                error = error_of(gain)
                changed = 100 * float((said != own).double().mean())
                self._add(entry, method, corruption, severity, len(images), score, score - first, error, changed)

    def means(self, group: str, members: Sequence[str]) -> list[BenchRow]:
        """Rows of the mean over a group of corruptions."""
        for entry in self.entries:
            first = self._mean(entry, entry.methods[0][0], members)
            for method, _ in entry.methods:
                key = (entry.name, entry.seed, method.name)
                gains = torch.stack([g for name in members for g in self.gains[key][name]]).mean(dim=0)
                score = self._mean(entry, method, members)
                gain, error = score - first, error_of(gains)
                self._add(entry, method, group, 0, len(gains), score, gain, error, math.nan)
        return self.take()

    def _mean(self, entry: Entry, method: Method, members: Sequence[str]) -> float:
        scores = self.scores[entry.name, entry.seed, method.name]
        every = [score for name in members for score in scores[name]]
        return sum(every) / len(every)

    def _add(
        self,
        entry: Entry,
        method: Method,
        corruption: str,
        severity: int,
        images: int,
        score: float,
        gain: float,
        error: float,
        changed: float,
    ) -> None:
        self._rows.append(
            BenchRow(
                set=self.asked.set,
                model=entry.name,
                seed=entry.seed,
                method=method.name,
                needs=str(method.needs),
                corruption=corruption,
                severity=severity,
                images=images,
                score=score,
                gain=gain,
                error=error,
                changed=changed,
                rule=entry.rule if isinstance(method, Default) else "",
                calibrated=len(self.data.calibration),
                torch=torch.__version__,
                device=device_name(self.asked.device),
            )
        )


def answers(
    network: Callable[[Tensor], Tensor],
    normalise: Callable[[Tensor], Tensor],
    images: Tensor,
    asked: argparse.Namespace,
) -> Tensor:
    """The most likely class of every image, on the CPU."""
    parts = []
    for part in images.split(asked.batch):
        with torch.no_grad():
            parts.append(network(normalise(part.to(asked.device))).argmax(1).to(torch.int16).cpu())
    return torch.cat(parts)


def error_of(gains: Tensor) -> float:
    """Standard error of a mean over images."""
    return float(gains.std() / math.sqrt(len(gains))) if len(gains) > 1 else math.nan


def corrupt_set(asked: argparse.Namespace, images: Tensor, name: str, severity: int | None) -> Tensor:
    """Corrupt test images on the device; they come back on the CPU."""
    family = {"cifar10": "cifar10-c", "mnist": "mnist-c"}.get(asked.set, "imagenet-c")
    parts = []
    for first, part in zip(range(0, len(images), asked.batch), images.split(asked.batch), strict=True):
        numbers = torch.arange(first, first + len(part))
        made = corrupt(part.to(asked.device), name, severity, family=family, indices=numbers, root=asked.data)
        parts.append(made.cpu())
    return torch.cat(parts)


def read(name: str, root: Path, count: int) -> Data:
    """Calibration and test images of a set, in a fixed random order."""
    if name == "imagenet":
        other, tested = folder(root / "imagenet_cal_2k" / "val"), folder(root / "imagenet_val_1k" / "val")
        known = shuffled(Images(other.images[::2], other.labels[::2]))
        both = Images(*(torch.cat([a, b[1::2]]) for a, b in zip(tested, other, strict=True)))
        test = shuffled(both)
        return Data(known.images[:count], test.images, test.labels)
    train, test = (shuffled(SETS[name].load(part, root)) for part in ("train", "test"))
    return Data(train.images[:count], test.images, test.labels)


def shuffled(images: Images) -> Images:
    """Return the images in a fixed random order."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return Images(images.images[order], images.labels[order])


def folder(path: Path) -> Images:
    """All images of a folder at 224 x 224."""
    source = ImageFolder(path)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        images = torch.stack([image for image, _ in pool.map(source.__getitem__, range(len(source)))])
    return Images(images, torch.tensor([label for _, label in source.files]))


if __name__ == "__main__":
    main()
