"""The first look at a batch: with few of its images, unless the model wants all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trueup


class Counting(nn.Module):
    """Notes the batches that it gets, and may want them to be of one size."""

    def __init__(self, wanted=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wanted, self.seen = wanted, []
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv.register_forward_hook(lambda _module, args, _output: self.seen.append(len(args[0])))

    def forward(self, x):
        if self.wanted is not None:
            x = x.view(self.wanted, 3, 8, 8)
        return self.norm(self.conv(x))


@pytest.mark.parametrize(("batch", "wanted"), [(60, None), (22, None), (60, 60)])
def test_a_large_batch_is_examined_by_its_first_images(batch, wanted):
    model = Counting(wanted).eval()
    images = torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    targets = trueup.calibrate(model, [images], decide=False)
    assert list(targets.norms) == ["norm"]
    assert targets.images == batch
    whole = sum(n == batch for n in model.seen)
    assert whole == 1 if batch > 22 and wanted is None else whole > 2
