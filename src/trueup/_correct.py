"""`correct`: a module like the model, with what passes through its sites moved back towards what is usual there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

from torch import Tensor, nn

from trueup import functional, kernels
from trueup.functional import evidence
from trueup.rules import Correction
from trueup.rules import Evidence
from trueup.functional.gate import Gate
from trueup.graph import Options, Order, Reader, Instrumented, Site, add, clone, find, norm_of
from trueup.targets import NormTarget, ActivationTarget, Targets

Rule = Correction | Evidence
LAST = 1 / 15  # of the norms, which `Evidence` leaves alone


def correct(
    model: nn.Module,
    targets: Targets,
    correction: Rule | None = None,
    **options: Unpack[Options],
) -> nn.Module:
    """A module that does what `model` does, with every site corrected.

    The rule is `Evidence`, which moves each channel after a norm in proportion to the evidence that it has shifted, or
    `Correction`, the paper's, which moves the activations after every activation function towards the shape of their
    target. Without one it is `Evidence()` where the targets hold what that needs, channels of norms and what tells
    unusual images, and `select` leaves such a norm; else `Correction()`.

    The module shares the model's weights, adds no parameters, has the model's `state_dict`, and is returned in
    evaluation mode; the model itself is not touched. Each image is corrected on its own. In training mode it does what
    the model does, uncorrected.

    The targets must have been calibrated on this model. `activations` and `leaves` must be given as they were given
    to `calibrate`; `select` may pick some of the calibrated sites.
    """
    if not isinstance(targets, Targets):
        raise TypeError(
            f"correct: want Targets, got {type(targets).__name__}; read a file with trueup.Targets.load(path)"
        )
    rule = _default(model, targets, options) if correction is None else correction
    if not isinstance(rule, Rule):
        raise TypeError(
            f"correct: want a rule, got {rule!r}; such as trueup.Evidence(), or trueup.Correction(lambda1=0.5)"
        )
    model = clone(model)
    wanted = targets.channels if isinstance(rule, Evidence) else targets.sites
    if not wanted:
        raise ValueError(_nothing_to_correct(model, rule))
    targets.check_model(model)
    moved = [name for name in _moved(model, options) if name in wanted] if isinstance(rule, Evidence) else list(wanted)
    reader = _reader(targets, rule) if isinstance(rule, Evidence) and rule.gated else None
    robust = Instrumented(
        model,
        lambda site: _placed(site, targets, rule) if site.name in moved else None,
        reader=reader,
        **options,
    )
    targets.check_sites(model, wanted, robust.selected, selected=options.get("select") is not None)
    if not robust.sites:
        raise ValueError(
            f"{rule} leaves what there is to correct as it is: the last fifteenth of a model's norms, and with least=0 "
            "those before it is known how unusual an image is; choose others by `select`, or give least=0.05"
        )
    for part in (robust.placed, robust.looks, robust.whole):
        if part is not None:
            part.to(robust.device)
    return robust


def _default(model: nn.Module, targets: Targets, options: Options) -> Rule:
    """`Evidence` where there is a norm to correct and the gate knows unusual images, else the paper's rule."""
    norms = set(targets.channels)
    if options.get("select") is not None:
        norms.intersection_update(site.name for site in find(model, **options))
    return Evidence() if norms and targets.gate else Correction()


def _moved(model: nn.Module, options: Options) -> list[str]:
    """The norms of a model that `Evidence` moves, if they are selected and calibrated."""
    whole: Options = {**options, "select": None}
    norms = [site.name for site in find(model, **whole) if site.kind == "norm"]
    return norms[: len(norms) - int(LAST * len(norms) + 0.5)]


def _reader(targets: Targets, rule: Evidence) -> Reader:
    """What tells how far each image is open."""
    if not targets.gate:
        raise ValueError(
            f"{rule} asks how unusual an image is, and these targets do not know: they were made by an earlier "
            "version, or of images of very different sizes; calibrate again with trueup.calibrate(model, loader), or "
            "correct every image alike with trueup.Evidence(budget=1)"
        )
    whole = _Open(targets.fitted_gate, [site.floor for site in targets.gate.values()], rule)
    early = targets.channels if rule.early else {}
    return Reader(
        list(targets.gate),
        lambda site: _Look(site, bands=targets.gate[site.name].bands),
        whole,
        lambda site: _Realign(site, early[site.name], rule, rule.early) if site.name in early else None,
    )


def _placed(site: Site, targets: Targets, rule: Rule) -> nn.Module:
    """What corrects one site."""
    if isinstance(rule, Evidence):
        return _Realign(site, targets.channels[site.name], rule)
    return _Correct(site, targets[site.name], rule)


def _nothing_to_correct(model: nn.Module, rule: Rule) -> str:
    kind, name = type(model).__name__, type(rule).__name__
    needs = "statistics of channels, taken after norms" if isinstance(rule, Evidence) else "targets of activations"
    return (
        f"{name} needs {needs}, and these targets hold none: they were made by an earlier version, {kind} has no such "
        "place, or `select` left it out; calibrate again with trueup.calibrate(model, loader), and see what there is "
        f"with trueup.sites(model, kind={'norm' if isinstance(rule, Evidence) else 'activation'!r})"
    )


