"""Quantiles from histograms, against sorting."""

from __future__ import annotations

import pytest
import torch

from kernels.backends import backends
from kernels.test_histogram import ROWS
from trueup import functional
from trueup.kernels import bins, quantile_rows, rows_in_any_order
from trueup.kernels.bins import bin_of

quantiles = backends("quantile_rows")


@quantiles
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


@quantiles
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, where the interpreter meets NaN
def test_a_row_that_is_not_finite_has_no_quantiles(backend):
    for poison in (float("nan"), float("inf")):
        rows = torch.randn(3, 60)
        rows[1, 4] = poison
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
            assert bin_of(values[None], offset, signed=False)[0].equal(wide)


def test_layout_does_not_matter():
    a, levels = torch.randn(3, 4, 9, 9), functional.levels(17)
    for other in (a.to(memory_format=torch.channels_last), a.transpose(1, 3).contiguous().transpose(1, 3)):
        assert rows_in_any_order(other).data_ptr() == other.data_ptr()
        assert quantile_rows(rows_in_any_order(other), levels).equal(quantile_rows(rows_in_any_order(a), levels))
