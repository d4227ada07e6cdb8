"""The rule of evidence in Triton against its specification in double precision.

Which case reaches which branch of the kernels:

- channels last or second, bands or none, one kernel or two: each case of `test_triton_meets_the_specification`
- one segment, of an odd or even number of rows: 9 x 13, 8 x 8
- several strips: 5 x 70 in both layouts, 5 x 19 only with channels last; too few rows to be divided: 2 x 70
- several segments per strip: `small_segments`, with an odd and an even last one; with several of them per program:
  `test_triton_gives_the_same_bits_however_the_work_is_divided`
- more channels than a program takes, which divide evenly or not: 40, 70 and 64
- gate, residual, ReLU, norm, and each dtype's rounding: `test_triton_fuses_norm_residual_and_relu`
- maps that stay as they are: closed images, channels that are not finite
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.backends import INTERPRETED, devices
from trueup.functional import evidence
from trueup.kernels import BatchNorm
from trueup.kernels.cuda import maps as kernel

layouts = pytest.mark.parametrize("last", [False, True], ids=["channels second", "channels last"])
UNIT = 2.0**-24  # relative rounding of float32
STEPS = 64  # additions that a value goes through: rows of a segment, across, segments, the means

SHAPES = [
    ((2, 3, 9, 13), True),  # no power of two, odd rows
    ((1, 4, 8, 8), True),  # powers of two
    ((1, 40, 2, 6), True),  # more channels than a program takes
    ((1, 1, 1, 1), True),  # smallest
    ((2, 2, 1, 5), True),  # one row
    ((2, 2, 6, 1), True),  # one column
    ((3, 4, 7), False),  # a sequence
    ((2, 3, 3, 4, 5), False),  # a volume
    ((1, 2, 5, 70), True),  # several strips and segments
    ((1, 2, 2, 70), True),  # several strips, too few rows to be divided
]
DIVIDED = [
    ((1, 2, 11, 7), True),  # the last segment odd
    ((1, 2, 12, 19), True),  # the last segment even
    ((1, 2, 10, 70), False),  # no bands
]
cases = [
    *((*case, False, torch.float32) for case in SHAPES),
    *((*case, True, torch.float32) for case in DIVIDED),
    *((*case, False, dtype) for case in (SHAPES[0], SHAPES[7]) for dtype in (torch.bfloat16, torch.float16)),
]


@pytest.fixture
def divide(monkeypatch):
    """Divide maps into segments of two rows, as if they were large: the interpreter takes seconds per large map."""

    def small_segments():
        monkeypatch.setattr(kernel, "SEGMENT_ROWS", 2)
        monkeypatch.setattr(kernel, "WHOLE_ROWS", 2)
        kernel._plan.cache_clear()

    yield small_segments
    kernel._plan.cache_clear()


def maps(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def laid_out(x: Tensor, last: bool) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x.contiguous()


def reference_of(clean: Tensor, *, bands: bool) -> Tensor:
    moments = evidence.moments(clean, bands=bands)[:, [0, 2, 3] if bands else [0, 1]].double()
    floor = (1e-3 * moments.mean(dim=0).abs()).clamp(min=1e-24)
    return evidence.reference_of(evidence.statistics(moments, floor), floor, strength=0.05, base=0.1)


def parts_of(x: Tensor, bands: bool) -> tuple[Tensor, list[Tensor]]:
    """Mean of each map `(batch, channels, 1, 1)` and its parts, in double precision: low and high band, or one."""
    a = x.double().cpu().reshape(*x.shape[:2], *(x.shape[2:] if bands else (1, -1)))
    mean = a.mean(dim=(2, 3), keepdim=True)
    low = evidence.local_mean(a - mean)
    return mean, [low, a - mean - low] if bands else [a - mean]


def wanted(x: Tensor, reference: Tensor, gate: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rule in double precision, written out once more, and how far from it float32 may be.

    A sum that adds to the k-th depth is within k roundings of the sum of its terms. So the mean is off by k u A at
    most, for values up to A. A local mean is off by 16 u A at most. A variance, whose sum of squares is one of values
    minus the pivot, is off by 4 k u (variance + (mean - pivot)²) and 16 u A times the root of it, and
    ½ log(variance + floor) by half of that over (variance + floor). A share w(z) of the way (centre - s), and a mix of
    the rest, have a slope of 3/2 at most in s, since that of w times (centre - s) is 2 z² κ / (z² + κ)² <= 1/2. Last,
    the result rounds its terms.
    """
    bands = reference.shape[1] == 3
    mean, parts = parts_of(x, bands)
    tilts = [part.mean(dim=(2, 3), keepdim=True) for part in parts]
    variances = [(part - tilt).square().mean(dim=(2, 3)) for part, tilt in zip(parts, tilts, strict=True)]
    found = torch.stack([mean[..., 0, 0], *variances], dim=1)
    statistics = evidence.statistics(found, reference[3])
    z2 = evidence.z_squared(statistics, reference)
    g = 1 if gate is None else gate.double().cpu()[:, None, None]
    z2, base, away = z2 * g, reference[4] * g, statistics - reference[0]
    mixed = 0.5 * torch.log1p(base * torch.expm1(2 * away))
    mixed[:, 0] = (base * away)[:, 0]
    moves = -(mixed + z2 / (z2 + reference[2]) * (away - mixed))
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
        stray = 1.5 * 0.5 * off / (variance + reference[3, k + 1]) + STEPS * UNIT
        reach = reach + gains[:, k] * (2 * largest * stray.clamp(max=1) + 16 * UNIT * largest)
    return out.reshape(x.shape), reach[..., None, None].expand_as(out).reshape(x.shape)


