"""`correct`: a module like the model, with its activations moved towards their targets at every site."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

from torch import Tensor, nn

from trueup import functional, kernels
from trueup.correction import Correction
from trueup.graph import Options, Retrofit, Site
from trueup.targets import SiteTarget, Targets


def correct(
    model: nn.Module,
    targets: Targets,
    correction: Correction | None = None,
    **options: Unpack[Options],
) -> nn.Module:
    """A module that does what `model` does, with every site's activations corrected towards its target.

    It shares the model's weights, adds no parameters, has the model's `state_dict`, and is returned in evaluation
    mode; the model itself is not touched. Each image is corrected on its own. In training mode it does what the model
    does, uncorrected.

    The targets must have been calibrated on this model. `activations` and `leaves` must be given as they were given
    to `calibrate`; `select` may pick some of the calibrated sites.
    """
    correction = Correction() if correction is None else correction
    if not isinstance(targets, Targets):
        raise TypeError(
            f"correct: want Targets, got {type(targets).__name__}; read a file with trueup.Targets.load(path)"
        )
    if not isinstance(correction, Correction):
        raise TypeError(f"correct: want a Correction, got {correction!r}; such as trueup.Correction(lambda1=0.5)")
    robust = Retrofit(
        model,
        lambda site: _Correct(site, targets[site.name], correction) if site.name in targets else None,
        **options,
    )
    targets.check_model(robust.model, robust.sites, selected=options.get("select") is not None)
    robust.placed.to(robust.device)
    return robust


class _Correct(nn.Module):
    """Corrects the activations of one site, or what an activation function that it applies itself would make them."""

    curve: Tensor

    def __init__(self, site: Site, statistics: SiteTarget, correction: Correction) -> None:
        super().__init__()
        self.name = site.name
        self.correction = correction if site.sparse else replace(correction, sparse=False)
        self.even = statistics.levels is None
        self.fuses = () if correction.method == "sort" else ("relu",)
        self.register_buffer("curve", kernels.curve_of(statistics.target, statistics.levels), persistent=False)

    @property
    def target(self) -> Tensor:
        """The target's values `(m,)`."""
        return self.curve[1]

    @property
    def levels(self) -> Tensor | None:
        """Where the target is known `(m,)`; None if evenly, as `functional.correct` has it."""
        return None if self.even else self.curve[0]

    def forward(self, a: Tensor, activation: str | None = None) -> Tensor:
        relu = activation == "relu"
        if kernels.has_histogram(self.correction, a):
            return kernels.correct(a, self.curve, self.correction, relu=relu)
        return functional.correct(a.relu() if relu else a, self.target, self.correction, levels=self.levels)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Correct:
        # A target follows its model to another device, but not to a precision that would blur it.
        curve = self.curve
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.curve = curve.to(self.curve.device)
        return self

    def extra_repr(self) -> str:
        """In the way of torch's modules."""
        return f"{self.name!r}, step={self.correction.step:.3g}"
