"""The rule of evidence in the operators `trueup::realign` and `trueup::moments`: numba on the CPU, Triton on CUDA.

So torch.compile, torch.export and autograd know them. Elsewhere, and without these, they are `evidence.realign` and
`evidence.moments` themselves, which a compiler can fuse.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from trueup.functional import evidence
from trueup.kernels.layout import alike, norm_keeps_layout
from trueup.kernels.norm import Norm
from trueup.kernels.tangent import has_tangent

_WIDTHS = (torch.float32, torch.bfloat16, torch.float16)
_COMPILERS = {"cpu": "numba", "cuda": "triton"}
_COMPILED = {device: importlib.util.find_spec(name) is not None for device, name in _COMPILERS.items()}

_library = torch.library.Library("trueup", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "realign(Tensor x, Tensor reference, Tensor? openness, Tensor? residual, bool relu) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_library.define(  # type: ignore[no-untyped-call]
    "realign_after_norm(Tensor x, Tensor mean, Tensor variance, Tensor weight, Tensor bias, float epsilon, "
    "Tensor reference, Tensor? openness, Tensor? residual, bool relu) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_library.define("moments(Tensor x, bool bands) -> Tensor", tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]


def realign(
    a: Tensor,
    reference: Tensor,
    openness: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    relu: bool = False,
    norm: Norm | None = None,
) -> Tensor:
    """`evidence.realign`, fast. It does not depend on the batch, nor on the number of threads, to the last bit.

    A `residual` is added, and with `relu`, negative values become 0: in the same pass, and what is not moved is rounded
    as torch's own operators would one after the other. A `norm` is applied to `a` before that; on CUDA in the same
    pass, without rounding in between, where no gradient is wanted.
    """
    if residual is not None and not alike(a, residual):
        return _then(realign(a, reference, openness, norm=norm), residual, relu)
    if norm is not None and (not _takes_norms(a) or norm.takes_gradients(a, residual)):
        a, norm = norm(a), None
    if not _has_kernel(a) or has_tangent(a, residual):
        return _then(evidence.realign(a, reference, openness), residual, relu)
    out: Tensor
    if norm is None:
        out = torch.ops.trueup.realign.default(a, reference, openness, residual, relu)
    else:
        out = torch.ops.trueup.realign_after_norm.default(a, *norm, reference, openness, residual, relu)
    return out


def moments(a: Tensor, *, bands: bool) -> Tensor:
    """`evidence.moments`, fast, and without a gradient."""
    a = a.detach()
    if _has_kernel(a):
        out: Tensor = torch.ops.trueup.moments.default(a, bands)
        return out
    return evidence.moments(a, bands=bands)


def _then(a: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    a = a if residual is None else a + residual
    return a.relu() if relu else a


def _has_kernel(a: Tensor) -> bool:
    return _COMPILED.get(a.device.type, False) and a.dtype in _WIDTHS and a.dim() > 2


def _takes_norms(a: Tensor) -> bool:
    return a.is_cuda and _has_kernel(a) and norm_keeps_layout(a)


def _maps(x: Tensor, bands: bool) -> Tensor:
    """Float32 and in order, `(batch, channels, height, width)`: where there are no bands, any shape will do."""
    shape = x.shape if bands else (*x.shape[:2], 1, x[0, 0].numel())
    return x.float().contiguous().view(shape)


def _realign_on_cpu(
    x: Tensor, reference: Tensor, openness: Tensor | None, residual: Tensor | None, relu: bool
) -> Tensor:
    from trueup.kernels import cpu_maps

    if x.numel() == 0:
        return x.clone()
    bands = reference.shape[1] == 3
    maps, out = _maps(x, bands), torch.empty(x.shape)
    if x.dtype == torch.float32:
        more = None if residual is None else _maps(residual, bands)
        cpu_maps.realign_maps(maps, reference, openness, out.view(maps.shape), more, relu)
        return out if out.stride() == x.stride() else torch.empty_like(x).copy_(out)
    cpu_maps.realign_maps(maps, reference, openness, out.view(maps.shape))
    if x.dtype == torch.float16:
        limit = torch.finfo(x.dtype).max
        out = torch.where(x.isfinite(), out.clamp(-limit, limit), out)
    # Each step is rounded to the narrow dtype.
    return torch.empty_like(x).copy_(_then(out.to(x.dtype), residual, relu))


def _moments_on_cpu(x: Tensor, bands: bool) -> Tensor:
    from trueup.kernels import cpu_maps

    if x.numel() == 0:
        return evidence.moments(x, bands=bands)
    return cpu_maps.measure_maps(_maps(x, bands), bands=bands)[:, : 5 if bands else 2].contiguous()


def _realign_on_cuda(
    x: Tensor, reference: Tensor, openness: Tensor | None, residual: Tensor | None, relu: bool
) -> Tensor:
    from trueup.kernels import triton_maps

    with torch.cuda.device(x.get_device()):  # where Triton launches
        return triton_maps.realign(x, reference, openness, residual, relu)


def _realign_after_norm_on_cpu(x: Tensor, *arguments: Any) -> Tensor:
    return _realign_on_cpu(Norm(*arguments[:5])(x), *arguments[5:])


def _realign_after_norm_on_cuda(x: Tensor, *arguments: Any) -> Tensor:
    from trueup.kernels import triton_maps

    reference, openness, residual, relu = arguments[5:]
    with torch.cuda.device(x.get_device()):
        return triton_maps.realign(x, reference, openness, residual, relu, Norm(*arguments[:5]))


def _moments_on_cuda(x: Tensor, bands: bool) -> Tensor:
    from trueup.kernels import triton_maps

    with torch.cuda.device(x.get_device()):
        return triton_maps.moments(x, bands)


def _like_maps(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _like_moments(x: Tensor, bands: bool) -> Tensor:
    return x.new_empty((x.shape[0], 5 if bands else 2, x.shape[1]), dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None, bool], output: Tensor) -> None:
    x, reference, openness, _residual, relu = inputs
    # As torch's relu, which is known by what came out; without one, what came out may be overwritten.
    ctx.save_for_backward(x, reference, openness, output if relu else None)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
    """By going through the specification once more; how open an image is counts as given."""
    x, reference, openness, output = ctx.saved_tensors
    if output is not None:
        gradient = torch.where(output <= 0, 0, gradient)
    found = None
    if ctx.needs_input_grad[0]:
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(evidence.realign(again, reference, openness), again, gradient)
    return found, None, None, gradient if ctx.needs_input_grad[3] else None, None


_library.impl("realign", _realign_on_cpu, "CPU")  # type: ignore[no-untyped-call]
_library.impl("realign_after_norm", _realign_after_norm_on_cpu, "CPU")  # type: ignore[no-untyped-call]
_library.impl("realign_after_norm", _realign_after_norm_on_cuda, "CUDA")  # type: ignore[no-untyped-call]
_library.impl("moments", _moments_on_cpu, "CPU")  # type: ignore[no-untyped-call]
_library.impl("realign", _realign_on_cuda, "CUDA")  # type: ignore[no-untyped-call]
_library.impl("moments", _moments_on_cuda, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("trueup::realign", _like_maps, lib=_library)
torch.library.register_fake("trueup::realign_after_norm", _like_maps, lib=_library)
torch.library.register_fake("trueup::moments", _like_moments, lib=_library)
torch.library.register_autograd("trueup::realign", _backward, setup_context=_remember, lib=_library)
