"""The backend in operators that every runtime has, for graphs that are compiled or exported.

Graphs from `torch.export`, `torch.onnx.export` or AOTInductor then run without trueup. Everything is float32 (float64
if the model is), nothing is searched, and constants are computed beforehand. What remains are a few small operators,
which a compiler fuses. The results are those of `trueup.functional` up to rounding. `in_ordinary_operators` in
`trueup.kernels.dispatch` decides when this backend runs.
"""

from trueup.kernels.portable.gate import GateConstants, gate_constants, gate_values
from trueup.kernels.portable.maps import MapConstants, map_constants, moments, realign
from trueup.kernels.portable.transport import Target, correct, target_of

__all__ = [
    "GateConstants",
    "MapConstants",
    "Target",
    "correct",
    "gate_constants",
    "gate_values",
    "map_constants",
    "moments",
    "realign",
    "target_of",
]
