"""The rule of evidence in Triton, against its specification in double precision, within what rounding can do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.backends import INTERPRETED
from trueup.functional import evidence
from trueup.kernels import Norm

DEVICES = [
    *(["cpu"] if INTERPRETED else []),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
devices = pytest.mark.parametrize("device", DEVICES)
layouts = pytest.mark.parametrize("last", [False, True], ids=["channels second", "channels last"])
UNIT = 2.0**-24  # how far float32 rounds, relative
STEPS = 64  # additions that a value goes through: rows of a segment, across, segments, the means

SHAPES = [
    ((2, 3, 9, 13), True),  # no power of two
    ((1, 5, 8, 8), True),  # a power of two
    ((2, 3, 4, 4), True),  # most of it border
    ((1, 2, 19, 7), True),  # an odd number of rows
    ((1, 2, 61, 7), True),  # one strip, several segments, the last odd
    ((1, 40, 5, 6), True),  # more channels than a program takes
    ((1, 1, 1, 1), True),  # smallest
    ((2, 2, 1, 5), True),  # one row
    ((2, 2, 6, 1), True),  # one column
    ((3, 4, 7), False),  # a sequence
    ((2, 3, 3, 4, 5), False),  # a volume
    ((1, 3, 10, 70), True),  # several strips
    ((1, 2, 2, 70), True),  # and too few rows to be shared out
    ((1, 2, 35, 40), True),  # channels last: several strips, several segments
    ((1, 2, 70, 70), False),  # several rows of our making; channels last: several segments
]
shapes = pytest.mark.parametrize(("shape", "bands"), SHAPES, ids=str)


def maps(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def laid_out(x: Tensor, last: bool) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x.contiguous()


def reference(clean: Tensor, *, bands: bool) -> Tensor:
    moments = evidence.moments(clean, bands=bands)[:, [0, 2, 3] if bands else [0, 1]].double()
    floor = (1e-3 * moments.mean(dim=0).abs()).clamp(min=1e-24)
    return evidence.reference_of(evidence.statistics(moments, floor), floor, strength=0.05, base=0.1)


def parts_of(x: Tensor, bands: bool) -> tuple[Tensor, list[Tensor]]:
    """The mean of each map `(batch, channels, 1, 1)` and its parts, in double precision: low and high band, or one."""
    a = x.double().cpu().reshape(*x.shape[:2], *(x.shape[2:] if bands else (1, -1)))
    mean = a.mean(dim=(2, 3), keepdim=True)
    low = evidence.local_mean(a - mean)
    return mean, [low, a - mean - low] if bands else [a - mean]


def wanted(x: Tensor, usual: Tensor, openness: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rule in double precision, and how far from it float32 may be.

    A sum that adds to the k-th depth is within k roundings of the sum of what it adds. So the mean is off by at most
    k u A, for values up to A. A local mean is off by 16 u A at most, a variance, whose sum of squares is one of values
    less the pivot, by 4 k u (variance + (mean - pivot)²) and 16 u A times the root of it; ½ log(variance + floor) by
    half of that over (variance + floor). A share w(z) of the way (centre - s), and a mix of the rest, have a slope of
    3/2 at most in s, since that of w times (centre - s) is 2 z² κ / (z² + κ)² <= 1/2. Last, the result rounds what it
    is made of.
    """
    bands = usual.shape[1] == 3
    mean, parts = parts_of(x, bands)
    tilts = [part.mean(dim=(2, 3), keepdim=True) for part in parts]
    variances = [(part - tilt).square().mean(dim=(2, 3)) for part, tilt in zip(parts, tilts, strict=True)]
    found = torch.stack([mean[..., 0, 0], *variances], dim=1)
    statistics = evidence.statistics(found, usual[3])
    z2 = evidence.evidence(statistics, usual)
    open_by = 1 if openness is None else openness.double()[:, None, None]
    z2, base, away = z2 * open_by, usual[4] * open_by, statistics - usual[0]
    mixed = 0.5 * torch.log1p(base * torch.expm1(2 * away))
    mixed[:, 0] = (base * away)[:, 0]
    moves = -(mixed + z2 / (z2 + usual[2]) * (away - mixed))
    out, gains = mean + moves[:, 0, :, None, None], moves[:, 1:].exp()
    for k, (part, tilt) in enumerate(zip(parts, tilts, strict=True)):
        out = out + gains[:, k, :, None, None] * (part - tilt)

    a = sum(parts) + mean
    largest = a.abs().amax(dim=(2, 3))
    pivot = a[:, :, 0, :16].mean(dim=2)
    power = sum(parts).square().mean(dim=(2, 3)) + (mean[..., 0, 0] - pivot).square()
    off = 4 * STEPS * UNIT * power + 16 * UNIT * largest * power.sqrt()
    reach = 2.5 * STEPS * UNIT * largest
    for k, variance in enumerate(variances):
        stray = 1.5 * 0.5 * off / (variance + usual[3, k + 1]) + STEPS * UNIT
        reach = reach + gains[:, k] * (2 * largest * stray.clamp(max=1) + 16 * UNIT * largest)
    shape = x.shape
    return out.reshape(shape), reach[..., None, None].expand_as(out).reshape(shape)


