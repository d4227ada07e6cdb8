"""Accumulate calibration statistics over batches, on the model's device until the end.

Each site only measures its batch. Everything else happens once per batch for all sites of a kind together, and results
are fetched once, at the end: launching an operator takes the host longer than most of these operators take on a GPU,
and fetching a number makes the host wait for everything launched before.

Statistics of single images are kept for the images whose content has the smallest hashes (`_Sums.keep`). So the choice
does not depend on batches or order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trueup import functional, kernels
from trueup.rules.evidence import BAND_SIDE, GATE_NORMS
from trueup.targets.activation import SKETCH, ActivationTarget, sketch
from trueup.targets.fingerprint import Fingerprint
from trueup.targets.norm import NormTarget, condensed
from trueup.targets.values import Targets


class Binned(NamedTuple):
    """One batch at an activation, measured by histograms."""

    shape: tuple[int, ...]  # of one image's activations
    values: Tensor  # (batch, ...) quantiles at `_Levels.all`


class Sorted(NamedTuple):
    """One batch at an activation, measured exactly."""

    shape: tuple[int, ...]
    values: Tensor  # (2, m) float64: sums over images of the kept values and of their squares
    missed: Tensor  # (batch,) float64: Wasserstein distance between an image's activations and the kept values
    sketches: Tensor  # (batch, SKETCH)


class Normed(NamedTuple):
    """One batch at a norm."""

    shape: tuple[int, ...]
    values: Tensor  # (batch, k, channels) moments


Measured = Binned | Sorted | Normed
_Kind = tuple[type[Measured], torch.device, torch.dtype, int]


class Accumulator:
    """Sums over all images of a calibration.

    `measure_norm` and `measure_activation` measure one batch at one site; `add` adds a batch of all sites.
    `selected` names the sites that get targets. The gate reads the last `GATE_NORMS` of the norms in
    `gate_candidates`.
    """

    def __init__(
        self,
        fingerprint: Fingerprint,
        *,
        resolution: int | None,
        exact: bool,
        selected: Collection[str],
        gate_candidates: Collection[str],
    ) -> None:
        self._fingerprint, self._resolution, self._exact = fingerprint, resolution, exact
        self._selected, self._gate_candidates = selected, gate_candidates
        self._levels: dict[torch.device, _Levels] = {}
        self._finished: Targets | None = None  # of images of other sizes, whose sums have other shapes
        self._sites, self._gate = _Sums({}), _Sums({})

    def measure_norm(self, a: Tensor) -> Normed:
        """Moments of each channel of `a` `(batch, channels, ...)`."""
        bands = a.dim() == 4 and min(a.shape[2:]) >= BAND_SIDE
        return Normed(tuple(a.shape[1:]), kernels.moments(a.detach(), bands=bands))

    def measure_activation(self, a: Tensor) -> Binned | Sorted:
        """Quantiles of each image of `a` `(batch, ...)`."""
        a = a.detach()
        if self._resolution is None:
            return _sort(a, None)
        if a.device not in self._levels:
            self._levels[a.device] = _Levels(self._resolution, a.device)
        levels = self._levels[a.device]
        if self._exact or a.dtype == torch.float64 or a[:1].numel() <= self._resolution:
            return _sort(a, levels.kept)
        return Binned(tuple(a.shape[1:]), kernels.quantile_rows(kernels.rows_in_any_order(a), levels.all))

    def add(self, measured: Mapping[str, Measured], hashes: Callable[[], Tensor]) -> None:
        """Add a batch. `hashes` returns the hashes of its images `(batch,)` and is called last."""
        sites = {name: m for name, m in measured.items() if name in self._selected}
        norms = any(isinstance(m, Normed) for m in sites.values())
        gate = self._gate_reads(measured) if norms else {}
        places, gate_places = ({name: _place(m) for name, m in some.items()} for some in (sites, gate))
        if (places, gate_places) != (self._sites.places, self._gate.places):
            self._finished = self.targets()
            self._sites, self._gate = _Sums(places, Targets.SAMPLE), _Sums(gate_places, Targets.GATE_SAMPLE)
        device = next((m.values.device.type for m in sites.values()), "cpu")
        with torch.autocast(device, enabled=False):  # autocast cannot concatenate float16
            batches = [
                self._sites.add(sites, functools.partial(self._add_up, moments=4)),  # only the gate reads the fifth
                self._gate.add(gate, self._add_up),
            ]
            ordered, order = hashes().sort(stable=True)
            for sums, batch in zip((self._sites, self._gate), batches, strict=True):
                sums.keep(ordered, order, batch)

    def targets(self) -> Targets | None:
        """Targets of all images so far, on the CPU; None before the first."""
        if not self._sites.images:
            return self._finished
        found, gate = self._sites.targets(self._resolution), self._gate.targets(self._resolution)
        mine = Targets(
            activations={name: t for name, t in found.items() if isinstance(t, ActivationTarget)},
            norms={name: t for name, t in found.items() if isinstance(t, NormTarget)},
            gate={name: t for name, t in gate.items() if isinstance(t, NormTarget)},
            sampled=(self._gate if gate else self._sites).sampled,
            fingerprint=self._fingerprint,
        )
        return mine if self._finished is None else self._finished + mine

    def _gate_reads(self, measured: Mapping[str, Measured]) -> dict[str, Measured]:
        """Norms that the gate reads: the last candidates, those with bands if there are any."""
        early = {name: measured[name] for name in measured if name in self._gate_candidates}
        with_bands = {name: m for name, m in early.items() if m.values.shape[1] > 2}
        return dict(list((with_bands or early).items())[-GATE_NORMS:])

    def _add_up(self, measured: list[Measured], moments: int | None = None) -> _BatchSums:
        """Concatenate the sums of all sites of one kind."""
        values = [m.values for m in measured]
        if isinstance(measured[0], Normed):
            found = torch.cat(values, dim=2)[:, :moments].contiguous()
            return _BatchSums([found.sum(dim=0, dtype=torch.float64)], found, condensed)
        if isinstance(measured[0], Binned):
            levels = self._levels[values[0].device]
            # On a GPU all sites at once, for few launches; on a CPU each alone, in the cache.
            groups = [one[:, None] for one in values] if values[0].is_cpu else [torch.stack(values, dim=1)]
            sums, missed, sketches = (torch.cat(column, dim=1) for column in zip(*levels.add_up(groups), strict=True))
        else:
            exact = [m for m in measured if isinstance(m, Sorted)]
            missed, sketches = (torch.stack(parts, dim=1) for parts in zip(*(m[2:] for m in exact), strict=True))
            sums = torch.cat(values, dim=1)
        return _BatchSums([*sums, missed.sum(dim=0)], sketches, Tensor.float)


class _Sums:
    """Sums over images of the sites in `places`, concatenated per kind, and up to `most` single images."""

    def __init__(self, places: Mapping[str, _Place], most: int = 0) -> None:
        self.places, self._most, self._kinds = places, most, _by_kind(places)
        self._sums: list[Tensor] = []
        self._singles: list[Tensor] = []
        self.images = 0
        self.sampled = torch.empty(0, dtype=torch.int64, device="cpu")

    def add(self, measured: Mapping[str, Measured], add_up: Callable[[list[Measured]], _BatchSums]) -> list[_BatchSums]:
        """Add a batch to the sums; `keep` samples its single images."""
        batches = [add_up([measured[name] for name in names]) for names in self._kinds.values()]
        sums = [total for batch in batches for total in batch.sums]
        self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)] if self._sums else sums
        return batches

    def keep(self, hashes: Tensor, order: Tensor, batches: list[_BatchSums]) -> None:
        """Keep the single images with the smallest hashes. `hashes` is ascending; `order` has indices in the batch."""
        self.images += len(hashes)
        full = len(self.sampled) == self._most
        count = min(self._most, int((hashes < self.sampled[-1]).sum()) if full else len(hashes))
        if not (count and batches):  # after some batches, few images of a batch are kept, and often none
            return
        sampled, places = torch.cat([self.sampled, hashes[:count]]).sort(stable=True)
        self.sampled, places = sampled[: self._most], places[: self._most]
        singles = [batch.condense(_picked(batch.images, order[:count])) for batch in batches]
        if self._singles:
            both = [torch.cat(pair) for pair in zip(self._singles, singles, strict=True)]
            singles = [_picked(images, places) for images in both]
        self._singles = singles

    def targets(self, resolution: int | None) -> dict[str, ActivationTarget | NormTarget]:
        """Targets on the CPU, in the order of the forward pass."""
        sums, singles = ([tensor.cpu() for tensor in some] for some in (self._sums, self._singles))
        found: dict[str, ActivationTarget | NormTarget] = {}
        for (kind, *_), names in self._kinds.items():
            places = {name: self.places[name] for name in names}
            if kind is Normed:
                found |= _norm_targets(places, self.images, sums.pop(0), singles.pop(0))
            else:
                some = [sums.pop(0) for _ in range(3)]
                found |= _activation_targets(places, self.images, resolution, some, singles.pop(0))
        return {name: found[name] for name in self.places}


class _BatchSums(NamedTuple):
    """One batch at all sites of a kind: sums over its images, and the single images."""

    sums: list[Tensor]  # float64
    images: Tensor  # (batch, ...)
    condense: Callable[[Tensor], Tensor]  # converts to the form in which single images are kept


class _Place(NamedTuple):
    """Properties of a site in a batch. The sums of two batches can be added if these are equal."""

    kind: _Kind
    shape: tuple[int, ...]
    width: int  # columns in the sums of its kind


def _place(measured: Measured) -> _Place:
    values = measured.values
    rows = values.shape[1] if isinstance(measured, Normed) else 0
    return _Place((type(measured), values.device, values.dtype, rows), measured.shape, values.shape[-1])


def _by_kind(places: Mapping[str, _Place]) -> dict[_Kind, list[str]]:
    """Names of the sites of each kind, in the order of their concatenated sums."""
    kinds: dict[_Kind, list[str]] = {}
    for name, place in places.items():
        kinds.setdefault(place.kind, []).append(name)
    return kinds


class _Levels:
    """All levels at which one histogram is read: the kept ones, those halfway between them, and a sketch's.

    The first two alternate, so slices separate them. A sketch's levels are among the kept ones if there are 64 k + 1 of
    these, as by default.
    """

    def __init__(self, resolution: int, device: torch.device) -> None:
        self.kept = functional.levels(resolution, device=device)
        between = (self.kept[1:] + self.kept[:-1]) / 2
        self.all = torch.cat([torch.stack([self.kept[:-1], between], dim=1).flatten(), self.kept[-1:]])
        self._widths, self._every, self._order = self.kept.diff(), (resolution - 1) // (SKETCH - 1), None
        if self._every * (SKETCH - 1) != resolution - 1:
            self.all, order = torch.cat([self.all, functional.levels(SKETCH, device=device)]).sort()
            self._order = order.argsort()

    def add_up(self, groups: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """`_sum_and_square` of the kept values of each group of sites `(batch, sites, ...)`, their error, and sketches.

        Each thread of a CPU takes some groups: if all of them took part in every operator, they would mostly wait.
        """
        found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        threads = min(torch.get_num_threads(), len(groups))

        def work(thread: int) -> None:
            for k in range(thread, len(groups), threads):
                kept, missed, sketches = self._split(groups[k])
                found[k] = _sum_and_square(kept), missed, sketches

        kernels.run_parallel(work, threads)
        return [found[k] for k in range(len(groups))]

    def _split(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split `(batch, sites, ...)` into kept values, their error `(batch, sites)`, and sketches."""
        if self._order is None:
            kept, between = values[..., ::2], values[..., 1::2]
            sketches = kept[..., :: self._every]
        else:
            both, sketches = values[..., self._order].tensor_split([2 * len(self.kept) - 1], dim=2)
            kept, between = both[..., ::2], both[..., 1::2]
        # The error between two levels is roughly a triangle: base their distance, height the error halfway.
        # In place: on a CPU, new memory takes longer than the arithmetic.
        halfway = (kept[..., 1:] + kept[..., :-1]).div_(2)
        missed = halfway.sub_(between).abs_().double()
        return kept, missed @ self._widths / 2, sketches


