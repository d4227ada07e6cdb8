"""Observe or correct the outputs of norm layers, which activation functions receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from trueup.graph import clone


def norm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the norm layers by name: batch norm, group norm, and modules with `trueup_site = "norm"`."""
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm) or getattr(module, "trueup_site", None) == "norm"
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no batch norm, group norm or module with trueup_site = 'norm', whose outputs "
            "this method corrects; choose another method"
        )
    return found


def after_norms(model: nn.Module, make: Callable[[str], nn.Module]) -> nn.Module:
    """Return a clone in evaluation mode with `make(name)` applied to the output of every norm layer."""
    network = clone(model).eval()
    names = {module: name for name, module in norm_layers(network).items()}
    placed = {module: nn.Sequential(module, make(name)).eval() for module, name in names.items()}
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if module in placed:
            network.set_submodule(name, placed[module])
    return network


def norm_outputs(model: nn.Module, x: Tensor, see: Callable[[str, Tensor], None]) -> None:
    """Run the model on `x` and call `see(name, output)` for every norm layer."""
    network = clone(model).eval()
    for name, module in norm_layers(network).items():
        module.register_forward_hook(lambda _module, _input, output, name=name: see(name, output))
    network(x)


def mean_over_images(
    model: nn.Module, batches: Iterable[Tensor], total: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return the mean over images of a statistic of each norm layer's output, by the layer's name, in float32.

    `total(output)` returns the sum of the statistic over the images of a batch.
    """
    sums: dict[str, Tensor] = {}
    images = 0

    def add(name: str, output: Tensor) -> None:
        sums[name] = sums[name] + total(output) if name in sums else total(output)

    for batch in batches:
        norm_outputs(model, batch, add)
        images += len(batch)
    return {name: (summed / images).float() for name, summed in sums.items()}


def rebatched(batches: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Cut batches into batches of `size` images; the last may be smaller.

    >>> [len(batch) for batch in rebatched([torch.zeros(5, 1), torch.zeros(4, 1)], 4)]
    [4, 4, 1]
    """
    kept: list[Tensor] = []
    for batch in batches:
        *full, rest = torch.split(torch.cat([*kept, batch]), size)
        yield from full
        kept = [rest]
    yield from kept
