"""What a calibration has seen so far: sums over images of all sites at once, kept where the model is.

To start an operator takes the host longer than most of them take on a GPU, and to fetch a number makes it wait for all
that was started. So a site only has each image measured. What follows is done for all sites of a kind together, once a
batch, and is fetched once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trueup import functional, kernels
from trueup.targets.fingerprint import Fingerprint
from trueup.graph import Site
from trueup.targets.targets import (
    BANDED,
    GATE_SAMPLE,
    SAMPLE,
    SKETCH,
    NormTarget,
    ActivationTarget,
    Targets,
    deviations,
    sketch,
)


class Binned(NamedTuple):
    """One batch after an activation function, from histograms."""

    shape: tuple[int, ...]  # of one image's activations
    values: Tensor  # (batch, ...) quantiles at `_Levels.every`


class Sorted(NamedTuple):
    """One batch after an activation function, exactly."""

    shape: tuple[int, ...]
    values: Tensor  # (2, m) float64: sums over images of what is kept and of its squares; m may be all activations
    missed: Tensor  # (batch,) float64: the Wasserstein distance between an image's activations and what is kept
    sketches: Tensor  # (batch, SKETCH)


class Normed(NamedTuple):
    """One batch after a norm."""

    shape: tuple[int, ...]
    values: Tensor  # (batch, k, channels) moments


Measured = Binned | Sorted | Normed
_Kind = tuple[type[Measured], torch.device, torch.dtype, int]


class Tally:
    """`look(site, a)` measures one batch at one site; `add` adds up what was measured at all sites.

    `selected` are the names of the sites whose targets are wanted, `early` those of the norms among which the gate's
    are.
    """

    def __init__(
        self,
        fingerprint: Fingerprint,
        *,
        resolution: int | None,
        exact: bool,
        selected: Collection[str],
        early: Collection[str],
    ) -> None:
        self._fingerprint, self._resolution, self._exact = fingerprint, resolution, exact
        self._selected, self._early = selected, early
        self._levels: dict[torch.device, _Levels] = {}
        self._done: Targets | None = None  # of images of other sizes, whose sums do not fit beside these
        self._begin()

    def _begin(self) -> None:
        self._sites, self._gate = _Sums(SAMPLE), _Sums(GATE_SAMPLE)

    def look(self, site: Site, a: Tensor) -> Measured:
        """Measure each image of a batch `(batch, ...)`."""
        a = a.detach()
        if site.kind == "norm":
            a = a if site.channels == 1 else a.movedim(site.channels, 1)
            bands = a.dim() == 4 and min(a.shape[2:]) >= BANDED
            return Normed(tuple(a.shape[1:]), kernels.moments(a, bands=bands))
        if self._resolution is None:
            return _sort(a, None)
        if a.device not in self._levels:
            self._levels[a.device] = _Levels(self._resolution, a.device)
        levels = self._levels[a.device]
        if self._exact or a.dtype == torch.float64 or a[:1].numel() <= self._resolution:
            return _sort(a, levels.kept)
        return Binned(tuple(a.shape[1:]), kernels.quantile_rows(kernels.as_rows(a), levels.every))

    def add(self, measured: Mapping[str, Measured], keys: Callable[[], Tensor]) -> None:
        """Add a batch. `keys` names its images `(batch,)`; it is asked when all else has been started."""
        sites = {name: _for_evidence(m) for name, m in measured.items() if name in self._selected}
        norms = any(isinstance(m, Normed) for m in sites.values())
        gate = _for_gate({name: measured[name] for name in measured if name in self._early}) if norms else {}
        if not (self._sites.fits(sites) and self._gate.fits(gate)):
            self._done = self.targets()
            self._begin()
        device = next((m.values.device.type for m in sites.values()), "cpu")
        with torch.autocast(device, enabled=False):  # which would not put together what is kept in float16
            batches = [sums.add(some, self._add_up) for sums, some in ((self._sites, sites), (self._gate, gate))]
            named, order = keys().sort(stable=True)
            for sums, batch in zip((self._sites, self._gate), batches, strict=True):
                sums.keep(named, order, batch)

    def targets(self) -> Targets | None:
        """The targets of all images so far, on the CPU; None if there were none."""
        if not self._sites.images:
            return self._done
        found, gate = self._sites.targets(self._resolution), self._gate.targets(self._resolution)
        mine = Targets(
            {name: t for name, t in found.items() if isinstance(t, ActivationTarget)},
            (self._gate if gate else self._sites).sampled,
            self._fingerprint,
            {name: t for name, t in found.items() if isinstance(t, NormTarget)},
            {name: t for name, t in gate.items() if isinstance(t, NormTarget)},
        )
        return mine if self._done is None else self._done + mine

    def _add_up(self, measured: list[Measured]) -> _Batch:
        """The sums of sites of one kind, side by side."""
        values = [m.values for m in measured]
        if isinstance(measured[0], Normed):
            moments = torch.cat(values, dim=2)
            return _Batch([moments.sum(dim=0, dtype=torch.float64)], moments, deviations)
        if isinstance(measured[0], Binned):
            kept, missed, sketches = self._levels[values[0].device].read(torch.stack(values, dim=1))
            sums = _sum_and_square(kept)
        else:
            exact = [m for m in measured if isinstance(m, Sorted)]
            missed, sketches = (torch.stack(parts, dim=1) for parts in zip(*(m[2:] for m in exact), strict=True))
            sums = torch.cat(values, dim=1)
        return _Batch([*sums, missed.sum(dim=0)], sketches, Tensor.float)


def _for_evidence(measured: Measured) -> Measured:
    """Without what only the gate looks at."""
    return measured._replace(values=measured.values[:, :4]) if isinstance(measured, Normed) else measured


def _for_gate(early: dict[str, Measured]) -> dict[str, Measured]:
    """The norms by which unusual images are told: the last two of the early ones, if there are such, with bands.

    That is about the end of the first stage, where noise, blur and contrast show and what an image is of does not yet.
    """
    with_bands = {name: m for name, m in early.items() if m.values.shape[1] > 2}
    return dict(list((with_bands or early).items())[-2:])


class _Sums:
    """Sums over images of some sites, those of a kind side by side, and up to `most` images singly."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[str, _Place] = {}
        self._sums: list[Tensor] = []
        self._singles: list[Tensor] = []
        self.images = 0
        self.sampled = torch.empty(0, dtype=torch.int64)

    def fits(self, measured: Mapping[str, Measured]) -> bool:
        """Whether these can be added to what there is."""
        return self._places == {name: _place(m) for name, m in measured.items()}

    def add(self, measured: Mapping[str, Measured], add_up: Callable[[list[Measured]], _Batch]) -> list[_Batch]:
        """Add a batch of images, without keeping any singly."""
        self._places = {name: _place(m) for name, m in measured.items()}
        batches = [add_up([measured[name] for name in names]) for names in _kinds(self._places).values()]
        sums = [total for batch in batches for total in batch.sums]
        self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)] if self._sums else sums
        return batches

    def keep(self, named: Tensor, order: Tensor, batches: list[_Batch]) -> None:
        """Keep those images of a batch singly whose names `named`, ascending, are small enough."""
        self.images += len(named)
        full = len(self.sampled) == self._most
        count = min(self._most, int((named < self.sampled[-1]).sum()) if full else len(named))
        if not (count and batches):  # soon, few images of a batch are to be kept singly, and then none
            return
        sampled, places = torch.cat([self.sampled, named[:count]]).sort(stable=True)
        self.sampled, places = sampled[: self._most], places[: self._most]
        singles = [batch.keep(_picked(batch.images, order[:count])) for batch in batches]
        if self._singles:
            both = [torch.cat(pair) for pair in zip(self._singles, singles, strict=True)]
            singles = [_picked(images, places) for images in both]
        self._singles = singles

    def targets(self, resolution: int | None) -> dict[str, ActivationTarget | NormTarget]:
        """What has been added, on the CPU, in the order of the forward pass."""
        sums, singles = ([tensor.cpu() for tensor in some] for some in (self._sums, self._singles))
        found: dict[str, ActivationTarget | NormTarget] = {}
        for (kind, *_), names in _kinds(self._places).items():
            places = {name: self._places[name] for name in names}
            if kind is Normed:
                found |= _channel_targets(places, self.images, sums.pop(0), singles.pop(0))
            else:
                some = [sums.pop(0) for _ in range(3)]
                found |= _site_targets(places, self.images, resolution, some, singles.pop(0))
        return {name: found[name] for name in self._places}


