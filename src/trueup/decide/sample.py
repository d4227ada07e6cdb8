"""Clean images that are kept for the decision. For those whose statistics are kept, see `targets.accumulate`."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from trueup.decide.pictures import Scales, is_flat, kind_of, largest_image, reason_against, together
from trueup.graph import Inputs

IMAGES = 480  # at most this many images are kept: weights are learned on half of them, settings tried on the others
MIN_DECISION_IMAGES = 50  # with fewer different images, no setting can be shown to be safe
BYTES = 1 << 30  # at most this many bytes of images are kept
SMALLEST_BATCH = 16  # images are collected into batches of this size, even if the loader yields single images


class ImageSample:
    """Clean images kept for the decision: those with the smallest hashes, so that no order or batch matters."""

    def __init__(self) -> None:
        self._most, self._images = IMAGES, list[Inputs]()
        self.hashes = torch.empty(0, dtype=torch.int64, device="cpu")  # of the images, ascending
        self._given = 1  # images in the largest batch of the loader
        self._batch = SMALLEST_BATCH
        self._limited = False  # whether no batch may be larger than the loader's

    def add(self, hashes: Tensor, batch: Tensor | Inputs) -> None:
        """Keep images of a batch if their hashes `(batch,)` are small enough. Copies of an image are kept once."""
        inputs = Inputs.of(batch)
        self._given = max(self._given, len(inputs))
        self._batch = max(self._batch, self._given)
        self._most = min(self._most, max(MIN_DECISION_IMAGES, BYTES // max(1, largest_image(inputs))))
        known = set(self.hashes.tolist())
        largest = self.hashes[-1] if len(self.hashes) >= self._most else None
        fresh = [
            k for k, value in enumerate(hashes.tolist()) if value not in known and (largest is None or value < largest)
        ]
        both_hashes = torch.cat([self.hashes, hashes[fresh]])
        # A copy: a view would keep the whole batch in memory.
        both = [*self._images, *(inputs.part(k, k + 1).to(torch.device("cpu"), copy=True) for k in fresh)]
        ordered, order = both_hashes.sort(stable=True)
        distinct = torch.ones_like(ordered, dtype=torch.bool)
        distinct[1:] = ordered[1:] != ordered[:-1]
        chosen = order[distinct][: self._most].tolist()
        self.hashes, self._images = both_hashes[chosen], [both[k] for k in chosen]
        self.__dict__.pop("_kinds", None)

    def __len__(self) -> int:
        return len(self._images)

    @property
    def reason_against(self) -> str | None:
        """The reason why the images cannot be perturbed; None if they can."""
        return reason_against(self._images)

    def split(self) -> tuple[ImageSample, ImageSample]:
        """Two samples with half of the images each.

        Both halves begin at an even rank: a gate that is fitted to every other image leaves half of each.
        """
        half = len(self) // 4 * 2
        return self.part(range(half)), self.part(range(half, len(self)))

    def part(self, which: Sequence[int], *, limited: bool = False) -> ImageSample:
        """Sample of some of the images, by number. If `limited`, no batch is larger than the loader's."""
        part = ImageSample()
        part.hashes, part._images = self.hashes[list(which)], [self._images[k] for k in which]
        part._given, part._limited = self._given, limited or self._limited
        part._batch = part._given if part._limited else self._batch
        return part

    def without_flat_images(self, scales: Scales) -> ImageSample:
        """Sample of the images that show something: a picture of one colour has no detail that could be lost."""
        return self.part([k for k, image in enumerate(self._images) if not is_flat(image, scales)])

    @property
    def has_larger_batches(self) -> bool:
        """Whether images are collected to larger batches than the loader's."""
        return self._batch > self._given

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Inputs]:
        """Numbers and inputs of up to `count` random images, which can go into one batch."""
        order = torch.randperm(len(self), generator=generator, device="cpu").tolist()
        kind = self._kinds[order[0]]
        some = [k for k in order if self._kinds[k] == kind][: min(count, self._batch) if self._limited else count]
        return torch.tensor(some, device="cpu"), together([self._images[k] for k in some])

    @functools.cached_property
    def _kinds(self) -> list[Hashable]:
        return [kind_of(image) for image in self._images]

    def batches(self) -> Iterator[tuple[Tensor, Inputs]]:
        """Batches of images of one shape, each with the images' numbers in the order of their hashes."""
        by_kind: dict[Hashable, list[int]] = {}
        for number, kind in enumerate(self._kinds):
            by_kind.setdefault(kind, []).append(number)
        for numbers in by_kind.values():
            for start in range(0, len(numbers), self._batch):
                some = numbers[start : start + self._batch]
                yield torch.tensor(some, device="cpu"), together([self._images[k] for k in some])
