"""trueup: bring a trained network's activations back into line, at test time, image by image.

    targets = trueup.calibrate(model, clean_loader)  # one pass over clean data
    robust = trueup.correct(model, targets)          # a module like the model, weights shared, the model untouched
    logits = robust(images)

What moves activations is a rule: `Evidence`, the default where a model has norms, or `Correction`, the paper's.

The files of the verbs begin with an underscore because `trueup.correct` is the function.
"""

from trueup import functional
from trueup._calibrate import calibrate
from trueup._choose import choose
from trueup._correct import correct
from trueup._measure import Shift, measure
from trueup._sites import sites
from trueup.rules import Correction
from trueup.rules import Evidence
from trueup.graph import Options, Site, TraceError
from trueup.targets import NormTarget, ActivationTarget, Targets

__version__ = "0.1.0"
__all__ = [
    "NormTarget",
    "Correction",
    "Evidence",
    "Options",
    "Shift",
    "Site",
    "ActivationTarget",
    "Targets",
    "TraceError",
    "calibrate",
    "choose",
    "correct",
    "functional",
    "measure",
    "sites",
]
