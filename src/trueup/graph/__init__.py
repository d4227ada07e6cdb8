"""Sites: where a forward pass applies an activation function or a norm; finding them, placing something there.

The only place that knows torch.fx.
"""

from trueup.graph.fusion import Order, add, norm_of
from trueup.graph.instrument import Reader, Instrumented, clone, device_of, find
from trueup.graph.site import Options, Site
from trueup.graph.trace import TraceError

__all__ = [
    "Options",
    "Order",
    "Reader",
    "Instrumented",
    "Site",
    "TraceError",
    "add",
    "clone",
    "device_of",
    "find",
    "norm_of",
]
