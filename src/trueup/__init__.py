"""trueup: make a trained network robust at test time.

    targets = trueup.calibrate(model, clean_loader)  # learn what activations look like on clean images
    robust = trueup.correct(model, targets)          # a module like the model; weights shared, the model untouched
    logits = robust(images)

A rule decides how activations are moved: `Evidence`, whose setting calibration chooses, or `Correction`, the paper's.

The verbs live in files that begin with an underscore, because `trueup.correct` is the function.
"""

from trueup import functional
from trueup._calibrate import calibrate
from trueup._choose import choose
from trueup._correct import Corrected, correct
from trueup._measure import Shift, measure
from trueup._sites import sites
from trueup.graph import Site, TraceError
from trueup.monitor import Monitor
from trueup.rules import Correction, Evidence
from trueup.targets import Targets

__version__ = "0.2.0"
__all__ = [
    "Corrected",
    "Correction",
    "Evidence",
    "Monitor",
    "Shift",
    "Site",
    "Targets",
    "TraceError",
    "calibrate",
    "choose",
    "correct",
    "functional",
    "measure",
    "sites",
]
