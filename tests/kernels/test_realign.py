"""The fast rule of evidence against its specification."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from trueup import kernels
from trueup.functional import evidence


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
    for gate in (None, torch.tensor([0.0, 0.1, 0.5, 1.0, 0.0])):
        x, y = ((3 * maps(5, 4, 8, 8, seed=1)).requires_grad_() for _ in range(2))
        kernels.realign(x, usual, gate).square().sum().backward()
        evidence.realign(y, usual, gate).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-3)


def apart(x, usual, gate=None, *, residual=None, relu=False):
    """The fused operator's steps, one after the other."""
    out = kernels.realign(x, usual, gate)
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
    for gate in (None, torch.linspace(0, 1, len(x))):
        out = kernels.realign(x, usual, gate, residual=residual, relu=relu)
        assert out.dtype == dtype
        assert out.equal(apart(x, usual, gate, residual=residual, relu=relu))
        if gate is not None:
            closed = x[gate == 0] if residual is None else x[gate == 0] + residual[gate == 0]
            assert out[gate == 0].equal(closed.relu() if relu else closed)
    one = slice(0, 1)
    alone = kernels.realign(x[one], usual, gate[one], residual=None if residual is None else residual[one], relu=relu)
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


@after
@pytest.mark.parametrize(
    ("shape", "bands"),
    [
        ((2, 1, 9, 13), True),  # fewer channels than are copied at a time
        ((3, 8, 9, 13), True),  # as many
        ((3, 19, 9, 13), True),  # some are left over
        ((2, 16, 5, 1), True),  # one column
        ((2, 24, 7, 7), False),
        ((2, 12, 50), False),  # tokens
        ((2, 12, 3, 4, 5), False),  # volumes
        ((9, 40, 64, 64), True),  # enough for several threads
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 3])
def test_with_channels_last_results_have_the_same_bits(shape, bands, threads, add, relu):
    def last(a):
        return a.movedim(1, -1).contiguous().movedim(-1, 1)

    x, residual = 2 * maps(*shape, seed=1) + 0.5, maps(*shape, seed=2) if add else None
    norm, opened = norm_of(shape[1]), torch.linspace(0, 1, shape[0])
    usual = reference(norm(maps(30, *shape[1:])), bands=bands)
    x[0, 0, 0, ...], x[1].view(-1)[3] = torch.nan, -0.0
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # With tokens, torch does the norm, and rounds it differently in another layout.
        norms = [None, norm] if x.dim() > 3 else [None]
        for gate, fused in itertools.product([None, opened], norms):
            with torch.inference_mode():
                options = {"norm": fused, "relu": relu, "ceiling": 0.9 if relu else None}
                wanted = kernels.realign(x, usual, gate, residual=residual, **options)
                beside = None if residual is None else last(residual)
                found = kernels.realign(last(x), usual, gate, residual=beside, **options)
            assert found.stride() == last(x).stride()
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
            assert found.signbit().equal(wanted.signbit())
    finally:
        torch.set_num_threads(before)


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
    for gate in (None, torch.tensor([0.0, 0.1, 0.5, 1.0, 0.0])):
        x, y = ((3 * maps(5, 4, 8, 8, seed=1)).requires_grad_() for _ in range(2))
        r, s = (maps(5, 4, 8, 8, seed=2).requires_grad_() if add else None for _ in range(2))
        kernels.realign(x, usual, gate, residual=r, relu=relu).square().sum().backward()
        wanted = evidence.realign(y, usual, gate)
        wanted = wanted if s is None else wanted + s
        (wanted.relu() if relu else wanted).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-3)
        if r is not None:
            torch.testing.assert_close(r.grad, s.grad, rtol=1e-3, atol=1e-3)
            only = maps(5, 4, 8, 8, seed=2).requires_grad_()  # the model is frozen up to here
            kernels.realign(x.detach(), usual, gate, residual=only, relu=relu).square().sum().backward()
            assert only.grad.equal(r.grad)


def test_a_ceiling_limits_values_and_gradients():
    usual = reference(maps(30, 4, 8, 8), bands=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x, y = ((3 * maps(5, 4, 8, 8, seed=1)).to(dtype).requires_grad_() for _ in range(2))
        found = kernels.realign(x, usual, relu=True, ceiling=1.5)
        wanted = kernels.realign(y, usual).clamp(0, 1.5)
        assert found.equal(wanted)
        assert (found == 1.5).any()
        found.square().sum().backward()
        wanted.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-3)


