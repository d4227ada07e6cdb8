"""Targets: what a model's activations look like on clean images. Sums that merge, in a file that knows its model."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from trueup import functional, kernels
from trueup.functional import evidence
from trueup.atomic import write_atomically
from trueup.targets.fingerprint import Fingerprint
from trueup.functional.gate import Gate, features, fit

FORMAT = "trueup-targets"
VERSION = 3  # of the file format; a reader refuses what is newer. 1 had no channel statistics, 2 none for the gate
SAMPLE = 512  # images whose distributions are kept: enough to tell what one in a hundred looks like
GATE_SAMPLE = 4096  # images kept for the gate: half of them rank, and should tell what one in a thousand looks like
SKETCH = 65  # quantile levels kept of each
BANDED = 8  # the smaller side of maps that are split into bands; below it, most of a map is border
FLOOR = 1e-3  # of a channel's mean variance on clean images: variances are not told apart below it


@dataclass(frozen=True, eq=False)
class ActivationTarget:
    """One site's activations on clean images: its target distribution, and how much images differ from it.

    Sums over images, so that adding two is merging them. `levels` are the quantile levels at which the sums are
    known, or None where every order statistic is kept.
    """

    shape: tuple[int, ...]  # of one image's activations
    levels: Tensor | None  # (m,)
    total: Tensor  # (m,) float64: sum of the images' quantile functions
    square: Tensor  # (m,) float64: sum of their squares
    loss: float  # sum of the Wasserstein distances between the images' activations and what the levels keep of them
    images: int
    sample: Tensor  # (<= SAMPLE, SKETCH) float32: quantile functions of the images of Targets.sampled

    def __post_init__(self) -> None:
        known = self.total if self.levels is None else self.levels
        if not (self.total.shape == self.square.shape == known.shape) or self.sample.shape[1:] != (SKETCH,):
            shapes = [tuple(t.shape) for t in (self.total, self.square, known, self.sample)]
            raise ValueError(f"the parts of a target do not fit together: shapes {shapes}")

    @property
    def target(self) -> Tensor:
        """The barycenter at `levels` `(m,)`: the mean of each order statistic, t₍ᵢ₎ before centring."""
        return self.total / self.images

    @property
    def spread(self) -> Tensor:
        """The standard deviation of each order statistic over images `(m,)`: the appendix's σ₍ᵢ₎."""
        return (self.square / self.images - self.target**2).clamp(min=0).sqrt()

    @property
    def compression_error(self) -> float:
        """The mean over images of the 1-Wasserstein distance between their activations and what is kept of them.

        Taking the mean over images is linear, so the error of `target` is at most this where quantiles were sorted.
        Where they were read from histograms, it is an estimate from them, halfway between levels, and too low.
        """
        return self.loss / self.images

    def order_statistics(self, n: int) -> Tensor:
        """The target for rows of `n` activations `(n,)`, float64."""
        return functional.order_statistics(self.target, n, levels=self.levels)

    def unusual(self, ordered: Tensor) -> Tensor:
        """The share of clean images that lie closer to the target than each row of sorted activations `(batch,)`."""
        target = functional.quantile(self.target, functional.levels(SKETCH), levels=self.levels).float()

        def distance(sketches: Tensor) -> Tensor:
            return torch.trapezoid((sketches - target).abs(), functional.levels(SKETCH).float(), dim=1)

        clean = distance(self.sample).sort().values
        return torch.searchsorted(clean, distance(sketch(ordered).float().cpu())) / len(clean)


def sketch(ordered: Tensor) -> Tensor:
    """What is kept of single images: `(batch, n)` sorted activations at few levels, `(batch, SKETCH)`."""
    return functional.quantile(ordered, functional.levels(SKETCH, device=ordered.device))


def deviations(moments: Tensor) -> Tensor:
    """What is kept of single images: `(batch, k, channels)` moments, square roots where they are variances, in float16.

    Three digits are plenty beside the spread over images, and halve the file: most of it is this.
    """
    limit = torch.finfo(torch.float16).max
    parts = [moments[:, :1], moments[:, 1:4].sqrt(), moments[:, 4:]]
    return torch.cat(parts, dim=1).clamp(-limit, limit).half()


