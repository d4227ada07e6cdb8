"""The correction at the speed of memory: the same rule as `trueup.functional`, from histograms instead of a sort.

Ranks are only needed as finely as the target tells them apart. So values are counted in bins, and **values that share a
bin count as equal**: each takes the mean of the target over the ranks that the bin takes up, as equal values do in
`functional.correct`. No value ends up farther than `step * (t[last] - t[first])` from its exact place, t[first] and
t[last] being the ends of the target t over those ranks, or, where the mean is kept, that and
`step * (t[n-1] - t[0]) / (2 n)`; docs/performance.md derives it.

One file a backend (`plain`: torch's own operators, on any device; `cpu`: numba; `triton`: CUDA), each with a function
`correct_rows` of the same meaning; `operator` chooses among them. `realign` is the rule of evidence, likewise, with
`cpu_maps` for the CPU and `triton_maps` for CUDA; `openness` is its gate, with `triton_gate`. The only place that
imports numba or triton.
"""

from trueup.kernels.curve import curve_of
from trueup.kernels.layout import alike, as_rows
from trueup.kernels.norm import Norm
from trueup.kernels.openness import openness
from trueup.kernels.operator import can_follow_norm, correct, correct_after_norm, has_histogram
from trueup.kernels.quantile import quantile_rows
from trueup.kernels.realign import moments, realign

__all__ = [
    "Norm",
    "alike",
    "as_rows",
    "can_follow_norm",
    "correct",
    "correct_after_norm",
    "curve_of",
    "has_histogram",
    "moments",
    "openness",
    "quantile_rows",
    "realign",
]

# shim
from typing import Any, Literal

from trueup import functional as _f
from trueup.rules import Correction as _C

BatchNorm = Norm
Order = Literal["value first", "residual first", "in place"]
from trueup.kernels import moments as moments
from trueup.kernels import realign as _realign_old
from trueup.kernels.realign import realign as _realign0


def finish(value, residual, order, relu):
    if residual is not None:
        if order == "in place":
            value += residual
        else:
            value = residual + value if order == "residual first" else value + residual
    return value.relu() if relu else value


def realign(a, reference, gate=None, *, norm=None, residual=None, order="value first", relu=False):
    along = residual if alike(a, residual) else None
    whole = residual is None or along is not None
    out = _realign0(a, reference, gate, residual=along, relu=relu and whole, norm=norm)
    return out if whole else finish(out, residual, order, relu)


class _R:
    def __init__(self, step, location, sparse, method):
        self.step, self.location, self.sparse, self.method = step, location, sparse, method


def transport(
    a,
    curve,
    step,
    *,
    location,
    sparse,
    exact=False,
    even_levels=False,
    norm=None,
    residual=None,
    order="value first",
    relu=False,
):
    rule = _R(step, location, sparse, "sort" if exact else "auto")
    if relu and norm is not None and can_follow_norm(a, norm, residual, rule):
        return correct_after_norm(a, norm, residual, curve, rule)
    a = a if norm is None else norm(a)
    a = finish(a, residual, order, False)
    if has_histogram(rule, a):
        return correct(a, curve, rule, relu=relu)
    return _f.correct(
        a.relu() if relu else a,
        curve[1],
        step,
        location=location,
        sparse=sparse,
        levels=None if even_levels else curve[0],
    )


def gate_values(moments, floors, gate, budget, ramp, least):
    return openness(moments, floors, gate, budget, least)
