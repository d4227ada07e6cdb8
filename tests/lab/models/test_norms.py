"""The norms against their formulas, written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from trueup_lab.models.norms import NORMS, TLU, FilterResponseNorm, has_threshold, norm_layer


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(3, 5, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_filter_response_norm_is_its_authors_formula(images):
    layer = FilterResponseNorm(5, eps=-1e-3).double()
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2, 5))
        layer.bias.copy_(torch.linspace(-1, 1, 5))
    x = images.numpy()
    nu2 = np.zeros((3, 5))
    for n in range(3):
        for c in range(5):
            nu2[n, c] = sum(v * v for v in x[n, c].ravel()) / 24
    want = x / np.sqrt(nu2 + 1e-3)[:, :, None, None]
    want = want * np.linspace(0.5, 2, 5)[:, None, None] + np.linspace(-1, 1, 5)[:, None, None]
    np.testing.assert_allclose(layer(images).detach().numpy(), want, rtol=1e-12)


def test_filter_response_norm_has_the_gradient_of_its_formula(images):
    layer = FilterResponseNorm(5).double()
    assert torch.autograd.gradcheck(layer, (images.requires_grad_(),))


def test_the_thresholded_unit_is_the_larger_of_value_and_threshold(images):
    unit = TLU(5).double()
    with torch.no_grad():
        unit.tau.copy_(torch.linspace(-1, 1, 5))
    want = np.maximum(images.numpy(), np.linspace(-1, 1, 5)[:, None, None])
    np.testing.assert_array_equal(unit(images).detach().numpy(), want)


def test_a_new_thresholded_unit_is_relu(images):
    assert torch.equal(TLU(5).double()(images), images.relu())


def test_the_thresholded_unit_declares_itself_a_site():
    assert TLU.trueup_site is True


def test_autocast_keeps_the_type_and_loses_no_precision_but_that_of_the_type(images):
    x = images.bfloat16()
    layer, unit = FilterResponseNorm(5), TLU(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = unit(layer(x))
    assert y.dtype == torch.bfloat16
    # The exact answer, rounded once; a square or a mean in bfloat16 would be off by more.
    assert torch.equal(y, unit(layer.double()(x.double())).bfloat16())


@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_keeps_the_shape(norm, images):
    layer = norm_layer(norm, 5, groups=5).double()
    assert layer(images).shape == images.shape


def test_group_norm_has_the_groups_it_was_given():
    layer = norm_layer("gn", 16, groups=8)
    assert isinstance(layer, nn.GroupNorm)
    assert layer.num_groups == 8


def test_an_unknown_norm_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'ln'; known: bn, gn, frn, frn-relu"):
        norm_layer("ln", 16, groups=8)
    with pytest.raises(ValueError, match="known"):
        has_threshold("ln")
