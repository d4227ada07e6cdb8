"""Models of timm: one small model of every family, and popular ones."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from trueup.graph import Inputs
from zoo_models.case import ZooCase, images

# Small before large, by the words that names use.
SIZES = (
    "atto femto pico nano xxs xxt xxsmall xxtiny xs xsmall xt mini tiny t0 m0 b0 s0 s1 l1 a0 lite0 18 small 19 21 26"
)
# Models that are tried in a smaller form, because theirs is made for images of 768 x 768 pixels and more: their name,
# the size of the images, and arguments of their constructor.
SMALLER: dict[str, tuple[str, int, dict[str, Any]]] = {
    "deepseek_vit": ("deepseek_vit_412m", 112, {"depth": 3}),
    "gemma4_vit": ("gemma4_vit_167m", 192, {"depth": 3}),
    "hieradet_sam2": ("sam2_hiera_tiny", 224, {}),
    "mobilenetv5": ("mobilenetv5_300m", 128, {}),
    "qwen3_vit": ("qwen3_vit_88m", 192, {"depth": 3}),
    "vision_transformer_sam": ("samvit_base_patch16_224", 224, {"depth": 4, "global_attn_indexes": (1, 3)}),
}
POPULAR = [
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "seresnet18",
    "resnest14d",
    "res2net50_26w_4s",
    "regnety_004",
    "densenet121",
    "vgg16_bn",
    "inception_v3",
    "inception_v4",
    "xception41",
    "dla34",
    "dpn68",
    "hrnet_w18_small",
    "cspdarknet53",
    "repvgg_a0",
    "mobilenetv2_100",
    "mobilenetv3_small_100",
    "mobilenetv3_large_100",
    "tf_mobilenetv3_small_100",
    "mobilenetv4_conv_small",
    "mnasnet_100",
    "fbnetc_100",
    "ghostnet_100",
    "efficientnet_b0",
    "efficientnet_lite0",
    "tf_efficientnet_b0",
    "tf_efficientnetv2_b0",
    "efficientnetv2_rw_t",
    "convnext_tiny",
    "convnextv2_atto",
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "deit_tiny_patch16_224",
    "beit_base_patch16_224",
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "maxvit_tiny_tf_224",
    "coatnet_0_rw_224",
    "mobilevit_s",
    "mobilevitv2_100",
    "edgenext_xx_small",
    "efficientformer_l1",
    "poolformer_s12",
    "pvt_v2_b0",
]


def timm_cases() -> Iterator[ZooCase]:
    """One small model of each of timm's modules, and popular ones."""
    timm = import_timm()
    sizes = SIZES.split()

    def rank(name: str) -> tuple[int, int, str]:
        words = [word if word in sizes else word.rstrip("0123456789") for word in name.replace(".", "_").split("_")]
        return min((sizes.index(word) for word in words if word in sizes), default=len(sizes)), len(name), name

    def make(name: str, size: int | None, options: dict[str, Any]) -> Callable[[], tuple[nn.Module, Inputs, str]]:
        def build() -> tuple[nn.Module, Inputs, str]:
            model = timm.create_model(name, pretrained=False, **options)
            channels, height, width = model.pretrained_cfg["input_size"]
            height, width = (size or height, size or width)
            smaller = "".join(f", {key} {value}" for key, value in options.items())
            return model, images(channels, height, width), f"{height} x {width}{smaller}"

        return build

    seen = set()
    for module in timm.list_modules():
        if names := [name for name in timm.list_models(module=module) if not name.startswith("test_")]:
            name, size, options = SMALLER.get(module, (min(names, key=rank), None, {}))
            seen.add(name)
            yield ZooCase("timm", module, name, make(name, size, options))
    for name in POPULAR:
        if name not in seen and timm.is_model(name):
            yield ZooCase("timm", "popular", name, make(name, None, {}))


def import_timm() -> Any:
    """Import timm, with empty modules in torchvision's place where that does not import."""

    class Anything(type):
        def __getattr__(cls, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything(name, (), {})  # one of its own: they are keys of dictionaries

    class StandIn(metaclass=Anything):
        pass

    class Empty(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return StandIn

    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        parts = ("", ".transforms", ".transforms.functional", ".ops", ".ops.misc", ".models", ".datasets")
        for name in (f"torchvision{part}" for part in (*parts, ".models.feature_extraction")):
            module = Empty(name)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = module
            if "." in name:
                setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    import timm

    return timm
