"""`calibrate`: one pass over clean data, from a model to its targets."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Iterable
from typing import Any, Unpack, get_args

import torch
from torch import Tensor, nn

from trueup.graph.activations import Kind
from trueup._loading import images_of
from trueup.rules import Method
from trueup.targets.fingerprint import Fingerprint
from trueup.graph import Options
from trueup.graph.probe import Probe
from trueup._ranks import gathered
from trueup.targets.accumulate import Tally
from trueup.targets import Targets

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
    if method not in get_args(Method):
        raise ValueError(f"calibrate(method={method!r}): want one of {', '.join(get_args(Method))}")
    probe = Probe(model, kinds=get_args(Kind), **options)
    tally = Tally(
        Fingerprint.of(probe.model),
        resolution=resolution,
        exact=method == "sort",
        selected=probe.selected,
        early=[site.name for site in probe.early],
    )
    for number, images in enumerate(probe.checked(images_of(loader, probe.module.device))):
        keys = _start_naming(images, number)
        tally.add(probe(images, tally.look), keys)
    if (targets := _sum(shard for shard in gathered(tally.targets()) if shard is not None)) is None:
        raise ValueError("calibrate: the loader is empty; want at least one batch of clean images")
    if not (targets.sites or targets.channels):
        raise ValueError(
            f"calibrate: at {', '.join(probe.selected)} the first dimension is not the batch, so that images cannot be "
            "told apart there; `select` other sites"
        )
    groups = (targets.sites, targets.channels, targets.gate)
    for name, total in ((name, site.total) for sites in groups for name, site in sites.items()):
        if not torch.isfinite(total).all():
            raise ValueError(f"calibrate: the activations at site {name!r} overflow to NaN or infinity")
    return targets


def _sum(parts: Iterable[Targets]) -> Targets | None:
    parts = iter(parts)
    first = next(parts, None)
    return None if first is None else functools.reduce(operator.add, parts, first)


def _start_naming(images: Tensor, number: int) -> Callable[[], Tensor]:
    """Start to fetch what a name for each image is made of; the result makes the names `(batch,)` int64.

    They come from an image's content alone: the same in any batch, order and process. Between the two, the device can
    be given work that does not wait for this.
    """
    flat = images.reshape(len(images), -1)
    few = flat[:, :: max(1, flat.shape[1] // 4096)].contiguous()  # enough to tell photographs apart
    finite = torch.isfinite(images).all()
    arrived = None
    if images.is_cuda:
        few, finite = (
            torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in (few, finite)
        )
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(images.device))

    def names() -> Tensor:
        if arrived is not None:
            arrived.synchronize()
        if not finite:
            raise ValueError(f"batch {number} of the loader holds NaN or infinity; clean data must be finite")
        rows = few.cpu().view(torch.uint8).numpy()
        digests = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]
        return torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests], dtype=torch.int64)

    return names
