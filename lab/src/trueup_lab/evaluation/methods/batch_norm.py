"""Batch norm's statistics taken from test images: of a whole batch, or mixed with each single image's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trueup import Correction, Targets, correct
from trueup_lab.evaluation.methods.plain import given
from trueup_lab.evaluation.methods.protocol import Needs, Network
from trueup_lab.evaluation.methods.spelling import spell
from trueup.graph import clone


@dataclass(frozen=True)
class BatchStatistics:
    """Batch norm with the mean and variance of the batch at hand (Nado et al., 2020; Schneider et al., 2020, N = 0)."""

    kind = "bn-batch"
    needs = Needs(batch_norm=True, batch=True)

    @property
    def name(self) -> str:
        """`bn-batch`."""
        return self.kind

    def prepare(self, model: nn.Module, _targets: Targets | None) -> Network:
        """The model without its running statistics."""
        return with_norms(model, of_batch)


@dataclass(frozen=True)
class Mixed:
    """Batch norm with training's statistics mixed with those of one image (Schneider et al., 2020, n = 1).

    mean = N / (N + 1) of training's + 1 / (N + 1) of the image's own, and the variance likewise, with N = `prior`.
    Every image of a batch is normalised on its own.

    >>> Mixed(prior=16).name
    'bn-mix:prior=16'
    """

    prior: float = 8

    kind = "bn-mix"
    needs = Needs(batch_norm=True)

    def __post_init__(self) -> None:
        check_prior(self.prior)

    @property
    def name(self) -> str:
        """The prior weight, unless it is 8."""
        return spell(self)

    def prepare(self, model: nn.Module, _targets: Targets | None) -> Network:
        """The model with other norms."""
        return with_norms(model, lambda norm: MixedNorm(norm, self.prior))


@dataclass(frozen=True)
class CorrectMixed(Correction):
    """The paper's correction on top of `Mixed`; the targets are those of the model as trained.

    >>> CorrectMixed(location="match").name
    'correct+bn-mix:location=match'
    """

    prior: float = 8

    kind = "correct+bn-mix"
    needs = Needs(batch_norm=True, targets=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_prior(self.prior)

    @property
    def name(self) -> str:
        """The fields that are not the defaults."""
        return spell(self)

    def prepare(self, model: nn.Module, targets: Targets | None) -> Network:
        """Other norms, and a correction at every site."""
        return correct(with_norms(model, lambda norm: MixedNorm(norm, self.prior)), given(self.name, targets), self)


class MixedNorm(nn.Module):
    """Batch norm in evaluation, each image `(C, H, W)` with its own mixture of statistics.

    Has the parameters and buffers of the layer it stands for, under the same names. The image's variance is the
    biased one, as batch norm normalises with in training.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: nn.BatchNorm2d, prior: float) -> None:
        super().__init__()
        if norm.running_mean is None or norm.running_var is None:
            raise ValueError("this batch norm keeps no running statistics, so there is nothing to mix an image's with")
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.own = 1 / (prior + 1)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is `(batch, C, H, W)`."""
        # In the precision of the statistics, which autocast leaves in float32.
        wide = x.type_as(self.running_mean)
        own_var, own_mean = torch.var_mean(wide, dim=(2, 3), correction=0)
        mean = torch.lerp(self.running_mean.expand_as(own_mean), own_mean, self.own)
        var = torch.lerp(self.running_var.expand_as(own_var), own_var, self.own)
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        return (wide * scale[..., None, None] + shift[..., None, None]).type_as(x)


def with_norms(model: nn.Module, make: Callable[[nn.BatchNorm2d], nn.Module]) -> nn.Module:
    """The model, in evaluation mode, with `make(layer)` in place of every layer of batch norm.

    It shares the model's tensors; the model itself is not touched.
    """
    network = clone(model).eval()
    made: dict[int, nn.Module] = {}
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.BatchNorm2d):
            made.setdefault(id(module), make(module).eval())
            network.set_submodule(name, made[id(module)])
    if not made:
        raise ValueError(f"{type(model).__name__} has no batch norm; this method is for models that do")
    return network


def of_batch(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """The layer without running statistics, so that it takes the batch's, in evaluation too. Parameters are shared."""
    layer = nn.BatchNorm2d(norm.num_features, eps=norm.eps, affine=norm.affine, track_running_stats=False)
    layer.weight, layer.bias = norm.weight, norm.bias
    return layer


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the methods here can be applied to a model."""
    return any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def check_prior(prior: float) -> None:
    """Refuse a prior weight that is no weight."""
    if not prior >= 0:  # also refuses NaN
        raise ValueError(f"prior={prior!r}: the weight of training's statistics, in images, is 0 or more")