@devices
@layouts
@pytest.mark.parametrize(("shape", "bands", "small", "dtype"), cases, ids=str)
def test_triton_meets_the_specification(device, last, shape, bands, small, dtype, divide):
    if small:
        divide()
    reference = reference_of(maps(30, *shape[1:]), bands=bands)
    x = laid_out((2 * maps(*shape, seed=1) + 0.5).to(device, dtype), last)
    for gate, split in ((None, False), (torch.linspace(0.1, 1, shape[0]), True)):
        out, reach = wanted(x, reference, gate)
        assert (reach < 1e-2).all() or min(shape[2:]) == 1
        slack = torch.finfo(dtype).eps * out.abs() if dtype != torch.float32 else 0.0
        found = torch.full_like(x, torch.nan)
        kernel.realign_maps(x, reference.to(device), None if gate is None else gate.to(device), found, split=split)
        assert found.stride() == x.stride()
        assert ((found.double().cpu() - out).abs() <= reach + slack).all()


@devices
@layouts
@pytest.mark.parametrize(("shape", "bands", "small", "dtype"), cases[:-4], ids=str)
def test_triton_measures_what_the_specification_does(device, last, shape, bands, small, dtype, divide):
    if small:
        divide()
    x = laid_out((2 * maps(*shape, seed=1) + 0.5).to(device), last)
    mean, parts = parts_of(x, bands)
    rows = [mean[..., 0, 0], sum(parts).square().mean(dim=(2, 3))]
    if bands:
        rows += [part.var(dim=(2, 3), correction=0) for part in parts] + [parts[1].abs().mean(dim=(2, 3))]
    expected = torch.stack(rows, dim=1)
    largest = x.double().abs().amax(dim=tuple(range(2, x.dim()))).cpu()[:, None]
    reach = torch.cat([STEPS * UNIT * largest, 8 * STEPS * UNIT * largest.square().expand_as(expected[:, 1:])], dim=1)
    for split in (False, True):
        found = kernel.measure_maps(x, bands, split=split)
        assert ((found.double().cpu() - expected).abs() <= reach + 8 * STEPS * UNIT * expected.abs()).all()


def everything(x: Tensor) -> dict:
    """All that may be done in the same pass."""
    mean, variance, weight, bias = (0.5 + maps(4, x.shape[1], seed=7).abs()).to(x.device)
    return {
        "gate": torch.linspace(1, 0.2, len(x), device=x.device),
        "residual": torch.empty_like(x).copy_(x.flip(0)),
        "relu": True,
        "norm": BatchNorm(mean, variance, weight, bias, 1e-3),
    }


def in_steps(x, reference, gate=None, residual=None, relu=False, norm=None):
    """The same by torch in double precision, on the CPU."""
    x, gate = x.double().cpu(), None if gate is None else gate.cpu()
    if norm is not None:
        x = BatchNorm(*(tensor.double().cpu() for tensor in norm.tensors), norm.epsilon)(x)
    out = evidence.realign(x, reference.double().cpu(), gate)
    out = out if residual is None else out + residual.double().cpu()
    return out.relu() if relu else out


def close(found, expected, dtype=torch.float32):
    unit = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-4 + unit, atol=1e-4 + 8 * unit, equal_nan=True)


