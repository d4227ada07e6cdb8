"""What rules are chosen on: clean images, and corruptions that are not among the fifteen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trueup.data import cifar10, imagenet, mnist
from trueup.data.corruptions import corrupt, severities
from trueup.data.images import IMAGENET, NORMALISATION, Images, Normalisation

CHOOSE = ("speckle_noise", "gaussian_blur", "spatter", "saturate")


@dataclass
class Task:
    """One family's images: for calibration, for choosing clean, and the corrupted sets."""

    name: str
    normalise: Normalisation
    calibration: Tensor  # uint8
    held: Tensor  # uint8, clean training images kept out of the calibration
    sets: dict[tuple[str, int], Images]


def task(
    name: str,
    root: Path,
    *,
    device: str,
    calibrate: int,
    held: int,
    images: int,
    clean: int,
    levels: Iterable[int],
    names: Iterable[str] | None = None,
    cache: Path | None = None,
) -> Task:
    if name == "cifar10":
        train = partial_cifar(root)
        test = cifar10.load("test", root)
        family, normalise = "cifar10-c", NORMALISATION["cifar10"]
    elif name == "mnist":
        train, test = mnist.load("train", root), mnist.load("test", root)
        family, normalise = "mnist-c", NORMALISATION["mnist"]
    else:
        folder = imagenet.ImageFolder(root / "imagenet_val_1k" / "val")
        every = cached(cache, "imagenet", lambda: read_folder(folder))
        even = torch.arange(0, len(every), 2)
        odd = even + 1
        train = Images(every.images[even], every.labels[even])
        test = Images(every.images[odd], every.labels[odd])
        family, normalise = "imagenet-c", IMAGENET
        calibrate, held = min(calibrate, len(train)), 0
    sets = {("clean", 0): test.first(clean).to(device)}
    some = test.first(images).to(device)
    for corruption in names if names is not None else (CHOOSE if family != "mnist-c" else ()):
        for level in (severities(family, corruption) or (None,)) if family == "mnist-c" else levels:
            if family == "mnist-c" and level is not None and level not in levels:
                continue
            key = f"{name}-{corruption}-{level}-{len(some)}"
            made = cached(
                cache,
                key,
                lambda c=corruption, s=level: Images(
                    corrupt(some.images, c, s, family=family, root=root).cpu(), some.labels.cpu()
                ),
            )
            sets[(corruption, level or 0)] = made.to(device)
    return Task(
        name,
        normalise,
        train.images[:calibrate].to(device),
        train.images[calibrate : calibrate + held].to(device),
        sets,
    )


def read_folder(folder: imagenet.ImageFolder) -> Images:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(16) as pool:
        items = list(pool.map(folder.__getitem__, range(len(folder))))
    return Images(torch.stack([x for x, _ in items]), torch.tensor([label for _, label in items]))


def partial_cifar(root: Path) -> Images:
    parts = [
        cifar10._read_batch(root / cifar10.FOLDER / f"data_batch_{i}")
        for i in range(1, 6)
        if (root / cifar10.FOLDER / f"data_batch_{i}").exists()
    ]
    return Images(torch.cat([p.images for p in parts]), torch.cat([p.labels for p in parts]))


def cached(folder: Path | None, key: str, make: Callable[[], Images]) -> Images:
    if folder is None:
        return make()
    path = folder / f"{key}.pt"
    if path.exists():
        return Images(*torch.load(path))
    made = make()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tuple(made), path)
    return made
