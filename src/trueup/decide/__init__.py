"""Choose the setting that is safe and useful for a model, without labels, from clean images and perturbed copies."""

from trueup.decide.sample import ImageSample
from trueup.decide.search import decide

__all__ = ["ImageSample", "decide"]
