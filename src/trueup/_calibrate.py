"""`calibrate`: compute the targets of a model from clean images."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, distributed, nn

from trueup._answers import most_likely
from trueup._batches import inputs_of
from trueup._distributed import gathered
from trueup._hashes import start_hashing
from trueup.decide import ImageSample
from trueup.decide import decide as decide_setting
from trueup.graph import Probe, Site, check_select, examine, trace
from trueup.rules import Algorithm
from trueup.rules.evidence import GATE_DEPTH
from trueup.rules.limits import MAX_CHANGED, check_max_changed
from trueup.targets import Accumulator, Fingerprint, Targets, listed
from trueup.targets.accumulate import Measured

RESOLUTION = 1025  # quantile levels per activation; docs/targets.md has the error that they cause


def calibrate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    transform: Callable[[Any], Any] | None = None,
    images: int | None = None,
    resolution: int | None = RESOLUTION,
    method: Literal["auto", "sort", "histogram"] = "auto",
    decide: bool = True,
    max_changed: float = MAX_CHANGED,
    answer: Callable[[Any], Tensor] | None = None,
    progress: bool | None = None,
    select: Callable[[Site], bool] | None = None,
    activations: tuple[type[nn.Module] | Callable[..., Tensor], ...] = (),
    leaves: tuple[type[nn.Module], ...] = (),
) -> Targets:
    """Measure what a model's activations look like on clean images, and decide what is safe for this model.

        targets = trueup.calibrate(model, clean_loader)
        print(targets)                                   # what was decided, and why
        targets.save("model.trueup.safetensors")

    The decision needs no labels. On up to 240 of the images, a weight is learned for the evidence of each channel: the
    corrected model should answer perturbed copies as the model answers the clean images. On up to 240 others, settings
    of `Evidence` with these weights are tried. The setting that keeps most of the model's own clean answers becomes
    `targets.rule`. If no setting beats the uncorrected model, the model is left as it is, with a warning. The decision
    takes about as long as 60 to 120 forward passes over 500 images.

    The measurement is one pass over all images, in evaluation mode and without gradients. Memory does not grow with
    the number of images, and the model is not changed. The result does not depend on how the images are batched. The
    targets of two parts of a data set add up to the targets of the whole, and their decisions pool the trials of both.
    Where `torch.distributed` is initialised, call `calibrate` on every rank: each rank gets the targets of all images.

    loader: yields batches like a DataLoader: images as the model takes them, alone or first in a tuple or list; or a
        dictionary of the model's inputs by name (labels are ignored); or a list of images of different sizes. A model
        with two required inputs takes the first two entries. They are moved to the model's device.
    transform: function that turns any other batch into the model's arguments: a tensor, a tuple of positional or a
        dictionary of keyword arguments.
    images: number of images to use, from the first on; None uses all.
    resolution: quantile levels kept per activation site; None keeps every order statistic.
    method: "sort" takes exact quantiles. "auto" and "histogram" read them from a histogram where a row is longer than
        `resolution`, in a fraction of the time: each image's quantiles are then within 0.8 % (or 1/4096 of its largest
        activation), minimum and maximum exact. Double precision and `resolution=None` are always sorted.
    decide: False skips the decision. `correct` then needs a rule, or takes a careful one with a warning.
    max_changed: the largest share of clean answers that the chosen setting may change. Larger than in `choose`,
        because few images cannot demonstrate a smaller share: 50 images with no changed answer show only 2 %.
    answer: function that turns the model's output into its answer, a tensor (batch, ...) compared for equality. By
        default, the most likely class of scores (batch, classes, ...), per pixel if there are pixels.
    progress: show the progress of the decision on standard error; by default, if that is a terminal.
    select, activations, leaves: as for `trueup.sites`. The norms by which `Evidence` tells an unusual image are read
        whether or not they are selected.
    """
    check_max_changed("calibrate", max_changed)
    if method not in get_args(Algorithm):
        raise ValueError(f"calibrate(method={method!r}): expected one of {', '.join(get_args(Algorithm))}")
    if resolution is not None:
        wanted = f"calibrate(resolution={resolution!r}): expected a number of quantile levels, 2 or more, or None"
        if isinstance(resolution, bool) or not isinstance(resolution, int):
            raise TypeError(wanted)
        if resolution < 2:
            raise ValueError(wanted)
    answer = most_likely if answer is None else answer
    if not callable(answer):
        raise TypeError(
            f"calibrate(answer={answer!r}): expected a function that turns the model's output into a tensor "
            "(batch, ...), such as lambda output: output['logits'].argmax(1)"
        )
    check_select(select)
    with torch.inference_mode(False):  # buffers copied in inference mode could not be differentiated through
        traced = trace(model, activations=activations, leaves=leaves, own_buffers=True)
    fingerprint = Fingerprint.of(traced.model)  # before any pass: a model may count its calls in a buffer
    batches = inputs_of(loader, model, transform=transform, images=images)
    first = next(batches, None)
    if first is not None:
        traced = examine(traced, first)
    # A rank without images, or whose first batch showed other sites, takes the sites of the first rank with images.
    seen = [sites for sites in gathered(None if first is None else traced.sites) if sites is not None]
    traced = traced.known(seen[0]) if seen else traced
    selected = [site.name for site in traced.sites if select is None or select(site)]
    if not selected:
        left = f" (left alone, because their rows are not images: {listed(traced.sites.left)})"
        raise ValueError(
            f"{type(traced.model).__name__} has no site: no activation function or norm was found in its forward pass"
            f"{left if traced.sites.left else ''}, or `select` chose none; name your own with "
            "activations=(MyActivation, my_function)"
        )
    norms = [site.name for site in traced.sites if site.kind == "norm"]
    candidates = norms[: math.ceil(GATE_DEPTH * len(norms) - 1e-9)]
    probe = Probe(traced, lambda site: site.name in selected or site.name in candidates)
    sums = Accumulator(
        fingerprint,
        resolution=resolution,
        exact=method == "sort",
        selected=selected,
        gate_candidates=candidates,
    )

    def measure_site(site: Site, a: Tensor) -> Measured:
        if site.kind == "activation":
            return sums.measure_activation(a)
        return sums.measure_norm(a if site.channel_dim == 1 else a.movedim(site.channel_dim, 1))

    sample = ImageSample()
    # Hashing takes the host about as long as launching a small network, so a thread does it beside the forward pass. It
    # is done before the next batch is asked for: a loader may write that into the same memory.
    with ThreadPoolExecutor(1, thread_name_prefix="trueup-hashes") as hasher:
        for number, inputs in enumerate(batches if first is None else itertools.chain([first], batches)):
            hashes = hasher.submit(start_hashing(inputs, number)).result
            sums.add(probe(inputs, measure_site), hashes)
            if decide:
                sample.add(hashes(), inputs)
    if (targets := _merged(shard for shard in gathered(sums.targets()) if shard is not None)) is None:
        raise ValueError("calibrate: the loader is empty; give at least one batch of clean images")
    groups = (targets.activations, targets.norms, targets.gate)
    for name, total in ((name, target.total) for group in groups for name, target in group.items()):
        if not torch.isfinite(total).all():
            raise ValueError(f"calibrate: the activations at site {name!r} overflow to NaN or infinity")
    fingerprint = targets.fingerprint.without_values_that_change(traced.model)
    targets = replace(targets, sites=traced.sites, fingerprint=fingerprint)
    if not decide:
        if targets.images > 1 and not bool((targets.sampled != targets.sampled[0]).any()):
            warnings.warn(
                f"calibrate: all {targets.images} images are the same, so every other image will look unusual; give "
                "images as different as those that the model will see",
                stacklevel=2,
            )
        return targets
    targets = decide_setting(
        traced,
        targets,
        sample,
        answer=answer,
        max_changed=max_changed,
        select=select,
        report=_progress(progress),
    )
    if targets.decision is not None and targets.decision.chosen is None:
        warnings.warn(f"calibrate: {targets.decision}", stacklevel=2)
    return targets


def _progress(shown: bool | None) -> Callable[[int, int], None]:
    """Print the progress of the decision, on the first rank only."""
    first = not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
    if not first or not (sys.stderr.isatty() if shown is None else shown):
        return lambda _done, _total: None

    def show(done: int, total: int) -> None:
        print(f"\rdeciding: {done / total:4.0%}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show


def _merged(parts: Iterable[Targets]) -> Targets | None:
    parts = iter(parts)
    first = next(parts, None)
    return None if first is None else functools.reduce(operator.add, parts, first)