@dataclass(frozen=True, eq=False)
class NormTarget:
    """One norm's output on clean images, channel by channel: what its maps' mean and deviations usually are.

    A row a moment, as `evidence.moments` has them: the mean and the variance, and where maps are large enough those of
    the two bands; the last of these is kept for the gate only. Sums over images and single images, so that adding two
    is merging them. The logarithms that evidence is weighed on have a floor that all images have a say in, so they are
    taken of the single images that are kept, once all are known: no split of the data can then make a difference.
    """

    shape: tuple[int, ...]  # of one image's activations, channels first
    total: Tensor  # (2, 4 or 5, channels) float64: sum of the images' moments
    images: int
    sample: Tensor  # (kept, 2, 4 or 5, channels) float16: of the first of Targets.sampled, deviations for variances

    def __post_init__(self) -> None:
        if self.total.dim() != 2 or self.total.shape != self.sample.shape[1:] or len(self.total) not in (2, 4, 5):
            shapes = [tuple(t.shape) for t in (self.total, self.sample)]
            raise ValueError(f"the parts of a channel target do not fit together: shapes {shapes}")

    @property
    def bands(self) -> bool:
        """Whether the deviations of both bands are known."""
        return len(self.total) > 2

    def reference(self, strength: float, base: float = 0.0, *, bands: bool) -> Tensor:
        """What is usual `(5, 2, channels)`, or `(5, 3, channels)` with bands: see `trueup.functional.evidence`. float64."""
        rows = self._rows(bands=bands)
        floor = self._floor(rows)
        return evidence.reference_of(self._statistics(rows, floor), floor, strength=strength, base=base)

    def evidence(self, a: Tensor) -> Tensor:
        """The mean evidence over an image's channels and statistics `(batch,)`, float64; about 1 for clean images."""
        rows = self._rows(bands=True)
        floor = self._floor(rows)
        usual = evidence.centre_and_spread(self._statistics(rows, floor))
        moments = kernels.moments(a, bands=self.bands)[:, rows].double().cpu()
        return evidence.evidence(evidence.statistics(moments, floor), usual).mean(dim=(1, 2))

    def clean_evidence(self) -> Tensor:
        """The same of the images that are kept `(<= SAMPLE,)`, each measured against the others.

        With n images of which one is z of all their spreads away, that is n z² / (n - 1 - z²).
        """
        rows = self._rows(bands=True)
        floor = self._floor(rows)
        clean = self._statistics(rows, floor)
        z2 = evidence.evidence(clean, evidence.centre_and_spread(clean))
        n = len(clean)
        return (n * z2 / (n - 1 - z2).clamp(min=1e-3)).mean(dim=(1, 2))

    @property
    def floor(self) -> Tensor:
        """The floor of each variance `(k, channels)`."""
        return self._floor(list(range(len(self.total))))

    def features(self, a: Tensor) -> Tensor:
        """What the gate looks at in activations `(batch, channels, ...)`: `(batch, d)` float64."""
        return features(kernels.moments(a, bands=self.bands), self.floor.to(a.device))

    def clean_features(self) -> Tensor:
        """The same of the images that are kept `(kept, d)`."""
        kept = self.sample.double()
        return features(torch.cat([kept[:, :1], kept[:, 1:4].square(), kept[:, 4:]], dim=1), self.floor)

    def _rows(self, *, bands: bool) -> list[int]:
        return [0, 2, 3] if bands and self.bands else [0, 1]

    def _floor(self, rows: list[int]) -> Tensor:
        """The floor of the variance `(k, channels)`; where a channel never varies, any will do."""
        return (FLOOR * self.total[rows] / self.images).clamp(min=1e-24)

    def _statistics(self, rows: list[int], floor: Tensor) -> Tensor:
        """Of the images that are kept."""
        kept = self.sample[:, rows].double()
        return evidence.statistics(torch.cat([kept[:, :1], kept[:, 1:].square()], dim=1), floor)


