"""Rules as small frozen values: `Evidence`, ours, and `Correction`, the paper's, each with every constant of its own."""

from trueup.rules.correction import Correction, Location, Method
from trueup.rules.evidence import Evidence

Rule = Correction | Evidence

__all__ = ["Correction", "Evidence", "Location", "Method", "Rule"]
