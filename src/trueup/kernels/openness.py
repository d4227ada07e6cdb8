"""How far images are open to correction, in the operator `trueup::openness` on CUDA, and else by `trueup.functional.gate`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trueup.functional import gate as definition
from trueup.functional.gate import Gate

_COMPILED = importlib.util.find_spec("triton") is not None

_library = torch.library.Library("trueup", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "openness(Tensor[] moments, Tensor[] floors, Tensor knots, Tensor tails, Tensor top, Tensor centre, Tensor whiten, "
    "Tensor held, float budget, float least) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def openness(moments: Sequence[Tensor], floors: Sequence[Tensor], gate: Gate, budget: float, least: float) -> Tensor:
    """`least` + (1 - least) g of each image `(batch,)` float32, from `channels.moments` at the norms that a gate reads.

    `floors` are those of the moments, as `gate.features` takes them; g is `gate.openness` at this `budget`, and 0 just
    where that is. It has no gradient.
    """
    if moments[0].is_cuda and _COMPILED:
        out: Tensor = torch.ops.trueup.openness.default(list(moments), list(floors), *gate, budget, least)
        return out
    return _anywhere(moments, floors, *gate, budget, least)


def _anywhere(moments: Sequence[Tensor], floors: Sequence[Tensor], *arguments: Any) -> Tensor:
    *gate, budget, least = arguments
    seen = [definition.features(m.detach(), floor) for m, floor in zip(moments, floors, strict=True)]
    g = definition.gate_values(Gate(*gate).p_values(torch.cat(seen, dim=1)), budget, 20.0).float()
    opened: Tensor = least + (1 - least) * g
    return opened


def _on_cuda(moments: Sequence[Tensor], floors: Sequence[Tensor], *arguments: Any) -> Tensor:
    from trueup.kernels import triton_gate

    *gate, budget, least = arguments
    with torch.cuda.device(moments[0].get_device()):  # where Triton launches
        return triton_gate.openness(moments, floors, Gate(*gate), budget, least)


def _like_images(moments: Sequence[Tensor], *_: Any) -> Tensor:
    return moments[0].new_empty((moments[0].shape[0],), dtype=torch.float32)


_library.impl("openness", _anywhere, "CPU")  # type: ignore[no-untyped-call]
_library.impl("openness", _on_cuda, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("trueup::openness", _like_images, lib=_library)
