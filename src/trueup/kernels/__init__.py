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
