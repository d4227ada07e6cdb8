"""The networks: sizes from the literature, both kinds of shortcut and stride, traceable with every norm."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from trueup_lab.models import NORMS, TLU, ResNet20, ResNet50
from trueup_lab.models.resnet20 import PadShortcut


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_resnet20_with_padded_shortcuts_has_the_papers_0_27_million_parameters():
    # He et al., 2016, table 6. By hand: 432 + 6 * 2304 + 4608 + 5 * 9216 + 18432 + 5 * 36864 in convolutions,
    # two a channel in 7 * 16 + 6 * 32 + 6 * 64 normalised channels, 650 in the classifier.
    assert parameters(ResNet20(shortcut="pad")) == 269_722


def test_projections_add_two_convolutions_and_their_norms():
    assert parameters(ResNet20()) == 269_722 + (16 * 32 + 64) + (32 * 64 + 128)


def test_grey_images_need_fewer_weights_in_the_first_convolution():
    assert parameters(ResNet20()) - parameters(ResNet20(channels=1)) == 2 * 16 * 9


def test_resnet50_has_25_557_032_parameters():
    # The number that torchvision documents for resnet50.
    assert parameters(ResNet50()) == 25_557_032
    assert parameters(ResNet50(stride_on="1x1")) == 25_557_032


def test_the_thresholded_units_add_a_parameter_a_channel():
    assert parameters(ResNet20("frn")) - parameters(ResNet20("frn-relu")) == 7 * 16 + 6 * 32 + 6 * 64


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shortcut", ["projection", "pad"])
def test_resnet20_traces_and_the_trace_computes_the_same(norm, shortcut):
    model = ResNet20(norm, shortcut=shortcut).eval()
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(fx.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize("norm", ["bn", "frn"])
def test_resnet50_traces_and_the_trace_computes_the_same(norm):
    model = ResNet50(norm, classes=7).eval()
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(fx.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize("norm", ["gn", "frn", "frn-relu"])
def test_without_batch_norm_an_image_does_not_see_its_neighbours_even_in_training(norm):
    model = ResNet20(norm).double()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


@pytest.mark.parametrize(("norm", "relus", "units"), [("bn", 19, 0), ("frn-relu", 19, 0), ("frn", 0, 19)])
def test_resnet20_has_nineteen_activations(norm, relus, units):
    nodes = fx.symbolic_trace(ResNet20(norm)).graph.nodes
    assert sum(n.op == "call_function" and n.target is torch.nn.functional.relu for n in nodes) == relus
    assert sum(isinstance(m, TLU) for m in ResNet20(norm).modules()) == units


def test_a_bottleneck_calls_one_relu_three_times():
    nodes = fx.symbolic_trace(ResNet50()).graph.nodes
    assert [n.target for n in nodes if n.op == "call_module"].count("layer1.0.act1") == 3
    assert sum(isinstance(m, nn.ReLU) for m in ResNet50().modules()) == 17


def test_the_stride_sits_where_it_is_asked_for():
    torchvisions, originals = ResNet50(), ResNet50(stride_on="1x1")
    assert (torchvisions.layer2[0].conv1.stride, torchvisions.layer2[0].conv2.stride) == ((1, 1), (2, 2))
    assert (originals.layer2[0].conv1.stride, originals.layer2[0].conv2.stride) == ((2, 2), (1, 1))


def test_a_padded_shortcut_takes_every_second_pixel_and_adds_zero_channels():
    x = torch.arange(32.0).reshape(1, 2, 4, 4)
    y = PadShortcut(2, 2)(x)
    assert y.shape == (1, 4, 2, 2)
    assert y[0, 1].tolist() == [[0.0, 2.0], [8.0, 10.0]]
    assert not y[0, 0].any()
    assert not y[0, 3].any()


@pytest.mark.parametrize("build", [lambda: ResNet20(shortcut="A"), lambda: ResNet50(stride_on="2x2")])
def test_unknown_kinds_are_refused(build):
    with pytest.raises(ValueError, match=r"unknown .* known"):
        build()