class _AtSite(nn.Module):
    """What is placed at a site: its buffers follow a model to its device, but not to a precision that blurs them."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _AtSite:
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in exact.items():
            self._buffers[name] = buffer.to(self.get_buffer(name).device)
        return self


class _Correct(_AtSite):
    """Corrects the activations of one site, or what an activation function that it applies itself would make them.

    It may also be given what a batch norm, and the sum with a residual, would make that activation's input.
    """

    curve: Tensor

    def __init__(self, site: Site, statistics: ActivationTarget, correction: Correction) -> None:
        super().__init__()
        self.name = site.name
        self.correction = correction if site.sparse else replace(correction, sparse=False)
        self.even = statistics.levels is None
        self.absorbs = () if correction.method == "sort" else ("batch_norm", "add", "relu")
        self.register_buffer("curve", kernels.curve_of(statistics.target, statistics.levels), persistent=False)

    @property
    def target(self) -> Tensor:
        """The target's values `(m,)`."""
        return self.curve[1]

    @property
    def levels(self) -> Tensor | None:
        """Where the target is known `(m,)`; None if evenly, as `functional.correct` has it."""
        return None if self.even else self.curve[0]

    def forward(
        self,
        a: Tensor,
        *,
        norm: nn.Module | None = None,
        residual: Any = None,
        order: Order = "value first",
        activation: str | None = None,
    ) -> Tensor:
        relu, before = activation == "relu", None if norm is None else norm_of(norm)
        if relu and before is not None and kernels.can_follow_norm(a, before, residual, self.correction):
            return kernels.correct_after_norm(a, before, residual, self.curve, self.correction)
        a = a if norm is None else norm(a)
        a = a if residual is None else add(a, residual, order)
        if kernels.has_histogram(self.correction, a):
            return kernels.correct(a, self.curve, self.correction, relu=relu)
        return functional.correct(a.relu() if relu else a, self.target, self.correction, levels=self.levels)

    def extra_repr(self) -> str:
        """In the way of torch's modules."""
        return f"{self.name!r}, step={self.correction.step:.3g}"


class _Look(nn.Module):
    """What the gate looks at in one norm's output."""

    def __init__(self, site: Site, *, bands: bool) -> None:
        super().__init__()
        self.name, self.bands, self.channels = site.name, bands, site.channels

    def forward(self, a: Tensor) -> Tensor:
        return kernels.moments(a.movedim(self.channels, 1), bands=self.bands)

    def extra_repr(self) -> str:
        """In the way of torch's modules."""
        return f"{self.name!r}{', bands' if self.bands else ''}"


class _Open(_AtSite):
    """How far each image is open to correction `(batch,)`, from what its maps are like at the gate's norms."""

    def __init__(self, gate: Gate, floors: list[Tensor], rule: Evidence) -> None:
        super().__init__()
        self.budget, self.least = float(rule.budget), float(rule.least)
        tensors = {**gate._asdict(), **{f"floor{k}": floor for k, floor in enumerate(floors)}}
        self.names = list(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, *seen: Tensor) -> Tensor:
        tensors = [getattr(self, name) for name in self.names]
        gate, floors = Gate(*tensors[: len(Gate._fields)]), tensors[len(Gate._fields) :]
        return kernels.openness(seen, floors, gate, self.budget, self.least)

    def extra_repr(self) -> str:
        """In the way of torch's modules."""
        return f"budget={self.budget:.3g}" + (f", least={self.least:.3g}" if self.least else "")


class _Realign(_AtSite):
    """Moves each channel of one norm's output back, in proportion to the evidence that it has shifted.

    Evidence and base count as openness says, or where that is not known, by a `share`.

    The batch norm before it, and the sum and the relu that often follow, are done in the same pass.
    """

    absorbs = ("batch_norm", "add", "relu")
    reference: Tensor

    def __init__(self, site: Site, statistics: NormTarget, rule: Evidence, share: float = 1.0) -> None:
        super().__init__()
        self.name, self.channels = site.name, site.channels
        self.rule, self.share, self.changes = rule, share, rule.changes
        reference = statistics.reference(rule.strength, rule.base, bands=rule.bands)
        self.register_buffer("reference", evidence.counting(reference, share), persistent=False)

    def forward(
        self,
        a: Tensor,
        openness: Tensor | None = None,
        *,
        norm: nn.Module | None = None,
        residual: Any = None,
        order: Order = "value first",
        activation: str | None = None,
    ) -> Tensor:
        relu, before = activation == "relu", None
        if norm is not None and (before := norm_of(norm)) is None:  # it is another than when this was built
            a = norm(a)
        if self.changes:
            # What is added may also be a number, or another tensor than the kernel can add.
            along = _moved_dim(residual, self.channels, 1) if kernels.alike(a, residual) else None
            whole = residual is None or along is not None
            x = _moved_dim(a, self.channels, 1)
            out = kernels.realign(x, self.reference, openness, residual=along, relu=relu and whole, norm=before)
            a = _moved_dim(out, 1, self.channels)
            if whole:
                return a
        elif before is not None:
            a = before(a)
        a = a if residual is None else add(a, residual, order)
        return a.relu() if relu else a

    def extra_repr(self) -> str:
        """In the way of torch's modules."""
        bands = ", bands" if self.reference.shape[1] == 3 else ""
        share = f", share={self.share:.3g}" if self.share != 1 else ""
        return f"{self.name!r}, strength={self.rule.strength:.3g}, base={self.rule.base:.3g}{share}{bands}"


def _moved_dim(a: Tensor, source: int, to: int) -> Tensor:
    """`movedim`, of which torch makes a view even if nothing moves: a microsecond, dozens of times a pass."""
    return a if source == to else a.movedim(source, to)
