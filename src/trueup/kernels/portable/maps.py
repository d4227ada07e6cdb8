"""The rule of evidence in operators that every runtime has."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 3e38  # stands for an infinite κ: some runtimes refuse infinite constants


class MapConstants(NamedTuple):
    """A reference `(5, k, channels)` as `realign` reads it: float32, one row of all statistics after one another.

    A statistic at the distance d from its centre moves by d / (1 + `kappa` / d²), where `kappa` is κ times the squared
    spread: the same as z² / (z² + κ) times d, in fewer operators and without infinity over infinity.
    """

    centre: Tensor  # (k * channels,)
    kappa: Tensor  # (k * channels,)
    floor: Tensor  # ((k - 1) * channels,)
    base: Tensor | None  # (k * channels,); None may stand for 0 everywhere
    width: int  # channels
    bands: bool  # k is 3, not 2


def map_constants(reference: Tensor) -> MapConstants:
    """Work out the constants of a reference."""
    centre, spread, kappa, floor, base = reference.double()
    scaled = torch.nan_to_num(kappa * spread.square(), nan=LARGEST, posinf=LARGEST).clamp(1e-38, LARGEST)
    rows = [row.flatten().float() for row in (centre, scaled, floor[1:].clamp(min=1e-30), base)]
    return MapConstants(rows[0], rows[1], rows[2], rows[3], reference.shape[2], reference.shape[1] == 3)


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
    shape = [1] * a.dim()
    shape[channels] = -1
    centre, kappa, floor = (values.to(wide.dtype).view(shape) for values in constants[:3])
    base = None if constants.base is None else constants.base.to(wide.dtype).view(shape)
    opened = None if gate is None else gate.to(wide.dtype).view(-1, *[1] * (a.dim() - 1))
    if a.dim() == 2:  # a map of one value has a mean and nothing else
        few = slice(0, width)
        share = None if base is None else base[:, few]
        out = wide + _shift(centre[:, few] - wide, kappa[:, few], share, opened, width, 0, 1)
        finite = wide.abs() < torch.finfo(wide.dtype).max
    else:
        over = [d for d in range(1, a.dim()) if d != channels]
        mean = wide.mean(over, keepdim=True)
        parts = _parts(wide - mean, over, bands)
        variances = [(part * part).mean(over, keepdim=True) for part in parts]
        finite = variances[-1] < torch.finfo(wide.dtype).max
        spread = torch.cat(variances, dim=channels) if bands else variances[0]
        seen = torch.cat([mean, 0.5 * torch.log(spread + floor)], dim=channels)
        moves = _shift(centre - seen, kappa, base, opened, width, width * len(parts), channels)
        by, *gains = torch.split(moves, width, dim=channels)
        out = mean + by
        for gain, part in zip(gains, parts, strict=True):
            out = out + gain.exp() * part
    if a.dtype == torch.float16:
        limit = torch.finfo(a.dtype).max
        out = out.clamp(-limit, limit)
    if opened is not None and may_close:
        finite = finite & (opened > 0)
    return torch.where(finite, out, wide).to(a.dtype)


def moments(a: Tensor, *, bands: bool) -> Tensor:
    """As `functional.evidence.moments`, for `(batch, channels, ...)`."""
    wide = a if a.dtype == torch.float64 else a.float()
    if a.dim() == 2:
        return torch.stack([wide, torch.zeros_like(wide)], dim=1)
    over = list(range(2, a.dim()))
    mean = wide.mean(over, keepdim=True)
    centred = wide - mean
    found = [mean.flatten(1), centred.square().mean(over)]
    if bands:
        low = _local_mean(centred)
        tilt = low.mean(over, keepdim=True)
        found += [(low - tilt).square().mean(over), (centred - low + tilt).square().mean(over)]
        found.append((centred - low).abs().mean(over))
    return torch.stack(found, dim=1)


def _parts(centred: Tensor, over: list[int], bands: bool) -> list[Tensor]:
    """The centred map, or its low and high band, each with mean 0."""
    if not bands:
        return [centred]
    low = _local_mean(centred)
    low = low - low.mean(over, keepdim=True)
    return [low, centred - low]


def _local_mean(maps: Tensor) -> Tensor:
    return F.avg_pool2d(maps, 3, stride=1, padding=1, count_include_pad=False)


def _shift(
    back: Tensor, kappa: Tensor, base: Tensor | None, gate: Tensor | None, width: int, rest: int, channels: int
) -> Tensor:
    """How far `width` means and the `rest`, log-deviations, move that lie `back` from their centres.

    As `functional.evidence.shifts`.
    """
    squared = back * back
    if gate is not None:
        squared = squared * gate
    doubt = 1 + kappa / squared  # infinite without evidence
    if base is None:
        return back / doubt
    if gate is not None:
        base = base * gate
    mixed = base * back
    if rest:
        away = (-2 * back.narrow(channels, width, rest)).clamp(-40, 40)
        share = base.narrow(channels, width, rest)
        logs = -0.5 * torch.log(1 - share + share * torch.exp(away))
        mixed = torch.cat([mixed.narrow(channels, 0, width), logs], dim=channels)
    return mixed + (back - mixed) / doubt
