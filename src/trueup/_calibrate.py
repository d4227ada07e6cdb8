"""`calibrate`: one pass over clean data, from a model to its targets."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterable, Iterator
from typing import Any, Unpack, get_args

import torch
from torch import Tensor, distributed, nn

from trueup.activations import Kind
from trueup.correction import Method
from trueup.fingerprint import Fingerprint
from trueup.graph import Options, Site
from trueup.probe import Probe
from trueup.targets import GATE_SAMPLE, SAMPLE, ChannelTarget, SiteTarget, Targets

RESOLUTION = 1025  # quantile levels a site; docs/targets.md has the error that they make


def calibrate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    resolution: int | None = RESOLUTION,
    method: Method = "auto",
    **options: Unpack[Options],
) -> Targets:
    """Measure what the activations of `model` look like on clean data, and the channels of its norms.

    `loader` yields batches of images as the model takes them, alone or first in a tuple or list, as a DataLoader
    does; they are moved to the model's device. One pass, in evaluation mode, without gradients; memory does not
    depend on the number of images. The model is not touched. Each site keeps `resolution` values of its quantile
    function, or with None every order statistic. `options` choose the sites: see `trueup.Options`. What a `Correction`
    needs is measured after activation functions, what `Evidence` needs after norms; with
    `select=lambda site: site.kind == "activation"` it is the former only. The norms by which `Evidence` tells an
    unusual image are read whether or not they are selected.

    With `method="sort"` these values are exact. `"auto"` and `"histogram"` read those of rows longer than `resolution`
    from a histogram, which takes a fraction of the time: each image's quantiles are then within 0.8 % (or 1/4096 of its
    largest activation), and minimum and maximum are exact. Double precision and `resolution=None` are always sorted.

    The result does not depend on how the images are cut into batches, and the targets of two parts of a data set add
    up to those of the whole. Where `torch.distributed` is initialised, call it on every rank: each gets the targets of
    all ranks' data.
    """
    if isinstance(loader, Tensor):
        raise TypeError("calibrate: the loader is a tensor, and would be taken image by image; give [images]")
    if method not in get_args(Method):
        raise ValueError(f"calibrate(method={method!r}): want one of {', '.join(get_args(Method))}")
    probe = Probe(model, kinds=get_args(Kind), **options)
    fingerprint = Fingerprint.of(probe.model)
    exact = method == "sort"
    mine: Targets | None = None
    for images in probe.checked(_images(loader)):
        part = _targets_of(probe, images, fingerprint, resolution, exact, mine)
        mine = part if mine is None else mine + part
    if (targets := _sum(shard for shard in _of_all_ranks(mine) if shard is not None)) is None:
        raise ValueError("calibrate: the loader is empty; want at least one batch of clean images")
    totals = {name: site.total for sites in (targets.sites, targets.channels) for name, site in sites.items()}
    for name, total in totals.items():
        if not torch.isfinite(total).all():
            raise ValueError(f"calibrate: the activations at site {name!r} overflow to NaN or infinity")
    return targets


def _sum(parts: Iterable[Targets]) -> Targets | None:
    parts = iter(parts)
    first = next(parts, None)
    return None if first is None else functools.reduce(operator.add, parts, first)


def _images(loader: Iterable[Any]) -> Iterator[Tensor]:
    """The images of each batch; says what is wrong with a batch that holds none."""
    for number, batch in enumerate(loader):
        images = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if not isinstance(images, Tensor) or images.dim() == 0:
            raise TypeError(
                f"batch {number} of the loader is a {type(batch).__name__}: neither a tensor of images nor a tuple or "
                "list that starts with one; a generator such as (batch['image'] for batch in loader) picks them out"
            )
        if not torch.isfinite(images).all():
            raise ValueError(f"batch {number} of the loader holds NaN or infinity; clean data must be finite")
        if len(images):
            yield images


def _targets_of(
    probe: Probe, images: Tensor, fingerprint: Fingerprint, resolution: int | None, exact: bool, before: Targets | None
) -> Targets:
    """The targets of one batch, without the single images that would not stay beside those of the batches `before`."""
    keys, order = _keys(images).sort(stable=True)
    few, many = (order[: _staying(keys, before, most)] for most in (SAMPLE, GATE_SAMPLE))
    early = {site.name for site in probe.early}

    def look(site: Site, a: Tensor) -> SiteTarget | ChannelTarget:
        if site.kind == "norm":
            return ChannelTarget.of(a.movedim(site.channels, 1), sample=many if site.name in early else few)
        return SiteTarget.of(a, resolution=resolution, sample=few, exact=exact)

    seen = probe(images, look)
    chosen = {name: target for name, target in seen.items() if name in probe.selected}
    sites = {name: target for name, target in chosen.items() if isinstance(target, SiteTarget)}
    norms = {name: target.without_gate() for name, target in chosen.items() if isinstance(target, ChannelTarget)}
    gate = _gate({name: seen[name] for name in seen if name in early}) if norms else {}
    return Targets(sites, keys[: len(many if gate else few)], fingerprint, norms, gate)


def _gate(early: dict[str, ChannelTarget]) -> dict[str, ChannelTarget]:
    """The norms by which unusual images are told: the last two of the early ones, if there are such, with bands.

    That is about the end of the first stage, where noise, blur and contrast show and what an image is of does not yet.
    """
    with_bands = {name: target for name, target in early.items() if target.bands}
    return dict(list((with_bands or early).items())[-2:])


def _staying(keys: Tensor, before: Targets | None, most: int) -> int:
    """How many of the ascending `keys` are among the `most` smallest that there are with those of `before`."""
    if before is not None and len(before.sampled) >= most:
        keys = keys[keys < before.sampled[most - 1]]
    return min(most, len(keys))


def _keys(images: Tensor) -> Tensor:
    """A number for each image, from its content alone `(batch,)` int64: the same in any batch, order and process."""
    flat = images.detach().reshape(len(images), -1)
    few = flat[:, :: max(1, flat.shape[1] // 4096)].contiguous().cpu()  # enough to tell photographs apart
    rows = few.view(torch.uint8).numpy()
    digests = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]
    return torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests], dtype=torch.int64)


def _of_all_ranks(targets: Targets | None) -> list[Targets | None]:
    if not (distributed.is_available() and distributed.is_initialized()):
        return [targets]
    gathered: list[Targets | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, targets)
    return gathered
