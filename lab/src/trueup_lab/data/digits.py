"""Scikit-learn's handwritten digits: 1797 grey images of 8 x 8, enlarged here to MNIST's 28 x 28.

They come with the package, so that a demonstration needs no download.
"""

from __future__ import annotations

import os
from typing import Literal

import torch
import torch.nn.functional as F

from trueup_lab.data.images import Images

Split = Literal["train", "test"]
TEST = 360
"""How many of the 1797 are kept for the test; which ones is drawn once, with a fixed seed."""


def load(split: Split, root: str | os.PathLike[str] | None = None) -> Images:
    """The 1437 training or 360 test images, (N, 1, 28, 28); `root` is ignored, and there for uniformity."""
    del root
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r} of digits; known: train, test")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits need scikit-learn: pip install 'trueup-lab[demo]'") from error
    bunch = load_digits()
    small = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(small, (28, 28), mode="bilinear", align_corners=False)
    images = (images * 255).round().to(torch.uint8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    chosen = order[:TEST] if split == "test" else order[TEST:]
    return Images(images[chosen], torch.tensor(bunch.target, dtype=torch.int64)[chosen])
