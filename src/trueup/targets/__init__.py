"""Statistics of clean data: a target per activation and per norm, their accumulation over images, and their file."""

from trueup.targets.accumulate import Accumulator
from trueup.targets.activation import ActivationTarget
from trueup.targets.decision import Decision, Trial
from trueup.targets.fingerprint import Fingerprint, is_quantised
from trueup.targets.norm import NormTarget
from trueup.targets.sites import Kind, Select, Site, Sites, check_select, listed
from trueup.targets.values import Targets

__all__ = [
    "Accumulator",
    "ActivationTarget",
    "Decision",
    "Fingerprint",
    "Kind",
    "NormTarget",
    "Select",
    "Site",
    "Sites",
    "Targets",
    "Trial",
    "check_select",
    "is_quantised",
    "listed",
]
