"""The mathematics of evidence: a channel's statistics over one image's map, and moving them back to what is usual.

Pure functions on tensors, and the specification that every faster implementation is held to. Activations are
`(batch, channels, ...)`; every image and every channel is treated on its own. *Moments* are what is measured of a
map: its mean and its variances, `(batch, k, channels)`. *Statistics* are what evidence is weighed on: the mean, and
the logarithms of the standard deviations. A *reference* says what is usual, `(5, k, channels)`: the centre and the
spread of each statistic over clean images, the evidence κ at which it goes half the way, the floor of the variance, and
its *base*, the share of the image in a mix with what is usual, by which it is moved in any case.

>>> clean = torch.randn(200, 3, 8, 8, generator=torch.Generator().manual_seed(0))
>>> floor = torch.full((2, 3), 1e-3)
>>> usual = reference_of(statistics(moments(clean), floor), floor, strength=0.08)
>>> bool((realign(clean[:1] + 5, usual) - clean[:1]).abs().max() < 0.5)
True
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

COUNTS = (0.25, 0.5, 1.0)  # what evidence counts: of a mean, of a low band's or a whole map's deviation, a high band's

__all__ = [
    "centre_and_spread",
    "coefficients",
    "counting",
    "evidence",
    "kappa_of",
    "local_mean",
    "mix",
    "moments",
    "realign",
    "reference_of",
    "shifts",
    "statistics",
    "weight",
]


def moments(a: Tensor, *, bands: bool = False) -> Tensor:
    """Mean and variance of each channel's map, and with `bands` three moments of its low and its high band.

    These are the variances of both, and the mean absolute value of the high one. `a` is `(batch, channels, ...)`, the
    result `(batch, 2 or 5, channels)` in float32, or float64 if `a` is that. Bands are for maps `(height, width)`: the
    low one is `local_mean`, the high one the rest.

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
    """What evidence is weighed on `(batch, k, channels)`: the mean, and the logarithm of each standard deviation.

    `floor` `(k, channels)` is the variance that noise of no meaning could have: ½ log(variance + floor) does not tell
    a map that hardly varies from one that does not at all. That of the mean is not used.
    """
    mean, variances = moments[:, :1], moments[:, 1:]
    return torch.cat([mean, 0.5 * torch.log(variances + floor[1:])], dim=1)


def weight(z2: Tensor, kappa: Tensor, openness: Tensor | None = None) -> Tensor:
    """The share of its way that a statistic goes by the evidence z² against it: half of it where that is κ.

    All are `(..., k, channels)`: all the statistics of one image at one place. An image's `openness` `(batch,)`, 0 to
    1, is what its evidence counts.

    >>> weight(torch.tensor([0.0, 4.0, 100.0]), torch.tensor(4.0))
    tensor([0.0000, 0.5000, 0.9615])
    """
    z2 = z2.clamp(max=1e30)  # the square of a float32 may be infinite
    if openness is not None:
        z2 = z2 * openness.to(z2.dtype)[:, None, None]
    return z2 / (z2 + kappa)


def mix(away: Tensor, base: Tensor) -> Tensor:
    """How far statistics `(batch, k, channels)`, `away` from their centre, go to it if means and variances are mixed.

    A mean loses the share `base` `(..., k, channels)` of its distance. A deviation is divided, as by a batch norm whose
    variance is mixed with the image's own, by the root of (1 - base) + base times its square, in units of the usual
    one. So one that is far too large loses most of the excess, one that is far too small gains little. Beyond e^20
    times the usual one, and below e^-20, no more is lost or gained.

    >>> mix(torch.tensor([1.0, 1.0, -1.0, 5.0]).view(1, 4, 1), torch.tensor(0.1)).flatten()
    tensor([ 0.1000,  0.2470, -0.0452,  3.8489])
    """
    variance = torch.exp(2 * away[:, 1:].clamp(-20, 20))
    base = base.expand_as(away)
    return torch.cat([base[:, :1] * away[:, :1], 0.5 * torch.log(1 - base[:, 1:] + base[:, 1:] * variance)], dim=1)


