"""The operator: gradients, layouts, and what torch makes of it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from trueup import Correction, functional
from trueup.kernels import correct, curve_of, has_histogram

TARGET = torch.linspace(-0.5, 4, 33).sort().values
CURVE = curve_of(TARGET)
KEEP = Correction(1, 0.2)
rules = pytest.mark.parametrize(
    "rule",
    [
        KEEP,
        Correction(1, 0.2, sparse=False),
        Correction(0.5, 0.5, location="match"),
        Correction(1, 0, location="match", sparse=False),
        Correction(0),
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
        (correct(ours, CURVE, rule, relu=relu) * weight).nan_to_num(posinf=0).sum().backward()
        exact = functional.correct(theirs.relu() if relu else theirs, TARGET, rule)
        (exact * weight).nan_to_num(posinf=0).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)

    def test_the_target_has_none(self):
        curve = CURVE.clone().requires_grad_()
        correct(torch.randn(2, 8, requires_grad=True), curve, KEEP).sum().backward()
        assert curve.grad is None

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_have_the_precision_of_the_activations(self, dtype):
        x = torch.randn(2, 8, dtype=dtype, requires_grad=True)
        correct(x, CURVE, KEEP).sum().backward()
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
        out = correct(x, CURVE, KEEP, relu=relu)
        wanted = correct(x.clone(memory_format=torch.contiguous_format), CURVE, KEEP, relu=relu)
        torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-6)  # a mean is summed in another order
        assert out.stride() == torch.empty_like(x).stride()
        assert x.equal(before)
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()

    @pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 3, 2, 2), (1, 1), (1,)])
    def test_nothing_and_next_to_nothing(self, shape):
        assert correct(torch.ones(shape), CURVE, KEEP).shape == shape


class TestIdentity:
    def test_a_zero_step_returns_the_same_bits_in_memory_of_its_own(self):
        a = torch.tensor([[0.0, -0.0, 1e-45, -1.0, float("nan"), float("inf")]])
        out = correct(a, CURVE, Correction(0))
        assert out.view(torch.int32).equal(a.view(torch.int32))
        assert out.data_ptr() != a.data_ptr()
        assert correct(a, CURVE, Correction(0), relu=True).equal(a.relu()) or a.isnan().any()


class TestTorch:
    @pytest.mark.parametrize("relu", [False, True])
    def test_the_operator_keeps_torchs_rules(self, relu):
        for x in (torch.randn(2, 30), torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)):
            arguments = (x.requires_grad_(), CURVE, 0.8, True, True, relu)
            torch.library.opcheck(torch.ops.trueup.correct.default, arguments)

    def test_compiled_it_gives_the_same(self):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: correct(x * 2, CURVE, KEEP, relu=True) + 1, fullgraph=True)
        for x in (torch.randn(3, 4, 5, 5), torch.randn(3, 4, 5, 5).contiguous(memory_format=torch.channels_last)):
            torch.testing.assert_close(compiled(x), correct(x * 2, CURVE, KEEP, relu=True) + 1)
            assert compiled(x).stride() == x.stride()

    def test_which_activations_have_a_histogram(self):
        assert has_histogram(Correction(), torch.ones(1))
        assert has_histogram(Correction(method="histogram"), torch.ones(1, dtype=torch.bfloat16))
        assert not has_histogram(Correction(method="sort"), torch.ones(1))
        assert not has_histogram(Correction(method="histogram"), torch.ones(1, dtype=torch.float64))

    def test_without_numba_torchs_own_operators_do_it(self):
        code = (
            "import sys; sys.modules['numba'] = None; import importlib.util as u; found = u.find_spec;"
            "u.find_spec = lambda name, *a: None if name == 'numba' else found(name, *a);"
            "import torch; from trueup import Correction; from trueup.kernels import correct, curve_of;"
            "a = torch.tensor([[0.0, 3.0, 1.0, 1.0]]);"
            "print(correct(a, curve_of(torch.tensor([0.0, 2, 4, 6])), Correction(1, 0, location='match')).tolist())"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == "[[0.0, 6.0, 3.0, 3.0]]"

    def test_numba_is_imported_only_when_a_cpu_tensor_comes(self):
        code = "import sys, trueup; print('numba' in sys.modules, 'triton' in sys.modules)"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout.split()[0] == "False"
