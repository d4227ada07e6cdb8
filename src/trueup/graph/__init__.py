"""Find where a forward pass applies activation functions and norms (its sites), and place modules there.

No other package of the library uses torch.fx.
"""

from trueup.graph.activations import Activation
from trueup.graph.cloning import clone, device_of, unwrapped
from trueup.graph.examination import examine
from trueup.graph.fusion import norm_of
from trueup.graph.inputs import Inputs, is_list_of_images, rebuilt, tensors_in
from trueup.graph.instrument import Instrumented, Reading
from trueup.graph.overwrite import is_unseen
from trueup.graph.placed_module import PlacedModule
from trueup.graph.probe import Probe
from trueup.graph.tracing import Trace, TraceError, trace
from trueup.targets import Kind, Select, Site, Sites, check_select

__all__ = [
    "Activation",
    "Inputs",
    "Instrumented",
    "Kind",
    "PlacedModule",
    "Probe",
    "Reading",
    "Select",
    "Site",
    "Sites",
    "Trace",
    "TraceError",
    "check_select",
    "clone",
    "device_of",
    "examine",
    "is_list_of_images",
    "is_unseen",
    "norm_of",
    "rebuilt",
    "tensors_in",
    "trace",
    "unwrapped",
]
