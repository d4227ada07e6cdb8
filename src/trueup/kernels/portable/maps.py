"""The rule of evidence in operators that every runtime has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.functional.ranges import within_range

LARGEST = 3e38  # stands for an infinite κ: some runtimes refuse infinite constants


class MapConstants(NamedTuple):
    """A reference `(5, k, channels)` in the form that `realign` reads: float32, all statistics concatenated.

    Deviations are described by log-variances, twice the logarithms of the reference, which saves an operator. With
    bands, the tensors have the shape `(..., 1, 1)` and broadcast over maps without a reshape: exporting an operator
    takes milliseconds.
    """

    centre: Tensor  # (k * channels,)
    mean: Tensor  # (channels,): the centre of the means
    kappa: Tensor  # (k * channels,): κ times the squared spread
    floor: Tensor  # ((k - 1) * channels,)
    clean: Tensor  # ((k - 1) * channels,): one over the clean variance
    base: Tensor | float | None  # (k * channels,) if statistics differ; None for 0
    width: int  # channels
    bands: bool  # k is 3, not 2


def map_constants(reference: Tensor) -> MapConstants:
    """Compute the constants of a reference."""
    centre, spread, kappa, floor, base = reference.double()
    scaled = torch.nan_to_num(kappa * spread.square(), nan=LARGEST, posinf=LARGEST)
    unit = centre.new_tensor([1.0] + [2.0] * (len(centre) - 1))[:, None]
    centre, bands = unit * centre, len(centre) == 3
    share = float(base.max())

    def narrow(values: Tensor) -> Tensor:
        return values.float().reshape(-1, 1, 1) if bands else values.float().flatten()

    return MapConstants(
        centre=narrow(centre),
        mean=narrow(centre[0]),
        kappa=narrow((unit.square() * scaled).clamp(1e-30, LARGEST)),
        floor=narrow(floor[1:].clamp(min=1e-30)),
        clean=narrow((-centre[1:]).exp()),
        base=None if share == 0 else share if bool((base == share).all()) else narrow(base),
        width=reference.shape[2],
        bands=bands,
    )


def realign(a: Tensor, constants: MapConstants, gate: Tensor | None, *, channels: int, may_close: bool) -> Tensor:
    """As `functional.evidence.realign`, with the channels in the dimension `channels`.

    `may_close`: gate values may be 0, and such images must come out unchanged to the last bit.
    """
    channels %= a.dim()
    if constants.bands and channels != 1:  # pooling wants channels first
        moved = realign(a.movedim(channels, 1), constants, gate, channels=1, may_close=may_close)
        return moved.movedim(1, channels)
    wide = a if a.dtype == torch.float64 else a.float()
    gates = None if gate is None else gate.to(wide.dtype).view(-1, *[1] * (a.dim() - 1))
    usual = _for_maps(constants, wide, channels)
    if a.dim() == 2:  # a map of one value has a mean and nothing else
        away = wide - usual.mean
        share = _share(usual.base, gates, 0, usual.width)
        rest = None if share is None else (share - 1) * away
        out = wide - _excess_share(away, rest, usual.kappa[: usual.width], gates)
        finite = wide.abs() < torch.finfo(wide.dtype).max
    else:
        over = [d for d in range(1, a.dim()) if d != channels]
        # Compute the means after pooling; otherwise Inductor changes the pooled maps' layout and transposes them in
        # every loop.
        smooth = _local_mean(wide) if usual.bands else None
        mean = wide.mean(over, keepdim=True)
        parts = [wide - mean] if smooth is None else _centred_bands(wide, mean, smooth, over)
        variances = [_mean_square(part, over) for part in parts]
        finite = variances[-1] < torch.finfo(wide.dtype).max
        spread = (torch.cat(variances, dim=channels) if usual.bands else variances[0]) + usual.floor
        excess, logs = _excess(mean, spread, usual, gates, channels)
        gains = torch.exp(-0.5 * logs)
        out = mean - excess
        for gain, part in zip(torch.split(gains, usual.width, dim=channels), parts, strict=True):
            out = out + gain * part
    out = within_range(out, a.dtype)
    if gates is not None and may_close:
        finite = finite & (gates > 0)
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
    found = [mean, _mean_square(wide - mean, over)]
    if bands:
        smooth = _local_mean(wide)
        found += [_mean_square(part, over) for part in _centred_bands(wide, mean, smooth, over)]
        found.append((wide - smooth).abs().mean(over, keepdim=True))
    return torch.cat(found, dim=1).view(a.shape[0], len(found), a.shape[1])


def _for_maps(constants: MapConstants, maps: Tensor, channels: int) -> MapConstants:
    """The constants in the precision of the maps, shaped to broadcast over them."""
    after = [1] * (maps.dim() - 1 - channels)

    def shaped(values: Any) -> Any:
        if not isinstance(values, Tensor):
            return values
        values = values if values.dtype == maps.dtype else values.to(maps.dtype)
        return values if values.dim() == 1 + len(after) else values.view(-1, *after)

    return MapConstants(*(shaped(value) for value in constants))


def _centred_bands(maps: Tensor, mean: Tensor, smooth: Tensor, over: list[int]) -> list[Tensor]:
    # Pooled before they are centred: ONNX Runtime then keeps the layout of the convolution before.
    low = smooth - smooth.mean(over, keepdim=True)
    return [low, maps - mean - low]


def _local_mean(maps: Tensor) -> Tensor:
    return F.avg_pool2d(maps, 3, stride=1, padding=1, count_include_pad=False)


def _mean_square(part: Tensor, over: list[int]) -> Tensor:
    return (part * part).mean(over, keepdim=True)


def _excess(
    mean: Tensor, spread: Tensor, usual: MapConstants, gate: Tensor | None, channels: int
) -> tuple[Tensor, Tensor]:
    """Amounts to subtract from the means and from the log-variances: minus `functional.evidence.shifts`.

    `spread` holds the variances plus their floors. Unlike there, a deviation of more than e^20 times the clean one is
    mixed like any other.
    """
    width, others = usual.width, spread.shape[channels]
    if usual.base is None:
        away, rest = torch.cat([mean, torch.log(spread)], dim=channels) - usual.centre, None
    else:
        ratio, below = spread * usual.clean, mean - usual.mean
        away = torch.cat([below, torch.log(ratio)], dim=channels)
        mean_base, base = (_share(usual.base, gate, *part) for part in ((0, width), (width, others)))
        # minus (log(ratio) - log(1 - base + base * ratio))
        rest = torch.cat([(mean_base - 1) * below, torch.log((1 - base) / ratio + base)], dim=channels)
    of_mean, of_logs = torch.split(_excess_share(away, rest, usual.kappa, gate), [width, others], dim=channels)
    return of_mean, of_logs


def _share(base: Tensor | float | None, gate: Tensor | None, start: int, length: int) -> Any:
    """The base of some statistics, times the gate value."""
    found = base.narrow(0, start, length) if isinstance(base, Tensor) else base
    return found if found is None or gate is None else found * gate


def _excess_share(away: Tensor, rest: Tensor | None, kappa: Tensor, gate: Tensor | None) -> Tensor:
    """Amount that evidence and mixing subtract from statistics that lie `away` from their centre.

    `rest` is minus the distance that mixing would leave; None if nothing is mixed.
    """
    squared = away * away
    if gate is not None:
        squared = squared * gate
    if rest is None:
        return away * (squared / (squared + kappa))
    return away + rest * (kappa / (squared + kappa))
