"""Transport: gradients, layouts, which path is taken, and what torch makes of the operators."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from trueup import functional
from trueup.kernels import BatchNorm, correct, curve_of, dispatch
from trueup.kernels.layout import has_channels_last, norm_keeps_layout

TARGET = torch.linspace(-0.5, 4, 33).sort().values
CURVE = curve_of(TARGET)
KEEP = {"step": 0.8, "location": "keep", "sparse": True}
rules = pytest.mark.parametrize(
    "rule",
    [
        KEEP,
        {**KEEP, "sparse": False},
        {**KEEP, "step": 0.25, "location": "match"},
        {"step": 1.0, "location": "match", "sparse": False},
        {**KEEP, "step": 0.0},
    ],
    ids=["keep", "keep, zeros too", "match", "full", "none"],
)


class TestGradients:
    @rules
    @pytest.mark.parametrize("relu", [False, True])
    @pytest.mark.parametrize("shape", [(3, 40), (2, 3, 4, 4), (4,)])
    def test_are_those_of_the_sort(self, rule, relu, shape):
        torch.manual_seed(0)
        x = torch.randn(shape)
        x.view(-1)[::5] = 0
        if len(shape) == 2:
            x[1, 3] = float("inf")
        weight = torch.randn(shape)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        (correct(ours, CURVE, **rule, relu=relu) * weight).nan_to_num(posinf=0).sum().backward()
        exact = functional.correct(theirs.relu() if relu else theirs, TARGET, **rule)
        (exact * weight).nan_to_num(posinf=0).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)

    def test_the_target_has_none(self):
        curve = CURVE.clone().requires_grad_()
        correct(torch.randn(2, 8, requires_grad=True), curve, **KEEP).sum().backward()
        assert curve.grad is None

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_have_the_precision_of_the_activations(self, dtype):
        x = torch.randn(2, 8, dtype=dtype, requires_grad=True)
        correct(x, CURVE, **KEEP).sum().backward()
        assert x.grad.dtype == dtype


def layouts():
    torch.manual_seed(0)
    plain = torch.randn(4, 3, 6, 6)
    yield "contiguous", plain
    yield "channels last", plain.contiguous(memory_format=torch.channels_last)
    yield "transposed", plain.transpose(2, 3).contiguous().transpose(2, 3)
    yield "strided", torch.stack([plain, plain], dim=-1)[..., 0]
    yield "batch inside", plain.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
    yield "rows that share memory", plain[:1].expand(4, -1, -1, -1)
    yield "channels last, one image", plain[:1].contiguous(memory_format=torch.channels_last)
    yield "one channel", plain[:, :1].contiguous(memory_format=torch.channels_last)
    yield "vector", plain[:, 0, 0, 0]
    yield "a view with an offset", torch.randn(5, 3, 6, 6)[1:]


class TestLayout:
    @pytest.mark.parametrize("relu", [False, True])
    @pytest.mark.parametrize(("name", "x"), list(layouts()), ids=[name for name, _ in layouts()])
    def test_does_not_matter_and_is_kept(self, name, x, relu):
        before = x.clone()
        out = correct(x, CURVE, **KEEP, relu=relu)
        wanted = correct(x.clone(memory_format=torch.contiguous_format), CURVE, **KEEP, relu=relu)
        torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-6)  # a mean is summed in another order
        assert out.stride() == torch.empty_like(x).stride()
        assert x.equal(before)
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()

    @pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 3, 2, 2), (1, 1), (1,)])
    def test_nothing_and_next_to_nothing(self, shape):
        assert correct(torch.ones(shape), CURVE, **KEEP).shape == shape


class TestIdentity:
    def test_a_zero_step_returns_the_same_bits_in_memory_of_its_own(self):
        a = torch.tensor([[0.0, -0.0, 1e-45, -1.0, float("nan"), float("inf")]])
        out = correct(a, CURVE, **{**KEEP, "step": 0.0})
        assert out.view(torch.int32).equal(a.view(torch.int32))
        assert out.data_ptr() != a.data_ptr()
        assert correct(a, CURVE, **{**KEEP, "step": 0.0}, relu=True).equal(a.relu()) or a.isnan().any()


class TestTorch:
    @pytest.mark.parametrize("relu", [False, True])
    def test_the_operator_keeps_torchs_rules(self, relu):
        for x in (torch.randn(2, 30), torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)):
            arguments = (x.requires_grad_(), CURVE, 0.8, True, True, relu)
            torch.library.opcheck(torch.ops.trueup.transport.default, arguments)

    def test_compiled_it_gives_the_same(self):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: correct(x * 2, CURVE, **KEEP, relu=True) + 1, fullgraph=True)
        for x in (torch.randn(3, 4, 5, 5), torch.randn(3, 4, 5, 5).contiguous(memory_format=torch.channels_last)):
            torch.testing.assert_close(compiled(x), correct(x * 2, CURVE, **KEEP, relu=True) + 1)
            assert compiled(x).stride() == x.stride()

    @pytest.mark.parametrize("even_levels", [True, False])
    @pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, True), (torch.float64, False)])
    def test_exact_and_double_precision_are_sorted(self, dtype, exact, even_levels):
        levels = None if even_levels else functional.levels(33)
        x, curve = torch.randn(3, 4, 5, 5, dtype=dtype), curve_of(TARGET, levels)
        for relu in (False, True):
            found = correct(x, curve, **KEEP, exact=exact, even_levels=even_levels, relu=relu)
            wanted = functional.correct(x.relu() if relu else x, curve[1], **KEEP, levels=levels)
            assert found.equal(wanted)

    def test_forward_mode_derivatives_are_those_of_the_sort(self):
        x, v = torch.randn(3, 40), torch.randn(3, 40)
        _, found = torch.func.jvp(lambda a: correct(a, CURVE, **KEEP, even_levels=True, relu=True), (x,), (v,))
        _, wanted = torch.func.jvp(lambda a: functional.correct(a.relu(), CURVE[1], **KEEP), (x,), (v,))
        torch.testing.assert_close(found, wanted)
        assert found.any()

    def test_without_numba_torchs_own_operators_do_it(self):
        code = (
            "import sys; sys.modules['numba'] = None; import importlib.util as u; found = u.find_spec;"
            "u.find_spec = lambda name, *a: None if name == 'numba' else found(name, *a);"
            "import torch; from trueup.kernels import correct, curve_of;"
            "a, curve = torch.tensor([[0.0, 3.0, 1.0, 1.0]]), curve_of(torch.tensor([0.0, 2, 4, 6]));"
            "print(correct(a, curve, 1.0, location='match', sparse=True).tolist())"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == "[[0.0, 6.0, 3.0, 3.0]]"

    def test_numba_is_imported_only_when_a_cpu_tensor_comes(self):
        code = "import sys, trueup; print('numba' in sys.modules, 'triton' in sys.modules)"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout.split()[0] == "False"


def norm_of(channels, device="cpu"):
    some = torch.rand(channels, generator=torch.Generator().manual_seed(channels)).to(device) + 0.5
    return BatchNorm(some - 1, some, some.flip(0) - 0.7, 1 - some, 1e-3)


def with_channels_last():
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 64), (2, 16, 5, 7), (1, 16, 9, 1), (2, 32, 1, 1), (2, 16, 3, 4, 5)):
        x = torch.randn(shape[0], *shape[2:], shape[1], generator=generator)
        yield x.movedim(-1, 1)


@pytest.fixture(params=[False, True], ids=["in steps", "one operator"])
def fused(request, monkeypatch):
    """Whether a norm is part of the operator, as on CUDA."""
    if request.param:
        monkeypatch.setattr(dispatch, "_transport_fuses_norm", lambda _: True)


class TestAfterNorm:
    def test_the_operator_keeps_torchs_rules(self):
        for x in with_channels_last():
            for residual in (None, x * 2):
                arguments = (x, *norm_of(x.shape[1]), residual, CURVE, 0.8, True, True)
                torch.library.opcheck(torch.ops.trueup.transport_after_norm.default, arguments)

    @pytest.mark.parametrize("relu", [False, True])
    @pytest.mark.parametrize("order", ["value first", "residual first", "in place"])
    @pytest.mark.parametrize("kind", ["none", "like it", "number", "wider", "broadcast"])
    def test_is_the_rule_of_the_norm_the_sum_and_the_relu(self, fused, relu, order, kind):
        torch.manual_seed(0)
        x, norm = torch.randn(3, 16, 5, 7).contiguous(memory_format=torch.channels_last), norm_of(16)
        residual = {
            "none": None,
            "like it": torch.empty_like(x).copy_(x.flip(0)),
            "number": 2,
            "wider": torch.randn(3, 16, 5, 7, dtype=torch.float64),
            "broadcast": torch.randn(16, 1, 1),
        }[kind]
        a = norm(x)
        if residual is not None and order == "in place":
            a += residual
        elif residual is not None:
            a = a + residual if order == "value first" else residual + a
        before = x.clone()
        found = correct(x, CURVE, **KEEP, norm=norm, residual=residual, order=order, relu=relu, even_levels=True)
        assert x.equal(before)
        assert found.dtype == a.dtype
        wanted = functional.correct(a.relu() if relu else a, TARGET, **KEEP)
        torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.02)  # some values share a bin
        in_steps = correct(a, CURVE, **KEEP, relu=relu, even_levels=True)
        torch.testing.assert_close(found, in_steps, atol=1e-6, rtol=1e-6)  # a mean is summed in another order

    @pytest.mark.parametrize("which", ["x", "residual", "weight"])
    def test_gradients_go_through_the_norm_and_past_it(self, fused, which):
        found = []
        for together in (True, False):
            norm, generator = norm_of(16), torch.Generator().manual_seed(0)
            x, residual = torch.randn(2, 3, 16, 5, 7, generator=generator)
            given = {"x": x.clone(), "residual": residual.clone(), "weight": norm.weight.clone()}
            given[which].requires_grad_()
            norm = norm._replace(weight=given["weight"])
            if together:
                out = correct(given["x"], CURVE, **KEEP, norm=norm, residual=given["residual"], relu=True)
            else:
                out = correct(norm(given["x"]) + given["residual"], CURVE, **KEEP, relu=True)
            found.append(torch.autograd.grad(out.square().sum(), given[which])[0])
        assert found[0].equal(found[1])
        assert found[0].any()

    @pytest.mark.parametrize("images", [1, 2])
    def test_a_layout_counts_as_channels_last_for_one_image_as_for_more(self, images):
        maps = torch.randn(images, 16, 8, 6)
        last = maps.to(memory_format=torch.channels_last)
        for a, wanted in ((last, (True, True)), (maps, (False, True)), (last[:, :, ::2], (False, False))):
            assert (has_channels_last(a), norm_keeps_layout(a)) == wanted
        for a in (last.chunk(2, 2)[0], maps.chunk(2, 1)[0], maps.transpose(2, 3)):
            assert not has_channels_last(a)
            assert not norm_keeps_layout(a)
        tokens = torch.randn(images, 10, 16)
        assert not norm_keeps_layout(tokens.transpose(1, 2))
        assert norm_keeps_layout(tokens)
        assert has_channels_last(torch.randn(images, 16))

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_on_cuda_it_is_one_operator_and_does_not_depend_on_the_batch(self, dtype):
        for x in with_channels_last():
            x = x.cuda().to(dtype).repeat(200, *(1,) * (x.dim() - 1)).movedim(1, -1).contiguous().movedim(-1, 1)
            norm, curve = norm_of(x.shape[1], "cuda"), CURVE.cuda()
            for residual in (None, torch.empty_like(x).copy_(x.flip(0))):
                assert dispatch._transport_fuses_norm(x)
                found = correct(x, curve, **KEEP, norm=norm, residual=residual, relu=True)
                assert found.stride() == x.stride()
                a = norm(x.float()) + (0 if residual is None else residual.float())
                wanted = correct(a, curve, **KEEP, relu=True)
                torch.testing.assert_close(found.float(), wanted, atol=1e-2, rtol=torch.finfo(dtype).eps)
                for images in (1, 3):
                    some = None if residual is None else residual[:images].clone()
                    alone = correct(x[:images].clone(), curve, **KEEP, norm=norm, residual=some, relu=True)
                    assert alone.equal(found[:images])
