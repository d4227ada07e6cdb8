"""Source models: ResNets with batch, group or filter response norm, other architectures, and their files."""

from trueup_lab.models.architectures import ARCHITECTURES
from trueup_lab.models.convnext import ConvNeXt
from trueup_lab.models.efficientnet_lite import EfficientNetLite
from trueup_lab.models.espnet import ESPNet
from trueup_lab.models.files import Record, read_models, read_record, save_models
from trueup_lab.models.mobilenet_v2 import MobileNetV2
from trueup_lab.models.norms import NORMS, TLU, FilterResponseNorm, NormName
from trueup_lab.models.public import load_public
from trueup_lab.models.resnet20 import ResNet20
from trueup_lab.models.resnet50 import ResNet50
from trueup_lab.models.unet import UNet
from trueup_lab.models.vgg import VGG
from trueup_lab.models.vit import ViT
from trueup_lab.models.zoo import load, names, record

__all__ = [
    "ARCHITECTURES",
    "NORMS",
    "TLU",
    "VGG",
    "ConvNeXt",
    "ESPNet",
    "EfficientNetLite",
    "FilterResponseNorm",
    "MobileNetV2",
    "NormName",
    "Record",
    "ResNet20",
    "ResNet50",
    "UNet",
    "ViT",
    "load",
    "load_public",
    "names",
    "read_models",
    "read_record",
    "record",
    "save_models",
]