def kappa_of(z2: Tensor, strength: float) -> Tensor:
    """The κ at which the correction takes away the share `strength` of the variance of clean images.

    `z2` is the evidence of clean images `(images, ...)`; the result has the shape of one. A statistic that goes the
    share w of its way loses w² of its square distance, so that the share lost is the mean of w² z² over that of z².

    Where nothing is to be taken away, no evidence suffices.

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


def reference_of(clean: Tensor, floor: Tensor, *, strength: float, base: float = 0.0) -> Tensor:
    """The reference `(5, k, channels)` from the `statistics` of clean images `(images, k, channels)`.

    Evidence counts as `COUNTS` says: less where a statistic says more of what is in a picture than of how it was taken.
    """
    centre, spread = centre_and_spread(clean)
    kappa = kappa_of(evidence(clean, torch.stack([centre, spread])), strength)
    kappa = kappa / kappa.new_tensor(COUNTS[: len(kappa)])[:, None]
    always = spread.isfinite().to(clean.dtype) * base
    return torch.stack([centre, spread, kappa, floor.to(clean), always])


def counting(reference: Tensor, share: float) -> Tensor:
    """A reference in which all evidence, and the base, count for a share of what they did."""
    counted = reference.clone()
    counted[2] /= share
    counted[4] *= share
    return counted


def centre_and_spread(clean: Tensor) -> Tensor:
    """The first two rows of a reference `(2, k, channels)`: mean and standard deviation over images.

    A statistic that is the same for all of them has an infinite spread: nothing is evidence against it.
    """
    spread = clean.std(dim=0, correction=0)
    return torch.stack([clean.mean(dim=0), torch.where(spread > 0, spread, torch.inf)])


def evidence(statistics: Tensor, reference: Tensor) -> Tensor:
    """The evidence z² that a statistic `(batch, k, channels)` is no clean image's: its squared distance, in spreads.

    Of the reference, centre and spread are used.
    """
    return ((statistics - reference[0]) / reference[1]).square()


def shifts(statistics: Tensor, reference: Tensor, openness: Tensor | None = None) -> Tensor:
    """How far each statistic `(batch, k, channels)` is moved to its centre: by the evidence, and the rest by a mix.

    An image's `openness` `(batch,)` is what its evidence and its base count.
    """
    away, base = statistics - reference[0], reference[4]
    share = weight(evidence(statistics, reference), reference[2], openness)
    if openness is not None:
        base = base * openness.to(away.dtype)[:, None, None]
    return -(share * away + (1 - share) * mix(away, base))


def realign(a: Tensor, reference: Tensor, openness: Tensor | None = None) -> Tensor:
    """Move each channel's mean and log-deviations towards the reference, in proportion to the evidence of a shift.

    `a` is `(batch, channels, ...)`, floating point of any width; the result has its shape and dtype. `reference` is
    `(5, 2, channels)`, for one deviation a channel, or `(5, 3, channels)` for one a band, with `a` then
    `(batch, channels, height, width)`. `openness` `(batch,)` is what each image's evidence and base count, or None
    where that is 1. With d the `shifts` of the mean and of the logarithms,

        realigned = mean + d_mean + exp(d) * (a - mean)
        realigned = mean + d_mean + exp(d_low) * (low - its mean) + exp(d_high) * (high - its mean)

    - A map that is constant stays so; its mean moves.
    - A channel of an image that holds NaN or infinity comes back as it is, and so does an image of openness 0, to the
      last bit.
    """
    wide = _wide(a)
    mean, centred = _centre(wide)
    parts = _bands(centred) if reference.shape[1] == 3 else [(centred, torch.zeros_like(mean))]
    found = torch.stack([mean, *(_variance(part, offset) for part, offset in parts)], dim=1)
    rule = coefficients(found, parts[0][1], reference, openness)
    start, *gains = rule.unbind(dim=1)
    out = _for_maps(start, wide)
    for gain, (part, _) in zip(gains, parts, strict=True):
        out = torch.addcmul(out, part, _for_maps(gain, wide))
    if a.dtype == torch.float16:
        limit = torch.finfo(a.dtype).max
        out = out.clamp(-limit, limit)
    moves = rule.isfinite().all(dim=1)
    if openness is not None:
        moves = moves & (openness > 0)[:, None]
    return torch.where(_for_maps(moves, wide), out, wide).to(a.dtype)


def coefficients(moments: Tensor, tilt: Tensor, reference: Tensor, openness: Tensor | None = None) -> Tensor:
    """What `realign` makes of the parts of maps without their mean `(batch, k, channels)`: start + gain * part + ...

    `moments` are the mean and the variance of each part `(batch, k, channels)`, `tilt` `(batch, channels)` the mean
    that the low band has in spite of all, and the high band with the opposite sign. The first of the result is the
    start, the others are gains.
    """
    usual = reference.to(moments.dtype)
    moves = shifts(statistics(moments, usual[3]), usual, openness)
    gains = moves[:, 1:].exp()
    start = moments[:, :1] + moves[:, :1] - gains[:, :1] * tilt[:, None]
    if gains.shape[1] == 2:
        start = start + gains[:, 1:] * tilt[:, None]
    return torch.cat([start, gains], dim=1)


def local_mean(maps: Tensor) -> Tensor:
    """Each pixel's mean with its neighbours, 3 x 3, in maps `(..., height, width)`; at a border, with those there are.

    >>> local_mean(torch.tensor([[0.0, 0.0, 6.0, 0.0]]))
    tensor([[0., 2., 2., 3.]])
    """
    return _local_sum(maps) / _local_sum(maps.new_ones(maps.shape[-2:]))


def _local_sum(maps: Tensor) -> Tensor:
    # Sums of shifted copies, over columns and then over rows: a tenth of the time of avg_pool2d on the CPU.
    wide = F.pad(maps, (1, 1))
    rows = wide[..., :-2] + maps + wide[..., 2:]
    tall = F.pad(rows, (0, 0, 1, 1))
    return tall[..., :-2, :] + rows + tall[..., 2:, :]


def _wide(a: Tensor) -> Tensor:
    """In the precision of the computation: float64, or else float32."""
    if a.dim() < 2 or not a.is_floating_point():
        raise TypeError(
            f"channels: want floating-point activations (batch, channels, ...), got {a.dtype} of shape {tuple(a.shape)}"
        )
    return a if a.dtype == torch.float64 else a.float()


def _centre(maps: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each map, and the maps without it: squares of what is far from zero would cancel in float32."""
    mean = _mean(maps)
    return mean, maps - _for_maps(mean, maps)


def _bands(centred: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The low and the high band of maps without their mean, and the means that the two have: small, and opposite.

    A pixel at a border has fewer neighbours, so that some pixels count more than others in the low band's mean.
    """
    low = local_mean(centred)
    tilt = _mean(low)
    return [(low, tilt), (centred - low, -tilt)]


def _mean(maps: Tensor) -> Tensor:
    return maps.flatten(2).mean(dim=2) if maps.dim() > 2 else maps


def _variance(maps: Tensor, mean: Tensor | None = None) -> Tensor:
    """Of maps whose `mean` is zero, or is given and small. torch.var takes 50 times as long on the CPU."""
    if maps.dim() == 2:
        return torch.zeros_like(maps)
    square = maps.flatten(2).square().mean(dim=2)
    return square if mean is None else (square - mean.square()).clamp(min=0)


def _for_maps(values: Tensor, maps: Tensor) -> Tensor:
    """One value a channel `(batch, channels)`, in a shape that goes with the maps."""
    return values.reshape(*values.shape, *[1] * (maps.dim() - 2))
