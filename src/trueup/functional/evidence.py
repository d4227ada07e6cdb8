"""The mathematics of evidence: the statistics of each channel's map in one image, and moving them back.

Activations are `(batch, channels, ...)`; every image and channel is treated on its own.

- *Moments* are measured on a map: its mean and variances, `(batch, k, channels)`.
- *Statistics* are what evidence is weighed on: the mean and the logarithms of the standard deviations.
- A *reference* `(5, k, channels)` describes clean images. Its rows are the centre and the spread of each statistic, the
  evidence κ at which a statistic moves half the way, the floor of the variance, and the *base*: the image's share in a
  mix with the clean value, applied without any evidence.

>>> clean = torch.randn(200, 3, 8, 8, generator=torch.Generator().manual_seed(0))
>>> floor = torch.full((2, 3), 1e-3)
>>> reference = reference_of(statistics(moments(clean), floor), floor, strength=0.08)
>>> bool((realign(clean[:1] + 5, reference) - clean[:1]).abs().max() < 0.5)
True
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.functional.ranges import within_range

__all__ = [
    "attenuate",
    "centre_and_spread",
    "coefficients",
    "kappa_of",
    "local_mean",
    "local_mean_adjoint",
    "mix",
    "moments",
    "nuisance_share",
    "realign",
    "reference_of",
    "shifts",
    "statistics",
    "weight",
    "z_squared",
]

LARGEST_EVIDENCE = 1e30  # the square of a float32 may be infinite
FARTHEST = 20.0  # distance of a log-deviation from the clean one from which on mixing moves it no further


def moments(a: Tensor, *, bands: bool = False) -> Tensor:
    """Mean and variance of each channel's map and, with `bands`, three moments of its low and high band.

    `a` is `(batch, channels, ...)`, the result `(batch, 2 or 5, channels)` in float32, or float64 if `a` is float64.
    Bands need maps `(height, width)`: the low band is `local_mean`, the high band the rest. Their moments are both
    variances and the mean absolute value of the high band.

    >>> moments(torch.tensor([[[[1.0, 5.0]]]]))
    tensor([[[3.],
             [4.]]])
    """
    mean, centred = _centre(_wide(a))
    found = [mean, _variance(centred)]
    if bands:
        parts = _bands(centred)
        found += [*(_variance(part, offset) for part, offset in parts), _mean(parts[1][0].abs())]
    return torch.stack(found, dim=1)


def statistics(moments: Tensor, floor: Tensor) -> Tensor:
    """Mean and log standard deviations `(batch, k, channels)`, on which evidence is weighed.

    `floor` `(k, channels)` is a variance too small to mean anything: ½ log(variance + floor) does not distinguish a
    map that hardly varies from a constant one. The mean's floor is not used.
    """
    mean, variances = moments[:, :1], moments[:, 1:]
    return torch.cat([mean, 0.5 * torch.log(variances + floor[1:])], dim=1)


def weight(z2: Tensor, kappa: Tensor, gate: Tensor | None = None) -> Tensor:
    """Share of its distance to the centre that a statistic moves, given the evidence z²: one half where z² is κ.

    `z2` and `kappa` are `(..., k, channels)`. An image's evidence is multiplied by its `gate` value `(batch,)`, 0 to 1.

    >>> weight(torch.tensor([0.0, 4.0, 100.0]), torch.tensor(4.0))
    tensor([0.0000, 0.5000, 0.9615])
    """
    z2 = z2.clamp(max=LARGEST_EVIDENCE)
    if gate is not None:
        z2 = z2 * gate.to(z2.dtype)[:, None, None]
    return z2 / (z2 + kappa)


def mix(away: Tensor, base: Tensor) -> Tensor:
    """Shift of statistics `(batch, k, channels)` that lie `away` from their centre, if means and variances are mixed.

    A mean loses the share `base` `(..., k, channels)` of its distance. A deviation is divided, as by a batch norm whose
    variance is mixed with the image's own, by the root of (1 - base) + base times its square, in units of the clean
    deviation. So a deviation that is far too large loses most of the excess, and one that is far too small gains
    little. Beyond e^20 times the clean deviation, or below e^-20, the shift no longer grows.

    >>> mix(torch.tensor([1.0, 1.0, -1.0, 5.0]).view(1, 4, 1), torch.tensor(0.1)).flatten()
    tensor([ 0.1000,  0.2470, -0.0452,  3.8489])
    """
    variance = torch.exp(2 * away[:, 1:].clamp(-FARTHEST, FARTHEST))
    base = base.expand_as(away)
    return torch.cat([base[:, :1] * away[:, :1], 0.5 * torch.log(1 - base[:, 1:] + base[:, 1:] * variance)], dim=1)


def kappa_of(z2: Tensor, strength: float) -> Tensor:
    """The κ at which the correction removes the share `strength` of the variance of clean images.

    `z2` is the evidence of clean images `(images, ...)`; the result has the shape of one image's. A statistic that
    moves by the share w loses w² of its squared distance, so the share removed is mean(w² z²) / mean(z²). A strength of
    0 gives an infinite κ.

    >>> z2 = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).square()
    >>> w = weight(z2, kappa_of(z2, 0.02))
    >>> print(f"{float((w.square() * z2).mean() / z2.mean()):.3f}")
    0.020
    """
    if strength == 0:
        return torch.full_like(z2[0], torch.inf)
    total = z2.mean(dim=0).clamp(min=torch.finfo(z2.dtype).tiny)
    low, high = torch.full_like(total, -12.0), torch.full_like(total, 16.0)  # of log κ
    for _ in range(28):
        middle = (low + high) / 2
        lost = (weight(z2, middle.exp()).square() * z2).mean(dim=0) / total
        low, high = torch.where(lost > strength, middle, low), torch.where(lost > strength, high, middle)
    return high.exp()


def reference_of(
    clean: Tensor,
    floor: Tensor,
    *,
    strength: float,
    base: float = 0.0,
    counts: Sequence[float] = (1.0, 1.0, 1.0),
    shares: Tensor | None = None,
) -> Tensor:
    """Reference `(5, k, channels)` from the `statistics` of clean images `(images, k, channels)`.

    `counts` weighs the evidence of a mean, of a low band's (or a whole map's) deviation, and of a high band's; `shares`
    `(k, channels)` weighs the evidence of each channel, as `nuisance_share` returns them.
    """
    centre, spread = centre_and_spread(clean)
    kappa = kappa_of(z_squared(clean, torch.stack([centre, spread])), strength)
    kappa = kappa / kappa.new_tensor(counts[: len(kappa)])[:, None]
    if shares is not None:
        kappa = kappa / shares
    always = spread.isfinite().to(clean.dtype) * base
    return torch.stack([centre, spread, kappa, floor.to(clean), always])


def nuisance_share(drift: Tensor, variance: Tensor) -> Tensor:
    """Weight of each statistic's evidence `(k, channels)`: how much of its deviations is about how a picture was taken.

    `drift` is the mean squared change of a statistic when images are perturbed, `variance` its variance over clean
    images. drift / (drift + variance) is the share of a deviation that is nuisance rather than content. It is
    multiplied by its mean over the norm: late norms, which are mostly about content, count less altogether.

    >>> nuisance_share(torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]]))
    tensor([[0.4688, 0.3125]])
    """
    share = torch.nan_to_num(drift / (drift + variance))
    return (share * share.mean()).clamp(min=1e-4)


def attenuate(reference: Tensor, share: float) -> Tensor:
    """Reference in which all evidence, and the base, count only for a `share`."""
    counted = reference.clone()
    counted[2] /= share
    counted[4] *= share
    return counted


def centre_and_spread(clean: Tensor) -> Tensor:
    """Mean and standard deviation over images `(2, k, channels)`: the first two rows of a reference.

    A statistic that is equal in all images gets an infinite spread: nothing is evidence against it.
    """
    spread = clean.std(dim=0, correction=0)
    return torch.stack([clean.mean(dim=0), torch.where(spread > 0, spread, torch.inf)])


def z_squared(statistics: Tensor, reference: Tensor) -> Tensor:
    """Evidence z² of each statistic `(batch, k, channels)`: its squared distance from the centre, in spreads."""
    return ((statistics - reference[0]) / reference[1]).square()


def shifts(statistics: Tensor, reference: Tensor, gate: Tensor | None = None) -> Tensor:
    """Shift of each statistic `(batch, k, channels)` towards its centre: by evidence, the rest by mixing.

    An image's `gate` value `(batch,)` multiplies its evidence and its base.
    """
    away, base = statistics - reference[0], reference[4]
    share = weight(z_squared(statistics, reference), reference[2], gate)
    if gate is not None:
        base = base * gate.to(away.dtype)[:, None, None]
    return -(share * away + (1 - share) * mix(away, base))


def realign(a: Tensor, reference: Tensor, gate: Tensor | None = None) -> Tensor:
    """Move each channel's mean and log-deviations towards the reference, in proportion to the evidence of a shift.

    `a` is `(batch, channels, ...)`, floating point of any width; the result has its shape and dtype. `reference` is
    `(5, 2, channels)` for one deviation per channel, or `(5, 3, channels)` for one per band, with `a` then
    `(batch, channels, height, width)`. `gate` `(batch,)` multiplies each image's evidence and base; None means 1. With
    d the `shifts` of the mean and of the logarithms,

        realigned = mean + d_mean + exp(d) * (a - mean)
        realigned = mean + d_mean + exp(d_low) * (low - its mean) + exp(d_high) * (high - its mean)

    - A constant map stays constant; its mean moves.
    - A channel of an image that contains NaN or infinity is returned unchanged, and so is an image whose gate is 0.
    """
    wide = _wide(a)
    mean, centred = _centre(wide)
    parts = _bands(centred) if reference.shape[1] == 3 else [(centred, torch.zeros_like(mean))]
    found = torch.stack([mean, *(_variance(part, offset) for part, offset in parts)], dim=1)
    terms = coefficients(found, parts[0][1], reference, gate)
    start, *gains = terms.unbind(dim=1)
    out = _for_maps(start, wide)
    for gain, (part, _) in zip(gains, parts, strict=True):
        out = torch.addcmul(out, part, _for_maps(gain, wide))
    out = within_range(out, a.dtype)
    moves = terms.isfinite().all(dim=1)
    if gate is not None:
        moves = moves & (gate > 0)[:, None]
    return torch.where(_for_maps(moves, wide), out, wide).to(a.dtype)


def coefficients(moments: Tensor, tilt: Tensor, reference: Tensor, gate: Tensor | None = None) -> Tensor:
    """Start and gains `(batch, k, channels)` with which `realign` rebuilds a map: start + gain * part + ...

    `moments` `(batch, k, channels)` are the mean and the variance of each part. `tilt` `(batch, channels)` is the low
    band's residual mean: border pixels average over fewer neighbours, so it is not exactly zero. The high band's is its
    opposite.
    """
    usual = reference.to(moments.dtype)
    moves = shifts(statistics(moments, usual[3]), usual, gate)
    gains = moves[:, 1:].exp()
    start = moments[:, :1] + moves[:, :1] - gains[:, :1] * tilt[:, None]
    if gains.shape[1] == 2:
        start = start + gains[:, 1:] * tilt[:, None]
    return torch.cat([start, gains], dim=1)


def local_mean(maps: Tensor) -> Tensor:
    """Mean over the 3 x 3 neighbourhood of each pixel in maps `(..., height, width)`; smaller at a border.

    >>> local_mean(torch.tensor([[0.0, 0.0, 6.0, 0.0]]))
    tensor([[0., 2., 2., 3.]])
    """
    return _local_sum(maps) / _local_sum(maps.new_ones(maps.shape[-2:]))


def local_mean_adjoint(maps: Tensor) -> Tensor:
    """Adjoint of `local_mean`: the gradient with respect to its argument, given that with respect to its result."""
    return _local_sum(maps / _local_sum(maps.new_ones(maps.shape[-2:])))


def _local_sum(maps: Tensor) -> Tensor:
    # Sums of shifted copies, over columns and then over rows: a tenth of avg_pool2d's time on the CPU.
    wide = F.pad(maps, (1, 1))
    rows = wide[..., :-2] + maps + wide[..., 2:]
    tall = F.pad(rows, (0, 0, 1, 1))
    return tall[..., :-2, :] + rows + tall[..., 2:, :]


def _wide(a: Tensor) -> Tensor:
    """Activations in the precision of the computation: float64, else float32."""
    if a.dim() < 2 or not a.is_floating_point():
        raise TypeError(
            f"evidence: expected floating-point activations (batch, channels, ...), got {a.dtype} of shape "
            f"{tuple(a.shape)}"
        )
    return a if a.dtype == torch.float64 else a.float()


def _centre(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of each map, and the maps minus it: squares of values far from zero would cancel in float32."""
    mean = _mean(maps)
    return mean, maps - _for_maps(mean, maps)


def _bands(centred: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Low and high band of centred maps, each with its residual mean: small, and opposite (see `coefficients`)."""
    low = local_mean(centred)
    tilt = _mean(low)
    return [(low, tilt), (centred - low, -tilt)]


def _mean(maps: Tensor) -> Tensor:
    return maps.flatten(2).mean(dim=2) if maps.dim() > 2 else maps


def _variance(maps: Tensor, mean: Tensor | None = None) -> Tensor:
    """Variance of maps whose `mean` is zero, or given and small. torch.var takes 50 times as long on the CPU."""
    if maps.dim() == 2:
        return torch.zeros_like(maps)
    square = maps.flatten(2).square().mean(dim=2)
    return square if mean is None else (square - mean.square()).clamp(min=0)


def _for_maps(values: Tensor, maps: Tensor) -> Tensor:
    """Values per channel `(batch, channels)`, reshaped to broadcast over the maps."""
    return values.reshape(*values.shape, *[1] * (maps.dim() - 2))
