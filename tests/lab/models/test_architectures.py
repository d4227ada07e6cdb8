"""The networks beside the ResNets: shapes, sizes, tracing, and the table that builds them by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trueup
from trueup_lab.models import ARCHITECTURES, VGG, ConvNeXt, EfficientNetLite, ESPNet, MobileNetV2, Record, UNet, ViT
from trueup_lab.models.architectures import check_variant
from trueup_lab.models.efficientnet_lite import SameConv2d

SMALL = {
    "vgg": (VGG, 7),
    "mobilenet": (lambda: MobileNetV2(10, small=True), 52),
    "convnext": (ConvNeXt, 12),
    "vit": (ViT, 17),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_networks_give_ten_logits_and_every_parameter_takes_part(name):
    model = SMALL[name][0]()
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 10)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    assert 1.5e6 < sum(p.numel() for p in model.parameters()) < 3e6


@pytest.mark.parametrize("name", SMALL)
def test_small_networks_can_be_traced_and_all_their_norms_found(name):
    build, norms = SMALL[name]
    model, x = build().eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))
    assert len(trueup.sites(model, x, select=lambda site: site.kind == "norm")) == norms
    layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d | nn.LayerNorm)]
    assert len(layers) == norms


@pytest.mark.parametrize(
    ("build", "shape", "out"),
    [
        (lambda: MobileNetV2(7, channels=1), (64, 96), (7,)),
        (lambda: EfficientNetLite(7), (64, 64), (7,)),  # even at every stride
        (lambda: EfficientNetLite(7), (65, 47), (7,)),  # odd at some
        (lambda: ESPNet(5, (1, 2)), (64, 64), (5, 64, 64)),
        (lambda: ESPNet(5, (1, 2)), (61, 43), (5, 61, 43)),  # halves round up: the decoder has to crop
        (lambda: VGG(4, channels=1), (8, 24), (4,)),
        (lambda: ConvNeXt(4, channels=1), (40, 24), (4,)),
    ],
)
def test_networks_take_any_size_also_traced(build, shape, out):
    model = build().eval()
    traced = torch.fx.symbolic_trace(model)
    channels = next(m for m in model.modules() if isinstance(m, nn.Conv2d)).in_channels
    x = torch.randn(1, channels, *shape)
    with torch.no_grad():
        assert model(x).shape == (1, *out)
        assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("side", [9, 10])
def test_same_padding_puts_an_odd_zero_last(kernel, side):
    convolution = SameConv2d(1, 1, kernel, stride=2)
    x = torch.randn(1, 1, side, side)
    out = -(-side // 2)
    total = (out - 1) * 2 + kernel - side  # TensorFlow's rule
    before, after = total // 2, total - total // 2
    want = F.conv2d(F.pad(x, (before, after, before, after)), convolution.weight, stride=2)
    assert want.shape[2] == out
    assert torch.equal(convolution(x), want)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_record_builds_its_architecture_and_is_called_after_it(name):
    norm = ARCHITECTURES[name].norms[0]
    record = Record("cifar10", norm, channels=3, architecture=name)
    assert record.name == f"{name}-{norm}-cifar10"
    model = record.build().eval()
    pixels = (32, 32) if name == "unet" else ()
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10, *pixels)


@pytest.mark.parametrize("size", [(32, 32), (33, 47), (128, 224)], ids=str)
def test_the_u_net_takes_any_size_and_is_small(size):
    model = UNet(8).eval()
    assert model(torch.zeros(1, 3, *size)).shape == (1, 8, *size)
    assert sum(p.numel() for p in model.parameters()) < 100_000


def test_other_architectures_and_norms_that_one_does_not_have_are_refused():
    with pytest.raises(ValueError, match="unknown architecture 'alexnet'; known: resnet20, vgg"):
        Record("cifar10", "bn", channels=3, architecture="alexnet").build()
    with pytest.raises(ValueError, match=r"unknown norm 'bn'; known: ln \(of architecture vit\)"):
        check_variant("vit", "bn")
