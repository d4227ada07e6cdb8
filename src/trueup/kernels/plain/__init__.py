"""The backend in torch's own operators. It runs on any device and defines what the other backends compute."""

from trueup.kernels.plain.gate import gate_values
from trueup.kernels.plain.histogram import quantile_rows, transport_rows
from trueup.kernels.plain.maps import add_and_relu, moments, realign

__all__ = ["add_and_relu", "gate_values", "moments", "quantile_rows", "realign", "transport_rows"]
