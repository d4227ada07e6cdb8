"""The operator `trueup::realign`: the rule of evidence on the CPU, as torch.compile, torch.export and autograd know it.

Elsewhere, and without numba, it is `channels.realign` itself, which a compiler can fuse.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from trueup import channels

_WIDTHS = (torch.float32, torch.bfloat16, torch.float16)
_COMPILED = importlib.util.find_spec("numba") is not None

_library = torch.library.Library("trueup", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "realign(Tensor x, Tensor reference) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def realign(a: Tensor, reference: Tensor) -> Tensor:
    """`channels.realign`, fast. It does not depend on the batch, nor on the number of threads, to the last bit."""
    if _COMPILED and a.device.type == "cpu" and a.dtype in _WIDTHS and a.dim() > 2:
        out: Tensor = torch.ops.trueup.realign.default(a, reference)
        return out
    return channels.realign(a, reference)


def moments(a: Tensor, *, bands: bool) -> Tensor:
    """`channels.moments`, fast."""
    if not (_COMPILED and a.device.type == "cpu" and a.dtype in _WIDTHS and a.dim() > 2 and a.numel()):
        return channels.moments(a, bands=bands)
    from trueup.kernels import cpu_maps

    return cpu_maps.measure_maps(_maps(a, bands), bands=bands)[:, : 4 if bands else 2]


def _maps(x: Tensor, bands: bool) -> Tensor:
    """Float32 and in order, `(batch, channels, height, width)`: where there are no bands, any shape will do."""
    shape = x.shape if bands else (*x.shape[:2], 1, x[0, 0].numel())
    return x.float().contiguous().view(shape)


def _on_cpu(x: Tensor, reference: Tensor) -> Tensor:
    from trueup.kernels import cpu_maps

    if x.numel() == 0:
        return x.clone()
    maps = _maps(x, reference.shape[1] == 3)
    out = torch.empty(x.shape)
    cpu_maps.realign_maps(maps, reference, out.view(maps.shape))
    if x.dtype == torch.float16:
        limit = torch.finfo(x.dtype).max
        out = torch.where(x.isfinite(), out.clamp(-limit, limit), out)
    if out.dtype == x.dtype and out.stride() == x.stride():
        return out
    return torch.empty_like(x).copy_(out)


def _shape_only(x: Tensor, _reference: Tensor) -> Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    """By going through the specification once more."""
    x, reference = ctx.saved_tensors
    with torch.enable_grad():
        again = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(channels.realign(again, reference), again, gradient)
    return found, None


_library.impl("realign", _on_cpu, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("trueup::realign", _shape_only, lib=_library)
torch.library.register_autograd("trueup::realign", _backward, setup_context=_remember, lib=_library)
