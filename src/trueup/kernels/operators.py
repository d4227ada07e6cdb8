"""The custom operators `trueup::...`: signatures, implementations, result shapes and derivatives.

With them, torch.compile and autograd handle the kernels. `dispatch` decides when an operator is called, and when its
implementation is called directly. An exported graph holds none of them: its operators come from `portable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trueup.functional import evidence
from trueup.functional.gate import Gate
from trueup.functional.gradient import realign_gradients
from trueup.kernels import plain
from trueup.kernels.backend import current_device, fastest, works
from trueup.kernels.fused_norms import BatchNorm
from trueup.kernels.layout import in_memory_order, rows_in_any_order
from trueup.kernels.recent import realign_again

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


def compute_transport(x: Tensor, curve: Tensor, step: float, keep: bool, sparse: bool, relu: bool) -> Tensor:
    """Compute `functional.correct` from a histogram, in the layout of `x`."""
    if step == 0 or x.numel() == 0:
        return x.relu() if relu else x.clone()
    flat = in_memory_order(x)
    rows = x.reshape(x.shape[0], -1) if flat is None else flat
    with current_device(x):
        out: Tensor = fastest("transport_rows", x.device.type)(rows, curve, step, keep=keep, sparse=sparse, relu=relu)
    if flat is None:
        return torch.empty_like(x).copy_(out.view(x.shape))
    return out.as_strided(x.shape, x.stride())


def compute_transport_after_norm(x: Tensor, *arguments: Any) -> Tensor:
    """Compute `compute_transport` of relu(norm(x) + residual). The arguments are those of the operator."""
    norm, (residual, curve, step, keep, sparse) = BatchNorm(*arguments[:5]), arguments[5:]
    if not (x.is_cuda and works("cuda")):
        a = norm(x)
        return compute_transport(a if residual is None else a + residual, curve, step, keep, sparse, True)
    if x.numel() == 0:
        return x.clone()
    rule = {"keep": keep, "sparse": sparse, "relu": True}
    beside = None if residual is None else rows_in_any_order(residual)
    with current_device(x):
        out: Tensor = fastest("transport_rows", "cuda")(
            rows_in_any_order(x), curve, step, **rule, norm=norm, residual=beside
        )
    return out.as_strided(x.shape, x.stride())


def compute_realign(
    x: Tensor,
    reference: Tensor,
    gate: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    ceiling: float | None = None,
    norm: BatchNorm | None = None,
    overwrite: bool = False,
) -> Tensor:
    """Compute `plain.realign` of norm(x). With `overwrite`, the result may take the memory of `x`."""
    out: Tensor
    if x.is_cuda and works("cuda"):
        if (again := realign_again(x, reference, gate, residual, relu, ceiling, norm, 1)) is not None:
            return again
        with current_device(x):
            out = fastest("realign", "cuda")(x, reference, gate, residual, relu, ceiling, norm)
        if out is None:  # not compiled yet, so this pass does not correct the site
            out = plain.add_and_relu(x if norm is None else norm(x), residual, relu, ceiling)
        return out
    function = fastest("realign", x.device.type)
    if function is plain.realign:
        return plain.realign(x if norm is None else norm(x), reference, gate, residual, relu, ceiling)
    out = function(x, reference, gate, residual, relu, ceiling, norm, overwrite)
    return out


def _compute_realign_after_norm(x: Tensor, *arguments: Any) -> Tensor:
    (reference, gate, residual, relu), ceiling = arguments[5:9], arguments[9] if len(arguments) > 9 else None
    return compute_realign(x, reference, gate, residual, relu, ceiling, BatchNorm(*arguments[:5]))


def compute_moments(x: Tensor, bands: bool) -> Tensor:
    """Compute `evidence.moments`."""
    with current_device(x):
        out: Tensor | None = fastest("moments", x.device.type)(x, bands)
    return plain.moments(x, bands) if out is None else out


def _compute_gate_values(moments: Sequence[Tensor], floors: Sequence[Tensor], *arguments: Any) -> Tensor:
    gate, numbers = Gate(*arguments[:6]), arguments[6:]
    with current_device(moments[0]):
        out: Tensor = fastest("gate_values", moments[0].device.type)(moments, floors, gate, *numbers)
    return out


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
for _name, _compute in {
    "transport": compute_transport,
    "transport_after_norm": compute_transport_after_norm,
    "realign": compute_realign,
    "realign_after_norm": _compute_realign_after_norm,
    "moments": compute_moments,
    "gate_values": _compute_gate_values,
}.items():
    library.impl(_name, _compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
