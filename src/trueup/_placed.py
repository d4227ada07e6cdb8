"""The modules that `correct` places at sites: one per rule, and the gate's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trueup import kernels
from trueup.functional import evidence
from trueup.functional.gate import Gate
from trueup.graph import PlacedModule, Site, is_unseen, norm_of
from trueup.kernels import BatchNorm, LayerNorm, Order, portable
from trueup.rules import Correction, Evidence
from trueup.targets import ActivationTarget, NormTarget


class AtSite(PlacedModule):
    """A placed module. Its buffers follow the model to its device, but keep their precision."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AtSite:
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in exact.items():
            self._buffers[name] = buffer.to(self.get_buffer(name).device)
        return self

    def warm_up(self) -> None:
        """Compute something small, so that no request has to wait for a compiler."""
        with torch.inference_mode():
            self(*self._example())

    def _example(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _store_constants(self, constants: NamedTuple) -> None:
        """Store constants for `kernels.portable`: their tensors as buffers, also those inside tuples."""
        self._kept: type[Any] = type(constants)
        self._others: dict[str, Any] = {}
        for name, value in constants._asdict().items():
            inside = isinstance(value, tuple) and all(isinstance(each, Tensor) for each in value)
            if not inside and not isinstance(value, Tensor):
                self._others[name] = value
                continue
            tensors = {f"{name}_{k}": each for k, each in enumerate(value)} if inside else {f"{name}_": value}
            self._others[name] = tuple(tensors) if inside else None
            for buffer, tensor in tensors.items():
                self.register_buffer(f"plain_{buffer}", tensor, persistent=False)

    def _constants(self) -> Any:
        """The constants that `_store_constants` stored."""
        found = {}
        for name, value in self._others.items():
            if f"plain_{name}_" in self._buffers:
                value = getattr(self, f"plain_{name}_")
            elif isinstance(value, tuple) and value and f"plain_{value[0]}" in self._buffers:
                value = tuple(getattr(self, f"plain_{buffer}") for buffer in value)
            found[name] = value
        return self._kept(**found)


class PlacedCorrection(AtSite):
    """Applies `Correction` to the activations of one site.

    It can also apply the batch norm, residual sum and ReLU before it.
    """

    curve: Tensor

    def __init__(self, site: Site, target: ActivationTarget, rule: Correction) -> None:
        super().__init__()
        self.name, self.rule, self.sparse = site.name, rule, rule.sparse and site.sparse
        self.even_levels = target.levels is None
        self.fuses = () if rule.method == "sort" else ("batch_norm", "add", "relu")
        self.register_buffer("curve", kernels.curve_of(target.target, target.levels), persistent=False)
        target_constants = portable.target_of(self.curve, target.levels)
        self._has_portable_target = target_constants is not None
        if target_constants is not None:
            self._store_constants(target_constants)

    def forward(
        self,
        a: Tensor,
        *,
        norm: nn.Module | None = None,
        residual: Any = None,
        order: Order = "value first",
        relu: bool = False,
    ) -> Tensor:
        a, found = _resolved(a, norm)
        assert not isinstance(found, LayerNorm)  # `fuses` does not name it
        return kernels.correct(
            a,
            self.curve,
            self.rule.step,
            location=self.rule.location,
            sparse=self.sparse,
            exact=self.rule.method == "sort",
            even_levels=self.even_levels,
            constants=self._constants if self._has_portable_target else None,
            norm=found,
            residual=residual,
            order=order,
            relu=relu,
        )

    def _example(self) -> tuple[Tensor, ...]:
        return (self.curve.new_zeros(1, 8, dtype=torch.float32),)

    def extra_repr(self) -> str:
        return f"{self.name!r}, step={self.rule.step:.3g}"


class PlacedEvidence(AtSite):
    """Applies `Evidence` to one norm's output.

    Evidence and base are multiplied by the image's gate value or, at norms before the gate, by `share`. The batch norm
    or layer norm before it, and the residual sum and ReLU after it, can be part of the same pass.
    """

    fuses = ("batch_norm", "layer_norm", "add", "relu", "relu6")
    overwrites = True
    reference: Tensor

    def __init__(self, site: Site, target: NormTarget, rule: Evidence, share: float = 1.0) -> None:
        super().__init__()
        self.name, self.channel_dim = site.name, site.channel_dim
        self.rule, self.share = rule, share
        self.may_close = rule.least == 0
        self.register_buffer("reference", evidence.attenuate(target.reference(rule), share), persistent=False)
        self._store_constants(portable.map_constants(self.reference))

    def forward(
        self,
        a: Tensor,
        gate: Tensor | None = None,
        *,
        norm: nn.Module | None = None,
        residual: Any = None,
        order: Order = "value first",
        relu: bool = False,
        ceiling: float | None = None,
        source: nn.Module | None = None,
    ) -> Tensor:
        a, found = (a, None) if norm is None else _resolved(a, norm)
        # A norm that cannot be fused any more has run as a module, whose hooks may keep `a`.
        alone = None if source is None or (found is None and norm is not None) else lambda: is_unseen(source, self)
        return kernels.realign(
            a,
            self._buffers["reference"],  # type: ignore[arg-type]  # quicker than the attribute
            gate,
            norm=found,
            residual=residual,
            order=order,
            relu=relu,
            ceiling=ceiling,
            channels=self.channel_dim,
            constants=self._constants,
            may_close=self.may_close,
            may_overwrite=alone,
        )

    def _example(self) -> tuple[Tensor, ...]:
        example = self.reference.new_zeros(1, self.reference.shape[2], 8, 8, dtype=torch.float32)
        return (example.movedim(1, self.channel_dim),)

    def extra_repr(self) -> str:
        bands = ", bands" if self.reference.shape[1] == 3 else ""
        share = f", share={self.share:.3g}" if self.share != 1 else ""
        return f"{self.name!r}, strength={self.rule.strength:.3g}, base={self.rule.base:.3g}{share}{bands}"


class GateReader(PlacedModule):
    """Measures the moments of one norm's output for the gate."""

    def __init__(self, site: Site, *, bands: bool) -> None:
        super().__init__()
        self.name, self.bands, self.channel_dim = site.name, bands, site.channel_dim

    def forward(self, a: Tensor) -> Tensor:
        return kernels.moments(a if self.channel_dim == 1 else a.movedim(self.channel_dim, 1), bands=self.bands)

    def extra_repr(self) -> str:
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
        self._store_constants(portable.gate_constants(gate, floors))

    def forward(self, *moments: Tensor) -> Tensor:
        tensors = [getattr(self, name) for name in self.names]
        gate, floors = Gate(*tensors[: len(Gate._fields)]), tensors[len(Gate._fields) :]
        numbers = (self.budget, self.ramp, self.least)
        return kernels.gate_values(moments, floors, gate, *numbers, constants=self._constants)

    def _example(self) -> tuple[Tensor, ...]:
        floors = (getattr(self, name) for name in self.names[len(Gate._fields) :])
        return tuple(floor.float()[None] for floor in floors)

    def extra_repr(self) -> str:
        return f"budget={self.budget:.3g}" + (f", least={self.least:.3g}" if self.least else "")


def _resolved(a: Tensor, norm: nn.Module | None) -> tuple[Tensor, BatchNorm | LayerNorm | None]:
    """Return `a` and the current values of a fused norm; or norm(a) and None if its module has been replaced since."""
    if norm is None:
        return a, None
    found = norm_of(norm)
    return (norm(a), None) if found is None else (a, found)