@dataclass(frozen=True, eq=False)
class Targets(Mapping[str, ActivationTarget]):
    """Each site's target distribution, by name, and the fingerprint of the model it was measured on.

    Made by `trueup.calibrate`. Adding the targets of two parts of a data set gives the targets of the whole.
    `channels` holds the statistics of norms' outputs, by the names of their sites; `gate` those of the few norms by
    which a whole image is told to be unusual, of more single images.
    """

    sites: Mapping[str, ActivationTarget]
    # Images kept singly, named by content, the smallest first; each target has the first of them, as many as it keeps.
    sampled: Tensor  # (<= GATE_SAMPLE,) int64
    fingerprint: Fingerprint
    channels: Mapping[str, NormTarget] = field(default_factory=dict)
    gate: Mapping[str, NormTarget] = field(default_factory=dict)

    def __repr__(self) -> str:
        norms = f"{len(self.channels)} norms, " if self.channels else ""
        return f"Targets({len(self)} sites, {norms}{self.images} images)"

    def __getitem__(self, name: str) -> ActivationTarget:
        try:
            return self.sites[name]
        except KeyError:
            raise KeyError(f"no site {name!r} in these targets; they have {', '.join(self.sites)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    @property
    def images(self) -> int:
        """How many images were seen."""
        return next(site.images for sites in (self.sites, self.channels) for site in sites.values())

    def __add__(self, other: Targets) -> Targets:
        """The targets of both sets of images together."""
        if not isinstance(other, Targets):
            return NotImplemented
        if difference := self.fingerprint.difference(other.fingerprint):
            raise ValueError(f"these targets belong to two different models and cannot be added: {difference}")
        for mine, theirs in ((self.sites, other.sites), (self.channels, other.channels)):
            if list(mine) != list(theirs):
                raise ValueError(f"these targets cannot be added: one has sites {list(mine)}, the other {list(theirs)}")
        sampled, order = torch.cat([self.sampled, other.sampled]).sort(stable=True)
        shared = [name for name in self.gate if name in other.gate]  # small images may have the gate read other norms
        many = _Kept(len(self.sampled), order[:GATE_SAMPLE])
        few = _Kept(len(self.sampled), order[:SAMPLE])
        return Targets(
            {name: _merge(name, site, other[name], few) for name, site in self.items()},
            sampled[: GATE_SAMPLE if shared else SAMPLE],
            self.fingerprint,
            {name: _merge_channels(site, other.channels[name], few) for name, site in self.channels.items()},
            {name: _merge_channels(self.gate[name], other.gate[name], many) for name in shared},
        )

    @functools.cached_property
    def fitted_gate(self) -> Gate:
        """What tells unusual images, by the features of the norms in `gate`, in their order: see `trueup.functional.gate`."""
        clean = torch.cat([site.clean_features() for site in self.gate.values()], dim=1)
        return fit(clean, self.sampled[: len(clean)])

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that these targets were not calibrated on, naming what differs."""
        if difference := self.fingerprint.difference(Fingerprint.of(model)):
            raise ValueError(
                f"these targets were calibrated on another model than this {type(model).__name__}: {difference}; "
                "calibrate again with trueup.calibrate(model, loader)"
            )

    def check_sites(self, model: nn.Module, wanted: Collection[str], sites: Collection[str], *, selected: bool) -> None:
        """Refuse a model that lacks sites.

        `wanted` are the sites of these targets that are to be used, `sites` those found in the model; unless they are
        `selected`, all that are wanted should be among them.
        """
        kind = type(model).__name__
        missing = [name for name in wanted if name not in sites]
        if selected and len(missing) == len(wanted):
            raise ValueError(f"`select` chose none of the sites that these targets hold: {', '.join(wanted)}")
        if missing and not selected:
            raise ValueError(
                f"the targets hold the site {missing[0]!r}, which was not found in this {kind}; it has "
                f"{', '.join(sites) or 'none of theirs'}; give activations= and leaves= as you did to calibrate"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file. It holds numbers and text only; loading it runs no code."""
        tensors: dict[str, Tensor] = {"sampled": self.sampled}
        metadata = {"format": FORMAT, "version": str(VERSION), "fingerprint": self.fingerprint.to_json()}
        for group, prefix in _GROUPS.items():
            records = {}
            for name, site in getattr(self, group).items():
                fields = {part.name: getattr(site, part.name) for part in dataclasses.fields(site)}
                parts = {key: value for key, value in fields.items() if isinstance(value, Tensor)}
                tensors |= {f"{name}/{prefix}{key}": value.contiguous() for key, value in parts.items()}
                records[name] = {key: value for key, value in fields.items() if key not in parts}
            metadata[group] = json.dumps(records)
        write_atomically(Path(path), safetensors.torch.save(tensors, metadata))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Targets:
        """Read what `save` wrote. Raises ValueError for a file that is damaged, foreign, or of a newer format."""
        metadata, tensors = _read(path)
        try:
            sites = {}
            for name, record in json.loads(metadata["sites"]).items():
                fields = record | {"shape": tuple(record["shape"]), "levels": tensors.get(f"{name}/levels")}
                fields |= {key: tensors[f"{name}/{key}"] for key in ("total", "square", "sample")}
                sites[name] = ActivationTarget(**fields)
            norms, gate = (dict(_channels(group, metadata, tensors)) for group in ("channels", "gate"))
            return cls(sites, tensors["sampled"], Fingerprint.from_json(metadata["fingerprint"]), norms, gate)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is a damaged trueup targets file ({error!r})") from error


# What a file holds of each group of targets, and what their tensors' names begin with, after the site's.
_GROUPS = {"sites": "", "channels": "", "gate": "gate_"}


def _channels(
    group: str, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, NormTarget]]:
    """The channel targets of a group, by name; none in a file of a version that did not have it."""
    for name, record in json.loads(metadata.get(group, "{}")).items():
        total, sample = (tensors[f"{name}/{_GROUPS[group]}{key}"] for key in ("total", "sample"))
        yield name, NormTarget(tuple(record["shape"]), total, record["images"], sample)