@devices
@layouts
@pytest.mark.parametrize(
    ("shape", "bands"),
    [
        ((3, 3, 5, 19), True),  # several segments with channels last, one else
        ((3, 3, 4, 5), False),
        pytest.param((64, 48, 28, 28), True, marks=pytest.mark.gpu),  # fewer channels per program for one image
        pytest.param((64, 64, 14, 14), True, marks=pytest.mark.gpu),
        pytest.param((64, 64, 14, 14), False, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_triton_gives_an_image_the_same_bits_alone_and_in_a_batch(device, last, shape, bands):
    x = laid_out(3 * maps(*shape).to(device), last)
    reference, given = reference_of(maps(30, *shape[1:]), bands=bands).to(device), everything(x)
    together = kernel.realign(x, reference, **given)
    close(together, in_steps(x, reference, **given))
    for k in (0, len(x) - 1):
        own = {**given, "gate": given["gate"][k : k + 1], "residual": given["residual"][k : k + 1]}
        assert kernel.realign(laid_out(x[k : k + 1], last), reference, **own).equal(together[k : k + 1])
    assert kernel.moments(x[:1].clone(), bands).equal(kernel.moments(x, bands)[:1])


@devices
def test_triton_gives_an_image_the_same_bits_with_gaps_between_images(device):
    x = laid_out(3 * maps(4, 3, 5, 19).to(device), last=True)[::2]
    reference = reference_of(maps(30, 3, 5, 19), bands=True).to(device)
    together = kernel.realign(x, reference)
    close(together, in_steps(x, reference))
    assert together[:1].equal(kernel.realign(x[:1], reference))


@devices
@layouts
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("shape", "bands", "small"),
    [
        ((2, 3, 11, 19), True, True),  # the last segment odd
        ((1, 1, 10, 70), False, True),  # no bands
        ((1, 70, 4, 6), True, False),  # one segment, and more channels than a program takes
        ((1, 64, 2, 4), True, False),  # which divide evenly
        pytest.param((1, 2, 100, 34), True, False, marks=pytest.mark.gpu),
        pytest.param((2, 70, 28, 28), True, False, marks=pytest.mark.gpu),
        pytest.param((2, 48, 28, 28), True, False, marks=pytest.mark.gpu),
        pytest.param((2, 70, 7, 7), False, False, marks=pytest.mark.gpu),
        pytest.param((1, 5, 448, 34), True, False, marks=pytest.mark.gpu),  # 16 segments: Triton specialises multiples
    ],
    ids=str,
)
def test_triton_gives_the_same_bits_however_the_work_is_divided(device, last, shape, bands, small, dtype, divide):
    if small:
        divide()
    x = laid_out(3 * maps(*shape).to(device, dtype), last)
    reference, given = reference_of(maps(4, *shape[1:]), bands=bands).to(device), everything(x)
    found, moments = [], []
    ways = [(True, 1, 0), (True, 2, 1), (False, 1, 2)]
    ways += [(True, 99, 2), (False, 1, 0), (False, 1, 1)] if device == "cuda" else []  # threads divide it, too
    for split, programs, halvings in ways:
        division = {"split": split, "programs_per_strip": programs, "halvings": halvings}
        found.append(torch.full_like(x, torch.nan))
        kernel.realign_maps(x, reference, out=found[-1], **given, **division)
        moments.append(kernel.measure_maps(x, bands, **division))
    close(found[0], in_steps(x, reference, **given), dtype)
    assert all(out.equal(found[0]) for out in found)
    assert all(out.equal(moments[0]) for out in moments)


@devices
@layouts
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, where the interpreter meets NaN
def test_triton_returns_a_closed_image_bit_for_bit(device, last, split):
    x = laid_out(3 * maps(3, 5, 4, 19).to(device, torch.bfloat16 if split else torch.float32), last)
    x[1, 2, 3, 4] = torch.nan
    x[1, 3, 0, 0] = torch.inf
    reference, out = reference_of(maps(30, 5, 4, 19), bands=True).to(device), torch.empty_like(x)
    kernel.realign_maps(x, reference, torch.tensor([1.0, 0.0, 0.5], device=device), out, split=split)
    torch.testing.assert_close(out[1], x[1], rtol=0, atol=0, equal_nan=True)
    assert not out[0].equal(x[0])
    assert not out[2].equal(x[2])


@devices
@pytest.mark.parametrize("bands", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_triton_returns_a_channel_that_is_not_finite(device, bands):
    reference, x = reference_of(maps(30, 4, 4, 8), bands=bands).to(device), 3 * maps(3, 4, 4, 8, seed=1).to(device)
    clean = kernel.realign(x, reference)
    close(clean, in_steps(x, reference))
    x[1, 2, 3, 4], x[2, 0, 0, 0] = torch.nan, torch.inf
    out = kernel.realign(x, reference)
    for channel in ((1, 2), (2, 0)):
        torch.testing.assert_close(out[channel], x[channel], rtol=0, atol=0, equal_nan=True)
        out[channel] = clean[channel]
    assert out.equal(clean)


@devices
def test_triton_takes_other_layouts_and_empty_batches(device):
    reference, x = reference_of(maps(30, 4, 4, 8), bands=True).to(device), 3 * maps(2, 4, 4, 8, seed=1).to(device)
    turned = x.transpose(2, 3).contiguous().transpose(2, 3)
    out = kernel.realign(turned, reference)
    close(out, in_steps(x, reference))
    assert out.stride() == turned.stride()
    torch.testing.assert_close(kernel.moments(turned, True), evidence.moments(x, bands=True), rtol=1e-5, atol=1e-5)
    assert kernel.realign(x[:0], reference).shape == (0, 4, 4, 8)
    assert kernel.moments(x[:0], True).shape == (0, 5, 4)


@devices
@layouts
@pytest.mark.parametrize("scale", [1e-12, 50.0, 1e12])
def test_triton_mixes_variances_that_are_very_far_from_the_clean_ones(device, last, scale):
    reference = reference_of(maps(30, 4, 5, 8), bands=True)
    reference[2], reference[3] = torch.inf, 1e-30  # no evidence, only the base
    reference[4, 2] = torch.tensor([0, 0.1, 0.5, 1])
    x = laid_out(scale * maps(2, 4, 5, 8, seed=1), last)
    found = kernel.realign(x.to(device), reference.to(device)).cpu()
    expected = evidence.realign(x.double(), reference)
    torch.testing.assert_close(found.double() / scale, expected / scale, rtol=1e-4, atol=1e-5)


@devices
def test_triton_keeps_the_precision_of_a_map_far_from_zero(device):
    """Its first row lies as far from its mean as a row can, and the mean far from zero."""
    x = maps(1, 2, 16, 16).to(device)
    x[:, :, 0] += 30
    x += 100
    reference = reference_of(maps(30, 2, 16, 16) + 100, bands=True)
    out, reach = wanted(x, reference)
    assert ((kernel.realign(x, reference.to(device)).double().cpu() - out).abs() <= reach).all()
    assert (reach < 1).all()


def unaligned(x: Tensor) -> Tensor:
    """The same values, contiguous, at an address that is no multiple of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@devices
def test_triton_takes_tensors_that_are_not_aligned(device):
    reference, x = reference_of(maps(30, 16, 4, 4), bands=True).to(device), 3 * maps(2, 16, 4, 4, seed=1).to(device)
    gate = torch.tensor([0.5, 1.0], device=device)
    aligned = kernel.realign(x, reference, gate)
    close(aligned, in_steps(x, reference, gate))
    for odd in ((unaligned(x), reference, gate), (x, unaligned(reference), gate), (x, reference, unaligned(gate))):
        assert kernel.realign(*odd).equal(aligned)
    assert kernel.moments(unaligned(x), True).equal(kernel.moments(x, True))


@devices
@layouts
@pytest.mark.parametrize(
    ("shape", "bands", "dtype", "norm", "add", "relu"),
    [
        ((3, 5, 5, 7), True, torch.float32, False, False, True),
        ((3, 5, 5, 7), True, torch.float32, False, True, False),
        ((3, 5, 5, 7), True, torch.float32, True, False, False),
        ((3, 5, 5, 7), True, torch.float16, True, True, True),
        ((3, 5, 3, 19), True, torch.bfloat16, False, True, True),  # several segments with channels last
        ((3, 5, 3, 19), True, torch.float32, True, True, True),
        ((3, 5, 3, 3), False, torch.bfloat16, False, True, True),
        ((3, 5, 3, 3), False, torch.float16, True, False, True),
    ],
    ids=str,
)
def test_triton_fuses_norm_residual_and_relu(device, last, shape, bands, dtype, norm, add, relu):
    some = torch.linspace(0.5, 3, shape[1])
    tensors = (torch.stack([t, t + 9], dim=1)[:, 0] for t in (some - 1, some, some.flip(0), -some))  # not contiguous
    before = BatchNorm(*(t.to(device) for t in tensors), 1e-3)
    clean = maps(30, *shape[1:]).to(device)
    reference = reference_of((before(clean) if norm else clean).cpu(), bands=bands).to(device)
    x, residual = (laid_out(3 * maps(*shape, seed=seed).to(device, dtype), last) for seed in (1, 2))
    residual[0, 0, 0, 0] = torch.nan
    given = {"residual": residual if add else None, "relu": relu, "norm": before if norm else None}
    gate = torch.tensor([1.0, 0.0, 0.5], device=device)
    found = kernel.realign(x, reference, gate, **given)
    assert found.stride() == x.stride()
    close(found, in_steps(x, reference, gate, **given), dtype)
    if not norm:  # unmoved values are rounded as by torch; but the interpreter rounds towards zero, to 16 bits
        closed = x[1] + residual[1] if add else x[1]
        unit = torch.finfo(dtype).eps if dtype != torch.float32 and device == "cpu" else 0
        torch.testing.assert_close(found[1], closed.relu() if relu else closed, rtol=unit, atol=0)
    if add:
        other = {**given, "residual": residual.clone(memory_format=torch.contiguous_format)}
        assert kernel.realign(x, reference, gate, **other).nan_to_num(9).equal(found.nan_to_num(9))


@devices
@layouts
def test_triton_limits_a_relu6(device, last):
    reference = reference_of(maps(30, 5, 5, 7), bands=True).to(device)
    x = laid_out(9 * maps(3, 5, 5, 7).to(device), last)
    x[0, 0, 0, 0] = torch.nan
    found = kernel.realign(x, reference, relu=True, ceiling=6.0)
    expected = in_steps(x, reference).clamp(0, 6)
    close(found, expected)
    assert (found == 6).any()
    assert (found == 0).any()
    assert found[0, 0, 0, 0].isnan()


@devices
@pytest.mark.parametrize("shape", [(3, 21, 24), (2, 5, 9, 8), (2, 150, 3)], ids=str)
def test_triton_takes_tokens_as_they_are(device, shape, monkeypatch):
    """Channels in the last dimension, and of numbers that are no power of two."""
    bands = len(shape) == 4
    clean = maps(30, *shape[1:]).movedim(-1, 1)
    reference, x = reference_of(clean, bands=bands).to(device), 3 * maps(*shape, seed=1).to(device)
    found = kernel.realign(x, reference, channels=x.dim() - 1)
    close(found.movedim(-1, 1), in_steps(x.movedim(-1, 1), reference))
    assert found.is_contiguous()
    assert found.movedim(-1, 1).equal(kernel.realign(x.movedim(-1, 1), reference))
    with monkeypatch.context() as patched:  # sites name their channels by -1; views of them take time on the host
        patched.setattr(torch.Tensor, "movedim", None, raising=False)
        assert kernel.realign(x, reference, channels=-1).equal(found)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    close(kernel.realign(turned, reference, channels=x.dim() - 1), found.double().cpu())


@devices
def test_triton_stays_in_the_range_of_float16(device):
    reference = reference_of(1e5 * maps(30, 2, 4, 8) + 1e6, bands=True)
    x = maps(2, 2, 4, 8, seed=1).half()
    out = kernel.realign(x.to(device), reference.to(device)).cpu()
    torch.testing.assert_close(out, evidence.realign(x, reference))
    assert (out == torch.finfo(x.dtype).max).any()


@devices
@pytest.mark.parametrize("measure", [False, True])
def test_a_triton_grid_takes_100_000_images(device, measure):
    """A grid is 2^31 - 1 long, but 65,535 wide and high."""
    device, add = torch.device("cpu" if INTERPRETED else "cuda:0"), None if measure else True
    for side in (8, 64):
        shape, strides = (100_000, 64, side, side), (64 * side * side, 1, 64 * side, 64)
        dtypes = (torch.float64,) + 4 * (torch.float32,)
        plan = kernel._plan(shape, strides, 1, torch.float32, device, True, add, dtypes, None, None, None)
        assert plan.split == (side > 16)
        for launch in (plan.whole, plan.sum_segments, plan.finish):
            assert max(launch.grid[1:]) <= 65_535


@devices
@layouts
def test_no_triton_segment_is_empty(device, last):
    """A program would begin at a row that does not exist, and read it."""
    device = torch.device("cpu" if INTERPRETED else "cuda:0")
    for height in range(1, 130):
        for width in (1, 8, 17, 70, 200):
            shape, n = (1, 4, height, width), height * width
            strides = (4 * n, 1, 4 * width, 4) if last else (4 * n, n, width, 1)
            plan = kernel._plan(shape, strides, 1, torch.float32, device, True, None, (), None, None, None)
            *_, rows, strips, rows_per_segment, segments = plan.whole_sizes
            assert (segments // strips - 1) * rows_per_segment < rows
