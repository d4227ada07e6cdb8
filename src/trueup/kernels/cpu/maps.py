"""The rule of evidence on the CPU, compiled by numba: one pass over each map to measure it, one to write it.

A map fits into the fastest cache, whereas torch's own operators write each step of each map to memory and read it back.
Each site is one call into compiled code that does not hold Python's lock. A single image has so few values that work in
Python would take longer than the rule itself, and threads would wait for one another.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from trueup.functional import evidence
from trueup.functional.ranges import within_range
from trueup.kernels.cpu.planes import GROUP, MEASURE, MEASURED, REALIGN, REALIGN_CHANNELS_LAST, SIZE
from trueup.kernels.fused_norms import BatchNorm
from trueup.kernels.layout import channels_lie_last
from trueup.kernels.plain.maps import add_and_relu
from trueup.kernels.threads import run_native

_PART = 1 << 16  # values that justify another thread

_Job = ctypes.c_int64 * SIZE
_Numbers = ctypes.c_float * 3  # limits of results: 0 or minus infinity, a ReLU6's ceiling or infinity; norm's epsilon
_NO_NORM = (0, 0, 0, 0)


def realign(
    x: Tensor,
    reference: Tensor,
    gate: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    ceiling: float | None = None,
    norm: BatchNorm | None = None,
    overwrite: bool = False,
) -> Tensor:
    """As `plain.realign` of norm(x), for float32, bfloat16 or float16 `(batch, channels, ...)`.

    The layout of `x` is kept. With `overwrite`, the result may take the memory of `x`.
    """
    if x.numel() == 0:
        return x.clone()
    if norm is not None and not _takes_norm(x, norm):
        x, norm = norm(x), None
    least, most = 0.0 if relu else -math.inf, math.inf if ceiling is None else ceiling
    if x.dtype == torch.float32 and x.is_contiguous() and (residual is None or residual.is_contiguous()):
        out = x if overwrite else torch.empty_like(x)
        _realign_maps(x, reference, gate, out, residual, least, most, norm)
        return out
    if x.dtype == torch.float32 and channels_lie_last(x):
        if residual is not None and residual.stride() != x.stride():
            residual = torch.empty_like(x).copy_(residual)
        out = x if overwrite else torch.empty_like(x)
        _realign_maps(x, reference, gate, out, residual, least, most, norm, channels_last=True)
        return out
    maps = x.float().contiguous()
    out = torch.empty_like(maps)
    if x.dtype == torch.float32:
        beside = None if residual is None else residual.contiguous()
        _realign_maps(maps, reference, gate, out, beside, least, most, norm)
        return torch.empty_like(x).copy_(out)
    _realign_maps(maps, reference, gate, out, None, -math.inf, math.inf, None)
    if x.dtype == torch.float16:
        out = torch.where(x.isfinite(), within_range(out, x.dtype), out)
    # Round after each step to the narrow dtype.
    return torch.empty_like(x).copy_(add_and_relu(out.to(x.dtype), residual, relu, ceiling))


def _takes_norm(x: Tensor, norm: BatchNorm) -> bool:
    """Whether compiled code can apply the norm."""
    for each in norm.tensors:
        if each.dtype != torch.float32 or not each.is_contiguous() or type(each) not in (Tensor, Parameter):
            return False
    return x.dtype == torch.float32


def moments(x: Tensor, bands: bool) -> Tensor:
    """As `plain.moments`, for float32, bfloat16 or float16 `(batch, channels, ...)`."""
    if x.numel() == 0:
        return evidence.moments(x, bands=bands)
    maps = x.float().contiguous()
    planes = maps.shape[0] * maps.shape[1]
    found = maps.new_empty(planes, MEASURED)
    width = maps.shape[-1] if bands else 0
    _run(MEASURE, maps, [found.data_ptr(), 0, 0, 0], planes, maps.shape[1], width)
    return found.view(*maps.shape[:2], MEASURED).transpose(1, 2)[:, : 5 if bands else 2].contiguous()


def _realign_maps(
    maps: Tensor,
    reference: Tensor,
    gate: Tensor | None,
    out: Tensor,
    residual: Tensor | None,
    least: float,
    most: float,
    norm: BatchNorm | None,
    *,
    channels_last: bool = False,
) -> None:
    """Write realigned maps plus residual, within the limits, into `out`; maps are float32 without gaps.

    All three are contiguous or have channels last. Images with gate 0 do not move.
    """
    known = (
        reference if reference.dtype == torch.float64 and reference.is_contiguous() else reference.double().contiguous()
    )
    opened = None if gate is None else gate.detach().float().contiguous()
    addresses = [0 if t is None else t.data_ptr() for t in (out, residual, known, opened)]
    width = maps.shape[-1] if reference.shape[1] == 3 else 0
    numbers = _Numbers(least, most, 0.0 if norm is None else norm.epsilon)
    channel = _NO_NORM if norm is None else [t.data_ptr() for t in norm.tensors]
    function = REALIGN_CHANNELS_LAST if channels_last else REALIGN
    _run(function, maps, addresses, maps.shape[0] * maps.shape[1], maps.shape[1], width, numbers, channel)


def _run(
    function: int,
    maps: Tensor,
    addresses: Sequence[int],
    planes: int,
    channels: int,
    width: int,
    numbers: Any = None,
    norm: Sequence[int] = _NO_NORM,
) -> None:
    """Call a compiled function on all planes, in as many threads as torch uses if there is enough to do."""
    size = maps.numel()
    shares = 1 if size < 2 * _PART else min(torch.get_num_threads(), planes, size // _PART)
    units = planes // channels * -(-channels // GROUP) if function == REALIGN_CHANNELS_LAST else planes
    chunk = units if shares == 1 else max(1, units // (4 * shares))
    at = 0 if numbers is None else ctypes.addressof(numbers)
    job = _Job(0, maps.data_ptr(), *addresses, planes, channels, size // planes, width, at, chunk, *norm)
    run_native(function, job, shares)
