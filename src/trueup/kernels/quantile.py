"""Quantile functions from histograms: what calibration needs of a batch, at little more than the cost of reading it."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from trueup.kernels import plain


def quantile_rows(rows: Tensor, levels: Tensor) -> Tensor:
    """Each row's quantile function at ascending `levels` `(m,)` from 0 to 1: `(batch, m)` float32.

    `rows` is `(batch, n)` of at most 32 bits. The minimum, the maximum and zeros are exact. Any other order statistic
    is where the values of its bin would lie if they were even: it is off by less than the bin is wide, which is 0.8 %
    of it, or 1/4096 of the row's largest value where that is more. Denormals are not told apart. A row
    that is not finite gives NaN.
    """
    return _backend(rows.device.type)(rows, levels.double())


@functools.cache
def _backend(device: str) -> Callable[[Tensor, Tensor], Tensor]:
    if device == "cpu" and importlib.util.find_spec("numba"):
        from trueup.kernels import cpu

        return _widened(cpu.quantile_rows)
    if device == "cuda" and importlib.util.find_spec("triton"):
        from trueup.kernels import triton_quantiles

        def on_cuda(rows: Tensor, levels: Tensor) -> Tensor:
            with torch.cuda.device(rows.get_device()):  # where Triton launches
                return triton_quantiles.quantile_rows(rows, levels)

        return on_cuda
    return _widened(plain.quantile_rows)


def _widened(backend: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda rows, levels: backend(rows.float(), levels)