def norm_of(channels):
    """A batch norm that is not the identity in any channel; one gain is negative."""
    steps = torch.arange(float(channels))
    return kernels.BatchNorm(steps, 1 + steps, torch.linspace(-0.5, 2, channels), steps - 1, 1e-3)


NORM = norm_of(4)


@after
@pytest.mark.parametrize("wide", [False, True], ids=["like it", "of another kind"])
def test_a_norm_is_done_before_and_a_sum_and_a_relu_after(add, relu, wide):
    usual, x = reference(maps(30, 4, 8, 8), bands=True), 3 * maps(5, 4, 8, 8, seed=1)
    residual = maps(5, 4, 8, 8, seed=2).to(torch.float64 if wide else torch.float32) if add else None
    out = kernels.realign(x, usual, residual=residual, relu=relu, norm=NORM)
    assert out.equal(apart(NORM(x), usual, residual=residual, relu=relu))


@pytest.mark.parametrize(
    ("shape", "bands"),
    [
        ((1, 1, 1, 1), True),  # smallest
        ((2, 3, 1, 5), True),  # one row
        ((2, 3, 6, 1), True),  # one column
        ((5, 4, 9, 13), True),  # no power of two
        ((64, 16, 32, 32), True),  # enough for several threads
        ((5, 4, 7, 7), False),
        ((4, 3, 7), False),  # a sequence
    ],
    ids=str,
)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_a_norm_in_the_same_pass_agrees_with_the_specification(shape, bands, last):
    norm, x = norm_of(shape[1]), 2 * maps(*shape, seed=1) + 0.5
    usual, opened = reference(norm(maps(30, *shape[1:])), bands=bands), torch.linspace(0, 1, shape[0])
    x = x.to(memory_format=torch.channels_last) if last and x.dim() == 4 else x
    exact = norm_of(shape[1])._replace(**{k: t.double() for k, t in zip(norm._fields, norm.tensors, strict=False)})
    with torch.inference_mode():
        for gate in (None, opened):
            out = kernels.realign(x, usual, gate, norm=norm)
            wanted = evidence.realign(exact(x.double()), usual, gate).float()
            torch.testing.assert_close(out, wanted, atol=3e-5, rtol=1e-4)
            assert out.stride() == norm(x).stride()
            alone = [
                kernels.realign(x[k : k + 1], usual, None if gate is None else gate[k : k + 1], norm=norm)
                for k in range(min(3, len(x)))
            ]
            assert torch.cat(alone).equal(out[:3])
            assert out.equal(kernels.realign(norm(x), usual, gate))


def test_a_norm_that_compiled_code_cannot_read_is_torchs():
    usual, x = reference(maps(30, 4, 8, 8), bands=True), 3 * maps(5, 4, 8, 8, seed=1)
    apart = maps(4, 2)[:, 0]
    with torch.inference_mode():
        for norm in (NORM._replace(bias=apart), NORM._replace(weight=NORM.weight.as_subclass(Marked))):
            assert kernels.realign(x, usual, norm=norm).equal(kernels.realign(norm(x), usual))


class Marked(Tensor):
    """A tensor that may do anything."""


