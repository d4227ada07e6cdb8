"""Replace batch norm layers in a copy of the model; base class of norms that treat each image on its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trueup.graph import clone


def with_norms(model: nn.Module, make: Callable[[nn.BatchNorm2d], nn.Module]) -> nn.Module:
    """Return a clone in evaluation mode with `make(layer)` in place of every batch norm layer.

    The clone shares the model's tensors; the model itself is not changed.
    """
    network = clone(model).eval()
    made: dict[int, nn.Module] = {}
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.BatchNorm2d):
            made.setdefault(id(module), make(module).eval())
            network.set_submodule(name, made[id(module)])
    if not made:
        raise ValueError(
            f"{type(model).__name__} has no batch norm, which this method replaces; choose a method whose needs do "
            "not include batch norm"
        )
    return network


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether the model has a batch norm layer."""
    return any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


class ImageNorm(nn.Module):
    """Batch norm in evaluation mode that normalises each image with statistics of its own.

    Subclasses define `statistics`. The parameters and buffers are those of the replaced layer, under the same names.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        if norm.running_mean is None or norm.running_var is None:
            raise ValueError(
                f"BatchNorm2d({norm.num_features}) has no running statistics to combine with an image's; this method "
                "is for models trained with track_running_stats=True"
            )
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance, each `(batch, C)`, for `x` `(batch, C, H, W)`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` `(batch, C, H, W)`."""
        # In the precision of the statistics, which autocast leaves in float32.
        wide = x.type_as(self.running_mean)
        mean, var = self.statistics(wide)
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        return (wide * scale[..., None, None] + shift[..., None, None]).type_as(x)


class MixedNorm(ImageNorm):
    """Training statistics mixed with the image's: `ratio` is the image's share.

    The image's variance is the biased one, with which batch norm normalises in training.
    """

    def __init__(self, norm: nn.BatchNorm2d, ratio: float) -> None:
        super().__init__(norm)
        self.ratio = ratio

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Interpolate between the running statistics and the image's."""
        own_var, own_mean = torch.var_mean(x, dim=(2, 3), correction=0)
        mean = torch.lerp(self.running_mean.expand_as(own_mean), own_mean, self.ratio)
        return mean, torch.lerp(self.running_var.expand_as(own_var), own_var, self.ratio)
