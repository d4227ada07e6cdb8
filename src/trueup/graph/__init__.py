"""Sites: finding where a forward pass applies activation functions and norms, and placing modules there.

The only room that knows torch.fx.
"""

from trueup.graph.activations import Activation
from trueup.graph.clone import clone, device_of
from trueup.graph.fusion import batch_norm_of
from trueup.graph.instrument import Instrumented, Reading
from trueup.graph.ordinary import leaf
from trueup.graph.probe import Probe
from trueup.graph.site import KINDS, Kind, Select, Site, Sites
from trueup.graph.trace import Trace, TraceError, trace

__all__ = [
    "KINDS",
    "Activation",
    "Instrumented",
    "Kind",
    "Probe",
    "Reading",
    "Select",
    "Site",
    "Sites",
    "Trace",
    "TraceError",
    "batch_norm_of",
    "clone",
    "device_of",
    "leaf",
    "trace",
]
