"""Choose the backend for each call of `realign`, `correct`, `moments` and `gate_values`.

- `plain`: torch's own operators, on any device, at any width. It takes over where another backend does not work.
- `cpu`: numba, where that is installed. Its `realign` can apply a batch norm itself.
- `cuda`: Triton, where that is installed. It can apply a batch norm, or the layer norm of tokens, itself.
- `portable`: operators that every runtime has, for graphs that leave this process (`in_ordinary_operators`). The
  caller provides its constants.

The compiled backends take float32, bfloat16 and float16. Float64 and forward-mode derivatives take `plain` or
`trueup.functional`. A batch norm that needs gradients is not fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from trueup import functional
from trueup.functional.gate import Gate
from trueup.functional.paper import Location
from trueup.kernels import plain, portable
from trueup.kernels.backend import INSTALLED, backend_for, current_device, fastest, works
from trueup.kernels.eager import has_tangent, is_jit_tracing, is_plain_eager
from trueup.kernels.fused_norms import BatchNorm, LayerNorm
from trueup.kernels.layout import has_channels_last, norm_keeps_layout, same_layout
from trueup.kernels.operators import (
    compute_moments,
    compute_realign,
    compute_transport,
    compute_transport_after_norm,
)
from trueup.kernels.recent import realign_again

Order = Literal["value first", "residual first", "in place"]
Result = TypeVar("Result")

_COMPILED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_TOKEN_CHANNELS = 4096  # one program of the kernel holds all channels of a token
_MIN_TOKENS = 512  # per image, to fuse its layer norm: with 197, a ViT-S took 22 % longer for a single image
_TRANSPORT_CHANNELS = [2**k for k in range(4, 13)]  # at which a norm is fused: they must divide a kernel's block


def realign(
    a: Tensor,
    reference: Tensor,
    gate: Tensor | None = None,
    *,
    norm: BatchNorm | LayerNorm | None = None,
    residual: Any = None,
    order: Order = "value first",
    relu: bool = False,
    ceiling: float | None = None,
    channels: int = 1,
    constants: Callable[[], portable.MapConstants] | None = None,
    may_close: bool = True,
    may_overwrite: Callable[[], bool] | None = None,
) -> Tensor:
    """Return relu(add(realign(norm(a)), residual)) with `functional.evidence.realign`, in as few passes as possible.

    `residual` is None or anything that torch can add; `order` says how torch would add it. With a `relu`, values are
    also limited to `ceiling`. `channels` is the dimension of `a` that holds the channels. An image's result does not
    depend on the batch or on the number of threads, to the last bit. Values that are not moved are rounded as by
    torch's separate operators, except that the result of a fused norm is not rounded.

    `constants` returns the constants of the reference for the portable backend; `may_close` says that gate values may
    be 0. `may_overwrite` returns whether nothing else reads `a`: then the result may take its memory. It does in plain
    inference on the CPU, where a map is copied before it is written. On a GPU, kernels read what others have written.
    """
    out: Tensor
    direct = is_plain_eager(a, residual, gate)
    if isinstance(norm, LayerNorm):
        if direct and residual is None and not relu and _realign_fuses_layer_norm(a, norm, channels):
            with current_device(a):
                found = fastest("realign_after_layer_norm", "cuda")(a, reference, gate, norm)
            return norm(a) if found is None else found
        a, norm = norm(a), None
    if direct and (again := realign_again(a, reference, gate, residual, relu, ceiling, norm, channels)) is not None:
        return again
    if not direct and constants is not None and in_ordinary_operators(a):
        a = a if norm is None else norm(a)
        out = portable.realign(a, constants(), gate, channels=channels, may_close=may_close)
        out = out if residual is None else add(out, residual, order)
        return plain.add_and_relu(out, None, relu, ceiling)
    if direct and a.is_cuda and works("cuda") and a.dtype in _COMPILED_DTYPES and a.dim() > 2:
        like = residual is None or same_layout(a, residual)
        if like and (norm is None or norm_keeps_layout(a)):
            with current_device(a):
                out = fastest("realign", "cuda")(a, reference, gate, residual, relu, ceiling, norm, channels)
            if out is None:  # not compiled yet, so this pass does not correct the site
                out = plain.add_and_relu(a if norm is None else norm(a), residual, relu, ceiling)
            return out
    if not (residual is None or same_layout(a, residual)):
        out = add(realign(a, reference, gate, norm=norm, channels=channels), residual, order)
        return plain.add_and_relu(out, None, relu, ceiling)
    if channels != 1:  # `movedim` makes a view even where nothing moves: a microsecond, dozens of times per forward
        beside = None if residual is None else residual.movedim(channels, 1)
        out = realign(a.movedim(channels, 1), reference, gate, norm=norm, residual=beside, relu=relu, ceiling=ceiling)
        return out.movedim(1, channels)
    if norm is not None and (not _realign_fuses_norm(a) or norm.needs_derivatives(a, residual)):
        a, norm = norm(a), None
    if not _has_compiled_maps(a) or has_tangent(a, residual):
        return plain.realign(a, reference, gate, residual, relu, ceiling)
    arguments = (reference, gate, residual, relu, ceiling)
    if direct and a.is_cpu:
        out = compute_realign(a, *arguments, norm, overwrite=may_overwrite is not None and may_overwrite())
    elif norm is None:
        out = torch.ops.trueup.realign.default(a, *arguments)
    else:
        out = torch.ops.trueup.realign_after_norm.default(a, *norm, *arguments)
    return out


def correct(
    a: Tensor,
    curve: Tensor,
    step: float,
    *,
    location: Location,
    sparse: bool,
    exact: bool = False,
    even_levels: bool = False,
    constants: Callable[[], portable.Target] | None = None,
    norm: BatchNorm | None = None,
    residual: Any = None,
    order: Order = "value first",
    relu: bool = False,
) -> Tensor:
    """Return `functional.correct` of add(norm(a), residual), with a ReLU before it if `relu`, from a histogram.

    `curve` is the target as `curve_of` returns it; `even_levels` says that its levels are evenly spaced. `constants`
    returns the same target for the portable backend. `residual` and `order` are as in `realign`; "in place" without a
    norm writes into `a`, as torch would. `exact` sorts instead, and so do float64 and forward-mode derivatives. The
    result shares no memory with `a` and does not depend on the batch or on the number of threads, to the last bit.
    """
    out: Tensor
    # The portable backend sorts, which is slower. Where torch.compile can call the histogram, it does.
    if constants is not None and leaves_this_process():
        a = a if norm is None else norm(a)
        a = a if residual is None else add(a, residual, order)
        a = a.relu() if relu else a
        return portable.correct(a, constants(), step, location=location, sparse=sparse)
    if relu and norm is not None and step > 0 and not exact and _transport_fuses_norm(a):
        like = residual is None or same_layout(a, residual)
        if like and a.dtype in _COMPILED_DTYPES and not norm.needs_derivatives(a, residual):
            rule = (curve, step, location == "keep", sparse)
            direct = is_plain_eager(a, residual)
            compute = compute_transport_after_norm if direct else torch.ops.trueup.transport_after_norm.default
            out = compute(a, *norm, residual, *rule)
            return out
    a = a if norm is None else norm(a)
    a = a if residual is None else add(a, residual, order)
    if exact or a.dtype not in _COMPILED_DTYPES or a.dim() == 0 or has_tangent(a):
        levels = None if even_levels else curve[0]
        a = a.relu() if relu else a
        return functional.correct(a, curve[1], step, location=location, sparse=sparse, levels=levels)
    compute = compute_transport if is_plain_eager(a) else torch.ops.trueup.transport.default
    out = compute(a, curve, step, location == "keep", sparse, relu)
    return out


def moments(a: Tensor, *, bands: bool) -> Tensor:
    """Return `functional.evidence.moments`, without a gradient."""
    a = a.detach()
    if in_ordinary_operators(a):
        return portable.moments(a, bands=bands)
    if _has_compiled_maps(a):
        compute = compute_moments if is_plain_eager(a) else torch.ops.trueup.moments.default
        out: Tensor = compute(a, bands)
        return out
    return plain.moments(a, bands)


def gate_values(
    moments: Sequence[Tensor],
    floors: Sequence[Tensor],
    gate: Gate,
    budget: float,
    ramp: float,
    least: float,
    *,
    constants: Callable[[], portable.GateConstants] | None = None,
) -> Tensor:
    """Gate value per image `(batch,)` float32: least + (1 - least) g, without a gradient.

    `moments` are `functional.evidence.moments` at the norms that the gate reads, `floors` theirs as `gate.features`
    takes them. g is `functional.gate.gate_values` at this `budget` and `ramp`. `constants` returns the constants of the
    gate and its floors for the portable backend.
    """
    if is_plain_eager(*moments):
        if moments[0].is_cpu and INSTALLED["cpu"]:
            direct: Tensor = fastest("gate_values", "cpu")(moments, floors, gate, budget, ramp, least)
            return direct
    elif constants is not None and in_ordinary_operators(moments[0]):
        return portable.gate_values(moments, constants(), budget, ramp, least)
    if moments[0].is_cuda and INSTALLED["cuda"]:
        numbers = (budget, ramp, least)
        out: Tensor = torch.ops.trueup.gate_values.default(list(moments), list(floors), *gate, *numbers)
        return out
    return plain.gate_values(moments, floors, gate, budget, ramp, least)


def quantile_rows(rows: Tensor, levels: Tensor) -> Tensor:
    """Quantile function of each row at ascending `levels` `(m,)` from 0 to 1: `(batch, m)` float32.

    `rows` is `(batch, n)`, of at most 32 bits per value. The minimum, the maximum and zeros are exact. Any other order
    statistic is interpolated within its bin, so its error is less than the bin's width: 0.8 % of the value, or 1/4096
    of the row's largest absolute value if that is more. Denormals count as zero. A row that is not finite gives NaN.
    """
    with current_device(rows):
        out: Tensor = fastest("quantile_rows", rows.device.type)(rows, levels.double())
    return out


def in_ordinary_operators(a: Tensor) -> bool:
    """Return whether a graph is being recorded that must run without trueup, or that a compiler should see into.

    This holds during every export, from any device, and on the CPU also during `torch.compile`, which fuses ordinary
    operators better than it can call our kernels. On CUDA, `torch.compile` keeps our kernels.
    """
    return leaves_this_process() or (torch.compiler.is_compiling() and a.device.type == "cpu")


def leaves_this_process() -> bool:
    """Return whether a graph is being exported or traced, which may run where trueup is not installed."""
    return torch.compiler.is_exporting() or is_jit_tracing()


def load_backend(device: torch.device | None) -> None:
    """Import the CUDA backend now, so that the first answer does not wait half a second for it."""
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            backend_for("cuda")


def compile_together(run: Callable[[], Result], x: object, repeatable: Callable[[], bool]) -> Result:
    """Return run(), a forward pass for the input `x`, and compile the GPU kernels that it needs in parallel.

    The pass may run twice if it is `repeatable`, which is called only if there is something to compile.
    """
    if isinstance(x, Tensor) and x.is_cuda and is_plain_eager(x) and works("cuda"):
        out: Result = backend_for("cuda").compile_together(run, repeatable)
        return out
    return run()


def add(value: Any, residual: Any, order: Order) -> Any:
    """Add as torch does in the model: the dtype, shape and layout of the sum may depend on the order."""
    if order == "in place":
        value += residual
        return value
    return residual + value if order == "residual first" else value + residual


def _has_compiled_maps(a: Tensor) -> bool:
    return INSTALLED.get(a.device.type, False) and a.dtype in _COMPILED_DTYPES and a.dim() > 2


def _realign_fuses_norm(a: Tensor) -> bool:
    return _has_compiled_maps(a) and norm_keeps_layout(a)


def _realign_fuses_layer_norm(a: Tensor, norm: LayerNorm, channels: int) -> bool:
    """Return whether fusing saves time and keeps torch's dtype: many tokens, whose channels lie last."""
    return (
        a.is_cuda
        and a.dim() > 2
        and a.numel() >= _MIN_TOKENS * a.shape[0] * a.shape[-1]
        and works("cuda")
        and channels in (-1, a.dim() - 1)
        and a.dtype in _COMPILED_DTYPES
        and norm.weight.dtype == norm.bias.dtype == a.dtype
        and norm.weight.shape[0] == a.shape[-1] <= _MAX_TOKEN_CHANNELS
        and a.is_contiguous()
        and not torch.is_autocast_enabled("cuda")
    )


def _transport_fuses_norm(a: Tensor) -> bool:
    return (
        a.is_cuda and INSTALLED["cuda"] and a.numel() > 0 and has_channels_last(a) and a.shape[1] in _TRANSPORT_CHANNELS
    )
