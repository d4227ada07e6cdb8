"""The originals' outputs for 24 images each of CIFAR-10 and MNIST."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from trueup_lab.data.corruptions.constants import MNIST_C_PUBLISHED

CIFAR_FIRST, MNIST_FIRST = 976, 9976  # the first image's number in its test set


class Golden:
    """Clean images and what the original generators made of them, all (24, C, H, W) uint8."""

    def __init__(self, family: str, arrays: dict[str, np.ndarray]) -> None:
        self.family = family
        self.arrays = arrays
        self.clean = self._images(arrays["clean" if family == "cifar10-c" else "identity"])
        first = CIFAR_FIRST if family == "cifar10-c" else MNIST_FIRST
        self.indices = list(range(first, first + len(self.clean)))

    def __call__(self, name: str, severity: int | None) -> Tensor:
        array = self.arrays[name]
        if self.family == "cifar10-c":
            assert severity is not None
            return self._images(array[severity - 1])
        assert severity in (None, MNIST_C_PUBLISHED.get(name))
        return self._images(array)

    @staticmethod
    def _images(array: np.ndarray) -> Tensor:
        channels_last = array if array.ndim == 4 else array[..., None]
        return torch.from_numpy(channels_last.transpose(0, 3, 1, 2).copy())


@pytest.fixture(scope="session")
def golden(data_path: Callable[..., object]) -> Callable[[str], Golden]:
    loaded: dict[str, Golden] = {}

    def get(family: str) -> Golden:
        if family not in loaded:
            file = "cifar10_c.npz" if family == "cifar10-c" else "mnist_c.npz"
            with np.load(data_path("golden", file)) as arrays:
                loaded[family] = Golden(family, {name: arrays[name] for name in arrays.files})
        return loaded[family]

    return get