class _Batch(NamedTuple):
    sums: list[Tensor]  # float64
    images: Tensor  # (batch, ...)
    keep: Callable[[Tensor], Tensor]  # what is kept of single images


class _Place(NamedTuple):
    """What has to be the same in two batches for their sums to be added."""

    kind: _Kind
    shape: tuple[int, ...]
    width: int  # columns in the sums of its kind


def _place(measured: Measured) -> _Place:
    values = measured.values
    rows = values.shape[1] if isinstance(measured, Normed) else 0
    return _Place((type(measured), values.device, values.dtype, rows), measured.shape, values.shape[-1])


def _kinds(places: Mapping[str, _Place]) -> dict[_Kind, list[str]]:
    """The names of the sites that are added up together, in the order in which they lie."""
    kinds: dict[_Kind, list[str]] = {}
    for name, place in places.items():
        kinds.setdefault(place.kind, []).append(name)
    return kinds


class _Levels:
    """All levels at which a histogram is read at once: those that are kept, those halfway between, and a sketch's."""

    def __init__(self, resolution: int, device: torch.device) -> None:
        self.kept = functional.levels(resolution, device=device)
        some = [self.kept, (self.kept[1:] + self.kept[:-1]) / 2, functional.levels(SKETCH, device=device)]
        self.every, order = torch.cat(some).sort()
        self._sizes, self._back, self._widths = [len(part) for part in some], order.argsort(), self.kept.diff()

    def read(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From `(batch, sites, ...)` what is kept, side by side, what is missed `(batch, sites)`, and sketches."""
        kept, between, sketches = torch.split(values[..., self._back], self._sizes, dim=2)
        # Between two levels, a triangle: its base is their distance, its height what is missed halfway.
        missed = (between - (kept[..., 1:] + kept[..., :-1]) / 2).abs().double()
        return kept.flatten(1), missed @ self._widths / 2, sketches


def _sort(a: Tensor, levels: Tensor | None) -> Sorted:
    ordered = functional.as_rows(a).sort(dim=1).values
    kept, missed = ordered, ordered.new_zeros(len(ordered), dtype=torch.float64)
    if levels is not None:
        kept = functional.quantile(ordered, levels)
        restored = functional.order_statistics(kept, ordered.shape[1], levels=levels)
        missed = (restored - ordered).abs().mean(dim=1, dtype=torch.float64)
    return Sorted(tuple(a.shape[1:]), _sum_and_square(kept), missed, sketch(ordered))


def _sum_and_square(kept: Tensor) -> Tensor:
    """Sums over images `(images, m)` of values and of their squares `(2, m)`, float64."""
    kept = kept.double()
    return torch.stack([kept.sum(dim=0), kept.square().sum(dim=0)])


def _picked(images: Tensor, which: Tensor) -> Tensor:
    return images[which.to(images.device, non_blocking=True)]


def _site_targets(
    places: Mapping[str, _Place], images: int, resolution: int | None, sums: list[Tensor], singles: Tensor
) -> dict[str, ActivationTarget]:
    levels = None if resolution is None else functional.levels(resolution)
    widths = [place.width if resolution is None else resolution for place in places.values()]
    totals, squares = (torch.split(total, widths) for total in sums[:2])
    return {
        name: ActivationTarget(
            shape=place.shape,
            levels=None if levels is None else levels.clone(),  # a file holds each tensor's memory once
            total=totals[k].clone(),
            square=squares[k].clone(),
            loss=float(sums[2][k]),
            images=images,
            sample=singles[:, k].clone(),
        )
        for k, (name, place) in enumerate(places.items())
    }


def _channel_targets(
    places: Mapping[str, _Place], images: int, total: Tensor, singles: Tensor
) -> dict[str, NormTarget]:
    widths = [place.width for place in places.values()]
    return {
        name: NormTarget(shape=place.shape, total=sums.clone(), images=images, sample=kept.clone())
        for (name, place), sums, kept in zip(
            places.items(), torch.split(total, widths, 1), torch.split(singles, widths, 2), strict=True
        )
    }
