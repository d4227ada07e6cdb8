"""`sites`: the places of a model that can be corrected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from trueup.graph import Inputs, Site, Sites, check_select, examine, trace


def sites(
    model: nn.Module,
    example: Any = None,
    *,
    select: Callable[[Site], bool] | None = None,
    activations: tuple[type[nn.Module] | Callable[..., Tensor], ...] = (),
    leaves: tuple[type[nn.Module], ...] = (),
) -> Sites:
    """Sites of a model, in the order of its forward pass.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    >>> sites(model)
    site  kind        operation
    1     norm        batch_norm
    2     activation  relu
    4     activation  relu

    A site is a place where an activation function (`kind` "activation", where `Correction` acts) or a norm ("norm",
    where `Evidence` acts) is applied.

    example: a batch of images, or a tuple of positional or a dictionary of keyword arguments. The model is run on it.
        This finds all sites of a model that cannot be traced, and leaves out sites whose rows are not images.
    select: keep only the sites for which this predicate is true.
    activations: module classes and functions of your own that are activation functions, beside the known ones (the
        ReLU, ELU and GELU families). A function must be called by a global name. Their zeros count as "off". A class
        may instead declare itself with `trueup_site = True`, and a norm, with the channels in the second dimension,
        with `trueup_site = "norm"`.
    leaves: module classes that are called as they are. Sites inside a leaf are left alone.

    A model that torch.fx cannot trace runs as it is, and its calls are watched: the sites have the same names and mean
    the same. The table then says so, and why.
    """
    check_select(select)
    traced = trace(model, activations=activations, leaves=leaves, own_buffers=example is not None)
    found = traced.sites if example is None else examine(traced, Inputs.of_example(example)).sites
    why = found.why
    if example is None and not found.traced:
        why += "; calls of functions, and second calls of a module, are only found with an example="
    some = (site for site in found if select is None or select(site))
    return Sites(some, traced=found.traced, why=why, left=found.left)
