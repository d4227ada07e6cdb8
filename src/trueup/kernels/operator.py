"""The operator `trueup::correct`: one call for every device, which torch.compile, torch.export and autograd know.

`trueup::correct_after_norm` is the same after a batch norm, the sum with a residual, and the ReLU.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trueup.kernels import plain
from trueup.kernels.layout import alike, as_rows, has_channels_last, in_memory_order
from trueup.kernels.norm import Norm
from trueup.kernels.tangent import has_tangent
from trueup.rules.correction import Correction

_Rows = Callable[..., Tensor]
_WIDTHS = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = importlib.util.find_spec("triton") is not None  # torch comes without it on some systems
_CHANNELS = [2**k for k in range(4, 13)]  # of a norm that the kernels can apply: as many as divide a block of theirs

_library = torch.library.Library("trueup", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "correct(Tensor x, Tensor curve, float step, bool keep, bool sparse, bool relu) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_library.define(  # type: ignore[no-untyped-call]
    "correct_after_norm(Tensor x, Tensor mean, Tensor variance, Tensor weight, Tensor bias, float epsilon, "
    "Tensor? residual, Tensor curve, float step, bool keep, bool sparse) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def has_histogram(correction: Correction, a: Tensor) -> bool:
    """Whether a correction of these activations takes the histogram.

    Not where it asks for the sort, nor in float64, nor where forward-mode derivatives are wanted.
    """
    return correction.method != "sort" and a.dtype in _WIDTHS and a.dim() > 0 and not has_tangent(a)


def correct(a: Tensor, curve: Tensor, correction: Correction, *, relu: bool = False) -> Tensor:
    """`functional.correct` from a histogram. With `relu`, that function is applied to `a` first, in the same passes.

    `a` is `(batch, ...)`, float32, bfloat16 or float16, in any layout; `curve` is what `curve_of` makes of the target,
    on the same device. The result has the shape, dtype and layout of `a` and shares no memory with it. It does not
    depend on the batch, nor on the number of threads, to the last bit.
    """
    out: Tensor = torch.ops.trueup.correct.default(
        a, curve, correction.step, correction.location == "keep", correction.sparse, relu
    )
    return out


def correct_after_norm(a: Tensor, norm: Norm, residual: Tensor | None, curve: Tensor, correction: Correction) -> Tensor:
    """`correct` of the ReLU of `norm(a)`, or of that and a `residual`, without rounding in between.

    `can_follow_norm` says where.
    """
    out: Tensor = torch.ops.trueup.correct_after_norm.default(
        a, *norm, residual, curve, correction.step, correction.location == "keep", correction.sparse
    )
    return out


def can_follow_norm(a: Tensor, norm: Norm, residual: Any, correction: Correction) -> bool:
    """Whether `correct_after_norm` does it: on CUDA, with the channels last in memory, where no gradient is wanted.

    A residual must lie as `a` does. Channels must be a power of two from 16 to 4096.
    """
    return (
        _takes_norms(a)
        and has_histogram(correction, a)
        and correction.step > 0
        and a.numel() > 0
        and (residual is None or alike(a, residual))
        and not norm.takes_gradients(a, residual)
    )


def _takes_norms(a: Tensor) -> bool:
    return _HAS_TRITON and a.is_cuda and has_channels_last(a) and a.shape[1] in _CHANNELS


def _correct(rows: _Rows, x: Tensor, curve: Tensor, step: float, keep: bool, sparse: bool, relu: bool) -> Tensor:
    """The operator, from the function of one backend."""
    if step == 0 or x.numel() == 0:
        return x.relu() if relu else x.clone()
    if (flat := in_memory_order(x)) is not None:
        out = rows(flat, curve, step, keep=keep, sparse=sparse, relu=relu)
        return out.as_strided(x.shape, x.stride())
    out = rows(x.reshape(x.shape[0], -1), curve, step, keep=keep, sparse=sparse, relu=relu)
    return torch.empty_like(x).copy_(out.view(x.shape))


def _correct_after_norm(rows: _Rows, x: Tensor, *arguments: Any) -> Tensor:
    """The same after a norm, from the function of a backend that applies it."""
    residual, curve, step, keep, sparse = arguments[5:]
    if x.numel() == 0:
        return x.clone()
    more = None if residual is None else as_rows(residual)
    out = rows(as_rows(x), curve, step, keep=keep, sparse=sparse, relu=True, norm=Norm(*arguments[:5]), residual=more)
    return out.as_strided(x.shape, x.stride())


@functools.cache
def _cpu_rows() -> _Rows:
    if importlib.util.find_spec("numba") is None:
        return plain.correct_rows
    from trueup.kernels import cpu

    return cpu.correct_rows


@functools.cache
def _cuda_rows() -> _Rows:
    if not _HAS_TRITON:
        return plain.correct_rows
    from trueup.kernels import triton

    return triton.correct_rows


def _on_cpu(*arguments: Any) -> Tensor:
    return _correct(_cpu_rows(), *arguments)


def _on_cuda(x: Tensor, *arguments: Any) -> Tensor:
    with torch.cuda.device(x.get_device()):  # where Triton launches
        return _correct(_cuda_rows(), x, *arguments)


def _after_norm_on_cuda(x: Tensor, *arguments: Any) -> Tensor:
    from trueup.kernels import triton

    with torch.cuda.device(x.get_device()):
        return _correct_after_norm(triton.correct_rows, x, *arguments)


def _after_norm_anywhere(x: Tensor, *arguments: Any) -> Tensor:
    """In steps, by torch."""
    residual, *rule = arguments[5:]
    a = Norm(*arguments[:5])(x)
    out: Tensor = torch.ops.trueup.correct.default(a if residual is None else a + residual, *rule, True)
    return out


def _anywhere(*arguments: Any) -> Tensor:
    return _correct(plain.correct_rows, *arguments)


def _shape_only(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, _, ctx.step, ctx.keep, ctx.sparse, ctx.relu = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The derivative of `functional.correct`: ranks do not move, the mean does, and what stays is passed through."""
    (x,) = ctx.saved_tensors
    wide = gradient.float()
    if ctx.step:
        a = x.float().relu() if ctx.relu else x.float()
        a = a.flatten(1) if a.dim() > 1 else a[:, None]
        wide = wide.reshape(a.shape)
        stays = ~a.mean(dim=1, keepdim=True, dtype=torch.float64).isfinite()
        if ctx.sparse:
            stays = stays | (a == 0)
        through = wide.masked_fill(stays, 0)
        wide = torch.where(stays, wide, through * (1 - ctx.step))
        if ctx.keep:
            wide = wide + ctx.step * through.mean(dim=1, keepdim=True)
        wide = wide.view(x.shape)
    if ctx.relu:
        wide = wide.masked_fill(x <= 0, 0)
    return wide.to(x.dtype), None, None, None, None, None


_library.impl("correct", _on_cpu, "CPU")  # type: ignore[no-untyped-call]
_library.impl("correct", _on_cuda, "CUDA")  # type: ignore[no-untyped-call]
_library.impl("correct", _anywhere, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("correct_after_norm", _after_norm_on_cuda, "CUDA")  # type: ignore[no-untyped-call]
_library.impl("correct_after_norm", _after_norm_anywhere, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("trueup::correct", _shape_only, lib=_library)
torch.library.register_fake("trueup::correct_after_norm", _shape_only, lib=_library)
torch.library.register_autograd("trueup::correct", _backward, setup_context=_remember, lib=_library)