@devices
@layouts
@pytest.mark.parametrize(
    ("shape", "bands", "dtype"),
    [
        *((*case, torch.float32) for case in SHAPES),
        *((*case, dtype) for case in (SHAPES[0], SHAPES[8]) for dtype in (torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_triton_is_the_specification_but_for_rounding(device, last, shape, bands, dtype):
    from trueup.kernels import triton_maps

    usual = reference(maps(30, *shape[1:]), bands=bands)
    x = laid_out((2 * maps(*shape, seed=1) + 0.5).to(device, dtype), last)
    for openness in (None, torch.linspace(0.1, 1, shape[0]))[int(dtype != torch.float32) :]:
        out, reach = wanted(x, usual, openness)
        assert (reach < 1e-2).all() or min(shape[2:]) == 1
        gate = None if openness is None else openness.to(device)
        slack = torch.finfo(dtype).eps * out.abs() if dtype != torch.float32 else 0.0
        for split in (False, True):
            found = torch.full_like(x, torch.nan)
            triton_maps.realign_maps(x, usual.to(device), gate, found, split=split)
            assert found.stride() == x.stride()
            assert ((found.double().cpu() - out).abs() <= reach + slack).all()


@devices
@layouts
@shapes
def test_triton_measures_what_the_specification_does(device, last, shape, bands):
    from trueup.kernels import triton_maps

    x = laid_out((2 * maps(*shape, seed=1) + 0.5).to(device), last)
    mean, parts = parts_of(x, bands)
    rows = [mean[..., 0, 0], sum(parts).square().mean(dim=(2, 3))]
    if bands:
        rows += [part.var(dim=(2, 3), correction=0) for part in parts] + [parts[1].abs().mean(dim=(2, 3))]
    expected = torch.stack(rows, dim=1)
    torch.testing.assert_close(expected[:, :4].float(), evidence.moments(x.cpu(), bands=bands)[:, :4])
    largest = x.double().abs().amax(dim=tuple(range(2, x.dim()))).cpu()[:, None]
    reach = torch.cat([STEPS * UNIT * largest, 8 * STEPS * UNIT * largest.square().expand_as(expected[:, 1:])], dim=1)
    for split in (False, True):
        found = triton_maps.measure_maps(x, bands, split=split)
        assert ((found.double().cpu() - expected).abs() <= reach + 8 * STEPS * UNIT * expected.abs()).all()


def around(x: Tensor) -> dict:
    """All that may be done in the same pass: how open images are, something to add, a ReLU and a norm."""
    open_by = torch.linspace(1, 0.2, len(x), device=x.device)
    mean, variance, weight, bias = (0.5 + maps(4, x.shape[1], seed=7).abs()).to(x.device)
    return {
        "openness": open_by,
        "residual": torch.empty_like(x).copy_(x.flip(0)),
        "relu": True,
        "norm": Norm(mean, variance, weight, bias, 1e-3),
    }


@devices
@layouts
@pytest.mark.parametrize("bands", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (3, 3, 61, 19),  # several segments
        pytest.param((64, 48, 28, 28), marks=pytest.mark.gpu),  # fewer channels a program for one image than for all
        pytest.param((64, 64, 14, 14), marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_triton_does_not_depend_on_the_batch_to_the_last_bit(device, last, bands, shape):
    from trueup.kernels import triton_maps

    x = laid_out(3 * maps(*shape).to(device), last)
    usual = reference(maps(30, *shape[1:]), bands=bands).to(device)
    given = around(x)
    together = triton_maps.realign(x, usual, **given)
    for k in (0, 1, len(x) - 1):
        own = {**given, "openness": given["openness"][k : k + 1], "residual": given["residual"][k : k + 1]}
        assert triton_maps.realign(laid_out(x[k : k + 1], last), usual, **own).equal(together[k : k + 1])
    assert triton_maps.moments(x[:1].clone(), bands).equal(triton_maps.moments(x, bands)[:1])


@devices
def test_triton_does_not_depend_on_gaps_between_images_to_the_last_bit(device):
    from trueup.kernels import triton_maps

    x = laid_out(3 * maps(4, 3, 20, 19).to(device), last=True)[::2]
    usual = reference(maps(30, 3, 20, 19), bands=True).to(device)
    assert triton_maps.realign(x, usual)[:1].equal(triton_maps.realign(x[:1], usual))


@devices
@layouts
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("shape", "bands"),
    [
        ((2, 3, 61, 19), True),  # the last segment odd
        ((1, 2, 100, 34), True),  # and even
        ((1, 1, 130, 125), False),  # rows of our making
        ((1, 70, 14, 14), True),  # one segment, and more channels than a program takes
        pytest.param((2, 70, 28, 28), True, marks=pytest.mark.gpu),
        pytest.param((2, 48, 28, 28), True, marks=pytest.mark.gpu),  # a program's channels go into them, or not
        pytest.param((2, 70, 7, 7), False, marks=pytest.mark.gpu),
        pytest.param((1, 5, 448, 34), True, marks=pytest.mark.gpu),  # sixteen, which Triton takes for a round number
    ],
    ids=str,
)
def test_triton_does_not_depend_on_how_programs_share_out_the_work_to_the_last_bit(device, last, shape, bands, dtype):
    from trueup.kernels import triton_maps

    x = laid_out(3 * maps(*shape).to(device, dtype), last)
    usual, found, moments = reference(maps(4, *shape[1:]), bands=bands).to(device), [], []
    ways = [(True, 1, 0), (True, 2, 1), (False, 1, 2)]
    ways += [(True, 99, 2), (False, 1, 0), (False, 1, 1)] if device == "cuda" else []  # where threads share it out too
    for split, stretches, halved in ways:
        shared = {"split": split, "stretches": stretches, "halved": halved}
        found.append(torch.full_like(x, torch.nan))
        triton_maps.realign_maps(x, usual, out=found[-1], **around(x), **shared)
        moments.append(triton_maps.measure_maps(x, bands, **shared))
    assert all(out.equal(found[0]) for out in found)
    assert all(out.equal(moments[0]) for out in moments)


@devices
@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, where the interpreter meets NaN
def test_triton_gives_back_a_closed_image_bit_for_bit(device, last, dtype, split):
    from trueup.kernels import triton_maps

    x = laid_out(3 * maps(3, 5, 20, 9).to(device, dtype), last)
    x[1, 2, 3, 4] = torch.nan
    x[1, 3, 0, 0] = torch.inf
    usual, out = reference(maps(30, 5, 20, 9), bands=True).to(device), torch.empty_like(x)
    triton_maps.realign_maps(x, usual, torch.tensor([1.0, 0.0, 0.5], device=device), out, split=split)
    torch.testing.assert_close(out[1], x[1], rtol=0, atol=0, equal_nan=True)
    assert not out[0].equal(x[0])
    assert not out[2].equal(x[2])


@devices
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("bands", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_triton_gives_back_a_channel_that_is_not_finite(device, poison, bands):
    from trueup.kernels import triton_maps

    usual, x = reference(maps(30, 4, 8, 8), bands=bands).to(device), 3 * maps(5, 4, 8, 8, seed=1).to(device)
    clean = triton_maps.realign(x, usual)
    x[1, 2, 3, 4] = poison
    out = triton_maps.realign(x, usual)
    assert out[1, 2].nan_to_num(9).equal(x[1, 2].nan_to_num(9))
    out[1, 2] = clean[1, 2]
    assert out.equal(clean)


@devices
def test_triton_takes_other_layouts_and_nothing_at_all(device):
    from trueup.kernels import triton_maps

    usual, x = reference(maps(30, 4, 8, 8), bands=True).to(device), 3 * maps(2, 4, 8, 8, seed=1).to(device)
    wanted = triton_maps.realign(x, usual)
    turned = x.transpose(2, 3).contiguous().transpose(2, 3)
    out = triton_maps.realign(turned, usual)
    assert out.equal(wanted)
    assert out.stride() == turned.stride()
    assert triton_maps.moments(turned, True).equal(triton_maps.moments(x, True))
    assert triton_maps.realign(x[:0], usual).shape == (0, 4, 8, 8)
    assert triton_maps.moments(x[:0], True).shape == (0, 5, 4)


@devices
@layouts
@pytest.mark.parametrize("scale", [1e-12, 50.0, 1e12])
def test_triton_mixes_variances_that_are_very_far_from_the_usual_ones(device, last, scale):
    from trueup.kernels import triton_maps

    usual = reference(maps(30, 4, 9, 8), bands=True)
    usual[2], usual[3] = torch.inf, 1e-30  # no evidence, only the base
    usual[4, 2] = torch.tensor([0, 0.1, 0.5, 1])
    x = laid_out(scale * maps(3, 4, 9, 8, seed=1), last)
    found = triton_maps.realign(x.to(device), usual.to(device)).cpu()
    wanted = evidence.realign(x.double(), usual)
    torch.testing.assert_close(found.double() / scale, wanted / scale, rtol=1e-4, atol=1e-5)


@devices
def test_triton_does_not_lose_a_map_far_from_zero(device):
    """Its first row lies as far from its mean as a row can, and the mean far from zero."""
    from trueup.kernels import triton_maps

    x = maps(1, 2, 16, 16).to(device)
    x[:, :, 0] += 30
    x += 100
    usual = reference(maps(30, 2, 16, 16) + 100, bands=True)
    out, reach = wanted(x, usual)
    assert ((triton_maps.realign(x, usual.to(device)).double().cpu() - out).abs() <= reach).all()
    assert (reach < 1).all()


def unaligned(x: Tensor) -> Tensor:
    """The same values, contiguous, where no 16 bytes begin."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@devices
def test_triton_takes_what_does_not_begin_at_16_bytes(device):
    from trueup.kernels import triton_maps

    usual, x = reference(maps(30, 16, 8, 8), bands=True).to(device), 3 * maps(2, 16, 8, 8, seed=1).to(device)
    gate = torch.tensor([0.5, 1.0], device=device)
    wanted = triton_maps.realign(x, usual, gate)
    for odd in ((unaligned(x), usual, gate), (x, unaligned(usual), gate), (x, usual, unaligned(gate))):
        assert triton_maps.realign(*odd).equal(wanted)
    assert triton_maps.moments(unaligned(x), True).equal(triton_maps.moments(x, True))


@devices
@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "bands", "relu"),
    [
        *(((3, 5, 9, 7), True, relu) for relu in (False, True)),
        ((3, 5, 30, 19), True, True),  # several segments
        *(((3, 5, 5, 5), False, relu) for relu in (False, True)),
    ],
)
def test_triton_adds_and_cuts_off_what_it_writes(device, last, dtype, shape, bands, relu):
    from trueup.kernels import triton_maps

    usual = reference(maps(30, *shape[1:]), bands=bands).to(device)
    x, more = (laid_out(3 * maps(*shape, seed=seed).to(device, dtype), last) for seed in (1, 2))
    gate = torch.tensor([1.0, 0.0, 0.5], device=device)
    more[0, 0, 0, 0] = torch.nan
    alone = triton_maps.realign(x, usual, gate)
    for residual in (None, more, more.clone(memory_format=torch.contiguous_format)):
        wanted = alone if residual is None else alone + residual
        wanted = wanted.relu() if relu else wanted
        found = triton_maps.realign(x, usual, gate, residual, relu)
        assert found.stride() == x.stride()
        # What is not moved is rounded alike; but the interpreter rounds towards zero, to 16 bits.
        unit = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
        torch.testing.assert_close(found[1], wanted[1], rtol=unit if device == "cpu" else 0, atol=0)
        torch.testing.assert_close(found, wanted, rtol=1e-5 + 2 * unit, atol=1e-5 + 16 * unit, equal_nan=True)


@devices
@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("shape", "bands"), [((3, 5, 9, 7), True), ((3, 5, 30, 19), True), ((3, 5, 5, 5), False)])
def test_triton_does_the_norm_before(device, last, dtype, shape, bands):
    from trueup.kernels import triton_maps

    before = torch.linspace(0.5, 3, shape[1])
    norm = Norm(*(tensor.to(device) for tensor in (before - 1, before, before.flip(0), -before)), 1e-3)
    usual = reference(norm(maps(30, *shape[1:]).to(device)).cpu(), bands=bands).to(device)
    x, more = (laid_out(3 * maps(*shape, seed=seed).to(device, dtype), last) for seed in (1, 2))
    gate = torch.tensor([1.0, 0.0, 0.5], device=device)
    for residual, relu in ((None, False), (more, True)):
        wanted = triton_maps.realign(norm(x.float()), usual, gate, None if residual is None else residual.float(), relu)
        found = triton_maps.realign(x, usual, gate, residual, relu, norm)
        assert found.stride() == x.stride()
        unit = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(found.float(), wanted, rtol=unit, atol=32 * unit)


@devices
def test_triton_stays_within_what_float16_holds(device):
    from trueup.kernels import triton_maps

    usual = reference(1e5 * maps(30, 2, 8, 8) + 1e6, bands=True)
    x = maps(2, 2, 8, 8, seed=1).half()
    out = triton_maps.realign(x.to(device), usual.to(device)).cpu()
    torch.testing.assert_close(out, evidence.realign(x, usual))
    assert (out == torch.finfo(x.dtype).max).any()


@devices
def test_triton_takes_a_norm_whose_tensors_are_not_contiguous(device):
    from trueup.kernels import triton_maps

    x, before = 3 * maps(2, 5, 9, 7, seed=1).to(device), torch.linspace(0.5, 3, 5, device=device)
    norm = Norm(before - 1, before, before.flip(0), -before, 1e-3)
    usual = reference(norm(maps(30, 5, 9, 7).to(device)).cpu(), bands=True).to(device)
    spread = Norm(*(torch.stack([tensor, tensor + 9], dim=1)[:, 0] for tensor in norm.tensors), 1e-3)
    assert triton_maps.realign(x, usual, norm=spread).equal(triton_maps.realign(x, usual, norm=norm))


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs Triton")
@pytest.mark.parametrize("measure", [False, True])
def test_triton_takes_more_images_than_a_side_of_a_grid(measure):
    """A grid is 2^31 - 1 long, and 65,535 wide and high."""
    from trueup.kernels import triton_maps

    device, ends = torch.device("cpu" if INTERPRETED else "cuda:0"), None if measure else (False, True, True, False)
    for side in (8, 64):
        shape = triton_maps._Shape((100_000, 64, side, side), True)
        plan = triton_maps._plan(shape, torch.float32, device, True, ends, (), None, None, None)
        assert plan.split == (side > 16)
        for launch in (plan.whole, plan.sum_segments, plan.finish):
            assert max(launch.grid[1:]) <= 65_535


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs Triton")
@pytest.mark.parametrize("last", [False, True])
def test_no_segment_is_empty(last):
    """A program would begin at a row that is not there, and read it."""
    from trueup.kernels import triton_maps

    device = torch.device("cpu" if INTERPRETED else "cuda:0")
    for height in range(1, 130):
        for width in (1, 8, 17, 70, 200):
            shape = triton_maps._Shape((1, 4, height, width), last)
            plan = triton_maps._plan(shape, torch.float32, device, True, None, (), None, None, None)
            *_, rows, strips = plan.sizes
            assert (plan.segments // strips - 1) * plan.each < rows
