"""The histogram method in Triton: rows divided into parts, the norm before, and rows of every layout and batch."""

from __future__ import annotations

import pytest
import torch

from kernels.backends import devices
from kernels.test_transport import norm_of
from trueup import functional
from trueup.kernels import curve_of, plain
from trueup.kernels.cuda import quantiles as quantile_kernel
from trueup.kernels.cuda import transport as kernel


@devices
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(
    ("n", "parts"),
    [
        (8192, 3),  # fewer segments than parts
        (24576, 3),  # as many, all full
        (20011, 2),  # a part is longer than another, and the last segment is not full
    ],
)
def test_a_row_in_parts_is_corrected_as_a_whole_one(device, relu, n, parts):
    x = torch.randn(2, n, generator=torch.Generator().manual_seed(n)).to(device)
    target = functional.levels(65) * 3 - (0 if relu else 1)
    curve = curve_of(target, functional.levels(65)).to(device)
    for keep, sparse in ((True, True), (False, False)):
        options = {"keep": keep, "sparse": sparse, "relu": relu}
        whole = kernel.transport_rows(x, curve, 0.7, parts=1, **options)
        assert kernel.transport_rows(x, curve, 0.7, parts=parts, **options).equal(whole)
        torch.testing.assert_close(whole, plain.transport_rows(x, curve, 0.7, **options), atol=2e-6, rtol=2e-6)


@devices
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("dtype", "channels", "pixels", "parts"),
    [
        (torch.float32, 16, 3, 1),  # fewest channels, a short row
        (torch.bfloat16, 64, 200, 2),  # the last segment is not full
        (torch.float16, 4096, 5, 2),  # most channels
        pytest.param(torch.float32, 512, 49, 3, marks=pytest.mark.gpu),
    ],
)
def test_triton_does_the_norm_before(device, dtype, add, channels, pixels, parts):
    generator, norm = torch.Generator().manual_seed(pixels), norm_of(channels, device)
    x, residual = torch.randn(2, 2, pixels, channels, generator=generator).to(device, dtype)
    a = norm(x.float().flatten(0, 1)).view(x.shape) + (residual.float() if add else 0)
    curve = curve_of(functional.levels(65) * 3, functional.levels(65)).to(device)
    options = {"relu": True, "norm": norm, "residual": residual.flatten(1) if add else None}
    for keep, sparse in ((True, True), (False, False)):
        wanted = plain.transport_rows(a.flatten(1), curve, 0.7, keep=keep, sparse=sparse, relu=True)
        whole = kernel.transport_rows(x.flatten(1), curve, 0.7, keep=keep, sparse=sparse, parts=1, **options)
        assert whole.dtype == dtype
        # Where rounding puts a value into the next bin, it moves by as much as the target rises within one.
        torch.testing.assert_close(whole.float(), wanted, atol=5e-3, rtol=torch.finfo(dtype).eps)
        far = (whole.float() - wanted).abs() > 3e-6 + torch.finfo(dtype).eps * wanted.abs()
        assert far.float().mean() < 0.01
        cut = kernel.transport_rows(x.flatten(1), curve, 0.7, keep=keep, sparse=sparse, parts=parts, **options)
        assert cut.equal(whole)


@devices
@pytest.mark.parametrize(
    ("dtype", "n", "parts"), [(torch.float32, 8192, 3), (torch.bfloat16, 24576, 3), (torch.float32, 20011, 2)]
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, where the interpreter meets NaN
def test_the_quantiles_of_a_row_in_parts_are_those_of_a_whole_one(device, dtype, n, parts):
    rows = torch.randn(3, n, generator=torch.Generator().manual_seed(n)).to(device, dtype)
    rows[1].relu_()
    rows[2, -1] = torch.nan
    levels = functional.levels(1100).to(device)
    levels = torch.cat([levels, levels[[5, 0, 3]]])  # in no order
    whole = quantile_kernel.quantile_rows(rows, levels, parts=1)
    assert quantile_kernel.quantile_rows(rows, levels, parts=parts)[:2].equal(whole[:2])
    torch.testing.assert_close(whole, plain.quantile_rows(rows.float(), levels), atol=1e-6, rtol=1e-6, equal_nan=True)
    assert (whole[1, :400] == 0).all()


@pytest.mark.gpu
def test_an_image_is_corrected_alike_in_a_batch_of_any_size():
    curve = curve_of(functional.levels(65) * 3, functional.levels(65)).cuda()
    rule = {"keep": True, "sparse": True, "relu": True}
    for n, channels in ((1000, 0), (16384, 0), (100352, 0), (200704, 0), (16384, 64), (100352, 512), (200704, 256)):
        x = torch.randn(300, n, device="cuda")
        options = {**rule, "norm": norm_of(channels, "cuda")} if channels else rule
        alone = kernel.transport_rows(x[:1], curve, 0.7, **options)
        for batch in (2, 60, 140, 300):
            assert kernel.transport_rows(x[:batch].contiguous(), curve, 0.7, **options)[:1].equal(alone)


@pytest.mark.gpu
def test_what_was_compiled_serves_other_rows_of_the_same_shape():
    options = {"keep": True, "sparse": True, "relu": True}
    for seed in range(3):  # the first call compiles, later ones launch what it left
        x = torch.randn(4, 50000, generator=torch.Generator().manual_seed(seed)).cuda()
        curve = curve_of(functional.levels(33) * (seed + 1), functional.levels(33)).cuda()
        for step in (0.3, 0.9):
            wanted = plain.transport_rows(x, curve, step, **options)
            torch.testing.assert_close(kernel.transport_rows(x, curve, step, **options), wanted, atol=1e-5, rtol=1e-5)
        unaligned = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
        assert kernel.transport_rows(unaligned, curve, 0.3, **options).equal(
            kernel.transport_rows(x, curve, 0.3, **options)
        )
