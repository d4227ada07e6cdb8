"""The fast rule of evidence against its specification."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from trueup import kernels
from trueup.functional import evidence

pytest.importorskip("numba")


def maps(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(clean: Tensor, *, bands: bool) -> Tensor:
    moments = evidence.moments(clean, bands=bands)[:, [0, 2, 3] if bands else [0, 1]].double()
    floor = (1e-3 * moments.mean(dim=0).abs()).clamp(min=1e-24)
    return evidence.reference_of(evidence.statistics(moments, floor), floor, strength=0.05, base=0.1)


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
    torch.testing.assert_close(out, evidence.realign(x.double(), usual).float(), atol=3e-5, rtol=1e-4)
    assert torch.cat([kernels.realign(image[None], usual) for image in x[:4]]).equal(out[:4])
    opened = torch.linspace(0, 1, len(x)) if len(x) > 1 else torch.tensor([0.3])
    out = kernels.realign(x, usual, opened)
    torch.testing.assert_close(out, evidence.realign(x.double(), usual, opened).float(), atol=3e-5, rtol=1e-4)
    alone = [kernels.realign(image[None], usual, g[None]) for image, g in zip(x[:4], opened, strict=False)]
    assert torch.cat(alone).equal(out[:4])
    assert out[opened == 0].equal(x[opened == 0])
    found, wanted = kernels.moments(x, bands=bands), evidence.moments(x.double(), bands=bands)
    torch.testing.assert_close(found, wanted.float(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    usual, x = reference(maps(30, 4, 8, 8), bands=True), (3 * maps(5, 4, 8, 8, seed=1)).to(dtype)
    out = kernels.realign(x, usual)
    assert out.dtype == dtype
    torch.testing.assert_close(out, evidence.realign(x, usual))
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
        evidence.realign(y, usual, openness).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-3)


def apart(x, usual, openness=None, *, residual=None, relu=False):
    """What the fused operator stands for, step by step."""
    out = kernels.realign(x, usual, openness)
    out = out if residual is None else out + residual
    return out.relu() if relu else out


AFTER = [(False, True), (True, False), (True, True)]
after = pytest.mark.parametrize(("add", "relu"), AFTER, ids=["relu", "sum", "sum and relu"])


@after
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("shape", "bands"),
    [
        ((1, 1, 1, 1), True),  # smallest
        ((3, 4, 9, 13), True),  # no power of two
        ((3, 4, 9, 13), False),
        ((3, 4, 7), False),  # a sequence
        ((3, 4), False),  # no map at all
    ],
    ids=str,
)
def test_a_sum_and_a_relu_in_the_same_pass_round_as_they_do_apart(shape, bands, dtype, add, relu):
    usual, x = reference(maps(30, *shape[1:]), bands=bands), (2 * maps(*shape, seed=1) + 0.5).to(dtype)
    residual = maps(*shape, seed=2).to(dtype) if add else None
    for openness in (None, torch.linspace(0, 1, len(x))):
        out = kernels.realign(x, usual, openness, residual=residual, relu=relu)
        assert out.dtype == dtype
        assert out.equal(apart(x, usual, openness, residual=residual, relu=relu))
        if openness is not None:
            closed = x[openness == 0] if residual is None else x[openness == 0] + residual[openness == 0]
            assert out[openness == 0].equal(closed.relu() if relu else closed)
    one = slice(0, 1)
    alone = kernels.realign(
        x[one], usual, openness[one], residual=None if residual is None else residual[one], relu=relu
    )
    assert alone.equal(out[one])


@after
@pytest.mark.parametrize("bands", [False, True])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_goes_through_a_sum_and_a_relu_as_torchs(poison, bands, add, relu):
    usual, x = reference(maps(30, 4, 8, 8), bands=bands), 3 * maps(5, 4, 8, 8, seed=1)
    residual = maps(5, 4, 8, 8, seed=2) if add else None
    x[1, 2, 3, 4] = poison
    if residual is not None:
        residual[2, 1, 0, 0], residual[1, 2, 3, 4] = poison, torch.inf
    out = kernels.realign(x, usual, residual=residual, relu=relu)
    torch.testing.assert_close(out, apart(x, usual, residual=residual, relu=relu), rtol=0, atol=0, equal_nan=True)
    assert out.isnan().any() == (torch.tensor(poison).isnan() or (add and poison == -torch.inf))


def test_the_sign_of_a_zero_is_torchs():
    usual, x = reference(maps(30, 1, 4, 4), bands=False), torch.full((1, 1, 4, 4), -0.0)
    out = kernels.realign(x, usual, torch.zeros(1), relu=True)
    assert out.signbit().equal(x.relu().signbit())


def test_with_a_residual_layouts_are_kept():
    usual, x, residual = (
        reference(maps(30, 4, 8, 8), bands=True),
        3 * maps(5, 4, 8, 8, seed=1),
        maps(5, 4, 8, 8, seed=2),
    )
    wanted = apart(x, usual, residual=residual, relu=True)
    last = {"memory_format": torch.channels_last}
    for mine, theirs in (
        (x.contiguous(**last), residual.contiguous(**last)),
        (x.contiguous(**last), residual),
        (x, residual.contiguous(**last)),
    ):
        out = kernels.realign(mine, usual, residual=theirs, relu=True)
        assert out.equal(wanted)
        assert out.stride() == mine.stride()
        out = torch.ops.trueup.realign.default(mine, usual, None, theirs, True)
        assert out.equal(wanted)
        assert out.stride() == mine.stride()
    assert kernels.realign(x[:0], usual, residual=residual[:0], relu=True).shape == (0, 4, 8, 8)


@pytest.mark.parametrize(
    "residual",
    [
        maps(4, 1, 1),  # broadcast
        maps(2, 5, 4, 8, 8),  # makes more of it
        maps(5, 4, 8, 8).double(),  # makes it wider
        maps(5, 4, 8, 8).bfloat16(),
        torch.tensor(0.5),
    ],
    ids=lambda r: f"{tuple(r.shape)} {r.dtype}",
)
def test_a_residual_of_another_kind_is_added_as_torch_does(residual):
    usual, x = reference(maps(30, 4, 8, 8), bands=True), 3 * maps(5, 4, 8, 8, seed=1)
    out, wanted = kernels.realign(x, usual, residual=residual), apart(x, usual, residual=residual)
    assert out.dtype == wanted.dtype
    assert out.equal(wanted)


@after
def test_with_a_sum_and_a_relu_gradients_are_those_of_the_specification(add, relu):
    usual = reference(maps(30, 4, 8, 8), bands=True)
    for openness in (None, torch.tensor([0.0, 0.1, 0.5, 1.0, 0.0])):
        x, y = ((3 * maps(5, 4, 8, 8, seed=1)).requires_grad_() for _ in range(2))
        r, s = (maps(5, 4, 8, 8, seed=2).requires_grad_() if add else None for _ in range(2))
        kernels.realign(x, usual, openness, residual=r, relu=relu).square().sum().backward()
        wanted = evidence.realign(y, usual, openness)
        wanted = wanted if s is None else wanted + s
        (wanted.relu() if relu else wanted).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-3)
        if r is not None:
            torch.testing.assert_close(r.grad, s.grad, rtol=1e-3, atol=1e-3)
            only = maps(5, 4, 8, 8, seed=2).requires_grad_()  # the model is frozen up to here
            kernels.realign(x.detach(), usual, openness, residual=only, relu=relu).square().sum().backward()
            assert only.grad.equal(r.grad)


@pytest.fixture
def norms_are_taken(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(sys.modules["trueup.kernels.realign"], "_takes_norms", lambda _: True)


NORM = kernels.Norm(torch.arange(4.0), torch.arange(1.0, 5), torch.linspace(0.5, 2, 4), torch.arange(4.0) - 1, 1e-3)


@after
@pytest.mark.parametrize("wide", [False, True], ids=["like it", "of another kind"])
def test_a_norm_is_done_before_and_a_sum_and_a_relu_after(add, relu, wide, norms_are_taken):
    usual, x = reference(maps(30, 4, 8, 8), bands=True), 3 * maps(5, 4, 8, 8, seed=1)
    residual = maps(5, 4, 8, 8, seed=2).to(torch.float64 if wide else torch.float32) if add else None
    out = kernels.realign(x, usual, residual=residual, relu=relu, norm=NORM)
    assert out.equal(apart(NORM(x), usual, residual=residual, relu=relu))


@pytest.mark.parametrize("which", ["x", "residual", "weight"])
def test_gradients_go_through_a_norm_and_past_it(which, norms_are_taken):
    usual, found = reference(maps(30, 4, 8, 8), bands=True), []
    for fused in (True, False):
        given = {"x": 3 * maps(5, 4, 8, 8, seed=1), "residual": maps(5, 4, 8, 8, seed=2), "weight": NORM.weight.clone()}
        given[which].requires_grad_()
        norm = NORM._replace(weight=given["weight"])
        first, more = (given["x"], {"norm": norm}) if fused else (norm(given["x"]), {})
        out = kernels.realign(first, usual, residual=given["residual"], relu=True, **more)
        found.append(torch.autograd.grad(out.square().sum(), given[which])[0])
    assert found[0].equal(found[1])
    assert found[0].any()


def test_what_comes_out_may_be_written_into():
    x, usual = maps(2, 3, 8, 8).requires_grad_(), reference(maps(30, 3, 8, 8), bands=True)
    for look in (lambda a: a, lambda a: a.movedim(1, -1)):
        look(kernels.realign(x, usual)).relu_().sum().backward()
    assert x.grad.isfinite().all()


def test_torch_approves_of_the_operator():
    x = maps(2, 3, 8, 8).requires_grad_()
    usual = reference(maps(30, 3, 8, 8), bands=True)
    residual = maps(2, 3, 8, 8, seed=1).requires_grad_()
    openness = torch.tensor([0.0, 0.5])
    for rest in ((None, None, False), (openness, None, True), (openness, residual, False), (None, residual, True)):
        torch.library.opcheck(torch.ops.trueup.realign.default, (x, usual, *rest))
    usual, residual = reference(maps(30, 4, 8, 8), bands=True), maps(2, 4, 8, 8, seed=1)
    torch.library.opcheck(
        torch.ops.trueup.realign_after_norm.default, (maps(2, 4, 8, 8), *NORM, usual, openness, residual, True)
    )
    for bands in (False, True):
        torch.library.opcheck(torch.ops.trueup.moments.default, (x.detach(), bands))


def test_no_sum_depends_on_where_in_memory_its_maps_lie():
    """A loop that adds up in the compiler's order and writes as well has another order where the two might overlap."""
    import numba
    from numba.core.dispatcher import Dispatcher

    from trueup.kernels import cpu, cpu_maps

    row = np.ones(99, np.float32)
    calls = {
        cpu._sum: (row, True),
        cpu_maps._sum: (row,),
        cpu_maps._sum_of_squares: (row,),
        cpu_maps._measure_block: (row, row, 0, 99, 0, 0),
    }
    compiled = [f for module in (cpu, cpu_maps) for f in vars(module).values() if isinstance(f, Dispatcher)]
    assert {f for f in compiled if f.targetoptions.get("fastmath")} == set(calls)
    for function, arguments in calls.items():
        again = numba.njit(fastmath=function.targetoptions["fastmath"])(function.py_func)  # a cached one shows no code
        again(*arguments)
        (code,) = again.inspect_llvm().values()
        assert "vector.body" in code, function
        assert "vector.memcheck" not in code, function
