"""Ordinary operators, as exported graphs have them, against the specification."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from trueup import Correction, functional, kernels
from trueup.functional import evidence
from trueup.functional.gate import Gate, fit
from trueup.functional.gate import gate_values as opened
from trueup.kernels import curve_of, plain, portable
from trueup.kernels.cpu import gate_values as on_cpu
from trueup.kernels.portable.transport import _transport as optimal_map


def values(*shape, seed=0, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def reference(clean, base, *, bands):
    found = evidence.moments(clean, bands=bands)[:, [0, 2, 3] if bands else [0, 1]].double()
    floor = (1e-3 * found.mean(dim=0).abs()).clamp(min=1e-24)
    return evidence.reference_of(evidence.statistics(found, floor), floor, strength=0.08, base=base)


@pytest.mark.parametrize("gate", [None, torch.tensor([0.0, 0.1, 0.3, 0.7, 1.0])], ids=["open", "gated"])
@pytest.mark.parametrize("base", [0.0, 0.1])
@pytest.mark.parametrize(
    ("shape", "bands"),
    [((4, 9, 11), True), ((4, 9, 11), False), ((4, 7), False), ((4, 2, 3, 5), False), ((4,), False)],
    ids=str,
)
def test_realigning_agrees_with_the_specification(shape, bands, base, gate):
    clean = values(60, *shape)
    clean[:, 3] = 2.0  # a channel that never varies: no evidence counts against it
    usual = reference(clean, base, bands=bands)
    x = 2 * values(5, *shape, seed=1) + 0.7
    x[0, 0], x[1, 1], x[2, 2] = 3.0, torch.nan, torch.inf
    x[3, 0] *= 30
    constants = portable.map_constants(usual)
    if not base:
        constants = constants._replace(base=None)
    wanted = evidence.realign(x.double(), usual, gate).float()
    found = portable.realign(x, constants, gate, channels=1, may_close=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
    moved = portable.realign(x.movedim(1, -1), constants, gate, channels=-1, may_close=True)
    torch.testing.assert_close(moved.movedim(-1, 1), wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
    if gate is not None:
        assert found[0].equal(x[0])  # to the last bit where the gate is closed
    torch.testing.assert_close(
        portable.moments(x[3:], bands=bands),
        evidence.moments(x[3:].double(), bands=bands).float(),
        rtol=1e-4,
        atol=1e-5,
    )


def gate_of(clean, floors):
    """A gate on the features of two norms, with ties, a constant feature and few held-out images."""
    seen = torch.cat([functional.gate.features(m, f) for m, f in zip(clean, floors, strict=True)], dim=1)
    seen[:, 0] = seen[:, 0].round()
    seen[:, 1] = 0.5
    return fit(seen)


@pytest.mark.parametrize("budget", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("backend", ["portable", "numba"])
def test_gate_values_agree_with_the_specification(backend, budget):
    clean = [evidence.moments(values(300, 3, 9, 9), bands=True), evidence.moments(values(300, 4, 6, seed=2))]
    floors = [torch.full((5, 3), 1e-3).double(), torch.full((2, 4), 1e-3).double()]
    gate = gate_of(clean, floors)
    scales = torch.linspace(1, 2, 40)[:, None, None]
    moments = [m[:40] * scales for m in clean]
    moments[0][0, 0, 0], moments[1][1, 1, 1], moments[0][2, 0, 0] = torch.nan, torch.inf, 3.0
    ours = (
        portable.gate_values(moments, portable.gate_constants(gate, floors), budget, 20.0, 0.05)
        if backend == "portable"
        else on_cpu(moments, floors, gate, budget, 20.0, 0.05)
    )
    wanted = plain.gate_values(moments, floors, gate, budget, 20.0, 0.05)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-5)
    if budget == 0.05:
        assert ours.min() < 0.2
        assert ours.max() > 0.99
    none_held = gate._replace(held=gate.held[:0])
    assert isinstance(none_held, Gate)
    assert opened(none_held.p_values(values(2, len(gate.centre)).double()), budget, 20).max() <= 1


def test_channels_that_are_dead_in_many_images_open_the_gate_as_in_the_specification():
    """Their moments are equal in all those images, and so are many knots of the gate."""
    floor = torch.full((5, 6), 1e-3).double()

    def moments(count, seed):
        drawn = torch.Generator().manual_seed(seed)
        found = torch.rand(count, 5, 6, generator=drawn) + 0.1
        dead = torch.rand(count, 6, generator=drawn) < 0.4
        found[:, 0][dead] = 0.3
        return torch.cat([found[:, :1], found[:, 1:].masked_fill(dead[:, None], 0.0)], dim=1)

    gate = fit(functional.gate.features(moments(300, 0), floor))
    some = moments(100, 1)
    found = portable.gate_values([some], portable.gate_constants(gate, [floor]), 0.3, 20.0, 0.0)
    torch.testing.assert_close(found, plain.gate_values([some], [floor], gate, 0.3, 20.0, 0.0), rtol=0, atol=0.02)


def test_autocast_does_not_change_the_gate_of_a_compiled_model():
    clean, floor = evidence.moments(values(300, 3, 9, 9), bands=True), torch.full((5, 3), 1e-3).double()
    gate = gate_of([clean], [floor])
    constants, moments = portable.gate_constants(gate, [floor]), clean[:40] * torch.linspace(1, 1.4, 40)[:, None, None]

    def combine(moments):
        return kernels.gate_values([moments], [floor], gate, 0.05, 20.0, 0.0, constants=lambda: constants)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = torch.compile(combine, backend="eager", fullgraph=True)(moments)
        wanted = combine(moments)
    assert wanted.unique().numel() > 10
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


def test_compiled_moments_are_as_precise_as_those_of_eager_mode():
    """A gate multiplies their rounding by hundreds."""
    x = (values(4, 8, 64, 64) + 1).contiguous(memory_format=torch.channels_last)  # summed pixel by pixel
    with torch.inference_mode():
        found = torch.compile(lambda x: portable.moments(x, bands=True), fullgraph=True)(x)
        torch.testing.assert_close(found.double(), evidence.moments(x.double(), bands=True), rtol=6e-7, atol=2e-7)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("location", ["keep", "match"])
@pytest.mark.parametrize("levels", [None, functional.levels(129)], ids=["even", "dense ends"])
def test_the_papers_rule_agrees_with_the_specification(levels, location, sparse):
    rule = replace(Correction(lambda1=1, lambda2=0.2), location=location, sparse=sparse)
    target = values(129, seed=3).abs().sort().values
    x = values(3, 5, 20, 20, seed=1).relu()
    x[0, 0, :3] = 0.25  # a run of equal values
    x[1, 0, 0, 0] = torch.nan
    ordinary = portable.target_of(curve_of(target, levels), levels)
    found = portable.correct(x, ordinary, rule.step, location=location, sparse=sparse)
    wanted = functional.correct(x.double(), target.double(), rule.step, location=location, sparse=sparse, levels=levels)
    torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_runs_of_equal_values_are_counted_exactly_whatever_the_precision_of_the_values():
    """Float16 has whole numbers up to 2048, as float32 has up to 16,777,216: a row may have more values."""
    row = torch.cat([torch.arange(-6000, 6000).half().unique(), torch.full((3000,), 7000.0).half()])[None]
    target = values(row.shape[1]).sign().half()
    found, wanted = optimal_map(row, target), functional.transport(row, target)
    assert row.unique().numel() > 5000
    assert found[row != 7000].equal(wanted[row != 7000])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)


def test_levels_that_calibration_does_not_make_have_no_ordinary_form():
    levels = torch.tensor([0.0, 0.1, 1.0], dtype=torch.float64)
    assert portable.target_of(curve_of(torch.arange(3.0), levels), levels) is None


def test_a_compiler_keeps_the_pooled_maps_in_the_layout_of_the_maps():
    """Otherwise every loop over them transposes, which took longer than the rule."""
    x = torch.randn(1, 96, 112, 112).contiguous(memory_format=torch.channels_last)
    norm = kernels.BatchNorm(*(torch.rand(96) for _ in range(4)), 1e-5)
    constants = portable.map_constants(torch.ones(5, 3, 96, dtype=torch.float64))

    def site(x):
        return portable.realign(norm(x), constants, None, channels=1, may_close=False)

    with torch.inference_mode():
        _, code = run_and_get_code(torch.compile(site, fullgraph=True), x)
    assert "avg_pool2d" in code[0]
    assert "transpose_mxn" not in code[0]
