"""The backend for CUDA, compiled by Triton."""

from trueup.kernels.cuda.compile_ahead import compile_together
from trueup.kernels.cuda.gate import gate_values
from trueup.kernels.cuda.launch import launch_nothing
from trueup.kernels.cuda.maps import moments, realign
from trueup.kernels.cuda.quantiles import quantile_rows
from trueup.kernels.cuda.tokens import realign_after_layer_norm
from trueup.kernels.cuda.transport import transport_rows

__all__ = [
    "compile_together",
    "gate_values",
    "launch_nothing",
    "moments",
    "quantile_rows",
    "realign",
    "realign_after_layer_norm",
    "transport_rows",
]
