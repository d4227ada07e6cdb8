"""Calibration from histograms, against calibration by sorting."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trueup


class TestCalibration:
    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GELU()).eval()

    def test_is_as_good_as_sorting(self):
        model, images = self.model(), [torch.randn(8, 3, 24, 24) for _ in range(3)]
        exact, fast = (trueup.calibrate(model, images, method=method, decide=False) for method in ("sort", "auto"))
        for name in exact.activations:
            scale = exact.activations[name].target.abs().max()
            torch.testing.assert_close(
                fast.activations[name].target, exact.activations[name].target, atol=3e-4 * scale, rtol=1e-3
            )
            torch.testing.assert_close(
                fast.activations[name].spread, exact.activations[name].spread, atol=1e-3 * scale, rtol=0.02
            )
            torch.testing.assert_close(
                fast.activations[name].sample, exact.activations[name].sample, atol=2e-3 * scale.item(), rtol=0.01
            )
            assert 0.2 * exact.activations[name].loss < fast.activations[name].loss < 2 * exact.activations[name].loss
            assert not fast.activations[name].target.equal(exact.activations[name].target)  # two ways indeed

    def test_states_three_quarters_of_the_error_of_a_smooth_curve(self):
        """The error of a chord is a parabola; the triangle of the same height has three quarters of its area."""
        x = torch.linspace(0, 1, 40_000).square().view(1, 1, 200, 200)
        exact, fast = (
            trueup.calibrate(nn.Sequential(nn.ReLU()), [x], resolution=9, method=method, decide=False).activations["0"]
            for method in ("sort", "auto")
        )
        assert fast.compression_error == pytest.approx(0.75 * exact.compression_error, rel=0.1)

    def test_is_exact_where_rows_are_short_or_double_or_all_is_kept(self):
        model, images = self.model(), torch.randn(4, 3, 9, 9)
        for x, options in ((images, {}), (images.double(), {}), (images.repeat(1, 1, 3, 3), {"resolution": None})):
            network = model.to(x.dtype)
            exact, fast = (trueup.calibrate(network, [x], method=m, **options, decide=False) for m in ("sort", "auto"))
            assert all(exact.activations[name].total.equal(fast.activations[name].total) for name in exact.activations)

    def test_does_not_depend_on_the_split(self):
        model, images = self.model(), torch.randn(12, 3, 24, 24)
        whole, parts = (
            trueup.calibrate(model, [images], decide=False),
            trueup.calibrate(model, images.split(5), decide=False),
        )
        for name in whole.activations:
            torch.testing.assert_close(
                whole.activations[name].target, parts.activations[name].target, atol=1e-4, rtol=1e-3
            )

    def test_an_unknown_method_is_refused(self):
        with pytest.raises(ValueError, match="auto, sort, histogram"):
            trueup.calibrate(self.model(), [torch.randn(2, 3, 9, 9)], method="quick", decide=False)
