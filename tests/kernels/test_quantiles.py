"""Quantiles from histograms, against sorting; and calibration with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trueup
from kernels.backends import INTERPRETED
from kernels.test_specification import ROWS
from trueup import functional
from trueup.kernels import as_rows, bins, plain, quantile_rows


def _numba(rows, levels):
    from trueup.kernels import cpu

    return cpu.quantile_rows(rows, levels)


def _triton(rows, levels):
    from trueup.kernels import triton_quantiles

    return triton_quantiles.quantile_rows(rows, levels)


def _on_gpu(function):
    return lambda rows, levels: function(rows.cuda(), levels.cuda()).cpu()


BACKENDS = [
    pytest.param(plain.quantile_rows, id="plain"),
    pytest.param(_numba, id="numba"),
    *([pytest.param(_triton, id="triton")] if INTERPRETED else []),
    pytest.param(_on_gpu(plain.quantile_rows), id="plain-cuda", marks=pytest.mark.gpu),
    pytest.param(_on_gpu(_triton), id="triton-cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_order_statistics_are_found_to_the_width_of_a_bin(backend, rows):
    for a in (rows, rows.relu()):
        levels = functional.levels(33)
        exact = functional.quantile(a.double().sort(dim=1).values, levels)
        got = backend(a, levels).double()
        assert got[:, [0, -1]].equal(exact[:, [0, -1]])
        assert (got.diff(dim=1) >= 0).all()
        largest = a.abs().amax(dim=1, keepdim=True).double()
        # A quantile between two order statistics may be off by as much as the larger of them.
        above = functional.quantile(a.double().sort(dim=1).values.abs(), levels).maximum(exact.abs())
        neighbours = torch.nn.functional.max_pool1d(above[:, None], 3, 1, 1)[:, 0]
        assert ((got - exact).abs() <= neighbours / 100 + largest / 4096 + 2e-38).all()  # denormals are not told apart


def test_a_row_that_is_not_finite_has_no_quantiles():
    for poison in (float("nan"), float("inf")):
        rows = torch.randn(3, 60)
        rows[1, 4] = poison
        for backend in (plain.quantile_rows, _numba):
            got = backend(rows, functional.levels(9))
            assert got[1].isnan().all()
            assert got[[0, 2]].isfinite().all()


def test_edges_are_where_bins_change():
    for exponent in (8, 60, 124, 200, 248):
        offset = torch.tensor([exponent], dtype=torch.int32)
        edges = bins.lower_edges(offset)
        assert (edges[edges.isfinite()].diff() >= 0).all()
        assert edges[0] == 0
        (wide,) = ((edges[1:] > edges[:-1]) & edges[1:].isfinite()).nonzero(as_tuple=True)
        for part in (0.01, 0.5, 0.99):
            values = torch.lerp(edges[wide], edges[wide + 1], part)
            assert plain.bin_of(values[None], offset, signed=False)[0].equal(wide)


def test_layout_does_not_matter():
    a, levels = torch.randn(3, 4, 9, 9), functional.levels(17)
    for other in (a.to(memory_format=torch.channels_last), a.transpose(1, 3).contiguous().transpose(1, 3)):
        assert as_rows(other).data_ptr() == other.data_ptr()
        assert quantile_rows(as_rows(other), levels).equal(quantile_rows(as_rows(a), levels))


class TestCalibration:
    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GELU()).eval()

    def test_is_as_good_as_sorting(self):
        model, images = self.model(), [torch.randn(8, 3, 24, 24) for _ in range(3)]
        exact, fast = (trueup.calibrate(model, images, method=method) for method in ("sort", "auto"))
        for name in exact:
            scale = exact[name].target.abs().max()
            torch.testing.assert_close(fast[name].target, exact[name].target, atol=3e-4 * scale, rtol=1e-3)
            torch.testing.assert_close(fast[name].spread, exact[name].spread, atol=1e-3 * scale, rtol=0.02)
            torch.testing.assert_close(fast[name].sample, exact[name].sample, atol=2e-3 * scale.item(), rtol=0.01)
            assert 0.2 * exact[name].loss < fast[name].loss < 2 * exact[name].loss
            assert not fast[name].target.equal(exact[name].target)  # two ways indeed

    def test_is_exact_where_rows_are_short_or_double_or_all_is_kept(self):
        model, images = self.model(), torch.randn(4, 3, 9, 9)
        for x, options in ((images, {}), (images.double(), {}), (images.repeat(1, 1, 3, 3), {"resolution": None})):
            network = model.to(x.dtype)
            exact, fast = (trueup.calibrate(network, [x], method=m, **options) for m in ("sort", "auto"))
            assert all(exact[name].total.equal(fast[name].total) for name in exact)

    def test_does_not_depend_on_the_split(self):
        model, images = self.model(), torch.randn(12, 3, 24, 24)
        whole, parts = trueup.calibrate(model, [images]), trueup.calibrate(model, images.split(5))
        for name in whole:
            torch.testing.assert_close(whole[name].target, parts[name].target, atol=1e-4, rtol=1e-3)

    def test_an_unknown_method_is_refused(self):
        with pytest.raises(ValueError, match="auto, sort, histogram"):
            trueup.calibrate(self.model(), [torch.randn(2, 3, 9, 9)], method="quick")
