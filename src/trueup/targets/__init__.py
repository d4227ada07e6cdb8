"""What is known of clean data: one target per activation and norm, their sums over images, and the file they live in."""

from trueup.targets.fingerprint import Fingerprint
from trueup.targets.targets import ActivationTarget, NormTarget, Targets

__all__ = ["ActivationTarget", "Fingerprint", "NormTarget", "Targets"]
