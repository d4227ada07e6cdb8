"""Sets small enough to train on in a test."""

from __future__ import annotations

import pytest
import torch

from trueup_lab.data.images import Images


@pytest.fixture
def tiny() -> Images:
    """Thirty-seven grey images of 8 x 8: the class is which half is bright."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (37,), generator=generator)
    images = torch.randint(0, 60, (37, 1, 8, 8), generator=generator)
    images[labels == 0, :, :4] += 180
    images[labels == 1, :, 4:] += 180
    return Images(images.to(torch.uint8), labels)
