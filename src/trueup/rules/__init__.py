"""Rules as small frozen values with all their constants: `Evidence`, ours, and `Correction`, the paper's."""

from trueup.functional.paper import Location
from trueup.rules.correction import Correction, Method
from trueup.rules.evidence import Evidence

Rule = Correction | Evidence

__all__ = ["Correction", "Evidence", "Location", "Method", "Rule"]