@after
@pytest.mark.parametrize("bands", [False, True])
@pytest.mark.parametrize("gate", [None, torch.tensor([0.0, 0.1, 0.5, 1.0, 0.0])], ids=["no gate", "gate"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_where_nothing_else_reads_its_input_the_result_may_take_its_memory(bands, gate, last, add, relu):
    layout = {"memory_format": torch.channels_last if last else torch.contiguous_format}
    x, usual = (3 * maps(5, 4, 8, 8, seed=1)).contiguous(**layout), reference(maps(30, 4, 8, 8), bands=bands)
    x[1, 2, 3, 4], x[2, 1, 0, 0], x[0, 0, 0, 0] = torch.nan, torch.inf, -0.0
    options = {"residual": maps(5, 4, 8, 8, seed=2).contiguous(**layout) if add else None, "relu": relu}
    for norm in (None, NORM):
        given = x.clone()
        with torch.inference_mode():
            wanted = kernels.realign(x, usual, gate, norm=norm, **options)
            found = kernels.realign(given, usual, gate, norm=norm, may_overwrite=lambda: True, **options)
            assert found.data_ptr() == given.data_ptr()
            assert found.stride() == wanted.stride()
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
            assert found.signbit().equal(wanted.signbit())
            kernels.realign(x, usual, gate, may_overwrite=lambda: False, **options)
        given, before = x.clone(), x.clone()
        kernels.realign(given, usual, gate, norm=norm, may_overwrite=lambda: True, **options)  # gradients are on
        torch.testing.assert_close(given, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("which", ["x", "residual", "weight"])
def test_gradients_go_through_a_norm_and_past_it(which):
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
    gate = torch.tensor([0.0, 0.5])
    for rest in ((None, None, False), (gate, None, True), (gate, residual, False), (None, residual, True)):
        torch.library.opcheck(torch.ops.trueup.realign.default, (x, usual, *rest))
    usual, residual = reference(maps(30, 4, 8, 8), bands=True), maps(2, 4, 8, 8, seed=1)
    torch.library.opcheck(
        torch.ops.trueup.realign_after_norm.default, (maps(2, 4, 8, 8), *NORM, usual, gate, residual, True)
    )
    for bands in (False, True):
        torch.library.opcheck(torch.ops.trueup.moments.default, (x.detach(), bands))


@pytest.mark.parametrize("bands", [False, True])
def test_results_do_not_depend_on_where_in_memory_the_maps_lie(bands):
    """Sums are vectorised in the compiler's order, which must not depend on alignment."""
    x, usual = maps(1, 2, 40, 50), reference(maps(30, 2, 40, 50), bands=bands)
    curve = kernels.curve_of(torch.linspace(0, 3, 33))
    found = []
    for offset in (0, 1, 3, 8):
        moved = torch.empty(x.numel() + offset)[offset:].view(x.shape).copy_(x)
        corrected = kernels.correct(moved, curve, 0.7, location="keep", sparse=True)
        found.append((kernels.moments(moved, bands=bands), kernels.realign(moved, usual), corrected))
    torch.testing.assert_close(found[0][0], evidence.moments(x.double(), bands=bands).float())
    for other in found[1:]:
        assert all(a.equal(b) for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize("order", ["value first", "residual first", "in place"])
@pytest.mark.parametrize("residual", [2, 0.5, maps(5, 4, 8, 8).double(), maps(4, 1, 1)], ids=str)
def test_a_residual_is_added_in_the_order_of_the_model(order, residual):
    usual, x = reference(maps(30, 4, 8, 8), bands=True), 3 * maps(5, 4, 8, 8, seed=1)
    alone = kernels.realign(x, usual)
    if order == "in place":
        wanted = alone.clone()
        wanted += residual
    else:
        wanted = alone + residual if order == "value first" else residual + alone
    out = kernels.realign(x, usual, residual=residual, order=order, relu=True)
    assert out.dtype == wanted.dtype
    assert out.equal(wanted.relu())


@pytest.mark.parametrize("residual", [None, maps(5, 8, 8, 4), 2.0, maps(4)], ids=lambda r: type(r).__name__)
def test_channels_may_lie_in_another_dimension(residual):
    usual, x = reference(maps(30, 4, 8, 8), bands=True), 3 * maps(5, 8, 8, 4, seed=1)
    out = kernels.realign(x, usual, residual=residual, relu=True, channels=3)
    wanted = kernels.realign(x.movedim(3, 1), usual).movedim(1, 3)
    wanted = wanted if residual is None else wanted + residual
    assert out.equal(wanted.relu())


def test_forward_mode_derivatives_are_those_of_the_specification():
    usual, x, v = reference(maps(30, 4, 8, 8), bands=True), 3 * maps(5, 4, 8, 8, seed=1), maps(5, 4, 8, 8, seed=2)
    _, found = torch.func.jvp(lambda a: kernels.realign(a, usual, residual=a, relu=True, norm=NORM), (x,), (v,))
    _, wanted = torch.func.jvp(lambda a: (evidence.realign(NORM(a), usual) + a).relu(), (x,), (v,))
    torch.testing.assert_close(found, wanted)
    assert found.any()
