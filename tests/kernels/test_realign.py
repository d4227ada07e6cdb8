"""The fast rule of evidence against its specification."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trueup import channels, kernels

pytest.importorskip("numba")


def maps(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(clean: Tensor, *, bands: bool) -> Tensor:
    moments = channels.moments(clean, bands=bands)[:, [0, 2, 3] if bands else [0, 1]].double()
    floor = (1e-3 * moments.mean(dim=0).abs()).clamp(min=1e-24)
    return channels.reference_of(channels.statistics(moments, floor), floor, strength=0.05)


@pytest.mark.parametrize(
    ("shape", "bands"),
    [
        ((1, 1, 1, 1), True),  # smallest
        ((2, 3, 1, 5), True),  # one row
        ((2, 3, 6, 1), True),  # one column
        ((3, 2, 2, 2), True),  # all border
        ((5, 4, 9, 13), True),  # no power of two
        ((64, 16, 32, 32), True),  # enough for several threads
        ((64, 16, 32, 32), False),
        ((4, 3, 7), False),  # a sequence
        ((4, 3, 3, 4, 5), False),  # a volume
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_fast_one_agrees_with_the_specification(shape, bands, threads):
    clean = maps(30, *shape[1:])
    usual, x = reference(clean, bands=bands), 2 * maps(*shape, seed=1) + 0.5
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = kernels.realign(x, usual)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out, channels.realign(x.double(), usual).float(), atol=3e-5, rtol=1e-4)
    assert torch.cat([kernels.realign(image[None], usual) for image in x[:4]]).equal(out[:4])
    opened = torch.linspace(0, 1, len(x)) if len(x) > 1 else torch.tensor([0.3])
    out = kernels.realign(x, usual, opened)
    torch.testing.assert_close(out, channels.realign(x.double(), usual, opened).float(), atol=3e-5, rtol=1e-4)
    alone = [kernels.realign(image[None], usual, g[None]) for image, g in zip(x[:4], opened, strict=False)]
    assert torch.cat(alone).equal(out[:4])
    assert out[opened == 0].equal(x[opened == 0])
    found, wanted = kernels.moments(x, bands=bands), channels.moments(x.double(), bands=bands)
    torch.testing.assert_close(found, wanted.float(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    usual, x = reference(maps(30, 4, 8, 8), bands=True), (3 * maps(5, 4, 8, 8, seed=1)).to(dtype)
    out = kernels.realign(x, usual)
    assert out.dtype == dtype
    torch.testing.assert_close(out, channels.realign(x, usual))
    x[0, 0, 0, 0] = torch.finfo(dtype).max
    assert kernels.realign(x, usual, torch.zeros(5)).equal(x)


def test_layouts_are_kept():
    usual, x = reference(maps(30, 4, 8, 8), bands=True), 3 * maps(5, 4, 8, 8, seed=1)
    wanted = kernels.realign(x, usual)
    for other in (x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)):
        out = kernels.realign(other, usual)
        assert out.equal(wanted)
        assert out.stride() == other.stride()
    assert kernels.realign(x[:0], usual).shape == (0, 4, 8, 8)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("bands", [False, True])
def test_what_is_not_finite_comes_back_as_it_is(poison, bands):
    usual, x = reference(maps(30, 4, 8, 8), bands=bands), 3 * maps(5, 4, 8, 8, seed=1)
    clean = kernels.realign(x, usual)
    x[1, 2, 3, 4] = poison
    out = kernels.realign(x, usual)
    assert out[1, 2].nan_to_num(9).equal(x[1, 2].nan_to_num(9))
    out[1, 2] = clean[1, 2]
    assert out.equal(clean)


def test_gradients_are_those_of_the_specification():
    usual = reference(maps(30, 4, 8, 8), bands=True)
    for openness in (None, torch.tensor([0.0, 0.1, 0.5, 1.0, 0.0])):
        x, y = ((3 * maps(5, 4, 8, 8, seed=1)).requires_grad_() for _ in range(2))
        kernels.realign(x, usual, openness).square().sum().backward()
        channels.realign(y, usual, openness).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-3)


def test_what_comes_out_may_be_written_into():
    x, usual = maps(2, 3, 8, 8).requires_grad_(), reference(maps(30, 3, 8, 8), bands=True)
    for look in (lambda a: a, lambda a: a.movedim(1, -1)):
        look(kernels.realign(x, usual)).relu_().sum().backward()
    assert x.grad.isfinite().all()


def test_torch_approves_of_the_operator():
    x = maps(2, 3, 8, 8).requires_grad_()
    usual = reference(maps(30, 3, 8, 8), bands=True)
    for openness in (None, torch.tensor([0.0, 0.5])):
        torch.library.opcheck(torch.ops.trueup.realign.default, (x, usual, openness))
    for bands in (False, True):
        torch.library.opcheck(torch.ops.trueup.moments.default, (x.detach(), bands))
