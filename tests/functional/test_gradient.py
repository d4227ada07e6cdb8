"""The derivative of `evidence.realign`, against autograd and finite differences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from trueup import kernels
from trueup.functional import evidence
from trueup.functional.gradient import realign_gradients


def case(shape, *, bands, seed=0):
    """Activations, a reference of clean ones, and a gradient, in float64."""
    draw = torch.Generator().manual_seed(seed)
    clean = torch.randn(20, *shape[1:], generator=draw, dtype=torch.float64)
    moments = evidence.moments(clean, bands=bands)
    rows = [0, 2, 3] if bands else [0, 1]
    floor = torch.full((len(rows), shape[1]), 0.1, dtype=torch.float64)
    statistics = evidence.statistics(moments[:, rows], floor)
    reference = evidence.reference_of(statistics, floor, strength=0.05, base=0.03)
    a = 1.5 * torch.randn(shape, generator=draw, dtype=torch.float64) + 0.7
    return a, reference, torch.randn(shape, generator=draw, dtype=torch.float64)


def by_autograd(a, reference, gate, gradient):
    a, reference = a.clone().requires_grad_(), reference.clone().requires_grad_()
    return torch.autograd.grad(evidence.realign(a, reference, gate), [a, reference], gradient)


@given(
    batch=st.integers(1, 3),
    channels=st.integers(1, 4),
    maps=st.sampled_from([(), (1,), (7,), (2, 3), (8, 9)]),
    gated=st.booleans(),
    bands=st.booleans(),
    seed=st.integers(0, 99),
)
def test_both_gradients_are_those_of_autograd(batch, channels, maps, gated, bands, seed):
    shape = (batch, channels, *maps)
    a, reference, gradient = case(shape, bands=bands and len(maps) == 2, seed=seed)
    gate = torch.linspace(0, 1, batch, dtype=torch.float64) if gated else None
    for found, wanted in zip(
        realign_gradients(a, reference, gate, gradient), by_autograd(a, reference, gate, gradient), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_the_gradient_of_a_evidence_weight_is_a_finite_difference():
    """The evidence κ (row 2) is what is learned; autograd could be wrong in the same way."""
    a, reference, gradient = case((2, 3, 8, 8), bands=True)
    found = realign_gradients(a, reference, None, gradient)[1]
    for row, channel in ((0, 1), (1, 0), (2, 2)):
        step = 1e-5 * float(reference[2, row, channel])
        near = []
        for sign in (1, -1):
            moved = reference.clone()
            moved[2, row, channel] += sign * step
            near.append(float((evidence.realign(a, moved) * gradient).sum()))
        assert float(found[2, row, channel]) == pytest.approx((near[0] - near[1]) / (2 * step), rel=1e-5)


def test_a_channel_that_is_not_finite_passes_its_gradient_and_spoils_no_other():
    a, reference, gradient = case((3, 2, 8, 8), bands=True)
    alone = realign_gradients(a[1:], reference, None, gradient[1:])
    a[0, 0, 3, 3] = torch.nan
    a[0, 1, 0, 0] = torch.inf
    to_a, to_reference = realign_gradients(a, reference, None, gradient)
    assert torch.equal(to_a[0], gradient[0])
    torch.testing.assert_close(to_a[1:], alone[0])
    torch.testing.assert_close(to_reference, alone[1])


def test_an_empty_batch_has_an_empty_gradient():
    a, reference, _ = case((2, 3, 8, 8), bands=True)
    to_a, to_reference = realign_gradients(a[:0], reference, None, a[:0])
    assert to_a.shape == (0, 3, 8, 8)
    assert not to_reference.any()


@pytest.mark.parametrize("relu", [False, True])
def test_second_derivatives_are_those_of_the_specification(relu):
    """As a gradient penalty needs them."""
    a, reference, _ = case((2, 3, 8, 8), bands=True)

    def penalty(function, dtype):
        x, usual = (part.to(dtype).requires_grad_() for part in (a, reference))
        out = function(x, usual)
        (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, usual])

    found = penalty(lambda x, usual: kernels.realign(x, usual, relu=relu), torch.float32)
    wanted = penalty(
        lambda x, usual: F.relu(evidence.realign(x, usual)) if relu else evidence.realign(x, usual), torch.float64
    )
    for part, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(part.double(), exact, rtol=1e-3, atol=1e-4 * float(exact.abs().max()))
