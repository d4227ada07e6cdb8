"""The operators `trueup::...` for torch: signatures, result shapes and derivatives.

Torch.compile and autograd need these to handle the kernels. `dispatch` registers the implementations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trueup.functional import evidence
from trueup.functional.gradient import realign_gradients

library = torch.library.Library("trueup", "DEF")  # type: ignore[no-untyped-call]

_NORM = "Tensor mean, Tensor variance, Tensor weight, Tensor bias, float epsilon"
_LAYOUT = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)  # a compiler must not change the layout
_SIGNATURES = {
    "transport(Tensor x, Tensor curve, float step, bool keep, bool sparse, bool relu) -> Tensor": _LAYOUT,
    f"transport_after_norm(Tensor x, {_NORM}, Tensor? residual, Tensor curve, float step, bool keep, bool sparse) "
    "-> Tensor": _LAYOUT,
    "realign(Tensor x, Tensor reference, Tensor? gate, Tensor? residual, bool relu, float? ceiling=None) "
    "-> Tensor": _LAYOUT,
    f"realign_after_norm(Tensor x, {_NORM}, Tensor reference, Tensor? gate, Tensor? residual, bool relu, "
    "float? ceiling=None) "
    "-> Tensor": _LAYOUT,
    "moments(Tensor x, bool bands) -> Tensor": torch.Tag.pt2_compliant_tag,
    "gate_values(Tensor[] moments, Tensor[] floors, Tensor knots, Tensor tails, Tensor top, Tensor centre, "
    "Tensor whiten, Tensor held, float budget, float ramp, float least) -> Tensor": torch.Tag.pt2_compliant_tag,
}
for _signature, _tags in _SIGNATURES.items():
    library.define(_signature, tags=_tags)  # type: ignore[no-untyped-call]


def _like_input(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _moments_shape(x: Tensor, bands: bool) -> Tensor:
    return x.new_empty((x.shape[0], 5 if bands else 2, x.shape[1]), dtype=torch.float32)


def _one_per_image(moments: Sequence[Tensor], *_: Any) -> Tensor:
    return moments[0].new_empty((moments[0].shape[0],), dtype=torch.float32)


def _save_for_transport(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, _, ctx.step, ctx.keep, ctx.sparse, ctx.relu = inputs
    ctx.save_for_backward(x)


def _transport_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiate `functional.correct`: ranks are constant, the row's mean is not, unchanged values pass through."""
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


def _save_for_realign(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None, bool, float | None], output: Tensor
) -> None:
    x, reference, gate, _residual, relu, ctx.ceiling = inputs
    # Like torch's relu, which masks by its output. Without a relu the output is not saved, so it may be overwritten.
    ctx.save_for_backward(x, reference, gate, output if relu else None)


def _realign_backward(
    ctx: Any, gradient: Tensor
) -> tuple[Tensor | None, Tensor | None, None, Tensor | None, None, None]:
    """Differentiate `evidence.realign`; the gate is a constant."""
    x, reference, gate, output = ctx.saved_tensors
    if output is not None:
        passes_nothing = output <= 0 if ctx.ceiling is None else (output <= 0) | (output >= ctx.ceiling)
        gradient = torch.where(passes_nothing, 0, gradient)
    to_x, to_reference = None, None
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True: differentiated again
        needed = [part for part, needs in zip((x, reference), ctx.needs_input_grad, strict=False) if needs]
        if needed:
            again = evidence.realign(x, reference, gate)
            found = iter(torch.autograd.grad(again, needed, gradient, create_graph=True))
            to_x, to_reference = (next(found) if needs else None for needs in ctx.needs_input_grad[:2])
    elif ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
        to_x, to_reference = realign_gradients(x, reference, gate, gradient)
    return to_x, to_reference, None, gradient if ctx.needs_input_grad[3] else None, None, None


for _name in ("transport", "transport_after_norm", "realign", "realign_after_norm"):
    torch.library.register_fake(f"trueup::{_name}", _like_input, lib=library)
torch.library.register_fake("trueup::moments", _moments_shape, lib=library)
torch.library.register_fake("trueup::gate_values", _one_per_image, lib=library)
torch.library.register_autograd(
    "trueup::transport", _transport_backward, setup_context=_save_for_transport, lib=library
)
torch.library.register_autograd("trueup::realign", _realign_backward, setup_context=_save_for_realign, lib=library)
