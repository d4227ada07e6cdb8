"""Choose a model's default setting, without labels: one that is safe on clean images and useful on perturbed copies.

`perturb` makes the copies, `tune` learns weights, `search` names the candidates and has them tried, and
`trueup.targets.decision` picks among the trials. `trueup.choose` is another matter: `trueup._choose`.
"""

from trueup.decide.sample import ImageSample
from trueup.decide.search import decide

__all__ = ["ImageSample", "decide"]
