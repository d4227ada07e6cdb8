"""The rule of evidence in operators that every runtime has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.functional.evidence import local_mean
from trueup.functional.ranges import within_range
from trueup.kernels.eager import is_jit_tracing
from trueup.kernels.portable.precision import cast, widened

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
    clean: Tensor  # ((k - 1) * channels,): the clean variance
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
        clean=narrow(centre[1:].exp()),
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
    wide = widened(a)
    gates = None if gate is None else cast(gate, wide.dtype).view(-1, *[1] * (a.dim() - 1))
    usual = _for_maps(constants, wide, channels)
    if a.dim() == 2:  # a map of one value has a mean and nothing else
        short = usual.mean - wide
        rest = None if usual.base is None else (1 - _share(usual.base, gates, 0, usual.width)) * short
        out = wide + _rise(short, rest, usual.kappa[: usual.width], gates)
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
        rises = _all_rises(mean, spread, usual, gates, channels)
        of_mean, of_logs = torch.split(rises, [usual.width, spread.shape[channels]], dim=channels)
        gains = torch.exp(0.5 * of_logs)
        out = mean + of_mean
        for gain, part in zip(torch.split(gains, usual.width, dim=channels), parts, strict=True):
            out = torch.addcmul(out, gain, part)
    out = within_range(out, a.dtype)
    if gates is not None and may_close:
        finite = finite & (gates > 0)
    return cast(torch.where(finite, out, wide), a.dtype)


def moments(a: Tensor, *, bands: bool) -> Tensor:
    """As `functional.evidence.moments`, for `(batch, channels, ...)`.

    The operators are those of `realign`, so that an exporter can merge them, but for the last means: the gate amplifies
    their rounding.
    """
    wide = widened(a)
    if a.dim() == 2:
        return torch.stack([wide, torch.zeros_like(wide)], dim=1)
    over = list(range(2, a.dim()))
    mean = wide.mean(over, keepdim=True)
    centred = wide - mean
    found = [mean + _mean_in_steps(centred, over), _mean_in_steps(centred * centred, over)]
    if bands:
        smooth = _local_mean(wide)
        found += [_mean_in_steps(part * part, over) for part in _centred_bands(wide, mean, smooth, over)]
        found.append(_mean_in_steps((wide - smooth).abs(), over))
    return torch.cat(found, dim=1).view(a.shape[0], len(found), a.shape[1])


def _for_maps(constants: MapConstants, maps: Tensor, channels: int) -> MapConstants:
    """The constants in the precision of the maps, shaped to broadcast over them."""
    after = [1] * (maps.dim() - 1 - channels)

    def shaped(values: Any) -> Any:
        if not isinstance(values, Tensor):
            return values
        values = cast(values, maps.dtype)
        return values if values.dim() == 1 + len(after) else values.view(-1, *after)

    return MapConstants(*(shaped(value) for value in constants))


def _centred_bands(maps: Tensor, mean: Tensor, smooth: Tensor, over: list[int]) -> list[Tensor]:
    # Pooled before they are centred: ONNX Runtime then keeps the layout of the convolution before.
    low = smooth - smooth.mean(over, keepdim=True)
    return [low, maps - mean - low]


def _local_mean(maps: Tensor) -> Tensor:
    if is_jit_tracing():  # runs with eager kernels, of which that of avg_pool2d takes several times as long
        return local_mean(maps)
    return F.avg_pool2d(maps, 3, stride=1, padding=1, count_include_pad=False)


def _mean_square(part: Tensor, over: list[int]) -> Tensor:
    return (part * part).mean(over, keepdim=True)


def _mean_in_steps(values: Tensor, over: list[int]) -> Tensor:
    """Mean over one dimension after the other. Compiled code adds up all values one by one, and loses three bits."""
    for dimension in reversed(over):
        values = values.mean(dimension, keepdim=True)
    return values


def _all_rises(mean: Tensor, spread: Tensor, usual: MapConstants, gate: Tensor | None, channels: int) -> Tensor:
    """Amounts to add to the means and to the log-variances, concatenated: `functional.evidence.shifts`.

    `spread` holds the variances plus their floors. Unlike there, a deviation of more than e^20 times the clean one is
    mixed like any other.
    """
    if usual.base is None:
        return _rise(usual.centre - torch.cat([mean, torch.log(spread)], dim=channels), None, usual.kappa, gate)
    width, others = usual.width, spread.shape[channels]
    short, ratio = usual.mean - mean, usual.clean / spread  # its inverse could overflow
    share = _share(usual.base, gate, width, others)
    left = of_mean = 1 - share
    if isinstance(usual.base, Tensor):
        of_mean = 1 - _share(usual.base, gate, 0, width)
    rest = torch.cat([of_mean * short, torch.log(left * ratio + share)], dim=channels)
    return _rise(torch.cat([short, torch.log(ratio)], dim=channels), rest, usual.kappa, gate)


def _share(base: Tensor | float, gate: Tensor | None, start: int, length: int) -> Any:
    """The base of some statistics, times the gate value."""
    found = base.narrow(0, start, length) if isinstance(base, Tensor) else base
    return found if gate is None else found * gate


def _rise(short: Tensor, rest: Tensor | None, kappa: Tensor, gate: Tensor | None) -> Tensor:
    """Amount that evidence and mixing add to statistics that are `short` of their centre.

    `rest` is what they are short of it after mixing; None if nothing is mixed.
    """
    squared = short * short
    if gate is not None:
        squared = squared * gate
    if rest is None:
        return short * (squared / (squared + kappa))
    return short - rest * (kappa / (squared + kappa))
