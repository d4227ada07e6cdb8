"""The rule of evidence in operators that every runtime has."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 3e38  # stands for an infinite κ: some runtimes refuse infinite constants
FARTHEST = math.exp(40)  # variance over the clean one beyond which mixing moves a deviation no further


class MapConstants(NamedTuple):
    """A reference `(5, k, channels)` as `realign` reads it: float32, one row of all statistics after one another.

    Deviations are described by log-variances here, twice the logarithms of the reference, which saves an operator.
    """

    centre: Tensor  # (k * channels,)
    kappa: Tensor  # (k * channels,): κ times the squared spread
    floor: Tensor  # ((k - 1) * channels,)
    clean: Tensor  # ((k - 1) * channels,): one over the clean variance
    base: Tensor | float | None  # (k * channels,) if statistics differ; None for 0
    width: int  # channels
    bands: bool  # k is 3, not 2


def map_constants(reference: Tensor) -> MapConstants:
    """Work out the constants of a reference."""
    centre, spread, kappa, floor, base = reference.double()
    scaled = torch.nan_to_num(kappa * spread.square(), nan=LARGEST, posinf=LARGEST)
    unit = torch.where(torch.arange(len(centre)) > 0, 2.0, 1.0).to(centre)[:, None]
    centre = unit * centre
    share = float(base.max())
    return MapConstants(
        centre=centre.flatten().float(),
        kappa=(unit.square() * scaled).clamp(1e-30, LARGEST).flatten().float(),
        floor=floor[1:].clamp(min=1e-30).flatten().float(),
        clean=(-centre[1:]).exp().flatten().float(),
        base=None if share == 0 else share if bool((base == share).all()) else base.flatten().float(),
        width=reference.shape[2],
        bands=reference.shape[1] == 3,
    )


def realign(a: Tensor, constants: MapConstants, gate: Tensor | None, *, channels: int, may_close: bool) -> Tensor:
    """As `functional.evidence.realign`, with the channels in the dimension `channels`.

    `may_close`: gate values may be 0, and such images must come out unchanged to the last bit.
    """
    channels %= a.dim()
    width, bands = constants.width, constants.bands
    if bands and channels != 1:  # pooling wants channels first
        moved = realign(a.movedim(channels, 1), constants, gate, channels=1, may_close=may_close)
        return moved.movedim(1, channels)
    wide = a if a.dtype == torch.float64 else a.float()
    opened = None if gate is None else gate.to(wide.dtype).view(-1, *[1] * (a.dim() - 1))
    usual = _for_channels(constants, wide, channels)
    if a.dim() == 2:  # a map of one value has a mean and nothing else
        away = wide - usual.centre[:, :width]
        share = _share(usual.base, opened, 0, width, channels)
        out = wide - _weighed(away, None if share is None else share * away, usual.kappa[:, :width], opened)
        finite = wide.abs() < torch.finfo(wide.dtype).max
    else:
        over = [d for d in range(1, a.dim()) if d != channels]
        mean = wide.mean(over, keepdim=True)
        parts = _parts(wide, mean, over, bands)
        variances = [(part * part).mean(over, keepdim=True) for part in parts]
        finite = variances[-1] < torch.finfo(wide.dtype).max
        spread = (torch.cat(variances, dim=channels) if bands else variances[0]) + usual.floor
        excess, logs = _excess(mean, spread, usual, opened, channels)
        gains = torch.exp(-0.5 * logs)
        out = mean - excess
        for gain, part in zip(torch.split(gains, width, dim=channels), parts, strict=True):
            out = out + gain * part
    if a.dtype == torch.float16:
        limit = torch.finfo(a.dtype).max
        out = out.clamp(-limit, limit)
    if opened is not None and may_close:
        finite = finite & (opened > 0)
    return torch.where(finite, out, wide).to(a.dtype)


def moments(a: Tensor, *, bands: bool) -> Tensor:
    """As `functional.evidence.moments`, for `(batch, channels, ...)`.

    The operators are those of `realign`, so that an exporter can merge them.
    """
    wide = a if a.dtype == torch.float64 else a.float()
    if a.dim() == 2:
        return torch.stack([wide, torch.zeros_like(wide)], dim=1)
    over = list(range(2, a.dim()))
    mean = wide.mean(over, keepdim=True)
    centred = wide - mean
    found = [mean, (centred * centred).mean(over, keepdim=True)]
    if bands:
        parts = _parts(wide, mean, over, bands)
        found += [(part * part).mean(over, keepdim=True) for part in parts]
        found.append((wide - _local_mean(wide)).abs().mean(over, keepdim=True))
    return torch.cat(found, dim=1).view(a.shape[0], len(found), a.shape[1])


def _for_channels(constants: MapConstants, maps: Tensor, channels: int) -> MapConstants:
    """The constants in the precision of the maps, shaped to broadcast over them."""
    shape = [1] * maps.dim()
    shape[channels] = -1

    def shaped(values: Tensor) -> Tensor:
        return values.to(maps.dtype).view(shape)

    centre, kappa, floor, clean = (shaped(values) for values in constants[:4])
    base = shaped(constants.base) if isinstance(constants.base, Tensor) else constants.base
    return constants._replace(centre=centre, kappa=kappa, floor=floor, clean=clean, base=base)


def _parts(maps: Tensor, mean: Tensor, over: list[int], bands: bool) -> list[Tensor]:
    """The centred map, or its low and high band, each with mean 0."""
    if not bands:
        return [maps - mean]
    # Pooled before they are centred: ONNX Runtime then keeps the layout of the convolution before.
    low = _local_mean(maps)
    low = low - low.mean(over, keepdim=True)
    return [low, maps - mean - low]


def _local_mean(maps: Tensor) -> Tensor:
    return F.avg_pool2d(maps, 3, stride=1, padding=1, count_include_pad=False)


def _excess(
    mean: Tensor, spread: Tensor, usual: MapConstants, gate: Tensor | None, channels: int
) -> tuple[Tensor, Tensor]:
    """Distance by which the means and the log-variances are moved down: minus `functional.evidence.shifts`.

    `spread` is the variances plus their floors.
    """
    width, rest = usual.width, spread.shape[channels]
    if usual.base is None:
        away, mixed = torch.cat([mean, torch.log(spread)], dim=channels) - usual.centre, None
    else:
        ratio = spread * usual.clean
        below = mean - usual.centre.narrow(channels, 0, width)
        away = torch.cat([below, torch.log(ratio)], dim=channels)
        few, many = (_share(usual.base, gate, *part, channels) for part in ((0, width), (width, rest)))
        mixed = torch.cat([few * below, torch.log(1 - many + many * ratio.clamp(max=FARTHEST))], dim=channels)
    by, logs = torch.split(_weighed(away, mixed, usual.kappa, gate), [width, rest], dim=channels)
    return by, logs


def _share(base: Tensor | float | None, gate: Tensor | None, start: int, length: int, channels: int) -> Any:
    """The base of some statistics, times the gate value."""
    found = base.narrow(channels, start, length) if isinstance(base, Tensor) else base
    return found if found is None or gate is None else found * gate


def _weighed(away: Tensor, mixed: Tensor | None, kappa: Tensor, gate: Tensor | None) -> Tensor:
    """Part that statistics lose of the distance that they are `away`: by evidence, and the rest by what is `mixed`."""
    squared = away * away
    if gate is not None:
        squared = squared * gate
    if mixed is None:
        return away * (squared / (squared + kappa))
    return away - (away - mixed) * (kappa / (squared + kappa))
