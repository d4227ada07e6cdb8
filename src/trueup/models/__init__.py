"""Source models: ResNets with batch, group or filter response norm, and their checkpoints."""

from trueup.models.norms import NORMS, TLU, FilterResponseNorm, Norm
from trueup.models.public import load_public
from trueup.models.resnet20 import ResNet20
from trueup.models.resnet50 import ResNet50

__all__ = ["NORMS", "TLU", "FilterResponseNorm", "Norm", "ResNet20", "ResNet50", "load_public"]
