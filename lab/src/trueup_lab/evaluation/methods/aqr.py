"""AQR, adaptive quantile recalibration, with one image as the batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trueup_lab.evaluation.methods.after_norms import after_norms, mean_over_images, rebatched
from trueup_lab.evaluation.methods.protocol import Needs, Network, require
from trueup_lab.evaluation.methods.quantile import MatchQuantiles, check_levels, quantiles
from trueup_lab.evaluation.methods.spelling import spell

POOLED = 128
"""Clean images whose values are pooled before quantiles are taken."""


@dataclass(frozen=True)
class Aqr:
    """x <- Q(F(x)) for every channel of every norm's output (Mehrbod et al., 2025, arXiv 2511.03148).

    F is the image's own distribution of the channel, Q the quantile function of the pooled clean images (the mean over
    batches of 128). The tails beyond the outermost levels are constant; the authors' own treatment of tails, meant for
    batches of different sizes, is not included.

    >>> Aqr().name
    'aqr'
    """

    levels: int = 101

    kind = "aqr"
    needs = Needs(targets=True)

    def __post_init__(self) -> None:
        check_levels(self.kind, self.levels)

    @property
    def name(self) -> str:
        """The kind, and the number of levels unless it is 101."""
        return spell(self)

    @torch.inference_mode()
    def calibrate(self, model: nn.Module, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the quantiles of pooled images `(C, levels)` by name of the norm layer."""

        def total(output: Tensor) -> Tensor:
            pooled = output.flatten(2).transpose(0, 1).flatten(1)  # (C, batch * pixels)
            return len(output) * quantiles(pooled, self.levels).double()

        return mean_over_images(model, rebatched(batches, POOLED), total)

    def prepare(self, model: nn.Module, targets: dict[str, Tensor] | None) -> Network:
        """Return a clone that matches quantiles after its norms."""
        known = require(self.name, targets)
        return after_norms(model, lambda name: MatchQuantiles(known[name]))
