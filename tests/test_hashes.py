"""Hashes of images are computed beside the forward pass, and nothing else changes by that."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import trueup
from architectures import images, make
from trueup import _hashes


class Waits(nn.Module):
    """Waits, in the pass over a whole batch, until hashing has begun."""

    def __init__(self, begun: threading.Event) -> None:
        super().__init__()
        self.begun, self.seen = begun, list[bool]()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 30:  # calibrate examines the model on fewer
            self.seen.append(self.begun.wait(10))
        return x


def test_a_batch_is_hashed_while_the_model_runs(monkeypatch):
    begun, compute = threading.Event(), _hashes._hashes
    monkeypatch.setattr(_hashes, "_hashes", lambda contents: begun.set() or compute(contents))
    waits = Waits(begun)
    model = nn.Sequential(waits, nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    monkeypatch.setattr(Waits, "__deepcopy__", lambda self, _memo: self, raising=False)  # a copy of the model runs
    trueup.calibrate(model, [images(30)], leaves=(Waits,), decide=False)
    assert waits.seen == [True]


@pytest.mark.parametrize("size", [32, 80], ids=["every value is hashed", "some values are hashed"])
def test_a_loader_may_write_each_batch_into_the_same_memory(size):
    x = images(60, size=size)

    def loader():
        buffer = torch.empty_like(x[:10])
        for batch in x.split(10):
            yield buffer.copy_(batch)
        buffer.zero_()

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    apart, together = (trueup.calibrate(model, some, decide=False) for some in (x.split(10), loader()))
    assert len(apart.sampled.unique()) == 60
    assert torch.equal(apart.sampled, together.sampled)
    for name, norm in apart.norms.items():
        assert torch.equal(norm.sample, together.norms[name].sample)


@pytest.mark.parametrize("decide", [True, False])
def test_images_that_are_not_finite_stop_calibration_before_the_next_batch(decide):
    asked = []

    def loader():
        for number in range(4):
            asked.append(number)
            yield images(8) / (number != 2)

    with pytest.raises(ValueError, match="batch 2 of the loader contains NaN or infinity"):
        trueup.calibrate(make("vgg"), loader(), decide=decide)
    assert asked == [0, 1, 2]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trueup-hashes")]
