"""The backend for the CPU, compiled by numba."""

from trueup.kernels.cpu.gate import gate_values
from trueup.kernels.cpu.histogram import quantile_rows, transport_rows
from trueup.kernels.cpu.maps import moments, realign

__all__ = ["gate_values", "moments", "quantile_rows", "realign", "transport_rows"]
