"""The modules that `correct` places at sites: one per rule, and the gate's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from trueup import kernels
from trueup.functional import evidence
from trueup.functional.gate import Gate
from trueup.graph import Site, batch_norm_of
from trueup.kernels import BatchNorm, Order, portable
from trueup.rules import Correction, Evidence
from trueup.targets import ActivationTarget, NormTarget


class AtSite(nn.Module):
    """A placed module. Its buffers follow the model to its device, but keep their precision."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AtSite:
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in exact.items():
            self._buffers[name] = buffer.to(self.get_buffer(name).device)
        return self


class Transport(AtSite):
    """Applies `Correction` to the activations of one site.

    It can also apply the batch norm, the residual sum and the ReLU that lead to them.
    """

    curve: Tensor
    values: Tensor | None

    def __init__(self, site: Site, target: ActivationTarget, rule: Correction) -> None:
        super().__init__()
        self.name, self.rule, self.sparse = site.name, rule, rule.sparse and site.sparse
        self.even_levels = target.levels is None
        self.fuses = () if rule.method == "sort" else ("batch_norm", "add", "relu")
        self.register_buffer("curve", kernels.curve_of(target.target, target.levels), persistent=False)
        ordinary = portable.target_of(self.curve, target.levels)
        self.register_buffer("values", None if ordinary is None else ordinary.values, persistent=False)
        self.spacing = None if ordinary is None else ordinary.spacing

    def forward(
        self,
        a: Tensor,
        *,
        norm: nn.Module | None = None,
        residual: Any = None,
        order: Order = "value first",
        relu: bool = False,
    ) -> Tensor:
        a, batch_norm = _resolved(a, norm)
        return kernels.transport(
            a,
            self.curve,
            self.rule.step,
            location=self.rule.location,
            sparse=self.sparse,
            exact=self.rule.method == "sort",
            even_levels=self.even_levels,
            ordinary=portable.Target(self.values, self.spacing) if self.values is not None and self.spacing else None,
            norm=batch_norm,
            residual=residual,
            order=order,
            relu=relu,
        )

    def extra_repr(self) -> str:
        """Text inside torch's repr of the module."""
        return f"{self.name!r}, step={self.rule.step:.3g}"


class Realign(AtSite):
    """Applies `Evidence` to one norm's output.

    Evidence and base are multiplied by the image's gate value or, where that is not known yet, by `share`. The batch
    norm before it, and the residual sum and ReLU after it, can be part of the same pass.
    """

    fuses = ("batch_norm", "add", "relu")
    reference: Tensor
    centre: Tensor
    kappa: Tensor
    floor: Tensor
    base: Tensor | None

    def __init__(self, site: Site, target: NormTarget, rule: Evidence, share: float = 1.0) -> None:
        super().__init__()
        self.name, self.channel_dim = site.name, site.channel_dim
        self.rule, self.share = rule, share
        self.may_close = rule.least == 0
        self.register_buffer("reference", evidence.attenuate(target.reference(rule), share), persistent=False)
        constants = portable.map_constants(self.reference)
        constants = constants._replace(base=constants.base if rule.base else None)
        for name, tensor in constants._asdict().items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(
        self,
        a: Tensor,
        gate: Tensor | None = None,
        *,
        norm: nn.Module | None = None,
        residual: Any = None,
        order: Order = "value first",
        relu: bool = False,
    ) -> Tensor:
        a, batch_norm = _resolved(a, norm)
        return kernels.realign(
            a,
            self.reference,
            gate,
            norm=batch_norm,
            residual=residual,
            order=order,
            relu=relu,
            channels=self.channel_dim,
            constants=portable.MapConstants(self.centre, self.kappa, self.floor, self.base),
            may_close=self.may_close,
        )

    def extra_repr(self) -> str:
        """Text inside torch's repr of the module."""
        bands = ", bands" if self.reference.shape[1] == 3 else ""
        share = f", share={self.share:.3g}" if self.share != 1 else ""
        return f"{self.name!r}, strength={self.rule.strength:.3g}, base={self.rule.base:.3g}{share}{bands}"


class GateReader(nn.Module):
    """Measures the moments of one norm's output for the gate."""

    def __init__(self, site: Site, *, bands: bool) -> None:
        super().__init__()
        self.name, self.bands, self.channel_dim = site.name, bands, site.channel_dim

    def forward(self, a: Tensor) -> Tensor:
        return kernels.moments(a if self.channel_dim == 1 else a.movedim(self.channel_dim, 1), bands=self.bands)

    def extra_repr(self) -> str:
        """Text inside torch's repr of the module."""
        return f"{self.name!r}{', bands' if self.bands else ''}"


class GateValue(AtSite):
    """Gate value per image `(batch,)` from the moments that the readers measured."""

    def __init__(self, gate: Gate, floors: list[Tensor], rule: Evidence) -> None:
        super().__init__()
        self.budget, self.ramp, self.least = float(rule.budget), float(rule.ramp), float(rule.least)
        tensors = {**gate._asdict(), **{f"floor{k}": floor for k, floor in enumerate(floors)}}
        self.names = list(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        *plain, narrow = portable.gate_constants(gate, floors)
        for k, tensor in enumerate([*plain, *narrow]):
            self.register_buffer(f"constant{k}", tensor, persistent=False)

    def forward(self, *moments: Tensor) -> Tensor:
        tensors = [getattr(self, name) for name in self.names]
        gate, floors = Gate(*tensors[: len(Gate._fields)]), tensors[len(Gate._fields) :]
        plain = [getattr(self, f"constant{k}") for k in range(len(portable.GateConstants._fields) - 1 + len(floors))]
        constants = portable.GateConstants(*plain[: -len(floors)], floors=tuple(plain[-len(floors) :]))
        return kernels.gate_values(moments, floors, gate, self.budget, self.ramp, self.least, constants=constants)

    def extra_repr(self) -> str:
        """Text inside torch's repr of the module."""
        return f"budget={self.budget:.3g}" + (f", least={self.least:.3g}" if self.least else "")


def _resolved(a: Tensor, norm: nn.Module | None) -> tuple[Tensor, BatchNorm | None]:
    """A fused norm as numbers; applied at once if it has become something else since the graph was built."""
    if norm is None:
        return a, None
    found = batch_norm_of(norm)
    return (norm(a), None) if found is None else (a, found)
