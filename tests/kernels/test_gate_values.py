"""Gate values, in one operator on a GPU, against the definition in `trueup.functional.gate`."""

from __future__ import annotations

import pytest
import torch

from kernels.backends import devices
from trueup.functional import evidence
from trueup.functional.gate import features, fit
from trueup.functional.gate import gate_values as definition
from trueup.kernels import gate_values
from trueup.kernels.cuda import gate as kernel
from trueup.kernels.cuda import moments as measured

RAMP = 20.0
NORMS = {"bands": [(5, 3), (5, 140)], "without": [(2, 7)], "both": [(2, 5), (5, 16)]}  # moments and channels


def maps(images, norms, seed, scale=1.0):
    """Moments of random maps, at each norm."""
    found = []
    for number, (k, count) in enumerate(norms):
        x = torch.randn(images, count, 8, 8, generator=torch.Generator().manual_seed(seed + number))
        wide = torch.linspace(0.5, 2, images).view(-1, 1, 1, 1)
        found.append(evidence.moments(scale * wide * x, bands=k == 5))
    return found


def gate_of(norms, images=60):
    clean = maps(images, norms, 0)
    floors = [1e-3 * m.double().mean(dim=0).abs() for m in clean]
    return fit(torch.cat([features(m, f) for m, f in zip(clean, floors, strict=True)], dim=1)), floors


def on(device, moments, floors, gate):
    return [m.to(device) for m in moments], [f.to(device) for f in floors], type(gate)(*(t.to(device) for t in gate))


def opened(device, moments, floors, gate, budget, least, ramp=RAMP):
    """By the kernels."""
    moments, floors, gate = on(device, moments, floors, gate)
    return kernel.gate_values(moments, floors, gate, budget, ramp, least).cpu()


def wanted(moments, floors, gate, budget, least, ramp=RAMP):
    seen = torch.cat([features(m, f) for m, f in zip(moments, floors, strict=True)], dim=1)
    return least + (1 - least) * definition(gate.p_values(seen), budget, ramp).float()


@devices
@pytest.mark.parametrize(
    ("norms", "budget", "least"),
    [("bands", 0.05, 0.0), ("both", 0.01, 0.1), ("without", 0.5, 0.0), ("without", 0.0, 0.3)],
)
def test_the_kernels_are_the_definition(device, norms, budget, least):
    norms = NORMS[norms]
    gate, floors = gate_of(norms)
    for moments in (maps(4, norms, 100), maps(3, norms, 200, scale=3.0), [m[:1] for m in maps(4, norms, 300)]):
        found = opened(device, moments, floors, gate, budget, least)
        torch.testing.assert_close(found, wanted(moments, floors, gate, budget, least), atol=1e-5, rtol=1e-5)
    other = opened(device, moments, floors, gate, budget, least, ramp=7.0)
    torch.testing.assert_close(other, wanted(moments, floors, gate, budget, least, ramp=7.0), atol=1e-5, rtol=1e-5)
    if budget == 0.05:
        some = opened(device, maps(4, norms, 100), floors, gate, budget, least)
        assert ((some > 0) & (some < 1)).any()


@devices
def test_features_that_are_equal_in_many_images_and_those_that_never_vary(device):
    norms = NORMS["both"]
    clean = maps(60, norms, 0)
    clean[0][:40, 1] = 0.25  # ties among the knots
    clean[1][:, 2:, 3] = 0.5
    floors = [1e-3 * m.double().mean(dim=0).abs() for m in clean]
    gate = fit(torch.cat([features(m, f) for m, f in zip(clean, floors, strict=True)], dim=1))
    moments = maps(6, norms, 100)
    moments[0][:3, 1] = 0.25
    moments[1][2:5, 2:, 3] = 0.5
    for some in (moments, [m[36:44] for m in clean]):
        found = opened(device, some, floors, gate, 0.2, 0.0)
        torch.testing.assert_close(found, wanted(some, floors, gate, 0.2, 0.0), atol=1e-5, rtol=1e-5)


@devices
def test_features_that_are_equal_in_many_images_at_the_upper_end(device):
    norms = NORMS["both"]
    clean, moments = maps(60, norms, 0), maps(6, norms, 100)
    clean[0][:, 1].clamp_(max=1.0)
    moments[0][:3, 1].clamp_(max=1.0)
    floors = [1e-3 * m.double().mean(dim=0).abs() for m in clean]
    gate = fit(torch.cat([features(m, f) for m, f in zip(clean, floors, strict=True)], dim=1))
    found = opened(device, moments, floors, gate, 0.2, 0.0)
    torch.testing.assert_close(found, wanted(moments, floors, gate, 0.2, 0.0), atol=1e-5, rtol=1e-5)


