"""Per-channel quantile matching before the activation, towards the mean quantile function of single clean images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trueup_lab.evaluation.methods.after_norms import after_norms, mean_over_images
from trueup_lab.evaluation.methods.protocol import Needs, Network, require
from trueup_lab.evaluation.methods.spelling import spell


@dataclass(frozen=True)
class ChannelQuantile:
    """x <- x + step (Q(F(x)) - x) for every channel of every norm's output.

    F is the image's own distribution of the channel, Q the mean of the quantile functions of single clean images (their
    Wasserstein barycenter): the paper's rule, per channel and before the activation. Q is stored at `levels` levels.

    >>> ChannelQuantile(step=0.5).name
    'quantile:step=0.5'
    """

    step: float = 1.0
    levels: int = 101

    kind = "quantile"
    needs = Needs(targets=True)

    def __post_init__(self) -> None:
        if not 0 <= self.step <= 1:
            raise ValueError(f"quantile: step={self.step!r}: expected a number between 0 and 1")
        check_levels(self.kind, self.levels)

    @property
    def name(self) -> str:
        """The kind, and the fields that differ from the defaults."""
        return spell(self)

    @torch.inference_mode()
    def calibrate(self, model: nn.Module, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the mean quantile function `(C, levels)` by name of the norm layer."""
        # quantiles: (batch, C, levels)
        return mean_over_images(model, batches, lambda x: quantiles(x.flatten(2), self.levels).double().sum(0))

    def prepare(self, model: nn.Module, targets: dict[str, Tensor] | None) -> Network:
        """Return a clone that matches quantiles after its norms."""
        known = require(self.name, targets)
        return after_norms(model, lambda name: MatchQuantiles(known[name], self.step))


class MatchQuantiles(nn.Module):
    """Move the values of each channel of each image towards given quantiles `(C, levels)`."""

    target: Tensor

    def __init__(self, target: Tensor, step: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("target", target.clone())  # a normal tensor, also when made in inference mode
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` `(batch, C, ...)`. Equal values stay equal: they get the middle of their ranks."""
        rows = x.flatten(2).float().contiguous()
        ordered = rows.sort(dim=2).values
        ranks = torch.searchsorted(ordered, rows) + torch.searchsorted(ordered, rows, right=True)
        share = ranks / (2 * rows.shape[2])
        matched = interpolate(self.target.expand(len(x), -1, -1), share)
        return torch.lerp(rows, matched, self.step).view(x.shape).type_as(x)


def quantiles(values: Tensor, levels: int) -> Tensor:
    """Return quantiles of the last dimension at the levels (k + 1/2) / levels."""
    shares = (torch.arange(levels, device=values.device) + 0.5) / levels
    ordered = values.float().sort(dim=-1).values
    return interpolate(ordered, shares.expand(*values.shape[:-1], -1))


def interpolate(ordered: Tensor, share: Tensor) -> Tensor:
    """Read a quantile function, given by n ascending values at (k + 1/2) / n, at `share`; constant in the tails.

    >>> interpolate(torch.tensor([0.0, 10.0]), torch.tensor([0.0, 0.25, 0.5, 1.0]))
    tensor([ 0.,  0.,  5., 10.])
    """
    n = ordered.shape[-1]
    place = (share * n - 0.5).clamp(0, n - 1)
    low = place.long().clamp(max=max(n - 2, 0))
    high = (low + 1).clamp(max=n - 1)
    return torch.lerp(ordered.gather(-1, low), ordered.gather(-1, high), place - low)


def check_levels(kind: str, levels: int) -> None:
    """Raise unless `levels` is a number of quantile levels."""
    if levels < 2 or levels != int(levels):
        raise ValueError(f"{kind}: levels={levels!r}: expected a whole number of quantile levels, 2 or more")
