"""Fast implementations of `trueup.functional`, on the CPU and on CUDA.

`dispatch` holds the public functions and chooses the backend: `plain` (torch's own operators), `cpu` (numba), `cuda`
(Triton) or `portable` (operators that every runtime has, for export). `backend` finds out which of them work on this
machine. No other part of trueup imports numba or triton.

`realign`, `moments` and `gate_values` are `functional.evidence` and `functional.gate` up to rounding. `correct` is
`functional.correct` from a histogram instead of a sort: **values that share a bin count as equal**. Each takes the mean
of the target over the ranks that its bin occupies, as equal values do in `functional.correct`. If the target t runs
from t[first] to t[last] over those ranks, a value's error is at most `step * (t[last] - t[first])`, plus
`step * (t[n-1] - t[0]) / (2 n)` if the mean is kept; docs/kernels.md derives this bound.
"""

from trueup.kernels.curve import curve_of
from trueup.kernels.dispatch import (
    Order,
    add,
    compile_together,
    correct,
    gate_values,
    load_backend,
    moments,
    quantile_rows,
    realign,
)
from trueup.kernels.fused_norms import BatchNorm, LayerNorm
from trueup.kernels.layout import rows_in_any_order
from trueup.kernels.threads import run_parallel

__all__ = [
    "BatchNorm",
    "LayerNorm",
    "Order",
    "add",
    "compile_together",
    "correct",
    "curve_of",
    "gate_values",
    "load_backend",
    "moments",
    "quantile_rows",
    "realign",
    "rows_in_any_order",
    "run_parallel",
]
