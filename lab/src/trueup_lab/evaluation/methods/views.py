"""Averaging over views: the image, its mirror image, and small shifts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup import Targets
from trueup.graph import clone
from trueup_lab.evaluation.methods.entropy import log_mean_probability
from trueup_lab.evaluation.methods.protocol import Needs, Network
from trueup_lab.evaluation.methods.spelling import spell


@dataclass(frozen=True)
class Views:
    """The mean prediction over the image, its mirror image, and shifts by `shift` pixels in four directions.

    Digits do not survive mirroring: use `mirror=False` for them. `shift=0` leaves the shifts out.

    >>> Views(mirror=False).name
    'views:mirror=False'
    """

    shift: int = 1
    mirror: bool = True

    kind = "views"
    needs = Needs(views=True)

    def __post_init__(self) -> None:
        if self.shift < 0 or self.shift != int(self.shift):
            raise ValueError(f"views: shift={self.shift!r}: expected a whole number of pixels, 0 or more")

    @property
    def name(self) -> str:
        """The kind, and the fields that differ from the defaults."""
        return spell(self)

    def prepare(self, model: nn.Module, _targets: Targets | None) -> Network:
        """Return a function that averages probabilities over the views."""
        network = clone(model).eval()
        return lambda x: log_mean_probability(torch.stack([network(view) for view in self._views(x)]))

    def _views(self, x: Tensor) -> Iterator[Tensor]:
        yield x
        if self.mirror:
            yield x.flip(3)
        s = int(self.shift)
        for down, right in ((s, 0), (-s, 0), (0, s), (0, -s)) if s else ():
            yield shifted(x, down, right)


def shifted(x: Tensor, down: int, right: int) -> Tensor:
    """Shift images `(batch, C, H, W)` by whole pixels; edge pixels are repeated.

    >>> shifted(torch.tensor([[[[1.0, 2.0, 3.0]]]]), 0, 1)
    tensor([[[[1., 1., 2.]]]])
    """
    height, width = x.shape[2:]
    padded = F.pad(x, (abs(right), abs(right), abs(down), abs(down)), mode="replicate")
    top, left = abs(down) - down, abs(right) - right
    return padded[:, :, top : top + height, left : left + width]
