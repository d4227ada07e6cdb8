"""Rules as small frozen values: `Evidence`, ours, and `Correction`, the paper's, each with all its constants."""

from trueup.functional.paper import Location
from trueup.rules.correction import Algorithm, Correction
from trueup.rules.evidence import Evidence

Rule = Correction | Evidence

__all__ = ["Algorithm", "Correction", "Evidence", "Location", "Rule"]
