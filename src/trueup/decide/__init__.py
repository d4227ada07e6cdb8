"""Choose a model's default setting, without labels: one that is safe on clean images and useful on perturbed copies.

`perturb` makes the copies, `tune` learns weights, `search` names the candidates and has them tried, and
`trueup.targets.decision` picks among the trials. `trueup.rules.limits` says which settings are safe. `trueup.choose`
does not use this package; see `trueup._choose`.
"""

from trueup.decide.sample import ImageSample
from trueup.decide.search import decide

__all__ = ["ImageSample", "decide"]