def _sort(a: Tensor, levels: Tensor | None) -> Sorted:
    ordered = functional.as_rows(a).sort(dim=1).values
    kept, missed = ordered, ordered.new_zeros(len(ordered), dtype=torch.float64)
    if levels is not None:
        kept = functional.quantile(ordered, levels)
        restored = functional.order_statistics(kept, ordered.shape[1], levels=levels)
        missed = (restored - ordered).abs().mean(dim=1, dtype=torch.float64)
    return Sorted(tuple(a.shape[1:]), _sum_and_square(kept), missed, sketch(ordered))


def _sum_and_square(kept: Tensor) -> Tensor:
    """Sums over images `(images, ...)` of values and of their squares, side by side `(2, m)`, float64."""
    kept = kept.double().flatten(1)  # a copy, unless the model computes in double precision
    return torch.stack([kept.sum(dim=0), (kept * kept).sum(dim=0)])


def _picked(images: Tensor, which: Tensor) -> Tensor:
    return images[which.to(images.device, non_blocking=True)]


def _activation_targets(
    places: Mapping[str, _Place], images: int, resolution: int | None, sums: list[Tensor], singles: Tensor
) -> dict[str, ActivationTarget]:
    levels = None if resolution is None else functional.levels(resolution, device=sums[0].device)
    widths = [place.width if resolution is None else resolution for place in places.values()]
    totals, squares = (torch.split(total, widths) for total in sums[:2])
    return {
        name: ActivationTarget(
            shape=place.shape,
            levels=levels,
            total=totals[k].clone(),
            square=squares[k].clone(),
            loss=float(sums[2][k]),
            images=images,
            sample=singles[:, k].clone(),
        )
        for k, (name, place) in enumerate(places.items())
    }


def _norm_targets(places: Mapping[str, _Place], images: int, total: Tensor, singles: Tensor) -> dict[str, NormTarget]:
    widths = [place.width for place in places.values()]
    return {
        name: NormTarget(shape=place.shape, total=sums.clone(), images=images, sample=kept.clone())
        for (name, place), sums, kept in zip(
            places.items(), torch.split(total, widths, 1), torch.split(singles, widths, 2), strict=True
        )
    }