@devices
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_rounding_of_moments_does_not_open_the_gate_where_channels_are_dead_in_many_images(device, layout):
    """The specification finds no variance in a constant map; local means that are rounded leave some."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(212, 6, 9, 11, generator=random)
    dead = torch.rand(212, 6, generator=random) < 0.6
    x = torch.where(dead[:, :, None, None], torch.linspace(-0.3, 0.7, 6)[:, None, None], x)
    clean, new = x[:200].contiguous(), x[200:].contiguous(memory_format=layout)
    floor = 1e-3 * evidence.moments(clean, bands=True).double().mean(dim=0).abs()
    gate = fit(features(evidence.moments(clean, bands=True), floor))
    rounded, exact = measured(new.to(device), True).cpu(), evidence.moments(new, bands=True)
    assert (rounded[:, 4] != exact[:, 4])[dead[200:]].any()
    found = opened(device, [rounded], [floor], gate, 0.05, 0.0)
    torch.testing.assert_close(found, wanted([exact], [floor], gate, 0.05, 0.0), atol=1e-3, rtol=0)


@devices
@pytest.mark.parametrize(("images", "budget"), [(9, 0.01), (19, 0.005)])
def test_the_gate_of_an_image_at_the_edge_is_exactly_zero(device, images, budget):
    """An image far away has the p-value 1 / (n + 1), of n that are held out: here 20 budgets, in float64."""
    norms = NORMS["both"]
    gate, floors = gate_of(norms, images)
    assert 20 * budget == 1 / (len(gate.held) + 1)
    far = maps(4, norms, 100, scale=100.0)
    assert (opened(device, far, floors, gate, budget, 0.0) == 0).all()
    assert (opened(device, far, floors, gate, 1.01 * budget, 0.0) > 0).all()


@devices
def test_a_grid_takes_100_000_images(device):
    """A grid is 2^31 - 1 long, and 65,535 wide and high."""
    device, kinds = torch.device(device), (torch.float32, torch.float64)
    scores = kernel._launch_scores(100_000, 5, 300, 1200, 0, kinds, device)
    assert scores.grid == (100_000, 3, 1)
    assert kernel._launch_values(100_000, 1200, 2048, 0.2, RAMP, 0.0, device).grid == (100_000, 1, 1)


@devices
def test_the_gate_of_an_image_that_is_not_finite_is_one(device):
    norms = NORMS["bands"]
    gate, floors = gate_of(norms)
    moments = maps(4, norms, 100)
    for image, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        moments[1][image, 0, 5] = value
    found = opened(device, moments, floors, gate, 0.01, 0.1)
    assert found[:3].tolist() == [1, 1, 1]
    assert found[3] < 1


@devices
@pytest.mark.parametrize("images", [1, 2, 3])
def test_few_held_out_images_or_none(device, images):
    norms = NORMS["both"]
    gate, floors = gate_of(norms, images)
    assert len(gate.held) == images // 2
    moments = maps(5, norms, 100)
    found = opened(device, moments, floors, gate, 0.1, 0.0)
    torch.testing.assert_close(found, wanted(moments, floors, gate, 0.1, 0.0), atol=1e-5, rtol=1e-5)


@devices
def test_an_empty_batch(device):
    gate, floors = gate_of(NORMS["both"])
    assert opened(device, [m[:0] for m in maps(1, NORMS["both"], 1)], floors, gate, 0.1, 0.0).shape == (0,)


def test_on_the_cpu_it_is_the_definition_and_has_no_gradient():
    gate, floors = gate_of(NORMS["both"])
    moments = [m.requires_grad_() for m in maps(6, NORMS["both"], 100)]
    found = gate_values(moments, floors, gate, 0.05, RAMP, 0.1)
    assert not found.requires_grad
    assert found.equal(wanted([m.detach() for m in moments], floors, gate, 0.05, 0.1))
    operator = torch.ops.trueup.gate_values.default
    arguments = ([m.detach() for m in moments], floors, *gate, 0.05, RAMP, 0.1)
    assert operator(*arguments).equal(found)
    torch.library.opcheck(operator, arguments)


@pytest.mark.gpu
def test_on_cuda_an_image_has_the_same_gate_value_alone_and_in_a_batch():
    gate, floors = gate_of(NORMS["bands"], 400)
    moments, *rest = on("cuda", maps(64, NORMS["bands"], 100), floors, gate)
    together = gate_values(moments, *rest, 0.05, RAMP, 0.0)
    alone = torch.cat([gate_values([m[i : i + 1] for m in moments], *rest, 0.05, RAMP, 0.0) for i in range(64)])
    torch.testing.assert_close(alone, together, rtol=0, atol=2**-22)  # a product of float64 may round otherwise


@pytest.mark.gpu
def test_on_cuda_it_is_one_operator_and_compiles():
    gate, floors = gate_of(NORMS["both"])
    moments = maps(6, NORMS["both"], 100)
    moved = on("cuda", moments, floors, gate)
    found = gate_values(*moved, 0.05, RAMP, 0.1)
    torch.testing.assert_close(found.cpu(), wanted(moments, floors, gate, 0.05, 0.1), atol=1e-5, rtol=1e-5)
    torch.library.opcheck(torch.ops.trueup.gate_values.default, (*moved[:2], *moved[2], 0.05, RAMP, 0.1))
    compiled = torch.compile(lambda m: gate_values(m, *moved[1:], 0.05, RAMP, 0.1), fullgraph=True)
    torch.testing.assert_close(compiled(moved[0]), found)
