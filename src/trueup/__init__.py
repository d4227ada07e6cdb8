"""trueup: make a trained network robust at test time.

    targets = trueup.calibrate(model, clean_loader)  # learn what activations look like on clean images
    robust = trueup.correct(model, targets)          # a module like the model; weights shared, the model untouched
    logits = robust(images)

A rule decides how activations are moved: `Evidence`, whose setting calibration chooses, or `Correction`, the paper's.

The verbs live in files that begin with an underscore, because `trueup.correct` is the function. Names are imported when
they are first used, so that the command line answers `trueup --help` without waiting for torch.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
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
_ROOMS = {"decide", "functional", "graph", "kernels", "monitor", "report", "rules", "targets"}
_HOMES = {
    "_calibrate": ("calibrate",),
    "_choose": ("choose",),
    "_correct": ("Corrected", "correct"),
    "_measure": ("Shift", "measure"),
    "_sites": ("sites",),
    "graph": ("Site", "TraceError"),
    "monitor": ("Monitor",),
    "rules": ("Correction", "Evidence"),
    "targets": ("Targets",),
}


def __getattr__(name: str) -> _typing.Any:
    """Import a public name from its home (PEP 562)."""
    if name in _ROOMS:
        return _importlib.import_module(f"trueup.{name}")
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(_importlib.import_module(f"trueup.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'trueup' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names, whether or not they were used yet."""
    return sorted({*globals(), *__all__})
