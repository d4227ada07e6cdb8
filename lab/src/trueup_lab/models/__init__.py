"""Source models: ResNets with batch, group or filter response norm, and their checkpoints."""

from trueup_lab.models.files import Record, read_models, read_record, save_models
from trueup_lab.models.norms import NORMS, TLU, FilterResponseNorm, Norm
from trueup_lab.models.public import load_public
from trueup_lab.models.resnet20 import ResNet20
from trueup_lab.models.resnet50 import ResNet50
from trueup_lab.models.zoo import load, names, record

__all__ = [
    "NORMS",
    "TLU",
    "FilterResponseNorm",
    "Norm",
    "Record",
    "ResNet20",
    "ResNet50",
    "load",
    "load_public",
    "names",
    "read_models",
    "read_record",
    "record",
    "save_models",
]
