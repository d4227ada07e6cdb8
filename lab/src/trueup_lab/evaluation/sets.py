"""Clean and corrupted test sets on a device, read from disk or generated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trueup_lab.data.corrupted_sets import Origin, arrays, imagenet_c
from trueup_lab.data.corrupted_sets.folders import clean_folder
from trueup_lab.data.corruptions import check, corrupt, corruption_names
from trueup_lab.data.imagenet import Crop, ImageFolder
from trueup_lab.data.images import Images
from trueup_lab.data.root import data_root
from trueup_lab.data.sets import SETS

CLEAN = "identity"
"""The name of the clean test set among the corrupted ones, as in MNIST-C."""

FAMILIES = {
    "mnist": "mnist-c",
    "digits": "mnist-c",
    "cifar10": "cifar10-c",
    "imagenet": "imagenet-c",
    "camvid": "imagenet-c",
    "scenes": "imagenet-c",
}
"""The corruption benchmark of each set. `imagenet-c` takes images of any size."""

_WITHOUT_PUBLISHED = ("digits", "camvid", "scenes")

_KEEP = 1 << 33  # bytes of clean ImageNet images to keep rather than read again for every corruption


@dataclass(frozen=True)
class Case:
    """One test set of a benchmark: a corruption and its severity (0 if it has none)."""

    corruption: str
    severity: int


@dataclass(frozen=True, eq=False)
class TestSet:
    """The images of one case. `take(positions)` returns some of them, uint8 `(n, C, H, W)` on the device."""

    __test__ = False  # not a test class for pytest

    case: Case
    labels: Tensor  # (images,) int64, or (images, H, W) uint8 for segmentation; on the CPU
    origin: str  # clean, published, generated, or generated and stored as JPEG
    take: Callable[[Tensor], Tensor]


class Benchmark:
    """A set and its corrupted variants, opened for testing.

    `images` limits the number of test images, spread evenly over the set. Corrupted images are read if they are on
    disk, and otherwise generated from `seed`; `origin` requires one of the two. Every test set has the same images in
    the same order. With `set_aside` k, every k-th test image is for calibration, not for testing.
    """

    def __init__(
        self,
        name: str,
        *,
        root: str | os.PathLike[str] | None = None,
        images: int | None = None,
        seed: int = 0,
        origin: Origin | None = None,
        device: torch.device | str = "cpu",
        set_aside: int = 0,
    ) -> None:
        if name not in FAMILIES:
            raise ValueError(f"no benchmark for set {name!r}; known: {', '.join(FAMILIES)}")
        self.name, self.family = name, FAMILIES[name]
        self.root, self.seed, self.origin, self.device = root, seed, origin, torch.device(device)
        self._large, self.set_aside = name == "imagenet", set_aside
        if set_aside and (self.classes is None or set_aside < 2):
            raise ValueError(
                f"set_aside={set_aside}: expected 0, or 2 or more on a segmentation set; the set is {name}"
            )
        available = self._available
        if images is not None and not 1 <= images <= len(available):
            raise ValueError(f"images={images}: {name} has {len(available)} test images; ask for 1 to {len(available)}")
        count = len(available) if images is None else images
        self.image_numbers = available[torch.arange(count) * len(available) // count]  # of the images, in the whole set

    @property
    def classes(self) -> int | None:
        """Number of classes if every pixel has one; None where every image has one."""
        return SETS[self.name].classes if self.name in SETS and SETS[self.name].dense else None

    @property
    def image_bytes(self) -> int:
        """Size of one image."""
        return 3 * 224**2 if self._large else self._test.images[0].numel()

    def cases(self, severities: Sequence[int] = (1, 2, 3, 4, 5), only: Sequence[str] = ()) -> list[Case]:
        """Return the clean set and every corruption at these severities (MNIST-C: at its published severity)."""
        names = [name for name in corruption_names(self.family) if name != CLEAN]
        if unknown := [name for name in only if name not in (CLEAN, *names)]:
            raise ValueError(f"{unknown[0]!r} is not a corruption of {self.family}; known: {CLEAN}, {', '.join(names)}")
        chosen = [name for name in names if not only or name in only]
        clean = [Case(CLEAN, 0)] if not only or CLEAN in only else []
        if self.family == "mnist-c":
            return clean + [Case(name, check(self.family, name, None)) for name in chosen]
        return clean + [Case(name, severity) for name in chosen for severity in severities]

    def groups(self, cases: Iterable[Case]) -> list[list[Case]]:
        """Return the groups of a mixed stream: the cases of one severity, with the clean set apart."""
        by_severity: dict[int, list[Case]] = {}
        for case in cases:
            mnist = self.family == "mnist-c" and case.corruption != CLEAN
            by_severity.setdefault(1 if mnist else case.severity, []).append(case)
        return list(by_severity.values())

    def open(self, case: Case) -> TestSet:
        """Return the test set of a case. Images are made only when taken."""
        if case.corruption == CLEAN:
            return TestSet(case, self._labels, "clean", self._clean)
        found = self._published(case)
        if found is not None:
            return found
        severity = case.severity or None
        return TestSet(
            case,
            self._labels,
            "generated",
            lambda at: corrupt(
                self._clean(at),
                case.corruption,
                severity,
                family=self.family,
                indices=self.image_numbers[at.cpu()],
                seed=self.seed,
                root=self.root,
            ),
        )

    def calibration(self, count: int | None = None, *, batch: int, part: tuple[int, int] = (0, 1)) -> Iterator[Tensor]:
        """Yield clean uint8 images for calibration, `batch` at a time: `count` training images, or all.

        Without ImageNet's training images, validation images that are not tested on are used. `part` (k, n) selects
        the k-th of n shares of the batches.
        """
        first, step = part
        if self._large:
            folder, numbers = self._untested
            chosen = numbers[_spread(len(numbers), count)]
            yield from (_read(folder, some).to(self.device) for some in torch.split(chosen, batch)[first::step])
            return
        chosen = self._train[_spread(len(self._train), count)]
        yield from (some.to(self.device) for some in torch.split(chosen, batch)[first::step])

    def calibration_count(self, count: int | None = None) -> int:
        """Return the number of images that `calibration(count)` yields."""
        there = len(self._untested[1]) if self._large else len(self._train)
        return len(_spread(there, count))

    def _published(self, case: Case) -> TestSet | None:
        if self.name in _WITHOUT_PUBLISHED:
            if self.origin == "published":
                raise ValueError(f"origin='published': no corrupted {self.name} was published; leave origin out")
            return None
        if self._large:
            folder = imagenet_c(case.corruption, case.severity, root=self.root, origin=self.origin, seed=self.seed)
            if folder.seed is not None:
                return None
            labels = torch.tensor([folder.source.files[number][1] for number in self.image_numbers.tolist()])
            # Stored images went through JPEG, and give other accuracies than those that are generated on the way.
            source, stored = folder.source, "generated, jpeg" if folder.origin == "generated" else folder.origin
            return TestSet(case, labels, stored, lambda at: _read(source, self.image_numbers[at.cpu()]).to(self.device))
        found = arrays.read(self.family, case.corruption, case.severity, self.root, seed=self.seed)
        if found is None or self.origin not in (None, found[1]):
            if self.origin == "published":
                raise arrays.missing(self.family, case.corruption, case.severity, self.root)
            return None
        (images, labels), origin = found
        return TestSet(
            case, labels[self.image_numbers], origin, lambda at: images[self.image_numbers[at.cpu()]].to(self.device)
        )

    @cached_property
    def _test(self) -> Images:
        return SETS[self.name].load("test", self.root)

    @cached_property
    def _train(self) -> Tensor:
        if self.set_aside:
            return self._test.images[:: self.set_aside]
        return SETS[self.name].load("train", self.root).images

    @cached_property
    def _folder(self) -> ImageFolder:
        return ImageFolder(clean_folder(self.root), Crop(224, 256))

    @cached_property
    def _available(self) -> Tensor:
        """Numbers of the images available for testing."""
        if not self._large:
            numbers = torch.arange(len(self._test))
            return numbers[numbers % self.set_aside != 0] if self.set_aside else numbers
        # If validation images must serve for calibration too, every other one is tested on.
        return torch.arange(0, len(self._folder), 1 if self._train_folder else 2)

    @property
    def _train_folder(self) -> bool:
        return (data_root(self.root) / "imagenet" / "train").is_dir()

    @cached_property
    def _untested(self) -> tuple[ImageFolder, Tensor]:
        if self._train_folder:
            train = ImageFolder(data_root(self.root) / "imagenet" / "train", Crop(224, 256))
            return train, torch.arange(len(train))
        return self._folder, torch.arange(1, len(self._folder), 2)

    @cached_property
    def _labels(self) -> Tensor:
        if self._large:
            return torch.tensor([self._folder.files[number][1] for number in self.image_numbers.tolist()])
        return self._test.labels[self.image_numbers]

    @cached_property
    def _pixels(self) -> Tensor | None:
        """All clean images on the device, or None if there are too many."""
        if not self._large:
            return self._test.images[self.image_numbers].to(self.device)
        if len(self.image_numbers) * 3 * 224**2 > _KEEP:
            return None
        return _read(self._folder, self.image_numbers).to(self.device)

    def _clean(self, positions: Tensor) -> Tensor:
        if self._pixels is None:
            return _read(self._folder, self.image_numbers[positions.cpu()]).to(self.device)
        return self._pixels[positions.to(self.device)]


def _read(folder: ImageFolder, numbers: Tensor) -> Tensor:
    """Read images of a folder by number. Pillow decodes without the interpreter's lock, so threads help."""
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        return torch.stack([pixels for pixels, _ in pool.map(folder.__getitem__, numbers.tolist())])


def _spread(there: int, count: int | None) -> Tensor:
    """Return `count` positions spread evenly over `there`; all positions if there are fewer, or for None.

    >>> _spread(10, 4)
    tensor([0, 2, 5, 7])
    """
    count = there if count is None else min(count, there)
    return torch.arange(count) * there // count