class _Kept(NamedTuple):
    """The single images that stay in merging: `order` numbers those of the one, `first` of them, then the other's."""

    first: int
    order: Tensor

    def of(self, a: Tensor, b: Tensor) -> Tensor:
        """Their rows, of which `a` and `b` may have only the first; no copy where `b` has none, as is soon the rule."""
        if not len(b):
            return a
        with torch.autocast("cpu", enabled=False):  # which would not put float16 together
            both = torch.cat([a, b])
        return both[torch.where(self.order < self.first, self.order, self.order - self.first + len(a))]


def _merge(name: str, a: ActivationTarget, b: ActivationTarget, kept: _Kept) -> ActivationTarget:
    same_levels = a.total.shape == b.total.shape and (a.levels is None) == (b.levels is None)
    if not same_levels:
        raise ValueError(
            f"site {name!r} was calibrated at two resolutions ({len(a.total)} and {len(b.total)} values); with "
            "resolution=None, all images must have one size"
        )
    return ActivationTarget(
        shape=a.shape,
        levels=a.levels,
        total=a.total + b.total,
        square=a.square + b.square,
        loss=a.loss + b.loss,
        images=a.images + b.images,
        sample=kept.of(a.sample, b.sample),
    )


def _merge_channels(a: NormTarget, b: NormTarget, kept: _Kept) -> NormTarget:
    rows = min(len(a.total), len(b.total))  # bands where the maps of all images were large enough for them
    return NormTarget(
        shape=a.shape,
        total=a.total[:rows] + b.total[:rows],
        images=a.images + b.images,
        sample=kept.of(a.sample[:, :rows], b.sample[:, :rows]),
    )


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no targets at {path}; make them with trueup.calibrate(model, loader).save(path)")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} is a safetensors file, but holds no trueup targets")
            version = metadata.get("version", "")
            if not version.isdigit():
                raise ValueError(f"{path} is a damaged trueup targets file (format version {version!r})")
            if int(version) > VERSION:
                raise ValueError(
                    f"{path} has format version {version}, this trueup reads up to {VERSION}: "
                    "upgrade trueup, or calibrate again"
                )
            return metadata, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is no trueup targets file, or is damaged or cut short ({error})") from error
